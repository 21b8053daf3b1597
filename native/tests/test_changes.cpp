// Which rows changed since a look: every row whose ticket is another one, in processes and threads.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <set>
#include <thread>
#include <vector>

#include "changing.h"
#include "expect.h"

using namespace engram;

namespace {

std::vector<std::int64_t> some_rows(Dice& dice, std::uint64_t rows, std::uint64_t n) {
  std::set<std::int64_t> some;
  for (std::uint64_t i = 0; i < n; ++i) some.insert(static_cast<std::int64_t>(dice.below(rows)));
  return {some.begin(), some.end()};
}

}  // namespace

TEST(a_look_finds_every_row_that_changed) {
  Dice dice(7);
  for (int round = 0; round < 60; ++round) {
    const std::uint64_t sizes[] = {1, 2, 15, 16, 17, 1000, 1024, 1025, 5000};
    const std::uint64_t rows = sizes[dice.below(std::size(sizes))];
    const Changing memory(rows);
    Watching one(memory), other(memory, 1);
    for (int i = 0; i < 60; ++i) {
      Watching& who = dice.below(2) == 0 ? one : other;
      switch (dice.below(6)) {
        case 0: who.append(1 + dice.below(rows + 3)); break;
        case 1: who.edit(some_rows(dice, rows, 1 + dice.below(20))); break;
        case 2: {
          const auto gone = some_rows(dice, rows, 1 + dice.below(20));
          who.store.remove(gone.data(), gone.size(), nullptr);
          break;
        }
        case 3:
          if (dice.below(5) == 0) who.store.empty(dice.below(2) == 0);
          break;
        default:
          who.catch_up();
          EXPECT(who.knows_all());
      }
    }
  }
}

TEST(a_look_costs_what_was_written) {
  const std::uint64_t rows = 1 << 17;
  const Changing memory(rows);
  Watching one(memory), other(memory, 1);
  one.append(rows);
  EXPECT_EQ(one.catch_up(), rows);
  EXPECT_EQ(other.catch_up(), rows);
  EXPECT_EQ(one.catch_up(), std::uint64_t{0});
  other.edit({5, 70000});
  EXPECT_EQ(one.catch_up(), std::uint64_t{32});
  EXPECT_EQ(other.catch_up(), std::uint64_t{32});
  EXPECT_EQ(one.catch_up(), std::uint64_t{0});
  other.append(256);
  EXPECT_EQ(one.catch_up(), std::uint64_t{256});
  EXPECT(one.knows_all());
}

// The negative control: what no index is told of is not found.
TEST(what_is_not_marked_is_not_found) {
  const Changing memory(100);
  Watching one(memory);
  one.append(100);
  one.catch_up();
  Store other = memory.blocks().open(1);
  const std::int64_t row = 40;
  const std::uint64_t id = 3, which = 0;
  const auto* column = reinterpret_cast<const std::byte*>(&id);
  other.scatter(&row, 1, {&which, 1}, {&column, 1}, true);
  one.catch_up();
  EXPECT(!one.knows_all());
}

TEST(samples_count_where_they_are_asked_for) {
  for (const bool samples : {false, true}) {
    const Changing memory(1000, samples);
    Watching one(memory);
    one.append(1000);
    one.catch_up();
    EXPECT_EQ(one.store.hears_samples(), samples);
    const std::int64_t rows[] = {3, -1, 999};
    one.store.count_sampled(rows, 3);
    std::vector<std::int64_t> found;
    one.index.look(one.since, found);
    EXPECT_EQ(found.size(), std::size_t{samples ? 16u + 8u : 0u});
  }
}

TEST(writers_and_looks_at_the_same_time) {
  const std::uint64_t rows = 3000;
  const Changing memory(rows);
  Watching one(memory), other(memory, 1);
  one.append(rows);
  std::atomic<int> writing{3};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      Watching& who = t == 0 ? one : other;
      Dice dice(20 + t);
      for (int i = 0; i < 1500; ++i) {
        if (dice.below(8) == 0) {
          const auto gone = some_rows(dice, rows, 3);
          who.store.remove(gone.data(), gone.size(), nullptr);
        } else {
          who.edit(some_rows(dice, rows, 1 + dice.below(4)));
        }
      }
      --writing;
    });
  }
  for (Watching* looks : {&one, &other}) {
    threads.emplace_back([&writing, looks] {
      while (writing.load() > 0) {
        looks->catch_up();
        std::this_thread::yield();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (Watching* looks : {&one, &other}) {
    looks->catch_up();
    EXPECT(looks->knows_all());
  }
}

TEST(memory_of_marks_is_checked) {
  std::vector<std::byte> memory(Changes::bytes(100));
  EXPECT_THROWS(std::invalid_argument, Changes(std::span(memory)));
  EXPECT_THROWS(std::invalid_argument, Changes::format(memory, 0, false));
  EXPECT_THROWS(std::invalid_argument, Changes::format(memory, 5000, false));
  Changes::format(memory, 100, false);
  Changes whole(memory);
  EXPECT_EQ(whole.rows(), std::uint64_t{100});
  EXPECT_THROWS(std::invalid_argument, Changes(std::span(memory).first(memory.size() - 8)));
  std::vector<std::int64_t> rows;
  EXPECT_EQ(whole.look(0, rows), std::uint64_t{1});
  EXPECT_EQ(rows.size(), std::size_t{100});
  Changes::reset(memory);
  EXPECT_EQ(whole.look(0, rows), std::uint64_t{1});
}
