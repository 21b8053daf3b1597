// A store that is paused: writers wait, and none is at work.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "blocks.h"
#include "core/check.h"
#include "core/store.h"
#include "expect.h"

using namespace engram;
using namespace std::chrono_literals;

namespace {

void append(Store& store, const Blocks& blocks, std::uint64_t lane, std::uint64_t first_id, std::uint64_t n) {
  Rows rows(blocks.fields, n);
  for (std::uint64_t i = 0; i < n; ++i) rows.describe(i, first_id + i);
  store.append(lane, n, rows.in, nullptr);
}

}  // namespace

TEST(nothing_changes_while_a_store_is_paused) {
  const Heap heap(geometry(2, 8), {64, 136});
  Store store = heap.open(0);
  append(store, heap, 0, 1, 3);
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  for (std::uint64_t w = 0; w < 3; ++w) {
    writers.emplace_back([&, w] {
      Rows rows(heap.fields, 3);
      const std::int64_t at[] = {1, 12, 1};
      const std::uint64_t which[] = {0, 1};
      for (std::uint64_t id = (w + 1) << 32; !stop; ++id) {
        for (std::uint64_t i = 0; i < 3; ++i) rows.describe(i, id);
        if (w == 0) {
          store.append(id % 2, 3, rows.in, nullptr);
        } else if (w == 1) {
          store.scatter(at, 3, which, rows.in, true);
        } else if (id % 16 == 0) {
          store.empty(false);
        } else {
          std::this_thread::yield();
        }
      }
    });
  }
  std::vector<std::int64_t> first(16), second(16);
  std::vector<Control::LaneState> lanes(2);
  for (int round = 0; round < 200; ++round) {
    store.pause();
    const std::uint64_t clock = store.control().counters().next_ticket.load();
    std::fill(first.begin(), first.end(), 0);
    store.control().read_lanes(lanes.data());
    store.control().read_numbers(clock, lanes.data(), first.data(), first.size());
    std::this_thread::yield();
    std::fill(second.begin(), second.end(), 0);
    store.control().read_numbers(~std::uint64_t{0}, lanes.data(), second.data(), second.size());
    EXPECT_EQ(store.control().counters().next_ticket.load(), clock);
    EXPECT(first == second);
    Control::check_state(store.control().geometry(), clock, lanes.data(), first.data());
    store.resume();
    while (store.control().counters().next_ticket.load() == clock) std::this_thread::yield();  // they go on
  }
  stop = true;
  for (auto& writer : writers) writer.join();
}

TEST(words_that_were_read_can_be_put_into_another_store) {
  const Heap heap(geometry(2, 4), {64}), other(geometry(2, 4), {64});
  Store store = heap.open(0), copy = other.open(0);
  append(store, heap, 0, 1, 6);
  append(store, heap, 1, 10, 1);
  append(copy, other, 1, 90, 3);
  const std::uint64_t clock = store.control().counters().next_ticket.load();
  std::vector<std::int64_t> numbers(8), theirs(8);
  std::vector<Control::LaneState> lanes(2);
  store.control().read_lanes(lanes.data());
  store.control().read_numbers(clock, lanes.data(), numbers.data(), numbers.size());
  EXPECT_THROWS(std::invalid_argument, copy.begin_replacing(false));  // it is not paused
  copy.pause();
  EXPECT_THROWS(std::invalid_argument, copy.replaced(clock, lanes.data(), numbers.data()));
  copy.begin_replacing(false);
  EXPECT_EQ(copy.control().size(), 0u);
  EXPECT_THROWS(std::invalid_argument, copy.replaced(3, lanes.data(), numbers.data()));
  const std::uint64_t first = copy.control().counters().next_ticket.load();
  copy.replaced(clock, lanes.data(), numbers.data());
  copy.resume();
  for (const std::uint64_t lane : {0, 1}) {
    EXPECT_EQ(copy.control().filled(lane), store.control().filled(lane));
    EXPECT_EQ(copy.control().cursor_row(lane), store.control().cursor_row(lane));
  }
  copy.control().read_numbers(~std::uint64_t{0}, lanes.data(), theirs.data(), theirs.size());
  for (std::size_t row = 0; row < 8; ++row) {
    EXPECT_EQ(theirs[row], numbers[row] == 0 ? 0 : numbers[row] + static_cast<std::int64_t>(first) - 1);
  }
}

TEST(who_has_paused_a_store_removes_what_it_has_looked_at) {
  const Impatient soon(20ms);
  const Heap heap(geometry(1, 4), {64});
  Store store = heap.open(0), other = heap.open(1);
  append(store, heap, 0, 1, 4);
  const std::int64_t rows[] = {1, 2};
  EXPECT_THROWS(std::invalid_argument, store.remove(rows, 2, nullptr, true));  // it is not paused
  store.pause();
  EXPECT_THROWS(Stalled, store.remove(rows, 2, nullptr));
  EXPECT_THROWS(Stalled, other.remove(rows, 2, nullptr));
  EXPECT_THROWS(std::invalid_argument, other.remove(rows, 2, nullptr, true));  // it is another process that has paused it
  EXPECT_EQ(store.remove(rows, 2, nullptr, true), 2u);
  EXPECT_EQ(store.remove(rows, 2, nullptr, true), 0u);
  EXPECT(store.paused());
  store.resume();
  EXPECT_EQ(store.control().size(), 2u);
  append(other, heap, 0, 5, 3);
  EXPECT_EQ(store.control().size(), 4u);
}

TEST(who_waits_in_vain_is_told_so_and_may_try_again) {
  const Impatient soon(20ms);
  const Heap heap(geometry(1, 4), {64});
  Store store = heap.open(0), other = heap.open(1);
  store.pause();
  EXPECT_THROWS(Stalled, append(other, heap, 0, 1, 1));
  EXPECT_THROWS(Stalled, other.empty(false));
  EXPECT_THROWS(Stalled, other.pause());
  EXPECT_EQ(store.control().size(), 0u);
  store.resume();
  append(other, heap, 0, 1, 1);
  EXPECT_EQ(store.control().size(), 1u);
  {
    const ClaimGuard writing(store.control().participant(2));
    EXPECT_THROWS(Stalled, store.pause());
  }
  EXPECT(!store.paused());
  store.pause();
  store.resume();
}
