// An epoch: its stretches against a model, and in threads.
#include <algorithm>
#include <cstdint>
#include <map>
#include <thread>
#include <vector>

#include "blocks.h"
#include "expect.h"
#include "epochs.h"

using engram::RowEpoch;
using engram::EpochState;

TEST(every_row_comes_once_in_a_walk) {
  Dice dice(3);
  for (int round = 0; round < 300; ++round) {
    SharedEpoch shared;
    RowEpoch epoch(shared.bytes());
    std::uint64_t rows = 1 + dice.below(40), of = 0, left = 0, key = 0;
    for (std::uint64_t draw = 1; draw < 60; ++draw) {
      if (dice.below(20) == 0) {
        rows = 1 + dice.below(40);  // those are of the next epoch
      }
      if (dice.below(30) == 0) epoch.emptied(), left = 0;
      const bool whole = dice.below(3) == 0;
      const std::uint64_t n = 1 + dice.below(whole ? rows : 12);
      if (left == 0 || (whole && left < n)) left = of = rows, key = draw;
      const RowEpoch::Stretch got = epoch.next(draw, rows, n, whole);
      EXPECT_EQ(got.key, key);
      EXPECT_EQ(got.start, of - left);
      EXPECT_EQ(got.count, std::min(n, left));
      left -= got.count;
      if (whole && left < n) left = 0;
      EXPECT_EQ(got.last, left == 0);
      EXPECT(same(epoch.state(), {key, of, of - left}));
    }
  }
}

TEST(ranks_are_looked_at_before_they_are_taken) {
  SharedEpoch shared;
  RowEpoch epoch(shared.bytes());
  for (std::uint64_t walk = 1; walk <= 3; ++walk) {
    for (std::uint64_t at = 0; at < 10; at += 2) {
      for (int again = 0; again < 2; ++again) {
        const RowEpoch::Stretch seen = epoch.next(100 * walk + at, 10, 0, false);
        EXPECT_EQ(seen.key, 100 * walk);  // the epoch that began first goes on
        EXPECT_EQ(seen.start, at);
        EXPECT_EQ(seen.count, 0u);
        EXPECT(!seen.last);
      }
      EXPECT(!epoch.pass_over(100 * walk, at + 1, at + 2));  // from elsewhere
      EXPECT(!epoch.pass_over(100 * walk + 1, at, at + 2));  // of another epoch
      EXPECT(!epoch.pass_over(100 * walk, at, 11));
      EXPECT(epoch.pass_over(100 * walk, at, at + 2));
      EXPECT(!epoch.pass_over(100 * walk, at, at + 2));  // another call has taken them
    }
  }
}

TEST(threads_walk_together) {
  SharedEpoch shared;
  constexpr std::uint64_t kRows = 1000, kDraws = 2000;
  std::vector<std::vector<RowEpoch::Stretch>> got(3);
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < got.size(); ++t) {
    threads.emplace_back([&, t] {
      RowEpoch epoch(shared.bytes());
      for (std::uint64_t i = 0; i < kDraws; ++i) got[t].push_back(epoch.next(t << 32 | i, kRows, 7 + t, false));
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::map<std::uint64_t, std::vector<std::uint64_t>> visited;
  for (const auto& stretches : got) {
    for (const RowEpoch::Stretch& s : stretches) {
      auto& of = visited[s.key];
      of.resize(kRows);
      for (std::uint64_t i = s.start; i < s.start + s.count; ++i) ++of[i];
    }
  }
  std::uint64_t unfinished = 0;
  for (const auto& [key, times] : visited) {
    for (const std::uint64_t n : times) EXPECT(n <= 1);
    unfinished += std::count(times.begin(), times.end(), 0u) > 0;
  }
  EXPECT(visited.size() > 5);
  EXPECT(unfinished <= 1);
}

TEST(what_is_no_pass_is_refused) {
  std::vector<std::uint64_t> words(RowEpoch::kBytes / 8);
  const auto memory = std::as_writable_bytes(std::span(words));
  EXPECT_THROWS(std::invalid_argument, (void)RowEpoch(memory));
  EXPECT_THROWS(std::invalid_argument, RowEpoch::format(memory.first(64)));
  RowEpoch::format(memory);
  EXPECT_THROWS(std::invalid_argument, (void)RowEpoch(memory.first(64)));
  RowEpoch epoch(memory);
  EXPECT_THROWS(std::invalid_argument, epoch.set({0, 3, 4}));
  EXPECT_THROWS(std::invalid_argument, epoch.next(0, 0, 1, false));
  EXPECT_THROWS(std::invalid_argument, epoch.next(0, 3, 4, true));
  EXPECT_THROWS(std::invalid_argument, epoch.next(0, 3, 0, true));
  EXPECT(same(epoch.state(), {0, 0, 0}));
}

TEST(a_walk_that_makes_no_sense_begins_anew) {
  // Damage, or what somebody sees of a state without the mutex while others go on: no reason to refuse the epoch.
  std::vector<std::uint64_t> words(RowEpoch::kBytes / 8);
  const auto memory = std::as_writable_bytes(std::span(words));
  RowEpoch::format(memory);
  reinterpret_cast<engram::EpochPage*>(memory.data())->states[0] = {7, 3, 4};
  RowEpoch epoch(memory);
  const RowEpoch::Stretch stretch = epoch.next(8, 3, 2, true);
  EXPECT_EQ(stretch.key, 8u);
  EXPECT_EQ(stretch.start, 0u);
  EXPECT_EQ(stretch.count, 2u);
}
