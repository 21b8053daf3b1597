// How often others have used rows, for a view of a store that only reads: it counts their uses beside its own.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "check.h"
#include "gather.h"

namespace engram {

class OthersUses {
 public:
  /// `writes`, `uses`: [rows], in memory of others: how often rows were used, in the bits of `mask`, and the numbers of the writes that
  /// this is of. `own`: the same as it is here, if it was copied from there; null: nothing here is of others.
  OthersUses(const std::uint64_t* writes, const std::uint32_t* uses, std::uint32_t mask, const std::uint32_t* own, std::uint64_t rows)
      : writes_(writes), uses_(uses), mask_(mask), seen_(rows) {
    for (std::uint64_t row = 0; own != nullptr && row < rows; ++row) seen_[row] = own[row] & mask_;
  }

  /// The row holds another write from now on, which no one has used.
  void forget(std::uint64_t row) { seen_[row] = 0; }

  /// Calls `take(row, uses)` for each row of which others have used the write since the last time: how often it was used in all.
  /// `writes`, `own`: those of here. O(rows).
  template <class Take>
  void each(const std::uint64_t* writes, const std::uint32_t* own, Take&& take) {
    std::uint32_t now[kAtOnce];
    for (std::uint64_t begin = 0; begin < seen_.size(); begin += kAtOnce) {
      const std::uint64_t n = std::min(kAtOnce, seen_.size() - begin);
      copy_from_shared(reinterpret_cast<std::byte*>(now), reinterpret_cast<const std::byte*>(uses_ + begin), n * sizeof *now);
      std::uint32_t differs = 0;
      for (std::uint64_t i = 0; i < n; ++i) differs |= (now[i] & mask_) ^ seen_[begin + i];
      for (std::uint64_t i = 0; differs != 0 && i < n; ++i) {
        const std::uint64_t row = begin + i;
        const std::uint32_t uses = now[i] & mask_, before = seen_[row];
        if (uses == before || copied(writes_[row]) != writes[row]) continue;
        seen_[row] = uses;
        take(row, std::min<std::uint64_t>(mask_, std::uint64_t{uses} + ((own[row] & mask_) - std::min(before, own[row] & mask_))));
      }
    }
  }

 private:
  static constexpr std::uint64_t kAtOnce = 1024;  // rows that are compared before any of them is looked at

  const std::uint64_t* writes_;
  const std::uint32_t* uses_;
  std::uint32_t mask_;
  std::vector<std::uint32_t> seen_;  // of the uses here those of others
};

}  // namespace engram
