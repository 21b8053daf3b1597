// A set of rows that says how many it has and which one is the r-th, in memory that may be shared.
//
//   memory   bits, a word per 64 rows · counts u32 of 64 words each · counts of 64 of those · … · one count: all
//
// Zero memory is the empty set. What a set answers follows from what is in it alone. Nothing here locks.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"

namespace engram {

class RowSet {
 public:
  /// Bytes for rows [0, rows), a multiple of 64. Rows may be at most 2^32 - 1.
  static std::uint64_t bytes(std::uint64_t rows) {
    std::uint64_t size = blocks(rows), all = size * sizeof(std::uint64_t);
    do {
      size = blocks(size);
      all += size * sizeof(std::uint32_t);
    } while (size > 1);
    return (all + 63) / 64 * 64;
  }

  /// A view of memory of bytes(), aligned to 8, which must outlive it.
  RowSet(std::byte* memory, std::uint64_t rows) : rows_(rows), words_(reinterpret_cast<std::uint64_t*>(memory)), n_words_(blocks(rows)) {
    auto* counts = reinterpret_cast<std::uint32_t*>(words_ + n_words_);
    std::uint64_t size = n_words_;
    do {
      size = blocks(size);
      levels_.push_back({counts, size});
      counts += size;
    } while (size > 1);
  }

  /// How many there are. Throws Damaged: more than rows.
  std::uint64_t size() const {
    const std::uint64_t size = copied(*levels_.back().counts);
    intact(size <= rows_, kCounts);
    return size;
  }
  bool has(std::uint64_t row) const { return (words_[row / 64] >> row % 64 & 1) != 0; }

  void insert(std::uint64_t row) {
    if (has(row)) return;
    words_[row / 64] |= std::uint64_t{1} << row % 64;
    for (std::uint64_t at = row / 64; const Level& level : levels_) ++level.counts[at /= 64];
  }
  void erase(std::uint64_t row) {
    if (!has(row)) return;
    words_[row / 64] &= ~(std::uint64_t{1} << row % 64);
    for (std::uint64_t at = row / 64; const Level& level : levels_) --level.counts[at /= 64];
  }

  /// The r-th row in ascending order, r < size(). Throws Damaged: the counts do not add up.
  std::uint64_t at(std::uint64_t r) const {
    std::uint64_t node = 0;
    for (std::uint64_t k = levels_.size() - 1; k-- > 0;) {
      const std::uint32_t* counts = levels_[k].counts;
      node = child(node, levels_[k].size, r, [counts](std::uint64_t i) { return copied(counts[i]); });
    }
    node = child(node, n_words_, r, [this](std::uint64_t i) { return static_cast<std::uint32_t>(std::popcount(copied(words_[i]))); });
    std::uint64_t word = copied(words_[node]);
    while (r-- > 0) word &= word - 1;
    const std::uint64_t row = node * 64 + static_cast<std::uint64_t>(std::countr_zero(word));
    intact(row < rows_, kCounts);
    return row;
  }

  /// Calls `visit(row)` for each row, in ascending order.
  template <class Visit>
  void each(Visit&& visit) const {
    for (std::uint64_t w = 0; w < n_words_; ++w) {
      for (std::uint64_t word = copied(words_[w]); word != 0; word &= word - 1) {
        const std::uint64_t row = w * 64 + static_cast<std::uint64_t>(std::countr_zero(word));
        intact(row < rows_, kCounts);
        visit(row);
      }
    }
  }

  /// The rows for which `wanted(row)` is true, and no others, whatever the memory held. O(rows).
  template <class Wanted>
  void assign(Wanted&& wanted) {
    for (std::uint64_t w = 0; w < n_words_; ++w) {
      std::uint64_t word = 0;
      for (std::uint64_t row = w * 64; row < rows_ && row < w * 64 + 64; ++row) word |= std::uint64_t{wanted(row)} << row % 64;
      set(words_[w], word);
    }
    for (std::uint64_t k = 0, below = n_words_; k < levels_.size(); below = levels_[k++].size) {
      for (std::uint64_t i = 0; i < levels_[k].size; ++i) {
        std::uint32_t count = 0;
        for (std::uint64_t j = i * 64; j < below && j < i * 64 + 64; ++j) {
          count += k == 0 ? static_cast<std::uint32_t>(std::popcount(words_[j])) : levels_[k - 1].counts[j];
        }
        set(levels_[k].counts[i], count);
      }
    }
  }

 private:
  static constexpr char kCounts[] = "a set of rows: expected counts that add up to no more than there are rows";
  struct Level {
    std::uint32_t* counts;
    std::uint64_t size;
  };

  static std::uint64_t blocks(std::uint64_t n) { return (n + 63) / 64; }

  // Pages of what was never in the set stay untouched.
  template <class T>
  static void set(T& word, T value) {
    if (word != value) word = value;
  }

  // Among the up to 64 below `node` the one that the r-th falls into; r becomes its place there.
  template <class Count>
  static std::uint64_t child(std::uint64_t node, std::uint64_t size, std::uint64_t& r, Count&& count) {
    for (std::uint64_t i = node * 64; i < size && i < node * 64 + 64; ++i) {
      const std::uint64_t in = count(i);
      if (r < in) return i;
      r -= in;
    }
    throw Damaged(std::string(kCounts) + ". Something else has written into the store's memory: load a checkpoint into a new one");
  }

  std::uint64_t rows_;
  std::uint64_t* words_;
  std::uint64_t n_words_;
  std::vector<Level> levels_;
};

}  // namespace engram
