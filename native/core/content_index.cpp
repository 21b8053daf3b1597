#include "content_index.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <utility>

#include "check.h"

namespace engram {
namespace {

constexpr std::uint64_t kAtOnce = 4096;  // rows of which the tickets are looked at twice, while they are at hand

}  // namespace

ContentIndex::ContentIndex(const RedoWords& redo, const Control& tickets, std::uint64_t rows)
    : redo_(redo), tickets_(tickets), rows_(rows), next_(tickets.lanes()), base_(tickets.lanes(), ~std::uint64_t{0}) {
  check(tickets_.capacity() == rows_, "an index of rows of a store of another capacity");
}

void ContentIndex::look_at_each(Rows rows, std::uint64_t n) {
  for (std::uint64_t i = 0; i < n; ++i) look_at(rows[i]);
}

void ContentIndex::look_at_these(Rows rows, std::uint64_t n) {
  RedoChange change(redo_);
  look_at_each(rows, n);
  change.done();
}

void ContentIndex::look_at_all() {
  RedoChange change(redo_);
  redo_.missed.exchange(0, std::memory_order_acq_rel);  // what those wrote who set it is seen below
  look_at_each({}, rows_);
  change.done();
}

void ContentIndex::rebuild() {
  redo_.redo.store(1, std::memory_order_relaxed);  // until it is done, if this process dies, too
  std::atomic_signal_fence(std::memory_order_seq_cst);
  forget_all();
  look_at_all();
  scatters_ = ~std::uint64_t{0};  // catch_up() was perhaps interrupted
}

void ContentIndex::put_in_order() {
  const RedoLock guard = lock();
  rebuild();
}

void ContentIndex::scan(std::uint64_t begin, std::uint64_t end) {
  if (begin > end || end > rows_) throw std::out_of_range("a scan of rows that there are not");
  const RedoLock guard = lock();
  look_at_these({.first = begin}, end - begin);
}

// Before a look at the row, which finds what was whole by then. Of what an edit, or a write by number, changes behind it, scatters tell.
// `inside`: whether the row was in its lane's extent.
void ContentIndex::await(std::uint64_t row, std::uint32_t lap, bool inside) {
  const bool begun = !inside || tickets_.lap(row).load(std::memory_order_acquire) >= lap;
  const State state = state_of(tickets_.word(row).load(std::memory_order_acquire));
  if (!begun || state == State::writing || (!inside && state != State::unused)) pending_.push_back({row, lap});
}

void ContentIndex::catch_up() {
  const RedoLock guard = lock();
  const std::uint64_t scatters = tickets_.counters().scatters.load(std::memory_order_acquire), length = tickets_.lane_length();
  bool all = std::exchange(scatters_, scatters) != scatters;
  std::vector<std::uint64_t> ends(tickets_.lanes());
  for (std::uint64_t lane = 0; lane < tickets_.lanes(); ++lane) {
    const std::uint64_t base = tickets_.lane(lane).base.load(std::memory_order_acquire);
    all |= std::exchange(base_[lane], base) != base;
    ends[lane] = tickets_.end(lane);
  }
  RedoChange change(redo_);
  std::vector<std::int64_t> rows;
  const auto look_for = [&](std::uint64_t row, std::uint32_t lap, bool inside) {
    rows.push_back(static_cast<std::int64_t>(row));
    await(row, lap, inside);
  };
  for (const Pending& one : std::exchange(pending_, {})) {
    if (!all) look_for(one.row, one.lap, tickets_.inside(one.row));
  }
  for (std::uint64_t lane = 0; lane < tickets_.lanes(); ++lane) {
    const std::uint64_t end = ends[lane], low = end > length ? end - length : 0;
    const std::uint64_t first = lane * length, laps = end / length, step = end % length, live = tickets_.filled(lane);
    for (std::uint64_t i = 0, stop; all && i < length; i = stop) {
      stop = std::min(length, i + kAtOnce);
      for (std::uint64_t k = i; k < stop; ++k) await(first + k, static_cast<std::uint32_t>(laps + (k < step ? 1 : 0)), k < live);
      look_at_each({.first = first + i}, stop - i);
    }
    for (std::uint64_t p = std::max(next_[lane], low); !all && p < end; ++p) look_for(first + p % length, tickets_.lap_of(p), true);
    next_[lane] = end;
  }
  look_at_each({rows.data()}, rows.size());
  change.done();
}

// A vector that is half changed is left where it is. What it had is found by a look at all rows.
void ContentIndex::after_fork() {
  if (redo_.mutex.held()) {
    new (&pending_) std::vector<Pending>;
    scatters_ = ~std::uint64_t{0};
  }
  redo_.after_fork();
}

void ContentIndex::written(const std::int64_t* rows, std::uint64_t n, std::uint64_t) {
  const OwnRows own(rows, n, rows_);
  const RedoLock guard = lock(1);
  look_at_these({rows}, n);
}

void ContentIndex::edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0, std::span<const std::uint64_t>, std::uint64_t) {
  ContentIndex::written(rows, n, t0);
}

void ContentIndex::lost(const std::int64_t* rows, std::uint64_t n) { ContentIndex::written(rows, n, 0); }

void ContentIndex::emptied() {
  const RedoLock guard = lock(1);
  rebuild();
}

}  // namespace engram
