// Which of several versions of a row is the one to keep.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace engram {

/// Of n entries that each bring a version `given` of a row that holds the version `stored`: `wins` becomes 1 for those to be written.
/// Only entries that are `live`, and whose version is at least the stored one, with `newer` greater. Of a row named by several of them
/// the highest version, of equal ones the last. Any version is newer than a stored NaN, and none is a NaN. O(n).
template <class T>
void pick_newest(const std::int64_t* rows, std::uint64_t n, const T* stored, const T* given, bool newer, const bool* live, bool* wins) {
  constexpr std::uint64_t kNone = ~std::uint64_t{0}, kSpread = 0x9E3779B97F4A7C15ull;
  std::vector<std::uint64_t> best(std::bit_ceil(2 * n + 1), kNone);  // a table of rows: of each the entry that wins so far
  const int shift = std::countl_zero(best.size()) + 1;
  for (std::uint64_t i = 0; i < n; ++i) {
    bool allowed = newer ? given[i] > stored[i] : given[i] >= stored[i];
    if constexpr (std::is_floating_point_v<T>) allowed |= std::isnan(stored[i]) && !std::isnan(given[i]);
    wins[i] = live[i] && allowed;
    if (!wins[i]) continue;
    std::uint64_t at = static_cast<std::uint64_t>(rows[i]) * kSpread >> shift;
    while (best[at] != kNone && rows[best[at]] != rows[i]) at = (at + 1) & (best.size() - 1);
    std::uint64_t& winner = best[at];
    if (winner != kNone && given[winner] > given[i]) {
      wins[i] = false;
    } else {
      if (winner != kNone) wins[winner] = false;
      winner = i;
    }
  }
}

}  // namespace engram
