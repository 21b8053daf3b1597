// Requests of rows with items, repeated after a death at any state of the first one, beside it while it is only stopped, and after others
// have written any number of rows in between: each row is there once and whole, or was replaced, and what comes later finds its place.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "blocks.h"
#include "core/store.h"
#include "core/writers.h"
#include "crash.h"
#include "expect.h"
#include "ragged.h"
#include "stress.h"

using namespace ragged;
using namespace std::chrono_literals;

namespace {

constexpr Rings kMost{9, 5};
constexpr std::uint64_t kBytes = 1 << 18, kTable = 1 << 17, kFirst = 60, kWriters = 2;

/// A store in memory that processes share, full of rows: of as many as fit, or of items. And a table of writers.
struct World {
  World(std::uint64_t rows, Rings rings)
      : pages(kBytes), memory(pages.data(), geometry(1, rows), rings), table(pages.data() + kTable, Writers::bytes(kWriters, 2)) {
    memory.format();
    Writers::format(table, kWriters, 2);
    const auto store = memory.open(3, true);
    for (std::uint64_t id = 1; id <= kFirst; ++id) Written({id}, kMost).append(*store, 0);
    state.assign(pages.data(), pages.data() + kBytes);
  }
  void restore() { std::memcpy(pages.data(), state.data(), kBytes); }
  std::uint64_t hash() const { return hash_of({pages.data(), kBytes}); }

  SharedPages pages;
  Memory memory;
  std::span<std::byte> table;
  std::vector<std::byte> state;
};

const Written& request() {
  static const Written batch({101, 102, 103}, kMost);
  return batch;
}

/// Writes request 1 of a writer, or what is missing of it: its rows, and how many were written.
std::pair<Indices, std::uint64_t> ask(const World& world, Store& store) {
  const Writers writers(world.table);
  Indices rows(3);
  RaggedWrite write(*store.ragged(), 3, request().sources());
  const std::uint64_t written = writers.append(store, {7, 1}, 1, 0, 3, request().columns(), rows.data(), &write);
  return {rows, written};
}

TEST(a_request_is_repeated_with_the_items_that_it_had) {
  World world(6, {40, 24});
  const auto store = world.memory.open(0, true);
  const auto [rows, written] = ask(world, *store);
  EXPECT_EQ(written, 3u);
  const auto [again, nothing] = ask(world, *store);
  EXPECT(rows == again && nothing == 0);
  const Writers writers(world.table);
  const Written other({101, 102, 104}, kMost);  // of other lengths
  RaggedWrite write(*store->ragged(), 3, other.sources());
  EXPECT_THROWS(std::invalid_argument, writers.append(*store, {7, 1}, 1, 0, 3, other.columns(), nullptr, &write));
  EXPECT_THROWS(std::invalid_argument, writers.append(*store, {7, 2}, 1, 0, 3, other.columns(), nullptr));
  EXPECT_EQ(writers.next({7, 2}), 1u);
}

#ifdef ENGRAM_CAN_STEP

/// The steps at which the memory differs from the one before, and the instructions up to the end. Empty: there are no single steps here.
struct States {
  explicit States(World& world) {
    const auto store = world.memory.open(1);
    ask(world, *store);  // resolves every symbol
    world.restore();
    Stepped child([&] { ask(world, *store); });
    std::uint64_t last = 0;
    for (std::uint64_t step = 0; child.end() == Stepped::End::running; ++step, child.step()) {
      instructions.push_back(child.at());
      const std::uint64_t hash = world.hash();
      if (hash != std::exchange(last, hash)) begins.push_back(step);
    }
    if (child.end() == Stepped::End::refused) begins.clear();
  }
  void go(Stepped& child, std::uint64_t step) const {
    if (step > 0) EXPECT(child.go_to(instructions, step) == Stepped::End::running);
  }

  std::vector<std::uint64_t> begins, instructions;
};

/// Every row is whole, and none of the request is there twice. How many of them are there.
std::uint64_t expect_whole_and_once(const Store& store) {
  bool torn = false;
  std::multiset<std::uint64_t> ids;
  for (const auto& [id, row] : live_rows(store, kMost, &torn)) ids.insert(id);
  EXPECT(!torn);
  std::uint64_t found = 0;
  for (const std::uint64_t id : {101u, 102u, 103u}) {
    EXPECT(ids.count(id) <= 1);
    found += ids.count(id);
  }
  return found;
}

/// Newer rows come and go as if nothing had happened.
void expect_usable(Store& store) {
  for (std::uint64_t id = 1000; id < 1060; ++id) {
    Written({id}, kMost).append(store, 0);
    expect_whole_and_once(store);
  }
  bool torn = false;
  const auto live = live_rows(store, kMost, &torn);
  EXPECT(!live.empty() && live.back().first == 1059);
  for (const auto& [id, row] : live) EXPECT(id >= 1000);
}

TEST(a_request_is_repeated_after_a_death_and_after_rows_of_others) {
  std::uint64_t deaths = 0, lost = 0, kept = 0;
  for (const auto& [rows, rings] : {std::pair<std::uint64_t, Rings>{40, {24, 16}}, {6, {40, 24}}, {6, {24, 16}}}) {
    World world(rows, rings);
    const States states(world);
    const auto& begins = states.begins;
    if (begins.empty()) return;
    EXPECT(begins.size() > 40);
    const std::uint64_t every = std::max<std::uint64_t>(1, begins.size() / stress::pick<std::uint64_t>(24, 1000000, 1000000));
    for (std::size_t i = 0; i < begins.size(); i += every) {
      for (const std::uint64_t between : {0, 1, 2, 4, 9}) {
        world.restore();
        {
          const auto store = world.memory.open(1);
          Stepped child([&] { ask(world, *store); });
          states.go(child, begins[i]);
        }
        const auto store = world.memory.open(0, true);
        store->recover();
        for (std::uint64_t id = 200; id < 200 + between; ++id) Written({id}, kMost).append(*store, 0);
        const auto [at, written] = ask(world, *store);
        const std::uint64_t there = expect_whole_and_once(*store);
        if (between == 0) EXPECT_EQ(there, 3u);
        const auto [again, nothing] = ask(world, *store);
        EXPECT(again == at && nothing == 0);
        expect_usable(*store);
        lost += 3 - there, kept += there, ++deaths;
        if (expect::failures == 0) continue;
        std::fprintf(stderr, "  killed before step %llu, %llu rows of others\n", llu(begins[i]), llu(between));
        return;
      }
    }
  }
  std::printf("requests of rows with items: repeated after %s deaths; %s rows had been replaced\n", stress::count(deaths).c_str(),
              stress::count(lost).c_str());
  EXPECT(kept > 0 && lost > 0);
}

TEST(a_request_with_items_is_repeated_beside_one_that_is_only_stopped) {
  World world(6, {40, 24});
  const States states(world);
  const auto& begins = states.begins;
  if (begins.empty()) return;
  std::uint64_t pairs = 0, waited = 0;
  const std::uint64_t every = std::max<std::uint64_t>(1, begins.size() / stress::pick<std::uint64_t>(60, 1000000, 1000000));
  for (std::size_t i = 0; i < begins.size() && expect::failures == 0; i += every) {
    world.restore();
    const auto one = world.memory.open(1), two = world.memory.open(2);
    Stepped stopped([&] { ask(world, *one); });
    states.go(stopped, begins[i]);
    const pid_t child = fork();
    if (child == 0) {
      ask(world, *two);
      _exit(0);
    }
    int status = 0;
    bool ended = false;
    for (const auto start = std::chrono::steady_clock::now(); !ended && std::chrono::steady_clock::now() < start + 4ms;) {
      ended = waitpid(child, &status, WNOHANG) == child;
      if (!ended) std::this_thread::sleep_for(50us);
    }
    waited += !ended;
    stopped.resume();
    EXPECT(stopped.finish());
    if (!ended) waitpid(child, &status, 0);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    const auto store = world.memory.open(0);
    EXPECT_EQ(expect_whole_and_once(*store), 3u);
    expect_usable(*store);
    ++pairs;
    if (expect::failures > 0) std::fprintf(stderr, "  stopped before step %llu\n", llu(begins[i]));
  }
  std::printf("requests of rows with items: repeated beside %s that were stopped; %s waited\n", stress::count(pairs).c_str(),
              stress::count(waited).c_str());
  EXPECT(waited > 0);
}

#endif

}  // namespace
