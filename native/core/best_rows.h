// Which rows of a group are drawn by what they are worth.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace engram {

/// Values of one row, as DLPack names their dtype. Throws std::invalid_argument: no real numbers, or none at all.
class Rewards {
 public:
  Rewards(std::uint8_t code, std::uint8_t bits, std::uint64_t row_bytes);

  std::uint64_t row_bytes() const { return row_bytes_; }
  /// Of each of n rows, one behind the other, the mean of its values.
  std::vector<double> means(const std::byte* rows, std::uint64_t n) const;

 private:
  using Mean = double (*)(const std::byte* row, std::uint64_t values);
  std::uint64_t row_bytes_, values_;
  Mean mean_;
};

/// `highest`: the highest rewards, the highest first, and of equal ones the newest. `spread`: those with the largest variance, and of
/// equal ones the largest sum, in ascending order.
enum class Wanted { highest, spread };

struct BestRows {
  std::vector<std::uint64_t> places;
  bool repeated = false;  // some come again
};

/// Places of `each` rows of every group, group by group. Of a group with fewer rows all come, and then some again, at random.
/// `rewards`: finite, of the rows of all groups, of each the oldest row first; `sizes`: rows of each, at least 1.
/// O(n log n + groups * each).
BestRows best_rows(std::span<const double> rewards, std::span<const std::int64_t> sizes, std::uint64_t each, Wanted wanted,
                   std::uint64_t key);

}  // namespace engram
