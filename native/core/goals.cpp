#include "goals.h"

#include <algorithm>
#include <atomic>
#include <span>

#include "check.h"

namespace engram {
namespace {

// Rows that are drawn for one goal among all, where writers that died have left rows without a step.
constexpr std::uint64_t kTries = 64;
// Numbers of goals do not depend on those by which the rows were drawn, with the same key.
constexpr std::uint64_t kGoals = 0x68696E6473696768ull;

}  // namespace

// One of all steps that are there, each equally often; -1 where none was found.
std::int64_t Trajectories::any_row(const Views& views, const std::vector<std::uint64_t>& ends, const Random& random, std::uint64_t i,
                                   std::uint64_t attempt) const {
  for (std::uint64_t k = 0; k < kTries && !views.empty(); ++k) {
    const std::uint64_t chosen = random.below(ends.back(), i, attempt * kTries + k);
    const auto at = static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), chosen) - ends.begin());
    const View& v = views[at];
    const std::uint64_t place = v.low + chosen - (at == 0 ? 0 : ends[at - 1]);
    if (v.holes == 0 || !v.dead(v.find(place))) return row(v.track, place);
  }
  return -1;
}

void Trajectories::goals(const GoalDraw& draw, const std::int64_t* rows, const std::int64_t* expected, const std::int64_t* places,
                         std::uint64_t n, std::int64_t* goals, std::int64_t* numbers) {
  const OwnRows own(rows, n, control_.capacity());
  const auto guard = locked();
  settle();
  const Random random(draw.key ^ kGoals);
  const bool anywhere = draw.goal == Goal::random;
  const Views all = anywhere ? views() : Views{};
  std::vector<std::uint64_t> ends;  // places up to and with each track
  for (const View& v : all) ends.push_back((ends.empty() ? 0 : ends.back()) + v.next - v.low);
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto r = static_cast<std::uint64_t>(rows[i]), number = places == nullptr ? i : static_cast<std::uint64_t>(places[i]);
    goals[i] = -1;
    const View v = view(track_of(r));
    const std::uint64_t place = place_of(r, cursor(r / control_.lane_length()));
    if (v.count == 0 || place < v.low || place >= v.next) continue;
    const std::uint64_t run = v.find(place);
    if (v.dead(run)) continue;
    if (anywhere) {
      goals[i] = any_row(all, ends, random, number, draw.attempt);
    } else {
      const std::uint64_t first = draw.goal == Goal::episode ? v.first(run) : place;
      const std::uint64_t last = v.end(run) - 1;
      goals[i] = row(v.track, draw.goal == Goal::final ? last : first + random.below(last - first + 1, number, draw.attempt));
    }
    if (goals[i] >= 0) __builtin_prefetch(&control_.word(static_cast<std::uint64_t>(goals[i])));
  }
  const auto number_at = [&](std::int64_t at) {
    const std::uint64_t word = control_.word(static_cast<std::uint64_t>(at)).load(std::memory_order_acquire);
    return is_committed(word) ? static_cast<std::int64_t>(number_of(word)) : -1;
  };
  const auto holds = [&](std::int64_t at, std::int64_t number) {  // a ticket, or the number of a write
    const std::uint64_t word = control_.word(static_cast<std::uint64_t>(at)).load(std::memory_order_acquire);
    const auto named = static_cast<std::uint64_t>(number);
    return is_committed(word) && (number_of(word) == named || control_.write_of(static_cast<std::uint64_t>(at), word) == named);
  };
  for (std::uint64_t i = 0; i < n; ++i) {
    numbers[i] = goals[i] >= 0 && holds(rows[i], expected[i]) ? number_at(goals[i]) : -1;
    if (goals[i] < 0) goals[i] = rows[i];
  }
}

std::vector<std::int64_t> read_goals(const Store& store, Trajectories& table, const GoalDraw& draw, std::uint64_t field,
                                     const std::int64_t* rows, const std::int64_t* expected, const std::int64_t* places,
                                     std::uint64_t n, std::byte* out) {
  check(field < store.fields(), "a field of the store");
  std::vector<std::int64_t> goals(n), numbers(n);
  table.goals(draw, rows, expected, places, n, goals.data(), numbers.data());
  std::vector<std::int64_t> missing = store.gather(goals.data(), n, {&field, 1}, {&out, 1}, numbers.data(), nullptr);
  if (!missing.empty()) store.control().count_redraws(missing.size());
  return missing;
}

}  // namespace engram
