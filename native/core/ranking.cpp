#include "ranking.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "check.h"

namespace engram {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

void check_ranks(const double* ranks, std::uint64_t n) {
  bool numbers = true;
  for (std::uint64_t i = 0; i < n; ++i) numbers &= !std::isnan(ranks[i]);
  check(numbers, "a rank that is no number");
}

double smaller(double a, double b) { return b < a ? b : a; }

}  // namespace

// In pairs, which the compiler makes vectors of.
double Ranking::Line::smallest() const {
  double half[kFanout / 2];
  for (std::uint64_t i = 0; i < kFanout / 2; ++i) half[i] = smaller(ranks[i], ranks[i + kFanout / 2]);
  return smaller(smaller(half[0], half[2]), smaller(half[1], half[3]));
}

// Without a branch: where it is, is random.
std::uint64_t Ranking::Line::place_of(double rank) const {
  unsigned equal = 0;
  for (std::uint64_t i = 0; i < kFanout; ++i) equal |= static_cast<unsigned>(ranks[i] == rank) << i;
  return static_cast<std::uint64_t>(std::countr_zero(equal));
}

Ranking::Ranking(std::uint64_t rows) : rows_(rows) {
  check(rows > 0, "a ranking of no rows");
  Line line;
  std::fill_n(line.ranks, kFanout, kInfinite);
  std::uint64_t nodes = rows;
  do {
    nodes = (nodes + kFanout - 1) / kFanout;
    levels_.emplace_back(nodes, line);
  } while (nodes > 1);
}

std::uint64_t Ranking::worst() const {
  const double smallest = levels_.back()[0].smallest();
  std::uint64_t node = 0;
  for (auto level = levels_.rbegin(); level != levels_.rend(); ++level) {
    node = node * kFanout + (*level)[node].place_of(smallest);
  }
  return node;
}

void Ranking::put(std::uint64_t row, double rank) {
  std::uint64_t node = row;
  for (std::vector<Line>& level : levels_) {
    Line& line = level[node / kFanout];
    if (line.ranks[node % kFanout] == rank) return;
    line.ranks[node % kFanout] = rank;
    rank = line.smallest();
    node /= kFanout;
  }
}

void Ranking::rebuild() {
  for (std::size_t l = 1; l < levels_.size(); ++l) {
    for (std::size_t i = 0; i < levels_[l - 1].size(); ++i) {
      levels_[l][i / kFanout].ranks[i % kFanout] = levels_[l - 1][i].smallest();
    }
  }
}

void Ranking::plan(std::uint64_t row, double rank) {
  planned_.push_back({row, this->rank(row)});
  put(row, rank);
}

void Ranking::forget() {
  for (; !planned_.empty(); planned_.pop_back()) put(planned_.back().row, planned_.back().rank);
}

void Ranking::keep() {
  if (!planned_.empty()) likely_ = 2 * planned_.back().rank - planned_.front().rank;
  planned_.clear();
}

// In a cold tree every descent waits for memory twice or more, one after the other. The lines that they will need are known
// roughly: the next batch will replace about as many ranks, above those that the last one replaced.
void Ranking::prefetch(std::uint64_t n) {
  lines_.assign(1, 0);
  for (std::size_t l = levels_.size() - 1; l > 0 && lines_.size() <= 2 * n; --l) {
    below_.clear();
    for (const std::uint64_t line : lines_) {
      for (std::uint64_t i = 0; i < kFanout; ++i) {
        if (!(levels_[l][line].ranks[i] < likely_)) continue;  // never padding, which is infinite
        below_.push_back(line * kFanout + i);
        __builtin_prefetch(&levels_[l - 1][below_.back()], 1);
      }
    }
    std::swap(lines_, below_);
  }
}

void Ranking::set(const std::int64_t* rows, const double* ranks, std::uint64_t n) {
  check_rows(rows, n, rows_);
  check_ranks(ranks, n);
  forget();
  if (n < rows_ / kFanout) {
    for (std::uint64_t i = 0; i < n; ++i) put(static_cast<std::uint64_t>(rows[i]), ranks[i]);
    return;
  }
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto row = static_cast<std::uint64_t>(rows[i]);
    levels_[0][row / kFanout].ranks[row % kFanout] = ranks[i];
  }
  rebuild();
}

void Ranking::place(const double* ranks, std::uint64_t n, const std::int64_t* free, std::uint64_t free_rows,
                    std::vector<std::int64_t>& rows, std::vector<std::int64_t>& kept) {
  check(free_rows <= n, "more free rows than data");
  check_rows(free, free_rows, rows_);
  check_ranks(ranks, n);
  forget();
  prefetch(n);
  planned_.reserve(n);
  rows.reserve(n);
  kept.reserve(n);
  for (std::uint64_t i = 0; i < n; ++i) {
    const std::uint64_t row = i < free_rows ? static_cast<std::uint64_t>(free[i]) : worst();
    if (i >= free_rows && !(ranks[i] > rank(row))) continue;
    plan(row, ranks[i]);
    rows.push_back(static_cast<std::int64_t>(row));
    kept.push_back(static_cast<std::int64_t>(i));
  }
}

}  // namespace engram
