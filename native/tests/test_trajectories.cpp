// The table of trajectories against a naive scan of the rows: random writes, wraps, edits, voids, columns, and threads.
#include "core/trajectories.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "blocks.h"
#include "core/store.h"
#include "expect.h"

using namespace engram;

namespace {

enum Fields : std::uint64_t { kStep, kEpisode, kDone, kCut, kFields };

using Indices = std::vector<std::int64_t>;
using Runs = std::vector<Indices>;  // rows of each trajectory, in order

// What ends a trajectory in these tests: the episode, one flag, either of two, step types (two int32 in place of the episode) beside a
// flag, or the episode beside a flag.
enum class By { episode, done, either, types, both };

struct World {
  World(Geometry g, By kind, std::uint64_t columns, std::uint64_t window)
      : heap(g, {8, 8, 1, 1}),
        store(heap.open()),
        memory(Trajectories::bytes(g.lanes, g.lane_length, columns) / 8),
        by(kind),
        width(columns),
        table(heap.view(), boundaries(), columns, window,
              {reinterpret_cast<std::byte*>(memory.data()), memory.size() * 8}) {}

  Boundaries boundaries() const {
    if (by == By::episode) return {true, {heap.fields[kEpisode]}, {kEpisode}};
    if (by == By::both) return {1, {heap.fields[kEpisode], heap.fields[kDone]}, {kEpisode, kDone}};
    if (by == By::done) return {false, {heap.fields[kDone]}, {kDone}};
    if (by == By::types) return {false, {heap.fields[kEpisode], heap.fields[kDone]}, {kEpisode, kDone}, {4, 0}};
    return {false, {heap.fields[kDone], heap.fields[kCut]}, {kDone, kCut}};
  }

  std::uint64_t episode(std::int64_t row) const {
    std::uint64_t value = 0;
    std::memcpy(&value, heap.fields[kEpisode].data + row * 8, 8);
    return value;
  }
  bool has_type(std::int64_t row, std::uint32_t type) const {
    const std::uint64_t both = episode(row);
    return static_cast<std::uint32_t>(both) == type || static_cast<std::uint32_t>(both >> 32) == type;
  }
  bool ends(std::int64_t row, std::int64_t next) const {
    if (by == By::episode || by == By::both) {
      if (episode(row) != episode(next)) return true;
      if (by == By::episode) return false;
    }
    if (by == By::types && (has_type(row, 2) || has_type(next, 0))) return true;
    const bool done = heap.fields[kDone].data[row] != std::byte{0}, cut = heap.fields[kCut].data[row] != std::byte{0};
    return done || (by == By::either && cut);
  }

  // The rows of a lane's or column's live steps, oldest first, with breaks where a ring or what was written by number ends.
  std::vector<Indices> pieces(std::uint64_t lane, std::uint64_t column) const {
    const Control control = heap.view();
    const std::uint64_t steps = control.lane_length() / width, start = lane * control.lane_length();
    const Lane& words = control.lane(lane);
    const std::uint64_t since_empty = (words.cursor - words.base) / width;
    const std::uint64_t high = (std::max<std::uint64_t>(words.high, words.base) - words.base + width - 1 - column) / width;  // a slot may have been begun
    const auto span = [&](std::uint64_t from, std::uint64_t to) {
      Indices rows;
      for (std::uint64_t i = from; i < to; ++i) {
        rows.push_back(static_cast<std::int64_t>(start + i % steps * width + column));
      }
      return rows;
    };
    if (since_empty >= steps || high == steps) return {span(since_empty % steps, since_empty % steps + steps)};
    return {span(since_empty, std::max(high, since_empty)), span(0, since_empty)};
  }

  Runs expected() const {
    const Control control = heap.view();
    Runs runs;
    for (std::uint64_t lane = 0; lane < control.lanes(); ++lane) {
      for (std::uint64_t column = 0; column < width; ++column) {
        for (const Indices& piece : pieces(lane, column)) {
          bool open = false;
          std::int64_t last = -1;
          for (const std::int64_t row : piece) {
            if (!is_committed(control.word(static_cast<std::uint64_t>(row)))) {
              open = false;
              continue;
            }
            if (!open || ends(last, row)) runs.emplace_back();
            runs.back().push_back(row);
            open = true;
            last = row;
          }
        }
      }
    }
    return runs;
  }

  Runs found() {
    Runs runs;
    for (const Window& run : table.runs()) runs.push_back(rows_of(run));
    return runs;
  }

  Indices rows_of(const Window& window) const {
    Indices rows;
    for (std::uint64_t i = 0; i < window.length; ++i) rows.push_back(table.row(window.track, window.first + i));
    return rows;
  }

  void append(Dice& dice, std::uint64_t lane, std::uint64_t n) {
    Rows rows(heap.fields, n);
    fill(dice, rows, n);
    store.append(lane, n, rows.in, nullptr);
  }

  void fill(Dice& dice, Rows& rows, std::uint64_t n) {
    for (std::uint64_t i = 0; i < n; ++i) {
      if (dice.below(5) == 0) ++latest;
      std::memcpy(rows.row(kEpisode, i), &latest, 8);
      if (by == By::types) {  // others than the two look like them in some of their bytes
        constexpr std::uint32_t kTypes[] = {0, 2, 0x100, 0x200, 0x20000, 0x2000000};
        const auto type = [&] { return dice.below(3) == 0 ? kTypes[dice.below(6)] : 1u; };
        const std::uint32_t types[] = {type(), type()};
        std::memcpy(rows.row(kEpisode, i), types, 8);
      }
      *rows.row(kDone, i) = std::byte(dice.below(7) == 0);
      *rows.row(kCut, i) = std::byte(dice.below(9) == 0 ? 0x80 : 0);
    }
  }

  Heap heap;
  Store store;
  std::vector<std::uint64_t> memory;  // zero, as the table wants it
  By by;
  std::uint64_t width, latest = 0;
  Trajectories table;
};

std::set<Indices> windows_of(const Runs& runs, const WindowSpec& shape) {
  std::set<Indices> windows;
  const auto T = static_cast<std::int64_t>(shape.length);
  for (const Indices& run : runs) {
    const auto n = static_cast<std::int64_t>(run.size());
    if (shape.strict && n < T) continue;
    const std::int64_t last = std::max<std::int64_t>(n - T, 0) + static_cast<std::int64_t>(shape.right);
    for (std::int64_t s = -static_cast<std::int64_t>(shape.left); s <= std::min(last, n - 1); ++s) {
      const std::int64_t from = std::max<std::int64_t>(s, 0), to = std::min(s + T, n);
      if (from < to) windows.insert(Indices(run.begin() + from, run.begin() + to));
    }
  }
  return windows;
}

// The same of windows that hold none of the last steps of runs whose last row has a negative mark.
void check_unfinished(World& w, Dice& dice, const Runs& runs) {
  std::vector<std::int64_t> marks(w.heap.view().capacity());
  for (std::int64_t& mark : marks) mark = static_cast<std::int64_t>(dice.below(2)) - 1;
  const std::uint64_t length = dice.in(1, 4);
  WindowSpec shape{length, dice.below(2) == 0, dice.below(2) == 0, dice.below(length), dice.below(length)};
  shape.unfinished = dice.in(1, 3);
  shape.final = {reinterpret_cast<std::byte*>(marks.data()), 8};
  Runs shorter;
  for (Indices run : runs) {
    if (marks[static_cast<std::size_t>(run.back())] < 0) run.resize(run.size() - std::min<std::size_t>(run.size(), shape.unfinished));
    if (!run.empty()) shorter.push_back(run);
  }
  const std::set<Indices> legal = windows_of(shorter, shape);
  EXPECT_EQ(w.table.windows(shape) > 0, !legal.empty());
  const Drawn drawn = w.table.draw(dice.bits(), 5, shape);
  EXPECT_EQ(drawn.windows.size(), legal.empty() ? 0u : 5u);
  TrajectoryEpoch epoch;
  const Drawn visited = w.table.draw_epoch(epoch, dice.bits(), runs.size() + 1, shape, true, false);
  for (const Drawn* some : {&drawn, &visited}) {
    for (const Window& window : some->windows) EXPECT(legal.count(w.rows_of(window)) == 1);
  }
  shape.left = shape.right = 0;
  Indices all(marks.size());
  for (std::size_t row = 0; row < all.size(); ++row) all[row] = static_cast<std::int64_t>(row);
  std::set<Indices> at;
  for (const Window& window : w.table.windows_at(all.data(), all.size(), shape, all.size()).windows) at.insert(w.rows_of(window));
  EXPECT(at == windows_of(shorter, shape));
}

// Every draw gives windows that there are, and its rows and tickets are theirs.
void check_draws(World& w, Dice& dice, const Runs& runs) {
  check_unfinished(w, dice, runs);
  const std::uint64_t length = dice.in(1, 6);
  const WindowSpec shape{length, dice.below(2) == 0, dice.below(2) == 0, dice.below(length), dice.below(length)};
  const std::set<Indices> legal = windows_of(runs, shape);
  const Drawn drawn = w.table.draw(dice.bits(), 5, shape);
  EXPECT_EQ(drawn.windows.size(), legal.empty() ? 0u : 5u);
  std::size_t at = 0;
  for (const Window& window : drawn.windows) {
    const Indices rows = w.rows_of(window);
    EXPECT(legal.count(rows) == 1);
    for (const std::int64_t row : rows) {
      EXPECT_EQ(drawn.rows[at], row);
      EXPECT_EQ(drawn.numbers[at++], number_of(w.heap.view().word(static_cast<std::uint64_t>(row))));
    }
  }
  EXPECT_EQ(at, drawn.rows.size());
  std::uint64_t anchors = 0;
  std::set<std::int64_t> begins;
  for (const Indices& run : runs) {
    for (std::size_t i = 0; i + length <= run.size(); ++i, ++anchors) begins.insert(run[i]);
  }
  EXPECT_EQ(w.table.windows({length}), anchors);
  TrajectoryEpoch epoch;
  Runs visited;
  WindowSpec whole{1000};
  whole.strict = false;
  for (const Window& window : w.table.draw_epoch(epoch, dice.bits(), 1 + 2 * runs.size(), whole, true, false).windows) {
    visited.push_back(w.rows_of(window));
  }
  Runs sorted = runs;
  std::sort(sorted.begin(), sorted.end());
  std::sort(visited.begin(), visited.end());
  EXPECT(visited == sorted);
  const std::uint64_t capacity = w.heap.view().capacity();
  Indices all(capacity);
  for (std::uint64_t row = 0; row < capacity; ++row) all[row] = static_cast<std::int64_t>(row);
  std::set<std::int64_t> starts;
  for (const Window& window : w.table.windows_at(all.data(), capacity, {length}, capacity).windows) {
    starts.insert(w.table.row(window.track, window.first));
  }
  EXPECT(starts == begins);
  EXPECT_EQ(w.table.windows_at(all.data(), capacity, {length}, 2).windows.size(), std::min<std::size_t>(2, begins.size()));
  WindowSpec loose{length};
  loose.strict = false;
  const auto at_rows = w.table.window_lengths(all.data(), capacity, loose);
  WindowSpec over{length};
  over.right = length / 2;
  const auto over_the_end = w.table.window_lengths(all.data(), capacity, over);
  std::map<std::int64_t, std::uint64_t> rest, overhanging;
  for (const Indices& run : runs) {
    for (std::size_t i = 0; i < run.size(); ++i) {
      if (i == 0 || i + length <= run.size()) rest[run[i]] = std::min<std::uint64_t>(length, run.size() - i);
      // Strict, but half of a window may hang over the end.
      const std::uint64_t left = run.size() - i, over = length / 2;
      overhanging[run[i]] = left + over >= length ? std::min<std::uint64_t>(length, left) : 0;
    }
  }
  for (std::size_t row = 0; row < capacity; ++row) {
    EXPECT_EQ(at_rows[row], rest[static_cast<std::int64_t>(row)]);
    EXPECT_EQ(over_the_end[row], overhanging[static_cast<std::int64_t>(row)]);
  }
}

// Random writes of every kind; now and then the table must say what a scan of the rows says.
void random_walk(Geometry g, By by, std::uint64_t width, std::uint64_t seed, int steps) {
  Dice dice(seed);
  World w(g, by, width, dice.in(1, 5));
  const std::uint64_t slots = g.lane_length / width;
  const bool late = dice.below(3) == 0;  // attached to a store that holds data
  bool attached = false;
  for (int step = 0; step < steps; ++step) {
    if (!attached && (!late || step > steps / 3)) {
      w.store.attach(w.table);
      attached = true;
    }
    const std::uint64_t lane = dice.below(g.lanes), kind = dice.below(40);
    if (kind < 24) {
      w.append(dice, lane, width * dice.in(1, std::max<std::uint64_t>(1, slots / 3)));
    } else if (kind < 26) {
      w.append(dice, lane, width * dice.in(1, 2 * slots + 1));
    } else if (kind < 29 && width == 1) {
      const std::uint64_t n = dice.in(1, 2 * g.lanes);
      Rows rows(w.heap.fields, n);
      w.fill(dice, rows, n);
      Indices lanes(n);
      for (auto& l : lanes) l = static_cast<std::int64_t>(dice.below(g.lanes));
      w.store.append_by_lane(lanes.data(), n, rows.in, nullptr);
    } else if (kind < 36) {  // live rows, or any
      const bool grow = dice.below(4) == 0;
      Indices rows;
      for (std::uint64_t i = 0; i < 3; ++i) {
        const auto row = static_cast<std::int64_t>(dice.below(g.capacity));
        if (grow || is_committed(w.heap.view().word(static_cast<std::uint64_t>(row)))) rows.push_back(row);
      }
      Rows data(w.heap.fields, rows.size());
      w.fill(dice, data, rows.size());
      if (grow) {
        const std::vector<std::uint64_t> which{kStep, kEpisode, kDone, kCut};
        w.store.scatter(rows.data(), rows.size(), which, data.in, true);
      } else {
        const std::vector<std::uint64_t> which{kEpisode, kDone, kCut};
        const std::vector<const std::byte*> in{data.in[kEpisode], data.in[kDone], data.in[kCut]};
        w.store.scatter(rows.data(), rows.size(), which, in, false);
      }
    } else if (kind < 38) {
      w.store.empty(false);
    } else if (attached) {  // a writer died, and its rows were set aside when the store was opened again
      const std::uint64_t row = dice.below(g.capacity);
      Word& word = w.heap.view().word(row);
      if (is_committed(word)) {
        word = ticket(number_of(word), State::voided);
        ++w.heap.view().counters().void_rows;
        w.table.forget();
      }
    }
    if (attached && dice.below(3) == 0) {
      const Runs runs = w.expected();
      EXPECT(w.found() == runs);
      check_draws(w, dice, runs);
      if (expect::failures > 0) {
        expect::fail(__FILE__, __LINE__, "seed " + expect::show(seed) + " step " + expect::show(step));
        return;
      }
    }
  }
}

}  // namespace

namespace {

// Trajectories of these lengths.
void write_episodes(World& w, const std::vector<std::uint64_t>& lengths, std::uint64_t lane) {
  for (const std::uint64_t length : lengths) {
    Rows rows(w.heap.fields, length);
    ++w.latest;
    for (std::uint64_t i = 0; i < length; ++i) {
      std::memcpy(rows.row(kEpisode, i), &w.latest, 8);
      *rows.row(kDone, i) = std::byte(i + 1 == length);
    }
    w.store.append(lane, length, rows.in, nullptr);
  }
}

}  // namespace

TEST(random_writes_of_one_lane) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    random_walk(geometry(1, 1 + seed % 23), By(seed % 5), 1, seed, 60);
  }
}

TEST(random_writes_of_several_lanes) {
  for (std::uint64_t seed = 1000; seed < 1200; ++seed) {
    random_walk(geometry(2 + seed % 4, 3 + seed % 17), By(seed % 5), 1, seed, 80);
  }
}

TEST(random_writes_of_columns) {
  for (std::uint64_t seed = 2000; seed < 2150; ++seed) {
    const std::uint64_t width = 2 + seed % 3;
    random_walk(geometry(1, width * (2 + seed % 11)), By(seed % 5), width, seed, 80);
  }
}

TEST(places_that_an_emptied_ring_skipped_stop_nothing) {
  World w(geometry(1, 11), By::done, 1, 3);
  w.store.attach(w.table);
  write_episodes(w, {3}, 0);
  EXPECT_EQ(w.table.census().trajectories, 1);
  w.store.empty(false);
  const Indices rows{2};
  Rows data(w.heap.fields, 1);
  const std::vector<std::uint64_t> which{kStep, kEpisode, kDone, kCut};
  w.store.scatter(rows.data(), 1, which, data.in, true);  // ahead of the cursor
  EXPECT((w.found() == Runs{{0, 1, 2}}));
  write_episodes(w, {2}, 0);
  EXPECT((w.found() == Runs{{2}, {0, 1}}));
}

TEST(a_young_table_is_empty) {
  World w(geometry(2, 8), By::done, 1, 3);
  w.store.attach(w.table);
  EXPECT(w.table.draw(1, 4, {3}).windows.empty());
  EXPECT_EQ(w.table.census().trajectories, 0);
  EXPECT_EQ(w.table.windows({1}), 0);
  TrajectoryEpoch epoch;
  EXPECT(w.table.draw_epoch(epoch, 1, 4, {3}, true, false).windows.empty());
  EXPECT_EQ(epoch.count, 0);
}

TEST(mistakes_of_the_caller) {
  World w(geometry(2, 8), By::done, 1, 3);
  const std::span<std::byte> memory(reinterpret_cast<std::byte*>(w.memory.data()), w.memory.size() * 8);
  EXPECT_THROWS(std::invalid_argument, Trajectories(w.heap.view(), w.boundaries(), 2, 3, memory));
  EXPECT_THROWS(std::invalid_argument, Trajectories(w.heap.view(), w.boundaries(), 1, 0, memory));
  EXPECT_THROWS(std::invalid_argument, Trajectories(w.heap.view(), {1, {}, {}}, 1, 3, memory));
  EXPECT_THROWS(std::invalid_argument, Trajectories(w.heap.view(), w.boundaries(), 1, 3, memory.first(4096)));
  EXPECT_THROWS(std::invalid_argument, w.table.draw(1, 1, {0}));
  EXPECT_THROWS(std::invalid_argument, w.table.draw(1, 1, {2, true, false, 2, 0}));
  EXPECT_THROWS(std::invalid_argument, w.table.draw(1, 1, {2, true, false, 0, 2}));
  const std::int64_t outside = 16;
  EXPECT_THROWS(std::out_of_range, w.table.windows_at(&outside, 1, {1}, 1));
  EXPECT_THROWS(std::out_of_range, w.table.window_lengths(&outside, 1, {1}));
}

namespace {

std::map<Indices, std::uint64_t> count_draws(World& w, const WindowSpec& shape, int draws) {
  std::map<Indices, std::uint64_t> counts;
  for (const Indices& window : windows_of(w.expected(), shape)) counts[window] = 0;
  for (int draw = 0; draw < draws; ++draw) {
    const Drawn drawn = w.table.draw(static_cast<std::uint64_t>(draw), 4, shape);
    for (const Window& window : drawn.windows) ++counts.at(w.rows_of(window));
  }
  return counts;
}

std::vector<std::uint64_t> values(const std::map<Indices, std::uint64_t>& counts) {
  std::vector<std::uint64_t> all;
  for (const auto& [window, count] : counts) all.push_back(count);
  return all;
}

}  // namespace

TEST(anchors_are_uniform) {
  for (const std::uint64_t length : {3u, 1u, 4u, 7u}) {  // 3 is the length whose anchors the table counts
    World w(geometry(2, 20), By::done, 1, 3);
    w.store.attach(w.table);
    write_episodes(w, {7, 1, 2, 4, 3, 8, 5}, 0);
    write_episodes(w, {2, 2, 4}, 1);
    WindowSpec shape{length, true, true};
    const auto counts = count_draws(w, shape, 2000);
    EXPECT(counts.size() > 1);
    EXPECT_UNIFORM(values(counts));
  }
}

TEST(anchors_with_overhang_and_short_ones_are_uniform) {
  World w(geometry(1, 20), By::done, 1, 3);
  w.store.attach(w.table);
  write_episodes(w, {7, 1, 2, 4, 3}, 0);
  EXPECT_UNIFORM(values(count_draws(w, {3, false, true}, 2000)));
  EXPECT_UNIFORM(values(count_draws(w, {3, true, true, 2, 0}, 2000)));
}

TEST(trajectories_are_uniform_and_so_are_the_starts_in_one) {
  World w(geometry(2, 20), By::episode, 1, 3);
  w.store.attach(w.table);
  write_episodes(w, {7, 1, 2, 4, 3, 8, 5}, 0);
  write_episodes(w, {2, 2, 9}, 1);
  const auto counts = count_draws(w, {3, true, false}, 6000);
  std::map<std::uint64_t, std::vector<std::uint64_t>> by_episode;
  for (const auto& [window, count] : counts) by_episode[w.episode(window[0])].push_back(count);
  EXPECT_EQ(by_episode.size(), 5);  // of 4, 3, 8, 5 and 9 steps
  std::vector<std::uint64_t> totals;
  for (const auto& [episode, starts] : by_episode) {
    totals.push_back(0);
    for (const std::uint64_t count : starts) totals.back() += count;
    if (starts.size() > 1) EXPECT_UNIFORM(starts);
  }
  EXPECT_UNIFORM(totals);
}

TEST(long_trajectories_among_many_short_ones_are_found_and_uniform) {
  World w(geometry(1, 4000), By::done, 1, 1);
  w.store.attach(w.table);
  write_episodes(w, std::vector<std::uint64_t>(1500, 1), 0);
  write_episodes(w, {6, 9}, 0);
  write_episodes(w, std::vector<std::uint64_t>(1500, 1), 0);
  const auto counts = count_draws(w, {6, true, true}, 500);
  EXPECT_EQ(counts.size(), 5);
  EXPECT_UNIFORM(values(counts));
  const auto of_two = values(count_draws(w, {6, true, false}, 500));
  EXPECT_UNIFORM((std::vector<std::uint64_t>{of_two[0], of_two[1] + of_two[2] + of_two[3] + of_two[4]}));
  EXPECT(w.table.draw(1, 1, {10}).windows.empty());
  EXPECT_EQ(w.table.census().longest, 9);
  EXPECT_EQ(w.table.census().trajectories, 3002);
}

TEST(draws_are_a_function_of_the_key) {
  World w(geometry(1, 40), By::done, 1, 3);
  w.store.attach(w.table);
  write_episodes(w, {7, 1, 2, 4, 3, 8, 5}, 0);
  EXPECT(w.table.draw(5, 8, {3}).rows == w.table.draw(5, 8, {3}).rows);
  EXPECT(w.table.draw(5, 8, {3}).rows != w.table.draw(6, 8, {3}).rows);
  const auto few = w.table.draw(5, 4, {3}).rows, many = w.table.draw(5, 8, {3}).rows;
  EXPECT(std::equal(few.begin(), few.end(), many.begin()));
}

TEST(passes_visit_every_trajectory_once) {
  World w(geometry(2, 60), By::done, 1, 3);
  w.store.attach(w.table);
  write_episodes(w, {7, 1, 2, 4, 3, 8, 5}, 0);
  write_episodes(w, {2, 2, 9}, 1);
  std::set<std::vector<std::uint64_t>> orders;
  TrajectoryEpoch epoch;
  const WindowSpec shape{2, false};
  for (std::uint64_t round = 0; round < 10; ++round) {
    std::vector<std::uint64_t> seen;
    do {
      const Drawn drawn = w.table.draw_epoch(epoch, 100 * round + seen.size(), 4, shape, true, false);
      EXPECT(drawn.windows.size() <= 4);
      for (const Window& window : drawn.windows) seen.push_back(w.episode(w.rows_of(window)[0]));
    } while (epoch.visited < epoch.count);
    EXPECT_EQ(seen.size(), 10);
    EXPECT_EQ(std::set<std::uint64_t>(seen.begin(), seen.end()).size(), 10);
    orders.insert(seen);
  }
  EXPECT(orders.size() > 8);
  // In order; too short ones are left out; a rest is skipped; later trajectories are of the next one.
  Indices found;
  epoch = {};
  for (const Window& window : w.table.draw_epoch(epoch, 1, 10, {4}, false, false).windows) {
    found.push_back(static_cast<std::int64_t>(w.episode(w.rows_of(window)[0])));
  }
  EXPECT((found == Indices{1, 4, 6, 7, 10}));
  epoch = {};
  EXPECT_EQ(w.table.draw_epoch(epoch, 1, 4, shape, true, true).windows.size(), 4);
  EXPECT_EQ(epoch.visited, 4);
  EXPECT_EQ(w.table.draw_epoch(epoch, 1, 4, shape, true, true).windows.size(), 4);
  EXPECT_EQ(epoch.visited, 10);
  EXPECT_EQ(w.table.draw_epoch(epoch, 1, 3, shape, true, true).windows.size(), 3);
  EXPECT_EQ(w.table.draw_epoch(epoch, 1, 8, shape, true, true).windows.size(), 8);  // of a new epoch: 7 were left
  EXPECT_EQ(epoch.visited, 10);
  EXPECT(w.table.draw_epoch(epoch, 1, 11, shape, true, true).windows.empty());
  epoch = {};
  for (const std::uint64_t n : {4, 2, 5, 3}) {  // with 4 left a batch of 5 begins an epoch
    EXPECT_EQ(w.table.draw_epoch(epoch, 1, n, shape, true, true).windows.size(), n);
  }
  EXPECT_EQ(epoch.visited, 10);
  EXPECT_EQ(w.table.draw_epoch(epoch, 1, 4, shape, true, false).windows.size(), 4);
  write_episodes(w, {3}, 1);
  EXPECT_EQ(w.table.draw_epoch(epoch, 1, 8, shape, true, false).windows.size(), 6);
  EXPECT_EQ(epoch.count, 10);
  EXPECT_EQ(epoch.visited, 10);
  EXPECT_EQ(w.table.draw_epoch(epoch, 1, 4, shape, true, false).windows.size(), 4);
  EXPECT_EQ(epoch.count, 11);
  EXPECT_EQ(epoch.visited, 4);
}

TEST(a_row_in_the_making_stops_the_table_and_a_lap_before_is_not_taken_for_this_one) {
  World w(geometry(1, 8), By::episode, 1, 1);
  w.store.attach(w.table);
  write_episodes(w, {8, 3}, 0);  // rows 0 … 2: the second; 3 … 7: the first
  EXPECT_EQ(w.table.census().trajectories, 2);
  const Control control = w.heap.view();
  // A writer has reserved rows 3 and 4, and has not begun: they hold the lap before.
  std::optional<ClaimGuard> claim(std::in_place, control.participant(1));
  control.lane(0).cursor += 2;
  EXPECT_EQ(w.table.census().trajectories, 2);
  const std::uint64_t number = control.counters().next_ticket.fetch_add(2);
  claim->note(number, 2, 0, 11);
  EXPECT_EQ(w.table.census().trajectories, 2);
  Runs runs = w.found();
  EXPECT((runs == Runs{{5, 6, 7}, {0, 1, 2}}));
  write_episodes(w, {1}, 0);  // row 5: another writer, behind it, is ready first
  EXPECT((w.found() == Runs{{6, 7}, {0, 1, 2}}));
  control.word(3) = ticket(number, State::writing);
  EXPECT((w.found() == Runs{{6, 7}, {0, 1, 2}}));
  const std::uint64_t second = 2;
  for (const std::int64_t row : {3, 4}) {
    const auto r = static_cast<std::uint64_t>(row);
    std::memcpy(w.heap.fields[kEpisode].data + row * 8, &second, 8);
    control.lap(r) = control.lap_of(8 + r);
    control.word(r) = ticket(number + r - 3, State::committed);
  }
  claim.reset();
  const Indices rows{3, 4};
  w.table.written(rows.data(), 2, number);
  EXPECT((w.found() == Runs{{6, 7}, {0, 1, 2, 3, 4}, {5}}));
}

TEST(a_reserved_row_is_passed_over_once_every_claim_of_that_moment_is_given_back) {
  World w(geometry(2, 8), By::episode, 1, 1);
  write_episodes(w, {3}, 0);
  const Control control = w.heap.view();
  std::optional<ClaimGuard> stopped(std::in_place, control.participant(1));  // before it has its numbers
  control.lane(0).cursor += 1;  // by a writer that died, or gave up: perhaps by the one that is stopped
  write_episodes(w, {2}, 0);
  EXPECT((w.found() == Runs{{0, 1, 2}}));
  stopped->note(control.counters().next_ticket.fetch_add(1), 1, 0, 3);
  EXPECT((w.found() == Runs{{0, 1, 2}}));
  std::optional<ClaimGuard> later(std::in_place, control.participant(2));  // reserves nothing before row 6
  EXPECT((w.found() == Runs{{0, 1, 2}}));
  stopped.reset();
  EXPECT((w.found() == Runs{{0, 1, 2}, {4, 5}}));
  later.reset();
  control.lane(1).cursor += 3;  // a whole batch of a dead writer
  EXPECT((w.found() == Runs{{0, 1, 2}, {4, 5}}));
  write_episodes(w, {2}, 1);
  EXPECT((w.found() == Runs{{0, 1, 2}, {4, 5}, {11, 12}}));
}

TEST(rows_that_nobody_will_write_do_not_stop_it_for_ever) {
  World w(geometry(1, 8), By::episode, 1, 1);
  w.store.attach(w.table);
  write_episodes(w, {3}, 0);
  EXPECT_EQ(w.table.census().trajectories, 1);
  w.heap.view().lane(0).cursor += 1;  // a writer that gave up
  write_episodes(w, {2}, 0);
  EXPECT((w.found() == Runs{{0, 1, 2}, {4, 5}}));
}

TEST(a_scan_in_pieces_beside_writes) {
  World w(geometry(2, 5000), By::done, 1, 4);
  Dice dice(3);
  for (int i = 0; i < 40; ++i) w.append(dice, dice.below(2), 300);
  w.store.attach(w.table);
  std::uint64_t left = 1, calls = 0;
  for (; left > 0 && calls < 1000; ++calls) {
    left = w.table.catch_up(100);
    w.append(dice, dice.below(2), 1);
  }
  EXPECT(calls > 20);
  EXPECT(w.found() == w.expected());
}

namespace {

// Rows of one writer: step `step` of its episode `episode`.
void tell(Rows& rows, std::uint64_t i, std::uint64_t episode, std::uint64_t step, bool done) {
  std::memcpy(rows.row(kStep, i), &step, 8);
  std::memcpy(rows.row(kEpisode, i), &episode, 8);
  *rows.row(kDone, i) = std::byte(done);
  *rows.row(kCut, i) = std::byte{0};
}

// Writers append episodes while windows are drawn and read: what is read is always consecutive steps of one episode.
void writers_and_readers(std::uint64_t lanes, By by, std::uint64_t writers, std::uint64_t length) {
  World w(geometry(lanes, length), by, 1, 4);
  w.store.attach(w.table);
  std::atomic<std::uint64_t> running{writers};
  std::vector<std::thread> threads;
  for (std::uint64_t writer = 0; writer < writers; ++writer) {
    threads.emplace_back([&, writer] {
      Dice dice(writer);
      std::uint64_t episode = 0, step = 0, size = 0;
      for (int i = 0; i < 1500; ++i) {
        const std::uint64_t n = dice.in(1, 6);
        Rows rows(w.heap.fields, n);
        for (std::uint64_t j = 0; j < n; ++j) {
          if (step == size) {
            ++episode;
            step = 0;
            size = dice.in(1, 12);
          }
          tell(rows, j, episode * 64 + writer + 1, step, step + 1 == size);
          ++step;
        }
        w.store.append(writer % lanes, n, rows.in, nullptr);
      }
      --running;
    });
  }
  std::uint64_t whole = 0, key = 0;
  const WindowSpec shapes[] = {{3}, {4, true, true}, {4, false}, {2, true, true}};
  const std::vector<std::uint64_t> which{kStep, kEpisode};
  while (running > 0 || whole < 100) {
    const WindowSpec& shape = shapes[++key % 4];
    const Drawn drawn = w.table.draw(key, 4, shape);
    const std::uint64_t n = drawn.rows.size();
    std::vector<std::uint64_t> step(n + 1), episode(n + 1);
    const std::vector<std::byte*> batch{reinterpret_cast<std::byte*>(step.data()),
                                        reinterpret_cast<std::byte*>(episode.data())};
    const auto moved = w.store.gather(drawn.rows.data(), n, which, batch, drawn.numbers.data(), nullptr);
    std::vector<bool> bad(n);
    for (const std::int64_t at : moved) bad[static_cast<std::size_t>(at)] = true;
    std::size_t at = 0;
    for (const Window& window : drawn.windows) {
      const std::size_t from = at;
      at += window.length;
      if (std::find(bad.begin() + static_cast<std::ptrdiff_t>(from), bad.begin() + static_cast<std::ptrdiff_t>(at), true) !=
          bad.begin() + static_cast<std::ptrdiff_t>(at)) {
        continue;
      }
      ++whole;
      for (std::size_t i = from + 1; i < at; ++i) {
        EXPECT_EQ(episode[i], episode[from]);
        EXPECT_EQ(step[i], step[from] + (i - from));
      }
    }
  }
  for (auto& thread : threads) thread.join();
  EXPECT(w.found() == w.expected());
}

}  // namespace

TEST(a_lane_per_writer_beside_readers) { writers_and_readers(3, By::done, 3, 200); }
TEST(writers_of_one_lane_beside_readers) { writers_and_readers(1, By::episode, 3, 300); }
TEST(a_short_lane_beside_readers) { writers_and_readers(1, By::episode, 2, 24); }

TEST(an_edit_that_the_table_has_not_heard_of_is_seen_in_the_rows) {
  World w(geometry(1, 8), By::done, 1, 8);
  w.store.attach(w.table);
  write_episodes(w, {8}, 0);
  EXPECT_EQ(w.table.draw(1, 1, {8}).numbers.size(), 8);
  w.heap.fields[kDone].data[3] = std::byte{1};  // its writer will call in a moment
  const Drawn drawn = w.table.draw(1, 1, {8});
  EXPECT((drawn.numbers == Indices(8, -1)));  // so that the read says that it moved
  for (const std::int64_t number : w.table.draw(1, 50, {4}).numbers) EXPECT(number > 0);
  for (const Window& window : w.table.draw(1, 50, {4}).windows) EXPECT(window.first == 8 || window.first == 12);
}

/// Lets the table look at everything between an edit and its call.
struct LooksBefore : Index {
  explicit LooksBefore(Trajectories& t) : table(t) {}
  void written(const std::int64_t*, std::uint64_t, std::uint64_t) override {}
  void edited(const std::int64_t*, std::uint64_t, std::uint64_t, std::span<const std::uint64_t>, std::uint64_t) override {
    table.draw(1, 1, {8});
  }
  void lost(const std::int64_t*, std::uint64_t) override {}
  void emptied() override {}
  Trajectories& table;
};

// Another process is in the midst of an edit, or was killed there.
TEST(a_row_that_is_being_edited_hides_nothing) {
  for (const std::uint64_t width : {std::uint64_t{1}, std::uint64_t{2}}) {
    Dice dice(11);
    World w(geometry(1, 32), By::episode, width, 3);
    w.append(dice, 0, 24);
    const Runs before = w.expected();
    Word& word = w.heap.view().word(5);
    Word& scatters = w.heap.view().counters().scatters;
    const std::uint64_t seen = word;
    word = ticket(30, State::writing);
    w.heap.view().begin_edit(5, seen, 30);
    EXPECT(w.found() == before);  // a young table
    scatters = scatters + 1;
    EXPECT(w.found() == before);  // one that looks at all of them again
    w.append(dice, 0, 4);
    EXPECT(w.found().back().back() >= 26);
    std::memset(w.heap.fields[kEpisode].data + 5 * 8, 0x77, 8);
    word = ticket(30, State::committed) | kEdited;
    scatters = scatters + 1;
    EXPECT(w.found() == w.expected() && w.found() != before);
    word = ticket(31, State::voided);
    scatters = scatters + 1;
    EXPECT(w.found() == w.expected());
  }
}

TEST(an_edit_that_was_seen_before_its_call_hides_none_of_another_process) {
  World w(geometry(1, 8), By::done, 1, 8);
  LooksBefore between(w.table);
  w.store.attach(between);
  w.store.attach(w.table);
  write_episodes(w, {8}, 0);
  const std::uint64_t which[] = {kDone};
  const std::byte flag{1};
  const std::vector<const std::byte*> in{&flag};
  const std::int64_t rows[] = {2, 5};
  w.store.scatter(rows, 1, which, in, false);
  w.heap.open(1).scatter(rows + 1, 1, which, in, false);
  w.table.draw(1, 1, {8});
  EXPECT(w.found() == w.expected());
}

TEST(editors_beside_writers_and_readers) {
  World w(geometry(1, 128), By::done, 1, 3);
  w.store.attach(w.table);
  Dice first(1);
  w.append(first, 0, 128);
  std::atomic<int> running{3};
  std::vector<std::thread> threads;
  for (std::uint64_t editor = 0; editor < 2; ++editor) {
    threads.emplace_back([&, editor] {
      Dice dice(10 + editor);
      const std::vector<std::uint64_t> which{kDone};
      for (int i = 0; i < 1000; ++i) {
        const auto row = static_cast<std::int64_t>(dice.below(128));
        const auto flag = std::byte(dice.below(2));
        const std::vector<const std::byte*> in{&flag};
        w.store.scatter(&row, 1, which, in, false);
      }
      --running;
    });
  }
  threads.emplace_back([&] {
    Dice dice(20);
    World* world = &w;
    for (int i = 0; i < 1000; ++i) world->append(dice, 0, dice.in(1, 4));
    --running;
  });
  std::uint64_t key = 0;
  while (running > 0) w.table.draw(++key, 4, {2, false});
  for (auto& thread : threads) thread.join();
  EXPECT(w.found() == w.expected());
}
