// Ranks of rows, and which row is the worst: that with the smallest rank, of equal ones that with the lower number.
//
// The worst rows wait in order. When they are used up, the next eighth of all rows is picked out in one pass over the ranks: memory is
// read in order, and which rows will be replaced is known before. Nothing here locks.
#pragma once

#include <cstdint>
#include <vector>

namespace engram {

class Ranking {
 public:
  /// All ranks are infinite: nothing is better.
  explicit Ranking(std::uint64_t rows);

  std::uint64_t rows() const { return ranks_.size(); }
  double rank(std::uint64_t row) const { return ranks_[row]; }
  /// The row with the smallest rank. Cost: as place() of one row.
  std::uint64_t worst() { return next().row; }

  /// Ranks of rows; of a row named twice the last one stays. A plan that was not kept is forgotten. Throws
  /// std::out_of_range for a row, std::invalid_argument for a NaN: nothing changed. Cost: O(n log rows), O(rows) at most.
  void set(const std::int64_t* rows, const double* ranks, std::uint64_t n);

  /// Where data of these ranks goes, one after another: the first ones to the free rows, then each to the worst row if it is
  /// better. Appends to `rows`, and to `kept` which of the n. What follows from it is forgotten by the next call of set() or
  /// place(), unless keep() is called before. Throws as set(), and for more free rows than n. Cost: O(n log rows) on average:
  /// once for about every rows / 8 rows that are placed, O(rows).
  void place(const double* ranks, std::uint64_t n, const std::int64_t* free, std::uint64_t free_rows,
             std::vector<std::int64_t>& rows, std::vector<std::int64_t>& kept);

  /// The last plan was carried out.
  void keep() { planned_.clear(); }

 private:
  struct Entry {
    double rank;
    std::uint64_t row;
    bool operator<(const Entry& other) const { return rank < other.rank || (rank == other.rank && row < other.row); }
  };

  bool outdated(const Entry& entry) const { return ranks_[entry.row] != entry.rank; }
  void put(std::uint64_t row, double rank);
  void plan(std::uint64_t row, double rank);
  const Entry& next();
  void forget();
  void drop();
  void pick_out();

  std::vector<double> ranks_;
  // Of every row below the bound, its rank now is in one of the two; what they say besides is outdated.
  Entry bound_;
  std::vector<Entry> waiting_;  // in order, from `at_` on
  std::uint64_t at_ = 0;
  std::vector<Entry> since_;    // a heap: ranks below the bound that rows got after it was set
  std::vector<Entry> planned_;  // ranks that a plan replaced
  std::uint64_t picks_ = 0;
};

}  // namespace engram
