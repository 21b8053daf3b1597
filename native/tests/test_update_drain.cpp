// Updates from a device: each entry is applied once, under its ticket, whatever stands in the ring.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <limits>
#include <thread>
#include <vector>

#include "blocks.h"
#include "core/check.h"
#include "core/random.h"
#include "core/wait.h"
#include "expect.h"
#include "ring.h"

using namespace engram;
using namespace std::chrono_literals;

namespace {

constexpr auto kHang = 60s;  // a hang fails; nothing else depends on it

TEST(leaves_are_those_of_update) {
  constexpr std::uint64_t kRows = 100, kBatch = 7;
  for (const bool single : {false, true}) {
    const FormattedPriorities here(kRows), there(kRows);
    Ring ring(3, kBatch);
    const auto drain = ring.drain(*here.priorities, single);
    const Random random(5);
    for (std::uint64_t batch = 0; batch < 200; ++batch) {
      std::vector<Entry> entries;
      for (std::uint64_t i = 0; i < batch % (kBatch + 1); ++i) {  // a row may be named twice
        const auto row = static_cast<std::int64_t>(random.below(kRows, batch * kBatch + i));
        entries.push_back({row, static_cast<double>(random.bits(i, batch) >> 11) * 1e-14});
      }
      while (!ring.send(entries)) std::this_thread::yield();
      for (const Entry& entry : entries) {
        const auto narrow = static_cast<float>(entry.priority);
        if (single) there.priorities->update(&entry.row, &narrow, 1, nullptr);
        if (!single) there.priorities->update(&entry.row, &entry.priority, 1, nullptr);
      }
    }
    EXPECT(drain->flush(ring.sent, kHang));
    EXPECT_EQ(here.leaves(), there.leaves());
    EXPECT_EQ(here.priorities->highest(), there.priorities->highest());
    EXPECT_EQ(drain->counts().batches, 200u);
    EXPECT_EQ(drain->counts().refused, 0u);
  }
}

TEST(bad_entries_are_dropped_and_the_others_of_their_batch_applied) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr auto kLowest = std::numeric_limits<std::int64_t>::min(), kHighest = std::numeric_limits<std::int64_t>::max();
  for (const bool single : {false, true}) {
    const FormattedPriorities here(8, nullptr, {1.0, 0.0, 0.0, false});
    Ring ring(2, 16);
    const auto drain = ring.drain(*here.priorities, single);
    EXPECT(ring.send({{0, 1}, {1, -1}, {2, kNan}, {3, kInfinity}, {4, -kInfinity}, {5, 1e300}, {8, 1}, {-2, 1}, {kLowest, 1},
                      {kHighest, 1}, {-1, 1}, {6, 0}, {7, 2}}));
    EXPECT(drain->flush(1, kHang));
    EXPECT_EQ(here.leaves(), (std::vector<double>{1, 0, 0, 0, 0, 0, 0, 2}));
    EXPECT_EQ(drain->counts().entries, 4u);  // row -1 is none, and no mistake
    EXPECT_EQ(drain->counts().refused, 9u);
  }
}

TEST(a_batch_that_says_it_is_longer_than_a_slot_is_dropped) {
  const FormattedPriorities here(8);
  Ring ring(2, 4);
  const auto drain = ring.drain(*here.priorities);
  for (const std::uint64_t length : {std::uint64_t{5}, ~std::uint64_t{0} - 1, std::uint64_t{1} << 63}) {
    while (!ring.send({{3, 1.0}}, length)) std::this_thread::yield();
  }
  EXPECT(drain->flush(3, kHang));
  EXPECT_EQ(here.leaves(), std::vector<double>(8, 0.0));
  EXPECT(ring.send({{3, 1.0}}));
  EXPECT(drain->flush(4, kHang));
  EXPECT_EQ(drain->counts().refused, 3u);
  EXPECT_EQ(drain->counts().entries, 1u);
}

TEST(garbage_in_every_word_does_no_harm) {
  const FormattedPriorities here(64);
  Ring ring(4, 16);
  const Random random(11);
  const auto drain = ring.drain(*here.priorities);
  for (std::uint64_t batch = 0; batch < 2000; ++batch) {
    std::vector<Entry> entries;
    for (std::uint64_t i = 0; i < 16; ++i) {
      const std::uint64_t bits = random.bits(i, batch);
      entries.push_back({static_cast<std::int64_t>(bits), std::bit_cast<double>(random.bits(i + 16, batch)), 0});
      if (bits % 2 == 0) entries.back().row = static_cast<std::int64_t>(bits >> 58);
    }
    while (!ring.send(entries, batch % 3 == 0 ? random.bits(99, batch) : ~std::uint64_t{0})) std::this_thread::yield();
    if (batch % 100 == 0) {  // a number that is not next, in a slot that is not next
      EXPECT(drain->flush(ring.sent, kHang));
      ring.words()[8 + ring.sent % 4 * 52].store(random.bits(7, batch));
    }
  }
  EXPECT(drain->flush(ring.sent, kHang));
  here.priorities->copy_leaves(std::vector<double>(64).data(), 64, false);  // throws Damaged where one is no leaf
  EXPECT(here.priorities->total() >= 0);
}

TEST(a_full_ring_drops_and_no_entry_is_applied_twice) {
  const FormattedPriorities here(4);
  Ring ring(3, 1);
  for (int batch = 0; batch < 5; ++batch) EXPECT_EQ(ring.send({{batch % 4, 1.0}}), batch < 3);  // no thread takes any
  const auto drain = ring.drain(*here.priorities);
  EXPECT(drain->flush(3, kHang));
  std::uint64_t accepted = 3;
  for (int batch = 0; batch < 20000; ++batch) accepted += ring.send({{batch % 4, 1.0}});
  EXPECT(drain->flush(ring.sent, kHang));
  EXPECT_EQ(ring.sent, accepted);
  EXPECT_EQ(drain->counts().batches, accepted);
  EXPECT_EQ(drain->counts().entries, accepted);
  EXPECT_EQ(ring.words()[1].load(), accepted);
}

TEST(an_entry_for_a_row_that_was_written_since_is_dropped) {
  const Heap heap(geometry(1, 4), {16});
  Store store = heap.open();
  Rows rows(heap.fields, 4);
  for (std::uint64_t j = 0; j < 4; ++j) rows.describe(j, 1 + j);
  const FormattedPriorities here(4, &store.control());
  store.attach(*here.priorities);
  store.append(0, 4, rows.in, nullptr);
  std::vector<Entry> entries;
  for (std::int64_t row = 0; row < 4; ++row) {
    entries.push_back({row, 9.0, static_cast<std::int64_t>(number_of(store.control().word(static_cast<std::uint64_t>(row)).load()))});
  }
  store.append(0, 2, rows.in, nullptr);
  const double usual = here.leaves()[0];
  Ring ring(2, 4);
  const auto drain = ring.drain(*here.priorities);
  EXPECT(ring.send(entries));
  EXPECT(drain->flush(1, kHang));
  const auto leaves = here.leaves();
  EXPECT(leaves[0] == usual && leaves[1] == usual && leaves[2] > usual && leaves[3] > usual);
  EXPECT_EQ(here.priorities->dropped(), 2u);
  EXPECT_EQ(drain->counts().entries, 4u);
}

TEST(stop_applies_what_has_arrived) {
  for (int round = 0; round < 50; ++round) {
    const FormattedPriorities here(4);
    Ring ring(8, 1);
    const auto drain = ring.drain(*here.priorities);
    for (int batch = 0; batch < 8; ++batch) EXPECT(ring.send({{batch % 4, 1.0}}));
    drain->stop();
    drain->stop();
    EXPECT_EQ(drain->counts().batches, 8u);
    EXPECT(ring.send({{0, 1.0}}));
    EXPECT(!drain->flush(9, kHang));  // at once: no thread will take it
  }
}

TEST(a_thread_that_is_stopped_while_a_device_sends_leaves_the_rest_to_the_next_one) {
  const FormattedPriorities here(4);
  Ring ring(5, 2);
  std::atomic<bool> over{false};
  std::thread device([&] {
    for (std::int64_t batch = 0; !over; ++batch) ring.send({{batch % 4, 1.0}, {3 - batch % 4, 2.0}});
  });
  std::uint64_t entries = 0, batches = 0;
  for (int round = 0; round < 40; ++round) {
    const auto drain = ring.drain(*here.priorities);
    drain->flush(batches + 1, kHang);
    std::thread other([&] { drain->stop(); });
    drain->stop();
    other.join();
    EXPECT(drain->counts().batches > batches);
    batches = drain->counts().batches;
    entries += drain->counts().entries;
  }
  over = true;
  device.join();
  const auto drain = ring.drain(*here.priorities);
  EXPECT(drain->flush(ring.sent, kHang));
  EXPECT_EQ(entries + drain->counts().entries, 2 * ring.sent);
}

TEST(others_may_use_the_priorities_meanwhile) {
  constexpr std::uint64_t kRows = 64;
  const FormattedPriorities here(kRows);
  Ring rings[2] = {Ring(4, 8), Ring(4, 8)};
  const auto one = rings[0].drain(*here.priorities), other = rings[1].drain(*here.priorities, true);
  std::vector<std::thread> threads;
  for (Ring& ring : rings) {
    threads.emplace_back([&ring] {
      const Random random(3);
      for (std::uint64_t batch = 0; batch < 1500; ++batch) {
        std::vector<Entry> entries;
        for (std::uint64_t i = 0; i < 8; ++i) entries.push_back({static_cast<std::int64_t>(random.below(kRows, batch * 8 + i)), 1.0 + static_cast<double>(i)});
        while (!ring.send(entries)) std::this_thread::yield();
      }
    });
  }
  threads.emplace_back([&] {
    for (std::int64_t i = 0; i < 3000; ++i) {
      const std::int64_t row = i % static_cast<std::int64_t>(kRows);
      const double priority = 2.5;
      here.priorities->update(&row, &priority, 1, nullptr);
      std::int64_t rows[8];
      double weights[8];
      here.priorities->draw(static_cast<std::uint64_t>(i), 0, 8, rows, nullptr, weights);
    }
  });
  for (auto& thread : threads) thread.join();
  EXPECT(one->flush(1500, kHang) && other->flush(1500, kHang));
  EXPECT_EQ(one->counts().entries + other->counts().entries, 2u * 1500 * 8);
  double sum = 0;
  for (const double leaf : here.leaves()) sum += leaf;
  EXPECT(std::abs(sum - here.priorities->total()) < 1e-9 * sum);
}

TEST(what_ends_the_thread_is_thrown_by_the_next_call_and_its_batch_stays) {
  const FormattedPriorities here(4);
  Ring ring(2, 1);
  const auto limit = wait_limit.load();
  wait_limit = 20ms;
  EXPECT(!here.header().mutex.lock());
  {
    const auto drain = ring.drain(*here.priorities);
    drain->check_thread();
    EXPECT(ring.send({{1, 1.0}}));
    EXPECT_THROWS(Stalled, drain->flush(1, kHang));
    EXPECT_THROWS(Stalled, drain->check_thread());
    drain->stop();
    EXPECT_EQ(drain->counts().batches, 0u);
  }
  here.header().mutex.unlock();
  wait_limit = limit;
  EXPECT(ring.drain(*here.priorities)->flush(1, kHang));
  EXPECT(here.leaves()[1] > 0);
  const double alpha = here.header().alpha;
  here.header().alpha = -1;
  const auto drain = ring.drain(*here.priorities);
  EXPECT(ring.send({{2, 1.0}}));
  EXPECT_THROWS(Damaged, drain->flush(2, kHang));
  here.header().alpha = alpha;
}

TEST(a_wait_ends) {
  const FormattedPriorities here(4);
  Ring ring(2, 1);
  const auto drain = ring.drain(*here.priorities);
  EXPECT(drain->flush(0, 0ms));
  EXPECT(!drain->flush(1, 5ms));
}

TEST(without_news_the_thread_sleeps) {
  const FormattedPriorities here(4);
  Ring ring(2, 1);
  const auto drain = ring.drain(*here.priorities);
  const std::clock_t before = std::clock();
  std::this_thread::sleep_for(400ms);
  EXPECT(std::clock() - before < CLOCKS_PER_SEC / 5);  // of processor time, which other processes do not use up
}

TEST(memory_of_another_size_is_refused) {
  const FormattedPriorities here(4);
  const ZeroedMemory memory(8 * (8 + 2 * (4 + 3 * 5)));
  const auto drain = [&](std::size_t bytes, std::uint64_t slots, std::uint64_t entries) {
    UpdateDrain(memory.span().first(bytes), slots, entries, false, *here.priorities);
  };
  drain(memory.span().size(), 2, 5);
  for (const std::uint64_t huge : {std::uint64_t{1} << 62, ~std::uint64_t{0}}) {
    EXPECT_THROWS(std::invalid_argument, drain(memory.span().size(), huge, 5));
    EXPECT_THROWS(std::invalid_argument, drain(memory.span().size(), 2, huge));
  }
  EXPECT_THROWS(std::invalid_argument, drain(memory.span().size() - 8, 2, 5));
  EXPECT_THROWS(std::invalid_argument, drain(memory.span().size() - 4, 2, 5));
  EXPECT_THROWS(std::invalid_argument, drain(memory.span().size(), 5, 2));
  EXPECT_THROWS(std::invalid_argument, drain(64, 0, 5));
  EXPECT_THROWS(std::invalid_argument, drain(0, 2, 5));
}

}  // namespace
