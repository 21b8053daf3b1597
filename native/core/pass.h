// A walk over the live rows, each of which comes once: whoever draws takes the next stretch of it. Samplers of several
// processes may walk together, so it lies in memory that they may share.
//
//   memory   one page: PassPage
//
// Of the walk there are two copies, and a word that says which one counts: whoever changes it writes the other one first. So
// a death at any instruction leaves the walk as it was or as it should be, and there is nothing to mend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "control.h"
#include "index.h"
#include "shared_mutex.h"

namespace engram {

struct Walk {
  std::uint64_t key;      // of the order of the rows
  std::uint64_t rows;     // that there were when it began
  std::uint64_t visited;  // of them
};

struct PassPage {
  char magic[8];  // "engpass\1"
  Word current;   // which walk counts: 0 or 1
  Walk walks[2];
  SharedMutex mutex;
};
static_assert(sizeof(PassPage) <= kPage);

class RowPass : public Index {
 public:
  static constexpr std::uint64_t kBytes = kPage;

  /// Into zeroed memory of kBytes.
  static void format(std::span<std::byte> memory);

  /// As Priorities::reset_mutex.
  static void reset_mutex(std::span<std::byte> memory);

  /// A view of formatted memory, which must outlive it. Throws std::invalid_argument: not such memory.
  explicit RowPass(std::span<std::byte> memory);

  /// Rows [start, start + count) of the walk of that key over `rows`.
  struct Stretch {
    std::uint64_t key, rows, start, count;
    bool last;
  };
  /// The next n of `rows` rows, or as many as are left. Where nothing is left, or there were another number of rows, a new
  /// walk begins, in the order of `key`. `whole`: what does not fill n is skipped; n <= rows.
  Stretch next(std::uint64_t key, std::uint64_t rows, std::uint64_t n, bool whole);

  /// Throws Damaged: it is none.
  Walk walk() const;
  /// Throws std::invalid_argument: more visited than there are.
  void set(const Walk& walk);

  /// In the child of a fork, for private memory: a thread of the parent may have held it.
  void after_fork();

  // What is walked over is known by number alone.
  void written(const std::int64_t*, std::uint64_t, std::uint64_t) override {}
  void edited(const std::int64_t*, std::uint64_t, std::uint64_t, std::span<const std::uint64_t>) override {}
  void lost(const std::int64_t*, std::uint64_t) override {}
  void emptied() override { set({}); }

 private:
  Walk current() const;
  void put(const Walk& walk);

  PassPage* page_;
};

}  // namespace engram
