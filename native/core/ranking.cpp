#include "ranking.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
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

using Two = double __attribute__((vector_size(16)));
using Four = double __attribute__((vector_size(32)));

}  // namespace

// In pairs, which the compiler makes vectors of.
double Ranking::Line::smallest() const {
  double half[kFanout / 2];
  for (std::uint64_t i = 0; i < kFanout / 2; ++i) half[i] = smaller(ranks[i], ranks[i + kFanout / 2]);
  return smaller(smaller(half[0], half[2]), smaller(half[1], half[3]));
}

// Of equal ones both count. In vectors, as the compiler makes branches of it else.
double Ranking::Line::second() const {
  Four a, b;
  std::memcpy(&a, ranks, sizeof a);
  std::memcpy(&b, ranks + 4, sizeof b);
  const Four low = a < b ? a : b, high = a < b ? b : a;
  const Two l0{low[0], low[1]}, l1{low[2], low[3]}, h0{high[0], high[1]}, h1{high[2], high[3]};
  const Two least = l0 < l1 ? l0 : l1, more = l0 < l1 ? l1 : l0, most = h0 < h1 ? h0 : h1;
  const Two next = more < most ? more : most;
  const Two x{least[0], next[0]}, y{least[1], next[1]};
  const Two lower = x < y ? x : y;
  const double larger = least[0] < least[1] ? least[1] : least[0];
  return smaller(larger, lower[1]);
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

// As plan() of worst(), whose rank is `smallest`, in one way down and up. On the way up nothing is loaded: the smallest of a line
// afterwards is the new rank or the one that was second. Returns the row; `smallest` becomes that of all.
std::int64_t Ranking::replace_worst(double rank, double& smallest) {
  double second[kMostLevels];
  std::uint64_t node = 0;
  for (std::size_t l = levels_.size(); l-- > 0;) {
    const Line& line = levels_[l][node];
    second[l] = line.second();
    node = node * kFanout + line.place_of(smallest);
  }
  const std::uint64_t row = node;
  planned_.push_back({row, smallest});
  for (std::size_t l = 0; l < levels_.size(); ++l, node /= kFanout) {
    levels_[l][node / kFanout].ranks[node % kFanout] = rank;
    rank = smaller(rank, second[l]);
  }
  smallest = rank;
  return static_cast<std::int64_t>(row);
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
  for (std::uint64_t i = 0; i < free_rows; ++i) {
    plan(static_cast<std::uint64_t>(free[i]), ranks[i]);
    rows.push_back(free[i]);
    kept.push_back(static_cast<std::int64_t>(i));
  }
  double smallest = levels_.back()[0].smallest();
  for (std::uint64_t i = free_rows; i < n; ++i) {
    if (!(ranks[i] > smallest)) continue;
    rows.push_back(replace_worst(ranks[i], smallest));
    kept.push_back(static_cast<std::int64_t>(i));
  }
}

}  // namespace engram
