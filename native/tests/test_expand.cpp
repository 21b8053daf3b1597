// What lies around rows, read out of a store whose rows say where they belong, and beside writers that overwrite them.
#include "core/expand.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "blocks.h"
#include "expect.h"

using namespace engram;

namespace {

using Indices = std::vector<std::int64_t>;

enum Fields : std::uint64_t { kStep, kEpisode, kFlag, kWide };

struct World {
  explicit World(Geometry g)
      : heap(g, {8, 8, 1, 40}),
        store(heap.open()),
        memory(Trajectories::bytes(g.lanes, g.lane_length, 1) / 8),
        table(heap.view(), {true, {heap.fields[kEpisode]}, {kEpisode}}, 1, 1,
              {reinterpret_cast<std::byte*>(memory.data()), memory.size() * 8}) {
    store.attach(table);
  }

  /// Steps of one episode from `first` on; the one at `flagged` has a flag.
  void append(std::uint64_t lane, std::uint64_t episode, std::uint64_t steps, std::uint64_t first = 0, std::uint64_t flagged = ~0ull) {
    Rows rows(heap.fields, steps);
    for (std::uint64_t i = 0; i < steps; ++i) {
      const auto step = static_cast<double>(first + i);
      std::memcpy(rows.row(kStep, i), &step, 8);
      std::memcpy(rows.row(kEpisode, i), &episode, 8);
      *rows.row(kFlag, i) = static_cast<std::byte>(first + i == flagged);
      describe(rows.row(kWide, i), 40, episode << 32 | (first + i));
    }
    store.append(lane, steps, rows.in, nullptr);
  }

  Heap heap;
  Store store;
  std::vector<std::uint64_t> memory;
  Trajectories table;
};

Output output(Output::Kind kind, std::uint64_t field, std::uint64_t ahead) {
  Output o;
  o.kind = kind;
  o.field = field;
  o.ahead = ahead;
  o.bits = 64;
  return o;
}

Output frames(std::uint64_t field, std::uint64_t ahead, std::uint64_t count, std::int64_t first = -1, std::vector<std::byte> filling = {}) {
  Output o = output(Output::Kind::frames, field, ahead);
  o.frames = count;
  o.first = first;
  o.filling = std::move(filling);
  return o;
}

/// One output of some rows, as numbers of a type.
template <class T>
struct Read {
  Read(World& w, const Output& o, const Indices& rows, std::vector<std::uint64_t> ends = {kFlag}, const Indices& expected = {},
       std::uint64_t per = 1)
      : values(rows.size() * per), numbers(rows.size()) {
    Expansion expansion(std::move(ends));
    expansion.add(o);
    std::byte* out = reinterpret_cast<std::byte*>(values.data());
    moved = expand(w.store, w.table, expansion, rows.data(), rows.size(), expected.empty() ? nullptr : expected.data(), {&out, 1},
                   numbers.data());
  }

  std::vector<T> values;
  Indices numbers, moved;
};

}  // namespace

TEST(rows_ahead_stop_where_their_trajectory_does) {
  World w(geometry(1, 16));
  w.append(0, 1, 4);
  w.append(0, 2, 3);
  const Read<double> read(w, output(Output::Kind::row, kStep, 2), {0, 1, 2, 3, 4, 5, 6});
  EXPECT((read.values == std::vector<double>{2, 3, 3, 3, 2, 2, 2}));
  EXPECT(read.moved.empty());
  const Read<double> flagless(w, output(Output::Kind::row, kStep, kToTheEnd), {0, 4}, {});
  EXPECT((flagless.values == std::vector<double>{3, 2}));
}

TEST(flags_end_a_trajectory_too) {
  World w(geometry(1, 16));
  w.append(0, 1, 6, 0, 2);
  const Indices rows{0, 1, 2, 3, 4, 5};
  EXPECT((Read<double>(w, output(Output::Kind::row, kStep, 9), rows).values == std::vector<double>{2, 2, 2, 5, 5, 5}));
  EXPECT((Read<double>(w, frames(kStep, 0, 2), rows, {kFlag}, {}, 2).values ==
          std::vector<double>{0, 0, 0, 1, 1, 2, 3, 3, 3, 4, 4, 5}));
  EXPECT((Read<std::int64_t>(w, output(Output::Kind::steps, 0, 9), rows).values == Indices{3, 2, 1, 3, 2, 1}));
  EXPECT((Read<std::uint8_t>(w, output(Output::Kind::over, 0, 9), rows).values == std::vector<std::uint8_t>{1, 1, 1, 0, 0, 0}));
  EXPECT((Read<std::uint8_t>(w, output(Output::Kind::over, 0, 1), rows).values == std::vector<std::uint8_t>{0, 1, 1, 0, 0, 0}));
}

TEST(frames_up_to_the_following_step) {
  World w(geometry(1, 16));
  w.append(0, 1, 6, 0, 2);
  const Indices rows{0, 1, 2, 3, 4, 5};
  const auto following = [](std::uint64_t ahead, std::uint64_t count) {
    Output o = frames(kStep, ahead, count);
    o.following = true;
    return o;
  };
  // Of rows 2 and 5 the last frame is left to the caller.
  const std::vector<double> read = Read<double>(w, following(0, 3), rows, {kFlag}, {}, 3).values;
  EXPECT((std::vector<double>(read.begin(), read.begin() + 8) == std::vector<double>{0, 0, 1, 0, 1, 2, 1, 2}));
  EXPECT((std::vector<double>(read.begin() + 9, read.begin() + 17) == std::vector<double>{3, 3, 4, 3, 4, 5, 4, 5}));
  const std::vector<double> later = Read<double>(w, following(1, 2), rows, {kFlag}, {}, 2).values;
  EXPECT_EQ(later[0], 1.0);
  EXPECT_EQ(later[1], 2.0);
  EXPECT_EQ(later[4], 2.0);
  EXPECT_EQ(later[8], 5.0);
  const auto after = [&](std::uint64_t ahead, const Indices& of, std::vector<std::uint64_t> ends = {kFlag}) {
    return Read<std::uint8_t>(w, output(Output::Kind::after, 0, ahead), of, std::move(ends)).values;
  };
  EXPECT((after(0, rows) == std::vector<std::uint8_t>{0, 0, 2, 0, 0, 1}));
  EXPECT((after(1, rows) == std::vector<std::uint8_t>{0, 2, 2, 0, 1, 1}));
  w.append(0, 2, 1);
  EXPECT((after(9, {0, 5, 6}) == std::vector<std::uint8_t>{2, 3, 1}));
  EXPECT((after(0, {2, 5}, {}) == std::vector<std::uint8_t>{0, 3}));
}

TEST(the_last_step_type_ends_a_trajectory_too) {
  World w(geometry(1, 16));
  w.append(0, 1, 6, 0, 2);  // the flag is 1 there: a step in the middle, as a type
  Expansion expansion({kFlag}, {1});
  const Output o = output(Output::Kind::steps, 0, 9);
  expansion.add(o);
  Indices steps(6), numbers(6);
  const Indices rows{0, 1, 2, 3, 4, 5};
  std::byte* out = reinterpret_cast<std::byte*>(steps.data());
  EXPECT(expand(w.store, w.table, expansion, rows.data(), 6, nullptr, {&out, 1}, numbers.data()).empty());
  EXPECT((steps == Indices{6, 5, 4, 3, 2, 1}));
  w.heap.fields[kFlag].data[4] = std::byte{2};
  EXPECT(expand(w.store, w.table, expansion, rows.data(), 6, nullptr, {&out, 1}, numbers.data()).empty());
  EXPECT((steps == Indices{5, 4, 3, 2, 1, 1}));
}

TEST(sums_and_discounts) {
  World w(geometry(1, 16));
  w.append(0, 1, 5);
  Output sum = output(Output::Kind::sum, kStep, 2);
  sum.gamma = 0.5;
  EXPECT((Read<double>(w, sum, {0, 2, 3, 4}).values == std::vector<double>{1, 4.5, 5, 4}));
  Output discount = output(Output::Kind::discount, 0, 2);
  discount.gamma = 0.5;
  EXPECT((Read<float>(w, discount, {0, 3, 4}).values == std::vector<float>{0.125f, 0.25f, 0.5f}));
}

TEST(never_across_the_seam_nor_into_another_lane) {
  World w(geometry(2, 8));
  w.append(0, 1, 8);
  w.append(1, 1, 11);  // its rows 8, 9, 10 hold the steps 8, 9, 10; its oldest is row 11
  EXPECT((Read<double>(w, output(Output::Kind::row, kStep, 3), {7, 8, 10, 11, 15}).values ==
          std::vector<double>{7, 10, 10, 6, 10}));
  EXPECT((Read<double>(w, frames(kStep, 0, 3), {8, 11, 12}, {kFlag}, {}, 3).values ==
          std::vector<double>{6, 7, 8, 3, 3, 3, 3, 3, 4}));
}

TEST(frames_before_the_first) {
  World w(geometry(1, 16));
  w.append(0, 7, 3);
  EXPECT((Read<double>(w, frames(kStep, 0, 4), {0, 1, 2}, {}, {}, 4).values ==
          std::vector<double>{0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 2}));
  const double pad = -1;
  std::vector<std::byte> filling(8);
  std::memcpy(filling.data(), &pad, 8);
  EXPECT((Read<double>(w, frames(kStep, 0, 3, -1, filling), {0, 1}, {}, {}, 3).values ==
          std::vector<double>{-1, -1, 0, -1, 0, 1}));
  // The frame before the first one lies in another field of the first row.
  const Read<std::uint64_t> all(w, frames(kStep, 0, 4, kEpisode), {1}, {}, {}, 4);
  EXPECT(all.values[0] == 7 && all.values[1] == 7 && all.values[2] != 7);
  const Read<std::uint64_t> one(w, frames(kStep, 0, 4, kEpisode, filling), {1}, {}, {}, 4);
  EXPECT(std::memcmp(&one.values[0], &pad, 8) == 0 && one.values[1] == 7);
}

TEST(rows_that_hold_something_else_moved) {
  World w(geometry(1, 8));
  w.append(0, 1, 8);
  const Output o = output(Output::Kind::row, kStep, 2);
  const Read<double> first(w, o, {1, 5});
  EXPECT(first.moved.empty());
  w.append(0, 2, 3);
  const Read<double> later(w, o, {1, 5}, {kFlag}, first.numbers);
  EXPECT((later.moved == Indices{0}));
  EXPECT_EQ(later.values[1], 7.0);
  World empty(geometry(1, 8));
  EXPECT((Read<double>(empty, o, {3}).moved == Indices{0}));
}

TEST(what_does_not_fit_is_refused) {
  World w(geometry(1, 8));
  w.append(0, 1, 4);
  const Output plain = output(Output::Kind::row, kStep, 0);
  EXPECT_THROWS(std::out_of_range, Read<double>(w, plain, {8}));
  EXPECT_THROWS(std::out_of_range, Read<double>(w, plain, {-1}));
  EXPECT_THROWS(std::invalid_argument, Read<double>(w, plain, {0}, {9}));
  EXPECT_THROWS(std::invalid_argument, Read<double>(w, output(Output::Kind::row, 9, 0), {0}));
  EXPECT_THROWS(std::invalid_argument, Read<double>(w, frames(kStep, 0, 0), {0}));
  EXPECT_THROWS(std::invalid_argument, Read<double>(w, frames(kStep, 0, 1, kWide), {0}));
  EXPECT_THROWS(std::invalid_argument, Read<double>(w, frames(kStep, 0, 1, -1, {std::byte{1}}), {0}));
  EXPECT_THROWS(std::invalid_argument, Read<double>(w, output(Output::Kind::sum, kFlag, 0), {0}));
}

TEST(beside_writers_that_lap_the_ring) {
  World w(geometry(2, 32));
  w.append(0, 1, 20);
  w.append(1, 2, 20);
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  for (std::uint64_t lane = 0; lane < 2; ++lane) {
    writers.emplace_back([&, lane] {
      for (std::uint64_t episode = 10 + lane; !stop.load(); episode += 2) w.append(lane, episode, 1 + episode % 9, 0, 5);
    });
  }
  Expansion expansion({kFlag});
  expansion.add(output(Output::Kind::row, kWide, 0));
  expansion.add(output(Output::Kind::row, kWide, 3));
  expansion.add(output(Output::Kind::sum, kStep, 3));
  expansion.add(output(Output::Kind::steps, 0, 3));
  expansion.add(frames(kWide, 0, 3));
  const std::uint64_t n = 40;
  Indices rows(n), numbers(n), steps(n);
  std::vector<std::byte> here(n * 40), there(n * 40), stack(n * 120);
  std::vector<double> sums(n);
  const std::vector<std::byte*> out{here.data(), there.data(), reinterpret_cast<std::byte*>(sums.data()),
                                    reinterpret_cast<std::byte*>(steps.data()), stack.data()};
  std::uint64_t whole = 0;
  for (int round = 0; round < 300; ++round) {
    for (std::uint64_t i = 0; i < n; ++i) {  // rows that are live from the start
      rows[i] = static_cast<std::int64_t>((i + static_cast<std::uint64_t>(round)) % 20 + i % 2 * 32);
    }
    const Indices moved = expand(w.store, w.table, expansion, rows.data(), n, nullptr, out, numbers.data());
    std::size_t next = 0;
    for (std::uint64_t i = 0; i < n; ++i) {
      if (next < moved.size() && moved[next] == static_cast<std::int64_t>(i)) {
        ++next;
        continue;
      }
      ++whole;
      const auto a = id_of(&here[i * 40], 40), b = id_of(&there[i * 40], 40);
      EXPECT(a.has_value() && b.has_value());
      const auto k = static_cast<std::uint64_t>(steps[i]), first = *a & 0xffffffff;
      EXPECT_EQ(*b, *a + k - 1);
      double sum = 0;
      for (std::uint64_t j = 0; j < k; ++j) sum += static_cast<double>(first + j);
      EXPECT_EQ(sums[i], sum);
      for (std::uint64_t f = 0; f < 3; ++f) {
        const auto frame = id_of(&stack[i * 120 + f * 40], 40);
        EXPECT(frame.has_value() && *frame <= *a && *frame + 2 >= *a + f && *frame >> 32 == *a >> 32);
      }
    }
  }
  stop = true;
  for (std::thread& writer : writers) writer.join();
  EXPECT(whole > 0);
}
