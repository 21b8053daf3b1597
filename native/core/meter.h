// What a store counts for people: rows sampled, by participant, how long calls waited for them, and a curve of the last twenty minutes.
//
// Rows inserted are counted already (Counters::write_count). A count costs an atomic addition and a look at a coarse clock. Nothing that
// is drawn or written depends on any of this, and a process that dies loses no more than what it was about to count.
#pragma once

#include <cstdint>
#include <vector>

#include "control.h"

namespace engram {

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

  /// A call has waited so long for a batch.
  void waited(std::uint64_t ns) const;

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
