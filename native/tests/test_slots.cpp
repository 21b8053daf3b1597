// Rows of any length in slots: what a store holds, beside a map from rows to ids; and writers of rows anywhere beside readers.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "blocks.h"
#include "core/check.h"
#include "core/store.h"
#include "core/writers.h"
#include "expect.h"
#include "ragged.h"
#include "stress.h"

using namespace ragged;

namespace {

constexpr Rings kMost{9, 5};  // rows have fewer items than that

/// A store in private memory, whose rows have slots of up to 8 tokens and 4 characters.
struct Own : OwnStore {
  explicit Own(Geometry g, Rings most = kMost) : OwnStore(g, {g.lane_length * (most.tokens - 1), g.lane_length * (most.text - 1)}, true) {}
};

/// What is in a store, by row; every row is whole.
std::map<std::int64_t, std::uint64_t> found_in(const Store& store) {
  bool torn = false;
  std::map<std::int64_t, std::uint64_t> found;
  for (const auto& [id, row] : live_rows(store, kMost, &torn)) found[row] = id;
  EXPECT(!torn);
  return found;
}

TEST(a_store_holds_what_a_map_does) {
  for (const auto& [lanes, length] : {std::pair<std::uint64_t, std::uint64_t>{1, 7}, {3, 5}, {2, 1}, {1, 60}}) {
    Own own(geometry(lanes, length));
    Dice dice(lanes * 100 + length);
    std::map<std::int64_t, std::uint64_t> model;
    std::vector<std::uint64_t> ends(lanes);
    std::uint64_t next = 1;
    const auto append = [&](std::uint64_t lane, std::uint64_t id) { model[static_cast<std::int64_t>(lane * length + ends[lane]++ % length)] = id; };
    for (int round = 0; round < 300; ++round) {
      const std::uint64_t n = dice.below(10) == 0 ? dice.in(0, 2 * length) : dice.in(1, 4);
      std::vector<std::uint64_t> ids;
      std::vector<std::int64_t> lane_of, rows;
      for (std::uint64_t i = 0; i < n; ++i) ids.push_back(next++), lane_of.push_back(static_cast<std::int64_t>(dice.below(lanes)));
      const Written batch(ids, kMost);
      const std::uint64_t kind = dice.below(4);
      if (kind == 0) {
        batch.append_by_lane(*own.store, lane_of.data());
        for (std::uint64_t i = 0; i < n; ++i) append(static_cast<std::uint64_t>(lane_of[i]), ids[i]);
      } else if (kind == 1 || model.size() < lanes * length) {
        batch.append(*own.store, static_cast<std::uint64_t>(lane_of.empty() ? 0 : lane_of[0]));
        for (const std::uint64_t id : ids) append(static_cast<std::uint64_t>(lane_of[0]), id);
      } else {  // anywhere: all of them, or some, in any order
        std::vector<std::int64_t> pick;
        for (std::uint64_t i = 0; i < n; ++i) {
          if (kind == 2 || dice.below(2) == 0) pick.push_back(static_cast<std::int64_t>(i)), rows.push_back(static_cast<std::int64_t>(dice.below(lanes * length)));
        }
        if (kind == 3) std::reverse(pick.begin(), pick.end());
        if (!rows.empty()) batch.scatter(*own.store, rows, kind == 2 ? nullptr : pick.data());
        for (std::uint64_t i = 0; i < rows.size(); ++i) model[rows[i]] = ids[static_cast<std::uint64_t>(pick[i])];
      }
      EXPECT(found_in(*own.store) == model);
    }
    EXPECT_EQ(own.store->ragged()->page().evicted.load(), 0u);
  }
}

TEST(rows_before_the_first_one_are_empty) {
  Own own(geometry(1, 8));
  Written({5}, kMost).scatter(*own.store, {3});
  EXPECT_EQ(own.store->control().filled(0), 4u);
  const std::uint64_t which[] = {1, 3};
  const std::vector<std::int64_t> rows{0, 1, 2};
  std::vector<std::byte> spans(3 * Span::kBytes, std::byte{1}), text(3 * Span::kBytes, std::byte{1});
  std::byte* const out[] = {spans.data(), text.data()};
  EXPECT(own.store->gather(rows.data(), 3, which, out, nullptr, nullptr).empty());
  for (std::uint64_t i = 0; i < 3; ++i) EXPECT(Span::at(spans.data() + i * Span::kBytes).length == 0 && Span::at(text.data() + i * Span::kBytes).length == 0);
  EXPECT_EQ(Read(*own.store, {3}, kMost).id(0).value_or(0), 5u);
}

TEST(what_does_not_fit_a_slot_is_refused) {
  Own own(geometry(1, 4));
  Written({1, 2, 3, 4}, kMost).append(*own.store, 0);
  const auto before = found_in(*own.store);
  std::uint64_t id = 5;
  while (length_of(id, 0, 12) != 10) ++id;  // a slot has 8 tokens
  EXPECT_THROWS(std::invalid_argument, Written({id}, {12, 5}).append(*own.store, 0));
  EXPECT_THROWS(std::invalid_argument, Written({id}, {12, 5}).scatter(*own.store, {2}));
  EXPECT_THROWS(std::out_of_range, Written({5}, kMost).scatter(*own.store, {4}));
  const std::int64_t row = 0, pick = 1;
  EXPECT_THROWS(std::out_of_range, Written({5}, kMost).scatter(*own.store, {0}, &pick));
  EXPECT_THROWS(std::invalid_argument, own.store->scatter(&row, 1, own.store->all(), Written({5}, kMost).columns(), true));
  EXPECT(found_in(*own.store) == before);

  SharedPages pages(1 << 18);
  const Memory rings(pages.data(), geometry(1, 4), {40, 40});
  rings.format();
  const auto store = rings.open(0, true);
  EXPECT_THROWS(std::invalid_argument, Written({5}, kMost).scatter(*store, {0}));
  EXPECT_EQ(store->control().size(), 0u);
}

TEST(a_request_is_repeated_in_the_slots_that_it_had) {
  Own own(geometry(1, 5));
  std::vector<std::byte> table(Writers::bytes(2, 2) + kPage);
  const std::span<std::byte> memory(table.data() + (kPage - reinterpret_cast<std::uintptr_t>(table.data()) % kPage), Writers::bytes(2, 2));
  Writers::format(memory, 2, 2);
  const Writers writers(memory);
  const Written batch({11, 12, 13}, kMost), other({11, 12, 14}, kMost);
  Written({1, 2, 3}, kMost).append(*own.store, 0);
  const auto ask = [&](const Written& rows) {
    RaggedWrite write(*own.store->ragged(), 3, rows.sources());
    return writers.append(*own.store, {7, 1}, 1, 0, 3, rows.columns(), nullptr, &write);
  };
  EXPECT_EQ(ask(batch), 3u);
  const std::map<std::int64_t, std::uint64_t> there{{0, 13}, {1, 2}, {2, 3}, {3, 11}, {4, 12}};
  EXPECT(found_in(*own.store) == there);
  EXPECT_EQ(ask(batch), 0u);
  EXPECT_THROWS(std::invalid_argument, ask(other));
  const std::int64_t lost[] = {3, 0};
  own.store->remove(lost, 2, nullptr);
  EXPECT_EQ(ask(batch), 2u);
  EXPECT(found_in(*own.store) == there);
}

TEST(readers_beside_writers_of_rows_anywhere_see_whole_rows) {
  constexpr std::uint64_t kRows = 12;
  Own own(geometry(2, kRows / 2));
  const std::uint64_t rounds = stress::pick<std::uint64_t>(1500, 200000, 2000000);
  std::atomic<std::uint64_t> writing{3}, read{0}, torn{0};
  {
    std::vector<std::uint64_t> ids(kRows / 2, 1);
    for (const std::uint64_t lane : {0, 1}) Written(ids, kMost).append(*own.store, lane);
  }
  std::vector<std::thread> threads;
  for (std::uint64_t t = 1; t <= 3; ++t) {
    threads.emplace_back([&, t] {
      Dice dice(t);
      std::uint64_t id = t << 40;
      for (std::uint64_t round = 0; round < rounds; ++round) {
        const Written batch({id + 1, id + 2}, kMost);
        id += 2;
        if (dice.below(4) == 0) {
          batch.append(*own.store, dice.below(2));
        } else {
          batch.scatter(*own.store, {static_cast<std::int64_t>(dice.below(kRows)), static_cast<std::int64_t>(dice.below(kRows))});
        }
      }
      --writing;
    });
  }
  for (std::uint64_t t = 4; t <= 5; ++t) {
    threads.emplace_back([&, t] {
      Dice dice(t);
      for (std::uint64_t once = 0; once < 100 || writing > 0; ++once) {
        std::vector<std::int64_t> rows(4);
        for (auto& row : rows) row = static_cast<std::int64_t>(dice.below(kRows));
        const Read batch(*own.store, rows, kMost);
        for (std::uint64_t i = 0; i < rows.size(); ++i) {
          if (batch.moved(i)) continue;
          ++read;
          torn += !batch.id(i);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT(read > 0);
  EXPECT_EQ(torn.load(), 0u);
  EXPECT_EQ(found_in(*own.store).size(), kRows);
}

}  // namespace
