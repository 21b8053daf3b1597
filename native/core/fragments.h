// Trajectories whose steps are interleaved in the store: a table from (trajectory, step), two integers of each row, to rows.
//
// Steps of a trajectory that follow one another without a gap are a run, which a stored end ends, too. Rows are found by a hash of
// both integers. The first and the last row of a run know each other, so a step that is added or taken away at an end of a run costs
// O(1); one that is taken away inside costs the distance to the nearer end. The first rows of all runs are a set, of which a draw
// takes the k-th.
//
// Each process has its own table. Its own writes tell it; what other processes append is found behind the last position that is
// known, and after one of their writes by number all rows are looked at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <stdexcept>
#include <vector>

#include "control.h"
#include "gather.h"
#include "index.h"
#include "row_set.h"
#include "trajectories.h"

namespace engram {

/// A field of one integer per row.
struct IntegerField {
  Field field;
  bool is_signed;
};

class Fragments final : public Index {
 public:
  /// `window`: runs of at least so many steps are found at once. `ends`: fields that end a trajectory, without ids. Throws
  /// std::invalid_argument: fields of no integers, or 2^32 rows.
  Fragments(Control control, IntegerField trajectory, IntegerField step, std::uint64_t window, Boundaries ends = {});

  void written(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0) override;
  void rewritten(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0, std::uint64_t scatter) override;
  void edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0, std::span<const std::uint64_t> which,
              std::uint64_t scatter) override;
  void lost(const std::int64_t* rows, std::uint64_t n) override;
  void emptied() override;

  /// Looks at what other processes wrote. O(rows written), or all rows after one of their writes by number.
  void catch_up();
  void count(std::uint64_t window);
  void after_fork();

  /// Draws n windows with replacement: a run that gives one, uniformly, then one of its windows. Empty: there is none. Throws
  /// std::runtime_error: two rows are the same step of a trajectory.
  Drawn draw(std::uint64_t key, std::uint64_t n, const WindowSpec& spec);
  std::uint64_t windows(const WindowSpec& spec);
  /// Runs that give a window.
  std::uint64_t choices(const WindowSpec& spec);
  /// Runs, and the longest of them.
  Census census();

 private:
  using Id = std::uint32_t;  // of a row: its number + 1; 0 is none

  struct Node {
    std::int64_t trajectory, step;
    std::uint64_t number;  // of the row's ticket; 0: the row is not in the table
    Id next;               // in its bucket
    Id other;              // of the first row of a run the last one, and the other way round
    bool ends, begins;     // a trajectory, as its fields say
  };
  struct Waiting {
    std::uint64_t lane, position;
  };

  Node& node(Id id) { return nodes_[id - 1]; }
  const Node& node(Id id) const { return nodes_[id - 1]; }
  std::size_t bucket_of(std::int64_t trajectory, std::int64_t step) const;
  Id find(std::int64_t trajectory, std::int64_t step) const;
  Id before(Id id) const;
  Id after(Id id) const;
  std::uint64_t length(Id first) const;
  void add_run(Id first, Id last);
  void drop_run(Id first);
  void join(Id id);
  void leave(Id id);
  void insert(std::uint64_t row, const Node& read);
  void forget(std::uint64_t row);
  void look_at(std::uint64_t row);
  void look_at_all();
  void look_at_these(const std::int64_t* rows, std::uint64_t n, std::uint64_t scatter);
  void look_for_new();
  bool is_over(const Waiting& place);
  void check_unique();
  bool is_at_rest(Id id) const;
  std::uint64_t usable(Id first, const WindowSpec& spec) const;
  void add_rows(Drawn& drawn, Id first, const Window& window, const WindowSpec& spec) const;
  std::unique_lock<std::mutex> locked();

  Control control_;
  IntegerField trajectory_, step_;
  Boundaries ends_;
  std::uint64_t window_;
  std::vector<Node> nodes_;
  std::vector<Id> buckets_;
  std::vector<bool> extra_;   // a row that is the same step as one in the table
  std::uint64_t extras_ = 0;
  std::vector<std::uint64_t> firsts_memory_, long_memory_;
  RowSet firsts_, long_;      // of runs; of those of at least window_ steps
  std::vector<std::uint64_t> next_, base_;  // of each lane: the position that was not looked at yet
  std::vector<Waiting> waiting_;            // positions before it that were not written then
  std::uint64_t scatters_ = ~std::uint64_t{0};
  std::mutex mutex_;
};

}  // namespace engram
