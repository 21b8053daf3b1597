// Windows in the order in which they were completed, each once, against a history of what was appended.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "blocks.h"
#include "core/store.h"
#include "core/trajectories.h"
#include "expect.h"

using namespace engram;

namespace {

using Indices = std::vector<std::int64_t>;

/// A store whose rows have the number of their trajectory, and all that was ever appended since it was emptied.
struct World {
  World(Geometry g, std::uint64_t columns = 1, std::uint64_t counted = 3)
      : width(columns),
        slots(g.lane_length / columns),
        heap(g, {8}),
        store(heap.open()),
        memory(Trajectories::bytes(g.lanes, g.lane_length, columns) / 8),
        table(heap.view(), {true, {heap.fields[0]}, {0}}, columns, counted,
              {reinterpret_cast<std::byte*>(memory.data()), memory.size() * 8}),
        tracks(g.lanes * columns),
        next(tracks.size()),
        marks(g.capacity, -1) {
    store.attach(table);
  }

  struct Trajectory {
    std::uint64_t first, steps;  // counted from the first step since the store was emptied
  };
  struct Track {
    std::uint64_t base = 0, end = 0;  // steps before that one; steps since
    std::vector<Trajectory> trajectories;
    std::vector<std::int64_t> numbers;
    std::set<std::uint64_t> handed_out;
  };

  std::int64_t row(std::size_t track, std::uint64_t step) const {
    const std::uint64_t lane = track / width, column = track % width, slot = (tracks[track].base + step) % slots;
    return static_cast<std::int64_t>(lane * heap.geometry.lane_length + slot * width + column);
  }

  /// One step more of every track of a lane, `n` times. With `begin` some begin a trajectory.
  void append(std::uint64_t lane, std::uint64_t n, const std::function<bool()>& begin) {
    Rows rows(heap.fields, n * width);
    for (std::uint64_t i = 0; i < n * width; ++i) {
      const std::size_t at = lane * width + i % width;
      Track& track = tracks[at];
      if (track.trajectories.empty() || begin()) {
        ++latest[at];
        if (!track.trajectories.empty()) marks[static_cast<std::size_t>(row(at, track.end - 1))] = 0;
        track.trajectories.push_back({track.end, 0});
      }
      const std::uint64_t id = latest[at] << 8 | at;
      std::memcpy(rows.row(0, i), &id, 8);
      marks[static_cast<std::size_t>(row(at, track.end))] = -1;
      ++track.trajectories.back().steps;
      ++track.end;
    }
    const std::uint64_t t0 = store.append(lane, n * width, rows.in, nullptr);
    for (std::uint64_t i = 0; i < n * width; ++i) tracks[lane * width + i % width].numbers.push_back(static_cast<std::int64_t>(t0 + i));
  }
  void append(std::uint64_t lane, std::uint64_t n) {
    append(lane, n, [] { return false; });
  }
  void end_trajectory(std::uint64_t lane, std::uint64_t n) {  // the next one has n steps
    append(lane, 1, [] { return true; });
    if (n > 1) append(lane, n - 1);
  }

  void empty() {
    store.empty(false);
    for (std::size_t at = 0; at < tracks.size(); ++at) {
      tracks[at] = {};
      tracks[at].base = heap.view().lane(at / width).base.load() / width;  // a lane begins again with its first row
    }
  }

  struct Known {
    std::int64_t number;  // of the last step
    std::size_t track;
    std::uint64_t first;
    bool operator<(const Known& other) const { return std::tie(number, track) < std::tie(other.number, other.track); }
  };
  /// All that were not handed out and are there, in order.
  std::vector<Known> expected(const WindowSpec& spec) const {
    std::vector<Known> known;
    for (std::size_t at = 0; at < tracks.size(); ++at) {
      const Track& track = tracks[at];
      for (const Trajectory& of : track.trajectories) {
        const std::uint64_t last = of.first + of.steps - 1;
        const bool cut = marks[static_cast<std::size_t>(row(at, last))] < 0;
        const std::uint64_t usable = of.steps - (cut ? std::min(of.steps, spec.unfinished) : 0);
        for (std::uint64_t first = of.first; first + spec.length <= of.first + usable; first += spec.length) {
          if (first + slots < track.end || track.handed_out.count(first) != 0) continue;
          known.push_back({track.numbers[first + spec.length - 1], at, first});
        }
      }
    }
    std::sort(known.begin(), known.end());
    return known;
  }

  void check(std::uint64_t n, const WindowSpec& spec) {
    std::vector<Known> known = expected(spec);
    known.resize(std::min<std::size_t>(known.size(), n));
    const Drawn drawn = table.completed(next, n, spec);
    EXPECT_EQ(drawn.windows.size(), known.size());
    Indices rows, numbers;
    for (const Known& of : known) {
      for (std::uint64_t i = 0; i < spec.length; ++i) {
        rows.push_back(row(of.track, of.first + i));
        numbers.push_back(tracks[of.track].numbers[of.first + i]);
      }
      tracks[of.track].handed_out.insert(of.first);
    }
    EXPECT_EQ(drawn.rows, rows);
    EXPECT_EQ(drawn.numbers, numbers);
  }

  /// The same queue as another process would go on with it.
  void save_and_load(const WindowSpec& spec) {
    const auto positions = table.positions_of(next, spec);
    std::map<std::size_t, std::uint64_t> first;
    for (const Known& known : expected(spec)) first.try_emplace(known.track, known.first);
    for (const auto& [at, step] : first) EXPECT_EQ(positions[at], step);
    const Indices before = next;
    next = table.places_of(positions);
    EXPECT(next == before);
  }

  std::uint64_t width, slots;
  Heap heap;
  Store store;
  std::vector<std::uint64_t> memory;  // zero, as the table wants it
  Trajectories table;
  std::vector<Track> tracks;
  std::map<std::size_t, std::uint64_t> latest;
  Indices next, marks;
};

void random_walk(Geometry g, std::uint64_t width, std::uint64_t seed, int steps) {
  if (expect::failures > 0) return;
  Dice dice(seed);
  World w(g, width, dice.in(1, 4));
  WindowSpec spec{dice.in(1, 5)};
  if (dice.below(3) == 0) {
    spec.unfinished = dice.in(1, 3);
    spec.final = {reinterpret_cast<std::byte*>(w.marks.data()), 8};
  }
  const std::uint64_t rarely = dice.in(2, 12);
  for (int step = 0; step < steps; ++step) {
    const std::uint64_t what = dice.below(20);
    if (what < 12) {
      w.append(dice.below(g.lanes), dice.in(1, std::max<std::uint64_t>(1, w.slots / 2)), [&] { return dice.below(rarely) == 0; });
    } else if (what < 18) {
      w.check(dice.in(1, 6), spec);
    } else if (what < 19) {
      w.save_and_load(spec);
    } else if (dice.below(4) == 0) {
      w.empty();
    }
    if (expect::failures > 0) {
      expect::fail(__FILE__, __LINE__, "seed " + expect::show(seed) + " step " + expect::show(step));
      return;
    }
  }
  w.check(~std::uint64_t{0}, spec);
  EXPECT(w.table.completed(w.next, 1, spec).windows.empty());
}

}  // namespace

TEST(random_appends_to_one_lane) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) random_walk(geometry(1, 1 + seed % 31), 1, seed, 120);
}

TEST(random_appends_to_several_lanes) {
  for (std::uint64_t seed = 1000; seed < 1200; ++seed) random_walk(geometry(2 + seed % 4, 3 + seed % 19), 1, seed, 160);
}

TEST(random_appends_to_columns) {
  for (std::uint64_t seed = 2000; seed < 2200; ++seed) {
    const std::uint64_t width = 2 + seed % 3;
    random_walk(geometry(1, width * (2 + seed % 13)), width, seed, 120);
  }
}

TEST(a_trajectory_that_loses_its_first_steps_keeps_the_beginnings_of_its_windows) {
  World w(geometry(1, 10));
  w.append(0, 7);
  w.append(0, 7);  // the steps 4 … 13 are there
  const Drawn drawn = w.table.completed(w.next, 9, {3});
  EXPECT((drawn.rows == Indices{6, 7, 8, 9, 0, 1}));  // the steps 6 … 11
}

TEST(the_oldest_of_all_tracks_comes_first) {
  World w(geometry(3, 8));
  w.append(2, 2);
  w.append(0, 2);
  w.append(2, 2);
  w.append(1, 3);
  std::vector<std::uint64_t> order;
  for (int i = 0; i < 5; ++i) {
    for (const Window& window : w.table.completed(w.next, 1, {2}).windows) order.push_back(window.track);
  }
  EXPECT((order == std::vector<std::uint64_t>{2, 0, 2, 1}));
}

TEST(a_window_that_is_being_written_comes_later_and_does_not_stop_other_tracks) {
  World w(geometry(2, 8));
  w.append(0, 4);
  w.append(1, 2);
  const Control control = w.heap.view();
  const std::uint64_t word = control.word(1);
  w.table.census();  // the table has seen the row
  control.word(1) = ticket(number_of(word), State::writing);
  EXPECT((w.table.completed(w.next, 9, {2}).rows == Indices{8, 9}));
  control.word(1) = word;
  EXPECT((w.table.completed(w.next, 9, {2}).rows == Indices{0, 1, 2, 3}));
}

TEST(a_window_that_is_being_edited_has_its_turn) {
  World w(geometry(1, 8));
  w.append(0, 4);
  const Control control = w.heap.view();
  const std::uint64_t word = control.word(1);
  control.word(1) = ticket(9, State::writing);
  control.begin_edit(1, word, 9);
  const Drawn drawn = w.table.completed(w.next, 9, {2});
  EXPECT((drawn.rows == Indices{0, 1, 2, 3}));
  EXPECT((drawn.numbers == Indices{-1, -1, 3, 4}));
  EXPECT(w.table.completed(w.next, 9, {2}).windows.empty());
}

TEST(removed_steps_end_a_window_and_others_come_all_the_same) {
  World w(geometry(1, 12));
  w.append(0, 3);
  w.end_trajectory(0, 4);
  w.end_trajectory(0, 5);
  const Indices rows{4};
  EXPECT_EQ(w.store.remove(rows.data(), 1, nullptr), 1);
  std::set<std::int64_t> seen;
  for (;;) {
    const Drawn drawn = w.table.completed(w.next, 1, {2});
    if (drawn.windows.empty()) break;
    for (const std::int64_t row : drawn.rows) EXPECT(seen.insert(row).second && row != 4);
  }
  EXPECT(seen == (std::set<std::int64_t>{0, 1, 5, 6, 7, 8, 9, 10}));
}

TEST(mistakes_of_the_caller) {
  World w(geometry(2, 8));
  Indices one(1);
  EXPECT_THROWS(std::invalid_argument, w.table.completed(one, 1, {2}));
  EXPECT_THROWS(std::invalid_argument, w.table.positions_of(one, {2}));
  EXPECT_THROWS(std::invalid_argument, w.table.places_of(one));
  EXPECT_THROWS(std::invalid_argument, w.table.completed(w.next, 1, {0}));
  WindowSpec apart{2};
  apart.dilation = 2;
  EXPECT_THROWS(std::invalid_argument, w.table.completed(w.next, 1, apart));
  WindowSpec padded{2};
  padded.whole = true;
  padded.padding = 1;
  EXPECT_THROWS(std::invalid_argument, w.table.completed(w.next, 1, padded));
}

TEST(beside_writers_each_window_comes_once_and_in_the_order_of_its_track) {
  constexpr std::uint64_t kLanes = 3, kSteps = 600, kLength = 4;
  World w(geometry(kLanes, kSteps));  // nothing is overwritten: each must come
  std::vector<std::thread> threads;
  for (std::uint64_t lane = 0; lane < kLanes; ++lane) {
    threads.emplace_back([&, lane] {
      Dice dice(lane);
      for (std::uint64_t step = 0; step < kSteps;) {
        const std::uint64_t n = std::min(dice.in(1, 7), kSteps - step);
        Rows rows(w.heap.fields, n);
        for (std::uint64_t i = 0; i < n; ++i) {
          const std::uint64_t id = (step + i) / 10;  // trajectories of ten steps, two windows each
          std::memcpy(rows.row(0, i), &id, 8);
        }
        w.store.append(lane, n, rows.in, nullptr);
        step += n;
      }
    });
  }
  Indices found(kLanes, 0);  // windows of each lane
  const auto take = [&] {
    const WindowSpec spec{kLength};
    const Drawn drawn = w.table.completed(w.next, 5, spec);
    for (std::size_t i = 0; i < drawn.windows.size(); ++i) {
      const auto lane = static_cast<std::size_t>(drawn.windows[i].track);
      const std::int64_t k = found[lane]++, first = static_cast<std::int64_t>(lane * kSteps) + k / 2 * 10 + k % 2 * 4;
      Indices rows(kLength);
      std::iota(rows.begin(), rows.end(), first);
      EXPECT(std::equal(rows.begin(), rows.end(), drawn.rows.begin() + static_cast<std::ptrdiff_t>(i * kLength)));
    }
    return !drawn.windows.empty();
  };
  for (int round = 0; round < 200; ++round) take();
  for (std::thread& thread : threads) thread.join();
  while (take()) {
  }
  EXPECT(found == Indices(kLanes, static_cast<std::int64_t>(kSteps / 10 * 2)));
}
