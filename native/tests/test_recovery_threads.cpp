// Threads of one process that recover dead participants, beside others that write, draw and update: what processes do to each other, on one
// mapping, where the thread sanitizer sees it.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "blocks.h"
#include "core/check.h"
#include "core/participants.h"
#include "core/priorities.h"
#include "core/store.h"
#include "expect.h"
#include "stress.h"

using namespace engram;
using namespace std::chrono_literals;

namespace {

/// A participant that dies in the middle of a write by number, again and again: each time it is recovered by another thread.
void die_repeatedly(const Control& control, std::chrono::steady_clock::time_point start) {
  const auto deaths = stress::pick<std::uint64_t>(3000, 1'000'000, 10'000'000);
  const auto until = start + stress::pick<std::chrono::seconds>(20s, 600s, 3600s);
  Dice dice(20);
  Participant& dead = control.participant(7);
  for (std::uint64_t i = 0; i < deaths && std::chrono::steady_clock::now() < until; ++i) {
    dead.pid = 0x7FFFFFFF, dead.start_time = 1;
    const std::uint64_t t0 = control.counters().next_ticket.fetch_add(1), row = dice.below(8);
    Claim& claim = dead.claims[i % kClaims];
    claim.n = 1, claim.lane = -1, claim.p0 = 0;
    claim.t0 = t0;
    std::uint64_t seen = control.word(row);
    if (is_committed(seen) && number_of(seen) < t0) control.word(row).compare_exchange_strong(seen, ticket(t0, State::writing));
    dead.state.store(1, std::memory_order_release);
    while (dead.state.load(std::memory_order_acquire) != 0) std::this_thread::yield();
  }
}

}  // namespace

TEST(dead_participants_are_recovered_beside_threads_that_go_on) {
  const Heap heap(geometry(2, 4), {64, 136});
  Store store = heap.open(0);
  const Control control = store.control();
  alignas(64) static std::byte memory[1 << 14];
  const std::span<std::byte> tree(memory, Priorities::bytes(8, false));
  Priorities::format(tree, 8, {1.0, 1.0, 0.0, false});
  Priorities priorities(tree, &control);
  store.attach(priorities);
  std::FILE* alive = std::tmpfile();
  store.join(std::make_shared<Participants>(control, fileno(alive)));
  for (const std::uint64_t lane : {0, 1}) {
    Rows rows(heap.fields, 4);
    for (std::uint64_t i = 0; i < 4; ++i) rows.describe(i, 1 + i);
    store.append(lane, 4, rows.in, nullptr);
  }

  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> recovered{0}, drawn{0}, torn{0};
  std::vector<std::thread> threads;
  const auto run = [&](auto step) {
    threads.emplace_back([&, step]() mutable {
      while (!stop) {
        try {
          step();
        } catch (const NothingLive&) {
        } catch (const std::exception& e) {
          expect::fail(__FILE__, __LINE__, std::string("a thread ended with: ") + e.what());
        }
      }
    });
  };
  for (std::uint64_t w = 0; w < 2; ++w) {
    run([&, dice = Dice(w + 1), id = (w + 1) << 40, rows = std::make_shared<Rows>(heap.fields, 4)]() mutable {
      const std::uint64_t n = dice.in(1, 4);
      for (std::uint64_t i = 0; i < n; ++i) rows->describe(i, ++id);
      store.append(dice.below(2), n, rows->in, nullptr);
      std::this_thread::yield();
    });
  }
  run([&, dice = Dice(10), rows = std::make_shared<Rows>(heap.fields, 8)]() mutable {
    std::int64_t at[8], numbers[8];
    double weights[8];
    priorities.sample(store, dice.bits(), 8, rows->out, at, numbers, weights);
    for (std::uint64_t i = 0; i < 8; ++i) torn += !rows->id(i);
    drawn += 8;
    priorities.update(at, weights, 8, numbers);
  });
  for (int m = 0; m < 2; ++m) {
    run([&] {
      recovered += store.reclaim();
      std::this_thread::yield();
    });
  }
  const auto start = std::chrono::steady_clock::now();
  die_repeatedly(control, start);
  while (drawn < 100 && std::chrono::steady_clock::now() < start + 60s) std::this_thread::sleep_for(1ms);
  stop = true;
  for (auto& thread : threads) thread.join();
  std::fclose(alive);
  EXPECT_EQ(torn.load(), 0u);
  const SumTree sums(tree.subspan(kPage), 8, false);
  EXPECT(sums.consistent());
  for (std::uint64_t row = 0; row < 8; ++row) {
    EXPECT(state_of(control.word(row)) != State::writing);
    EXPECT_EQ(sums.leaf(row) > 0, is_committed(control.word(row)));
  }
  std::printf("recoveries beside threads: %s, %s rows drawn meanwhile\n", stress::count(recovered).c_str(), stress::count(drawn).c_str());
  EXPECT(recovered > 0);
}
