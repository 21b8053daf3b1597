// Where rows of a lane lie by their items, against a look at each row; and what is refused.
#include "core/saved_runs.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

#include "blocks.h"
#include "expect.h"
#include "ragged.h"

using namespace ragged;

namespace {

/// The rows of a lane as a save sees them.
struct Lane {
  Lane(const Store& store, std::uint64_t lane) : lane(lane), length(store.control().lane_length()) {
    std::vector<Control::LaneState> states(store.control().lanes());
    store.control().read_lanes(states.data());
    live = static_cast<std::uint64_t>(states[lane].live);
    oldest = live == length ? static_cast<std::uint64_t>(states[lane].position) % live : 0;
    std::vector<std::int64_t> all(store.control().capacity());
    store.control().read_numbers(~std::uint64_t{0} >> 2, states.data(), all.data(), all.size(), nullptr);
    numbers.assign(all.begin() + static_cast<std::ptrdiff_t>(lane * length), all.begin() + static_cast<std::ptrdiff_t>(lane * length + live));
  }
  RowsByAge by_age() const { return {lane, oldest, live, numbers.data()}; }

  /// From the first row to the last: those before the first one with items at the offset or behind it.
  std::int64_t rank_of(const Store& store, std::uint64_t group, std::int64_t offset) const {
    const std::uint64_t leader = store.ragged()->groups()[group].leader;
    for (std::uint64_t i = 0; i < live; ++i) {
      const std::uint64_t at = (oldest + i) % live, row = lane * length + at;
      const std::uint64_t word = store.control().word(row).load();
      if (numbers[at] == 0 || !is_committed_as(word, static_cast<std::uint64_t>(numbers[at]))) continue;
      const Span span = Span::at(store.field(leader).row(row));
      if (span.length > 0 && static_cast<std::int64_t>(span.offset) >= offset) return static_cast<std::int64_t>(i);
    }
    return static_cast<std::int64_t>(live);
  }

  std::uint64_t lane, length, live = 0, oldest = 0;
  std::vector<std::int64_t> numbers;
};

TEST(rows_are_found_by_their_items) {
  Dice dice(11);
  for (int round = 0; round < 60; ++round) {
    const std::uint64_t lanes = dice.in(1, 3), length = dice.in(1, 40);
    const Rings rings{dice.in(12, 120), dice.in(12, 120)}, most{dice.in(1, 11), dice.in(1, 11)};  // of 1: rows without items
    OwnStore own(geometry(lanes, length), rings);
    std::uint64_t next = 1;
    const auto write = [&](std::uint64_t n) {
      for (std::uint64_t i = 0; i < n; ++i) Written({next++}, most).append(*own.store, dice.below(lanes));
    };
    write(dice.in(0, 4 * length));
    if (dice.below(8) == 0) own.store->empty(false), write(dice.in(0, length));
    std::vector<Lane> seen;
    for (std::uint64_t lane = 0; lane < lanes; ++lane) seen.emplace_back(*own.store, lane);
    write(dice.below(3) == 0 ? dice.in(1, length) : 0);  // rows that others have replaced since
    for (const Lane& lane : seen) {
      for (std::uint64_t group = 0; group < 2; ++group) {
        const auto head = static_cast<std::int64_t>(own.store->ragged()->head(lane.lane, group).load());
        std::vector<std::int64_t> offsets;
        for (int k = 0; k < 12; ++k) offsets.push_back(static_cast<std::int64_t>(dice.in(0, static_cast<std::uint64_t>(head) + 2)));
        if (dice.below(4) != 0) std::sort(offsets.begin(), offsets.end());
        const std::vector<std::int64_t> found = rows_from(*own.store, group, lane.by_age(), offsets);
        EXPECT_EQ(found.size(), offsets.size());
        for (std::size_t k = 0; k < offsets.size(); ++k) EXPECT_EQ(found[k], lane.rank_of(*own.store, group, offsets[k]));
      }
    }
  }
}

TEST(no_place_without_an_offset_is_looked_at_twice) {
  Dice dice(12);
  for (int round = 0; round < 200; ++round) {
    const std::uint64_t n = dice.in(1, 3'000), sparse = dice.in(1, 200);
    std::vector<std::uint64_t> own(n), looks(n);  // 0: none
    for (std::uint64_t i = 0, offset = 0; i < n; ++i) {
      if (dice.below(sparse) == 0 || (round % 4 == 0 && i < n / 2)) own[i] = offset += dice.in(1, 9);
    }
    std::vector<std::int64_t> offsets;
    const auto last = *std::max_element(own.begin(), own.end());
    for (int k = 0; k < 300; ++k) offsets.push_back(static_cast<std::int64_t>(dice.in(0, last + 2)));
    if (round % 3 != 0) std::sort(offsets.begin(), offsets.end());
    const auto look = [&](std::uint64_t i) { return ++looks[i], own[i] > 0 ? std::optional(own[i]) : std::nullopt; };
    const std::vector<std::int64_t> found = ranks_of(n, look, offsets);
    for (std::size_t k = 0; k < offsets.size(); ++k) {
      const auto first = std::find_if(own.begin(), own.end(), [&](std::uint64_t it) { return it > 0 && static_cast<std::int64_t>(it) >= offsets[k]; });
      EXPECT_EQ(found[k], first - own.begin());
    }
    for (std::uint64_t i = 0; i < n; ++i) EXPECT(own[i] > 0 || looks[i] <= 1);
  }
}

TEST(rows_that_no_store_has_are_refused) {
  OwnStore own(geometry(2, 5), {40, 40}), slots(geometry(2, 5), {40, 40}, true);
  const std::vector<std::int64_t> numbers(6), offsets{0};
  EXPECT_THROWS(std::invalid_argument, rows_from(*own.store, 2, {0, 0, 5, numbers.data()}, offsets));
  EXPECT_THROWS(std::invalid_argument, rows_from(*own.store, 0, {2, 0, 5, numbers.data()}, offsets));
  EXPECT_THROWS(std::invalid_argument, rows_from(*own.store, 0, {0, 0, 6, numbers.data()}, offsets));
  EXPECT_THROWS(std::invalid_argument, rows_from(*own.store, 0, {0, 5, 5, numbers.data()}, offsets));
  EXPECT_THROWS(std::invalid_argument, rows_from(*slots.store, 0, {0, 0, 5, numbers.data()}, offsets));
  EXPECT(rows_from(*own.store, 0, {0, 0, 0, nullptr}, offsets) == std::vector<std::int64_t>{0});
}

TEST(lanes_that_rows_do_not_have_are_refused) {
  const std::vector<std::int64_t> numbers(10, 1), live{3, 3, 12, 7}, negative{-1, 3}, many{6, 6}, beyond{3, 3, 3, 6};
  EXPECT_EQ(runs_of(std::span(live).first(2), 5, 1, numbers.data(), 10, {}).size(), 1U);
  EXPECT_THROWS(std::invalid_argument, runs_of(live, 5, 1, numbers.data(), 10, {}));
  EXPECT_THROWS(std::invalid_argument, runs_of(negative, 5, 1, numbers.data(), 10, {}));
  EXPECT_THROWS(std::invalid_argument, runs_of(many, 5, 1, numbers.data(), 10, {}));
  EXPECT_THROWS(std::invalid_argument, runs_of(beyond, 6, 1, numbers.data(), 10, {}));
  EXPECT_THROWS(std::invalid_argument, runs_of(many, 0, 1, numbers.data(), 10, {}));
  EXPECT_THROWS(std::invalid_argument, runs_of(many, 6, 0, numbers.data(), 10, {}));
}

}  // namespace
