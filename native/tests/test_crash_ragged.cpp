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
#include <functional>
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

std::uint64_t self() {
  const auto pid = static_cast<std::uint32_t>(getpid());
  return OpenRows::owner_of(pid, start_time_of(pid));
}

// Some of them, the first and the last ones among them.
std::vector<std::uint64_t> some(const std::vector<std::uint64_t>& begins) {
  const auto most = stress::pick<std::size_t>(12, 1000000, 1000000);
  if (begins.size() <= most) return begins;
  std::vector<std::uint64_t> found;
  for (std::size_t i = 0; i < most; ++i) found.push_back(begins[i * (begins.size() - 1) / (most - 1)]);
  return found;
}

// The first id from some on whose row has items enough to be split.
std::uint64_t long_row(std::uint64_t id) {
  while (length_of(id, 0, kMost.tokens) < 4 || length_of(id, 1, kMost.text) < 2) ++id;
  return id;
}

// The steps of an operation at which the memory is another one than before, from where the child stops on. None: no single steps here.
std::vector<std::uint64_t> changes(World& world, const std::function<void()>& operation) {
  std::vector<std::uint64_t> begins;
  Stepped child(operation);
  if (child.end() == Stepped::End::refused) return begins;
  child.resume();
  if (!child.finish()) return begins;
  std::uint64_t last = 0;
  for (std::uint64_t step = 0; child.end() == Stepped::End::running; ++step) {
    const std::uint64_t hash = hash_of({world.pages.data(), world.memory.all.size()});
    if (hash != std::exchange(last, hash)) begins.push_back(step);
    child.step();
  }
  return begins;
}

// As many steps, and then it dies.
void die_after(World& world, const std::function<void()>& operation, std::uint64_t steps) {
  world.restore();
  Stepped child(operation);
  child.resume();
  EXPECT(child.finish());
  for (std::uint64_t step = 0; step < steps && child.end() == Stepped::End::running; ++step) child.step();
  child.kill();
}

// Whether a slot has the items of a row, as far as it has grown: all of each group's.
bool has_items_of(const OpenRows& open, std::uint64_t slot, std::uint64_t id, Rings lengths) {
  const SlotLayout& layout = Memory::slots();
  const auto at = [&](std::uint64_t field, std::uint64_t k) { return open.data(slot) + layout.places()[field] + k * layout.bytes(field); };
  bool same = true;
  for (std::uint64_t k = 0; k < lengths.tokens; ++k) {
    std::uint64_t token = 0;
    std::uint32_t other = 0;
    std::memcpy(&token, at(1, k), sizeof token), std::memcpy(&other, at(2, k), sizeof other);
    same &= token == token_of(id, k) && other == static_cast<std::uint32_t>(token);
  }
  for (std::uint64_t k = 0; k < lengths.text; ++k) same &= static_cast<std::uint8_t>(*at(3, k)) == char_of(id, k);
  return same;
}

// Died: the row is there, or it grows on in its slot, with the last items or without them. Never both, never neither.
TEST(a_row_is_sealed_once_or_grows_on) {
  World world(6, {40, 24});
  const std::uint64_t of = long_row(101);
  const Written row({of}, kMost);
  const Rings none{0, 0}, half{2, 1}, all = row.lengths();
  const SlotLayout& layout = Memory::slots();
  const auto seal = [&] {
    const auto store = world.memory.open(1);
    OpenRows open(world.memory.open_rows);
    store->attach(open);
    const std::uint64_t owner = self(), slot = *open.take(owner, layout);
    open.append(slot, layout, {}, row.slot_items(none, half));
    const auto values = row.slot_values();
    const auto items = row.slot_items(half, all);
    raise(SIGSTOP);  // where the steps begin
    std::int64_t at = -1;
    store->seal(open, layout, slot, owner, open.times(slot), 0, values, items, &at);
  };
  const std::vector<std::uint64_t> begins = changes(world, seal);
  if (begins.empty()) return;
  EXPECT(begins.size() > 20);
  const std::vector<std::uint64_t> deaths = some(begins);
  std::uint64_t sealed = 0, early = 0;
  for (const std::uint64_t steps : deaths) {
    die_after(world, seal, steps);
    const auto store = world.memory.open(0, true);
    OpenRows open(world.memory.open_rows);
    store->attach(open);
    store->free_sealed(open);
    const bool resumed = open.hand_over(0, open.slot(0).owner.load(), self());  // before anybody knows whether it was written
    early += resumed;
    store->recover();
    store->free_sealed(open);
    const auto count = [&] {
      bool torn = false;
      std::uint64_t found = 0;
      for (const auto& [id, at] : live_rows(*store, kMost, &torn)) found += id == of;
      EXPECT(!torn);
      return found;
    };
    const bool there = count() == 1, is_open = open.slot(0).owner.load() != 0;
    EXPECT(there != is_open && !(there && resumed));
    sealed += there;
    if (is_open) {  // another process goes on with it
      EXPECT(resumed || open.hand_over(0, open.slot(0).owner.load(), self()));
      const std::vector<std::uint32_t> lengths = open.lengths(0, layout);
      const Rings now{lengths[0], lengths[1]};
      EXPECT((now.tokens == half.tokens || now.tokens == all.tokens) && (now.text == half.text || now.text == all.text));
      EXPECT(has_items_of(open, 0, of, now));
      std::int64_t at = -1;
      store->seal(open, layout, 0, self(), open.times(0), 0, row.slot_values(), row.slot_items(now, all), &at);
      EXPECT(count() == 1 && open.slot(0).owner.load() == 0);
    }
    if (expect::failures > 0) break;
  }
  EXPECT(sealed > 0 && sealed < deaths.size() && early > 0 && early < deaths.size());
}

// Died while it opens a row and appends to it, in a slot that had another row: it has nothing of that one, and whole items or none.
TEST(a_death_while_a_row_grows_leaves_what_was_appended) {
  World world(6, {40, 24});
  const std::uint64_t of = long_row(101);
  const Written row({of}, kMost), other({long_row(of + 1)}, kMost);
  const Rings none{0, 0}, half{2, 1}, all = row.lengths();
  const SlotLayout& layout = Memory::slots();
  {
    OpenRows open(world.memory.open_rows);
    const std::uint64_t slot = *open.take(self(), layout);
    open.append(slot, layout, other.slot_values(), other.slot_items(none, other.lengths()));
    open.free(slot);
    world.state.assign(world.pages.data(), world.pages.data() + kBytes);
  }
  const auto grow = [&] {
    OpenRows open(world.memory.open_rows);
    const std::uint64_t owner = self();
    const auto values = row.slot_values();
    const auto first = row.slot_items(none, half), rest = row.slot_items(half, all);
    raise(SIGSTOP);  // where the steps begin
    const std::uint64_t slot = *open.take(owner, layout);
    open.append(slot, layout, values, first);
    open.append(slot, layout, {}, rest);
    open.free(slot);
  };
  const std::vector<std::uint64_t> begins = changes(world, grow);
  if (begins.empty()) return;
  EXPECT(begins.size() > 12);
  const std::vector<std::uint64_t> deaths = some(begins);
  std::uint64_t grown = 0;
  for (const std::uint64_t steps : deaths) {
    die_after(world, grow, steps);
    const auto store = world.memory.open(0, true);
    OpenRows open(world.memory.open_rows);
    store->attach(open);
    store->free_sealed(open);
    if (open.slot(0).owner.load() == 0) continue;
    const std::vector<std::uint32_t> lengths = open.lengths(0, layout);
    const Rings now{lengths[0], lengths[1]};
    EXPECT((now.tokens == 0 || now.tokens == half.tokens || now.tokens == all.tokens) && (now.text == 0 || now.text == half.text || now.text == all.text));
    EXPECT(has_items_of(open, 0, of, now));
    const bool given = open.data(0)[layout.given(0)] != std::byte{0};
    EXPECT(given || now.tokens + now.text == 0);
    if (given) EXPECT(id_of(open.data(0) + layout.places()[0], 16) == of);
    grown += now.tokens == all.tokens && now.text == all.text;
    EXPECT(open.hand_over(0, open.slot(0).owner.load(), self()));
  }
  EXPECT(grown < deaths.size());
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
