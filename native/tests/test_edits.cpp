// Edits of rows: they leave the number of the write as it is, which handles name, and none of them takes another one's place.
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "blocks.h"
#include "core/priorities.h"
#include "core/store.h"
#include "expect.h"

using namespace engram;

namespace {

using Indices = std::vector<std::int64_t>;

constexpr std::uint64_t kRows = 8, kFields = 3;

/// Rows of three fields of a word each, under the numbers 1 ... 8.
struct Edited {
  Edited() : heap({kRows, 1, kRows}, {8, 8, 8}), store(heap.open()) { append(0); }

  void append(std::uint64_t value) {
    const std::array<std::uint64_t, kRows> words = filled(value);
    const auto* column = reinterpret_cast<const std::byte*>(words.data());
    const std::array<const std::byte*, kFields> columns{column, column, column};
    store.append(0, kRows, columns, nullptr);
  }
  static std::array<std::uint64_t, kRows> filled(std::uint64_t value) {
    std::array<std::uint64_t, kRows> words;
    words.fill(value);
    return words;
  }
  std::uint64_t edit(Store& by, const Indices& rows, std::uint64_t field, std::uint64_t value) {
    const std::array<std::uint64_t, kRows> words = filled(value);
    const std::array<const std::byte*, 1> column{reinterpret_cast<const std::byte*>(words.data())};
    const std::uint64_t which[] = {field};
    return by.scatter(rows.data(), rows.size(), which, column, false);
  }
  std::uint64_t patch(Store& by, const Indices& rows, std::uint64_t field, std::uint64_t value, const Indices& expected) {
    const std::array<std::uint64_t, kRows> words = filled(value);
    const std::array<const std::byte*, 1> column{reinterpret_cast<const std::byte*>(words.data())};
    const std::uint64_t which[] = {field};
    Indices numbers(rows.size());
    return by.patch(rows.data(), rows.size(), which, column, expected.data(), numbers.data()).entries;
  }
  std::uint64_t word(std::uint64_t field, std::uint64_t row) const {
    std::uint64_t value;
    std::memcpy(&value, heap.fields[field].row(row), sizeof value);
    return value;
  }
  std::uint64_t write_of(std::uint64_t row) const {
    return store.control().write_of(row, store.control().word(row).load());
  }

  Heap heap;
  Store store;
};

const Indices kAll{0, 1, 2, 3, 4, 5, 6, 7};

TEST(an_edit_gives_a_row_a_new_ticket_and_leaves_the_number_of_its_write) {
  Edited e;
  EXPECT_EQ(e.edit(e.store, {2, 5, 2}, 1, 7), 9u);
  EXPECT_EQ(number_of(e.store.control().word(2).load()), 11u);
  EXPECT_EQ(number_of(e.store.control().word(5).load()), 10u);
  for (std::uint64_t row = 0; row < kRows; ++row) EXPECT_EQ(e.write_of(row), row + 1);
  // Under which tickets a row was read does not matter, as long as it was not written since.
  const Indices rows{2, 2, 2, 5, 0, 3, 9, -1};
  Indices numbers{3, 9, 11, 10, 1, -1, 4, 2};
  e.store.control().name_writes(rows.data(), rows.size(), numbers.data());
  EXPECT_EQ(numbers, (Indices{3, 3, 3, 6, 1, -1, 4, 2}));
  e.append(20);
  EXPECT_EQ(e.write_of(2), 14u);
  numbers = {3, 9, 11, 10, 1, -1, 4, 2};
  e.edit(e.store, kAll, 0, 21);
  e.store.control().name_writes(rows.data(), rows.size(), numbers.data());
  EXPECT_EQ(numbers, (Indices{3, 9, 11, 10, 1, -1, 4, 2}));  // of rows that were written since: they name nothing
}

TEST(a_handle_is_good_until_its_row_is_written) {
  Edited e;
  const Indices handles{1, 2, 3, 4, 5, 6, 7, 8};
  e.edit(e.store, kAll, 0, 5);
  EXPECT_EQ(e.patch(e.store, kAll, 1, 6, handles), kRows);
  EXPECT_EQ(e.patch(e.store, kAll, 1, 7, handles), kRows);
  Indices tickets(kRows);
  e.store.tickets_of(kAll.data(), kRows, tickets.data());
  EXPECT_EQ(e.patch(e.store, kAll, 1, 8, tickets), 0u);  // tickets of edits are no handles
  e.append(30);
  e.edit(e.store, kAll, 0, 31);
  EXPECT_EQ(e.patch(e.store, kAll, 1, 9, handles), 0u);
  EXPECT_EQ(e.store.remove(kAll.data(), kRows, handles.data()), 0u);
  Indices writes(kRows);
  for (std::uint64_t row = 0; row < kRows; ++row) writes[row] = static_cast<std::int64_t>(e.write_of(row));
  EXPECT_EQ(e.store.remove(kAll.data(), 3, writes.data()), 3u);
  EXPECT_EQ(e.patch(e.store, kAll, 1, 9, writes), kRows - 3);
}

TEST(an_edit_of_a_smaller_number_is_not_lost_behind_one_of_a_larger) {
  Edited e;
  const Control& control = e.store.control();
  control.word(0).store(ticket(1, State::writing));  // so that an edit waits, with its numbers taken
  std::thread earlier([&] {
    Store other(e.heap.open(1));
    e.edit(other, {0, 4}, 1, 50);
  });
  while (control.counters().next_ticket < 11) std::this_thread::yield();
  e.edit(e.store, {4}, 2, 60);
  control.word(0).store(ticket(1, State::committed));
  earlier.join();
  EXPECT_EQ(e.word(1, 4), 50u);
  EXPECT_EQ(e.word(2, 4), 60u);
  EXPECT_EQ(e.write_of(4), 5u);
  EXPECT_EQ(control.counters().lapped_rows.load(), 0u);
}

// Three threads edit a field each of all rows, and one gives rows priorities by the handles that they were written under.
TEST(of_edits_and_updates_at_the_same_time_none_is_lost) {
  constexpr std::uint64_t kRounds = 2000;
  Edited e;
  std::vector<std::byte> memory(Priorities::bytes(kRows, false) + 64);
  std::byte* at = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
  const std::span<std::byte> tree(at, Priorities::bytes(kRows, false));
  Priorities::format(tree, kRows, {1, 1, 0, false});
  Priorities priorities(tree, &e.store.control());
  priorities.scan(0, kRows);
  e.store.attach(priorities);
  const Indices handles{1, 2, 3, 4, 5, 6, 7, 8};
  std::atomic<std::uint64_t> patched{0};
  std::vector<std::thread> threads;
  const auto run = [&](auto&& step) {
    threads.emplace_back([&, step] {
      try {
        for (std::uint64_t round = 1; round <= kRounds; ++round) step(round);
      } catch (const std::exception& error) {
        expect::fail(__FILE__, __LINE__, std::string("a thread ended with: ") + error.what());
      }
    });
  };
  run([&](std::uint64_t round) { e.edit(e.store, kAll, 0, round); });
  run([&](std::uint64_t round) { e.edit(e.store, kAll, 1, round); });
  run([&](std::uint64_t round) { patched += e.patch(e.store, kAll, 2, round, handles); });
  run([&](std::uint64_t round) {
    const std::array<double, kRows> values{double(round), 1, 1, 1, 1, 1, 1, double(round)};
    priorities.update(kAll.data(), values.data(), kRows, handles.data());
  });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(patched.load(), kRounds * kRows);
  EXPECT_EQ(priorities.dropped(), 0u);
  EXPECT_EQ(priorities.leaf(0), double(kRounds));
  for (std::uint64_t row = 0; row < kRows; ++row) {
    EXPECT_EQ(e.write_of(row), row + 1);
    for (std::uint64_t field = 0; field < kFields; ++field) EXPECT_EQ(e.word(field, row), kRounds);
  }
}

TEST(what_is_put_back_keeps_the_numbers_of_its_writes_and_gets_new_tickets) {
  Edited e;
  e.edit(e.store, {1, 6}, 0, 5);
  const Control& control = e.store.control();
  Control::LaneState lanes[1];
  control.read_lanes(lanes);
  Indices numbers(kRows), writes(kRows);
  control.read_numbers(~std::uint64_t{0} >> 2, lanes, numbers.data(), kRows, writes.data());
  EXPECT_EQ(numbers, (Indices{1, 9, 3, 4, 5, 6, 10, 8}));
  EXPECT_EQ(writes, (Indices{1, 2, 3, 4, 5, 6, 7, 8}));
  Heap fresh({kRows, 1, kRows}, {8, 8, 8});
  const Control first = fresh.view();
  EXPECT_EQ(first.put_state(11, lanes, numbers.data(), writes.data()), 0u);
  EXPECT_EQ(first.counters().next_ticket.load(), 11u);
  Edited used;
  used.store.empty(false);
  const Control& second = used.store.control();
  const std::uint64_t later = second.put_state(11, lanes, numbers.data(), writes.data());
  EXPECT_EQ(later, 9u);  // numbers 1 ... 8 and that of the emptying are given out
  for (std::uint64_t row = 0; row < kRows; ++row) {
    const auto number = static_cast<std::uint64_t>(numbers[row]), write = static_cast<std::uint64_t>(writes[row]);
    EXPECT_EQ(number_of(first.word(row).load()), number);
    EXPECT_EQ(is_edited(first.word(row).load()), number != write);
    EXPECT_EQ(first.write_of(row, first.word(row).load()), write);
    EXPECT_EQ(number_of(second.word(row).load()), later + number);
    EXPECT_EQ(second.write_of(row, second.word(row).load()), write);
  }
  Indices far = writes;
  far[3] = 1000;
  used.store.empty(false);
  EXPECT_EQ(second.put_state(11, lanes, numbers.data(), far.data()), 996u);  // row 3 has number 4 of the ten
  EXPECT(second.counters().next_ticket.load() > 1000);
  Indices named{1000};
  const Indices where{3};
  second.name_writes(where.data(), 1, named.data());
  EXPECT_EQ(named[0], 1000);
  far[3] = 0;
  EXPECT_THROWS(std::invalid_argument, Control::check_state(control.geometry(), 11, lanes, numbers.data(), far.data()));
  far[3] = std::int64_t{1} << 60;
  EXPECT_THROWS(std::invalid_argument, Control::check_state(control.geometry(), 11, lanes, numbers.data(), far.data()));
}

}  // namespace
