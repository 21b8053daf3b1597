// Priorities beside a store: what writes, updates and emptyings leave in the leaves, alone and with many threads.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "blocks.h"
#include "core/check.h"
#include "core/priorities.h"
#include "core/wait.h"
#include "expect.h"

using namespace engram;
using namespace std::chrono_literals;

namespace {

struct Index {
  Index(std::uint64_t rows, const Control* tickets, Priorities::Config config = {1.0, 1.0, 0.0, false})
      : bytes(Priorities::bytes(rows, config.within_buffer)),
        memory(static_cast<std::byte*>(::operator new[](bytes, std::align_val_t(64)))) {
    std::memset(memory.get(), 0, bytes);
    Priorities::format(span(), rows, config);
    priorities = std::make_unique<Priorities>(span(), tickets);
  }
  std::span<std::byte> span() const { return {memory.get(), bytes}; }
  SumTree tree() const {
    return SumTree(span().subspan(kPage), priorities->rows(), priorities->within_buffer());
  }
  std::vector<double> leaves() const {
    std::vector<double> out(priorities->rows());
    priorities->copy_leaves(out.data(), out.size(), false);
    return out;
  }
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  std::uint64_t bytes;
  std::unique_ptr<std::byte[], Free> memory;
  std::unique_ptr<Priorities> priorities;
};

using Leaves = std::vector<double>;

TEST(writes_give_the_default_priority_and_nothing_else_does) {
  const Heap heap(geometry(2, 3), {16});
  Store store = heap.open();
  Rows rows(heap.fields, 4);
  for (std::uint64_t i = 0; i < 4; ++i) rows.describe(i, i + 1);
  store.append(1, 1, rows.in, nullptr);
  Index index(6, &store.control());
  store.attach(*index.priorities);
  index.priorities->scan(0, 6);
  EXPECT(index.leaves() == (Leaves{0, 0, 0, 1, 0, 0}));
  const std::int64_t updated[] = {3};
  const double five[] = {5};
  index.priorities->update(updated, five, 1, nullptr);
  store.append(0, 4, rows.in, nullptr);  // one more than the lane is long
  EXPECT(index.leaves() == (Leaves{5, 5, 5, 5, 0, 0}));
  const std::int64_t edited[] = {3};
  const std::uint64_t which[] = {0};
  const double two[] = {2};
  index.priorities->update(edited, two, 1, nullptr);
  store.scatter(edited, 1, which, rows.in, false);
  EXPECT(index.leaves() == (Leaves{5, 5, 5, 2, 0, 0}));  // an edit keeps it
  store.scatter(edited, 1, which, rows.in, true);
  EXPECT(index.leaves() == (Leaves{5, 5, 5, 5, 0, 0}));  // a write does not
  store.empty(false);
  EXPECT(index.leaves() == Leaves(6));
  EXPECT_EQ(index.priorities->default_priority(), 1.0);
  EXPECT(index.tree().consistent());
}

TEST(an_edit_gives_a_priority_to_a_row_that_its_writer_does_not_know_any_more) {
  const Heap heap(geometry(1, 4), {16});
  Store writer = heap.open(), editor = heap.open(1);
  Index index(4, &writer.control(), {1.0, 1.0, 0.5, false});
  editor.attach(*index.priorities);
  Rows rows(heap.fields, 1);
  rows.describe(0, 1);
  const std::int64_t row = 0;
  const std::uint64_t which[] = {0};
  const std::uint64_t t0 = writer.append(0, 1, rows.in, nullptr);  // committed, and about to be told
  editor.scatter(&row, 1, which, rows.in, false);
  index.priorities->written(&row, 1, t0);
  EXPECT(index.leaves() == (Leaves{1.5, 0, 0, 0}));
  const double three = 3;
  index.priorities->update(&row, &three, 1, nullptr);
  editor.scatter(&row, 1, which, rows.in, false);
  EXPECT(index.leaves() == (Leaves{3.5, 0, 0, 0}));
}

TEST(what_could_not_be_told_is_made_good_by_whoever_comes_next) {
  // Somebody holds the mutex longer than anybody waits: writes end with an error, but what they wrote is there.
  const Heap heap(geometry(1, 6), {16});
  Store store = heap.open();
  Index held(6, &store.control()), free(6, &store.control());
  for (Index* index : {&held, &free}) store.attach(*index->priorities);
  Rows rows(heap.fields, 3);
  for (std::uint64_t i = 0; i < 3; ++i) rows.describe(i, i + 1);
  store.append(0, 3, rows.in, nullptr);
  const std::int64_t first[] = {0};
  const double five = 5;
  for (Index* index : {&held, &free}) index->priorities->update(first, &five, 1, nullptr);
  SharedMutex& mutex = reinterpret_cast<PriorityHeader*>(held.memory.get())->mutex;
  const auto in_vain = [&](auto write) {
    const Impatient impatient(5ms);
    EXPECT(!mutex.lock());
    EXPECT_THROWS(Stalled, write());
    mutex.unlock();
  };
  const std::uint64_t which[] = {0};
  const std::int64_t fifth[] = {4};
  in_vain([&] { store.append(0, 1, rows.in, nullptr); });
  EXPECT(free.leaves() == (Leaves{5, 1, 1, 5, 0, 0}));  // another index is told all the same
  EXPECT(held.leaves() == (Leaves{5, 1, 1, 5, 0, 0}));
  in_vain([&] { store.scatter(fifth, 1, which, Columns(rows.in), true); });
  EXPECT(held.leaves() == (Leaves{5, 1, 1, 5, 5, 0}));
  in_vain([&] { store.empty(true); });
  EXPECT(held.leaves() == Leaves(6));
  EXPECT_EQ(held.priorities->highest(), 0.0);
  store.append(0, 2, rows.in, nullptr);
  EXPECT(held.leaves() == free.leaves());
  EXPECT(held.tree().consistent());
}

TEST(updates_of_other_tickets_are_dropped) {
  const Heap heap(geometry(1, 4), {16});
  Store store = heap.open();
  Index index(4, &store.control());
  store.attach(*index.priorities);
  Rows rows(heap.fields, 4);
  for (std::uint64_t i = 0; i < 4; ++i) rows.describe(i, i + 1);
  store.append(0, 3, rows.in, nullptr);  // tickets 1, 2, 3
  const std::int64_t at[] = {0, 1, 2, 3, -1, 2};
  const double values[] = {10, 11, 12, 13, 14, 15};
  const std::int64_t expected[] = {1, 7, 2, 4, 1, 3};
  index.priorities->update(at, values, 6, expected);
  EXPECT(index.leaves() == (Leaves{10, 1, 15, 0}));
  EXPECT_EQ(index.priorities->dropped(), 3u);
  EXPECT_EQ(index.priorities->highest(), 15.0);
}

TEST(bad_numbers_change_nothing) {
  Index index(4, nullptr, {2.0, 1.0, 0.5, false});
  const std::int64_t rows[] = {0, 1};
  index.priorities->written(rows, 2, 0);
  const Leaves before = index.leaves();
  const double infinite = std::numeric_limits<double>::infinity();
  for (const double bad : {-1e-300, -1.0, infinite, -infinite, std::nan(""), 1e160}) {
    const double values[] = {3, bad};
    EXPECT_THROWS(BadPriority, index.priorities->update(rows, values, 2, nullptr));
    if (bad != 1e160) EXPECT_THROWS(BadPriority, index.priorities->restore(values, 2, 1.0));  // a leaf may be that large
  }
  const std::int64_t outside[] = {0, 4};
  const double values[] = {3, 3};
  EXPECT_THROWS(std::out_of_range, index.priorities->update(outside, values, 2, nullptr));
  EXPECT_THROWS(std::out_of_range, index.priorities->reset(outside, 2));
  EXPECT_THROWS(std::invalid_argument, index.priorities->set_alpha(-1));
  EXPECT_THROWS(std::invalid_argument, index.priorities->set_beta(infinite));
  EXPECT(index.leaves() == before);
  EXPECT_EQ(index.priorities->highest(), 0.0);
  EXPECT(before == (Leaves{2.25, 2.25, 0, 0}));
}

TEST(single_and_double_precision_agree) {
  Dice dice(4);
  for (const double alpha : {0.0, 0.3, 1.0, 5.0}) {
    Index wide(64, nullptr, {alpha, 1.0, 1e-6, false}), narrow(64, nullptr, {alpha, 1.0, 1e-6, false});
    std::vector<std::int64_t> rows(64);
    std::iota(rows.begin(), rows.end(), 0);
    std::vector<float> values(64);
    for (float& value : values) value = static_cast<float>(std::ldexp(dice.below(1000), static_cast<int>(dice.below(60)) - 30));
    const std::vector<double> same(values.begin(), values.end());
    wide.priorities->update(rows.data(), same.data(), 64, nullptr);
    narrow.priorities->update(rows.data(), values.data(), 64, nullptr);
    for (std::size_t i = 0; i < 64; ++i) {
      const double a = wide.leaves()[i], b = narrow.leaves()[i];
      EXPECT(std::abs(a - b) <= 1e-6 * a);
      EXPECT((a > 0) == (b > 0));
    }
  }
  // What single precision cannot hold is raised to its power in double.
  Index index(2, nullptr, {2.0, 1.0, 0.0, false});
  const std::int64_t rows[] = {0, 1};
  const float values[] = {1e30f, 1e-30f};
  index.priorities->update(rows, values, 2, nullptr);
  EXPECT(std::abs(index.leaves()[0] / 1e60 - 1) < 1e-6);
  EXPECT(std::abs(index.leaves()[1] / 1e-60 - 1) < 1e-6);
}

TEST(masses_and_weights_of_a_batch_are_of_one_moment) {
  const Heap heap(geometry(1, 4), {16});
  Store store = heap.open();
  Rows rows(heap.fields, 4), batch(heap.fields, 16);
  for (std::uint64_t i = 0; i < 4; ++i) rows.describe(i, i + 1);
  store.append(0, 4, rows.in, nullptr);
  Index index(4, &store.control());
  const std::int64_t all[] = {0, 1, 2, 3};
  const double priorities[] = {1, 4, 16, 640};
  index.priorities->update(all, priorities, 4, nullptr);
  // The row that nearly all draws find is being written; when the reader waits for that, the smallest leaf becomes smaller.
  Word& word = store.control().word(3);
  const std::uint64_t whole = word.load();
  struct Waits : Kept {
    explicit Waits(std::function<void()> act) : act(std::move(act)) { kept = this; }
    void let_go() override {
      kept = nullptr;
      act();
    }
    std::function<void()> act;
  } waits([&] {
    const std::int64_t first[] = {0};
    const double smaller[] = {0.25};
    index.priorities->update(first, smaller, 1, nullptr);
    word.store(whole);
  });
  word.store(ticket(number_of(whole), State::writing));
  std::int64_t drawn[16], numbers[16];
  double weights[16];
  Masses masses;
  index.priorities->sample(store, 7, 16, batch.out, drawn, numbers, weights, &masses);
  EXPECT(kept == nullptr);  // it has waited
  EXPECT_EQ(masses.total, 661.0);
  EXPECT_EQ(masses.least, 1.0);
  EXPECT_EQ(masses.live, 4u);
  for (int i = 0; i < 16; ++i) {
    if (drawn[i] > 0) EXPECT(std::abs(weights[i] * priorities[drawn[i]] - 1) < 1e-12);
  }
  EXPECT_EQ(index.tree().sum(), 660.25);
}

TEST(weights_over_a_batch_are_over_its_smallest_leaf) {
  const Heap heap(geometry(1, 4), {16});
  Store store = heap.open();
  Rows rows(heap.fields, 4), batch(heap.fields, 16);
  for (std::uint64_t i = 0; i < 4; ++i) rows.describe(i, i + 1);
  store.append(0, 4, rows.in, nullptr);
  Index index(4, &store.control());
  const std::int64_t all[] = {0, 1, 2, 3};
  const double priorities[] = {1e-300, 4, 16, 640};
  index.priorities->update(all, priorities, 4, nullptr);
  std::int64_t drawn[16], numbers[16];
  double weights[16], weighed[16], leaves[16];
  Masses masses;
  index.priorities->sample(store, 7, 16, batch.out, drawn, numbers, weights, &masses, Priorities::Over::batch);
  index.priorities->weigh(drawn, 16, weighed, nullptr, Priorities::Over::batch);
  index.priorities->weigh(drawn, 16, leaves, nullptr, Priorities::Over::leaves);
  EXPECT_EQ(masses.least, *std::min_element(leaves, leaves + 16));
  EXPECT_EQ(masses.total, 660.0);
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(leaves[i], priorities[drawn[i]]);
    EXPECT(std::abs(weights[i] * leaves[i] / masses.least - 1) < 1e-12);
    EXPECT_EQ(weights[i], weighed[i]);
  }
  const double none[] = {0, 0, 0, 0};
  index.priorities->update(all, none, 4, nullptr);
  index.priorities->weigh(drawn, 16, weighed, &masses, Priorities::Over::batch);
  EXPECT_EQ(masses.least, 0.0);
  for (const double weight : weighed) EXPECT_EQ(weight, 0.0);
}

TEST(memory_is_checked_before_it_is_used) {
  Index index(10, nullptr);
  EXPECT_THROWS(std::invalid_argument, Priorities(index.span().first(100), nullptr));
  EXPECT_THROWS(std::invalid_argument, Priorities(index.span().first(index.bytes - 8), nullptr));
  const Heap heap(geometry(1, 9), {16});
  const Control control = heap.view();
  EXPECT_THROWS(std::invalid_argument, Priorities(index.span(), &control));
  auto* header = reinterpret_cast<PriorityHeader*>(index.memory.get());
  for (double* word : {&header->alpha, &header->beta, &header->eps, &header->highest}) {
    const double was = std::exchange(*word, std::nan(""));
    EXPECT_THROWS(Damaged, Priorities(index.span(), nullptr));
    *word = was;
  }
  header->within_buffer = 2;
  EXPECT_THROWS(Damaged, Priorities(index.span(), nullptr));
  header->within_buffer = 0;
  double& sum = reinterpret_cast<double*>(index.span().subspan(kPage).data())[16 + 8];  // 10 leaves, 2 nodes, the root
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity(), -1.0}) {
    sum = bad;
    EXPECT_THROWS(Damaged, Priorities(index.span(), nullptr));
  }
  sum = 0;
  header->leaves = std::uint64_t{1} << 62;
  EXPECT_THROWS(std::invalid_argument, Priorities(index.span(), nullptr));
  header->leaves = 10;
  header->magic[0] = 'x';
  EXPECT_THROWS(std::invalid_argument, Priorities(index.span(), nullptr));
}

TEST(a_scan_in_pieces_is_a_scan) {
  for (const bool within_buffer : {false, true}) {
    for (const std::uint64_t piece : {1u, 7u, 8u, 64u, 1000u}) {
      const Heap heap(geometry(3, 37), {16});
      Store store = heap.open();
      Rows rows(heap.fields, 30);
      for (std::uint64_t i = 0; i < 30; ++i) rows.describe(i, i + 1);
      store.append(1, 30, rows.in, nullptr);  // rows 37 to 66
      Index whole(111, &store.control(), {0.5, 1.0, 0.0, within_buffer});
      Index pieces(111, &store.control(), {0.5, 1.0, 0.0, within_buffer});
      const std::int64_t known[] = {37, 40, 41};
      const double values[] = {9, 0, 4};
      for (const Index* index : {&whole, &pieces}) {
        index->priorities->update(known, values, 3, nullptr);
        reinterpret_cast<double*>(index->memory.get() + kPage)[110] = 2;  // as somebody who died half-way leaves it
        EXPECT(!index->tree().consistent());
      }
      store.control().word(41).store(ticket(5, State::voided));
      whole.priorities->scan(0, 111);
      for (std::uint64_t row = 0; row < 111; row += piece) {
        pieces.priorities->scan(row, std::min<std::uint64_t>(row + piece, 111));
      }
      Leaves expected(111);
      for (std::uint64_t row = 37; row < 67; ++row) expected[row] = row == 40 || row == 41 ? 0 : 3;  // given zero, void
      EXPECT(whole.leaves() == expected);
      EXPECT(pieces.leaves() == expected);
      EXPECT(whole.tree().consistent());
      EXPECT(pieces.tree().consistent());
    }
  }
  Index index(4, nullptr);
  EXPECT_THROWS(std::out_of_range, index.priorities->scan(0, 5));
  EXPECT_THROWS(std::out_of_range, index.priorities->scan(3, 2));
}

std::vector<std::int64_t> lowest(const Index& index, std::uint64_t n) {
  std::vector<std::int64_t> rows(n, -1);
  rows.resize(index.priorities->lowest(n, rows.data()));
  return rows;
}

using Numbers = std::vector<std::int64_t>;

TEST(the_lowest_priorities_are_those_of_live_rows) {
  const Heap heap(geometry(1, 6), {16});
  Store store = heap.open();
  Index index(6, &store.control());
  store.attach(*index.priorities);
  EXPECT(lowest(index, 6).empty());
  Rows rows(heap.fields, 5);
  for (std::uint64_t i = 0; i < 5; ++i) rows.describe(i, i + 1);
  store.append(0, 5, rows.in, nullptr);
  EXPECT(lowest(index, 2) == (Numbers{0, 1}));  // all have the same one
  const std::int64_t all[] = {0, 1, 2, 3, 4};
  const double values[] = {3, 0, 5, 0.5, 3};
  index.priorities->update(all, values, 5, nullptr);
  EXPECT(lowest(index, 9) == (Numbers{3, 0, 4, 2}));  // a row that was given zero has no place in the order
  const std::int64_t gone[] = {3};
  EXPECT_EQ(store.remove(gone, 1, nullptr), 1u);
  EXPECT(lowest(index, 2) == (Numbers{0, 4}));
  const std::uint64_t which[] = {0};
  store.scatter(gone, 1, which, Columns(rows.in), true);  // written again, with the highest priority
  EXPECT(lowest(index, 9) == (Numbers{0, 4, 2, 3}));
  store.empty(true);
  EXPECT(lowest(index, 9).empty());
}

TEST(a_holder_who_dies_leaves_minima_to_the_next_one_who_asks) {
  Index index(1000, nullptr);
  Dice dice(31);
  Numbers rows(1000);
  Leaves values(1000);
  std::iota(rows.begin(), rows.end(), 0);
  for (double& value : values) value = static_cast<double>(1 + dice.below(100));
  index.priorities->update(rows.data(), values.data(), 1000, nullptr);
  const Numbers before = lowest(index, 100);
  reinterpret_cast<double*>(index.memory.get() + kPage)[before[0]] = 1000;  // as somebody who died half-way leaves it
  reinterpret_cast<PriorityHeader*>(index.memory.get())->redo = 1;
  EXPECT(!index.tree().consistent());
  index.priorities->put_in_order();
  EXPECT(lowest(index, 99) == Numbers(before.begin() + 1, before.end()));
}

TEST(the_lowest_beside_updates_and_writes) {
  const Heap heap(geometry(1, 512), {16});
  Store store = heap.open();
  Index index(512, &store.control());
  store.attach(*index.priorities);
  Rows rows(heap.fields, 16);
  for (std::uint64_t i = 0; i < 16; ++i) rows.describe(i, i + 1);
  for (int i = 0; i < 32; ++i) store.append(0, 16, rows.in, nullptr);
  constexpr int kRounds = 300;
  std::thread writer([&] {
    for (int i = 0; i < kRounds; ++i) store.append(0, 16, rows.in, nullptr);
  });
  std::thread updater([&] {
    Dice dice(32);
    for (int i = 0; i < kRounds; ++i) {
      Numbers at(16);
      Leaves values(16);
      for (std::size_t k = 0; k < 16; ++k) at[k] = static_cast<std::int64_t>(dice.below(512)), values[k] = static_cast<double>(1 + dice.below(50));
      index.priorities->update(at.data(), values.data(), 16, nullptr);
    }
  });
  for (int i = 0; i < kRounds; ++i) {
    Numbers found = lowest(index, 32);
    EXPECT_EQ(found.size(), 32u);
    std::sort(found.begin(), found.end());
    EXPECT(std::adjacent_find(found.begin(), found.end()) == found.end());
    EXPECT(found.front() >= 0 && found.back() < 512);
  }
  writer.join();
  updater.join();
  Numbers expected(512);
  std::iota(expected.begin(), expected.end(), 0);
  const Leaves leaves = index.leaves();
  std::stable_sort(expected.begin(), expected.end(), [&](std::int64_t a, std::int64_t b) {
    return leaves[static_cast<std::size_t>(a)] < leaves[static_cast<std::size_t>(b)];
  });
  EXPECT(lowest(index, 512) == expected);
}

TEST(draws_beside_writers_scans_updates_and_emptyings) {
  // Writers overwrite a small ring; updates come late; samplers must see whole rows that their tickets name. At rest the
  // leaves are exactly the live rows'.
  const Heap heap(geometry(2, 4), {64, 136});
  Store store = heap.open(), other = heap.open(1);
  Index first(8, &store.control()), second(8, &store.control(), {0.5, 1.0, 1e-3, true});
  for (Store* one : {&store, &other}) {
    one->attach(*first.priorities);
    one->attach(*second.priorities);
  }
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> torn{0}, drawn{0}, updated{0};
  std::vector<std::thread> threads;
  const auto crew = [&](auto step) {
    threads.emplace_back([&, step]() mutable {
      while (!stop) {
        try {
          step();
        } catch (const NothingLive&) {  // just emptied
        } catch (const std::exception& e) {
          expect::fail(__FILE__, __LINE__, std::string("a thread ended with: ") + e.what());
        }
      }
    });
  };
  for (std::uint64_t w = 0; w < 2; ++w) {
    crew([&, w, dice = Dice(w + 1), id = w << 40, rows = std::make_shared<Rows>(heap.fields, 4)]() mutable {
      const std::uint64_t n = dice.in(1, 4);
      for (std::uint64_t i = 0; i < n; ++i) rows->describe(i, ++id);
      (w == 0 ? store : other).append(dice.below(2), n, rows->in, nullptr);
    });
  }
  for (std::uint64_t r = 0; r < 2; ++r) {
    crew([&, r, dice = Dice(r + 10), rows = std::make_shared<Rows>(heap.fields, 16)]() mutable {
      std::int64_t at[16], numbers[16];
      double weights[16], values[16];
      Priorities& priorities = r == 0 ? *first.priorities : *second.priorities;
      priorities.sample(store, dice.bits(), 16, rows->out, at, numbers, weights);
      for (std::uint64_t i = 0; i < 16; ++i) {
        torn += !rows->id(i) || numbers[i] < 1 || !(weights[i] > 0 && weights[i] <= 1);
        values[i] = static_cast<double>(1 + dice.below(9));
      }
      drawn += 16;
      priorities.update(at, values, 16, numbers);
      updated += 16;
    });
  }
  crew([&, dice = Dice(20)]() mutable {
    const std::uint64_t begin = dice.below(8);
    for (const Index* index : {&first, &second}) index->priorities->scan(begin, dice.in(begin, 8));
    std::this_thread::sleep_for(100us);
  });
  crew([&] {
    store.empty(true);
    std::this_thread::sleep_for(2ms);
  });
  const auto start = std::chrono::steady_clock::now();
  std::this_thread::sleep_for(600ms);
  while (drawn < 1000 && std::chrono::steady_clock::now() < start + 60s) std::this_thread::sleep_for(10ms);
  stop = true;
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(torn.load(), 0u);
  EXPECT(drawn >= 1000);
  for (const Index* index : {&first, &second}) {
    EXPECT(index->tree().consistent());
    for (std::uint64_t row = 0; row < 8; ++row) {
      EXPECT_EQ(index->leaves()[row] > 0, is_committed(store.control().word(row).load()));
    }
  }
  std::printf("      %llu rows drawn, %llu late updates dropped\n", static_cast<unsigned long long>(drawn.load()),
              static_cast<unsigned long long>(first.priorities->dropped() + second.priorities->dropped()));
}

}  // namespace
