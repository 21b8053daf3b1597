// A tree over leaves that says their sum and their smallest positive one, and finds the leaf that a number in [0, sum)
// falls on.
//
// Nodes have eight children, one cache line. Every parent is computed from its children, in one order, never from what
// changed: so at rest it equals that sum bit for bit, whatever was written before, and cannot drift (pytorch/rl #2230,
// flashbax #52). Doubles, so that no leaf of a large buffer becomes unreachable.
//
//   memory   leaves · sums of level 1, 2, … · minima of level 1, 2, … · maxima, if wanted
//
// Each level is padded with zeros to whole lines. Zero memory is a tree of zeros: pages of large trees need not be touched.
// Nothing here locks.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace engram {

class SumTree {
 public:
  static constexpr std::uint64_t kFanout = 8;

  /// Bytes for that many leaves. Throws std::invalid_argument: none, or more than 2^40.
  static std::uint64_t bytes(std::uint64_t leaves, bool with_max);

  /// A view of memory that must outlive it, aligned to 64 bytes and exactly bytes() long (std::invalid_argument).
  SumTree(std::span<std::byte> memory, std::uint64_t leaves, bool with_max);

  std::uint64_t leaves() const { return leaves_; }
  double leaf(std::uint64_t i) const { return sums_[0][i]; }
  double sum() const { return sums_.back()[0]; }
  /// The smallest leaf above zero, 0 if there is none.
  double min_positive() const { return minima_.back()[0]; }
  /// The largest leaf. Needs with_max.
  double max() const { return maxima_.back()[0]; }

  /// leaf[rows[i]] = values[i]; of a row named twice the last value stays. Every row must be below leaves()
  /// (std::out_of_range, nothing changed), every value finite and not negative. Cost: O(n log leaves).
  void set(const std::int64_t* rows, const double* values, std::uint64_t n);

  /// Asks the memory for what set() changes first.
  void prefetch(std::uint64_t row) const {
    __builtin_prefetch(sums_[0] + row, 1);
    __builtin_prefetch(sums_[1] + row / kFanout, 1);
    __builtin_prefetch(minima_[1] + row / kFanout, 1);
  }

  /// leaf[row] = value, and nothing above it: transform() must follow.
  void put(std::uint64_t row, double value) { sums_[0][row] = value; }

  /// For each u[i] in [0, 1): the leaf on which u[i] * sum() falls, which is above zero. sum() must be above zero and finite. The
  /// descents advance level by level together, so that their waits for memory overlap. Throws Damaged: a leaf that is drawn is none, or
  /// not all on the way to the first of them is what its children say.
  void find(const double* u, std::uint64_t n, std::int64_t* rows) const;

  /// Up to n leaves above zero, the smallest first, of equal ones the one with the lower number. Returns how many there are. Cost:
  /// O(n log leaves). Throws Damaged: minima are not what their children say.
  std::uint64_t smallest(std::uint64_t n, std::int64_t* rows) const;

  /// Leaves [begin, end) become map(row, leaf), and all above them is recomputed, whatever it was. Nothing is written that
  /// stays what it is: pages of zeros stay untouched. Cost: O(end - begin + log leaves).
  template <class Map>
  void transform(std::uint64_t begin, std::uint64_t end, Map&& map) {
    for (std::uint64_t i = begin; i < end; ++i) {
      const double leaf = map(i, sums_[0][i]);
      if (std::bit_cast<std::uint64_t>(leaf) != std::bit_cast<std::uint64_t>(sums_[0][i])) sums_[0][i] = leaf;  // zeros have signs
    }
    rebuild(begin, end);
  }

  /// All leaves zero.
  void clear();

  /// Whether every parent is what its children say, bit for bit.
  bool consistent() const;

 private:
  void compute(std::uint64_t level, std::uint64_t node);
  bool agrees(std::uint64_t level, std::uint64_t node) const;
  bool agrees_above(std::uint64_t leaf) const;
  void rebuild(std::uint64_t begin, std::uint64_t end);
  void unify(std::vector<std::uint64_t>& nodes, std::uint64_t size);

  std::uint64_t leaves_;
  std::vector<std::uint64_t> sizes_;             // nodes per level, the leaves first
  std::vector<double*> sums_, minima_, maxima_;  // per level; [0] is the leaves for all three
  std::span<std::byte> memory_;
  std::vector<std::uint64_t> parents_, ticked_;  // of a set(), kept for the next one
};

}  // namespace engram
