#include "best_rows.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <numeric>

#include "check.h"
#include "random.h"
#include "reals.h"

namespace engram {
namespace {

template <class T>
double mean_of(const std::byte* row, std::uint64_t values) {
  double sum = 0;
  for (std::uint64_t i = 0; i < values; ++i) {
    T value;
    std::memcpy(&value, row + i * sizeof value, sizeof value);
    sum += static_cast<double>(value);
  }
  return sum / static_cast<double>(values);
}

// Null: no real numbers.
using Mean = double (*)(const std::byte*, std::uint64_t);
Mean mean_as(std::uint8_t code, std::uint8_t bits) {
  return of_reals<Mean>(code, bits, []<class T>() -> Mean { return mean_of<T>; }, nullptr);
}

// How many of the lowest of `ascending` rewards are among the n with the largest variance; the others are the highest. Such rows are
// always some of the lowest and some of the highest: the variance is convex in each reward.
std::uint64_t lows_of_spread(std::span<const double> ascending, std::uint64_t n) {
  const double least = ascending.front(), most = ascending.back();
  // Relative to the middle, in halves of the range: so it is exact where rewards are close, and no square is too large.
  const double middle = least / 2 + most / 2, half = most / 2 - least / 2;
  const auto scaled = [&](double reward) { return half > 0 ? (reward - middle) / half : 0; };
  double sum = 0, squares = 0;
  for (const double reward : ascending.last(n)) {
    const double x = scaled(reward);
    sum += x;
    squares += x * x;
  }
  const auto count = static_cast<double>(n);
  struct Choice {
    double variance, sum;
  };
  std::vector<Choice> choices;  // by the number of the lowest
  choices.reserve(n + 1);
  double largest = 0;
  for (std::uint64_t low = 0;; ++low) {
    const double mean = sum / count;
    choices.push_back({squares / count - mean * mean, sum});
    largest = std::max(largest, choices.back().variance);
    if (low == n) break;
    const double in = scaled(ascending[low]), out = scaled(ascending[ascending.size() - n + low]);
    sum += in - out;
    squares += in * in - out * out;
  }
  constexpr double kClose = 1e-12;
  std::uint64_t best = n;
  double best_sum = -INFINITY;
  for (std::uint64_t low = 0; low <= n; ++low) {
    const bool as_large = largest - choices[low].variance <= kClose * (1 + largest);
    if (as_large && choices[low].sum > best_sum) best = low, best_sum = choices[low].sum;
  }
  return best;
}

}  // namespace

Rewards::Rewards(std::uint8_t code, std::uint8_t bits, std::uint64_t row_bytes)
    : row_bytes_(row_bytes), values_(row_bytes / std::max<std::uint64_t>(1, bits / 8)), mean_(mean_as(code, bits)) {
  check(mean_ != nullptr && values_ > 0, "rewards that are real numbers");
}

std::vector<double> Rewards::means(const std::byte* rows, std::uint64_t n) const {
  std::vector<double> found(n);
  for (std::uint64_t i = 0; i < n; ++i) found[i] = mean_(rows + i * row_bytes_, values_);
  return found;
}

BestRows best_rows(std::span<const double> rewards, std::span<const std::int64_t> sizes, std::uint64_t each, Wanted wanted,
                   std::uint64_t key) {
  const Random random(key);
  BestRows best;
  best.places.reserve(sizes.size() * each);
  std::vector<std::uint64_t> order;
  std::vector<double> ascending;
  std::uint64_t start = 0;
  for (std::uint64_t g = 0; g < sizes.size(); ++g) {
    check(sizes[g] > 0 && static_cast<std::uint64_t>(sizes[g]) <= rewards.size() - start, "groups of the rows there are");
    const auto size = static_cast<std::uint64_t>(sizes[g]), once = std::min(size, each);
    order.resize(size);
    std::iota(order.begin(), order.end(), start);
    std::sort(order.begin(), order.end(), [&](std::uint64_t a, std::uint64_t b) {
      return rewards[a] != rewards[b] ? rewards[a] < rewards[b] : a < b;  // then by age
    });
    if (wanted == Wanted::highest) {
      best.places.insert(best.places.end(), order.rbegin(), order.rbegin() + static_cast<std::ptrdiff_t>(once));
    } else {
      ascending.clear();
      for (const std::uint64_t place : order) ascending.push_back(rewards[place]);
      const auto low = static_cast<std::ptrdiff_t>(lows_of_spread(ascending, once)), high = static_cast<std::ptrdiff_t>(once) - low;
      best.places.insert(best.places.end(), order.begin(), order.begin() + low);
      best.places.insert(best.places.end(), order.end() - high, order.end());
    }
    best.repeated |= once < each;
    for (std::uint64_t j = once; j < each; ++j) best.places.push_back(order[random.below(size, j, g)]);
    start += size;
  }
  return best;
}

}  // namespace engram
