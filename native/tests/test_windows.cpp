// Windows read out of a store, against rows that say where they belong; and first steps drawn by priority, against formulas.
#include "core/windows.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "blocks.h"
#include "expect.h"

using namespace engram;

namespace {

using Indices = std::vector<std::int64_t>;

enum Fields : std::uint64_t { kStep, kEpisode, kWide };

struct alignas(64) Line {
  std::byte bytes[64];
};

struct World {
  explicit World(Geometry g)
      : heap(g, {8, 8, 40}),
        store(heap.open()),
        control(store.control()),
        table_memory(Trajectories::bytes(g.lanes, g.lane_length, 1) / 8),
        table(heap.view(), {true, {heap.fields[kEpisode]}, {kEpisode}}, 1, 3,
              {reinterpret_cast<std::byte*>(table_memory.data()), table_memory.size() * 8}),
        tree_memory(Priorities::bytes(g.capacity, false) / sizeof(Line) + 1),
        priorities(formatted(g.capacity), &control) {
    store.attach(table);
    store.attach(priorities);
  }

  std::span<std::byte> formatted(std::uint64_t rows) {
    const std::span<std::byte> block{tree_memory.front().bytes, Priorities::bytes(rows, false)};
    Priorities::format(block, rows, {1.0, 1.0, 0.0, false});
    return block;
  }

  /// One trajectory; its rows know their episode and step, in every field.
  void append(std::uint64_t lane, std::uint64_t episode, std::uint64_t steps) {
    Rows rows(heap.fields, steps);
    for (std::uint64_t i = 0; i < steps; ++i) {
      std::memcpy(rows.row(kStep, i), &i, 8);
      std::memcpy(rows.row(kEpisode, i), &episode, 8);
      describe(rows.row(kWide, i), 40, episode << 32 | i);
    }
    store.append(lane, steps, rows.in, nullptr);
  }

  /// Gives rows new tickets, and leaves what they hold.
  void edit(const Indices& rows) {
    std::vector<std::uint64_t> steps(rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) std::memcpy(&steps[i], heap.fields[kStep].row(static_cast<std::uint64_t>(rows[i])), 8);
    const std::uint64_t which[] = {kStep};
    const std::byte* const column[] = {reinterpret_cast<const std::byte*>(steps.data())};
    store.scatter(rows.data(), rows.size(), which, column, false);
  }

  /// As an edit that has not come to its end.
  void begin_edit(std::uint64_t row) {
    const std::uint64_t seen = control.word(row), number = control.counters().next_ticket.fetch_add(1);
    control.word(row) = ticket(number, State::writing);
    control.begin_edit(row, seen, number);
  }
  void end_edit(std::uint64_t row) { control.word(row) = ticket(number_of(control.word(row)), State::committed) | kEdited; }

  /// The windows that begin at rows, as the table sees them now.
  Drawn at(const Indices& rows, const WindowSpec& shape) { return table.windows_at(rows.data(), rows.size(), shape, rows.size()); }

  Heap heap;
  Store store;
  Control control;
  std::vector<std::uint64_t> table_memory;
  Trajectories table;
  std::vector<Line> tree_memory;
  Priorities priorities;
};

/// OutputBuffer for windows, and what they must hold.
struct Read {
  Read(World& w, const ChooseWindows& choose, std::uint64_t n, std::uint64_t length, bool padded, const ChooseAgain& again = {}) {
    const auto allocate = [&](std::uint64_t places) {
      made.push_back(places);
      batch.emplace(w.heap.fields, places);
      rows.assign(places, -7);
      numbers.assign(places, -7);
      return WindowMemory{batch->out, rows.data(), numbers.data()};
    };
    for (const Steps& steps : read_windows(w.store, w.store.all(), choose, n, {length}, padded, allocate, again)) {
      lengths.push_back(steps.real);
    }
    std::uint64_t at = 0;
    for (const std::uint64_t steps : lengths) {
      EXPECT(steps > 0 && steps <= length);
      for (std::uint64_t i = 0; i < (padded ? length : steps); ++i, ++at) {
        const std::uint64_t real = std::min(i, steps - 1);
        EXPECT_EQ(word(kEpisode, at), word(kEpisode, at - i));
        EXPECT_EQ(word(kStep, at), word(kStep, at - i) + real);
        const auto wide = id_of(batch->row(kWide, at), 40);
        EXPECT(wide.has_value() && *wide == (word(kEpisode, at) << 32 | word(kStep, at)));
      }
    }
    total = at;
  }

  std::uint64_t word(Fields field, std::uint64_t at) {
    std::uint64_t value = 0;
    std::memcpy(&value, batch->row(field, at), 8);
    return value;
  }

  std::optional<Rows> batch;
  Indices rows, numbers;
  std::vector<std::uint64_t> lengths, made;
  std::uint64_t total = 0;
};

Drawn stale(Drawn drawn, std::size_t from, std::size_t to) {
  std::fill(drawn.numbers.begin() + static_cast<std::ptrdiff_t>(from), drawn.numbers.begin() + static_cast<std::ptrdiff_t>(to),
            -1);
  return drawn;
}

}  // namespace

TEST(windows_lie_one_behind_the_other) {
  World w(geometry(1, 32));
  w.append(0, 1, 9);
  w.append(0, 2, 2);
  w.append(0, 3, 12);
  const WindowSpec shape{4, false};
  const auto choose = [&](std::uint64_t n, std::uint64_t attempt) {
    EXPECT_EQ(attempt, 0u);
    EXPECT_EQ(n, 3u);
    return w.at({2, 9, 11}, shape);
  };
  const Read close(w, choose, 3, 4, false);
  EXPECT((close.lengths == std::vector<std::uint64_t>{4, 2, 4}));
  EXPECT((Indices(close.rows.begin(), close.rows.begin() + 10) == Indices{2, 3, 4, 5, 9, 10, 11, 12, 13, 14}));
  const Read padded(w, choose, 3, 4, true);
  EXPECT((padded.rows == Indices{2, 3, 4, 5, 9, 10, 10, 10, 11, 12, 13, 14}));
  for (std::uint64_t i = 0; i < 12; ++i) {
    EXPECT_EQ(ticket(static_cast<std::uint64_t>(padded.numbers[i]), State::committed),
              w.control.word(static_cast<std::uint64_t>(padded.rows[i])).load());
  }
}

TEST(over_the_end_of_the_ring) {
  World w(geometry(2, 8));
  w.append(1, 1, 5);
  w.append(1, 2, 6);  // rows 13, 14, 15, 8, 9, 10
  const Read read(w, [&](std::uint64_t, std::uint64_t) { return w.at({14, 13}, {4}); }, 2, 4, false);
  EXPECT((read.rows == Indices{14, 15, 8, 9, 13, 14, 15, 8}));
}

TEST(others_come_for_windows_that_moved) {
  World w(geometry(1, 64));
  w.append(0, 1, 9);
  w.append(0, 2, 3);
  w.append(0, 3, 20);
  std::vector<std::uint64_t> asked;
  const auto choose = [&](std::uint64_t n, std::uint64_t attempt) {
    asked.push_back(n);
    if (attempt == 0) return stale(w.at({0, 4, 12, 20}, {4}), 4, 13);  // the second, the third, and the begin of the fourth
    if (attempt == 1) return stale(w.at({9, 13, 22}, {4, false}), 0, 3);  // the first of these again
    return w.at({14}, {4});
  };
  const std::uint64_t redraws = w.control.counters().redraws;
  const Read read(w, choose, 4, 4, false);
  EXPECT((asked == std::vector<std::uint64_t>{4, 3, 1}));
  EXPECT((read.rows == Indices{0, 1, 2, 3, 14, 15, 16, 17, 13, 14, 15, 16, 22, 23, 24, 25}));
  EXPECT_EQ(w.control.counters().redraws - redraws, 4u);
}

namespace {

// Reads the windows at rows 0, 4 and 12, once `act` has changed some. Those that come instead begin at row 20.
struct Turns {
  Turns(World& w, const std::function<void()>& act, const std::function<void()>& each = [] {})
      : read(w,
             [&](std::uint64_t n, std::uint64_t attempt) {
               asked.push_back(n);
               Drawn drawn = attempt == 0 ? w.at({0, 4, 12}, {4}) : w.at({20}, {4});
               if (attempt == 0) act();
               return drawn;
             },
             3, 4, false,
             [&](const Window& window, Drawn& drawn) {
               each();
               return w.table.choose_again(window, {4}, drawn);
             }) {}

  std::vector<std::uint64_t> asked;
  Read read;
};

struct Episodes : World {
  Episodes() : World(geometry(1, 64)) {
    append(0, 1, 9);
    append(0, 2, 3);
    append(0, 3, 20);
  }
};

const Indices kAsChosen{0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15}, kSecondLost{0, 1, 2, 3, 20, 21, 22, 23, 12, 13, 14, 15};

}  // namespace

TEST(a_window_that_was_edited_keeps_its_turn) {
  Episodes w;
  const Turns edited(w, [&] { w.edit({5, 12, 13}); });
  EXPECT((edited.asked == std::vector<std::uint64_t>{3}));
  EXPECT((edited.read.rows == kAsChosen));
  for (std::size_t i = 0; i < kAsChosen.size(); ++i) {
    EXPECT_EQ(edited.read.numbers[i], number_of(w.control.word(static_cast<std::uint64_t>(kAsChosen[i]))));
  }
}

TEST(a_window_that_is_being_edited_is_waited_for) {
  Episodes w;
  int calls = 0;
  const Turns edited(w, [&] { w.begin_edit(5); }, [&] {
    if (++calls == 100) w.end_edit(5);
  });
  EXPECT((edited.asked == std::vector<std::uint64_t>{3}));
  EXPECT((edited.read.rows == kAsChosen));
  EXPECT_EQ(calls, 100);
}

TEST(a_window_that_is_gone_or_in_an_edit_without_end_loses_its_turn) {
  for (const bool removed : {true, false}) {
    Episodes w;
    const Impatient impatient(std::chrono::milliseconds(100));
    const Indices rows{6};
    const Turns lost(w, [&] { removed ? static_cast<void>(w.store.remove(rows.data(), 1, nullptr)) : w.begin_edit(6); });
    EXPECT((lost.asked == std::vector<std::uint64_t>{3, 1}));
    EXPECT((lost.read.rows == kSecondLost));
  }
}

TEST(of_fields_that_are_not_asked_for_only_the_tickets_are_looked_at) {
  World w(geometry(1, 64));
  w.append(0, 1, 9);
  w.append(0, 2, 3);
  for (const bool none : {true, false}) {
    const std::uint64_t kOnly[] = {kEpisode};
    const std::span<const std::uint64_t> which(kOnly, none ? 0 : 1);
    std::vector<std::byte> episodes;
    std::vector<std::byte*> out;
    Indices rows, numbers;
    const auto choose = [&](std::uint64_t, std::uint64_t attempt) {
      if (attempt == 0) return stale(w.at({0, 4, 9}, {4, false}), 4, 8);
      return w.at({5}, {4, false});
    };
    std::vector<std::uint64_t> lengths;
    const auto allocate = [&](std::uint64_t places) {
      episodes.assign(places * 8, std::byte{0x5A});
      rows.assign(places, -7);
      numbers.assign(places, -7);
      out = {episodes.data()};
      return WindowMemory{Batch(out).first(which.size()), rows.data(), numbers.data()};
    };
    for (const Steps& steps : read_windows(w.store, which, choose, 3, {4}, false, allocate)) lengths.push_back(steps.real);
    EXPECT((lengths == std::vector<std::uint64_t>{4, 4, 3}));
    EXPECT((Indices(rows.begin(), rows.begin() + 11) == Indices{0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11}));
    for (std::uint64_t i = 0; i < 11; ++i) {
      EXPECT_EQ(ticket(static_cast<std::uint64_t>(numbers[i]), State::committed),
                w.control.word(static_cast<std::uint64_t>(rows[i])).load());
      std::uint64_t episode = 0;
      std::memcpy(&episode, episodes.data() + i * 8, 8);
      EXPECT_EQ(episode, none ? 0x5A5A5A5A5A5A5A5Aull : i < 8 ? 1 : 2);
    }
  }
}

TEST(shorter_ones_and_none_may_come_instead) {
  World w(geometry(1, 64));
  w.append(0, 1, 9);
  w.append(0, 2, 3);
  w.append(0, 3, 20);
  const auto choose = [&](std::uint64_t, std::uint64_t attempt) {
    if (attempt == 0) return stale(w.at({0, 4, 12, 20}, {4}), 4, 12);
    return w.at({9}, {4, false});  // three steps for the second, nothing for the third
  };
  const Read close(w, choose, 4, 4, false);
  EXPECT((close.lengths == std::vector<std::uint64_t>{4, 3, 4}));
  EXPECT((Indices(close.rows.begin(), close.rows.begin() + 11) == Indices{0, 1, 2, 3, 9, 10, 11, 20, 21, 22, 23}));
  const Read padded(w, choose, 4, 4, true);
  EXPECT_EQ(padded.total, 12u);
  EXPECT((Indices(padded.rows.begin(), padded.rows.begin() + 12) == Indices{0, 1, 2, 3, 9, 10, 11, 11, 20, 21, 22, 23}));
}

TEST(there_is_room_for_the_longest_not_for_the_length_that_was_asked_for) {
  World w(geometry(1, 64));
  w.append(0, 1, 3);
  w.append(0, 2, 2);
  w.append(0, 3, 20);
  const WindowSpec shape{std::uint64_t{1} << 60, false};
  const Read read(w, [&](std::uint64_t, std::uint64_t) { return w.at({0, 3}, shape); }, 2, shape.length, false);
  EXPECT((read.lengths == std::vector<std::uint64_t>{3, 2}));
  EXPECT((read.made == std::vector<std::uint64_t>{6}));
}

TEST(a_longer_one_may_come_instead) {
  World w(geometry(1, 64));
  w.append(0, 1, 3);
  w.append(0, 2, 2);
  w.append(0, 3, 20);
  std::vector<std::uint64_t> asked;
  const auto choose = [&](std::uint64_t n, std::uint64_t attempt) {
    asked.push_back(n);
    if (attempt == 0) return stale(w.at({0, 3, 0, 3}, {9, false}), 3, 8);  // the second and the third
    if (attempt == 1) return stale(w.at({5}, {9, false}), 0, 9);           // for the second, and none for the third
    return w.at({6}, {9, false});
  };
  const Read read(w, choose, 4, 9, false);
  EXPECT((asked == std::vector<std::uint64_t>{4, 2, 1}));
  EXPECT((read.made == std::vector<std::uint64_t>{12, 27}));
  EXPECT((read.lengths == std::vector<std::uint64_t>{3, 9, 2}));
  EXPECT((Indices(read.rows.begin(), read.rows.begin() + 14) == Indices{0, 1, 2, 6, 7, 8, 9, 10, 11, 12, 13, 14, 3, 4}));
}

TEST(fewer_than_asked_for) {
  World w(geometry(1, 16));
  w.append(0, 1, 9);
  EXPECT_EQ(Read(w, [&](std::uint64_t, std::uint64_t) { return w.at({3}, {4}); }, 5, 4, false).total, 4u);
  EXPECT_EQ(Read(w, [&](std::uint64_t, std::uint64_t) { return Drawn{}; }, 5, 4, true).total, 0u);
  EXPECT_THROWS(std::invalid_argument, Read(w, [&](std::uint64_t, std::uint64_t) { return w.at({0}, {5}); }, 1, 4, true));
}

TEST(windows_that_move_at_every_try_are_given_up) {
  World w(geometry(1, 16));
  w.append(0, 1, 9);
  const Impatient impatient(std::chrono::milliseconds(100));
  EXPECT_THROWS(Stalled, Read(w, [&](std::uint64_t, std::uint64_t) { return stale(w.at({3}, {4}), 1, 2); }, 1, 4, false));
}

namespace {

void beside_writers(std::uint64_t lanes, std::uint64_t writers, std::uint64_t lane_length) {
  World w(geometry(lanes, lane_length));
  for (std::uint64_t lane = 0; lane < lanes; ++lane) w.append(lane, 1000 + lane, 6);
  std::atomic<std::uint64_t> running{writers};
  std::vector<std::thread> threads;
  for (std::uint64_t writer = 0; writer < writers; ++writer) {
    threads.emplace_back([&, writer] {
      Dice dice(40 + writer);
      for (std::uint64_t i = 0; i < 300; ++i) w.append(writer % lanes, (writer + 1) << 20 | i, dice.in(1, 8));
      --running;
    });
  }
  const WindowSpec shapes[] = {{3, false}, {4, false, true}, {4, false, false, 3, 3}};
  std::uint64_t key = 0, read = 0;
  while (running > 0 || read < 100) {
    ++key;
    const WindowSpec& shape = shapes[key % 3];
    const auto plain = [&](std::uint64_t n, std::uint64_t attempt) { return w.table.draw(key + attempt * 7919, n, shape); };
    const auto anchored = [&](std::uint64_t n, std::uint64_t attempt) {
      return draw_anchored(w.priorities, w.table, key + attempt * 7919, n, {3, false});
    };
    read += Read(w, plain, 6, shape.length, key % 2 == 0).total;
    read += Read(w, anchored, 6, 3, false).total;
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace

TEST(every_window_is_whole_beside_the_writers_of_a_lane) { beside_writers(1, 3, 48); }
TEST(every_window_is_whole_beside_writers_of_their_own_lanes) { beside_writers(3, 3, 40); }

// ---- first steps by priority -----------------------------------------------------------------------------------------

namespace {

// How often each row began a window, of `draws` times 4.
std::map<std::int64_t, double> begun(World& w, const WindowSpec& shape, std::uint64_t draws) {
  std::map<std::int64_t, double> counts;
  for (std::uint64_t key = 0; key < draws; ++key) {
    const Drawn drawn = draw_anchored(w.priorities, w.table, key, 4, shape);
    EXPECT_EQ(drawn.windows.size(), 4u);
    for (const Window& window : drawn.windows) ++counts[w.table.row(window.track, window.first)];
  }
  return counts;
}

// `weights`: of the rows where a window of the shape may begin.
void expect_in_proportion(World& w, const WindowSpec& shape, const std::map<std::int64_t, double>& weights) {
  constexpr std::uint64_t kDraws = 20000;
  double sum = 0, chi = 0;
  for (const auto& [row, weight] : weights) sum += weight;
  const auto counts = begun(w, shape, kDraws);
  for (const auto& [row, count] : counts) EXPECT(weights.contains(row));
  for (const auto& [row, weight] : weights) {
    const double expected = 4 * kDraws * weight / sum, found = counts.contains(row) ? counts.at(row) : 0;
    chi += (found - expected) * (found - expected) / expected;
  }
  const double freedom = static_cast<double>(weights.size()) - 1;
  EXPECT(chi < freedom + 5 * std::sqrt(2 * freedom));
}

}  // namespace

TEST(first_steps_in_proportion_to_their_priorities) {
  World w(geometry(1, 16));
  w.append(0, 1, 5);
  w.append(0, 2, 2);
  w.append(0, 3, 6);
  Indices rows(13);
  std::vector<double> values(13);
  for (std::int64_t row = 0; row < 13; ++row) {
    rows[static_cast<std::size_t>(row)] = row;
    values[static_cast<std::size_t>(row)] = static_cast<double>(row + 1);
  }
  w.priorities.update(rows.data(), values.data(), 13, nullptr);
  expect_in_proportion(w, {3}, {{0, 1}, {1, 2}, {2, 3}, {7, 8}, {8, 9}, {9, 10}, {10, 11}});
  expect_in_proportion(w, {3, false}, {{0, 1}, {1, 2}, {2, 3}, {5, 6}, {7, 8}, {8, 9}, {9, 10}, {10, 11}});
}

// Nearly all the weight is where no window may begin: they are listed, and drawn exactly.
TEST(first_steps_that_hardly_any_draw_finds) {
  World w(geometry(1, 16));
  w.append(0, 1, 5);
  w.append(0, 2, 5);
  const Indices rows{0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  const std::vector<double> values{1, 2, 3, 1e9, 1e9, 4, 0, 5, 1e9, 1e9};
  w.priorities.update(rows.data(), values.data(), 10, nullptr);
  expect_in_proportion(w, {3}, {{0, 1}, {1, 2}, {2, 3}, {5, 4}, {7, 5}});
}

TEST(no_first_step_of_positive_priority) {
  World w(geometry(1, 16));
  w.append(0, 1, 4);
  const Indices rows{0, 1, 2, 3};
  const std::vector<double> values{0, 0, 1, 1};
  w.priorities.update(rows.data(), values.data(), 4, nullptr);
  EXPECT(draw_anchored(w.priorities, w.table, 1, 3, {3}).windows.empty());
}

// ---- windows with burn-in, padding, dilation and period ----------------------------------------------------------------------

namespace {

// A window as rows, and how many of its steps lie before its trajectory and in it.
struct Expected {
  Indices rows;
  std::uint64_t before, real;
  std::int64_t anchor;

  auto operator<=>(const Expected&) const = default;
};

// Step by step, of trajectories that lie one behind the other from row 0.
std::vector<Expected> all_windows(const std::vector<std::uint64_t>& lengths, const WindowSpec& spec) {
  const auto steps = static_cast<std::int64_t>(spec.length), dilation = static_cast<std::int64_t>(spec.dilation);
  std::vector<Expected> windows;
  std::int64_t first = 0;
  for (const std::uint64_t length : lengths) {
    const auto n = static_cast<std::int64_t>(length), begin = -static_cast<std::int64_t>(spec.padding) * dilation;
    for (std::int64_t at = begin; at == begin || at + (steps - 1) * dilation < n; at += static_cast<std::int64_t>(spec.period)) {
      if (at + (steps - 1) * dilation >= n && spec.strict) break;
      Expected window{{}, 0, 0, first + at + static_cast<std::int64_t>(spec.burn_in) * dilation};
      for (std::int64_t i = 0; i < steps; ++i) {
        const std::int64_t step = at + i * dilation;
        window.before += step < 0;
        window.real += step >= 0 && step < n;
        window.rows.push_back(first + std::clamp<std::int64_t>(step, 0, n - 1));
      }
      windows.push_back(window);
    }
    first += n;
  }
  return windows;
}

std::vector<Expected> described(const Drawn& drawn, const WindowSpec& spec, const std::vector<Expected>& all) {
  std::vector<Expected> windows;
  for (std::size_t at = 0; const Window& window : drawn.windows) {
    const auto from = drawn.rows.begin() + static_cast<std::ptrdiff_t>(at);
    Expected found{Indices(from, from + static_cast<std::ptrdiff_t>(spec.length)), spec.steps(window).before, spec.steps(window).real, 0};
    for (const Expected& one : all) {
      if (one.rows == found.rows && one.before == found.before && one.real == found.real) found.anchor = one.anchor;
    }
    windows.push_back(found);
    at += spec.rows(window);
  }
  return windows;
}

void append_all(World& w, const std::vector<std::uint64_t>& lengths) {
  for (std::uint64_t episode = 0; episode < lengths.size(); ++episode) w.append(0, episode + 1, lengths[episode]);
}

}  // namespace

TEST(windows_of_every_spec_are_those_that_are_counted_by_hand) {
  Dice dice(7);
  for (int round = 0; round < 300; ++round) {
    std::vector<std::uint64_t> lengths;
    for (std::uint64_t i = dice.in(1, 5); i > 0; --i) lengths.push_back(dice.in(1, 14));
    World w(geometry(1, 80));
    append_all(w, lengths);
    WindowSpec spec{dice.in(1, 6), dice.below(2) == 0, dice.below(2) == 0};
    spec.period = dice.in(1, 4), spec.dilation = dice.in(1, 3), spec.whole = true;
    spec.burn_in = dice.below(spec.length), spec.padding = dice.below(spec.length);
    const std::vector<Expected> all = all_windows(lengths, spec);
    const std::set<Expected> legal(all.begin(), all.end());
    const Drawn drawn = w.table.draw(dice.bits(), 20, spec);
    EXPECT_EQ(drawn.windows.size(), legal.empty() ? 0u : 20u);
    EXPECT_EQ(drawn.rows.size(), drawn.windows.size() * spec.length);
    for (const Expected& one : described(drawn, spec, all)) EXPECT(legal.count(one) == 1);
    for (std::size_t i = 0; i < drawn.rows.size(); ++i) {
      EXPECT_EQ(drawn.numbers[i], number_of(w.control.word(static_cast<std::uint64_t>(drawn.rows[i]))));
    }
    TrajectoryEpoch epoch;
    const Drawn once = w.table.draw_epoch(epoch, dice.bits(), lengths.size(), spec, true, false);
    for (const Expected& one : described(once, spec, all)) EXPECT(legal.count(one) == 1);
    // By their anchors, of which none is padding.
    spec.padding = dice.below(spec.burn_in + 1);
    std::uint64_t rows = 0;
    for (const std::uint64_t length : lengths) rows += length;
    Indices each(rows);
    std::iota(each.begin(), each.end(), 0);
    std::set<Expected> expected;
    std::int64_t first = 0;
    for (const std::uint64_t length : lengths) {  // one whose trajectory is too short for its anchor cannot be drawn by it
      const auto n = static_cast<std::int64_t>(length);
      for (Expected window : all_windows({length}, spec)) {
        if (window.anchor >= n) continue;
        for (std::int64_t& row : window.rows) row += first;
        window.anchor += first;
        expected.insert(window);
      }
      first += n;
    }
    const std::vector<Expected> now(expected.begin(), expected.end());
    const std::vector<Expected> anchored = described(w.at(each, spec), spec, now);
    EXPECT(std::set<Expected>(anchored.begin(), anchored.end()) == expected);
    EXPECT_EQ(anchored.size(), expected.size());
  }
}

TEST(windows_of_a_spec_are_uniform) {
  const std::vector<std::uint64_t> lengths{9, 3, 14, 1, 20, 6};
  World w(geometry(1, 80));
  append_all(w, lengths);
  for (const auto& [period, dilation, padding] : {std::array<std::uint64_t, 3>{1, 1, 3}, {5, 1, 0}, {2, 3, 1}, {9, 1, 2}, {1, 2, 0}}) {
    WindowSpec spec{4, true, true};
    spec.period = period, spec.dilation = dilation, spec.padding = padding, spec.whole = true;
    const std::vector<Expected> all = all_windows(lengths, spec);
    for (const bool by_anchor : {true, false}) {
      spec.by_anchor = by_anchor;
      std::map<Expected, std::uint64_t> counts;
      for (const Expected& one : all) counts[one] = 0;
      for (std::uint64_t key = 0; key < 4000; ++key) {
        for (const Expected& one : described(w.table.draw(key, 4, spec), spec, all)) ++counts.at(one);
      }
      std::map<std::int64_t, std::vector<std::uint64_t>> of_trajectory;
      std::vector<std::uint64_t> each;
      for (const auto& [one, count] : counts) {
        std::int64_t first = 0;  // of the trajectory that its last row is of
        for (const std::uint64_t length : lengths) {
          if (one.rows.back() < first + static_cast<std::int64_t>(length)) break;
          first += static_cast<std::int64_t>(length);
        }
        of_trajectory[first].push_back(count);
        each.push_back(count);
      }
      if (by_anchor) {
        if (each.size() > 1) EXPECT_UNIFORM(each);
        continue;
      }
      std::vector<std::uint64_t> totals;
      for (const auto& [first, in_it] : of_trajectory) {
        if (in_it.size() > 1) EXPECT_UNIFORM(in_it);
        totals.push_back(std::accumulate(in_it.begin(), in_it.end(), std::uint64_t{0}));
      }
      if (totals.size() > 1) EXPECT_UNIFORM(totals);
    }
  }
}

TEST(a_spec_that_is_none) {
  World w(geometry(1, 16));
  const auto draw = [&](WindowSpec spec) { w.table.draw(1, 1, spec); };
  EXPECT_THROWS(std::invalid_argument, draw({.length = 0}));
  EXPECT_THROWS(std::invalid_argument, draw({.length = 3, .period = 0}));
  EXPECT_THROWS(std::invalid_argument, draw({.length = 3, .dilation = 0}));
  EXPECT_THROWS(std::invalid_argument, draw({.length = 3, .dilation = ~std::uint64_t{0}}));
  EXPECT_THROWS(std::invalid_argument, draw({.length = 3, .burn_in = 3}));
  EXPECT_THROWS(std::invalid_argument, draw({.length = 3, .padding = 3, .whole = true}));
  EXPECT_THROWS(std::invalid_argument, draw({.length = 3, .padding = 1}));
  EXPECT_THROWS(std::invalid_argument, draw({.length = 3, .left = 1, .whole = true}));
  EXPECT_THROWS(std::invalid_argument, w.table.newest({}, 1, {3}));
}

// Of each lane the newest whole window, once all its steps are newer than those that were taken.
TEST(the_online_queue) {
  World w(geometry(3, 32));
  std::vector<std::int64_t> taken(3, -1);
  const WindowSpec spec{3};
  const auto firsts = [&](std::uint64_t n) {
    Indices rows;
    const Drawn drawn = w.table.newest(taken, n, spec);
    for (const Window& window : drawn.windows) rows.push_back(w.table.row(window.track, window.first));
    EXPECT_EQ(drawn.rows.size(), 3 * drawn.windows.size());
    return rows;
  };
  EXPECT(firsts(4).empty());
  w.append(0, 1, 5);
  w.append(2, 2, 4);
  w.append(1, 3, 2);
  EXPECT((firsts(1) == Indices{65}));  // lane 2 was written after lane 0, and lane 1 has none
  EXPECT((firsts(4) == Indices{2}));
  EXPECT(firsts(4).empty());
  w.append(0, 1, 2);
  EXPECT(firsts(4).empty());  // two new steps and an old one
  w.append(1, 3, 1);
  w.append(0, 1, 1);
  EXPECT((firsts(4) == Indices{5, 32}));
  w.append(0, 4, 3);
  w.append(0, 5, 2);  // too short for one: the one before it is the newest
  EXPECT((firsts(4) == Indices{8}));
  w.append(0, 6, 2);
  EXPECT(firsts(4).empty());
  // Others fill the batch.
  w.append(1, 7, 3);
  const Drawn filled = newest_first(w.table, taken, 4, spec, [&](std::uint64_t n) {
    EXPECT_EQ(n, 3);
    return w.at({0, 1, 64}, spec);
  });
  EXPECT((filled.rows == Indices{35, 36, 37, 0, 1, 2, 1, 2, 3, 64, 65, 66}));
}
