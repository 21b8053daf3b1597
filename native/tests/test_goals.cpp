// Goals of rows, read out of a store whose rows say where they belong, and beside writers that overwrite them.
#include "core/goals.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "blocks.h"
#include "core/fence.h"
#include "expect.h"

using namespace engram;

namespace {

using Indices = std::vector<std::int64_t>;

enum Fields : std::uint64_t { kStep, kEpisode, kFlag, kWide };

struct World {
  explicit World(Geometry g, bool flagged = false)
      : heap(g, {8, 8, 1, 40}),
        store(heap.open()),
        memory(Trajectories::bytes(g.lanes, g.lane_length, 1) / 8),
        table(heap.view(), boundaries(flagged), 1, 1,
              {reinterpret_cast<std::byte*>(memory.data()), memory.size() * 8}) {
    store.attach(table);
  }

  /// Steps of one episode; the one at `flagged` has a flag.
  void append(std::uint64_t lane, std::uint64_t episode, std::uint64_t steps, std::uint64_t flagged = ~0ull) {
    Rows rows(heap.fields, steps);
    for (std::uint64_t i = 0; i < steps; ++i) {
      const auto step = static_cast<double>(i);
      std::memcpy(rows.row(kStep, i), &step, 8);
      std::memcpy(rows.row(kEpisode, i), &episode, 8);
      *rows.row(kFlag, i) = static_cast<std::byte>(i == flagged);
      describe(rows.row(kWide, i), 40, episode << 32 | i);
    }
    store.append(lane, steps, rows.in, nullptr);
  }

  Boundaries boundaries(bool flagged) const {
    if (flagged) return {1, {heap.fields[kEpisode], heap.fields[kFlag]}, {kEpisode, kFlag}};
    return {1, {heap.fields[kEpisode]}, {kEpisode}};
  }

  GoalDraw draw(Goal goal, std::uint64_t key) const { return {goal, key}; }

  /// The step of the goal of each row.
  std::vector<double> steps(const GoalDraw& of, const Indices& rows) {
    std::vector<double> values(rows.size());
    Indices tickets(rows.size());
    store.tickets_of(rows.data(), rows.size(), tickets.data());
    moved = read_goals(store, table, of, kStep, rows.data(), tickets.data(), nullptr, rows.size(),
                       reinterpret_cast<std::byte*>(values.data()));
    return values;
  }

  /// Those that come for one row, over many keys.
  std::set<double> all(Goal goal, std::int64_t row) {
    std::set<double> found;
    for (std::uint64_t key = 0; key < 400; ++key) found.insert(steps(draw(goal, key), {row})[0]);
    EXPECT(moved.empty());
    return found;
  }

  Heap heap;
  Store store;
  std::vector<std::uint64_t> memory;
  Trajectories table;
  Indices moved;
};

}  // namespace

TEST(goals_are_of_the_rows_trajectory) {
  World w(geometry(1, 16));
  w.append(0, 1, 5);
  w.append(0, 2, 3);
  EXPECT((w.all(Goal::future, 2) == std::set<double>{2, 3, 4}));
  EXPECT((w.all(Goal::final, 2) == std::set<double>{4}));
  EXPECT((w.all(Goal::episode, 6) == std::set<double>{0, 1, 2}));
  EXPECT((w.all(Goal::random, 6) == std::set<double>{0, 1, 2, 3, 4}));
}

TEST(they_go_on_across_the_end_of_the_array_and_not_across_the_seam) {
  World w(geometry(1, 8));
  w.append(0, 1, 5);
  w.append(0, 2, 6);  // in the rows 5, 6, 7, 0, 1, 2
  EXPECT((w.all(Goal::future, 6) == std::set<double>{1, 2, 3, 4, 5}));
  EXPECT((w.all(Goal::final, 2) == std::set<double>{5}));
  EXPECT((w.all(Goal::episode, 4) == std::set<double>{3, 4}));  // of the first one that much is left
}

TEST(flags_beside_an_id_cut) {
  World w(geometry(1, 2000), true);
  w.append(0, 1, 1500, 700);
  w.append(0, 1, 480, 100);  // in the rows 1500 to 1979
  EXPECT((w.all(Goal::final, 3) == std::set<double>{700}));
  EXPECT((w.all(Goal::final, 700) == std::set<double>{700}));
  EXPECT((w.all(Goal::final, 701) == std::set<double>{100}));
  for (const double step : w.all(Goal::episode, 1601)) EXPECT(step > 100);
  for (const double step : w.all(Goal::episode, 750)) EXPECT(step > 700 || step <= 100);
}

TEST(the_same_key_gives_the_same_goals_wherever_a_row_stands) {
  World w(geometry(1, 64));
  w.append(0, 1, 60);
  Indices rows(60), tickets(60);
  for (std::int64_t i = 0; i < 60; ++i) rows[static_cast<std::size_t>(i)] = i;
  const std::vector<double> first = w.steps(w.draw(Goal::episode, 5), rows);
  EXPECT(first == w.steps(w.draw(Goal::episode, 5), rows));
  EXPECT(first != w.steps(w.draw(Goal::episode, 6), rows));
  const Indices some{7, 30}, places{7, 30};
  w.store.tickets_of(some.data(), 2, tickets.data());
  double values[2];
  EXPECT(read_goals(w.store, w.table, w.draw(Goal::episode, 5), kStep, some.data(), tickets.data(), places.data(), 2,
                    reinterpret_cast<std::byte*>(values)).empty());
  EXPECT(values[0] == first[7] && values[1] == first[30]);
}

TEST(rows_that_hold_something_else_have_none) {
  World w(geometry(1, 8));
  w.append(0, 1, 8);
  const Indices rows{1, 5}, wrong{3, 4};
  double values[2];
  auto* out = reinterpret_cast<std::byte*>(values);
  EXPECT((read_goals(w.store, w.table, w.draw(Goal::future, 1), kStep, rows.data(), wrong.data(), nullptr, 2, out) == Indices{0, 1}));
  EXPECT_THROWS(std::out_of_range, w.steps(w.draw(Goal::future, 1), {8}));
  World empty(geometry(1, 8));
  EXPECT((read_goals(empty.store, empty.table, empty.draw(Goal::random, 1), kStep, rows.data(), wrong.data(), nullptr, 2, out) ==
          Indices{0, 1}));
}

TEST(beside_writers_that_lap_the_ring) {
  World w(geometry(2, 32));
  w.append(0, 1, 20);
  w.append(1, 2, 20);
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  for (std::uint64_t lane = 0; lane < 2; ++lane) {
    writers.emplace_back([&, lane] {
      for (std::uint64_t episode = 10 + lane; !stop.load(); episode += 2) w.append(lane, episode, 1 + episode % 9);
    });
  }
  const std::uint64_t n = 40;
  Indices rows(n), tickets(n);
  std::vector<std::byte> goals(n * 40), own(n * 40);
  std::uint64_t whole = 0;
  for (std::uint64_t round = 0; round < 300 || whole == 0; ++round) {
    for (std::uint64_t i = 0; i < n; ++i) rows[i] = static_cast<std::int64_t>((i + round) % 20 + i % 2 * 32);
    const std::uint64_t field = kWide;
    std::byte* to = own.data();
    const Indices torn = w.store.gather(rows.data(), n, {&field, 1}, {&to, 1}, nullptr, tickets.data());
    const GoalDraw draw = w.draw(Goal::future, round);
    const Indices missing = read_goals(w.store, w.table, draw, kWide, rows.data(), tickets.data(), nullptr, n, goals.data());
    std::set<std::int64_t> moved(torn.begin(), torn.end());
    moved.insert(missing.begin(), missing.end());
    for (std::uint64_t i = 0; i < n; ++i) {
      if (moved.count(static_cast<std::int64_t>(i)) != 0) continue;
      ++whole;
      const auto goal = id_of(&goals[i * 40], 40), row = id_of(&own[i * 40], 40);
      EXPECT(goal.has_value() && row.has_value());
      if (!goal || !row) continue;
      EXPECT(*goal >> 32 == *row >> 32);  // of its episode
      EXPECT(*goal >= *row);              // this step or a later one
    }
  }
  stop = true;
  for (std::thread& writer : writers) writer.join();
}

namespace {

/// The steps nearest in time to rows, by the column of steps.
struct Nearest {
  std::vector<std::int64_t> rows, numbers;
  std::vector<double> after;
  std::unique_ptr<bool[]> is_last;
  std::int64_t wrong;

  Nearest(World& w, const Indices& of, const std::vector<double>& deltas)
      : rows(of.size() * deltas.size()), numbers(rows.size()), after(rows.size()), is_last(new bool[rows.size()]) {
    wrong = w.table.nearest(w.heap.fields[kStep], 2, 64, of.data(), of.size(), deltas,
                            {rows.data(), numbers.data(), after.data(), is_last.get()});
  }
};

}  // namespace

TEST(steps_nearest_in_time_are_of_the_rows_trajectory) {
  World w(geometry(1, 8));
  w.append(0, 1, 5);
  w.append(0, 2, 6);  // in the rows 5, 6, 7, 0, 1, 2; of the first one 3 and 4 are left
  const Nearest of_second(w, {7, 2}, {-9, -1.4, 0, 1.6, 9});
  EXPECT_EQ(of_second.wrong, -1);
  EXPECT((of_second.rows == Indices{5, 6, 7, 1, 2, 5, 1, 2, 2, 2}));
  EXPECT((of_second.after == std::vector<double>{-2, -1, 0, 2, 3, -5, -1, 0, 0, 0}));
  EXPECT(of_second.is_last[0] && of_second.is_last[4] && !of_second.is_last[1] && !of_second.is_last[3]);
  const Nearest of_first(w, {4}, {-3, 1});
  EXPECT((of_first.rows == Indices{3, 4}));
  Indices tickets(2);
  w.store.tickets_of(of_first.rows.data(), 2, tickets.data());
  EXPECT(tickets == of_first.numbers);
  EXPECT_THROWS(std::invalid_argument, w.table.nearest(w.heap.fields[kWide], 2, 64, tickets.data(), 1, {}, {}));
  EXPECT_THROWS(std::out_of_range, Nearest(w, {16}, {0}));
}

TEST(times_that_are_not_finite_are_found) {
  World w(geometry(1, 8));
  w.append(0, 1, 5);
  const double wrong = std::numeric_limits<double>::quiet_NaN();
  std::memcpy(w.heap.fields[kStep].row(4), &wrong, 8);
  EXPECT_EQ(Nearest(w, {0}, {1, 9}).wrong, 4);
  EXPECT_EQ(Nearest(w, {4}, {1}).wrong, 4);
  EXPECT_EQ(Nearest(w, {7}, {1}).wrong, -1);  // nothing is there
  EXPECT_EQ(Nearest(w, {7}, {1}).numbers[0], -1);
}

TEST(steps_nearest_in_time_beside_writers_that_lap_the_ring) {
  World w(geometry(2, 32));
  std::atomic<bool> over{false};
  std::vector<std::thread> writers;
  for (std::uint64_t lane = 0; lane < 2; ++lane) {
    w.append(lane, lane << 40, 5);
    writers.emplace_back([&, lane] {
      for (std::uint64_t k = 1; !over; ++k) w.append(lane, lane << 40 | k, 3 + k % 7);
    });
  }
  Dice dice(5);
  std::uint64_t whole = 0;
  for (int i = 0; i < 3000 || whole == 0; ++i) {
    Indices rows{static_cast<std::int64_t>(dice.below(64)), static_cast<std::int64_t>(dice.below(64))};
    const std::vector<double> deltas{-1, 1};
    Indices before(2), after(2), after_found(4);
    w.store.tickets_of(rows.data(), 2, before.data());
    const Nearest found(w, rows, deltas);
    std::vector<double> steps(4);
    std::vector<std::uint64_t> episodes(4);
    for (int k = 0; k < 4; ++k) {
      copy_from_shared(reinterpret_cast<std::byte*>(&episodes[k]), w.heap.fields[kEpisode].row(found.rows[k]), 8);
      copy_from_shared(reinterpret_cast<std::byte*>(&steps[k]), w.heap.fields[kStep].row(found.rows[k]), 8);
    }
    std::vector<double> own(2);
    std::vector<std::uint64_t> own_episodes(2);
    for (int k = 0; k < 2; ++k) {
      copy_from_shared(reinterpret_cast<std::byte*>(&own_episodes[k]), w.heap.fields[kEpisode].row(rows[k]), 8);
      copy_from_shared(reinterpret_cast<std::byte*>(&own[k]), w.heap.fields[kStep].row(rows[k]), 8);
    }
    fence(std::memory_order_seq_cst);
    w.store.tickets_of(rows.data(), 2, after.data());
    w.store.tickets_of(found.rows.data(), 4, after_found.data());
    for (int k = 0; k < 4; ++k) {
      const int r = k / 2;
      if (before[r] < 0 || before[r] != after[r] || found.numbers[k] < 0 || found.numbers[k] != after_found[k]) continue;
      ++whole;
      EXPECT_EQ(episodes[k], own_episodes[r]);
      EXPECT_EQ(steps[k] - own[r], found.after[k]);
      EXPECT(found.after[k] == deltas[k % 2] || found.is_last[k]);
    }
  }
  over = true;
  for (std::thread& writer : writers) writer.join();
}
