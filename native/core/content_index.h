// An index that follows from what the rows of a store say: from their tickets and from some of their fields.
//
// A row is looked at whenever it was written, edited or lost. What a dead process left half done is forgotten, and made again from the
// rows; what a process could not note is found by a look at all rows.
#pragma once

#include <cstdint>
#include <span>

#include "control.h"
#include "index.h"
#include "new_rows.h"
#include "redo_lock.h"

namespace engram {

class ContentIndex : public Index {
 public:
  std::uint64_t rows() const { return rows_; }

  /// For a view of a store whose writers do not tell it: looks at what was appended since the last time, and at what was under way then;
  /// or at all rows after a write by number. O(rows written), or a look at each row.
  void catch_up();

  /// Looks at the rows [begin, end). As Priorities::scan.
  void scan(std::uint64_t begin, std::uint64_t end);
  /// After a recovery of the rows: O(rows).
  void put_in_order();

  void written(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0) override;
  void edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0, std::span<const std::uint64_t> which,
              std::uint64_t scatter) override;
  void lost(const std::int64_t* rows, std::uint64_t n) override;
  void emptied() override;

  /// In a child that was forked off: a thread of the parent may have been amid a call.
  void after_fork();

 protected:
  using Rows = NewRows::Rows;

  ContentIndex(const RedoWords& redo, const Control& tickets, std::uint64_t rows);

  /// `news`: 1: if this wait is in vain, the next holder of the mutex looks at all rows.
  RedoLock lock(std::uint64_t news = 0) {
    return RedoLock(redo_, [this](std::uint64_t redo, std::uint64_t) { redo != 0 ? rebuild() : look_at_all(); }, news);
  }
  /// Takes over what a row says. Within a change.
  virtual void look_at(std::uint64_t row) = 0;
  /// The same of n rows.
  virtual void look_at_each(Rows rows, std::uint64_t n);
  /// Nothing is noted of any row from now on.
  virtual void forget_all() = 0;

  void look_at_these(Rows rows, std::uint64_t n);
  void look_at_all();
  void rebuild();

  const RedoWords redo_;
  const Control tickets_;
  const std::uint64_t rows_;  // a copy: the memory may be shared

 private:
  NewRows new_rows_;  // of catch_up()
};

}  // namespace engram
