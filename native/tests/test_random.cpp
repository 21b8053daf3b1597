#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "core/permutation.h"
#include "core/pool.h"
#include "core/random.h"
#include "expect.h"

using engram::Permutation;
using engram::Random;

namespace {

constexpr std::uint64_t kMax = ~std::uint64_t{0};
using Counts = std::vector<std::uint64_t>;

TEST(finaliser_is_splitmix64s) {
  // The first outputs of SplitMix64 seeded with 0, as published with it.
  constexpr std::uint64_t known[] = {0xe220a8397b1dcdaf, 0x6e789e6aa1b965f4, 0x06c45d188009454f, 0xf88bb8a8724c81ec,
                                     0x1b39896a51a8749b};
  for (std::uint64_t i = 0; i < 5; ++i) EXPECT_EQ(engram::mix((i + 1) * 0x9E3779B97F4A7C15ull), known[i]);
}

TEST(numbers_are_known) {
  // From an independent implementation in Python integers. A change here changes every seeded run of every user.
  struct Known {
    std::uint64_t key, i, attempt, bits;
  };
  constexpr Known known[] = {
      {0, 0, 0, 0x568a9b0b1a2c05ec},          {0, 1, 0, 0x44e5b8b147ef718b},
      {0, 0, 1, 0xa26ab114db1f32cc},          {1, 0, 0, 0x6ec85f1f8547bc0c},
      {0xdeadbeef, 12345, 0, 0x8497f723c97fae9b}, {kMax, kMax, 7, 0x4d53145ed6f46db2},
      {42, std::uint64_t{1} << 40, 64, 0x3911c5b6ea7ff11b},
  };
  for (const Known& k : known) EXPECT_EQ(Random(k.key).bits(k.i, k.attempt), k.bits);
  static_assert(Random(0).bits(0) == 0x568a9b0b1a2c05ec);
}

TEST(below_stays_below) {
  const Random random(1);
  for (const std::uint64_t n : {std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{3}, std::uint64_t{1} << 32,
                                std::uint64_t{1} << 63, (std::uint64_t{1} << 63) + 1, kMax}) {
    for (std::uint64_t i = 0; i < 1000; ++i) EXPECT(random.below(n, i) < n);
  }
}

TEST(below_is_uniform_over_numbers_keys_and_attempts) {
  for (const std::uint64_t n : {2, 3, 5, 6, 7, 10, 12, 64, 100, 255, 257, 1000, 4096}) {
    const std::uint64_t draws = 200 * n;
    Counts over_i(n), over_key(n), over_attempt(n);
    for (std::uint64_t i = 0; i < draws; ++i) {
      ++over_i[Random(n).below(n, i)];
      ++over_key[Random(i).below(n, 0)];
      ++over_attempt[Random(n).below(n, 0, i)];
    }
    EXPECT_UNIFORM(over_i);
    EXPECT_UNIFORM(over_key);
    EXPECT_UNIFORM(over_attempt);
  }
}

TEST(below_is_uniform_where_a_remainder_would_not_be) {
  // bits % n would hit the first third of [0, 3 * 2^62) twice as often as the others.
  const std::uint64_t third = std::uint64_t{1} << 62;
  Counts thirds(3);
  for (std::uint64_t i = 0; i < 30000; ++i) ++thirds[Random(5).below(3 * third, i) / third];
  EXPECT_UNIFORM(thirds);
}

TEST(neighbours_are_independent) {
  // Pairs of numbers next to each other: along i, along the key and along the attempt.
  Counts along_i(64), along_key(64), along_attempt(64), diagonal(64);
  for (std::uint64_t i = 0; i < 64000; ++i) {
    ++along_i[Random(3).below(8, i) * 8 + Random(3).below(8, i + 1)];
    ++along_key[Random(i).below(8, 9) * 8 + Random(i + 1).below(8, 9)];
    ++along_attempt[Random(3).below(8, i, 0) * 8 + Random(3).below(8, i, 1)];
    ++diagonal[Random(i).below(8, i + 1) * 8 + Random(i + 1).below(8, i)];
  }
  EXPECT_UNIFORM(along_i);
  EXPECT_UNIFORM(along_key);
  EXPECT_UNIFORM(along_attempt);
  EXPECT_UNIFORM(diagonal);
}

TEST(every_bit_is_fair) {
  for (unsigned bit = 0; bit < 64; ++bit) {
    Counts sides(2);
    for (std::uint64_t i = 0; i < 10000; ++i) ++sides[Random(77).bits(i) >> bit & 1];
    EXPECT_UNIFORM(sides);
  }
}

TEST(keys_numbers_and_attempts_never_alias) {
  // 64-bit values: any repetition among 10^5 of them would be a defect, not chance.
  std::set<std::uint64_t> seen;
  for (std::uint64_t key = 0; key < 10; ++key) {
    for (std::uint64_t i = 0; i < 1000; ++i) {
      for (std::uint64_t attempt = 0; attempt < 10; ++attempt) seen.insert(Random(key).bits(i, attempt));
    }
  }
  EXPECT_EQ(seen.size(), 100000u);
}

TEST(numbers_do_not_depend_on_threads) {
  constexpr std::uint64_t n = 4096;
  std::vector<std::vector<std::uint64_t>> draws;
  for (const std::size_t threads : {1, 2, 4}) {
    engram::set_num_threads(threads);
    std::vector<std::uint64_t> draw(n);
    const Random random(123);
    engram::parallel(64, [&](std::size_t c) {
      for (std::uint64_t i = c * n / 64; i < (c + 1) * n / 64; ++i) draw[i] = random.below(1000, i);
    });
    draws.push_back(draw);
  }
  EXPECT(draws[0] == draws[1]);
  EXPECT(draws[0] == draws[2]);
}

// ---- permutations --------------------------------------------------------------------------------------------------

void expect_bijective(std::uint64_t key, std::uint64_t n) {
  const Permutation permutation(key, n);
  std::vector<bool> hit(n);
  for (std::uint64_t i = 0; i < n; ++i) {
    const std::uint64_t image = permutation(i);
    EXPECT(image < n);
    if (image >= n) return;
    EXPECT(!hit[image]);
    hit[image] = true;
  }
}

TEST(permutations_are_bijective) {
  for (std::uint64_t n = 1; n <= 300; ++n) {
    for (std::uint64_t key = 0; key < 5; ++key) expect_bijective(key, n);
  }
  for (const std::uint64_t n : {1023, 1024, 1025, 4096, 4097, 65535, 65537, 1000003}) expect_bijective(n, n);
}

TEST(several_images_at_a_time) {
  for (const std::uint64_t n : {1, 7, 8, 9, 100, 1000, 5000}) {
    const Permutation permutation(n, n);
    for (const std::uint64_t start : {std::uint64_t{0}, n / 3, n - 1, n}) {
      std::vector<std::int64_t> images(n - start, -1);
      permutation(start, images.size(), images.data());
      for (std::uint64_t i = 0; i < images.size(); ++i) {
        EXPECT_EQ(static_cast<std::uint64_t>(images[i]), permutation(start + i));
      }
    }
    EXPECT_THROWS(std::invalid_argument, permutation(n, 1, nullptr));
    EXPECT_THROWS(std::invalid_argument, permutation(n + 1, 0, nullptr));
  }
}

TEST(images_that_are_looked_up) {
  for (const std::uint64_t n : {1, 2, 5, 100, 1000, 5000, 70'000, (1 << 24) - 3, (1 << 24) + 1, 1 << 30}) {
    const Permutation plain(n + 3, n);
    Permutation tabled(n + 3, n);
    EXPECT(tabled.is(n + 3, n) && !tabled.is(n + 3, n + 1) && !tabled.is(n, n));
    tabled.tabulate();
    const std::uint64_t count = std::min<std::uint64_t>(n, 700);
    std::vector<std::int64_t> a(count), b(count);
    plain(n - count, count, a.data());
    tabled(n - count, count, b.data());
    EXPECT(a == b);
    EXPECT_EQ(plain(n / 2), tabled(n / 2));
  }
}

TEST(permutations_of_huge_domains_stay_inside) {
  for (const std::uint64_t n : {(std::uint64_t{1} << 32) + 1, std::uint64_t{1} << 62, (std::uint64_t{1} << 62) + 1,
                                (std::uint64_t{1} << 63) + 1, kMax}) {
    const Permutation permutation(11, n);
    std::set<std::uint64_t> images;
    for (std::uint64_t i = 0; i < 500; ++i) {
      for (const std::uint64_t x : {i, n - 1 - i}) {
        const std::uint64_t image = permutation(x);
        EXPECT(image < n);
        images.insert(image);
      }
    }
    EXPECT_EQ(images.size(), 1000u);
  }
}

TEST(permutations_refuse_what_is_outside) {
  EXPECT_THROWS(std::invalid_argument, Permutation(0, 0));
  EXPECT_THROWS(std::invalid_argument, Permutation(0, 10)(10));
  EXPECT_THROWS(std::invalid_argument, Permutation(0, 10)(kMax));
}

TEST(permutations_differ_by_key) {
  constexpr std::uint64_t n = 100;
  std::set<std::vector<std::uint64_t>> orders;
  for (std::uint64_t key = 0; key < 1000; ++key) {
    const Permutation permutation(key, n);
    std::vector<std::uint64_t> order(n);
    for (std::uint64_t i = 0; i < n; ++i) order[i] = permutation(i);
    orders.insert(order);
  }
  EXPECT_EQ(orders.size(), 1000u);
}

TEST(permutations_place_every_element_anywhere) {
  // Over keys: where the first and the last element go, and the first two together.
  for (const std::uint64_t n : {2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 20, 31, 33, 60, 64, 65}) {
    const std::uint64_t keys = std::max<std::uint64_t>(100000, 100 * n * (n - 1));
    Counts first(n), last(n), pairs(n * (n - 1));
    for (std::uint64_t key = 0; key < keys; ++key) {
      const Permutation permutation(key, n);
      const std::uint64_t a = permutation(0), b = permutation(1);
      ++first[a];
      ++last[permutation(n - 1)];
      ++pairs[a * (n - 1) + (b < a ? b : b - 1)];
    }
    EXPECT_UNIFORM(first);
    EXPECT_UNIFORM(last);
    if (n > 2) EXPECT_UNIFORM(pairs);
  }
}

TEST(a_small_store_is_shuffled_in_every_order) {
  for (const std::uint64_t n : {3, 4}) {
    std::map<std::uint64_t, std::uint64_t> orders;
    for (std::uint64_t key = 0; key < 100000; ++key) {
      const Permutation permutation(key, n);
      std::uint64_t order = 0;
      for (std::uint64_t i = 0; i < n; ++i) order = order * n + permutation(i);
      ++orders[order];
    }
    Counts counts;
    for (const auto& [order, count] : orders) counts.push_back(count);
    EXPECT_EQ(counts.size(), n == 3 ? 6u : 24u);
    EXPECT_UNIFORM(counts);
  }
}

}  // namespace
