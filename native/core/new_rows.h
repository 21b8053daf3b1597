// Which rows may have changed, for a view of a store whose writers do not tell it.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "control.h"

namespace engram {

class NewRows {
 public:
  /// Those that are named, or consecutive ones.
  struct Rows {
    const std::int64_t* named = nullptr;
    std::uint64_t first = 0;
    std::uint64_t operator[](std::uint64_t i) const { return named == nullptr ? first + i : static_cast<std::uint64_t>(named[i]); }
  };

  explicit NewRows(const Control& tickets);

  /// Calls `look` for the rows that were appended since the last time, and those that were under way then; or for all rows after a write
  /// by number, an edit or an emptying, and the first time. What it finds there was whole by then, or comes again. O(rows written), or a
  /// look at each row.
  void each(const std::function<void(Rows rows, std::uint64_t n)>& look);
  /// All rows are new the next time.
  void forget() { scatters_ = ~std::uint64_t{0}; }
  /// In a child that was forked off amid a call of another thread: what is half changed is left where it is.
  void after_fork();

 private:
  /// A row that is to be looked at again: the writer of its step of that lap had not begun, or had not ended; or one that empties the
  /// lane had not forgotten it.
  struct Pending {
    std::uint64_t row;
    std::uint32_t lap;
  };

  void await(std::uint64_t row, std::uint32_t lap, bool inside);

  const Control tickets_;
  std::vector<std::uint64_t> next_, base_;  // for each lane
  std::vector<Pending> pending_;
  std::uint64_t scatters_ = ~std::uint64_t{0};
};

}  // namespace engram
