// Death at any instruction of an append with items: what was acknowledged is whole, what is read is whole, and the store goes on. And
// an append that is stopped anywhere while others need the items that it is about to write.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <thread>
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
constexpr std::uint64_t kBytes = 1 << 18, kFirst = 60;

/// A store in memory that processes share, full of rows: of as many as fit, or of items.
struct World {
  World(std::uint64_t rows, Rings rings) : pages(kBytes), memory(pages.data(), geometry(1, rows), rings) {
    memory.format();
    const auto store = memory.open(3, true);
    for (std::uint64_t id = 1; id <= kFirst; ++id) Written({id}, kMost).append(*store, 0);
    state.assign(pages.data(), pages.data() + kBytes);
  }
  void restore() { std::memcpy(pages.data(), state.data(), kBytes); }

  SharedPages pages;
  Memory memory;
  std::vector<std::byte> state;
};

/// Rows are whole, and among those that were ever written; newer ones come and go as if nothing had happened.
void expect_sound_and_usable(World& world) {
  const auto store = world.memory.open(0, true);
  store->recover();
  bool torn = false;
  for (const auto& [id, row] : live_rows(*store, kMost, &torn)) EXPECT(id <= kFirst || (id >= 101 && id <= 103) || (id >= 200 && id < 300));
  EXPECT(!torn);
  for (std::uint64_t id = 1000; id < 1100; ++id) {  // one by one: what nobody has written over must be what it was
    Written({id}, kMost).append(*store, 0);
    live_rows(*store, kMost, &torn);
  }
  const auto live = live_rows(*store, kMost, &torn);
  EXPECT(!torn);
  EXPECT(!live.empty() && live.back().first == 1099);
  for (const auto& [id, row] : live) EXPECT(id >= 1000);
  EXPECT_EQ(store->control().size(), live.size());
}

const Written& new_rows() {
  static const Written batch({101, 102, 103}, kMost);
  return batch;
}

#ifdef ENGRAM_CAN_STEP

// Each state of the memory that differs from the one before.
void die_everywhere(World& world, std::uint64_t most_states) {
  const auto store = world.memory.open(1);
  const auto operation = [&] { new_rows().append(*store, 0); };
  std::vector<std::uint64_t> begins;
  {
    Stepped child(operation);
    std::uint64_t last = 0;
    for (std::uint64_t step = 0; child.end() == Stepped::End::running; ++step) {
      const std::uint64_t hash = hash_of({world.pages.data(), world.memory.all.size()});
      if (hash != std::exchange(last, hash)) begins.push_back(step);
      child.step();
    }
    if (child.end() == Stepped::End::refused) return;  // no single steps here
  }
  EXPECT(begins.size() > 40);
  const std::uint64_t every = std::max<std::uint64_t>(1, begins.size() / most_states);
  for (std::size_t i = 0; i < begins.size() && expect::failures == 0; i += every) {
    world.restore();
    {
      Stepped child(operation);
      for (std::uint64_t step = 0; step < begins[i] && child.end() == Stepped::End::running; ++step) child.step();
      child.kill();
    }
    expect_sound_and_usable(world);
  }
}

TEST(a_death_at_any_instruction_leaves_whole_rows) {
  World of_items(40, {24, 16}), of_rows(6, {40, 24});
  const auto states = stress::pick<std::uint64_t>(16, 1000000, 1000000);
  die_everywhere(of_items, states);
  die_everywhere(of_rows, states);
}

// Died: the row is there, or it grows on in its slot. Never both, never neither.
TEST(a_row_is_sealed_once_or_grows_on) {
  World world(6, {40, 24});
  const Written row({101}, kMost);
  const auto seal = [&] {
    const auto store = world.memory.open(1);
    OpenRows open(world.memory.open_rows);
    store->attach(open);
    const std::uint64_t owner = OpenRows::owner_of(static_cast<std::uint32_t>(getpid()), start_time_of(static_cast<std::uint32_t>(getpid())));
    const std::uint64_t slot = *open.take(owner);
    raise(SIGSTOP);  // where the steps begin
    std::int64_t at = -1;
    row.seal(*store, open, slot, owner, &at);
  };
  std::vector<std::uint64_t> begins;
  const auto begin = [&](Stepped& child) {
    child.resume();
    return child.finish();
  };
  {
    Stepped child(seal);
    if (child.end() == Stepped::End::refused || !begin(child)) return;
    std::uint64_t last = 0;
    for (std::uint64_t step = 0; child.end() == Stepped::End::running; ++step) {
      const std::uint64_t hash = hash_of({world.pages.data(), world.memory.all.size()});
      if (hash != std::exchange(last, hash)) begins.push_back(step);
      child.step();
    }
  }
  EXPECT(begins.size() > 20);
  std::uint64_t sealed = 0;
  for (const std::uint64_t steps : begins) {
    world.restore();
    {
      Stepped child(seal);
      EXPECT(begin(child));
      for (std::uint64_t step = 0; step < steps && child.end() == Stepped::End::running; ++step) child.step();
      child.kill();
    }
    const auto store = world.memory.open(0, true);
    OpenRows open(world.memory.open_rows);
    store->attach(open);
    store->recover();
    store->free_sealed(open);
    bool torn = false, there = false;
    for (const auto& [id, at] : live_rows(*store, kMost, &torn)) there |= id == 101;
    const bool is_open = open.slot(0).owner.load() != 0;
    EXPECT(!torn);
    EXPECT(there != is_open);
    sealed += there;
    if (expect::failures > 0) break;
  }
  EXPECT(sealed > 0 && sealed < begins.size());
}

// It is stopped, not dead: others may not write over what it has, so they wait in vain for it, or pass it by.
TEST(an_append_that_is_stopped_anywhere_tears_nothing) {
  std::uint64_t stalled = 0, times = 0;
  World worlds[] = {{40, {24, 16}}, {6, {40, 24}}};
  for (World& world : worlds) {
    const auto store = world.memory.open(1);
    std::uint64_t steps = 0;
    {
      Stepped child([&] { new_rows().append(*store, 0); });
      while (child.end() == Stepped::End::running && child.step() == Stepped::End::running) ++steps;
      if (child.end() == Stepped::End::refused) return;
    }
    const Impatient impatient(4ms);
    const std::uint64_t every = std::max<std::uint64_t>(1, steps / stress::pick<std::uint64_t>(16, 2000, 20000));
    for (std::uint64_t stop = 0; stop < steps && expect::failures == 0; stop += every) {
      world.restore();
      Stepped child([&] {
        const Impatient patient(60s);
        new_rows().append(*store, 0);
      });
      for (std::uint64_t step = 0; step < stop && child.end() == Stepped::End::running; ++step) child.step();
      if (child.end() != Stepped::End::running) break;  // it takes fewer steps once the parent has called the same functions
      const auto other = world.memory.open(2);
      try {
        for (std::uint64_t id = 200; id < 216; ++id) Written({id}, kMost).append(*other, 0);
      } catch (const Stalled&) {
        ++stalled;
      }
      bool torn = false;
      live_rows(*other, kMost, &torn);
      child.resume();
      EXPECT(child.finish());
      live_rows(*other, kMost, &torn);
      EXPECT(!torn);
      ++times;
      expect_sound_and_usable(world);
    }
  }
  std::printf("      stopped %llu times, others stalled %llu times\n", llu(times), llu(stalled));
  EXPECT(stalled > 0);
}

#endif

/// What processes tell the test.
struct Tally {
  Word stop, written, read, torn, failed;
};

TEST(processes_that_write_read_and_die_tear_nothing) {
  SharedPages pages(kBytes), tally_pages(sizeof(Tally));
  const Memory memory(pages.data(), geometry(2, 8), {60, 30});
  memory.format();
  auto& tally = *new (tally_pages.data()) Tally;
  constexpr Rings most{20, 8};
  const auto writer = [&](std::uint64_t participant, std::uint64_t life) {
    const auto store = memory.open(participant);
    Dice dice(participant * 1000 + life);
    std::uint64_t id = participant << 56 | life << 32;
    while (tally.stop == 0) {
      std::vector<std::uint64_t> ids(dice.in(1, 4));
      for (auto& one : ids) one = ++id;
      try {
        Written(ids, most).append(*store, dice.below(2));
      } catch (const Stalled&) {  // behind one that was killed: this store has no table of the living
      }
      tally.written += ids.size();
    }
  };
  const auto reader = [&](std::uint64_t participant) {
    const auto store = memory.open(participant);
    Dice dice(participant);
    while (tally.stop == 0) {
      std::vector<std::int64_t> rows(8);
      for (auto& row : rows) row = static_cast<std::int64_t>(dice.below(16));
      const Read batch(*store, rows, most);
      for (std::uint64_t i = 0; i < rows.size(); ++i) {
        if (batch.moved(i)) continue;
        ++tally.read;
        tally.torn += !batch.id(i);
      }
    }
  };
  const auto begin = [&](auto&& body) {
    const pid_t child = fork();
    if (child != 0) return child;
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "a process ended with: %s\n", error.what());
      ++tally.failed;
    }
    _exit(0);
  };
  const auto end = [](pid_t child, int signal) {
    int status = 0;
    if (signal != 0) kill(child, signal);
    waitpid(child, &status, 0);
  };
  for (int round = 0; round < stress::pick(8, 400, 4000); ++round) {
    tally.stop = 0;
    std::vector<pid_t> children;
    for (std::uint64_t i = 0; i < 3; ++i) children.push_back(begin([&] { writer(i, static_cast<std::uint64_t>(round)); }));
    for (std::uint64_t i = 3; i < 5; ++i) children.push_back(begin([&] { reader(i); }));
    std::this_thread::sleep_for(60ms);
    for (const pid_t child : children) end(child, SIGKILL);
    const auto store = memory.open(0, true);
    store->recover();
    bool torn = false;
    live_rows(*store, most, &torn);
    EXPECT(!torn);
  }
  std::printf("      %s rows written, %s read\n", stress::count(tally.written).c_str(), stress::count(tally.read).c_str());
  EXPECT(tally.read > 0);
  EXPECT_EQ(tally.torn.load(), 0u);
  EXPECT_EQ(tally.failed.load(), 0u);
}

}  // namespace
