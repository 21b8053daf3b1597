// The table of (trajectory, step) against a map of what was written: random writes, edits, removals, wraps, another writer's rows, and
// threads.
#include "core/fragments.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "blocks.h"
#include "core/store.h"
#include "expect.h"

using namespace engram;

namespace {

enum Fields : std::uint64_t { kTrajectory, kStep, kOther };

using Indices = std::vector<std::int64_t>;
using Key = std::pair<std::int64_t, std::int64_t>;  // trajectory and step
using Windows = std::set<Indices>;                  // rows of each window

/// Bytes of the two integers, and whether a step may be negative.
struct Kind {
  std::uint64_t trajectory_bytes = 8, step_bytes = 8;
  bool is_signed = true;
};

/// A store, its table, what was written to it, and a second process that writes to it and tells nobody.
struct World {
  explicit World(Geometry g, std::uint64_t window = 3, Kind of = {})
      : kind(of),
        heap(g, {of.trajectory_bytes, of.step_bytes, 8}),
        store(heap.open(0)),
        other(heap.open(1)),
        table(heap.view(), {heap.fields[kTrajectory], false}, {heap.fields[kStep], of.is_signed}, window, {0, {heap.fields[kOther]}, {}}) {}

  /// An end in some rows, in any byte; without dice in none.
  std::set<std::int64_t> end(Rows& rows, std::uint64_t n) const {
    std::set<std::int64_t> found;
    for (std::uint64_t i = 0; dice != nullptr && i < n; ++i) {
      if (dice->below(8) != 0) continue;
      rows.row(kOther, i)[dice->below(8)] = std::byte{1};
      found.insert(static_cast<std::int64_t>(i));
    }
    return found;
  }
  void note(const Indices& at, const std::set<std::int64_t>& ends) {
    for (std::size_t i = 0; i < at.size(); ++i) {
      if (ends.count(static_cast<std::int64_t>(i)) > 0) ended.insert(at[i]);
      else ended.erase(at[i]);
    }
  }

  void fill(Rows& rows, std::uint64_t i, const Key& key) const {  // little-endian
    std::memcpy(rows.row(kTrajectory, i), &key.first, kind.trajectory_bytes);
    std::memcpy(rows.row(kStep, i), &key.second, kind.step_bytes);
  }

  void append(const std::vector<Key>& keys, std::uint64_t lane = 0, bool beside = false) {
    Rows rows(heap.fields, keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) fill(rows, i, keys[i]);
    const auto ends = end(rows, keys.size());
    Indices at(keys.size());
    (beside ? other : store).append(lane, keys.size(), rows.in, at.data());
    for (std::size_t i = 0; i < keys.size(); ++i) model[at[i]] = keys[i];
    note(at, ends);
  }

  /// Rows that are live, by number: both integers, or the third field alone.
  void write(const Indices& at, const std::vector<Key>& keys, bool grow = false, bool beside = false) {
    Rows rows(heap.fields, at.size());
    for (std::size_t i = 0; i < at.size(); ++i) fill(rows, i, keys[i]);
    const std::vector<std::uint64_t> all{kTrajectory, kStep, kOther};
    const std::size_t fields = grow ? 3 : 2;
    if (grow) note(at, end(rows, at.size()));
    (beside ? other : store).scatter(at.data(), at.size(), {all.data(), fields}, {rows.in.data(), fields}, grow);
    for (std::size_t i = 0; i < at.size(); ++i) model[at[i]] = keys[i];
  }
  void write_another_field(const Indices& at, bool beside = false) {
    Rows rows(heap.fields, at.size());
    const std::uint64_t which = kOther;
    note(at, end(rows, at.size()));
    (beside ? other : store).scatter(at.data(), at.size(), {&which, 1}, {&rows.in[kOther], 1}, false);
  }

  void remove(const Indices& at, bool beside = false) {
    (beside ? other : store).remove(at.data(), at.size(), nullptr);
    for (const std::int64_t row : at) model.erase(row);
  }

  void empty(bool beside = false) {
    (beside ? other : store).empty(false);
    model.clear();
  }

  /// Whether the rows of one step say the same of its end.
  bool is_clear() const {
    std::map<Key, bool> ends;
    return std::all_of(model.begin(), model.end(), [&](const auto& entry) {
      const bool is_end = ended.count(entry.first) > 0;
      return ends.emplace(entry.second, is_end).first->second == is_end;
    });
  }

  bool is_unique() const {
    std::set<Key> keys;
    for (const auto& [row, key] : model) keys.insert(key);
    return keys.size() == model.size();
  }

  /// Steps that follow one another, by their rows. Of a step in several rows any of them.
  std::vector<Indices> runs() const {
    std::map<Key, std::int64_t> rows;
    for (const auto& [row, key] : model) rows[key] = row;
    std::vector<Indices> found;
    const Key* last = nullptr;
    for (const auto& [key, row] : rows) {
      const bool follows = last != nullptr && last->first == key.first && ended.count(found.back().back()) == 0 &&
                           last->second != std::numeric_limits<std::int64_t>::max() && last->second + 1 == key.second;
      if (!follows) found.emplace_back();
      found.back().push_back(row);
      last = &key;
    }
    return found;
  }

  /// What each run gives. `marks`: those of WindowSpec::final.
  std::vector<std::vector<Indices>> windows(const WindowSpec& spec, const Indices& marks = {}) const {
    std::vector<std::vector<Indices>> found;
    for (Indices run : runs()) {
      if (spec.unfinished > 0 && marks[static_cast<std::size_t>(run.back())] < 0) {
        run.resize(run.size() - std::min<std::size_t>(run.size(), spec.unfinished));
      }
      const auto n = static_cast<std::int64_t>(run.size()), length = static_cast<std::int64_t>(spec.length);
      const auto apart = static_cast<std::int64_t>(spec.dilation), period = static_cast<std::int64_t>(spec.period);
      const std::int64_t first = -static_cast<std::int64_t>(spec.padding) * apart, extent = (length - 1) * apart + 1;
      std::vector<Indices> of_run;
      for (std::int64_t begin = first; n > 0 && (begin + extent <= n || (begin == first && !spec.strict)); begin += period) {
        Indices rows;
        for (std::int64_t i = 0; i < length; ++i) {
          const std::int64_t at = begin + i * apart;
          if (spec.whole || (at >= 0 && at < n)) rows.push_back(run[static_cast<std::size_t>(std::clamp<std::int64_t>(at, 0, n - 1))]);
        }
        of_run.push_back(rows);
      }
      if (!of_run.empty()) found.push_back(of_run);
    }
    return found;
  }

  Kind kind;
  Heap heap;
  Store store, other;
  Fragments table;
  std::map<std::int64_t, Key> model;
  std::set<std::int64_t> ended;  // rows, those among them that are gone do not matter
  Dice* dice = nullptr;
};

/// Rows of each window that was drawn.
std::vector<Indices> split(const Drawn& drawn, const WindowSpec& spec) {
  std::vector<Indices> windows;
  auto at = drawn.rows.begin();
  for (const Window& window : drawn.windows) {
    const auto end = at + static_cast<std::ptrdiff_t>(spec.rows(window));
    windows.emplace_back(at, end);
    at = end;
  }
  EXPECT(at == drawn.rows.end());
  return windows;
}

WindowSpec any_spec(Dice& dice, Indices& marks) {
  WindowSpec spec{dice.in(1, 5), dice.below(2) == 0};
  if (dice.below(3) == 0) spec.period = dice.in(1, 4);
  if (dice.below(3) == 0) spec.dilation = dice.in(1, 3);
  if (dice.below(3) == 0) {
    spec.whole = true;
    spec.padding = dice.below(spec.length);
  }
  if (dice.below(4) == 0) {
    spec.unfinished = dice.in(1, 3);
    for (std::int64_t& mark : marks) mark = static_cast<std::int64_t>(dice.below(2)) - 1;
    spec.final = {reinterpret_cast<std::byte*>(marks.data()), 8};
  }
  return spec;
}

void check_table(World& w, Dice& dice) {
  if (!w.is_clear()) {
    EXPECT_THROWS(std::runtime_error, w.table.draw(dice.bits(), 4, {1}));
    return;
  }
  std::uint64_t longest = 0;
  const auto runs = w.runs();
  for (const Indices& run : runs) longest = std::max<std::uint64_t>(longest, run.size());
  const Census census = w.table.census();
  EXPECT_EQ(census.trajectories, runs.size());
  EXPECT_EQ(census.longest, longest);

  Indices marks(w.heap.view().capacity());
  WindowSpec spec = any_spec(dice, marks);
  if (!w.is_unique()) spec.unfinished = 0;  // the last row of a run may be one of two, with two marks
  const auto legal = w.windows(spec, marks);
  Windows all;
  std::uint64_t count = 0;
  for (const auto& of_run : legal) {
    count += of_run.size();
    all.insert(of_run.begin(), of_run.end());
  }
  EXPECT_EQ(w.table.windows(spec), count);
  EXPECT_EQ(w.table.choices(spec), legal.size());
  if (!w.is_unique()) {
    EXPECT_THROWS(std::runtime_error, w.table.draw(dice.bits(), 4, spec));
    return;
  }
  if (dice.below(6) == 0) w.table.count(dice.in(1, 5));
  const Drawn drawn = w.table.draw(dice.bits(), 5, spec);
  EXPECT_EQ(drawn.windows.size(), all.empty() ? 0u : 5u);
  for (const Indices& window : split(drawn, spec)) EXPECT(all.count(window) == 1);
  for (std::size_t i = 0; i < drawn.rows.size(); ++i) {
    EXPECT_EQ(drawn.numbers[i], number_of(w.heap.view().word(static_cast<std::uint64_t>(drawn.rows[i]))));
  }
}

/// Several trajectories that are written in turn, each a step further, or with a gap.
struct Writer {
  Key next(Dice& dice, const Kind& kind) {
    const auto place = static_cast<std::size_t>(dice.below(4));
    Key& key = at[place];
    const std::int64_t least = kind.is_signed ? -4 : 0;
    if (dice.below(12) == 0 || key.second > 100) key = {++latest % 200, least};
    key.second += dice.below(8) == 0 ? 2 : 1;
    return key;
  }
  Key at[4]{{0, 0}, {200, 0}, {201, 0}, {202, 0}};
  std::int64_t latest = 0;
};

void random_walk(Geometry g, Kind kind, std::uint64_t seed, bool beside, int steps) {
  if (expect::failures > 0) return;
  Dice dice(seed);
  World w(g, dice.in(1, 5), kind);
  if (seed % 2 == 0) w.dice = &dice;
  Writer writer;
  const bool late = dice.below(3) == 0;  // attached to a store that holds data
  if (!late) w.store.attach(w.table);
  for (int step = 0; step < steps; ++step) {
    if (late && step == steps / 3) w.store.attach(w.table);
    const bool by_other = beside && dice.below(2) == 0;
    const std::uint64_t lane = dice.below(g.lanes), what = dice.below(40);
    Indices live;
    for (const auto& [row, key] : w.model) {
      if (dice.below(w.model.size()) < 3) live.push_back(row);
    }
    std::vector<Key> keys;
    for (std::size_t i = 0; i < live.size(); ++i) keys.push_back(writer.next(dice, kind));
    if (what < 24) {
      keys.clear();
      for (std::uint64_t n = dice.in(1, g.lane_length); n > 0; --n) keys.push_back(writer.next(dice, kind));
      w.append(keys, lane, by_other);
    } else if (what < 29) {
      w.write(live, keys, dice.below(2) == 0, by_other);
    } else if (what < 31) {
      w.write_another_field(live, by_other);
    } else if (what < 37) {
      w.remove(live, by_other);
    } else if (what < 38) {
      w.empty(by_other);
    } else if (!w.model.empty()) {  // a number that is given again
      auto twice = w.model.begin();
      std::advance(twice, static_cast<std::ptrdiff_t>(dice.below(w.model.size())));
      w.append({twice->second}, lane, by_other);
    }
    if ((!late || step >= steps / 3) && dice.below(3) == 0) check_table(w, dice);
    if (expect::failures > 0) {
      expect::fail(__FILE__, __LINE__, "seed " + expect::show(seed) + " step " + expect::show(step));
      return;
    }
  }
}

std::vector<Key> steps_of(std::int64_t trajectory, std::int64_t from, std::int64_t to) {
  std::vector<Key> keys;
  for (std::int64_t step = from; step < to; ++step) keys.push_back({trajectory, step});
  return keys;
}

}  // namespace

TEST(random_writes_of_one_lane) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) random_walk(geometry(1, 1 + seed % 29), {}, seed, false, 80);
}

TEST(random_writes_of_several_lanes_and_small_integers) {
  constexpr Kind kKinds[] = {{8, 8, false}, {4, 4, true}, {2, 1, true}, {1, 2, false}, {8, 4, true}};
  for (std::uint64_t seed = 1000; seed < 1200; ++seed) {
    random_walk(geometry(2 + seed % 3, 3 + seed % 17), kKinds[seed % 5], seed, false, 80);
  }
}

TEST(random_writes_of_which_another_process_made_half) {
  for (std::uint64_t seed = 2000; seed < 2200; ++seed) random_walk(geometry(1 + seed % 3, 4 + seed % 23), {}, seed, true, 80);
}

TEST(runs_are_split_and_joined) {
  World w(geometry(1, 64));
  w.store.attach(w.table);
  const auto census = [&](std::uint64_t runs, std::uint64_t longest) {
    const Census found = w.table.census();
    EXPECT_EQ(found.trajectories, runs);
    EXPECT_EQ(found.longest, longest);
  };
  w.append(steps_of(7, 0, 10));                      // rows 0 … 9
  w.append(steps_of(7, 11, 21));                     // rows 10 … 19
  census(2, 10);
  w.append({{7, 10}});
  census(1, 21);
  w.remove({3});
  census(2, 17);
  w.remove({0, 19});
  census(2, 16);
  w.write({3}, {{7, 3}}, true);                      // the step comes back
  census(1, 19);
  w.write({3}, {{8, 3}});                            // and goes to another trajectory
  census(3, 16);
}

TEST(a_stored_end_splits_a_run_and_an_edit_takes_it_away) {
  World w(geometry(1, 16));
  w.store.attach(w.table);
  w.append(steps_of(7, 0, 10));
  const auto write = [&](std::int64_t row, std::uint64_t value) {
    const std::uint64_t which = kOther;
    std::byte* const from = reinterpret_cast<std::byte*>(&value);
    w.store.scatter(&row, 1, {&which, 1}, {&from, 1}, false);
  };
  const auto census = [](Fragments& table, std::uint64_t runs, std::uint64_t longest) {
    const Census found = table.census();
    EXPECT_EQ(found.trajectories, runs);
    EXPECT_EQ(found.longest, longest);
  };
  write(3, 1);
  census(w.table, 2, 6);
  for (std::uint64_t key = 0; key < 40; ++key) {
    for (const Indices& window : split(w.table.draw(key, 4, {3}), {3})) EXPECT(window.back() <= 3 || window.front() > 3);
  }
  w.remove({3});
  census(w.table, 2, 6);
  w.write({3}, {{7, 3}}, true);
  census(w.table, 1, 10);
  const auto table_of = [&](Boundaries ends) {
    return Fragments(w.heap.view(), {w.heap.fields[kTrajectory], false}, {w.heap.fields[kStep], true}, 3, std::move(ends));
  };
  for (std::int64_t row = 0; row < 10; ++row) write(row, row == 4 ? 0 : row == 7 ? 2 : 1);  // step types: a first, and a last one
  Fragments types = table_of({0, {w.heap.fields[kOther]}, {}, {8}});
  types.catch_up();
  census(types, 3, 4);
  for (std::int64_t row = 0; row < 10; ++row) write(row, row == 5 ? ~std::uint64_t{0} : 1);  // eight flags of a row, one or all
  Fragments all = table_of({0, {w.heap.fields[kOther]}, {}, {}, {1}});
  all.catch_up();
  census(all, 2, 6);
  EXPECT_THROWS(std::invalid_argument, table_of({1, {w.heap.fields[kOther]}, {}}));
}

TEST(the_ends_of_the_integers_do_not_meet) {
  World w(geometry(1, 8), 2);
  w.store.attach(w.table);
  constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min(), kMost = std::numeric_limits<std::int64_t>::max();
  w.append({{1, kMost - 1}, {1, kLeast + 1}, {1, kLeast}, {1, kMost}});
  EXPECT_EQ(w.table.census().trajectories, 2);
  const auto drawn = split(w.table.draw(1, 40, {2}), {2});
  EXPECT((Windows(drawn.begin(), drawn.end()) == Windows{{0, 3}, {2, 1}}));
}

TEST(runs_are_uniform_and_so_are_the_windows_of_one) {
  World w(geometry(1, 80));
  w.store.attach(w.table);
  std::vector<Key> keys;
  for (std::int64_t step = 0; step < 12; ++step) {  // interleaved; only the last two are too short
    for (const auto& [trajectory, steps] : {Key{4, 12}, {1, 3}, {9, 8}, {5, 5}, {2, 2}, {3, 1}}) {
      if (step < steps) keys.push_back({trajectory, step});
    }
  }
  w.append(keys);
  for (const WindowSpec& spec : {WindowSpec{3, true}, WindowSpec{4, true}, WindowSpec{2, false}}) {  // 3 is found at once
    std::map<Indices, std::uint64_t> counts;
    for (std::uint64_t key = 0; key < 3000; ++key) {
      for (const Indices& window : split(w.table.draw(key, 4, spec), spec)) ++counts[window];
    }
    std::vector<std::uint64_t> of_runs;
    for (const auto& of_run : w.windows(spec)) {
      std::vector<std::uint64_t> of_windows;
      for (const Indices& window : of_run) of_windows.push_back(counts[window]);
      of_runs.push_back(0);
      for (const std::uint64_t count : of_windows) of_runs.back() += count;
      if (of_windows.size() > 1) EXPECT_UNIFORM(of_windows);
    }
    EXPECT_EQ(of_runs.size(), spec.strict ? (spec.length == 3 ? 4u : 3u) : 6u);
    EXPECT_UNIFORM(of_runs);
  }
}

TEST(long_runs_among_many_short_ones_are_found_and_uniform) {
  World w(geometry(1, 4000), 1);
  w.store.attach(w.table);
  std::vector<Key> keys;
  for (std::int64_t alone = 0; alone < 3000; ++alone) keys.push_back({alone, alone * 2});
  w.append(keys);
  w.append(steps_of(5000, 0, 6));
  w.append(steps_of(5001, 0, 9));
  const WindowSpec spec{6};
  std::map<Indices, std::uint64_t> counts;
  for (std::uint64_t key = 0; key < 500; ++key) {
    for (const Indices& window : split(w.table.draw(key, 8, spec), spec)) ++counts[window];
  }
  EXPECT_EQ(counts.size(), 5);
  const std::uint64_t of_the_short = counts[w.windows(spec)[0][0]];
  EXPECT_UNIFORM((std::vector<std::uint64_t>{of_the_short, 4000 - of_the_short}));
  EXPECT(w.table.draw(1, 1, {10}).windows.empty());
}

TEST(draws_are_a_function_of_the_key) {
  World w(geometry(1, 40));
  w.store.attach(w.table);
  w.append(steps_of(1, 0, 20));
  w.append(steps_of(2, 0, 20));
  EXPECT(w.table.draw(5, 8, {3}).rows == w.table.draw(5, 8, {3}).rows);
  EXPECT(w.table.draw(5, 8, {3}).rows != w.table.draw(6, 8, {3}).rows);
  const auto few = w.table.draw(5, 4, {3}).rows, many = w.table.draw(5, 8, {3}).rows;
  EXPECT(std::equal(few.begin(), few.end(), many.begin()));
}

TEST(a_step_in_two_rows_is_refused_until_one_of_them_is_gone) {
  World w(geometry(1, 8), 1);
  w.store.attach(w.table);
  w.append(steps_of(3, 0, 4));
  w.append({{3, 2}}, 0, true);
  w.append({{3, 2}});
  const auto message = [&]() -> std::string {
    try {
      w.table.draw(1, 1, {1});
      return "";
    } catch (const std::runtime_error& e) {
      return e.what();
    }
  };
  EXPECT(message().find("got step 2 of trajectory 3 in two") != std::string::npos);
  w.remove({2});                 // that one of them which is in the runs
  EXPECT(!message().empty());
  w.remove({4}, true);           // by another process
  EXPECT_EQ(message(), "");
  EXPECT_EQ(w.table.census().longest, 4);
}

TEST(a_young_table_is_empty) {
  World w(geometry(2, 8));
  w.store.attach(w.table);
  EXPECT(w.table.draw(1, 4, {3}).windows.empty());
  EXPECT_EQ(w.table.census().trajectories, 0);
  EXPECT_EQ(w.table.windows({1}), 0);
}

TEST(mistakes_of_the_caller) {
  World w(geometry(2, 8));
  const IntegerField good{w.heap.fields[kTrajectory], true};
  std::byte memory[8 * 24]{};
  for (const std::uint64_t bytes : {0u, 3u, 16u, 24u}) {
    const IntegerField bad{{memory, bytes}, true};
    EXPECT_THROWS(std::invalid_argument, Fragments(w.heap.view(), bad, good, 1));
    EXPECT_THROWS(std::invalid_argument, Fragments(w.heap.view(), good, bad, 1));
  }
  EXPECT_THROWS(std::invalid_argument, Fragments(w.heap.view(), good, good, 0));
  EXPECT_THROWS(std::invalid_argument, w.table.count(0));
  EXPECT_THROWS(std::invalid_argument, w.table.draw(1, 1, {0}));
  EXPECT_THROWS(std::invalid_argument, w.table.draw(1, 1, {2, true, false, 1, 0}));
  EXPECT_THROWS(std::invalid_argument, w.table.draw(1, 1, {2, true, true}));
  const std::int64_t outside = 16;
  EXPECT_THROWS(std::out_of_range, w.table.written(&outside, 1, 1));
}

// A write that swaps rows leaves a step in two of them until it is over, and a look at all rows may see a step that moves twice.
TEST(beside_writers_that_move_steps_to_other_rows) {
  for (const bool told : {true, false}) {
    World w(geometry(1, 2048));
    w.store.attach(w.table);
    w.append(steps_of(1, 0, 12));
    w.append(steps_of(2, 0, 2000));
    w.remove({2000});
    std::atomic<bool> stop{false};
    std::atomic<std::uint64_t> moved{0};
    std::thread writer([&] {
      Store& store = told ? w.store : w.other;
      const std::vector<Key> orders[] = {{{1, 0}, {1, 1}, {1, 2}}, {{1, 1}, {1, 2}, {1, 0}}};
      const Indices at{0, 1, 2};
      const std::uint64_t which[] = {kTrajectory, kStep};
      for (std::uint64_t i = 0; !stop.load(); moved = ++i) {
        Rows rows(w.heap.fields, 3), row(w.heap.fields, 1);
        for (std::uint64_t k = 0; k < 3; ++k) w.fill(rows, k, orders[i % 2][k]);
        store.scatter(at.data(), 3, which, {rows.in.data(), 2}, false);
        const std::int64_t last = i % 2 == 0 ? 11 : 2000, next = 2011 - last;
        w.fill(row, 0, {1, 11});
        const std::uint64_t all[] = {kTrajectory, kStep, kOther};
        store.remove(&last, 1, nullptr);
        store.scatter(&next, 1, all, {row.in.data(), 3}, true);
      }
    });
    std::string error;
    try {
      for (std::uint64_t round = 0; round < 3000 || moved.load() < 3000; ++round) w.table.draw(round, 4, {3});
    } catch (const std::exception& e) {
      error = e.what();
    }
    stop = true;
    writer.join();
    EXPECT_EQ(error, "");
    EXPECT(!w.table.draw(1, 4, {3}).rows.empty());
  }
}

TEST(a_step_in_two_rows_is_refused_beside_a_writer_of_others) {
  World w(geometry(1, 64));
  w.store.attach(w.table);
  w.append(steps_of(1, 0, 12));
  w.append({{1, 5}});
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> written{0};
  std::thread writer([&] {
    const std::uint64_t which = kOther;
    Rows rows(w.heap.fields, 5);
    const Indices at{0, 1, 2, 3, 4};
    for (std::uint64_t i = 0; !stop.load(); written = ++i) w.other.scatter(at.data(), 5, {&which, 1}, {&rows.in[kOther], 1}, false);
  });
  for (std::uint64_t round = 0; round < 50 || written.load() < 500; ++round) EXPECT_THROWS(std::runtime_error, w.table.draw(round, 4, {3}));
  stop = true;
  writer.join();
}

TEST(beside_writers_that_lap_the_ring) {
  World w(geometry(2, 48));
  w.store.attach(w.table);
  w.append(steps_of(1, 0, 12));
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (std::uint64_t lane = 0; lane < 2; ++lane) {  // one is told of by its store, one is another process
    threads.emplace_back([&, lane] {
      Store& store = lane == 0 ? w.store : w.other;
      Dice dice(lane);
      std::int64_t latest = 10 + static_cast<std::int64_t>(lane);
      Key at[3]{{latest, 0}, {latest += 2, 0}, {latest += 2, 0}};
      while (!stop.load()) {
        const std::uint64_t n = dice.in(1, 6);
        Rows rows(w.heap.fields, n);
        for (std::uint64_t i = 0; i < n; ++i) {
          Key& key = at[dice.below(3)];
          if (dice.below(9) == 0) key = {latest += 2, 0};
          ++key.second;
          w.fill(rows, i, key);
        }
        store.append(lane, n, rows.in, nullptr);
        if (lane == 0 && dice.below(20) == 0) {
          const auto row = static_cast<std::int64_t>(dice.below(96));
          store.remove(&row, 1, nullptr);
        }
      }
    });
  }
  const WindowSpec spec{3};
  const std::uint64_t fields[] = {kTrajectory, kStep};
  std::uint64_t whole = 0;
  for (std::uint64_t round = 0; round < 400 || whole == 0; ++round) {
    const Drawn drawn = w.table.draw(round, 8, spec);
    const std::uint64_t n = drawn.rows.size();
    Indices trajectories(n), steps(n);
    std::byte* const to[] = {reinterpret_cast<std::byte*>(trajectories.data()), reinterpret_cast<std::byte*>(steps.data())};
    const Indices moved = w.store.gather(drawn.rows.data(), n, fields, to, drawn.numbers.data(), nullptr);
    const std::set<std::int64_t> gone(moved.begin(), moved.end());
    for (std::size_t i = 0; i < n; i += 3) {
      const auto at = static_cast<std::int64_t>(i);
      if (gone.count(at) + gone.count(at + 1) + gone.count(at + 2) > 0) continue;
      ++whole;
      for (const std::size_t j : {i, i + 1}) {
        EXPECT_EQ(trajectories[j], trajectories[j + 1]);
        EXPECT_EQ(steps[j] + 1, steps[j + 1]);
      }
    }
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  // At rest the table says what the rows do.
  w.model.clear();
  const Control control = w.heap.view();
  for (std::uint64_t row = 0; row < control.capacity(); ++row) {
    if (!is_committed(control.word(row))) continue;
    Key key;
    std::memcpy(&key.first, w.heap.fields[kTrajectory].data + row * 8, 8);
    std::memcpy(&key.second, w.heap.fields[kStep].data + row * 8, 8);
    w.model[static_cast<std::int64_t>(row)] = key;
  }
  Dice dice(3);
  for (int i = 0; i < 10; ++i) check_table(w, dice);
}
