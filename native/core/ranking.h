// Ranks of rows, and which row is the worst: a tournament in which the smallest rank goes on, of equal ones that of the row
// with the lower number.
//
// Nodes have eight children, one cache line. Every parent is computed from its children. Nothing here locks.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace engram {

class Ranking {
 public:
  /// All ranks are infinite: nothing is better.
  explicit Ranking(std::uint64_t rows);

  std::uint64_t rows() const { return rows_; }
  double rank(std::uint64_t row) const { return levels_[0][row / kFanout].ranks[row % kFanout]; }
  /// The row with the smallest rank. Cost: O(log rows).
  std::uint64_t worst() const;

  /// Ranks of rows; of a row named twice the last one stays. A plan that was not kept is forgotten. Throws
  /// std::out_of_range for a row, std::invalid_argument for a NaN: nothing changed. Cost: O(n log rows), O(rows) at most.
  void set(const std::int64_t* rows, const double* ranks, std::uint64_t n);

  /// Where data of these ranks goes, one after another: the first ones to the free rows, then each to the worst row if it is
  /// better. Appends to `rows`, and to `kept` which of the n. What follows from it is forgotten by the next call of set() or
  /// place(), unless keep() is called before. Throws as set(), and for more free rows than n. Cost: O(n log rows).
  void place(const double* ranks, std::uint64_t n, const std::int64_t* free, std::uint64_t free_rows,
             std::vector<std::int64_t>& rows, std::vector<std::int64_t>& kept);

  /// The last plan was carried out.
  void keep();

 private:
  static constexpr std::uint64_t kFanout = 8, kMostLevels = 22;
  struct alignas(64) Line {
    double ranks[kFanout];
    double smallest() const;
    double second() const;
    std::uint64_t place_of(double rank) const;
  };
  struct Before {
    std::uint64_t row;
    double rank;
  };

  void put(std::uint64_t row, double rank);
  void plan(std::uint64_t row, double rank);
  std::int64_t replace_worst(double rank, double& smallest);
  void forget();
  void prefetch(std::uint64_t n);
  void rebuild();

  std::uint64_t rows_;
  std::vector<std::vector<Line>> levels_;                     // the rows first, one line last
  std::vector<Before> planned_;                               // ranks that a plan changed
  double likely_ = -std::numeric_limits<double>::infinity();  // the next plan hardly replaces a rank above it
  std::vector<std::uint64_t> lines_, below_;                  // of prefetch(), kept for the next one
};

}  // namespace engram
