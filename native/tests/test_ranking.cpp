#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "blocks.h"
#include "core/ranking.h"
#include "expect.h"

using engram::Ranking;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// A plain array that is searched from the start.
struct Model {
  explicit Model(std::uint64_t rows) : ranks(rows, kInf) {}
  std::uint64_t worst() const {
    std::uint64_t found = 0;
    for (std::uint64_t row = 1; row < ranks.size(); ++row) {
      if (ranks[row] < ranks[found]) found = row;
    }
    return found;
  }
  // What place() must answer; `ranks` are afterwards those of a plan that was carried out.
  void place(const std::vector<double>& data, const std::vector<std::int64_t>& free, std::vector<std::int64_t>& rows,
             std::vector<std::int64_t>& kept) {
    for (std::size_t i = 0; i < data.size(); ++i) {
      const std::uint64_t row = i < free.size() ? static_cast<std::uint64_t>(free[i]) : worst();
      if (i >= free.size() && data[i] <= ranks[row]) continue;
      ranks[row] = data[i];
      rows.push_back(static_cast<std::int64_t>(row));
      kept.push_back(static_cast<std::int64_t>(i));
    }
  }
  std::vector<double> ranks;
};

void expect_same(Ranking& ranking, const Model& model) {
  EXPECT_EQ(ranking.worst(), model.worst());
  for (std::uint64_t row = 0; row < model.ranks.size(); ++row) EXPECT_EQ(ranking.rank(row), model.ranks[row]);
}

double some_rank(Dice& dice) {
  switch (dice.below(8)) {
    case 0:
      return kInf;
    case 1:
      return -kInf;
    case 2:
      return -0.0;
    default:
      return static_cast<double>(dice.below(6)) - 2;
  }
}

constexpr std::uint64_t kSizes[] = {1, 2, 7, 8, 9, 63, 64, 65, 100, 513, 1000};

}  // namespace

TEST(at_first_nothing_is_better_than_any_row) {
  for (const std::uint64_t size : kSizes) {
    Ranking ranking(size);
    expect_same(ranking, Model(size));
    const double best = kInf;
    std::vector<std::int64_t> rows, kept;
    ranking.place(&best, 1, nullptr, 0, rows, kept);
    EXPECT(rows.empty() && kept.empty());
  }
}

TEST(it_agrees_with_an_array_that_is_searched) {
  Dice dice(1);
  for (const std::uint64_t size : kSizes) {
    Ranking ranking(size);
    Model model(size);
    for (int step = 0; step < 120; ++step) {
      std::vector<std::int64_t> where(dice.below(dice.below(4) == 0 ? 2 * size + 1 : 5));
      std::vector<double> ranks(where.size() + dice.below(20));
      for (auto& row : where) row = static_cast<std::int64_t>(dice.below(size));
      for (double& rank : ranks) rank = some_rank(dice);
      if (dice.below(2) == 0) {
        ranking.set(where.data(), ranks.data(), where.size());
        for (std::size_t i = 0; i < where.size(); ++i) model.ranks[static_cast<std::size_t>(where[i])] = ranks[i];
      } else {
        Model after = model;
        std::vector<std::int64_t> rows, kept, expected_rows, expected_kept;
        after.place(ranks, where, expected_rows, expected_kept);
        ranking.place(ranks.data(), ranks.size(), where.data(), where.size(), rows, kept);
        EXPECT(rows == expected_rows && kept == expected_kept);
        if (dice.below(2) == 0) {
          ranking.keep();
          model = after;
        } else {
          ranking.set(nullptr, nullptr, 0);  // forgets it
        }
      }
      expect_same(ranking, model);
    }
  }
}

TEST(a_plan_is_forgotten_by_the_next_one) {
  Ranking ranking(3);
  const std::int64_t all[] = {0, 1, 2};
  const double start[] = {5, 1, 3}, better[] = {4, 9};
  ranking.set(all, start, 3);
  for (int i = 0; i < 3; ++i) {
    std::vector<std::int64_t> rows, kept;
    ranking.place(better, 2, nullptr, 0, rows, kept);
    EXPECT((rows == std::vector<std::int64_t>{1, 2} && kept == std::vector<std::int64_t>{0, 1}));
  }
  ranking.keep();
  EXPECT_EQ(ranking.worst(), 1u);
  EXPECT_EQ(ranking.rank(2), 9.0);
}

TEST(batch_after_batch_the_best_stay) {
  Dice dice(2);
  for (const std::uint64_t size : {9, 100, 5000}) {  // full levels and padded ones
    Ranking ranking(size);
    Model model(size);
    std::vector<std::int64_t> all(size);
    for (std::uint64_t row = 0; row < size; ++row) {
      all[row] = static_cast<std::int64_t>(row);
      model.ranks[row] = static_cast<double>(dice.below(1000));
    }
    ranking.set(all.data(), model.ranks.data(), size);
    for (int batch = 0; batch < 30; ++batch) {
      std::vector<double> ranks(1 + dice.below(40));
      for (double& rank : ranks) rank = batch > 25 ? kInf : static_cast<double>(dice.below(2000));
      std::vector<std::int64_t> rows, kept, expected_rows, expected_kept;
      model.place(ranks, {}, expected_rows, expected_kept);
      ranking.place(ranks.data(), ranks.size(), nullptr, 0, rows, kept);
      ranking.keep();
      EXPECT(rows == expected_rows && kept == expected_kept);
    }
    expect_same(ranking, model);
  }
}

TEST(the_worst_rows_come_in_order_until_all_have_been_replaced_twice) {
  Dice dice(3);
  constexpr std::uint64_t kRows = 3000;
  for (const std::uint64_t values : {std::uint64_t{1} << 40, std::uint64_t{3}}) {  // hardly an equal pair, and hardly another
    Ranking ranking(kRows);
    std::vector<std::int64_t> order(kRows), rows, kept;
    std::vector<double> ranks(kRows);
    for (std::uint64_t row = 0; row < kRows; ++row) {
      order[row] = static_cast<std::int64_t>(row);
      ranks[row] = -static_cast<double>(dice.below(values));
    }
    ranking.set(order.data(), ranks.data(), kRows);
    const auto worse = [&](std::int64_t a, std::int64_t b) {
      return ranks[static_cast<std::size_t>(a)] < ranks[static_cast<std::size_t>(b)];
    };
    std::stable_sort(order.begin(), order.end(), worse);
    std::vector<double> rising(kRows);
    for (int round = 1; round <= 2; ++round) {  // in the order in which they rank, which is that of the first round for both
      for (std::uint64_t i = 0; i < kRows; ++i) rising[i] = round + static_cast<double>(i) / kRows;
      rows.clear(), kept.clear();
      ranking.place(rising.data(), kRows, nullptr, 0, rows, kept);
      ranking.keep();
      EXPECT(rows == order);
    }
  }
}

// Rows that have the smallest rank of all are an eighth and more of many rows: the bound lies among them, and no rank below it.
TEST(rows_that_nothing_is_worse_than_come_by_their_numbers) {
  Dice dice(5);
  constexpr std::uint64_t kRows = 700;
  Ranking ranking(kRows);
  Model model(kRows);
  std::vector<std::int64_t> all(kRows);
  for (std::uint64_t row = 0; row < kRows; ++row) all[row] = static_cast<std::int64_t>(row);
  std::fill(model.ranks.begin(), model.ranks.end(), -kInf);
  ranking.set(all.data(), model.ranks.data(), kRows);
  for (int step = 0; step < 100; ++step) {
    std::vector<double> ranks(1 + dice.below(30));
    for (double& rank : ranks) rank = static_cast<double>(dice.below(9));
    std::vector<std::int64_t> rows, kept, expected_rows, expected_kept;
    model.place(ranks, {}, expected_rows, expected_kept);
    ranking.place(ranks.data(), ranks.size(), nullptr, 0, rows, kept);
    ranking.keep();
    EXPECT(rows == expected_rows && kept == expected_kept);
    const auto again = static_cast<std::int64_t>(dice.below(kRows));
    ranking.set(&again, &(model.ranks[static_cast<std::size_t>(again)] = -kInf), 1);
  }
  expect_same(ranking, model);
}

TEST(plans_forgotten_and_ranks_set_time_and_again) {
  Ranking ranking(1000);
  Model model(1000);
  for (std::int64_t row = 0; row < 1000; ++row) {
    model.ranks[static_cast<std::size_t>(row)] = static_cast<double>(row % 7);
    ranking.set(&row, &model.ranks[static_cast<std::size_t>(row)], 1);
  }
  const double better[] = {3, 8, 2, 1, 9};
  for (int i = 0; i < 5000; ++i) {
    std::vector<std::int64_t> rows, kept, expected_rows, expected_kept;
    Model(model).place({better, better + 5}, {}, expected_rows, expected_kept);
    ranking.place(better, 5, nullptr, 0, rows, kept);
    EXPECT(rows == expected_rows && kept == expected_kept);
    const std::int64_t row = i % 3;
    model.ranks[static_cast<std::size_t>(row)] = -1 - i % 5;
    ranking.set(&row, &model.ranks[static_cast<std::size_t>(row)], 1);
    EXPECT_EQ(ranking.worst(), model.worst());
  }
}

TEST(what_it_refuses_changes_nothing) {
  Ranking ranking(9);
  Model model(9);
  std::vector<std::int64_t> rows, kept;
  const std::int64_t fine[] = {0, 8}, outside[] = {0, 9}, negative[] = {0, -1};
  const double ranks[] = {1, 2}, no_number[] = {3, std::nan("")};
  ranking.set(fine, ranks, 2);
  model.ranks[0] = 1, model.ranks[8] = 2;
  for (const auto* where : {outside, negative}) {
    EXPECT_THROWS(std::out_of_range, ranking.set(where, ranks, 2));
    EXPECT_THROWS(std::out_of_range, ranking.place(ranks, 2, where, 2, rows, kept));
  }
  EXPECT_THROWS(std::invalid_argument, ranking.set(fine, no_number, 2));
  EXPECT_THROWS(std::invalid_argument, ranking.place(no_number, 2, nullptr, 0, rows, kept));
  EXPECT_THROWS(std::invalid_argument, ranking.place(ranks, 1, fine, 2, rows, kept));
  EXPECT_THROWS(std::invalid_argument, Ranking(0));
  EXPECT(rows.empty() && kept.empty());
  expect_same(ranking, model);
}
