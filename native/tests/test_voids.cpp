// Rows that are void, as a store knows them from one draw to the next: whoever changed some of them since, all ranks are right.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "blocks.h"
#include "core/store.h"
#include "expect.h"
#include "stress.h"

using namespace engram;

namespace {

using Indices = std::vector<std::int64_t>;

/// A store, a second process that writes to it and tells nobody, and the rows that are live.
struct World {
  explicit World(Geometry g) : heap(g, {8}), store(heap.open(0)), other(heap.open(1)), steps(g.lanes) {}

  void append(std::uint64_t lane, std::uint64_t n, bool beside) {
    Rows rows(heap.fields, n);
    Indices at(n);
    (beside ? other : store).append(lane, n, rows.in, at.data());
    live.insert(at.begin(), at.end());
    steps[lane] += n;
  }
  void remove(const Indices& at, bool beside) {
    (beside ? other : store).remove(at.data(), at.size(), nullptr);
    for (const std::int64_t row : at) live.erase(row);
  }
  /// Whole rows inside the extent, live or void.
  void write(const Indices& at, bool beside) {
    Rows rows(heap.fields, at.size());
    const std::uint64_t all = 0;
    (beside ? other : store).scatter(at.data(), at.size(), {&all, 1}, rows.in, true);
    live.insert(at.begin(), at.end());
  }
  void empty(bool beside) {
    (beside ? other : store).empty(false);
    live.clear();
    std::fill(steps.begin(), steps.end(), 0);
  }

  Indices inside() const {
    Indices rows;
    const std::uint64_t length = heap.geometry.lane_length;
    for (std::uint64_t lane = 0; lane < steps.size(); ++lane) {
      for (std::uint64_t i = 0; i < std::min(steps[lane], length); ++i) {
        rows.push_back(static_cast<std::int64_t>(lane * length + i));
      }
    }
    return rows;
  }
  Indices voids() const {
    Indices rows = inside();
    std::erase_if(rows, [this](std::int64_t row) { return live.contains(row); });
    return rows;
  }

  void check() {
    const Indices expected(live.begin(), live.end()), gone = voids();
    for (Store* each : {&store, &other}) {
      EXPECT_EQ(each->holes(), gone);
      EXPECT_EQ(each->control().size(), live.size());
      EXPECT_EQ(each->control().void_rows(), gone.size());
      Indices ranks(live.size()), numbers(live.size());
      std::iota(ranks.begin(), ranks.end(), 0);
      Rows batch(heap.fields, live.size());
      if (!live.empty()) each->read_ranked(ranks.data(), ranks.size(), batch.out, numbers.data());
      EXPECT_EQ(ranks, expected);
    }
  }

  Heap heap;
  Store store, other;
  std::set<std::int64_t> live;
  std::vector<std::uint64_t> steps;  // appended to each lane since the store was emptied
};

/// Some of them, each once.
Indices some(Dice& dice, Indices from, std::uint64_t most) {
  for (std::uint64_t i = from.size(); i > 1; --i) std::swap(from[i - 1], from[dice.below(i)]);
  from.resize(std::min<std::uint64_t>(from.size(), dice.below(most + 1)));
  return from;
}

TEST(ranks_are_right_after_any_change) {
  for (std::uint64_t round = 0; round < stress::pick<std::uint64_t>(60, 2000, 20000); ++round) {
    Dice dice(round);
    World world(geometry(dice.in(1, 3), dice.in(2, 30)));
    for (int i = 0; i < 40; ++i) {
      for (std::uint64_t changes = dice.in(1, 3); changes > 0; --changes) {  // some keep the number of void rows
        const bool beside = dice.below(2) != 0;
        const Indices live(world.live.begin(), world.live.end());
        switch (dice.below(16)) {
          case 0:
            world.empty(beside);
            break;
          case 1: case 2: case 3: case 4: case 5:
            world.append(dice.below(world.steps.size()), dice.in(1, 4), beside);
            break;
          case 6: case 7: case 8:
            if (const Indices at = some(dice, world.inside(), 4); !at.empty()) world.write(at, beside);
            break;
          default:
            if (const Indices at = some(dice, live, dice.below(4) == 0 ? live.size() : 4); !at.empty()) world.remove(at, beside);
        }
      }
      world.check();
    }
  }
}

TEST(as_many_void_rows_may_be_others) {
  World world(geometry(1, 8));
  world.append(0, 8, false);
  world.remove({2, 5}, false);
  world.check();
  world.write({5}, true);
  world.remove({6}, true);
  world.check();
}

TEST(draws_are_uniform_where_hardly_any_row_is_live) {
  World world(geometry(2, 500));
  world.append(0, 500, false), world.append(1, 300, false);
  Indices gone = world.inside();
  std::erase_if(gone, [](std::int64_t row) { return row % 100 == 7; });  // 8 of 800 stay
  world.remove(gone, false);
  for (const bool changed : {false, true}) {
    if (changed) world.write({7 + 500, 3, 799}, true), world.remove({7}, true);  // rows 3 and 799 are live now, row 7 is not
    constexpr std::uint64_t kDraws = 20000;
    Rows batch(world.heap.fields, kDraws);
    Indices rows(kDraws);
    Masses masses;
    world.store.sample_uniform(41, kDraws, batch.out, rows.data(), nullptr, &masses);
    EXPECT_EQ(masses.live, world.live.size());
    std::vector<std::uint64_t> counts(1000);
    for (const std::int64_t row : rows) ++counts[static_cast<std::uint64_t>(row)];
    double chi2 = 0;
    for (std::uint64_t row = 0; row < counts.size(); ++row) {
      if (!world.live.contains(static_cast<std::int64_t>(row))) {
        EXPECT_EQ(counts[row], 0u);
        continue;
      }
      const double expected = static_cast<double>(kDraws) / static_cast<double>(world.live.size());
      chi2 += (static_cast<double>(counts[row]) - expected) * (static_cast<double>(counts[row]) - expected) / expected;
    }
    EXPECT(chi2 < 30);  // of 8 degrees of freedom at most: one draw in 5,000 is above; the keys are fixed
  }
  world.remove(Indices(world.live.begin(), world.live.end()), true);
  Rows batch(world.heap.fields, 1);
  Indices row(1);
  EXPECT_THROWS(NothingLive, world.store.sample_uniform(1, 1, batch.out, row.data(), nullptr));
}

TEST(ranks_beside_writers) {
  World world(geometry(2, 200));
  world.append(0, 200, false), world.append(1, 200, false);
  std::atomic<bool> over{false};
  const auto change = [&](Store& store, std::uint64_t key, std::int64_t low) {
    Dice dice(key);
    Rows rows(world.heap.fields, 3);
    const std::uint64_t all = 0;
    for (std::uint64_t i = 0; i < stress::pick<std::uint64_t>(400, 20000, 200000); ++i) {
      Indices at(3);
      for (std::uint64_t k = 0; k < 3; ++k) at[k] = low + static_cast<std::int64_t>(k * 60 + dice.below(60));
      if (dice.below(2) == 0) {
        store.remove(at.data(), at.size(), nullptr);
      } else {
        store.scatter(at.data(), at.size(), {&all, 1}, rows.in, true);
      }
    }
  };
  std::thread reader([&] {
    Rows batch(world.heap.fields, 16);
    Indices ranks(16);
    while (!over) {
      std::iota(ranks.begin(), ranks.end(), 0);
      try {
        world.store.read_ranked(ranks.data(), ranks.size(), batch.out, nullptr);
      } catch (const NothingLive&) {  // as few as that were left for a moment
        continue;
      }
      EXPECT(std::all_of(ranks.begin(), ranks.end(), [](std::int64_t row) { return row >= 0 && row < 400; }));
    }
  });
  std::thread first([&] { change(world.store, 1, 0); }), second([&] { change(world.other, 2, 200); });
  first.join(), second.join();
  over = true;
  reader.join();
  world.live.clear();
  for (const std::int64_t row : world.inside()) {
    std::int64_t number = -1;
    world.store.tickets_of(&row, 1, &number);
    if (number >= 0) world.live.insert(row);
  }
  world.check();
}

}  // namespace
