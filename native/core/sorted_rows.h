// Rows in ascending order, of which a few come and go at a time, whatever their number.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace engram {

class SortedRows {
 public:
  std::uint64_t size() const { return size_; }

  /// The k-th row, k < size(). O(log size), and after a change once O(size / 1024).
  std::uint64_t at(std::uint64_t k) const {
    if (ends_.size() != pieces_.size()) count();
    const auto piece = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), k) - ends_.begin());
    return pieces_[piece][k - (piece == 0 ? 0 : ends_[piece - 1])];
  }

  /// A row that is not there. O(1) if it is the last one, else O(log size + 1024) on average.
  void insert(std::uint64_t row) {
    changed();
    ++size_;
    if (pieces_.empty() || row > pieces_.back().back()) {
      if (pieces_.empty() || pieces_.back().size() == kMost) pieces_.emplace_back();
      pieces_.back().push_back(row);
      return;
    }
    const std::size_t at = piece_of(row);
    std::vector<std::uint64_t>& piece = pieces_[at];
    piece.insert(std::lower_bound(piece.begin(), piece.end(), row), row);
    if (piece.size() <= kMost) return;
    const auto middle = piece.begin() + kMost / 2;
    std::vector<std::uint64_t> upper(middle, piece.end());
    piece.erase(middle, piece.end());
    pieces_.insert(pieces_.begin() + static_cast<std::ptrdiff_t>(at) + 1, std::move(upper));
  }

  /// A row that is there. O(log size + 1024).
  void erase(std::uint64_t row) {
    changed();
    --size_;
    const std::size_t at = piece_of(row);
    std::vector<std::uint64_t>& piece = pieces_[at];
    piece.erase(std::lower_bound(piece.begin(), piece.end(), row));
    if (piece.empty()) pieces_.erase(pieces_.begin() + static_cast<std::ptrdiff_t>(at));
  }

  template <class Use>
  void each(Use&& use) const {
    for (const auto& piece : pieces_) {
      for (const std::uint64_t row : piece) use(row);
    }
  }

 private:
  static constexpr std::size_t kMost = 1024;  // rows of a piece; no piece is empty

  // The last piece that begins at or before a row, or the first one.
  std::size_t piece_of(std::uint64_t row) const {
    const auto behind = std::upper_bound(pieces_.begin(), pieces_.end(), row, [](std::uint64_t r, const auto& piece) { return r < piece.front(); });
    return behind == pieces_.begin() ? 0 : static_cast<std::size_t>(behind - pieces_.begin()) - 1;
  }
  void changed() { ends_.clear(); }
  void count() const {
    std::uint64_t end = 0;
    for (const auto& piece : pieces_) ends_.push_back(end += piece.size());
  }

  std::vector<std::vector<std::uint64_t>> pieces_;
  mutable std::vector<std::uint64_t> ends_;  // of each piece how many rows there are up to its end; empty: not counted
  std::uint64_t size_ = 0;
};

}  // namespace engram
