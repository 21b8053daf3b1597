#include "new_rows.h"

#include <algorithm>
#include <new>
#include <utility>

namespace engram {
namespace {

constexpr std::uint64_t kAtOnce = 4096;  // rows of which the tickets are looked at twice, while they are at hand

}  // namespace

NewRows::NewRows(const Control& tickets) : tickets_(tickets), next_(tickets.lanes()), base_(tickets.lanes(), ~std::uint64_t{0}) {}

// Before a look at the row, which finds what was whole by then. Of what an edit, or a write by number, changes behind it, scatters tell.
// `inside`: whether the row was in its lane's extent.
void NewRows::await(std::uint64_t row, std::uint32_t lap, bool inside) {
  const bool begun = !inside || tickets_.lap(row).load(std::memory_order_acquire) >= lap;
  const State state = state_of(tickets_.word(row).load(std::memory_order_acquire));
  if (!begun || state == State::writing || (!inside && state != State::unused)) pending_.push_back({row, lap});
}

void NewRows::each(const std::function<void(Rows rows, std::uint64_t n)>& look) {
  const std::uint64_t scatters = tickets_.counters().scatters.load(std::memory_order_acquire), length = tickets_.lane_length();
  bool all = std::exchange(scatters_, scatters) != scatters;
  std::vector<std::uint64_t> ends(tickets_.lanes());
  for (std::uint64_t lane = 0; lane < tickets_.lanes(); ++lane) {
    const std::uint64_t base = tickets_.lane(lane).base.load(std::memory_order_acquire);
    all |= std::exchange(base_[lane], base) != base;
    ends[lane] = tickets_.end(lane);
  }
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
      look({.first = first + i}, stop - i);
    }
    for (std::uint64_t p = std::max(next_[lane], low); !all && p < end; ++p) look_for(first + p % length, tickets_.lap_of(p), true);
    next_[lane] = end;
  }
  look({.named = rows.data()}, rows.size());
}

void NewRows::after_fork() {
  new (&pending_) std::vector<Pending>;
  forget();
}

}  // namespace engram
