// Groups of rows against a model, in threads, and what is drawn of them.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <map>
#include <thread>
#include <tuple>
#include <utility>
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
  Groups::copy(shared.index(), memory);
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
  EXPECT_THROWS(std::invalid_argument, Groups(shared.index().first(4096), one.control, {one.store.field(1)}));
  std::vector<std::byte> other(Groups::bytes(6, by_key()));
  Groups::format(other, 6, by_key());
  EXPECT_THROWS(std::invalid_argument, Groups(other, one.control, {one.store.field(1)}));
  one.append({1, 2, 3, 1, 2});
  // Trees that are none are said to be damaged, and end no process.
  std::fill(shared.index().begin() + 4096 + 5 * 16, shared.index().end(), std::byte{0xee});
  EXPECT_THROWS(Damaged, one.index.groups());
}

TEST(damaged_groups_are_said_to_be_damaged_wherever_they_are_used) {
  constexpr std::uint64_t kRows = 1000;
  const auto damage = [](const Grouped& shared, std::uint64_t begin, std::uint64_t bytes) {
    std::fill_n(shared.index().begin() + static_cast<std::ptrdiff_t>(begin), bytes, std::byte{0xee});
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
      std::memcpy(shared.index().data() + nodes + row * 16 + 12, &size, sizeof size);
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

// ---- complete groups, and rows that are not admitted -------------------------------------------------------------------

namespace {

constexpr GroupsField kWord{0, 2, 64, 0};  // the word is a double

/// What groups are to have, from all that was done with them: of each row the write that it holds, and how often that was used.
struct Model {
  GroupsPolicy policy;
  double floor = -INFINITY;
  std::map<std::int64_t, std::uint64_t> writes = {};  // of live rows
  std::map<std::uint64_t, std::uint64_t> uses = {};   // of writes
  std::uint64_t clock = 0;

  void wrote(const std::vector<std::int64_t>& rows) {
    for (const std::int64_t row : rows) writes[row] = ++clock;
  }
  bool admits(const Grouping& who, std::int64_t row) {
    const double word = who.word(row);
    if (!policy.ready.empty() && std::isnan(word)) return false;
    if (policy.most > 0 && uses[writes.at(row)] >= policy.most) return false;
    return !policy.dated || word >= floor;
  }
  std::vector<std::uint64_t> in_order(const Grouping& who, const Parts& parts) const;
  Parts parts(const Grouping& who) {
    Parts admitted;
    for (const auto& [key, rows] : who.stored()) {
      for (const std::int64_t row : rows) {
        if (admits(who, row)) admitted[key].insert(row);
      }
    }
    return admitted;
  }
};

// By what groups are in order: the newest row, as (number, row), or the variance of rewards, and then that row.
std::vector<std::uint64_t> Model::in_order(const Grouping& who, const Parts& parts) const {
  std::vector<std::tuple<double, std::uint64_t, std::int64_t, std::uint64_t>> order;
  for (const auto& [key, rows] : parts) {
    if (rows.size() < policy.least) continue;
    std::pair<std::uint64_t, std::int64_t> newest{0, 0};
    double sum = 0, squares = 0;
    for (const std::int64_t row : rows) {
      newest = std::max(newest, {number_of(who.control.word(static_cast<std::uint64_t>(row)).load()), row});
      sum += who.word(row), squares += who.word(row) * who.word(row);
    }
    const auto n = static_cast<double>(rows.size());
    double spread = squares / n - sum / n * (sum / n);
    if (std::isnan(spread) || spread < 1e-9) spread = 0;
    if (policy.order == GroupsOrder::spread) order.emplace_back(std::round(spread * 1e6), 0, newest.second, key);
    else order.emplace_back(0, newest.first, newest.second, key);
  }
  std::sort(order.begin(), order.end());
  std::vector<std::uint64_t> keys;
  for (const auto& [spread, number, row, key] : order) keys.push_back(key);
  return keys;
}

std::vector<double> some_words(Dice& dice, std::uint64_t n) {
  std::vector<double> words(n);
  for (double& word : words) word = dice.below(3) == 0 ? NAN : static_cast<double>(dice.below(8));
  return words;
}

// Of a group that was drawn, its key.
std::uint64_t key_of(const Parts& parts, std::int64_t row) {
  for (const auto& [key, rows] : parts) {
    if (rows.contains(row)) return key;
  }
  throw std::runtime_error("a row that is in no group");
}

}  // namespace

TEST(groups_have_the_rows_that_are_admitted_after_any_writes_and_draws) {
  const GroupsPolicy policies[] = {by_key(),
                                   {.field = 1, .key_bytes = 8, .ready = {kWord}},
                                   {.field = 1, .key_bytes = 8, .most = 1},
                                   {.field = 1, .key_bytes = 8, .most = 3},
                                   {.field = 1, .key_bytes = 8, .dated = true, .version = kWord},
                                   {.field = 1, .key_bytes = 8, .ready = {kWord}, .most = 2, .dated = true, .version = kWord},
                                   {.field = 1, .key_bytes = 8, .order = GroupsOrder::age, .least = 2},
                                   {.field = 1, .key_bytes = 8, .most = 2, .order = GroupsOrder::spread, .least = 3, .reward = kWord}};
  Dice dice(7);
  for (int round = 0; round < 240; ++round) {
    Model model{.policy = policies[round % 8]};
    const std::uint64_t rows = 1 + dice.below(60), kinds = 1 + dice.below(12);
    const Grouped shared(rows, model.policy);
    Grouping one(shared), other(shared, 1);
    std::uint64_t next = 0;
    for (int i = 0; i < 60; ++i) {
      Grouping& who = dice.below(2) == 0 ? one : other;
      std::vector<std::int64_t> named;
      switch (dice.below(10)) {
        case 0:
        case 1:
          for (const auto& [row, write] : model.writes) {
            if (dice.below(3) == 0) named.push_back(row);
          }
          if (named.empty()) break;
          dice.below(3) == 0 ? who.edit(named, some_keys(dice, named.size(), kinds)) : who.edit_words(named, some_words(dice, named.size()));
          break;
        case 2:
          if (dice.below(6) == 0) {
            who.store.empty(false);
            model.writes.clear();
            next = 0;
          }
          break;
        case 3:
          dice.below(2) == 0 ? who.index.put_in_order() : who.index.scan(0, rows);
          break;
        case 4:
          if (model.policy.dated) model.floor = dice.below(6) == 0 ? 0 : static_cast<double>(dice.below(8));
          who.index.groups(1, model.floor);
          break;
        case 5:
        case 6: {
          const bool ordered = model.policy.order != GroupsOrder::none && dice.below(2) == 0;
          const std::uint64_t n = 1 + dice.below(3), each = ordered ? model.policy.least : 1 + dice.below(5);
          const Groups::Which which = !ordered ? Groups::Which::any : dice.below(2) == 0 ? Groups::Which::first : Groups::Which::last;
          const Parts parts = model.parts(one);
          std::uint64_t complete = 0;
          for (const auto& [key, in] : parts) complete += in.size() >= each ? 1 : 0;
          EXPECT_EQ(who.index.groups(each), complete);
          std::vector<std::int64_t> drawn(n * each), numbers(n * each);
          const bool any = who.index.draw(dice.bits(), {.n = n, .each = each, .complete = true, .floor = model.floor, .which = which},
                                          dice.below(2) == 0 ? Groups::Order::any : Groups::Order::newest, drawn.data(), numbers.data()).any;
          EXPECT_EQ(any, complete >= n);
          if (!any) break;
          const std::vector<std::uint64_t> order = model.in_order(one, parts);
          std::set<std::uint64_t> keys;
          for (std::uint64_t g = 0; g < n; ++g) {
            const std::uint64_t key = key_of(parts, drawn[g * each]);
            keys.insert(key);
            if (ordered) EXPECT_EQ(key, which == Groups::Which::first ? order[g] : order[order.size() - 1 - g]);
            const std::set<std::int64_t> of(drawn.begin() + static_cast<std::ptrdiff_t>(g * each), drawn.begin() + static_cast<std::ptrdiff_t>((g + 1) * each));
            EXPECT_EQ(of.size(), each);
            for (const std::int64_t row : of) EXPECT(parts.at(key).contains(row));
            for (const std::int64_t row : parts.at(key)) ++model.uses[model.writes.at(row)];
          }
          EXPECT_EQ(keys.size(), n);
          if (model.policy.most > 0 && dice.below(4) == 0) {
            who.index.take_back(drawn.data(), numbers.data(), drawn.size());
            for (const std::int64_t row : drawn) --model.uses[model.writes.at(row)];
          }
          break;
        }
        default: {
          const std::uint64_t n = 1 + dice.below(rows);
          who.append(some_words(dice, n), some_keys(dice, n, kinds));
          for (std::uint64_t j = 0; j < n; ++j) named.push_back(static_cast<std::int64_t>(next++ % rows));
          model.wrote(named);
        }
      }
      const Parts parts = model.parts(one);
      for (const std::uint64_t least : {1, 2, 3, 5, 7}) {
        std::uint64_t complete = 0;
        for (const auto& [key, in] : parts) complete += in.size() >= least ? 1 : 0;
        EXPECT_EQ(one.index.groups(least), complete);
      }
      if (model.policy.most == 0) EXPECT(one.noted(dice.bits()) == parts);
    }
    if (model.policy.most > 0) {
      std::vector<std::int32_t> uses(rows);
      one.index.copy_uses(uses.data(), rows);
      for (const auto& [row, write] : model.writes) EXPECT_EQ(static_cast<std::uint64_t>(uses[static_cast<std::size_t>(row)]), model.uses[write]);
      for (auto& count : uses) count = static_cast<std::int32_t>(dice.below(model.policy.most + 1));
      other.index.restore_uses(uses.data(), rows);
      for (const auto& [row, write] : model.writes) model.uses[write] = static_cast<std::uint64_t>(uses[static_cast<std::size_t>(row)]);
      EXPECT_EQ(one.index.groups(), model.parts(one).size());
    }
  }
}

TEST(complete_groups_are_equally_likely_whatever_others_there_are) {
  const Grouped shared(200);
  Grouping one(shared);
  std::vector<std::uint64_t> keys;
  for (std::uint64_t k = 0; k < 30; ++k) keys.insert(keys.end(), k % 5 == 0 ? 4 + k % 2 : 3, k);
  one.append(keys);
  std::map<std::uint64_t, double> drawn;
  const std::uint64_t draws = 20'000;
  for (std::uint64_t key = 0; key < draws; ++key) {
    std::vector<std::int64_t> rows(8), numbers(8);
    EXPECT(one.index.draw(key, {.n = 2, .each = 4, .complete = true}, Groups::Order::any, rows.data(), numbers.data()).any);
    ++drawn[keys[static_cast<std::size_t>(rows[0])]];
    ++drawn[keys[static_cast<std::size_t>(rows[4])]];
  }
  EXPECT_EQ(drawn.size(), std::size_t{6});
  for (const auto& [key, count] : drawn) EXPECT(std::abs(count - draws / 3.0) < 5 * std::sqrt(draws * 2 / 9.0));
}

TEST(groups_that_are_left_out_do_not_come_and_too_few_others_are_none) {
  const Grouped shared(40);
  Grouping one(shared);
  std::vector<std::uint64_t> keys(40);
  for (std::uint64_t i = 0; i < 40; ++i) keys[i] = i % 8;
  one.append(keys);
  const std::vector<std::int64_t> without{0, 8, 1, 2, 3, 4};  // of groups 0 to 4
  for (std::uint64_t key = 0; key < 100; ++key) {
    std::vector<std::int64_t> rows(15), numbers(15);
    EXPECT(one.index.draw(key, {.n = 3, .each = 5, .complete = true, .without = without}, Groups::Order::any, rows.data(), numbers.data()).any);
    EXPECT((std::set<std::int64_t>(rows.begin(), rows.end()).size() == 15));
    for (const std::int64_t row : rows) EXPECT(keys[static_cast<std::size_t>(row)] >= 5);
    rows.resize(20), numbers.resize(20);
    EXPECT(!one.index.draw(key, {.n = 4, .each = 5, .complete = true, .without = without}, Groups::Order::any, rows.data(), numbers.data()).any);
  }
}

TEST(memory_of_earlier_versions_is_read_and_kept) {
  const std::uint64_t rows = 40;
  const Grouped shared(rows);
  std::vector<std::uint64_t> words((Groups::bytes(rows, by_key()) - 4 * RowSet::bytes(rows)) / 8);
  const std::span<std::byte> memory(reinterpret_cast<std::byte*>(words.data()), words.size() * 8);
  std::copy_n(shared.index().begin(), 4096, memory.begin());
  memory[7] = std::byte{1};
  std::fill(memory.begin() + 200, memory.begin() + 4096, std::byte{0xee});  // means nothing there
  Groups::reset_mutex(memory);
  Grouping writer(shared);
  Groups earlier(memory, writer.control, {writer.store.field(1)});
  writer.store.attach(earlier);
  Dice dice(8);
  for (int i = 0; i < 40; ++i) {
    writer.append(some_keys(dice, 1 + dice.below(20), 15));
    for (const std::uint64_t least : {1, 2, 4}) EXPECT_EQ(earlier.groups(least), writer.index.groups(least));
    const std::uint64_t key = dice.bits();
    std::vector<std::int64_t> found(6), numbers(6);
    const bool any = earlier.draw(key, {.n = 2, .each = 3, .complete = true}, Groups::Order::any, found.data(), numbers.data()).any;
    EXPECT_EQ(any, writer.index.groups(3) >= 2);
    if (any) EXPECT((std::set<std::int64_t>(found.begin(), found.end()).size() == 6));
  }
  EXPECT_THROWS(std::invalid_argument, earlier.copy_uses(nullptr, 0));
}

TEST(threads_share_groups_out_exactly) {
  const Grouped shared(400, {.field = 1, .key_bytes = 8, .most = 2});
  Grouping one(shared);
  std::vector<std::uint64_t> keys(400);
  for (std::uint64_t i = 0; i < 400; ++i) keys[i] = i / 4;
  one.append(keys);
  std::vector<std::atomic<int>> drawn(400);
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::vector<std::int64_t> rows(8), numbers(8);
      for (std::uint64_t key = t << 32; one.index.draw(key, {.n = 2, .each = 4, .complete = true}, Groups::Order::any, rows.data(), numbers.data()).any; ++key) {
        for (const std::int64_t row : rows) drawn[static_cast<std::size_t>(row)].fetch_add(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  int all = 0;
  for (auto& times : drawn) EXPECT(times.load() <= 2), all += times.load();
  EXPECT(all >= 792);  // one may be left that is drawn with no other
}

TEST(rules_that_no_rows_can_follow_are_refused) {
  EXPECT_THROWS(std::invalid_argument, Groups::bytes(5, {.field = 1, .key_bytes = 8, .ready = {{0, 0, 64, 0}}}));  // ints
  EXPECT_THROWS(std::invalid_argument, Groups::bytes(5, {.field = 1, .key_bytes = 8, .ready = std::vector<GroupsField>(17, kWord)}));
  EXPECT_THROWS(std::invalid_argument, Groups::bytes(5, {.field = 1, .key_bytes = 8, .most = 1 << 24}));
  EXPECT_THROWS(std::invalid_argument, Groups::bytes(5, {.field = 1, .key_bytes = 8, .dated = true, .version = {0, 5, 128, 0}}));
  EXPECT_THROWS(std::invalid_argument, Groups::bytes(5, {.field = 1, .key_bytes = 8, .order = GroupsOrder::age}));
  EXPECT_THROWS(std::invalid_argument, Groups::bytes(5, {.field = 1, .key_bytes = 8, .order = static_cast<GroupsOrder>(3), .least = 2}));
}
