// Priorities of rows: an index of a store, kept in a sum tree.
//
// Proportional prioritization (Schaul et al., "Prioritized Experience Replay", ICLR 2016, §3.3 and 3.4): a row is drawn with
// P(i) = leaf_i / sum of leaves, leaf = (priority + eps) ^ alpha. The weight that corrects for it,
// (N * P(i)) ^ -beta over the largest such weight, is (leaf_i / smallest positive leaf) ^ -beta: N and the sum cancel.
//
//   memory   PriorityHeader, padded to a page · the tree
//
// The leaves of rows that hold nothing are zero, those of rows that were given priority zero are -0.0. One mutex, held for microseconds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "check.h"
#include "control.h"
#include "index.h"
#include "redo_lock.h"
#include "shared_mutex.h"
#include "store.h"
#include "sum_tree.h"

namespace engram {

/// A priority that is negative, not finite, or too large for the tree.
struct BadPriority : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

struct PriorityHeader {
  char magic[8];  // "engprio\1"
  std::uint64_t leaves;
  std::uint64_t within_buffer;  // 1: new rows get the largest priority that is live, else the largest there ever was
  double eps;
  double alpha, beta;
  double highest;          // largest priority of all updates, 0 before the first
  Word dropped;            // updates that came for rows rewritten since they were drawn
  Word redo;               // 1: leaves or parents are being changed; 2: all are being forgotten
  // Of a change of alpha that is under way, so that it can be finished: 0, or one more than the row whose leaf is next; what
  // the leaves of the last even and odd row were; the power that leaves are raised to, and alpha then.
  Word raising;
  double raised_leaf[2], raised_power, raised_alpha;
  SharedMutex mutex;       // formatted again by the first process to open the memory: it outlives no process
  Word missed;             // 1: the mutex was held for too long to note some rows that were written; 2: nor an emptying
};
static_assert(sizeof(PriorityHeader) <= kPage);

class Priorities : public Index {
 public:
  struct Config {
    double alpha, beta, eps;
    bool within_buffer;
  };

  static std::uint64_t bytes(std::uint64_t rows, bool within_buffer);

  /// Writes the header into zeroed memory of bytes(). Throws std::invalid_argument: a negative or infinite number.
  static void format(std::span<std::byte> memory, std::uint64_t rows, const Config& config);

  /// Frees the mutex, whichever process held it: for a process that attaches to memory that no other one uses,
  /// before it makes a view. What was half done is put in order by the first call.
  static void reset_mutex(std::span<std::byte> memory);

  /// Copies formatted memory that other processes may be changing, and that need not be writable, into other memory of that size: its
  /// mutex is free, and what was half done is put in order by the first call. Throws Stalled: alpha was changed all the time.
  static void copy(std::span<std::byte> from, std::span<std::byte> to);

  /// A view of formatted memory, which must outlive it. `tickets`: the store's words, which say what is live; null: every
  /// row given is (rows in a list). Throws std::invalid_argument: not such memory. Throws Damaged, as any call does that comes upon
  /// what no priorities are; only the words that say so were looked at.
  Priorities(std::span<std::byte> memory, const Control* tickets);

  /// Whether drawing or changing n leaves is over before another thread has been woken. Measured: benchmarks/bench_threads.py.
  static bool brief(std::uint64_t n) { return n <= 256; }

  double alpha() const;
  double beta() const;
  double eps() const { return eps_; }
  bool within_buffer() const { return within_buffer_; }
  double default_priority() const;
  std::uint64_t dropped() const { return header_->dropped.load(std::memory_order_relaxed); }
  std::uint64_t rows() const { return tree_.leaves(); }
  double total() const;
  double leaf(std::uint64_t row) const;

  /// Raises every leaf to the power new / old; from 0, where all leaves were 1, they stay equal. O(rows).
  void set_alpha(double alpha);
  void set_beta(double beta);

  /// The largest priority of all updates, 0 before the first.
  double highest() const;
  void set_highest(double highest);

  /// Counts updates that the caller dropped.
  void drop(std::uint64_t n) { header_->dropped.fetch_add(n, std::memory_order_relaxed); }

  /// The leaves of rows [0, n). `signs`: with the sign that priority zero has, for restore(). Throws std::invalid_argument for
  /// more than there are.
  void copy_leaves(double* out, std::uint64_t n, bool signs) const;
  /// The leaves of rows, without signs. Throws std::out_of_range.
  void copy_leaves_of(const std::int64_t* rows, std::uint64_t n, double* out) const;
  /// Up to n rows of the lowest priority above zero, the lowest first. Returns how many there are. O(n log rows).
  std::uint64_t lowest(std::uint64_t n, std::int64_t* rows) const;
  /// Takes over leaves that are powers `alpha`, bit for bit, checked first (BadPriority). Rows that hold nothing get zero, and live
  /// ones that are not given, as they were written later, the default.
  void restore(const double* leaves, std::uint64_t n, double alpha);

  /// Of rows [begin, end): live ones without a priority get the default one, the leaves of others become zero. A scan of all
  /// rows may go piece by piece, from the first row to the last, while others write: rows that become live meanwhile are
  /// written() in any case. Throws std::out_of_range. Cost: O(end - begin).
  void scan(std::uint64_t begin, std::uint64_t end);

  void written(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0) override;
  /// An edit keeps the priority. But the writer of a row that was edited at once passes it over, as the row is no longer its own:
  /// it gets the default one here, if its leaf can only be zero for that (eps > 0).
  void edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0, std::span<const std::uint64_t> which,
              std::uint64_t scatter) override;
  void emptied() override;

  void lost(const std::int64_t* rows, std::uint64_t n) override;

  /// In the child of a fork, for private memory: a thread of the parent may have been at work here. What it left is put in
  /// order.
  void after_fork() { redo_.after_fork(); }

  /// Leaves of rows that hold nothing become zero, and all parents are recomputed. O(rows).
  void put_in_order();

  /// Back to the default priority.
  void reset(const std::int64_t* rows, std::uint64_t n);

  /// New priorities. Row -1 is passed over. Rows whose ticket number is not `expected` (may be null: any live row) are
  /// dropped and counted. Of a row named twice the last one stays. Everything is checked first: BadPriority or
  /// std::out_of_range, and nothing changed.
  void update(const std::int64_t* rows, const double* priorities, std::uint64_t n, const std::int64_t* expected);
  /// Single precision is raised to its power in single precision, where that holds the result: half the time of an update.
  void update(const std::int64_t* rows, const float* priorities, std::uint64_t n, const std::int64_t* expected);
  /// The same, but entries with a bad priority, or of a row that there is not, are passed over. Returns how many.
  std::uint64_t update_usable(const std::int64_t* rows, const double* priorities, std::uint64_t n, const std::int64_t* expected);
  std::uint64_t update_usable(const std::int64_t* rows, const float* priorities, std::uint64_t n, const std::int64_t* expected);

  /// What weights are over: the weight of the smallest leaf above zero of all rows, or of those that are weighed. `leaves`: leaves
  /// stand in place of weights.
  enum class Over { store, batch, leaves };

  /// Draws n rows, with replacement, with their ticket numbers (-1: just being rewritten) and weights; numbers and weights
  /// may be null. A pure function of (key, attempt, leaves). `masses`, if not null: of the same moment; but for Over::store their
  /// `least` is that of the rows drawn. `among`: draws these rows only, in O(rows among). Throws NothingLive: all are zero.
  void draw(std::uint64_t key, std::uint64_t attempt, std::uint64_t n, std::int64_t* rows, std::int64_t* numbers, double* weights,
            Masses* masses = nullptr, Over over = Over::store, const std::vector<std::int64_t>* among = nullptr) const;

  /// The weights that draws of these rows would have; 0 for those that cannot be drawn. `masses` as for draw().
  void weigh(const std::int64_t* rows, std::uint64_t n, double* weights, Masses* masses = nullptr, Over over = Over::store) const;

  /// draw(), and the rows themselves; rows that move meanwhile are drawn again. With `masses`, which are those of the first draw, all
  /// weights are over its smallest leaf: one above 1 is of a row that was drawn again. Throws Stalled if that does not end.
  /// Over::batch: over the smallest leaf of the whole batch, which is the `least` of the masses.
  void sample(const Store& store, std::uint64_t key, std::uint64_t n, Batch batch, std::int64_t* rows,
              std::int64_t* numbers, double* weights, Masses* masses = nullptr, Over over = Over::store) const;

 private:
  // News that a wait in vain leaves, as the rows are written, and their writer will not come again; and kinds of changes.
  static constexpr std::uint64_t kRows = 1, kEmptying = 2, kSome = 1, kAll = 2;

  RedoLock lock(std::uint64_t news = 0) const {
    return RedoLock(redo_, [this](std::uint64_t, std::uint64_t) { recover(); }, news);
  }
  void recover() const;
  void forget_leaves() const;
  void raise_leaves(std::uint64_t from) const;
  bool is_live(std::uint64_t row) const;
  double leaf_of(double priority, double alpha) const;
  double leaf_of(float priority, double alpha) const;
  enum class Unusable { thrown, passed_over };
  template <class Real>
  std::uint64_t update_all(const std::int64_t* rows, const Real* priorities, std::uint64_t n, const std::int64_t* expected, Unusable unusable);
  double default_leaf() const;
  void set_leaves();
  Masses masses_locked() const;
  void weigh_locked(const std::int64_t* rows, std::uint64_t n, double* weights, Masses* masses, Over over) const;
  void over_largest(double* leaves, std::uint64_t n, Masses* masses, Over over) const;

  double alpha_now() const;  // under the lock, checked
  double beta_now() const;
  double highest_now() const;
  double leaf_now(std::uint64_t row) const;
  void find_among(const std::vector<double>& u, const std::vector<std::int64_t>& among, std::int64_t* found) const;

  PriorityHeader* header_;
  const RedoWords redo_;
  // Copies of what never changes: the memory may be shared.
  double eps_;
  bool within_buffer_;
  mutable SumTree tree_;  // put in order by the first call
  double most_;           // leaves are below: no sum of them overflows
  const Control* tickets_;
  std::vector<std::int64_t> rows_;  // of the call under way
  std::vector<double> leaves_;
};

}  // namespace engram
