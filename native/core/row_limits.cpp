#include "row_limits.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <climits>
#include <cmath>
#include <ctime>
#include <limits>
#include <string>
#include <utility>

#include "check.h"
#include "fence.h"
#include "shared_mutex.h"
#include "wait.h"

namespace engram {
namespace {

constexpr double kLongestSleep = 1;  // seconds
constexpr std::uint64_t kNone = 0;   // nothing is wanted

// Rows that are admitted and to be inserted, and what says so to other processes.
thread_local std::uint64_t prepaid = 0;
thread_local std::atomic<std::uint32_t>* prepaid_at = nullptr;

std::uint64_t take_prepaid(std::uint64_t n) {
  prepaid -= n;
  prepaid_at->fetch_sub(static_cast<std::uint32_t>(n), std::memory_order_seq_cst);
  return n;
}

double number(const Word& word) { return std::bit_cast<double>(word.load(std::memory_order_seq_cst)); }
std::uint64_t bits(double value) { return std::bit_cast<std::uint64_t>(value); }

// Not kNone for any level.
std::uint64_t wanted(double level) { return level == 0 ? bits(-0.0) : bits(level); }

// A little less than what decides, and more: one that waits and is woken too early looks again.
double rounding(double level) { return 1e-9 * (std::abs(level) + 1); }

// The level after a step, if that is allowed.
template <class Allowed>
bool move(Word& level, double by, Allowed&& allowed) {
  std::uint64_t seen = level.load(std::memory_order_seq_cst);
  do {
    if (!allowed(std::bit_cast<double>(seen))) return false;
  } while (!level.compare_exchange_weak(seen, bits(std::bit_cast<double>(seen) + by), std::memory_order_seq_cst));
  return true;
}

// Never below zero.
std::uint64_t reduce(Word& count, std::uint64_t by) {
  std::uint64_t seen = count.load(std::memory_order_seq_cst);
  while (!count.compare_exchange_weak(seen, seen - std::min(seen, by), std::memory_order_seq_cst)) {
  }
  return seen - std::min(seen, by);
}

// The word lies in memory that other processes may share.
void sleep_while(std::atomic<std::uint32_t>& word, std::uint32_t value, double seconds) {
  const auto ns = static_cast<std::int64_t>(std::min(seconds, kLongestSleep) * 1e9);
  const timespec most{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &most, nullptr, 0);
}

// Where the level begins, of so many live rows.
double first_level(const Rules& rules, std::uint64_t live) {
  if (rules.ratio == 0) return static_cast<double>(live);
  return rules.ratio * static_cast<double>(std::min(live, rules.min_size));
}

}  // namespace

// The rules of one moment, and where their counts are.
struct Limits::Current {
  Rules rules;
  bool on;
  LimitSlot& slot;

  // What a row inserted adds to the level, and what one sampled takes away. Without a ratio the level is the number of rows inserted.
  double gain() const { return rules.ratio != 0 ? rules.ratio : 1; }
  double cost() const { return rules.ratio != 0 ? 1 : 0; }
  double centre() const { return gain() * static_cast<double>(rules.min_size); }
};

Limits::Current Limits::current() const {
  for (;;) {
    const std::uint64_t current = page_.current.load(std::memory_order_acquire);
    LimitSlot& slot = page_.slots[(current >> 1) % kLimitSlots];
    const Rules rules{number(slot.ratio),        number(slot.tolerance), slot.min_size.load(),
                      slot.most_in_flight.load(), slot.fleet.load(),      slot.stores.load()};
    const Current now{rules, (current & 1) != 0, slot};
    fence(std::memory_order_acquire);
    if (page_.current.load(std::memory_order_seq_cst) == current) return now;
  }
}

void Limits::fill(LimitSlot& slot, double level, std::uint64_t unconsumed) const {
  slot.level.store(bits(level), std::memory_order_seq_cst);
  slot.in_flight.store(unconsumed, std::memory_order_seq_cst);
  slot.inserts.store(0, std::memory_order_relaxed);
  slot.samples.store(0, std::memory_order_relaxed);
}

// A process that is killed in here has changed nothing: what counts is named by one word, which is written last.
void Limits::set(const Rules& rules, std::uint64_t unconsumed, double level) const {
  control_.writable();
  {
    const SharedLock one_at_a_time(control_.lock_page().placing, [] {});
    const Current now = current();
    const bool on = rules.any();
    if (on == now.on && (rules == now.rules || (!on && rules.fleet == 0 && now.rules.fleet == 0))) return;
    if (rules.fleet != 0 && rules.fleet <= now.rules.fleet) return;
    const std::uint64_t next = (page_.current.load(std::memory_order_acquire) >> 1) + 1;
    LimitSlot& slot = page_.slots[next % kLimitSlots];
    fence(std::memory_order_release);
    slot.ratio.store(bits(rules.ratio));
    slot.tolerance.store(bits(rules.tolerance));
    slot.min_size.store(rules.min_size);
    slot.most_in_flight.store(rules.in_flight);
    slot.fleet.store(rules.fleet);
    slot.stores.store(rules.stores);
    fill(slot, rules.fleet != 0 ? level : first_level(rules, control_.size()), unconsumed);
    page_.current.store(next << 1 | (on ? 1 : 0), std::memory_order_seq_cst);
  }
  wake();
}

Rules Limits::rules() const {
  const Current now = current();
  return now.on ? now.rules : Rules{.fleet = now.rules.fleet, .stores = now.rules.stores};
}

void Limits::restart(std::uint64_t live) const {
  const Current now = current();
  if (!now.on) return;
  if (now.rules.fleet != 0) now.slot.stores.store(0);
  fill(now.slot, now.rules.fleet != 0 ? 0 : first_level(now.rules, live), live);
  wake();
}

// Whether nothing may be sampled because there are too few rows: then rows are always admitted.
bool Limits::filling(const Current& now) const {
  const std::uint64_t rows = now.rules.in_flight != 0 ? now.slot.in_flight.load() : control_.size();
  return rows < now.rules.min_size;
}

bool Limits::admits(const Current& now, Side side, double level, std::uint64_t n) const {
  if (now.rules.fleet != 0) return true;
  const double by = static_cast<double>(n) * (side == kInsert ? now.gain() : now.cost());
  const double band = std::max(now.rules.slack(), by);
  if (side == kSample) return (now.rules.ratio == 0 || level - by >= now.centre() - band) && !filling(now);
  return now.rules.ratio == 0 || level + by <= now.centre() + band || filling(now);
}

bool Limits::admit(Side side, std::uint64_t n) const {
  const Current now = current();
  if (!now.on) return true;
  const auto rows = static_cast<double>(n);
  const auto allowed = [&](double level) { return admits(now, side, level, n); };
  if (side == kSample) {
    if (!move(now.slot.level, -now.cost() * rows, allowed)) return false;
    now.slot.samples.fetch_add(n, std::memory_order_relaxed);
    wake_if_wanted(kInsert, number(now.slot.level));
    return true;
  }
  if (!admits(now, side, number(now.slot.level), n)) return false;  // before others see that rows are in flight
  if (const std::uint64_t most = now.rules.in_flight; most != 0) {
    const std::uint64_t waited_for = std::max<std::uint64_t>(now.rules.min_size, 1);
    if (n > most || n + waited_for - 1 > most) {
      const std::uint64_t fit = most - std::min(most, waited_for - 1);
      throw std::invalid_argument("expected at most " + std::to_string(fit) + " rows at a time, as MaxInFlight(" + std::to_string(most) +
                                  ") can never admit more" + (waited_for > 1 ? " beside rows that samples wait for" : "") + ", got " +
                                  std::to_string(n) + ". Write fewer at a time, or rb.limit(MaxInFlight(" +
                                  std::to_string(n + waited_for - 1) + "))");
    }
    std::uint64_t seen = now.slot.in_flight.load(std::memory_order_seq_cst);
    do {
      if (seen + n > most) return false;
    } while (!now.slot.in_flight.compare_exchange_weak(seen, seen + n, std::memory_order_seq_cst));
  }
  if (!move(now.slot.level, now.gain() * rows, allowed)) {
    if (now.rules.in_flight != 0) consumed(n);
    return false;
  }
  now.slot.inserts.fetch_add(n, std::memory_order_relaxed);
  return true;
}

void Limits::admit_insert(std::uint64_t n) const {
  if (n != 0 && on() && !use_prepaid(n) && !admit(kInsert, n)) throw Limited(n);
}

// The entry first: who counts again sees rows there that the limits have admitted.
void Limits::prepay(std::uint64_t n, Participant& participant) const {
  if (!on()) return;
  participant.prepaid.fetch_add(static_cast<std::uint32_t>(n), std::memory_order_seq_cst);
  prepaid = n, prepaid_at = &participant.prepaid;
  bool admitted = false;
  try {
    admitted = admit(kInsert, n);
  } catch (...) {
    take_prepaid(n);
    throw;
  }
  if (admitted) return;
  take_prepaid(n);
  throw Limited(n);
}

void Limits::return_prepaid() const {
  if (prepaid != 0) give_back(kInsert, take_prepaid(prepaid));
}

void Limits::return_prepaid_of(Participant& dead) const {
  if (const std::uint32_t left = dead.prepaid.exchange(0, std::memory_order_seq_cst); left != 0) give_back(kInsert, left);
}

bool Limits::use_prepaid(std::uint64_t n) {
  if (n > prepaid) return false;
  if (n != 0) take_prepaid(n);
  return true;
}

void Limits::inserted() const { wake_if_wanted(kSample, number(current().slot.level)); }

void Limits::give_back(Side side, std::uint64_t n) const {
  const Current now = current();
  if (!now.on) return;
  const double rows = static_cast<double>(n);
  move(now.slot.level, side == kInsert ? -now.gain() * rows : now.cost() * rows, [](double) { return true; });
  reduce(side == kInsert ? now.slot.inserts : now.slot.samples, n);
  if (side == kInsert) consumed(n);
  wake_if_wanted(side, number(now.slot.level));
}

void Limits::consumed(std::uint64_t n) const {
  const Current now = current();
  if (!now.on || now.rules.in_flight == 0) return;
  const std::uint64_t left = reduce(now.slot.in_flight, n);
  const std::uint64_t want = waits_.sides[kInsert].want_in_flight.load(std::memory_order_seq_cst);
  if (want != kNone && left < want) wake(kInsert);
}

void Limits::revived(std::uint64_t n) const {
  const Current now = current();
  if (now.on && now.rules.in_flight != 0) now.slot.in_flight.fetch_add(n, std::memory_order_seq_cst);
}

void Limits::count_again(const std::function<std::uint64_t()>& in_flight) const {
  const Current now = current();
  if (!now.on || now.rules.in_flight == 0) return;
  const std::uint64_t next = control_.counters().next_ticket.load(std::memory_order_seq_cst);
  if (!control_.at_rest(next)) return;
  std::uint64_t seen = now.slot.in_flight.load(std::memory_order_seq_cst);
  const std::uint64_t truth = in_flight();
  if (seen == truth || !control_.at_rest(next)) return;
  if (now.slot.in_flight.compare_exchange_strong(seen, truth, std::memory_order_seq_cst)) wake();
}

// What n rows are refused for now.
Limits::Reason Limits::reason(const Current& now, Side side, std::uint64_t n) const {
  if (!admits(now, side, number(now.slot.level), n)) return Reason::level;
  if (side == kSample || now.rules.in_flight == 0) return Reason::none;
  return now.slot.in_flight.load(std::memory_order_seq_cst) + n > now.rules.in_flight ? Reason::in_flight : Reason::none;
}

void Limits::want_level(const Current& now, Side side, std::uint64_t n) const {
  const double by = static_cast<double>(n) * (side == kInsert ? now.gain() : now.cost());
  const double band = std::max(now.rules.slack(), by), centre = now.centre();
  double level = side == kInsert ? centre + band - by : centre - band + by;
  if (side == kSample && filling(now)) {  // each row may be the last one that is missing, if enough were inserted
    const bool soon = now.rules.in_flight != 0 || number(now.slot.level) >= centre - rounding(centre);
    level = soon ? -std::numeric_limits<double>::infinity() : std::max(level, centre);
  }
  want_level(side, level + (side == kInsert ? rounding(level) : -rounding(level)));
}

void Limits::want_level(Side side, double level) const {
  Word& want = waits_.sides[side].want_level;
  std::uint64_t seen = want.load(std::memory_order_seq_cst);
  while (seen == kNone || (side == kInsert ? std::bit_cast<double>(seen) < level : std::bit_cast<double>(seen) > level)) {
    if (want.compare_exchange_weak(seen, wanted(level), std::memory_order_seq_cst)) break;
  }
}

void Limits::want_room(const Current& now, std::uint64_t n) const {
  const std::uint64_t room = now.rules.in_flight - std::min(now.rules.in_flight, n) + 1;  // fewer may be in flight
  Word& want = waits_.sides[kInsert].want_in_flight;
  std::uint64_t seen = want.load(std::memory_order_seq_cst);
  while (seen < room && !want.compare_exchange_weak(seen, room, std::memory_order_seq_cst)) {
  }
}

bool Limits::would_admit(Side side, std::uint64_t n) const {
  const Current now = current();
  return !now.on || reason(now, side, n) == Reason::none;
}

// It is said what is wanted, and then looked once more: so a change that comes later is one that wakes.
bool Limits::wait(Side side, std::uint64_t n, std::uint32_t seen, double seconds) const {
  const Current now = current();
  if (!now.on) return true;
  Reason said = Reason::none;
  for (Reason why = reason(now, side, n); why != said; why = reason(now, side, n)) {
    if (why == Reason::none) return true;
    why == Reason::level ? want_level(now, side, n) : want_room(now, n);
    said = why;
  }
  if (said == Reason::none) return true;
  sleep(side, seen, seconds);
  return would_admit(side, n);
}

void Limits::wait_for_insert(std::uint64_t written, double seconds) const {
  const std::uint32_t seen = event(kSample);
  want_level(kSample, -std::numeric_limits<double>::infinity());
  if (control_.counters().write_count.load(std::memory_order_seq_cst) == written) sleep(kSample, seen, seconds);
}

void Limits::sleep(Side side, std::uint32_t seen, double seconds) const {
  auto& here = waits_.sides[side];
  here.waiting.fetch_add(1, std::memory_order_relaxed);
  const auto begin = std::chrono::steady_clock::now();
  if (seconds > 0) sleep_while(here.event, seen, seconds);
  here.waiting.fetch_sub(1, std::memory_order_relaxed);
  const auto slept = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin);
  here.waited_ns.fetch_add(static_cast<std::uint64_t>(slept.count()), std::memory_order_relaxed);
}

// What was wanted is forgotten before the event changes: who wants something after that has seen the new event.
void Limits::wake(Side side) const {
  auto& there = waits_.sides[side];
  there.want_level.store(kNone, std::memory_order_seq_cst);
  there.want_in_flight.store(kNone, std::memory_order_seq_cst);
  there.event.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, &there.event, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Limits::wake() const {
  wake(kInsert);
  wake(kSample);
}

void Limits::wake_if_wanted(Side side, double level) const {
  const std::uint64_t want = waits_.sides[side].want_level.load(std::memory_order_seq_cst);
  if (want == kNone) return;
  if (side == kInsert ? level <= std::bit_cast<double>(want) : level >= std::bit_cast<double>(want)) wake(side);
}

Limits::Counts Limits::counts() const {
  const Current now = current();
  Counts counts{now.slot.inserts.load(), now.slot.samples.load(), now.slot.in_flight.load(), number(now.slot.level), {}, {}, {}};
  for (const Side side : {kInsert, kSample}) {
    const auto& here = waits_.sides[side];
    counts.waits[side] = here.waits.load(), counts.waited_ns[side] = here.waited_ns.load(), counts.waiting[side] = here.waiting.load();
  }
  return counts;
}

void Limits::forget_waits() const {
  for (auto& side : waits_.sides) {
    side.want_level.store(kNone), side.want_in_flight.store(kNone), side.waiting.store(0);
  }
}

}  // namespace engram
