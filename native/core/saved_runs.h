// What a checkpoint asks of all rows, in one pass or less: which steps belong together, and where rows of a lane lie by their items.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "store.h"

namespace engram {

/// What rows say of trajectories, [n] each; null: no field says it.
struct RowMarks {
  const std::byte* ids = nullptr;  // [n, id_bytes]: other bytes are another trajectory
  std::uint64_t id_bytes = 0;
  const std::uint8_t* ends = nullptr;    // the last step
  const std::uint8_t* cut = nullptr;     // the last step, as the trajectory was cut short
  const std::uint8_t* starts = nullptr;  // the first step
};

/// Steps of a lane, or of one of its columns, that belong together.
struct SavedRun {
  static constexpr std::int64_t kHasFirst = 1, kHasLast = 2, kTruncated = 4, kOpen = 8;

  std::int64_t lane;
  std::int64_t begin, end;  // position of the first step, and the one behind the last
  std::int64_t time;        // the ticket of the last step; at most that of the next run
  std::int64_t flags;
};

/// The runs of all lanes, by lane and column, the oldest first. `lanes`: position and live rows of each. `numbers`: of n rows, 0 of those
/// that hold nothing. Throws std::invalid_argument: lanes that such rows do not have. Cost: O(n).
std::vector<SavedRun> runs_of(std::span<const std::int64_t> lanes, std::uint64_t lane_length, std::uint64_t columns, const std::int64_t* numbers,
                              std::uint64_t n, const RowMarks& marks);

/// Rows of a lane by their age.
struct RowsByAge {
  std::uint64_t lane, oldest, live;  // row oldest + i, from 0 again behind the live ones, is the i-th
  const std::int64_t* numbers;       // tickets of the lane's live rows; 0 of those that hold nothing
};

/// For each of some offsets, the first of n places whose own offset is that one or a larger one; n: there is none. `offset_of(place)`: they
/// ascend, and a place without one never gets one. Cost: O(log n) calls for each offset, fewer where they ascend, and one for each place
/// without an offset.
std::vector<std::int64_t> ranks_of(std::uint64_t n, const std::function<std::optional<std::uint64_t>(std::uint64_t)>& offset_of,
                                   std::span<const std::int64_t> offsets);

/// For each of some offsets, how many rows lie before the oldest one whose items of a group begin there or behind it: all that are live, where
/// none does. Rows that have other tickets, or no items, are passed over. Items lie in rings. Throws std::invalid_argument: a lane or a
/// group that the store does not have. Cost: as of ranks_of.
std::vector<std::int64_t> rows_from(const Store& store, std::uint64_t group, const RowsByAge& rows, std::span<const std::int64_t> offsets);

}  // namespace engram
