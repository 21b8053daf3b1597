#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "core/check.h"
#include "core/pool.h"
#include "expect.h"

using namespace std::chrono_literals;
using engram::num_threads;
using engram::parallel;
using engram::set_num_threads;

namespace {

// Every chunk adds one to its own plain counter: what a chunk wrote is visible to the caller, and exactly once.
bool each_once(std::size_t chunks) {
  std::vector<int> counts(chunks);
  parallel(chunks, [&](std::size_t c) { ++counts[c]; });
  for (const int count : counts) {
    if (count != 1) return false;
  }
  return true;
}

bool wait_for(const std::atomic<int>& value, int wanted, std::chrono::milliseconds limit = 60s) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (value != wanted) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

TEST(every_chunk_runs_exactly_once) {
  for (const std::size_t threads : {1, 2, 3, 4, 7}) {
    set_num_threads(threads);
    EXPECT_EQ(num_threads(), threads);
    for (const std::size_t chunks : {0, 1, 2, 3, 7, 64, 1000}) {
      for (int round = 0; round < 20; ++round) EXPECT(each_once(chunks));
    }
  }
}

TEST(the_number_of_threads_is_checked) {
  set_num_threads(2);
  EXPECT_THROWS(std::invalid_argument, set_num_threads(0));
  EXPECT_THROWS(std::invalid_argument, set_num_threads(1025));
  EXPECT_THROWS(std::invalid_argument, set_num_threads(~std::size_t{0}));
  EXPECT_EQ(num_threads(), 2u);
  EXPECT(each_once(10));
}

TEST(chunks_run_at_the_same_time) {
  // Each chunk waits until all have begun: fewer threads than chunks could not end this.
  set_num_threads(3);
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> begun{0}, met{0};
    parallel(3, [&](std::size_t) {
      ++begun;
      if (wait_for(begun, 3)) ++met;
    });
    EXPECT_EQ(met.load(), 3);
  }
}

TEST(one_thread_means_the_caller_alone) {
  set_num_threads(1);
  const auto caller = std::this_thread::get_id();
  std::vector<std::thread::id> ran(50);
  parallel(50, [&](std::size_t c) { ran[c] = std::this_thread::get_id(); });
  for (const auto id : ran) EXPECT(id == caller);
}

TEST(a_busy_pool_makes_nobody_wait) {
  set_num_threads(2);
  std::atomic<int> begun{0}, ended{0}, release{0};
  std::thread holder([&] {
    parallel(2, [&](std::size_t) {
      ++begun;
      wait_for(release, 1);
      ++ended;
    });
  });
  EXPECT(wait_for(begun, 2));
  EXPECT(each_once(100));
  EXPECT_EQ(ended.load(), 0);  // the pool was in the holder's hands all the time
  release = 1;
  holder.join();
}

TEST(late_threads_take_nothing_of_the_next_job) {
  // Far more threads than cores or chunks: most wake when their job is over, many when the next one has begun. It is the
  // thread sanitizer that sees one at work outside its job.
  set_num_threads(40);
  for (int round = 0; round < 500; ++round) EXPECT(each_once(static_cast<std::size_t>(2 + round % 5)));
}

TEST(callers_at_the_same_time_do_not_mix) {
  set_num_threads(3);
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([t] {
      for (int round = 0; round < 300; ++round) EXPECT(each_once(static_cast<std::size_t>(1 + (round + t) % 20)));
    });
  }
  for (auto& caller : callers) caller.join();
}

TEST(the_number_of_threads_may_change_while_others_run) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> callers;
  for (int t = 0; t < 2; ++t) {
    callers.emplace_back([&] {
      while (!stop) EXPECT(each_once(17));
    });
  }
  for (std::size_t i = 0; i < 150; ++i) {
    set_num_threads(1 + i % 5);
    EXPECT(num_threads() == 1 + i % 5);
    std::this_thread::sleep_for(200us);
  }
  stop = true;
  for (auto& caller : callers) caller.join();
  set_num_threads(4);
  EXPECT(each_once(100));
}

}  // namespace
