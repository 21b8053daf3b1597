#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>
#include <stdexcept>
#include <vector>

#include "core/best_rows.h"
#include "core/random.h"
#include "expect.h"

using namespace engram;

namespace {

template <class T>
double mean(std::uint8_t code, const std::vector<T>& values) {
  const Rewards kind(code, sizeof(T) * 8, sizeof(T) * values.size());
  return kind.means(reinterpret_cast<const std::byte*>(values.data()), 1)[0];
}

double variance(const std::vector<double>& values) {
  double total = 0, squares = 0;
  for (const double value : values) total += value;
  for (const double value : values) squares += (value - total / static_cast<double>(values.size())) * (value - total / static_cast<double>(values.size()));
  return squares;
}

}  // namespace

TEST(means_are_of_every_real_dtype) {
  EXPECT_EQ(mean<std::int8_t>(0, {-128, 0}), -64.0);
  EXPECT_EQ(mean<std::int16_t>(0, {-300}), -300.0);
  EXPECT_EQ(mean<std::int32_t>(0, {1, 2, 6}), 3.0);
  EXPECT_EQ(mean<std::int64_t>(0, {-(std::int64_t{1} << 40)}), -0x1p40);
  EXPECT_EQ(mean<std::uint8_t>(6, {1, 0, 0, 1}), 0.5);
  EXPECT_EQ(mean<std::uint8_t>(1, {255}), 255.0);
  EXPECT_EQ(mean<std::uint16_t>(1, {65535}), 65535.0);
  EXPECT_EQ(mean<std::uint32_t>(1, {4294967295u}), 4294967295.0);
  EXPECT_EQ(mean<std::uint64_t>(1, {std::uint64_t{1} << 63}), 0x1p63);
  EXPECT_EQ(mean<float>(2, {0.5f, 1.5f}), 1.0);
  EXPECT_EQ(mean<double>(2, {-1e300}), -1e300);
  EXPECT_EQ(mean<std::uint16_t>(4, {0x3FC0}), 1.5);
  EXPECT(std::isnan(mean<double>(2, {1.0, std::nan("")})));
  // Half precision: one, -2, the largest, the smallest above zero, the smallest normal one, minus infinity.
  for (const auto& [bits, value] : std::vector<std::pair<std::uint16_t, double>>{
           {0x3C00, 1.0}, {0xC000, -2.0}, {0x7BFF, 65504.0}, {0x0001, 0x1p-24}, {0x0400, 0x1p-14}, {0xFC00, -INFINITY}, {0x8000, 0.0}}) {
    EXPECT_EQ(mean<std::uint16_t>(2, {bits}), value);
  }
  EXPECT(std::isnan(mean<std::uint16_t>(2, {0x7E00})));
  EXPECT_THROWS(std::invalid_argument, Rewards(5, 64, 8));
  EXPECT_THROWS(std::invalid_argument, Rewards(2, 32, 0));
  EXPECT_THROWS(std::invalid_argument, Rewards(2, 8, 8));
}

// Against sorting, for the highest, and all subsets, for the largest variance.
TEST(the_best_rows_are_those_of_a_search) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    const Random random(seed);
    std::vector<double> rewards;
    std::vector<std::int64_t> sizes;
    const double scale = std::vector<double>{1, 1e-200, 0x1p1021, 1e5}[seed % 4];  // squares of some are no numbers
    for (std::uint64_t g = 0; g < 3; ++g) {
      sizes.push_back(static_cast<std::int64_t>(1 + random.below(7, g)));
      for (std::int64_t i = 0; i < sizes.back(); ++i) {
        rewards.push_back((static_cast<double>(random.below(7, rewards.size(), 1)) - 3) * scale);
      }
    }
    const std::uint64_t each = 1 + seed % 5;
    for (const Wanted wanted : {Wanted::highest, Wanted::spread}) {
      const BestRows best = best_rows(rewards, sizes, each, wanted, seed);
      EXPECT_EQ(best.places.size(), 3 * each);
      EXPECT_EQ(best.repeated, std::any_of(sizes.begin(), sizes.end(), [&](auto size) { return static_cast<std::uint64_t>(size) < each; }));
      std::uint64_t start = 0;
      for (std::uint64_t g = 0; g < 3; ++g) {
        const auto size = static_cast<std::uint64_t>(sizes[g]), once = std::min(size, each);
        const std::vector<std::uint64_t> mine(best.places.begin() + static_cast<std::ptrdiff_t>(g * each),
                                              best.places.begin() + static_cast<std::ptrdiff_t>(g * each + each));
        EXPECT_EQ(std::set<std::uint64_t>(mine.begin(), mine.begin() + static_cast<std::ptrdiff_t>(once)).size(), once);
        for (const std::uint64_t place : mine) EXPECT(place >= start && place < start + size);
        if (wanted == Wanted::highest) {
          std::vector<std::uint64_t> model(size);
          std::iota(model.begin(), model.end(), start);
          std::sort(model.begin(), model.end(), [&](auto a, auto b) { return rewards[a] != rewards[b] ? rewards[a] > rewards[b] : a > b; });
          for (std::uint64_t i = 0; i < once; ++i) EXPECT_EQ(mine[i], model[i]);
        } else {
          std::vector<double> found;
          for (std::uint64_t i = 0; i < once; ++i) found.push_back(rewards[mine[i]] / scale);
          EXPECT(std::is_sorted(found.begin(), found.end()));
          double largest = 0, sum = -INFINITY;
          for (std::uint64_t some = 0; some < std::uint64_t{1} << size; ++some) {
            if (static_cast<std::uint64_t>(std::popcount(some)) != once) continue;
            std::vector<double> values;
            for (std::uint64_t i = 0; i < size; ++i) {
              if ((some >> i & 1) != 0) values.push_back(rewards[start + i] / scale);
            }
            const double now = variance(values), total = std::accumulate(values.begin(), values.end(), 0.0);
            if (now > largest + 1e-9 || (now > largest - 1e-9 && total > sum)) sum = total;
            largest = std::max(largest, now);
          }
          EXPECT(std::abs(variance(found) - largest) < 1e-9);
          EXPECT(std::abs(std::accumulate(found.begin(), found.end(), 0.0) - sum) < 1e-9);
        }
        start += size;
      }
    }
  }
}

TEST(what_comes_again_is_any_row) {
  const std::vector<double> rewards{1, 2};
  const std::vector<std::int64_t> sizes{2};
  std::set<std::vector<std::uint64_t>> seen;
  for (std::uint64_t key = 0; key < 64; ++key) {
    const std::vector<std::uint64_t> places = best_rows(rewards, sizes, 4, Wanted::highest, key).places;
    EXPECT_EQ(places[0], 1u);
    EXPECT_EQ(places[1], 0u);
    seen.insert({places[2], places[3]});
    EXPECT(places == best_rows(rewards, sizes, 4, Wanted::highest, key).places);
  }
  EXPECT_EQ(seen.size(), 4u);
}

TEST(groups_of_no_rows_are_refused) {
  const std::vector<double> rewards{1, 2};
  for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{0}, {-1}, {3}, {2, 1}}) {
    EXPECT_THROWS(std::invalid_argument, best_rows(rewards, sizes, 1, Wanted::spread, 0));
  }
}
