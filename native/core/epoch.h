// An epoch over the live rows: each row is drawn once. Every draw takes the next stretch. The state lies in memory that
// several processes may share, so that their samplers can divide one epoch among them.
//
//   memory   one page: EpochPage
//
// There are two copies of the state, and a word that selects the current one. A change writes the other copy first, then the
// word. If a process dies at any instruction, the state is the old one or the new one, and needs no recovery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "control.h"
#include "index.h"
#include "shared_mutex.h"

namespace engram {

struct EpochState {
  std::uint64_t key;      // of the random order
  std::uint64_t rows;     // number of live rows when the epoch began
  std::uint64_t visited;  // rows drawn so far
};

struct EpochPage {
  char magic[8];  // "engpass\1", as stored
  Word current;   // which state is current: 0 or 1
  EpochState states[2];
  SharedMutex mutex;
};
static_assert(sizeof(EpochPage) <= kPage);

class RowEpoch : public Index {
 public:
  static constexpr std::uint64_t kBytes = kPage;

  /// Into zeroed memory of kBytes.
  static void format(std::span<std::byte> memory);

  /// As Priorities::reset_mutex.
  static void reset_mutex(std::span<std::byte> memory);

  /// A view of formatted memory, which must outlive it. Throws std::invalid_argument: not such memory.
  explicit RowEpoch(std::span<std::byte> memory);

  /// Ranks [start, start + count) of the epoch of that key over `rows`.
  struct Stretch {
    std::uint64_t key, rows, start, count;
    bool last;
  };
  /// The next n of `rows` rows, or fewer at the end of the epoch. A new epoch, in the order of `key`, begins when none are
  /// left or the number of rows has changed. `whole`: a rest smaller than n is skipped; n <= rows.
  Stretch next(std::uint64_t key, std::uint64_t rows, std::uint64_t n, bool whole);

  /// Throws Damaged: the memory holds no such state.
  EpochState state() const;
  /// Throws std::invalid_argument: more visited than there are.
  void set(const EpochState& state);

  /// In the child of a fork, for private memory: a thread of the parent may have held it.
  void after_fork();

  // An epoch depends on the number of rows only.
  void written(const std::int64_t*, std::uint64_t, std::uint64_t) override {}
  void edited(const std::int64_t*, std::uint64_t, std::uint64_t, std::span<const std::uint64_t>, std::uint64_t) override {}
  void lost(const std::int64_t*, std::uint64_t) override {}
  void emptied() override { set({}); }

 private:
  EpochState current() const;
  void put(const EpochState& state);

  EpochPage* page_;
};

}  // namespace engram
