// Limits of a store: how fast rows may come and go. All processes that have it open share them.
//
// An insert or a sample is admitted before it happens: it changes the counts by one compare-and-swap, and is given back if it fails. One
// that is refused may wait until another one has changed the counts enough. In zeroed memory there is no limit.
//
//   level   what inserts have brought and samples have not used: + ratio per row inserted, - 1 per row sampled
//   centre  ratio * min_size: where the level is to stay
//   band    inserts raise it to centre + slack at most, samples lower it to centre - slack; one operation may always take all of that
//
// Limits of several stores, a fleet, are the same ones in each. What each has counted is its part: the level is the sum of theirs, which
// clients that see all stores compute. Here rows are counted and not held up, but for those in flight, which have to fit into each store.
//
// So an insert is admitted at least where the level is at most the centre, and a sample where it is at least that, whatever their sizes:
// never are both refused because of the level. What waits is woken by what it waits for, and looks by itself once a second, as a process
// may die between the change and the call that wakes.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <stdexcept>

#include "control.h"
#include "meter.h"

namespace engram {

/// So many rows are refused for now: no call waits here.
struct Limited : std::runtime_error {
  explicit Limited(std::uint64_t n) : std::runtime_error("the limits of the store do not admit more rows now"), rows(n) {}
  std::uint64_t rows;
};

/// What is limited. 0: it is not.
struct Rules {
  double ratio = 0;             // rows sampled per row inserted
  double tolerance = 0;         // slack / centre
  std::uint64_t min_size = 0;   // live rows before the first is sampled
  std::uint64_t in_flight = 0;  // rows that are inserted and not consumed, at most

  std::uint64_t fleet = 0;      // of several stores: a number that only grows; 0: of one store
  std::uint64_t stores = 0;     // of how many

  bool operator==(const Rules&) const = default;
  bool any() const { return ratio != 0 || min_size != 0 || in_flight != 0; }
  double centre() const { return ratio * static_cast<double>(min_size); }
  double slack() const { return tolerance * centre(); }
};

class Limits {
 public:
  enum Side : std::uint64_t { kInsert, kSample };

  /// A view of the limits of a store, which must outlive it.
  explicit Limits(const Control& control) : control_(control), page_(control.limits_page()), waits_(control.waits_page()) {}

  /// Whether there are any. Never for a view that only reads: its samples are not counted.
  bool on() const { return (page_.current.load(std::memory_order_relaxed) & 1) != 0 && !control_.only_reads(); }

  /// Replaces them in one step; none: takes them away. Begins in the centre. What waits looks again. `unconsumed`: rows that are
  /// inserted and not consumed now. Rules that are in force already stay, with their counts; so do newer ones of a fleet. Throws Stalled,
  /// ReadOnly.
  ///
  /// `level`: of a fleet, where this part begins.
  void set(const Rules& rules, std::uint64_t unconsumed, double level = 0) const;
  /// Those in force. Where there are none, also which fleet has taken them away.
  Rules rules() const;

  /// The counts begin again, as the store has other rows now. None of them are consumed.
  void restart(std::uint64_t live) const;

  /// Whether n rows are admitted now; then they are counted. An insert that can never be is a std::invalid_argument.
  bool admit(Side side, std::uint64_t n) const;
  /// Whether n rows would be admitted now.
  bool would_admit(Side side, std::uint64_t n) const;
  /// Admits n rows that are written next, by this call or when it is repeated: they are not given back. Throws Limited.
  void admit_insert(std::uint64_t n) const;
  /// Admits n rows that this thread inserts by several calls, next; what they do not insert, return_prepaid gives back. Throws Limited.
  /// The participant's entry says so meanwhile: if the process dies, return_prepaid_of gives them back.
  void prepay(std::uint64_t n, Participant& participant) const;
  void return_prepaid() const;
  void return_prepaid_of(Participant& dead) const;
  /// Whether so many rows of this thread are admitted already; then they are no longer.
  static bool use_prepaid(std::uint64_t n);
  /// n admitted rows were inserted: samples that wait for them may go on.
  void inserted() const;
  /// n admitted rows were not inserted, or not sampled.
  void give_back(Side side, std::uint64_t n) const;

  /// n rows were drawn for the last time, or overwritten or removed before that.
  void consumed(std::uint64_t n) const;
  /// n rows may be drawn that no insert has counted: they were used up, or lie below one that was written by number.
  void revived(std::uint64_t n) const;
  /// `in_flight()` says how many rows are in flight in truth: so it is from now on, unless a write is under way. A process that was killed
  /// may have counted rows that it did not write, or counted them twice.
  void count_again(const std::function<std::uint64_t()>& in_flight) const;

  /// Changes when what waits on that side is to look again.
  std::uint32_t event(Side side) const { return waits_.sides[side].event.load(std::memory_order_seq_cst); }
  /// Sleeps until the event is another one than `seen`, a signal comes, or the seconds are over, at most one; not at all if n rows could
  /// be admitted now. Whether they could be afterwards.
  bool wait(Side side, std::uint64_t n, std::uint32_t seen, double seconds) const;
  /// The same, until rows are inserted, if the store's write count still is `written`.
  void wait_for_insert(std::uint64_t written, double seconds) const;
  /// All that waits looks again.
  void wake() const;

  struct Counts {
    std::uint64_t inserts, samples, in_flight;  // rows, since the limits were set or the rows replaced
    double level;
    std::uint64_t waits[2], waited_ns[2], waiting[2];
  };
  Counts counts() const;
  void count_wait(Side side) const { waits_.sides[side].waits.fetch_add(1, std::memory_order_relaxed); }

  /// For the only process that has the store open: processes that died waited.
  void forget_waits() const;

 private:
  struct Current;
  enum class Reason { none, level, in_flight };

  Current current() const;
  bool filling(const Current& now) const;
  bool admits(const Current& now, Side side, double level, std::uint64_t n) const;
  Reason reason(const Current& now, Side side, std::uint64_t n) const;
  void want_level(const Current& now, Side side, std::uint64_t n) const;
  void want_level(Side side, double level) const;
  void sleep(Side side, std::uint32_t seen, double seconds) const;
  void want_room(const Current& now, std::uint64_t n) const;
  void wake(Side side) const;
  void wake_if_wanted(Side side, double level) const;
  void fill(LimitSlot& slot, double level, std::uint64_t unconsumed) const;

  const Control& control_;
  LimitsPage& page_;
  WaitsPage& waits_;
};

/// n rows that are admitted before they are written, and given back if they are not. Throws Limited.
class AdmittedInsert {
 public:
  AdmittedInsert(const Control& control, std::uint64_t n) : control_(control), limits_(control), n_(n), counted_(n != 0 && limits_.on()) {
    if (counted_ && !Limits::use_prepaid(n) && !limits_.admit(Limits::kInsert, n)) throw Limited(n);
  }
  ~AdmittedInsert() {
    if (counted_) limits_.give_back(Limits::kInsert, n_);
  }
  void written() {
    Meter(control_).tick();
    control_.counters().write_count.fetch_add(n_, std::memory_order_seq_cst);
    if (counted_) limits_.inserted();
    counted_ = false;
  }
  AdmittedInsert(const AdmittedInsert&) = delete;
  AdmittedInsert& operator=(const AdmittedInsert&) = delete;

 private:
  const Control& control_;
  Limits limits_;
  std::uint64_t n_;
  bool counted_;
};

}  // namespace engram
