// What a store counts for people: rows sampled, by participant, how long calls waited for them, and a curve of the last twenty minutes.
//
// Rows inserted are counted already (Counters::write_count). A count costs an atomic addition and a look at a coarse clock. Nothing that
// is drawn or written depends on any of this, and a process that dies loses no more than what it was about to count.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "control.h"

namespace engram {

/// When a call began to wait for a batch, on the steady clock, and for how many calls it counts. 0: it is not timed.
struct Waiting {
  std::chrono::steady_clock::time_point since{};
  std::uint32_t calls = 0;
};

/// Which calls of a process are timed: the first ones of a minute, and one in 32 of those after them, which counts for 32. To read the
/// clock twice takes longer than all else that is counted of a small batch. Threads that use it at once may time a few more.
class WaitTimer {
 public:
  static constexpr std::uint32_t kFirst = 256;
  static constexpr int kShareBits = 5;

  /// For how many calls the next one counts; 0: it is not to be timed.
  std::uint32_t next() {
    const std::uint32_t turn = turn_.load(std::memory_order_relaxed) + 1;
    turn_.store(turn, std::memory_order_relaxed);
    if (turn <= kFirst) return 1;
    // Multiples of the golden ratio: no period of a training loop falls in with them.
    return turn * kGolden >> (64 - kShareBits) == 0 ? 1U << kShareBits : 0;
  }

  /// A call was timed, and counted in that minute.
  void counted(std::uint64_t minute) {
    if (minute_.load(std::memory_order_relaxed) == minute) return;
    minute_.store(minute, std::memory_order_relaxed);
    turn_.store(0, std::memory_order_relaxed);
  }

 private:
  static constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;
  std::atomic<std::uint32_t> turn_{0};
  std::atomic<std::uint64_t> minute_{0};
};

class Meter {
 public:
  /// A view of what a store counts, which must outlive it.
  explicit Meter(const Control& control) : control_(control), page_(control.meter_page()) {}

  /// Notes a point of the curve, if none was noted in these 10 s. To be called before something is counted.
  void tick() const;

  /// The process with that entry has sampled n rows.
  void sampled(Participant& by, std::uint64_t n) const {
    tick();
    by.sampled.fetch_add(n, std::memory_order_relaxed);
  }

  /// A call has waited so long for a batch, and counts for that many calls. Returns the minute in which it is counted.
  std::uint64_t waited(std::uint64_t ns, std::uint32_t calls) const;

  /// A checkpoint of the rows was saved.
  void saved() const;

  /// The write count begins again, as all rows are forgotten; so do the counts of samples.
  void restart() const;

  /// The write count is set: what was inserted does not change by that.
  void set_write_count(std::uint64_t n) const;

  /// A store into which the rows and the write count of another one were copied counts on from there.
  void go_on_from(const Meter& other) const;

  /// Rows ever inserted, and ever sampled: of two looks only the difference counts.
  std::uint64_t inserted() const;
  std::uint64_t sampled() const;

  struct Counts {
    std::uint64_t inserted, sampled;      // rows, since the store was emptied
    double inserts_per_s, samples_per_s;  // in the last 10 to 20 s
    double wait_median_ms, wait_p99_ms;   // of the last minute or two in which there were samples; below 0: there were none
    double saved_ago_s;                   // below 0: never
  };
  Counts counts() const;

  /// A moment, what had been counted by then, and the waits of the minute or two before.
  struct Point {
    double seconds;  // since 1970
    std::uint64_t inserted, sampled;
    double wait_median_ms, wait_p99_ms;
  };
  /// The curve, oldest first.
  std::vector<Point> curve() const;

 private:
  bool read_point(std::uint64_t number, Point* point) const;

  const Control& control_;
  MeterPage& page_;
};

}  // namespace engram
