// Windows of trajectories, read out of a store: chosen, copied, and others chosen where a row moved meanwhile.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "priorities.h"
#include "store.h"
#include "trajectories.h"

namespace engram {

/// Chooses up to n windows, fewer where there are no more; `attempt` numbers the choices for one batch.
using ChooseWindows = std::function<Drawn(std::uint64_t n, std::uint64_t attempt)>;

/// As Trajectories::choose_again.
using ChooseAgain = std::function<bool(const Window& window, Drawn& drawn)>;

/// OutputBuffer for rows of windows.
struct WindowMemory {
  Batch fields;
  std::int64_t* rows;
  std::int64_t* numbers;  // of their tickets
};

/// Allocates memory for so many rows; memory that was allocated before is no longer used.
using Allocate = std::function<WindowMemory(std::uint64_t rows)>;

/// Reads fields `which` of n windows, one behind the other; with `padded` each takes as many places as the spec has steps, its
/// last step repeated. Meanwhile each needs as many places as the longest of them. Returns their steps. Throws Stalled: some
/// moved at every try for 5 s. `again`, if there is one: a window that moved keeps its place for half of that, as long as it is there.
std::vector<Steps> read_windows(const Store& store, std::span<const std::uint64_t> which, const ChooseWindows& choose,
                                std::uint64_t n, const WindowSpec& spec, bool padded, const Allocate& allocate,
                                const ChooseAgain& again = {});

/// n windows whose anchors are drawn by priority, with replacement, among the rows where one may lie: a pure
/// function of key, tree, table and tickets. Empty if there is none. O(rows) where hardly any row of high priority may begin
/// a window, else O(n).
Drawn draw_anchored(const Priorities& priorities, Trajectories& table, std::uint64_t key, std::uint64_t n,
                    const WindowSpec& spec);

/// The windows of n anchors that are drawn by priority among all rows: none for those where no window may lie. Of several stores, the
/// store of each of these has to be chosen again.
Drawn propose_anchored(const Priorities& priorities, Trajectories& table, std::uint64_t key, std::uint64_t n,
                       const WindowSpec& spec);

/// n windows, of which the first ones are those that `newest` takes, and the rest those that `choose` does.
Drawn newest_first(Trajectories& table, std::span<std::int64_t> taken, std::uint64_t n, const WindowSpec& spec,
                   const std::function<Drawn(std::uint64_t n)>& choose);

/// The same, but the first ones are those that `completed` hands out.
Drawn completed_first(Trajectories& table, std::span<std::int64_t> next, std::uint64_t n, const WindowSpec& spec,
                      const std::function<Drawn(std::uint64_t n)>& choose);

}  // namespace engram
