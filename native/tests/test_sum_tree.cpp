#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "blocks.h"
#include "core/check.h"
#include "core/sum_tree.h"
#include "expect.h"

using engram::SumTree;

namespace {

// A tree in memory of its own, exactly as large as it must be, and the same leaves as a plain array.
struct Model {
  explicit Model(std::uint64_t leaves, bool with_max = true)
      : bytes(SumTree::bytes(leaves, with_max)),
        memory(static_cast<std::byte*>(::operator new[](bytes, std::align_val_t(64)))),
        tree((std::memset(memory.get(), 0, bytes), std::span<std::byte>(memory.get(), bytes)), leaves, with_max),
        leaf(leaves) {}
  void set(const std::vector<std::int64_t>& rows, const std::vector<double>& values) {
    tree.set(rows.data(), values.data(), rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) leaf[static_cast<std::size_t>(rows[i])] = values[i];
  }
  void check() const {
    for (std::size_t i = 0; i < leaf.size(); ++i) EXPECT_EQ(tree.leaf(i), leaf[i]);
    double least = 0, most = 0;
    long double sum = 0;
    for (const double x : leaf) {
      sum += x;
      most = std::max(most, x);
      if (x > 0 && (least == 0 || x < least)) least = x;
    }
    EXPECT(std::abs(static_cast<double>(sum) - tree.sum()) <= 1e-12 * static_cast<double>(sum));
    EXPECT_EQ(tree.min_positive(), least);
    EXPECT_EQ(tree.max(), most);
    EXPECT(tree.consistent());
  }

  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  std::uint64_t bytes;
  std::unique_ptr<std::byte[], Free> memory;
  SumTree tree;
  std::vector<double> leaf;
};

constexpr std::uint64_t kSizes[] = {1, 2, 3, 7, 8, 9, 10, 33, 64, 65, 100, 513, 1024, 4097};

double some_value(Dice& dice) {
  switch (dice.below(6)) {
    case 0:
      return 0;
    case 1:
      return 1e-15 * static_cast<double>(1 + dice.below(9));
    case 2:
      return 1e12;
    default:
      return static_cast<double>(dice.below(1000)) / 7;
  }
}

TEST(leaves_sum_minimum_and_maximum_are_those_of_an_array) {
  Dice dice(1);
  for (const std::uint64_t size : kSizes) {
    Model model(size);
    model.check();
    for (int round = 0; round < 40; ++round) {
      std::vector<std::int64_t> rows(dice.below(200));
      std::vector<double> values(rows.size());
      const bool block = dice.below(2) == 0;  // neighbours, as a write has, or scattered, with duplicates
      const std::uint64_t from = dice.below(size);
      for (std::size_t i = 0; i < rows.size(); ++i) {
        rows[i] = static_cast<std::int64_t>(block ? (from + i) % size : dice.below(size));
        values[i] = some_value(dice);
      }
      model.set(rows, values);
      model.check();
    }
    model.tree.clear();
    model.leaf.assign(size, 0);
    model.check();
  }
}

TEST(a_million_leaves) {
  Dice dice(2);
  Model model(1000000);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::int64_t> rows(5000);
    std::vector<double> values(rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i] = static_cast<std::int64_t>(dice.below(1000000));
      values[i] = some_value(dice);
    }
    model.set(rows, values);
  }
  model.check();
}

TEST(of_a_row_named_twice_the_last_value_stays) {
  Model model(100);
  model.set({5, 7, 5, 99, 5}, {1, 2, 3, 4, 0.5});
  EXPECT_EQ(model.tree.leaf(5), 0.5);
  EXPECT_EQ(model.tree.sum(), 6.5);
}

TEST(a_bad_row_changes_nothing) {
  Model model(10);
  model.set({3}, {2});
  const std::int64_t rows[] = {1, 10};
  const double values[] = {7, 7};
  EXPECT_THROWS(std::out_of_range, model.tree.set(rows, values, 2));
  const std::int64_t negative[] = {-1};
  EXPECT_THROWS(std::out_of_range, model.tree.set(negative, values, 1));
  model.check();
}

TEST(sums_do_not_drift) {
  // Ten thousand times 1e-15 beside 0.3: what a tree of deltas gets wrong.
  Model model(64);
  for (int i = 0; i < 10000; ++i) {
    model.set({0}, {0.3});
    model.set({0, 9}, {1e-15, 1e-15});
    model.set({0}, {1e12});
    model.set({0}, {0});
  }
  EXPECT_EQ(model.tree.sum(), 1e-15);
  model.set({9}, {0});
  EXPECT_EQ(model.tree.sum(), 0.0);
  Dice dice(3);
  Model large(10000);
  std::vector<std::int64_t> rows(1000);
  std::vector<double> values(1000);
  for (int round = 0; round < 1000; ++round) {  // a million updates
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i] = static_cast<std::int64_t>(dice.below(10000));
      values[i] = some_value(dice);
    }
    large.set(rows, values);
  }
  large.check();
}

TEST(every_number_falls_on_the_leaf_that_an_array_says) {
  Dice dice(4);
  for (const std::uint64_t size : kSizes) {
    Model model(size);
    std::vector<std::int64_t> rows(size);
    std::vector<double> values(size);
    std::iota(rows.begin(), rows.end(), 0);
    for (double& value : values) value = static_cast<double>(dice.below(5));  // small integers: every sum is exact
    values[dice.below(size)] = 3;
    model.set(rows, values);
    const double total = std::accumulate(values.begin(), values.end(), 0.0);
    for (double at = 0; at < total; at += 0.5) {
      const double u = at / total;
      if (u * total != at) continue;  // rounding: another number
      std::int64_t found = -1;
      model.tree.find(&u, 1, &found);
      double upto = 0;
      std::int64_t expected = 0;
      while (upto + values[static_cast<std::size_t>(expected)] <= at) upto += values[static_cast<std::size_t>(expected++)];
      EXPECT_EQ(found, expected);
    }
  }
}

TEST(a_leaf_of_zero_is_never_found) {
  Dice dice(5);
  for (const std::uint64_t size : kSizes) {
    for (int round = 0; round < 30; ++round) {
      Model model(size);
      std::vector<std::int64_t> rows{static_cast<std::int64_t>(dice.below(size))};
      std::vector<double> values{1e-300};
      for (std::uint64_t i = 0; i < size / 3; ++i) {
        rows.push_back(static_cast<std::int64_t>(dice.below(size)));
        values.push_back(dice.below(2) == 0 ? 0.1 : 1e15);
      }
      model.set(rows, values);
      std::vector<double> u = {0, std::nextafter(1.0, 0.0), 0.5, 1e-320};
      while (u.size() < 200) u.push_back(static_cast<double>(dice.bits() >> 11) * 0x1p-53);
      std::vector<std::int64_t> found(u.size());
      model.tree.find(u.data(), u.size(), found.data());
      for (const std::int64_t row : found) {
        EXPECT(static_cast<std::uint64_t>(row) < size);
        EXPECT(model.leaf[static_cast<std::size_t>(row)] > 0);
      }
    }
  }
  Model zero(10);
  const double u = 0.5;
  std::int64_t row;
  EXPECT_THROWS(std::invalid_argument, zero.tree.find(&u, 1, &row));
}

TEST(leaves_are_found_in_proportion) {
  Dice dice(6);
  Model model(333);
  for (std::int64_t i = 0; i < 333; ++i) model.set({i}, {i % 7 == 0 ? 0.0 : static_cast<double>(1 + i % 13)});
  constexpr std::uint64_t draws = 1000000;
  std::vector<double> u(draws);
  for (double& x : u) x = static_cast<double>(dice.bits() >> 11) * 0x1p-53;
  std::vector<std::int64_t> found(draws);
  model.tree.find(u.data(), draws, found.data());
  std::vector<double> counts(333);
  for (const std::int64_t row : found) ++counts[static_cast<std::size_t>(row)];
  double chi = 0, kinds = 0;
  for (std::size_t i = 0; i < 333; ++i) {
    const double expected = draws * model.leaf[i] / model.tree.sum();
    if (expected == 0) {
      EXPECT_EQ(counts[i], 0.0);
      continue;
    }
    chi += (counts[i] - expected) * (counts[i] - expected) / expected;
    ++kinds;
  }
  const double z = (chi - (kinds - 1)) / std::sqrt(2 * (kinds - 1));  // normal for so many kinds
  EXPECT(std::abs(z) < 5);
}

std::vector<std::int64_t> smallest(const SumTree& tree, std::uint64_t n) {
  std::vector<std::int64_t> rows(n, -1);
  rows.resize(tree.smallest(n, rows.data()));
  return rows;
}

// By a sort of all leaves above zero: of equal ones the one with the lower number comes first.
std::vector<std::int64_t> smallest(const std::vector<double>& leaf, std::uint64_t n) {
  std::vector<std::int64_t> rows;
  for (std::size_t i = 0; i < leaf.size(); ++i) {
    if (leaf[i] > 0) rows.push_back(static_cast<std::int64_t>(i));
  }
  const auto at = [&leaf](std::int64_t row) { return leaf[static_cast<std::size_t>(row)]; };
  std::stable_sort(rows.begin(), rows.end(), [&](std::int64_t a, std::int64_t b) { return at(a) < at(b); });
  if (rows.size() > n) rows.resize(n);
  return rows;
}

TEST(the_smallest_leaves_are_those_of_a_sort) {
  Dice dice(7);
  for (const std::uint64_t size : kSizes) {
    for (const bool with_max : {false, true}) {
      Model model(size, with_max);
      EXPECT(smallest(model.tree, size).empty());  // none is above zero
      for (int round = 0; round < 25; ++round) {
        std::vector<std::int64_t> rows(1 + dice.below(round == 0 ? 2 * size : 60));
        std::vector<double> values(rows.size());
        const bool few = dice.below(2) == 0;  // hardly another value, so that numbers decide
        for (std::size_t i = 0; i < rows.size(); ++i) {
          rows[i] = static_cast<std::int64_t>(dice.below(size));
          values[i] = few ? static_cast<double>(dice.below(3)) : some_value(dice);
          if (values[i] == 0 && dice.below(2) == 0) values[i] = -0.0;  // of a row that was given priority zero
        }
        model.set(rows, values);
        for (const std::uint64_t n : {std::uint64_t{0}, std::uint64_t{1}, dice.below(size + 1), size, size + 9}) {
          EXPECT(smallest(model.tree, n) == smallest(model.leaf, n));
        }
      }
    }
  }
}

TEST(the_smallest_of_a_million_leaves) {
  Dice dice(8);
  Model model(1000000);
  std::vector<std::int64_t> rows(1000000);
  std::vector<double> values(rows.size());
  std::iota(rows.begin(), rows.end(), 0);
  for (double& value : values) value = some_value(dice);
  model.set(rows, values);
  for (const std::uint64_t n : {1, 256, 50000}) EXPECT(smallest(model.tree, n) == smallest(model.leaf, n));
}

// Whatever shared memory says, the search ends and names rows of the tree.
TEST(minima_that_are_not_those_of_the_leaves_are_noticed) {
  constexpr std::uint64_t kLeaves = 100, kFirstMinimum = 104 + 16 + 8 + 8;  // behind the leaves and three levels of sums
  for (const double wrong : {0.0, -0.0, -1.0, 0.25, 1e9, std::nan(""), std::numeric_limits<double>::infinity()}) {
    for (const std::uint64_t at : {kFirstMinimum, kFirstMinimum + 12, kFirstMinimum + 16, kFirstMinimum + 24}) {
      Model model(kLeaves, false);
      for (std::int64_t row = 0; row < 100; ++row) model.set({row}, {static_cast<double>(1 + row % 7)});
      double& minimum = reinterpret_cast<double*>(model.memory.get())[at];
      EXPECT(minimum == 1);
      minimum = wrong;
      EXPECT_THROWS(engram::Damaged, smallest(model.tree, kLeaves));
    }
  }
  Model model(kLeaves, false);
  model.set({3}, {2});
  reinterpret_cast<double*>(model.memory.get())[3] = 0;  // a leaf that its parents know
  EXPECT_THROWS(engram::Damaged, smallest(model.tree, 1));
}

TEST(memory_and_sizes_are_checked) {
  EXPECT_THROWS(std::invalid_argument, SumTree::bytes(0, false));
  EXPECT_THROWS(std::invalid_argument, SumTree::bytes((std::uint64_t{1} << 40) + 1, false));
  EXPECT(SumTree::bytes(100000000, false) < 8 * 100000000ull * 13 / 10);
  alignas(64) std::byte memory[1024] = {};
  EXPECT_THROWS(std::invalid_argument, SumTree(std::span<std::byte>(memory, 1024), 8, false));
  EXPECT_THROWS(std::invalid_argument, SumTree(std::span<std::byte>(memory + 8, SumTree::bytes(8, false)), 8, false));
}

TEST(a_hundred_million_leaves) {
  // Zero pages that nobody touches cost nothing: only what is set and looked at is.
  constexpr std::uint64_t leaves = 100000000;
  const std::uint64_t bytes = SumTree::bytes(leaves, false);
  auto* memory = static_cast<std::byte*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  EXPECT(memory != MAP_FAILED);
  {
    SumTree tree({memory, bytes}, leaves, false);
    const std::int64_t rows[] = {0, 99999999, 50000000};
    const double values[] = {1, 2, 4};
    tree.set(rows, values, 3);
    EXPECT_EQ(tree.sum(), 7.0);
    EXPECT_EQ(tree.min_positive(), 1.0);
    const double u[] = {0.0, 0.2, 0.99};
    std::int64_t found[3];
    tree.find(u, 3, found);
    EXPECT_EQ(found[0], 0);
    EXPECT_EQ(found[1], 50000000);
    EXPECT_EQ(found[2], 99999999);
  }
  munmap(memory, bytes);
}

}  // namespace
