// What a store keeps beside its rows for samplers, up to date with every write of any process.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

namespace engram {

/// Called by the write path after the rows are committed, from the writing thread. An index has a lock of its own, and
/// looks at the tickets under it: by then a row may hold a newer write already, whose own call comes.
class Index {
 public:
  virtual ~Index() = default;

  /// rows[0, n) hold new steps; row i was written under number t0 + i. Of a row named twice the last write stays.
  virtual void written(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0) = 0;

  /// The same, by number. Counters::scatters was `scatter` once they were written.
  virtual void rewritten(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0, std::uint64_t scatter) {
    static_cast<void>(scatter);
    written(rows, n, t0);
  }

  /// Fields `which` of live rows were replaced; the rows have new numbers, t0 + i. `scatter` as in rewritten().
  virtual void edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0, std::span<const std::uint64_t> which,
                      std::uint64_t scatter) = 0;

  /// rows[0, n) may hold nothing any more: their writer died, or they were removed.
  virtual void lost(const std::int64_t* rows, std::uint64_t n) = 0;

  /// Rows hold nothing any more, as newer ones needed their items.
  virtual void evicted(const std::int64_t* rows, std::uint64_t n) { lost(rows, n); }

  /// All rows were forgotten.
  virtual void emptied() = 0;

  /// Writes of the numbers [t0, t0 + n) ended with their process. `is_whole` says of a number whether its row is there.
  virtual void recovered(std::uint64_t t0, std::uint64_t n, const std::function<bool(std::uint64_t)>& is_whole) {
    static_cast<void>(t0), static_cast<void>(n), static_cast<void>(is_whole);
  }

  /// A process died, or a writer waits in vain: what it says of the limits is compared with them.
  virtual void count_again(bool died) { static_cast<void>(died); }

  /// Whether it wants to hear which rows are sampled.
  virtual bool hears_samples() const { return false; }

  /// rows[0, n) were sampled; -1 is none.
  virtual void sampled(const std::int64_t* rows, std::uint64_t n) { static_cast<void>(rows), static_cast<void>(n); }
};

}  // namespace engram
