// Which rows may be drawn: an index of a store, for draws that take a row a limited number of times, or only rows that follow rules.
//
//   memory   ConsumptionHeader, padded to a page · numbers u64[rows] · the set of drawable rows · that of used-up ones · counts u32[rows]
//            · where there are rules, from a multiple of 8 bytes on: the rows that follow them, a VersionHeap
//
// A row can be drawn while it is live, was drawn less often than the limit says, and follows the rules: the fields that are to be ready
// hold no NaN, and its version is not below the floor, which draws name.
//
// A count belongs to what a row holds: to the number of the write that stands beside it, which edits leave as it is. A row that holds
// another write was written just now, and is not drawn before the index has been told of that. So no count is taken for another's.
//
// The sets follow from numbers and counts: who finds that a change was left half done makes them again. One mutex, held for
// microseconds.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "control.h"
#include "index.h"
#include "new_rows.h"
#include "others_uses.h"
#include "redo_lock.h"
#include "row_rules.h"
#include "row_set.h"
#include "shared_mutex.h"

namespace engram {

struct ConsumptionHeader {
  char magic[8];  // "engcons\1"; where there are rules, \2
  std::uint64_t rows;
  std::uint64_t most;    // draws of a row; 0, where there are rules: any number, and none is counted
  Word drawable, used;   // sizes of the sets, for looks without the mutex
  Word reading;          // rows that were drawn for the last time and are not read yet: in neither set
  Word redo;             // 1: numbers, counts and sets are being changed
  Word missed;           // 1: the mutex was held for too long to note what was written
  SharedMutex mutex;
  Word deaths;           // of processes, which may have been reading
  std::uint64_t ready_fields, dated;  // how many; 1: rows have versions
  RuleField ready[RowRules::kReady], version;
  double floor;                   // the oldest version that is drawn
  std::uint64_t following;        // rows in the heap
  Word used_up, expired, evicted, starved;  // rows that were used up, that became too old, and that were overwritten before either; and
                                            // draws that found none
  Word dropped;                             // rows that were removed, or lost with their writer, before they were used up
};
static_assert(sizeof(ConsumptionHeader) <= kPage);

class Consumption : public Index {
 public:
  /// Throws std::invalid_argument: more rows than a set can have, or rules that no rows can follow.
  static std::uint64_t bytes(std::uint64_t rows, const RowRules& rules = {});

  /// Writes the header into zeroed memory of bytes(). `most`: draws of a row, at least one; with rules also 0, which is any number.
  static void format(std::span<std::byte> memory, std::uint64_t rows, std::uint64_t most, const RowRules& rules = {});
  static RowRules rules_of(std::span<std::byte> memory);

  /// As Priorities::reset_mutex.
  static void reset_mutex(std::span<std::byte> memory);

  /// Copies formatted memory that other processes may be changing into other memory of that size. Its mutex is free, and its sets
  /// are made again by the first call.
  static void copy(std::span<std::byte> from, std::span<std::byte> to);

  /// A view of formatted memory, which must outlive it. `tickets`: the store's words; null: rows of a list, which are live as long as
  /// they have a number. `fields`: those of the rules. Throws std::invalid_argument: not such memory.
  Consumption(std::span<std::byte> memory, const Control* tickets, std::span<const Field> fields = {});

  /// Of a view that only reads: draws of others, which they note in their memory of the same index, count beside those of this view. It
  /// must outlive it; it may be of other rules, and is left alone then. `copied`: this index began as a copy of it. Throws
  /// std::invalid_argument: no such memory.
  void follow(std::span<std::byte> theirs, bool copied);
  /// Of a view that only reads: looks at rows that are new, as ContentIndex::catch_up, and at what others have drawn. Others know it.
  /// O(rows written), and a look at a word per row.
  void catch_up();
  bool follows_writers() const { return new_rows_.has_value(); }

  std::uint64_t most() const { return most_; }
  std::uint64_t rows() const { return rows_; }
  const RowRules& rules() const { return rules_; }
  /// Of `floor`: it stays as it is.
  static constexpr double kSame = std::numeric_limits<double>::quiet_NaN();
  /// Rows of versions below `floor` cannot be drawn from now on. O(log rows) for each; a lower floor than before: O(rows).
  void set_floor(double floor);

  /// What was counted since there is this index, by those who write to the store; without the mutex: rows that were used up, that became
  /// too old, that were overwritten before either, and that were removed or lost; and draws that found none.
  struct Totals {
    std::uint64_t used, expired, evicted, dropped, starved;
  };
  Totals totals() const;
  void count_starved() { header_->starved.fetch_add(1, std::memory_order_relaxed); }
  /// Rows that can be drawn, and rows that are used up: looked at without the mutex.
  std::uint64_t drawable() const { return header_->drawable.load(std::memory_order_acquire); }
  std::uint64_t used() const { return header_->used.load(std::memory_order_acquire); }

  /// Draws up to n rows, each once, uniformly among those that can be drawn; they are counted as drawn when this returns. Puts the
  /// rows, and the ticket numbers that they must still have when they are read. Fewer than n where there are no more; those that are
  /// just being written are passed over. A pure function of the key and of which rows can be drawn. O(n log rows).
  std::uint64_t claim(std::uint64_t key, std::uint64_t n, std::int64_t* rows, std::int64_t* numbers);

  /// Of n rows that someone else has drawn, under these ticket numbers: takes the first `most` that can be drawn, one after another, and
  /// counts them as claim() does. Puts their places; returns how many.
  std::uint64_t admit(const std::int64_t* rows, const std::int64_t* numbers, std::uint64_t n, std::uint64_t most, std::int64_t* places);
  /// The rows that can be drawn, ascending. O(rows / 64).
  std::vector<std::int64_t> drawable_rows();

  /// What claim or admit returned was read, or is not to be: rows that are used up are counted as such from now on, also for the limits of the
  /// store, and may be written over. If
  /// the process dies before, the ring comes to them.
  void were_read(const std::int64_t* rows, const std::int64_t* numbers, std::uint64_t n);
  /// What claim returned was not read: the rows count as drawn once less, and those that were used up can be drawn again.
  void take_back(const std::int64_t* rows, const std::int64_t* numbers, std::uint64_t n);
  /// The first n live rows that are used up, or fewer; nothing changes. For a writer that keeps others from choosing rows meanwhile.
  std::uint64_t used_rows(std::uint64_t n, std::int64_t* rows);

  /// How often each of the rows [0, n) was drawn. Throws std::invalid_argument for more than there are.
  void copy_counts(std::int32_t* out, std::uint64_t n);
  /// Live rows [0, n) were drawn so often, and others not yet.
  void restore(const std::int32_t* counts, std::uint64_t n);

  /// Live rows count as not drawn yet. Row -1 is passed over. Throws std::out_of_range, and nothing changed.
  void reset(const std::int64_t* rows, std::uint64_t n);

  /// Of rows [begin, end): live ones that are not known become drawable. As Priorities::scan.
  void scan(std::uint64_t begin, std::uint64_t end);
  /// After a recovery of the rows: what is noted of them is compared with their tickets. O(rows).
  void put_in_order();

  void written(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0) override;
  /// A row keeps its count.
  void edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0, std::span<const std::uint64_t> which,
              std::uint64_t scatter) override;
  void lost(const std::int64_t* rows, std::uint64_t n) override;
  void evicted(const std::int64_t* rows, std::uint64_t n) override;
  void emptied() override;
  void count_again(bool died) override;

  void after_fork();

 private:
  /// `news`: 1 if the next holder of the mutex must look at all rows in case this one waits in vain.
  RedoLock lock(std::uint64_t news = 0) {  // who wrote what is not known yet will tell it, but for those who could not
    return RedoLock(redo_, [this](std::uint64_t, std::uint64_t missed) { missed != 0 ? look_at_all() : make_sets(); }, news);
  }
  /// Around every change, noted in the memory; the limits of the store are told of it.
  class Change;

  // Beside a count, which the lower 24 bits are: how many readers have the row, in 7 bits. (Earlier versions set the highest bit.)
  static constexpr std::uint32_t kCount = (std::uint32_t{1} << 24) - 1, kReader = kCount + 1, kReaders = 127 * kReader;

  std::uint64_t word_of(std::uint64_t row) const;
  std::uint64_t write_of(std::uint64_t row, std::uint64_t word) const;
  bool is_known(std::uint64_t row, std::uint64_t word) const;
  bool is_of(std::uint64_t row, std::int64_t drawn) const;
  bool has_draws_left(std::uint64_t row) const { return most_ == 0 || count_of(row) < most_; }
  void count(std::uint64_t row);
  void judge(std::uint64_t row);
  bool is_waited_for(std::uint64_t row) const;
  void count_evicted(std::uint64_t row, std::uint64_t number);
  void forget(const std::int64_t* rows, std::uint64_t n, Word& counter);
  std::uint32_t count_of(std::uint64_t row) const { return counts_[row] & kCount; }
  void note(std::uint64_t row, std::uint64_t number, std::uint32_t count);
  void place(std::uint64_t row);
  void look_at(std::uint64_t row);
  void look_at_all();
  void scan_each(NewRows::Rows rows, std::uint64_t n);
  void end_reading();
  bool is_being_read(std::uint64_t row) const { return numbers_[row] != 0 && !has_draws_left(row) && !used_.has(row); }
  void no_longer_read(std::uint64_t row);
  std::uint64_t in_flight() const { return drawable_.size() + header_->reading.load(std::memory_order_relaxed); }
  void tell_limits(std::uint64_t before) const;
  void note_sizes();
  void make_sets();

  ConsumptionHeader* header_;
  const RedoWords redo_;
  std::uint64_t rows_, most_;  // copies: the memory may be shared
  std::uint64_t* numbers_;     // of writes; 0: the row holds nothing
  std::uint32_t* counts_;
  RowSet drawable_, used_;
  const RowRules rules_;
  RuleReader reader_;
  VersionHeap following_;      // rows that follow the rules, whether they are used up or not
  const Control* tickets_;
  std::optional<NewRows> new_rows_;  // of a view that only reads
  const ConsumptionHeader* totals_;  // that of others, if it follows them
  std::optional<OthersUses> others_;
  std::vector<std::uint64_t> of_list_;    // tickets of a list's rows
  std::vector<std::uint64_t> looked_at_;  // of the call under way
  /// Rows that were being read when a death was looked at first, with their numbers, and when that was.
  struct Read {
    std::uint64_t row, number;
  };
  std::vector<Read> read_;
  std::uint64_t deaths_ = 0, ended_ = 0;  // that read_ is of, and of which the readers were forgotten
  std::chrono::steady_clock::time_point read_at_;
};

}  // namespace engram
