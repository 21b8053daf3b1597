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
  std::uint64_t key;        // of the random order
  std::uint64_t rows;       // ranks of the epoch: of each lane as many rows as the fullest one had when it began
  std::uint64_t visited;    // ranks drawn or passed over so far
  std::uint64_t begun = 0;  // number of the next write when it began: rows of later ones are not in it; 0: it is not known
};

struct EpochPage {
  struct Stored {
    std::uint64_t key, rows, visited;
  };
  char magic[8];  // "engpass\1", as stored
  Word current;   // which state is current: 0 or 1
  Stored states[2];
  SharedMutex mutex;
  std::uint64_t begun[2];  // of each state; 0 in pages of versions before
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

  /// Ranks [start, start + count) of the epoch of that key over `rows`, which holds what was written before `begun`.
  struct Stretch {
    std::uint64_t key, rows, start, count;
    bool last;
    std::uint64_t begun;
  };
  /// The next n ranks, or fewer at the end of the epoch. A new epoch over `rows` ranks, in the order of `key`, begins when none are
  /// left. With n = 0 none are taken. `whole`: a rest smaller than n is skipped; n <= rows. `begun`: number of the next write, looked at before the rows.
  /// Not `skips`: the rest behind this batch is not skipped yet, as some of these ranks may hold nothing of the epoch any more.
  Stretch next(std::uint64_t key, std::uint64_t rows, std::uint64_t n, bool whole, std::uint64_t begun = 0, bool skips = true);

  /// The next n ranks of the epoch of that key, or fewer; none if another one has begun.
  Stretch more(std::uint64_t key, std::uint64_t n);

  /// Ranks [from, to) of the epoch of that key hold nothing of it any more, or are taken. False, and no effect: another call has taken some
  /// of them.
  bool pass_over(std::uint64_t key, std::uint64_t from, std::uint64_t to);

  /// Throws Damaged: the memory holds no such state.
  EpochState state() const;
  /// Throws std::invalid_argument: more visited than there are.
  void set(const EpochState& state);

  /// In the child of a fork, for private memory: a thread of the parent may have held it.
  void after_fork();

  // What a row holds the draw looks at.
  void written(const std::int64_t*, std::uint64_t, std::uint64_t) override {}
  void edited(const std::int64_t*, std::uint64_t, std::uint64_t, std::span<const std::uint64_t>, std::uint64_t) override {}
  void lost(const std::int64_t*, std::uint64_t) override {}
  void emptied() override { set({}); }

 private:
  EpochState current() const;
  Stretch take(EpochState& state, std::uint64_t n, bool whole);
  void put(const EpochState& state);

  EpochPage* page_;
};

}  // namespace engram
