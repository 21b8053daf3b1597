// Rows by key against a model, in threads, and in damaged memory.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "blocks.h"
#include "keyed.h"

using namespace engram;

namespace {

std::vector<std::uint64_t> some_keys(Dice& dice, std::uint64_t n, std::uint64_t kinds) {
  std::vector<std::uint64_t> keys(n);
  for (auto& key : keys) key = dice.below(kinds) * 0x9E3779B97F4A7C15ull;
  return keys;
}

std::vector<std::uint64_t> all_keys(std::uint64_t kinds) {
  std::vector<std::uint64_t> keys;
  for (std::uint64_t i = 0; i < kinds; ++i) keys.push_back(i * 0x9E3779B97F4A7C15ull);
  return keys;
}

std::vector<std::int64_t> some_of(Dice& dice, const std::vector<std::int64_t>& rows) {
  std::vector<std::int64_t> some;
  for (const std::int64_t row : rows) {
    if (dice.below(3) == 0) some.push_back(row);
  }
  return some;
}

}  // namespace

TEST(keys_are_what_the_rows_say_after_any_writes) {
  Dice dice(3);
  for (int round = 0; round < 150; ++round) {
    const std::uint64_t rows = 1 + dice.below(80), kinds = 1 + dice.below(2 * rows);
    const Keyed shared(rows);
    Keying one(shared), other(shared, 1);
    for (int i = 0; i < 40; ++i) {
      Keying& who = dice.below(2) == 0 ? one : other;
      const std::vector<std::int64_t> named = some_of(dice, who.live());
      switch (dice.below(10)) {
        case 0:
          if (!named.empty()) who.edit(named, some_keys(dice, named.size(), kinds));
          break;
        case 1:  // an edit of the other field leaves keys and writes as they are
          if (!named.empty()) who.edit(named, some_keys(dice, named.size(), kinds), 0);
          break;
        case 2:
          if (dice.below(4) == 0) who.store.empty(false);
          break;
        case 3:
          who.index.scan(0, rows);
          break;
        case 4:
          who.index.put_in_order();
          break;
        case 5: {
          std::vector<std::int64_t> placed(1 + dice.below(rows));
          for (auto& row : placed) row = static_cast<std::int64_t>(dice.below(rows));
          who.place(placed, some_keys(dice, placed.size(), kinds));
          break;
        }
        case 6:
          who.remove(named);
          break;
        default:
          who.append(some_keys(dice, 1 + dice.below(rows), kinds));
      }
      EXPECT((dice.below(2) == 0 ? one : other).agrees(all_keys(kinds)));
    }
  }
}

TEST(an_edit_of_another_field_does_not_look_at_the_key) {
  const Keyed shared(4);
  Keying one(shared);
  one.append({7, 8, 7});
  const std::uint64_t other = 9;
  std::memcpy(one.store.field(1).row(0), &other, 8);  // behind the index's back: it would see it if it looked
  one.edit({0, 1, 2}, {1, 1, 1}, 0);
  EXPECT(one.noted({9}).empty());
  one.edit({0}, {9}, 1);
  EXPECT((one.noted({9}) == Newest{{9, {1, 0}}}));
}

TEST(the_newest_of_rows_with_one_key_is_that_of_the_largest_write) {
  const Keyed shared(6);
  Keying one(shared);
  one.append({5, 6, 5, 5});  // numbers 1 to 4
  EXPECT((one.noted({5}) == Newest{{5, {4, 3}}}));
  one.edit({0}, {0}, 0);  // an edit is no write
  EXPECT((one.noted({5}) == Newest{{5, {4, 3}}}));
  one.remove({3});
  EXPECT((one.noted({5, 6}) == Newest{{5, {3, 2}}, {6, {2, 1}}}));
  one.remove({0, 2});
  EXPECT((one.noted({5, 6}) == Newest{{6, {2, 1}}}));
}

TEST(many_rows_with_one_key_are_as_fast_as_rows_with_one_each) {
  constexpr std::uint64_t kRows = 50'000;
  const Keyed shared(kRows);
  Keying one(shared);
  for (int lap = 0; lap < 3; ++lap) one.append(std::vector<std::uint64_t>(kRows, 4));  // a list would take hours
  one.index.put_in_order();
  EXPECT((one.noted({4}) == one.stored()));
  std::vector<std::int64_t> rows;
  for (std::uint64_t row = 0; row < kRows; row += 2) rows.push_back(static_cast<std::int64_t>(row));
  one.remove(rows);
  EXPECT((one.noted({4}) == one.stored()));
}

TEST(zeros_at_the_end_of_a_key_do_not_count_in_its_hash) {
  const std::byte text[] = {std::byte{'a'}, std::byte{0}, std::byte{'b'}, std::byte{0}, std::byte{0}, std::byte{0}, std::byte{0},
                            std::byte{0},   std::byte{0}, std::byte{0},   std::byte{0}};
  for (std::uint64_t bytes = 3; bytes <= sizeof text; ++bytes) EXPECT_EQ(hash_of_key(text, bytes), hash_of_key(text, 3));
  EXPECT(hash_of_key(text, 1) != hash_of_key(text, 3));
  EXPECT_EQ(hash_of_key(text, 0), hash_of_key(text + 5, 4));
}

TEST(a_reader_that_is_told_nothing_catches_up) {
  Dice dice(6);
  const Keyed shared(50);
  Keying writer(shared);
  std::vector<std::byte> memory(Keys::bytes(50));
  Keys::copy(shared.index(), memory);
  Control control = shared.blocks().view();
  Keys reader(memory, control, writer.store.field(1));
  for (int i = 0; i < 200; ++i) {
    const std::vector<std::int64_t> named = some_of(dice, writer.live());
    if (!named.empty() && dice.below(5) == 0) writer.edit(named, some_keys(dice, named.size(), 9));
    else if (dice.below(9) == 0) writer.remove(named);
    else if (dice.below(20) == 0) writer.store.empty(false);
    else writer.append(some_keys(dice, 1 + dice.below(70), 9));
    reader.catch_up();
    const std::vector<std::uint64_t> keys = all_keys(9);
    std::vector<std::int64_t> mine(9), theirs(9), writes(9), others(9);
    reader.find(reinterpret_cast<const std::byte*>(keys.data()), 9, mine.data(), writes.data());
    writer.index.find(reinterpret_cast<const std::byte*>(keys.data()), 9, theirs.data(), others.data());
    EXPECT(mine == theirs && writes == others);
  }
}

TEST(a_row_that_is_being_edited_is_found) {
  const Keyed shared(4);
  Keying one(shared);
  one.append({7, 8});
  Word& word = one.control.word(0);
  const std::uint64_t seen = word.load();
  word.store(ticket(99, State::writing));
  one.control.begin_edit(0, seen, 99);
  EXPECT((one.noted({7}) == Newest{{7, {1, 0}}}));
  one.index.put_in_order();
  EXPECT((one.noted({7}) == Newest{{7, {1, 0}}}));
  word.store(ticket(3, State::writing));  // a write
  EXPECT(one.noted({7}).empty());
  one.index.scan(0, 4);
  word.store(ticket(3, State::committed));
  EXPECT(one.noted({7}).empty());  // it tells of it now
  const std::int64_t row = 0;
  one.index.written(&row, 1, 3);
  EXPECT((one.noted({7}) == Newest{{7, {3, 0}}}));
}

TEST(a_reader_of_an_abandoned_store_finds_no_row_whose_editor_died) {
  const Keyed shared(4);
  Keying one(shared);
  one.append({7, 8});
  Word& word = one.control.word(0);
  const std::uint64_t seen = word.load();
  word.store(ticket(99, State::writing));
  one.control.begin_edit(0, seen, 99);
  Control control = shared.blocks().view();
  control.only_read(true);
  std::vector<std::byte> memory(Keys::bytes(4));
  Keys::copy(shared.index(), memory);
  Keys reader(memory, control, one.store.field(1));
  reader.scan(0, 4);
  const std::uint64_t keys[] = {7, 8};
  std::int64_t rows[2], writes[2];
  reader.find(reinterpret_cast<const std::byte*>(keys), 2, rows, writes);
  EXPECT_EQ(rows[0], -1);
  EXPECT_EQ(rows[1], 1);
}

TEST(an_editor_tells_of_a_row_that_was_taken_for_one_that_is_being_written) {
  const Keyed shared(4);
  Keying one(shared);
  one.append({7});
  Word& word = one.control.word(0);
  const std::uint64_t seen = word.load(), other = 0;
  word.store(ticket(2, State::writing));  // an edit, which has not said so yet
  one.index.scan(0, 4);
  EXPECT(one.noted({7}).empty());
  one.control.begin_edit(0, seen, 2);
  word.store(ticket(2, State::committed) | kEdited);
  const std::int64_t row = 0;
  one.index.edited(&row, 1, 2, {&other, 1}, 1);
  EXPECT((one.noted({7}) == Newest{{7, {1, 0}}}));
}

TEST(memory_that_holds_no_keys_is_refused) {
  const Keyed shared(5);
  Keying one(shared);
  EXPECT_THROWS(std::invalid_argument, Keys::bytes(0));
  EXPECT_THROWS(std::invalid_argument, Keys::bytes((std::uint64_t{1} << 32) - 1));
  std::vector<std::byte> mine(Keys::bytes(5)), other(Keys::bytes(6));
  EXPECT_THROWS(std::invalid_argument, Keys::format(mine, 5, 1, 0));
  EXPECT_THROWS(std::invalid_argument, Keys::format(mine, 5, 1, 1025));
  EXPECT_THROWS(std::invalid_argument, Keys(shared.index().first(4096), one.control, one.store.field(1)));
  Keys::format(other, 6, 1, 8);
  EXPECT_THROWS(std::invalid_argument, Keys(other, one.control, one.store.field(1)));
  Keys::format(mine, 5, 1, 16);
  EXPECT_THROWS(std::invalid_argument, Keys(mine, one.control, one.store.field(1)));
  EXPECT(Keys::bytes(1'000'000) <= 4096 + 28'000'000);
}

TEST(damaged_keys_are_said_to_be_damaged_wherever_they_are_used) {
  constexpr std::uint64_t kRows = 1000, kNodes = 4096, kBuckets = kNodes + kRows * 24;
  const auto filled = [](Keying& one) {
    std::vector<std::uint64_t> keys(100);
    for (std::uint64_t i = 0; i < 100; ++i) keys[i] = i % 50;
    one.append(keys);
  };
  const auto damage = [](const Keyed& shared, std::uint64_t begin, std::uint64_t end) {
    std::fill(shared.index().begin() + static_cast<std::ptrdiff_t>(begin), shared.index().begin() + static_cast<std::ptrdiff_t>(end), std::byte{0xee});
  };
  for (const bool nodes : {false, true}) {
    const Keyed shared(kRows);
    Keying one(shared);
    filled(one);
    if (nodes) {
      damage(shared, kNodes, kBuckets);
      EXPECT_THROWS(Damaged, one.remove({0, 1, 2}));
      one.index.put_in_order();  // all of it follows from the rows
      EXPECT(one.agrees({}));
    } else {
      damage(shared, kBuckets, Keys::bytes(kRows));
      EXPECT_THROWS(Damaged, one.noted({1}));
      EXPECT_THROWS(Damaged, one.append({1, 2, 3}));
      EXPECT(one.agrees({}));  // a change that ended half done is made again from the rows
    }
  }
  {
    const Keyed shared(kRows);
    Keying one(shared);
    filled(one);
    for (std::uint64_t row = 0; row < kRows; ++row) {  // each is its own neighbour
      const std::uint32_t id = static_cast<std::uint32_t>(row) + 1;
      for (const std::uint64_t at : {16, 20}) std::memcpy(shared.index().data() + kNodes + row * 24 + at, &id, sizeof id);
    }
    std::vector<std::uint64_t> keys(100);
    for (std::uint64_t i = 0; i < 100; ++i) keys[i] = i;
    EXPECT_THROWS(Damaged, one.noted(keys));
    EXPECT_THROWS(Damaged, one.append(keys));
  }
}

TEST(threads_that_write_edit_and_look_up_at_once) {
  const Keyed shared(256);
  Keying one(shared);
  one.append({1, 2, 3});
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&one, t] {
      Dice dice(10 + t);
      for (int i = 0; i < 300; ++i) {
        if (t == 0) one.edit({static_cast<std::int64_t>(dice.below(3))}, {dice.below(30)});
        else one.append(some_keys(dice, 1 + dice.below(20), 30));
      }
    });
  }
  threads.emplace_back([&] {
    while (!over.load()) {
      for (const auto& [key, row] : one.noted(all_keys(30))) EXPECT(row.second >= 0 && row.first > 0);
    }
  });
  for (int t = 0; t < 3; ++t) threads[t].join();
  over = true;
  threads[3].join();
  EXPECT(one.agrees(all_keys(30)));
}

TEST(what_a_writer_could_not_tell_is_looked_at_by_the_next_one) {
  const Keyed shared(8);
  Keying one(shared), other(shared, 1);
  one.append({1, 2});
  wait_limit = std::chrono::milliseconds(20);
  SharedMutex& mutex = reinterpret_cast<KeysHeader*>(shared.index().data())->mutex;
  std::atomic<int> step{0};
  std::thread holder([&] {
    EXPECT(!mutex.lock());
    step = 1;
    while (step.load() != 2) std::this_thread::yield();
    mutex.unlock();
  });
  while (step.load() != 1) std::this_thread::yield();
  EXPECT_THROWS(Stalled, one.append({3, 4}));
  step = 2;
  holder.join();
  wait_limit = std::chrono::seconds(5);
  EXPECT(other.agrees({1, 2, 3, 4}));
}
