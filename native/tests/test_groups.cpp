// Groups of rows against a model, in threads, and what is drawn of them.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <map>
#include <thread>
#include <vector>

#include "blocks.h"
#include "grouped.h"

using namespace engram;

namespace {

std::vector<std::uint64_t> some_keys(Dice& dice, std::uint64_t n, std::uint64_t kinds) {
  std::vector<std::uint64_t> keys(n);
  for (auto& key : keys) key = dice.below(kinds) * 0x9E3779B97F4A7C15ull;
  return keys;
}

struct Taken {
  std::vector<std::int64_t> rows, numbers;
  Groups::Drawn drawn;
};

Taken take(Groups& index, std::uint64_t key, std::uint64_t n, std::uint64_t each, Groups::Order order = Groups::Order::any,
           const std::vector<std::int64_t>& without = {}) {
  Taken taken{std::vector<std::int64_t>(n * each), std::vector<std::int64_t>(n * each), {}};
  taken.drawn = index.draw(key, {.n = n, .each = each, .without = without}, order, taken.rows.data(), taken.numbers.data());
  return taken;
}

}  // namespace

TEST(groups_are_what_the_rows_say_after_any_writes) {
  Dice dice(3);
  for (int round = 0; round < 150; ++round) {
    const std::uint64_t rows = 1 + dice.below(80), kinds = 1 + dice.below(rows);
    const Grouped shared(rows);
    Grouping one(shared), other(shared, 1);
    for (int i = 0; i < 40; ++i) {
      Grouping& who = dice.below(2) == 0 ? one : other;
      switch (dice.below(9)) {
        case 0: {
          const Parts parts = who.stored();
          std::vector<std::int64_t> named;
          for (const auto& [key, in] : parts) {
            for (const std::int64_t row : in) {
              if (dice.below(3) == 0) named.push_back(row);
            }
          }
          if (!named.empty()) who.edit(named, some_keys(dice, named.size(), kinds));
          break;
        }
        case 1: {  // an edit of the other field keeps the groups
          const Parts parts = who.stored();
          if (parts.empty()) break;
          const std::int64_t row = *parts.begin()->second.begin();
          const std::uint64_t word = 7, which = 0;
          const auto* column = reinterpret_cast<const std::byte*>(&word);
          who.store.scatter(&row, 1, {&which, 1}, {&column, 1}, false);
          EXPECT(who.stored() == parts);
          break;
        }
        case 2:
          if (dice.below(4) == 0) who.store.empty(false);
          break;
        case 3:
          who.index.scan(0, rows);
          break;
        case 4:
          who.index.put_in_order();
          break;
        case 5: {
          std::vector<std::int64_t> named(1 + dice.below(rows));
          for (auto& row : named) row = static_cast<std::int64_t>(dice.below(rows));
          who.place(named, some_keys(dice, named.size(), kinds));
          break;
        }
        default:
          who.append(some_keys(dice, 1 + dice.below(rows), kinds));
      }
      EXPECT(one.noted(dice.bits()) == one.stored());
      EXPECT_EQ(other.index.groups(), one.stored().size());
    }
  }
}

TEST(a_draw_follows_from_rows_numbers_and_keys_alone) {
  Dice dice(4);
  const Grouped shared(64);
  Grouping one(shared);
  for (int i = 0; i < 20; ++i) one.append(some_keys(dice, 1 + dice.below(30), 12));
  std::vector<Taken> before;
  for (std::uint64_t key = 0; key < 20; ++key) before.push_back(take(one.index, key, 4, 3));
  one.index.put_in_order();
  for (std::uint64_t key = 0; key < 20; ++key) {
    const Taken again = take(one.index, key, 4, 3);
    EXPECT(again.rows == before[key].rows && again.numbers == before[key].numbers);
  }
}

TEST(each_group_and_each_row_comes_once_and_is_equally_likely) {
  const std::uint64_t sizes[] = {3, 7, 12, 5, 20};
  const Grouped shared(64);
  Grouping one(shared);
  std::vector<std::uint64_t> keys;
  for (std::uint64_t k = 0; k < 5; ++k) keys.insert(keys.end(), sizes[k], k);
  one.append(keys);
  std::vector<double> groups(5), rows(keys.size());
  const std::uint64_t draws = 20'000;
  for (std::uint64_t key = 0; key < draws; ++key) {
    const Taken taken = take(one.index, key, 2, 3);
    EXPECT(taken.drawn.any && !taken.drawn.repeated);
    for (std::size_t g = 0; g < 2; ++g) {
      const std::uint64_t of = keys[taken.rows[3 * g]];
      ++groups[of];
      for (std::size_t i = 3 * g; i < 3 * g + 3; ++i) {
        EXPECT_EQ(keys[taken.rows[i]], of);
        for (std::size_t j = 3 * g; j < i; ++j) EXPECT(taken.rows[i] != taken.rows[j]);
        ++rows[taken.rows[i]];
      }
    }
    EXPECT(keys[taken.rows[0]] != keys[taken.rows[3]]);
  }
  // Fixed keys: the same numbers in every run. Five standard deviations.
  for (const double count : groups) EXPECT(std::abs(count - draws * 0.4) < 5 * std::sqrt(draws * 0.4 * 0.6));
  for (std::size_t row = 0; row < rows.size(); ++row) {
    const double p = 0.4 * 3 / static_cast<double>(sizes[keys[row]]);
    EXPECT(std::abs(rows[row] - draws * p) <= 5 * std::sqrt(draws * p * (1 - p)));
  }
}

TEST(what_is_left_out_does_not_come_where_there_are_enough_others) {
  const Grouped shared(40);
  Grouping one(shared);
  std::vector<std::uint64_t> keys(40);
  for (std::uint64_t i = 0; i < 40; ++i) keys[i] = i % 8;
  one.append(keys);
  for (std::uint64_t key = 0; key < 200; ++key) {
    const Taken taken = take(one.index, key, 3, 2, Groups::Order::any, {0, 8, 9, 2, 3, 4});  // of groups 0, 1, 2, 3 and 4
    for (const std::int64_t row : taken.rows) EXPECT(keys[row] >= 5);
    EXPECT(!taken.drawn.repeated);
    // A fourth is not among the others: of what was left out, at least one comes again.
    const Taken more = take(one.index, key, 4, 2, Groups::Order::any, {0, 8, 9, 2, 3, 4});
    EXPECT(more.drawn.repeated && std::set<std::int64_t>(more.numbers.begin(), more.numbers.end()).size() == 8);
  }
}

TEST(too_few_come_again) {
  const Grouped shared(10);
  Grouping one(shared);
  EXPECT(!take(one.index, 1, 1, 1).drawn.any);
  one.append({5, 5, 6});
  const Taken taken = take(one.index, 1, 3, 3);
  EXPECT(taken.drawn.any && taken.drawn.repeated);
  std::set<std::int64_t> seen(taken.rows.begin(), taken.rows.end());
  EXPECT_EQ(seen.size(), std::size_t{3});
}

TEST(the_newest_are_those_written_or_edited_last) {
  const Grouped shared(6);
  Grouping one(shared);
  one.append({1, 1, 1, 1, 1, 1, 1, 1});  // rows 0 and 1 are the newest
  EXPECT((take(one.index, 1, 1, 3, Groups::Order::newest).rows == std::vector<std::int64_t>{5, 0, 1}));
  one.edit({3}, {1});
  EXPECT((take(one.index, 1, 1, 2, Groups::Order::newest).rows == std::vector<std::int64_t>{1, 3}));
}

TEST(a_reader_that_is_told_nothing_catches_up) {
  Dice dice(6);
  const Grouped shared(50);
  Grouping writer(shared);
  std::vector<std::byte> memory(Groups::bytes(50, by_key()));
  Groups::copy(shared.groups(), memory);
  Control control = shared.blocks().view();
  Groups reader(memory, control, {writer.store.field(1)});
  for (int i = 0; i < 100; ++i) {
    if (control.size() > 0 && dice.below(5) == 0) writer.edit({static_cast<std::int64_t>(dice.below(control.size()))}, {dice.below(9)});
    else if (dice.below(20) == 0) writer.store.empty(false);
    else writer.append(some_keys(dice, 1 + dice.below(70), 9));
    if (control.size() == 0) writer.append({1});
    reader.catch_up();
    EXPECT_EQ(reader.groups(), writer.stored().size());
    for (std::uint64_t key = 0; key < 5; ++key) {
      const Taken mine = take(reader, key, 3, 3), theirs = take(writer.index, key, 3, 3);
      EXPECT(mine.rows == theirs.rows && mine.numbers == theirs.numbers);
    }
  }
}

TEST(memory_that_holds_no_groups_is_refused) {
  const Grouped shared(5);
  Grouping one(shared);
  EXPECT_THROWS(std::invalid_argument, Groups::bytes(0, by_key()));
  EXPECT_THROWS(std::invalid_argument, Groups::bytes(5, {.field = 1}));
  EXPECT_THROWS(std::invalid_argument, Groups::bytes(5, {.field = 1, .key_bytes = 1025}));
  EXPECT_THROWS(std::invalid_argument, Groups(shared.groups().first(4096), one.control, {one.store.field(1)}));
  std::vector<std::byte> other(Groups::bytes(6, by_key()));
  Groups::format(other, 6, by_key());
  EXPECT_THROWS(std::invalid_argument, Groups(other, one.control, {one.store.field(1)}));
  one.append({1, 2, 3, 1, 2});
  // Trees that are none are said to be damaged, and end no process.
  std::fill(shared.groups().begin() + 4096 + 5 * 16, shared.groups().end(), std::byte{0xee});
  EXPECT_THROWS(Damaged, one.index.groups());
}

TEST(damaged_groups_are_said_to_be_damaged_wherever_they_are_used) {
  constexpr std::uint64_t kRows = 1000;
  const auto damage = [](const Grouped& shared, std::uint64_t begin, std::uint64_t bytes) {
    std::fill_n(shared.groups().begin() + static_cast<std::ptrdiff_t>(begin), bytes, std::byte{0xee});
  };
  const std::uint64_t buckets = Groups::bytes(kRows, by_key()) - 4 * RowSet::bytes(kRows) - kRows * 4, groups = buckets - kRows * 8, nodes = groups - kRows * 16;
  const auto filled = [](Grouping& one) {
    std::vector<std::uint64_t> keys(100);
    for (std::uint64_t i = 0; i < 100; ++i) keys[i] = i % 50;
    one.append(keys);
  };
  {
    const Grouped shared(kRows);
    Grouping one(shared);
    filled(one);
    damage(shared, buckets, kRows * 4);
    EXPECT_THROWS(Damaged, one.append({1, 2, 3}));
  }
  {
    const Grouped shared(kRows);
    Grouping one(shared);
    filled(one);
    damage(shared, groups, kRows * 8);
    EXPECT_THROWS(Damaged, one.append({1, 2, 3}));
  }
  for (const std::uint32_t size : {0u, 1u, 3u, 1'000'000u}) {  // a group's size that is not the number of its rows, which is 2
    const Grouped shared(kRows);
    Grouping one(shared);
    filled(one);
    for (std::uint64_t row = 0; row < kRows; ++row) {
      std::memcpy(shared.groups().data() + nodes + row * 16 + 12, &size, sizeof size);
    }
    EXPECT_THROWS(Damaged, one.index.draw_members(1, {.n = 3, .each = 2}));
  }
  {
    const Grouped shared(kRows);
    Grouping one(shared);
    filled(one);
    damage(shared, nodes, kRows * 16);
    EXPECT_THROWS(Damaged, take(one.index, 1, 3, 2));
    EXPECT_THROWS(Damaged, one.index.draw_members(1, {.n = 3, .each = 2}));
  }
}

TEST(threads_that_write_and_draw_at_once) {
  const Grouped shared(256);
  Grouping one(shared);
  one.append({0, 1, 2, 3});
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&one, t] {
      Dice dice(10 + t);
      for (int i = 0; i < 300; ++i) one.append(some_keys(dice, 1 + dice.below(20), 30));
    });
  }
  threads.emplace_back([&] {
    for (std::uint64_t key = 0; !over.load(); ++key) {
      const Taken taken = take(one.index, key, 4, 2);
      EXPECT(taken.drawn.any);
    }
  });
  for (int t = 0; t < 3; ++t) threads[t].join();
  over = true;
  threads[3].join();
  EXPECT(one.noted() == one.stored());
}
