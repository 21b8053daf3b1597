// Death at any instruction of a write to slots, behind the last row or anywhere, and a write that is stopped there: what is read is whole,
// what was not written is as it was, and the store goes on.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "blocks.h"
#include "core/check.h"
#include "core/store.h"
#include "crash.h"
#include "expect.h"
#include "ragged.h"
#include "stress.h"

using namespace ragged;
using namespace std::chrono_literals;

namespace {

constexpr Rings kMost{9, 5};
constexpr std::uint64_t kBytes = 1 << 18, kRows = 6;
const std::vector<std::int64_t> kAnywhere{4, 1, 2};

const Written& batch() {
  static const Written rows({101, 102, 103}, kMost);
  return rows;
}

/// A store in memory that processes share. Its rows hold the ids 1 to 6.
struct World {
  World() : pages(kBytes), memory(pages.data(), geometry(1, kRows), {kRows * (kMost.tokens - 1), kRows * (kMost.text - 1)}, true) {
    memory.format();
    const auto store = memory.open(3, true);
    Written({1, 2, 3, 4, 5, 6}, kMost).append(*store, 0);
    state.assign(pages.data(), pages.data() + kBytes);
    batch();  // is there before anybody counts steps
  }
  void restore() { std::memcpy(pages.data(), state.data(), kBytes); }

  SharedPages pages;
  Memory memory;
  std::vector<std::byte> state;
};

void write(Store& store, bool anywhere) { anywhere ? batch().scatter(store, kAnywhere) : batch().append(store, 0); }

/// Rows that the write does not name are as they were; each of the others is old, new or, if its writer died, gone. And newer rows are
/// written as if nothing had happened.
void expect_sound_and_usable(const World& world, bool anywhere) {
  const auto store = world.memory.open(0, true);
  store->recover();
  bool torn = false;
  std::map<std::int64_t, std::uint64_t> found;
  for (const auto& [id, row] : live_rows(*store, kMost, &torn)) found[row] = id;
  EXPECT(!torn);
  const std::vector<std::int64_t> named = anywhere ? kAnywhere : std::vector<std::int64_t>{0, 1, 2};
  for (std::int64_t row = 0; row < static_cast<std::int64_t>(kRows); ++row) {
    const auto at = std::find(named.begin(), named.end(), row);
    const auto old = static_cast<std::uint64_t>(row) + 1, fresh = 101 + static_cast<std::uint64_t>(at - named.begin());
    if (at == named.end()) EXPECT(found.contains(row) && found[row] == old);
    if (found.contains(row)) EXPECT(found[row] == old || (at != named.end() && found[row] == fresh));
  }
  for (std::int64_t row = 0; row < static_cast<std::int64_t>(kRows); ++row) Written({1000 + static_cast<std::uint64_t>(row)}, kMost).scatter(*store, {row});
  Written({2000, 2001}, kMost).append(*store, 0);
  const auto live = live_rows(*store, kMost, &torn);
  EXPECT(!torn && live.size() == kRows);
  for (const auto& [id, row] : live) EXPECT(id >= 1000);
  EXPECT_EQ(store->control().size(), kRows);
}

#ifdef ENGRAM_CAN_STEP

// Steps of an operation at which the memory is another one than before: some of them, or by night all. None: no single steps here.
std::vector<std::uint64_t> changes(const World& world, const std::function<void()>& operation) {
  std::vector<std::uint64_t> begins;
  Stepped child(operation);
  std::uint64_t last = 0;
  for (std::uint64_t step = 0; child.end() == Stepped::End::running; ++step) {
    const std::uint64_t hash = hash_of({world.pages.data(), world.memory.all.size()});
    if (hash != std::exchange(last, hash)) begins.push_back(step);
    child.step();
  }
  if (child.end() == Stepped::End::refused) return {};
  EXPECT(begins.size() > 25);
  const auto every = std::max<std::size_t>(1, begins.size() / stress::pick<std::size_t>(12, 1000000, 1000000));
  std::vector<std::uint64_t> some;
  for (std::size_t i = 0; i < begins.size(); i += every) some.push_back(begins[i]);
  return some;
}

TEST(a_death_at_any_instruction_leaves_whole_rows) {
  for (const bool anywhere : {false, true}) {
    World world;
    const auto store = world.memory.open(1);
    const auto operation = [&] { write(*store, anywhere); };
    const std::vector<std::uint64_t> begins = changes(world, operation);
    for (std::size_t i = 0; i < begins.size() && expect::failures == 0; ++i) {
      world.restore();
      {
        Stepped child(operation);
        for (std::uint64_t step = 0; step < begins[i] && child.end() == Stepped::End::running; ++step) child.step();
        child.kill();
      }
      expect_sound_and_usable(world, anywhere);
    }
  }
}

// It is stopped, not dead: others wait in vain for a row that it has marked, or pass it by.
TEST(a_write_that_is_stopped_anywhere_tears_nothing) {
  std::uint64_t stalled = 0, times = 0;
  for (const bool anywhere : {false, true}) {
    World world;
    const auto store = world.memory.open(1);
    const std::vector<std::uint64_t> begins = changes(world, [&] { write(*store, anywhere); });
    if (begins.empty()) return;
    const Impatient impatient(4ms);
    for (std::size_t i = 0; i < begins.size() && expect::failures == 0; ++i) {
      world.restore();
      Stepped child([&] {
        const Impatient patient(60s);
        write(*store, anywhere);
      });
      for (std::uint64_t step = 0; step < begins[i] && child.end() == Stepped::End::running; ++step) child.step();
      if (child.end() != Stepped::End::running) break;  // it takes fewer steps once the parent has called the same functions
      const auto other = world.memory.open(2);
      for (std::int64_t row = 0; row < static_cast<std::int64_t>(kRows); ++row) {
        try {
          Written({200 + static_cast<std::uint64_t>(row)}, kMost).scatter(*other, {row});
        } catch (const Stalled&) {
          ++stalled;
        }
      }
      bool torn = false;
      live_rows(*other, kMost, &torn);
      child.resume();
      EXPECT(child.finish());
      EXPECT_EQ(live_rows(*other, kMost, &torn).size(), kRows);
      EXPECT(!torn);
      ++times;
    }
  }
  std::printf("      stopped %llu times, others stalled %llu times\n", llu(times), llu(stalled));
  EXPECT(stalled > 0);
}

#endif

}  // namespace
