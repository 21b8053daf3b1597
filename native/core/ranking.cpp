#include "ranking.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "check.h"
#include "random.h"

namespace engram {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr std::uint64_t kShare = 8;     // one in so many rows is picked out at a time
constexpr std::uint64_t kSample = 512;  // rows whose ranks tell where that eighth ends
constexpr std::uint64_t kBlock = 256;   // rows looked at between two looks at the space
constexpr std::uint64_t kAhead = 8;     // entries between asking for a row's rank and looking at it

void check_ranks(const double* ranks, std::uint64_t n) {
  bool numbers = true;
  for (std::uint64_t i = 0; i < n; ++i) numbers &= !std::isnan(ranks[i]);
  check(numbers, "a rank that is no number");
}

// Numbers in the order of the ranks, as unsigned ones.
std::uint64_t in_order(double rank) {
  const auto bits = std::bit_cast<std::uint64_t>(rank + 0.0);  // -0.0 is 0.0
  return bits >> 63 != 0 ? ~bits : bits | std::uint64_t{1} << 63;
}

// For a heap whose first entry is the worst.
constexpr auto later = [](const auto& a, const auto& b) { return b < a; };

// By rank, of equal ones as they stand: digit by digit, which no comparison makes the processor wait for.
template <class Entry>
void sort_by_rank(std::vector<Entry>& entries) {
  constexpr std::uint64_t kDigits = 8, kValues = 256;
  const auto digit = [](const Entry& entry, std::uint64_t d) { return in_order(entry.rank) >> 8 * d & (kValues - 1); };
  std::array<std::array<std::uint64_t, kValues>, kDigits> ends{};
  for (const Entry& entry : entries) {
    for (std::uint64_t d = 0; d < kDigits; ++d) ++ends[d][digit(entry, d)];
  }
  std::vector<Entry> sorted(entries.size());
  for (std::uint64_t d = 0; d < kDigits; ++d) {
    if (ends[d][digit(entries[0], d)] == entries.size()) continue;
    std::uint64_t begin = 0;
    for (std::uint64_t& value : ends[d]) begin += std::exchange(value, begin);
    for (const Entry& entry : entries) sorted[ends[d][digit(entry, d)]++] = entry;
    entries.swap(sorted);
  }
}

}  // namespace

Ranking::Ranking(std::uint64_t rows) : ranks_(rows, kInfinite) {
  check(rows > 0, "a ranking of no rows");
  drop();
}

void Ranking::drop() {
  bound_ = {-kInfinite, 0};
  waiting_.clear(), since_.clear();
  at_ = 0;
}

void Ranking::put(std::uint64_t row, double rank) {
  ranks_[row] = rank;
  if (!(Entry{rank, row} < bound_)) return;
  since_.push_back({rank, row});
  std::push_heap(since_.begin(), since_.end(), later);
  if (since_.size() > ranks_.size()) drop();
}

void Ranking::plan(std::uint64_t row, double rank) {
  planned_.push_back({ranks_[row], row});
  put(row, rank);
}

const Ranking::Entry& Ranking::next() {
  for (;; pick_out()) {
    while (!since_.empty() && outdated(since_.front())) {
      std::pop_heap(since_.begin(), since_.end(), later);
      since_.pop_back();
    }
    while (at_ < waiting_.size() && outdated(waiting_[at_])) ++at_;
    if (at_ < waiting_.size()) {
      if (at_ + kAhead < waiting_.size()) __builtin_prefetch(&ranks_[waiting_[at_ + kAhead].row], 1);
      return !since_.empty() && since_.front() < waiting_[at_] ? since_.front() : waiting_[at_];
    }
    if (!since_.empty()) return since_.front();
  }
}

// The bound is where an eighth of some rows, taken at random, ends.
void Ranking::pick_out() {
  Entry bound{kInfinite, rows()};
  if (rows() > kSample) {
    const Random random(picks_++);
    std::array<Entry, kSample> sample;
    for (std::uint64_t i = 0; i < kSample; ++i) {
      const std::uint64_t row = random.below(rows(), i);
      sample[i] = {ranks_[row], row + 1};  // so that there is a row below the bound
    }
    const auto end = sample.begin() + kSample / kShare;
    std::nth_element(sample.begin(), end, sample.end());
    bound = *end;
  }
  std::vector<Entry> found;
  std::uint64_t n = 0;
  const auto find = [&](std::uint64_t row, std::uint64_t end, double most) {
    while (row < end) {
      const std::uint64_t stop = std::min(end, row + kBlock);
      if (found.size() < n + kBlock) found.resize(2 * n + std::max(kBlock, rows() / kShare));
      for (Entry* entry = found.data(); row < stop; ++row) {  // without a branch: which rows are found, is random
        entry[n] = {ranks_[row], row};
        n += ranks_[row] <= most;
      }
    }
  };
  find(0, bound.row, bound.rank);
  if (bound.rank != -kInfinite) find(bound.row, rows(), std::nextafter(bound.rank, -kInfinite));  // else none has a smaller rank
  found.resize(n);
  sort_by_rank(found);
  waiting_ = std::move(found), since_.clear();
  at_ = 0, bound_ = bound;
}

void Ranking::forget() {
  for (; !planned_.empty(); planned_.pop_back()) put(planned_.back().row, planned_.back().rank);
}

void Ranking::set(const std::int64_t* rows, const double* ranks, std::uint64_t n) {
  const OwnRows own(rows, n, this->rows());
  check_ranks(ranks, n);
  forget();
  if (n >= this->rows() / kShare) drop();
  for (std::uint64_t i = 0; i < n; ++i) put(static_cast<std::uint64_t>(rows[i]), ranks[i]);
}

void Ranking::place(const double* ranks, std::uint64_t n, const std::int64_t* free, std::uint64_t free_rows,
                    std::vector<std::int64_t>& rows, std::vector<std::int64_t>& kept) {
  check(free_rows <= n, "more free rows than data");
  const OwnRows own(free, free_rows, this->rows());
  check_ranks(ranks, n);
  forget();
  planned_.reserve(n);
  rows.reserve(n);
  kept.reserve(n);
  for (std::uint64_t i = 0; i < free_rows; ++i) {
    plan(static_cast<std::uint64_t>(free[i]), ranks[i]);
    rows.push_back(free[i]);
    kept.push_back(static_cast<std::int64_t>(i));
  }
  if (free_rows == n) return;
  Entry worst = next();
  for (std::uint64_t i = free_rows; i < n; ++i) {
    if (!(ranks[i] > worst.rank)) continue;
    plan(worst.row, ranks[i]);
    rows.push_back(static_cast<std::int64_t>(worst.row));
    kept.push_back(static_cast<std::int64_t>(i));
    worst = next();
  }
}

}  // namespace engram
