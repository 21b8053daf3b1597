// How fast rows may come and go: what is admitted, what waits, and what wakes it.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include "blocks.h"
#include "core/row_limits.h"
#include "core/store.h"
#include "expect.h"

using namespace engram;
using namespace std::chrono_literals;

namespace {

constexpr auto kInsert = Limits::kInsert;
constexpr auto kSample = Limits::kSample;

void append(Store& store, std::uint64_t n) {
  const std::vector<std::byte> rows(n * 8);
  const std::byte* const columns[] = {rows.data()};
  store.append(0, n, columns, nullptr);
}

// Until n rows are admitted.
void pass(const Limits& limits, Limits::Side side, std::uint64_t n) {
  for (;;) {
    const std::uint32_t event = limits.event(side);
    if (limits.admit(side, n)) return;
    limits.wait(side, n, event, 1);
  }
}

void until_waiting(const Limits& limits, Limits::Side side, std::uint64_t threads) {
  while (limits.counts().waiting[side] < threads) std::this_thread::yield();
}

}  // namespace

TEST(there_is_no_limit_in_zeroed_memory) {
  const Heap heap(geometry(1, 8), {8});
  Store store = heap.open();
  EXPECT(!store.limits().on());
  EXPECT(store.limits().rules() == Rules{});
  for (int i = 0; i < 5; ++i) append(store, 5);
  EXPECT(store.limits().admit(kSample, 1'000));
  EXPECT_EQ(store.limits().counts().inserts, 0);
  EXPECT_EQ(store.limits().counts().samples, 0);
}

TEST(the_level_stays_in_the_band) {
  const Heap heap(geometry(1, 1'000), {8});
  Store store = heap.open();
  const Limits limits = store.limits();
  limits.set({2, 0.5, 100, 0}, 0);  // centre 200, slack 100
  EXPECT(limits.on());
  EXPECT(!limits.admit(kSample, 1));  // too few rows
  append(store, 99);
  EXPECT(!limits.admit(kSample, 1));
  append(store, 51);                               // level 300
  EXPECT_THROWS(Limited, append(store, 1));        // 302
  EXPECT_EQ(store.control().counters().write_count.load(), 150);
  EXPECT(limits.admit(kSample, 2));                // 298
  append(store, 1);                                // 300
  EXPECT_THROWS(Limited, append(store, 1));
  EXPECT(limits.admit(kSample, 200));              // 100
  EXPECT(!limits.admit(kSample, 1));
  EXPECT_EQ(limits.counts().inserts, 151);
  EXPECT_EQ(limits.counts().samples, 202);
  EXPECT_EQ(limits.counts().level, 100);
}

TEST(one_operation_is_always_admitted_in_the_centre) {
  const Heap heap(geometry(1, 4'096), {8});
  Store store = heap.open();
  const Limits limits = store.limits();
  Dice dice(7);
  for (int round = 0; round < 200; ++round) {
    limits.set({}, 0);
    limits.set({static_cast<double>(dice.in(1, 1'000)) / 37, static_cast<double>(dice.below(3)) / 10, dice.in(1, 64), 0}, 0);
    while (store.control().size() < 64) append(store, 1);
    for (int step = 0; step < 50; ++step) {
      const std::uint64_t n = dice.in(1, 300), b = dice.in(1, 300);
      bool moved = false;
      if (dice.below(2) == 0) {
        if ((moved = limits.admit(kInsert, n))) limits.inserted();
      }
      moved = moved || limits.admit(kSample, b);
      if (!moved) EXPECT(limits.admit(kInsert, n));  // never both refused
    }
  }
}

TEST(rows_in_flight_are_those_not_consumed) {
  const Heap heap(geometry(1, 100), {8});
  Store store = heap.open();
  const Limits limits = store.limits();
  limits.set({0, 0, 0, 10}, 0);
  append(store, 10);
  EXPECT_THROWS(Limited, append(store, 1));
  EXPECT_THROWS(std::invalid_argument, append(store, 11));  // never
  limits.consumed(4);
  append(store, 4);
  EXPECT_EQ(limits.counts().in_flight, 10);
  limits.consumed(1'000);
  EXPECT_EQ(limits.counts().in_flight, 0);
  store.empty(false);
  append(store, 10);
  EXPECT_THROWS(Limited, append(store, 1));
}

TEST(what_was_not_written_or_drawn_is_given_back) {
  const Heap heap(geometry(1, 100), {8});
  Store store = heap.open();
  const Limits limits = store.limits();
  limits.set({1, 0, 10, 50}, 0);
  append(store, 10);
  const Limits::Counts before = limits.counts();
  { const AdmittedInsert admitted(store.control(), 1); }
  EXPECT(limits.admit(kSample, 1));
  limits.give_back(kSample, 1);
  const Limits::Counts after = limits.counts();
  EXPECT_EQ(after.level, before.level);
  EXPECT_EQ(after.inserts, before.inserts);
  EXPECT_EQ(after.samples, before.samples);
  EXPECT_EQ(after.in_flight, before.in_flight);
}

// Clients that see all stores wait; a store counts.
TEST(a_part_of_a_fleets_limits_counts_and_admits) {
  const Heap heap(geometry(1, 100), {8});
  Store store = heap.open();
  const Limits limits = store.limits();
  limits.set({.ratio = 2, .tolerance = 0, .min_size = 50, .fleet = 7, .stores = 3}, 0, -20);
  EXPECT(limits.on());
  EXPECT_EQ(limits.counts().level, -20);
  EXPECT(limits.admit(kSample, 30));
  append(store, 60);
  EXPECT_EQ(limits.counts().level, -20 - 30 + 120);
  EXPECT_EQ(limits.counts().inserts, 60);
  EXPECT_EQ(limits.counts().samples, 30);
  limits.set({.ratio = 1, .fleet = 6, .stores = 3}, 0);  // older ones
  limits.set({.fleet = 7, .stores = 3}, 0);
  EXPECT_EQ(limits.rules().ratio, 2);
  limits.restart(0);
  EXPECT_EQ(limits.rules().fleet, 7);
  EXPECT_EQ(limits.rules().stores, 0);  // the others have not begun again
  EXPECT_EQ(limits.counts().level, 0);
  limits.set({.fleet = 8, .stores = 3}, 0);  // none
  EXPECT(!limits.on());
  EXPECT_EQ(limits.rules().fleet, 8);
  limits.set({1, 0, 5, 0}, 0);  // of this store alone
  EXPECT_EQ(limits.rules().fleet, 0);
  EXPECT(limits.admit(kSample, 10));
  EXPECT(!limits.admit(kSample, 10));
}

TEST(a_part_of_a_fleets_limits_keeps_rows_in_flight_to_what_fits) {
  const Heap heap(geometry(1, 100), {8});
  Store store = heap.open();
  const Limits limits = store.limits();
  limits.set({.in_flight = 10, .fleet = 1, .stores = 2}, 0);
  append(store, 10);
  EXPECT(!limits.admit(kInsert, 1));
  limits.consumed(1);
  append(store, 1);
  EXPECT(limits.admit(kSample, 1'000));
}

TEST(a_limit_begins_in_the_centre_and_equal_ones_go_on) {
  const Heap heap(geometry(1, 100), {8});
  Store store = heap.open();
  append(store, 80);
  const Limits limits = store.limits();
  limits.set({4, 0.1, 20, 0}, 0);
  EXPECT_EQ(limits.counts().level, 80);
  EXPECT(limits.admit(kSample, 5));
  limits.set({4, 0.1, 20, 0}, 0);
  EXPECT_EQ(limits.counts().samples, 5);
  limits.set({3, 0.1, 20, 0}, 0);
  EXPECT_EQ(limits.counts().level, 60);
  store.empty(true);
  EXPECT_EQ(limits.counts().level, 0);
  EXPECT(!limits.admit(kSample, 1));
  limits.set({}, 0);
  EXPECT(!limits.on());
  EXPECT(limits.admit(kSample, 1));
}

TEST(threads_pass_rows_and_none_stays_behind) {
  const Heap heap(geometry(1, 64), {8});
  Store store = heap.open();
  const Limits limits = store.limits();
  limits.set({8, 0.1, 16, 0}, 0);
  append(store, 16);
  constexpr std::uint64_t kRounds = 3'000;
  std::atomic<double> lowest{1e9}, highest{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      for (std::uint64_t i = 0; i < kRounds; ++i) {
        pass(limits, kInsert, 4);
        limits.inserted();
      }
    });
  }
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      for (std::uint64_t i = 0; i < kRounds; ++i) {
        pass(limits, kSample, 32);
        const double level = limits.counts().level;
        if (level < lowest) lowest = level;
        if (level > highest) highest = level;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(limits.counts().inserts, 16 + 2 * kRounds * 4);
  EXPECT_EQ(limits.counts().samples, 2 * kRounds * 32);
  EXPECT_EQ(limits.counts().level, 128);
  EXPECT(lowest >= 96);
  EXPECT(highest <= 160);
}

TEST(what_waits_is_woken_by_what_it_waits_for) {
  const Heap heap(geometry(1, 100), {8});
  Store store = heap.open();
  const Limits limits = store.limits();
  limits.set({1, 0, 10, 40}, 0);
  std::thread sampler([&] { pass(limits, kSample, 1); });
  until_waiting(limits, kSample, 1);
  append(store, 10);
  sampler.join();
  append(store, 3);
  std::thread writer([&] { pass(limits, kInsert, 5); });
  until_waiting(limits, kInsert, 1);
  EXPECT(limits.admit(kSample, 5));
  writer.join();
  limits.set({0, 0, 0, 5}, 5);
  std::thread second([&] { pass(limits, kInsert, 5); });
  until_waiting(limits, kInsert, 1);
  limits.consumed(5);
  second.join();
  std::thread third([&] { pass(limits, kInsert, 5); });
  until_waiting(limits, kInsert, 1);
  limits.set({}, 0);
  third.join();
}

TEST(rules_are_of_one_moment) {
  const Heap heap(geometry(1, 100), {8});
  Store store = heap.open();
  const Rules rules[] = {{1, 0.25, 1, 101}, {2, 0.5, 2, 102}, {3, 0.75, 3, 103}};
  std::atomic<bool> stop{false};
  std::vector<std::thread> readers;
  for (int t = 0; t < 2; ++t) {
    readers.emplace_back([&] {
      while (!stop) {
        const Rules seen = store.limits().rules();
        EXPECT(seen == Rules{} || std::find(std::begin(rules), std::end(rules), seen) != std::end(rules));
        if (store.limits().admit(kSample, 1)) store.limits().give_back(kSample, 1);
      }
    });
  }
  for (std::uint64_t i = 0; i < 20'000; ++i) store.limits().set(rules[i % 3], 0);
  stop = true;
  for (std::thread& reader : readers) reader.join();
}
