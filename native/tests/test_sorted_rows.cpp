#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "core/random.h"
#include "core/sorted_rows.h"
#include "expect.h"

namespace {

void compare(const engram::SortedRows& rows, const std::set<std::uint64_t>& expected, std::uint64_t step) {
  EXPECT_EQ(rows.size(), static_cast<std::uint64_t>(expected.size()));
  std::vector<std::uint64_t> all;
  rows.each([&](std::uint64_t row) { all.push_back(row); });
  EXPECT(std::equal(all.begin(), all.end(), expected.begin(), expected.end()));
  for (std::uint64_t k = 0; k < all.size(); k += step) EXPECT_EQ(rows.at(k), all[k]);
  if (!all.empty()) EXPECT_EQ(rows.at(all.size() - 1), all.back());
}

TEST(rows_come_and_go_in_any_order) {
  for (std::uint64_t key = 0; key < 30; ++key) {
    const engram::Random random(key);
    const std::uint64_t most = key % 3 == 0 ? 20'000 : key % 3 == 1 ? 3'000 : 5;
    engram::SortedRows rows;
    std::set<std::uint64_t> expected;
    for (std::uint64_t i = 0; i < 8'000; ++i) {
      const std::uint64_t row = random.below(most, i);
      if (expected.contains(row)) {
        rows.erase(row), expected.erase(row);
      } else {
        rows.insert(row), expected.insert(row);
      }
      if (i % 1'000 == 999) compare(rows, expected, 97);
    }
    while (!expected.empty()) {
      const std::uint64_t row = *(key % 2 == 0 ? expected.begin() : std::prev(expected.end()));
      rows.erase(row), expected.erase(row);
    }
    compare(rows, expected, 1);
  }
}

TEST(rows_in_order_fill_whole_pieces_as_a_ring_that_goes_round_does) {
  engram::SortedRows rows;
  std::set<std::uint64_t> expected;
  for (std::uint64_t row = 0; row < 10'000; ++row) rows.insert(row), expected.insert(row);
  compare(rows, expected, 1);
  for (std::uint64_t row = 0; row < 7'000; ++row) rows.erase(row), expected.erase(row);
  for (std::uint64_t row = 0; row < 2'500; ++row) rows.insert(row), expected.insert(row);
  compare(rows, expected, 1);
}

}  // namespace
