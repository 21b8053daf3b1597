// Rows of any length: what a store holds, beside a list that shares no code with it.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "blocks.h"
#include "core/check.h"
#include "core/store.h"
#include "expect.h"
#include "ragged.h"
#include "stress.h"

using namespace ragged;

namespace {

/// A lane as a list: rows come, and the oldest go when their place, or their items', is needed.
class List {
 public:
  List(std::uint64_t length, Rings rings, Rings most) : length_(length), rings_{rings.tokens, rings.text}, most_{most.tokens, most.text} {}

  void append(std::uint64_t id) {
    Row row{id, {}};
    for (int g = 0; g < 2; ++g) {
      const std::uint64_t items = length_of(id, static_cast<std::uint64_t>(g), most_[g]);
      if (next_[g] / rings_[g] != (next_[g] + items - 1) / rings_[g] && items > 0) next_[g] += rings_[g] - next_[g] % rings_[g];
      row.begin[g] = next_[g];
      next_[g] += items;
    }
    rows_.push_back(row);
  }
  void empty() { rows_.clear(); }
  std::vector<std::uint64_t> ids() const {
    std::vector<std::uint64_t> ids;
    for (std::uint64_t i = rows_.size() - std::min<std::uint64_t>(rows_.size(), length_); i < rows_.size(); ++i) {
      if (rows_[i].begin[0] + rings_[0] >= next_[0] && rows_[i].begin[1] + rings_[1] >= next_[1]) ids.push_back(rows_[i].id);
    }
    return ids;
  }

 private:
  struct Row {
    std::uint64_t id, begin[2];
  };
  std::uint64_t length_, rings_[2], most_[2], next_[2] = {0, 0};
  std::vector<Row> rows_;
};

std::vector<std::uint64_t> ids_in(const Store& store, std::uint64_t lane, Rings most) {
  bool torn = false;
  std::vector<std::uint64_t> ids;
  for (const auto& [id, row] : live_rows(store, most, &torn)) {
    if (store.control().lane_of(static_cast<std::uint64_t>(row)) == lane) ids.push_back(id);
  }
  EXPECT(!torn);
  return ids;
}

TEST(a_store_holds_what_a_list_does) {
  struct Case {
    std::uint64_t lanes, length;
    Rings rings, most;
  };
  const std::vector<Case> cases{{1, 7, {40, 30}, {11, 9}},  {1, 3, {1000, 1000}, {10, 10}}, {3, 5, {23, 64}, {23, 2}},
                                {2, 50, {16, 16}, {17, 17}}, {1, 1, {4, 4}, {4, 4}},         {1, 200, {64, 900}, {3, 40}}};
  Dice dice(7);
  for (const Case& one : cases) {
    OwnStore own(geometry(one.lanes, one.length), one.rings);
    std::vector<List> lists(one.lanes, List(one.length, one.rings, one.most));
    std::uint64_t next = 1;
    for (int round = 0; round < 300; ++round) {
      const std::uint64_t n = dice.below(10) == 0 ? dice.in(0, 2 * one.length) : dice.in(1, 4), lane = dice.below(one.lanes);
      std::vector<std::uint64_t> ids;
      std::vector<std::int64_t> lanes, rows(n);
      for (std::uint64_t i = 0; i < n; ++i) ids.push_back(next++), lanes.push_back(static_cast<std::int64_t>(dice.below(one.lanes)));
      const Written batch(ids, one.most);
      if (dice.below(3) == 0) {
        batch.append_by_lane(*own.store, lanes.data(), rows.data());
        for (std::uint64_t i = 0; i < n; ++i) lists[static_cast<std::uint64_t>(lanes[i])].append(ids[i]);
      } else {
        batch.append(*own.store, lane, rows.data());
        for (const std::uint64_t id : ids) lists[lane].append(id);
      }
      if (dice.below(40) == 0) {
        own.store->empty(false);
        for (List& list : lists) list.empty();
      }
      for (std::uint64_t k = 0; k < one.lanes; ++k) EXPECT(ids_in(*own.store, k, one.most) == lists[k].ids());
      std::uint64_t live = 0;
      for (const List& list : lists) live += list.ids().size();
      EXPECT_EQ(own.store->control().size(), live);
    }
  }
}

TEST(draws_are_uniform_over_the_rows_that_have_items) {
  const Rings rings{40, 400}, most{5, 3};
  OwnStore own(geometry(2, 1000), rings);  // most rows inside the extent have lost their items
  for (std::uint64_t id = 1; id <= 1500; ++id) Written({id}, most).append(*own.store, id % 3 == 0);
  bool torn = false;
  std::vector<std::uint64_t> counts(own.store->control().capacity());
  const auto live = live_rows(*own.store, most, &torn);
  EXPECT(live.size() < 60);
  Rows batch(own.memory.fields, 64);
  std::int64_t rows[64];
  for (std::uint64_t key = 0; key < 1000; ++key) {
    own.store->sample_uniform(key, 64, batch.out, rows, nullptr);
    for (const std::int64_t row : rows) ++counts[static_cast<std::uint64_t>(row)];
  }
  std::vector<std::uint64_t> of_live;
  for (const auto& [id, row] : live) of_live.push_back(std::exchange(counts[static_cast<std::uint64_t>(row)], 0));
  EXPECT_UNIFORM(of_live);
  EXPECT_EQ(std::count(counts.begin(), counts.end(), 0u), static_cast<std::int64_t>(counts.size()));
  EXPECT(own.store->control().counters().redraws.load() < 64 * 1000 / 10);
}

TEST(an_edit_of_the_same_length_is_in_place) {
  const Rings rings{64, 64}, most{8, 8};
  OwnStore own(geometry(1, 10), rings);
  std::int64_t rows[2];
  const std::uint64_t t0 = Written({5, 6}, most).append(*own.store, 0, rows);
  const std::uint32_t length = length_of(5, 0, most.tokens), other = length_of(6, 0, most.tokens);
  const std::vector<std::uint32_t> lengths{length, other};
  const std::vector<std::int64_t> starts{0, length};
  std::vector<std::uint32_t> values(length + other, 77);
  const std::int64_t expected[] = {static_cast<std::int64_t>(t0), static_cast<std::int64_t>(t0 + 5)};
  std::int64_t numbers[2];
  const RaggedSource source{lengths.data(), starts.data(), values.size(), {nullptr, reinterpret_cast<const std::byte*>(values.data())}};
  EXPECT_EQ(own.store->patch_items(0, rows, 2, source, expected, numbers).entries, 1u);  // the other one is not what was expected
  EXPECT_EQ(numbers[0], expected[0]);
  EXPECT_EQ(numbers[1], -1);
  const Span span = Span::at(own.memory.fields[1].row(0));
  EXPECT_EQ(span.length, length);
  for (std::uint32_t k = 0; k < length; ++k) {
    std::uint32_t value = 0;
    std::memcpy(&value, own.memory.others.data() + (span.offset + k) * 4, 4);
    EXPECT_EQ(value, 77u);
  }
  const std::vector<std::uint32_t> longer{length + 1, other};
  const RaggedSource wrong{longer.data(), starts.data(), values.size() + 1, {nullptr, reinterpret_cast<const std::byte*>(values.data())}};
  const std::uint64_t before = own.store->control().word(0).load();
  EXPECT_THROWS(std::invalid_argument, own.store->patch_items(0, rows, 1, wrong, expected, numbers));
  EXPECT_EQ(own.store->control().word(0).load(), before);
}

TEST(what_a_caller_must_not_do_changes_nothing) {
  const Rings rings{16, 16}, most{4, 4};
  OwnStore own(geometry(1, 4), rings);
  std::int64_t rows[1];
  const std::uint64_t t0 = Written({5}, most).append(*own.store, 0, rows);
  const std::vector<std::byte> before(own.memory.all.begin(), own.memory.all.end());
  const std::uint32_t length[] = {17}, ok[] = {3};
  const std::int64_t start[] = {0}, late[] = {2};
  const std::byte values[256] = {};
  const std::vector<const std::byte*> both{values, values}, one{values};
  const auto write = [&](std::vector<RaggedSource> sources) { RaggedWrite(*own.store->ragged(), 1, sources); };
  EXPECT_THROWS(std::invalid_argument, write({{length, start, 17, both}, {ok, start, 3, one}}));  // longer than a ring
  EXPECT_THROWS(std::invalid_argument, write({{ok, late, 4, both}, {ok, start, 3, one}}));        // outside of the values
  EXPECT_THROWS(std::invalid_argument, write({{ok, start, 3, one}, {ok, start, 3, one}}));        // a field is missing
  EXPECT_THROWS(std::invalid_argument, write({{ok, start, 3, both}}));
  Rows column(own.memory.fields, 1);
  EXPECT_THROWS(std::invalid_argument, own.store->append(0, 1, column.in, nullptr));  // without items
  const std::uint64_t spans[] = {1};
  const std::byte* const span[] = {values};
  std::int64_t numbers[1];
  const std::int64_t expected[] = {static_cast<std::int64_t>(t0)};
  EXPECT_THROWS(std::invalid_argument, own.store->patch(rows, 1, spans, span, expected, numbers));
  EXPECT_THROWS(std::invalid_argument, own.store->scatter(rows, 1, spans, span, false));
  EXPECT(std::equal(before.begin(), before.end(), own.memory.all.begin()));
  // Spans that a reader made up lie outside of the ring, or are of rows that moved: nothing is read there.
  std::byte made_up[Span::kBytes], out[64];
  std::byte* const outputs[] = {out, nullptr};
  for (const Span span_of : {Span{15, 2}, Span{3, 17}, Span{~std::uint64_t{0}, 5}, Span{1 << 20, 0xffffffff}}) {
    span_of.put(made_up);
    EXPECT_EQ(own.store->gather_items(0, rows, 1, expected, made_up, outputs, start).size(), 1u);
  }
  EXPECT_THROWS(std::out_of_range, [&] {
    const std::int64_t outside[] = {4};
    static_cast<void>(own.store->gather_items(0, outside, 1, expected, made_up, outputs, start));
  }());
}

TEST(memory_of_other_rings_is_refused) {
  OwnStore own(geometry(2, 4), {16, 16});
  const auto open = [&](std::uint64_t items, std::uint64_t bytes) {
    std::vector<RaggedGroup> groups{{1, items, {{1, own.memory.tokens.data(), 8}, {2, own.memory.others.data(), 4}}},
                                    {3, 16, {{3, own.memory.text.data(), 1}}}};
    Ragged(own.memory.page.first(bytes), own.memory.geometry, std::move(groups), false);
  };
  open(16, own.memory.page.size());
  EXPECT_THROWS(std::invalid_argument, open(17, own.memory.page.size()));
  EXPECT_THROWS(std::invalid_argument, open(16, own.memory.page.size() - 64));
  EXPECT_THROWS(std::invalid_argument, open(16, 100));
  own.memory.page[0] = std::byte{0};
  EXPECT_THROWS(std::invalid_argument, open(16, own.memory.page.size()));
}

TEST(threads_write_and_read_the_same_rings) {
  const Rings rings{256, 100}, most{20, 8};
  OwnStore own(geometry(2, 16), rings);
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> read{0}, torn{0};
  std::vector<std::thread> threads;
  for (std::uint64_t reader = 0; reader < 2; ++reader) {
    threads.emplace_back([&, reader] {
      Dice dice(reader + 100);
      while (!stop) {
        std::vector<std::int64_t> rows(8);
        for (auto& row : rows) row = static_cast<std::int64_t>(dice.below(32));
        const Read batch(*own.store, rows, most);
        for (std::uint64_t i = 0; i < rows.size(); ++i) {
          if (batch.moved(i)) continue;
          ++read;
          torn += !batch.id(i);
        }
      }
    });
  }
  std::vector<std::thread> writers;
  for (std::uint64_t writer = 0; writer < 3; ++writer) {
    writers.emplace_back([&, writer] {
      Dice dice(writer);
      std::uint64_t id = (writer + 1) << 40;
      for (int round = 0; round < stress::pick(2000, 200000, 2000000); ++round) {
        std::vector<std::uint64_t> ids(dice.in(1, 5));
        for (auto& one : ids) one = ++id;
        Written(ids, most).append(*own.store, dice.below(2));
      }
    });
  }
  for (std::thread& thread : writers) thread.join();
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(torn.load(), 0u);
  bool broken = false;
  EXPECT(!live_rows(*own.store, most, &broken).empty());
  EXPECT(!broken);
}

TEST(a_slot_takes_what_it_has_room_for_and_refuses_the_rest) {
  const OwnStore own({16, 1, 16}, {40, 24});
  const OpenRows open(own.memory.open_rows);
  const SlotLayout& layout = Memory::slots();
  const std::uint64_t slot = *open.take(7, layout);
  const std::vector<std::uint32_t> none{0, 0}, three{3, 2};
  EXPECT(open.is_held(slot, 7, 1) && !open.is_held(slot, 7, 2) && !open.is_held(slot, 8, 1));
  const std::vector<std::uint64_t> tokens{1, 2, 3};
  const std::byte* data = reinterpret_cast<const std::byte*>(tokens.data());
  const SlotItems text{1, 2, {data}};
  open.append(slot, layout, {}, std::vector<SlotItems>{{0, 3, {data, nullptr}}, text});
  EXPECT(open.lengths(slot, layout) == three);
  EXPECT(std::memcmp(open.data(slot) + layout.places()[1], data, 3 * kTokenBytes) == 0);
  EXPECT(open.data(slot)[layout.given(1)] == std::byte{1} && open.data(slot)[layout.given(2)] == std::byte{0});
  const SlotItems refused[] = {{0, 14, {data, data}}, {0, 1, {data}}, {2, 1, {data}}, {1, std::uint64_t{1} << 40, {nullptr}}};
  for (const SlotItems& items : refused) EXPECT_THROWS(std::invalid_argument, open.append(slot, layout, {}, std::vector<SlotItems>{items}));
  EXPECT_THROWS(std::invalid_argument, open.append(slot, layout, {}, std::vector<SlotItems>{text, text}));
  EXPECT_THROWS(std::invalid_argument, open.append(slot, layout, std::vector<SlotValue>{{1, data}}, {}));
  EXPECT_THROWS(std::invalid_argument, open.append(slot, SlotLayout({16, 8}, {{16, {1}}}), {}, {}));
  EXPECT(open.lengths(slot, layout) == three);

  open.free(slot);
  EXPECT(*open.take(8, layout) == slot && open.lengths(slot, layout) == none && open.is_held(slot, 8, 2));
  EXPECT(open.data(slot)[layout.given(1)] == std::byte{0});
  const std::uint32_t many = 17;
  std::memcpy(open.data(slot) + layout.length(0), &many, sizeof many);
  EXPECT_THROWS(Damaged, open.lengths(slot, layout));
  EXPECT_THROWS(Damaged, open.append(slot, layout, {}, std::vector<SlotItems>{text}));
}

}  // namespace
