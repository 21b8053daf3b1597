#include "priorities.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "check.h"
#include "fence.h"
#include "random.h"
#include "wait.h"

namespace engram {
namespace {

constexpr char kMagic[8] = {'e', 'n', 'g', 'p', 'r', 'i', 'o', 1};
constexpr char kLeaves[] = "priorities: expected leaves that are finite and not negative, of which none is below the smallest";
constexpr std::uint64_t kRedraws = 8;  // of a row that moves each time, before the thread lets others run

#ifdef ENGRAM_WITHOUT_LATE_CHECK  // the tests must fail then: make negative-controls
constexpr bool kLateCheck = false;
#else
constexpr bool kLateCheck = true;
#endif

bool usable(double x) { return std::isfinite(x) && x >= 0; }

// A leaf that was set to zero is -0.0, and so apart from that of a row whose priority was never set.
double given(double leaf) { return leaf > 0 ? leaf : -0.0; }
bool is_given(double leaf) { return leaf > 0 || std::signbit(leaf); }

// Of words that others may write: checked at every look.
double usable_now(const double& word) {
  const double x = copied(word);
  intact(usable(x), "priorities: expected alpha, beta and the highest priority to be finite and not negative");
  return x;
}

bool flag(std::uint64_t word) {
  intact(word <= 1, "priorities: expected 0 or 1 for whether the largest priority is that within the buffer");
  return word == 1;
}

// Whether 0 <= x < most of all, where a zero may have a sign. By their bits, which the compiler compares several at a time.
bool all_below(const double* x, std::uint64_t n, double most) {
  const auto limit = std::bit_cast<std::uint64_t>(most);
  std::uint64_t wrong = 0;  // its highest bit
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto bits = std::bit_cast<std::uint64_t>(x[i]), size = bits << 1 >> 1;
    wrong |= (limit - 1 - size) | (bits & (0 - size));
  }
  return wrong >> 63 == 0;
}

double total_of(const SumTree& tree) {
  const double total = tree.sum();
  intact(usable(total), "priorities: expected a sum that is finite and not negative");
  return total;
}

PriorityHeader* header_in(std::span<std::byte> memory) {
  check(memory.size() >= kPage, "priorities in memory too small for their header");
  auto* header = reinterpret_cast<PriorityHeader*>(memory.data());
  check(std::memcmp(header->magic, kMagic, sizeof kMagic) == 0, "not priorities, or of another format");
  return header;
}

// 53 random bits as a number in [0, 1).
double fraction(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

}  // namespace

std::uint64_t Priorities::bytes(std::uint64_t rows, bool within_buffer) {
  return kPage + SumTree::bytes(rows, within_buffer);
}

void Priorities::format(std::span<std::byte> memory, std::uint64_t rows, const Config& config) {
  check(memory.size() == bytes(rows, config.within_buffer), "priorities in memory of another size");
  check(usable(config.alpha) && usable(config.beta) && usable(config.eps), "alpha, beta and eps must be finite and not negative");
  auto* header = new (memory.data()) PriorityHeader{};
  header->leaves = rows;
  header->within_buffer = config.within_buffer ? 1 : 0;
  header->eps = config.eps;
  header->alpha = config.alpha;
  header->beta = config.beta;
  header->mutex.format();
  std::memcpy(header->magic, kMagic, sizeof kMagic);
}

void Priorities::reset_mutex(std::span<std::byte> memory) { header_in(memory)->mutex.format(); }

// Leaves change one by one, and parents are computed again. A change of alpha changes them all: none may come in between.
void Priorities::copy(std::span<std::byte> from, std::span<std::byte> to) {
  const PriorityHeader* theirs = header_in(from);
  check(from.size() == to.size(), "priorities in memory of another size");
  const Deadline deadline;
  const auto alpha = [&] { return std::pair(theirs->raising.load(std::memory_order_acquire), std::bit_cast<std::uint64_t>(copied(theirs->alpha))); };
  for (auto before = alpha();; before = alpha()) {
    std::memcpy(to.data(), from.data(), from.size());
    fence(std::memory_order_acquire);
    if (alpha() == before) break;
    if (deadline.passed()) throw in_vain("another process has been changing alpha");
  }
  reset_mutex(to);
}

Priorities::Priorities(std::span<std::byte> memory, const Control* tickets)
    : header_(header_in(memory)),
      redo_(RedoWords::of(*header_)),
      eps_(copied(header_->eps)),
      within_buffer_(flag(copied(header_->within_buffer))),
      tree_(memory.subspan(kPage), copied(header_->leaves), within_buffer_),
      most_(1e300 / static_cast<double>(tree_.leaves())),
      tickets_(tickets) {
  check(tickets == nullptr || tickets->capacity() == tree_.leaves(), "priorities of a store of another capacity");
  intact(usable(eps_), "priorities: expected an eps that is finite and not negative");
  alpha_now(), beta_now(), highest_now();
  total_of(tree_);
}

double Priorities::alpha_now() const { return usable_now(header_->alpha); }
double Priorities::beta_now() const { return usable_now(header_->beta); }
double Priorities::highest_now() const { return usable_now(header_->highest); }

double Priorities::leaf_now(std::uint64_t row) const {
  const double leaf = tree_.leaf(row);
  intact(leaf >= 0 && leaf < most_, kLeaves);
  return leaf;
}

double Priorities::alpha() const {
  const RedoLock guard = lock();
  return alpha_now();
}

double Priorities::beta() const {
  const RedoLock guard = lock();
  return beta_now();
}

double Priorities::total() const {
  const RedoLock guard = lock();
  return total_of(tree_);
}

double Priorities::leaf(std::uint64_t row) const {
  check_row(static_cast<std::int64_t>(row), tree_.leaves());
  const RedoLock guard = lock();
  return std::abs(leaf_now(row));
}

// An item of a list is live as long as it has a priority.
bool Priorities::is_live(std::uint64_t row) const {
  return tickets_ == nullptr ? is_given(tree_.leaf(row)) : Control::holds_write(tickets_->held_word(row));
}

double Priorities::leaf_of(double priority, double alpha) const { return std::pow(priority + eps_, alpha); }

double Priorities::leaf_of(float priority, double alpha) const {
  const float leaf = std::pow(priority + static_cast<float>(eps_), static_cast<float>(alpha));
  return std::isnormal(leaf) ? static_cast<double>(leaf) : leaf_of(static_cast<double>(priority), alpha);
}

double Priorities::default_leaf() const {
  const double largest = within_buffer_ ? tree_.max() : 0, highest = highest_now();
  const double leaf = largest > 0 ? largest : leaf_of(highest > 0 ? highest : 1.0, alpha_now());
  intact(leaf >= 0 && leaf < most_, "priorities: expected a highest priority whose power can be summed");
  return leaf;
}

double Priorities::default_priority() const {
  const RedoLock guard = lock();
  const double largest = within_buffer_ ? tree_.max() : 0, highest = highest_now(), alpha = alpha_now();
  intact(!(largest >= most_), kLeaves);
  if (largest > 0 && alpha > 0) return std::max(0.0, std::pow(largest, 1 / alpha) - eps_);
  return highest > 0 ? highest : 1.0;
}

void Priorities::set_alpha(double alpha) {
  check(usable(alpha), "alpha must be finite and not negative");
  const RedoLock guard = lock();
  const double before = alpha_now(), power = before > 0 ? alpha / before : 1.0;
    for (std::uint64_t row = 0; row < tree_.leaves(); ++row) {
    const double leaf = leaf_now(row);
    check(leaf == 0 || std::pow(leaf, power) < most_, "with that alpha a priority is too large");
  }
  header_->raised_alpha = alpha;
  header_->raised_power = power;
  RedoChange change(redo_);
  raise_leaves(0);
  change.done();
}

// Each leaf is noted before it is changed, so that a process that finds this half done knows which ones are raised already.
void Priorities::raise_leaves(std::uint64_t from) const {
  for (std::uint64_t row = from; row < rows(); ++row) {
    const double leaf = tree_.leaf(row);
    header_->raised_leaf[row % 2] = leaf;  // not where that of the row before stands, which `raising` still names
    std::atomic_signal_fence(std::memory_order_seq_cst);
    header_->raising.store(row + 1, std::memory_order_relaxed);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if (leaf > 0) tree_.put(row, std::pow(leaf, header_->raised_power));
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
  header_->alpha = header_->raised_alpha;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  header_->raising.store(0, std::memory_order_relaxed);
  tree_.transform(0, rows(), [](std::uint64_t, double leaf) { return leaf; });
}

// What a holder left half done who died, or was interrupted by an exception; and what others could not tell while he held on.
void Priorities::recover() const {
  const std::uint64_t missed = header_->missed.load(std::memory_order_acquire), redo = header_->redo.load(std::memory_order_relaxed);
  const std::uint64_t next = header_->raising.load(std::memory_order_relaxed);
  intact(missed <= (kRows | kEmptying) && redo <= kAll && next <= rows(),
         "priorities: expected a note of what is left to do, got an unknown one");
  if (redo == kAll || (missed & kEmptying) != 0) forget_leaves();
  if (next != 0) {
    usable_now(header_->raised_power), usable_now(header_->raised_alpha);
    const double leaf = header_->raised_leaf[(next - 1) % 2];
    if (leaf > 0) tree_.put(next - 1, std::pow(leaf, header_->raised_power));
    raise_leaves(next);
  }
  const double usual = default_leaf();
  tree_.transform(0, rows(), [&](std::uint64_t row, double leaf) {
    return !is_live(row) ? 0.0 : missed != 0 && !is_given(leaf) ? usual : leaf;
  });
  std::atomic_signal_fence(std::memory_order_seq_cst);
  header_->redo.store(0, std::memory_order_relaxed);
  if (missed != 0) header_->missed.fetch_and(~missed, std::memory_order_acq_rel);
}

void Priorities::put_in_order() {
  const RedoLock guard = lock();
  RedoChange change(redo_);
  recover();
  change.done();
}

void Priorities::set_beta(double beta) {
  check(usable(beta), "beta must be finite and not negative");
  const RedoLock guard = lock();
  header_->beta = beta;
}

double Priorities::highest() const {
  const RedoLock guard = lock();
  return highest_now();
}

void Priorities::copy_leaves(double* out, std::uint64_t n, bool signs) const {
  check(n <= tree_.leaves(), "more leaves than there are rows");
  const RedoLock guard = lock();
  constexpr std::uint64_t kAtOnce = 1024;
  for (std::uint64_t begin = 0; begin < n; begin += kAtOnce) {
    const std::uint64_t end = std::min(begin + kAtOnce, n);
    for (std::uint64_t row = begin; row < end; ++row) out[row] = tree_.leaf(row);
    intact(all_below(out + begin, end - begin, most_), kLeaves);
    for (std::uint64_t row = begin; row < end && !signs; ++row) out[row] = std::abs(out[row]);
  }
}

// In pieces: who draws or updates waits for one only.
void Priorities::copy_leaves_of(const std::int64_t* rows, std::uint64_t n, double* out) const {
  const OwnRows own(rows, n, tree_.leaves());
  constexpr std::uint64_t kAtOnce = 256;
  for (std::uint64_t begin = 0; begin < n; begin += kAtOnce) {
    const RedoLock guard = lock();
    for (std::uint64_t i = begin; i < std::min(begin + kAtOnce, n); ++i) out[i] = std::abs(leaf_now(static_cast<std::uint64_t>(rows[i])));
  }
}

std::uint64_t Priorities::lowest(std::uint64_t n, std::int64_t* rows) const {
  const RedoLock guard = lock();
  return tree_.smallest(n, rows);
}

void Priorities::restore(const double* leaves, std::uint64_t n, double alpha) {
  check(usable(alpha), "alpha must be finite and not negative");
  check(n <= tree_.leaves(), "more leaves than there are rows");
  const std::vector<double> own(leaves, leaves + n);  // else others could change what was checked
  leaves = own.data();
  for (std::uint64_t row = 0; row < n; ++row) {
    if (!usable(leaves[row]) || !(leaves[row] < most_)) {
      throw BadPriority("the leaf of row " + std::to_string(row) + " is " + std::to_string(leaves[row]));
    }
  }
  const RedoLock guard = lock();
  RedoChange change(redo_);
  header_->alpha = alpha;
  bool unknown = false;  // live rows that were written later than what is restored
  tree_.transform(0, rows(), [&](std::uint64_t row, double) {
    if (!is_live(row)) return 0.0;
    const double leaf = row < n ? leaves[row] : 0.0;
    unknown = unknown || (tickets_ != nullptr && !is_given(leaf));
    return leaf;
  });
  if (unknown) {
    const double usual = default_leaf();
    tree_.transform(0, rows(), [&](std::uint64_t row, double leaf) { return is_live(row) && !is_given(leaf) ? usual : leaf; });
  }
  change.done();
}

void Priorities::set_highest(double highest) {
  check(usable(highest), "the highest priority must be finite and not negative");
  const RedoLock guard = lock();
  header_->highest = highest;
}

void Priorities::scan(std::uint64_t begin, std::uint64_t end) {
  if (begin > end || end > rows()) throw std::out_of_range("a scan of rows that there are not");
  const RedoLock guard = lock();
  const double leaf = default_leaf();
  RedoChange change(redo_);
  tree_.transform(begin, end, [&](std::uint64_t row, double old) { return !is_live(row) ? 0.0 : is_given(old) ? old : leaf; });
  change.done();
}

void Priorities::emptied() {
  const RedoLock guard = lock(kEmptying);
  RedoChange change(redo_, kAll);
  forget_leaves();
  change.done();
}

// But for rows that others have written since the store was emptied: their call may have come before.
void Priorities::forget_leaves() const {
  tree_.clear();
  header_->highest = 0;
  if (tickets_ == nullptr) return;
  bool any = false;  // not by size(): as many rows may be counted as void, that are just being forgotten
  for (std::uint64_t lane = 0; lane < tickets_->lanes() && !any; ++lane) any = tickets_->filled(lane) > 0;
  if (!any) return;
  const double leaf = leaf_of(1.0, alpha_now());
  tree_.transform(0, rows(), [&](std::uint64_t row, double) { return is_live(row) ? leaf : 0.0; });
}

void Priorities::set_leaves() {
  RedoChange change(redo_);
  tree_.set(rows_.data(), leaves_.data(), rows_.size());
  change.done();
}

void Priorities::lost(const std::int64_t* rows, std::uint64_t n) {
  const OwnRows own(rows, n, tree_.leaves());
  const RedoLock guard = lock(kRows);
  rows_.clear();
  std::copy_if(rows, rows + n, std::back_inserter(rows_),
               [this](std::int64_t row) { return tickets_ == nullptr || !is_live(static_cast<std::uint64_t>(row)); });
  leaves_.assign(rows_.size(), 0.0);
  set_leaves();
}

void Priorities::written(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0) {
  const OwnRows own(rows, n, tree_.leaves());
  const RedoLock guard = lock(kRows);
  const double leaf = default_leaf();
  rows_.clear();
  for (std::uint64_t i = 0; i < n; ++i) {
    if (tickets_ != nullptr) {
      const std::uint64_t word = tickets_->word(static_cast<std::uint64_t>(rows[i])).load(std::memory_order_acquire);
      if (word != ticket(t0 + i, State::committed)) continue;
    }
    rows_.push_back(rows[i]);
  }
  leaves_.assign(rows_.size(), leaf);
  set_leaves();
}

void Priorities::edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t, std::span<const std::uint64_t>,
                        std::uint64_t) {
  const OwnRows own(rows, n, tree_.leaves());
  const RedoLock guard = lock(kRows);
  rows_.clear();
  std::copy_if(rows, rows + n, std::back_inserter(rows_), [this](std::int64_t row) {
    return !is_given(tree_.leaf(static_cast<std::uint64_t>(row))) && is_live(static_cast<std::uint64_t>(row));
  });
  if (rows_.empty()) return;
  leaves_.assign(rows_.size(), default_leaf());
  set_leaves();
}

void Priorities::reset(const std::int64_t* rows, std::uint64_t n) {
  const OwnRowsOrNone own(rows, n, tree_.leaves());
  const RedoLock guard = lock();
  rows_.clear();
  for (std::uint64_t i = 0; i < n; ++i) {
    if (rows[i] == -1) continue;
    if (is_live(static_cast<std::uint64_t>(rows[i]))) rows_.push_back(rows[i]);
  }
  leaves_.assign(rows_.size(), default_leaf());
  set_leaves();
}

void Priorities::update(const std::int64_t* rows, const double* priorities, std::uint64_t n,
                        const std::int64_t* expected) {
  update_all(rows, priorities, n, expected, Unusable::thrown);
}

void Priorities::update(const std::int64_t* rows, const float* priorities, std::uint64_t n,
                        const std::int64_t* expected) {
  update_all(rows, priorities, n, expected, Unusable::thrown);
}

std::uint64_t Priorities::update_usable(const std::int64_t* rows, const double* priorities, std::uint64_t n,
                                        const std::int64_t* expected) {
  return update_all(rows, priorities, n, expected, Unusable::passed_over);
}

std::uint64_t Priorities::update_usable(const std::int64_t* rows, const float* priorities, std::uint64_t n,
                                        const std::int64_t* expected) {
  return update_all(rows, priorities, n, expected, Unusable::passed_over);
}

template <class Real>
std::uint64_t Priorities::update_all(const std::int64_t* rows, const Real* priorities, std::uint64_t n,
                                     const std::int64_t* expected, Unusable unusable) {
  const RedoLock guard = lock();
  rows_.clear();
  leaves_.clear();
  const double alpha = alpha_now();
  double highest = highest_now();
  std::uint64_t dropped = 0, refused = 0;
  constexpr std::uint64_t kAhead = 16;  // rows between asking for one and looking at it
  for (std::uint64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      const auto next = static_cast<std::uint64_t>(copied(rows[i + kAhead]));
      if (next < tree_.leaves()) tree_.prefetch(next);
      if (next < tree_.leaves() && tickets_ != nullptr) __builtin_prefetch(&tickets_->word(next));
    }
    const std::int64_t row = copied(rows[i]);
    const Real priority = copied(priorities[i]);
    const bool known = row == -1 || static_cast<std::uint64_t>(row) < tree_.leaves();
    const double leaf = usable(priority) ? leaf_of(priority, alpha) : -1;
    const bool fits = leaf >= 0 && leaf < most_;
    if (unusable == Unusable::passed_over && !(known && fits)) {
      ++refused;
      continue;
    }
    if (!known) check_row(row, tree_.leaves());
    if (!fits) {
      throw BadPriority("a priority at position " + std::to_string(i) + " is " + std::to_string(priority));
    }
    if (row == -1) continue;
    if (tickets_ != nullptr) {
      const auto at = static_cast<std::uint64_t>(row);
      const std::uint64_t word = tickets_->held_word(at);
      const bool late = expected != nullptr && tickets_->write_of(at, word) != static_cast<std::uint64_t>(expected[i]);
      if (!Control::holds_write(word) || (late && kLateCheck)) {
        ++dropped;
        continue;
      }
    }
    rows_.push_back(row);
    leaves_.push_back(given(leaf));
    highest = std::max(highest, static_cast<double>(priority));
  }
  header_->highest = highest;
  header_->dropped.fetch_add(dropped, std::memory_order_relaxed);
  set_leaves();
  return refused;
}

void Priorities::draw(std::uint64_t key, std::uint64_t attempt, std::uint64_t n, std::int64_t* rows,
                      std::int64_t* numbers, double* weights, Masses* masses, Over over, const std::vector<std::int64_t>* among) const {
  const Random random(key);
  std::vector<double> u(n);
  std::vector<std::int64_t> found(n);
  for (std::uint64_t i = 0; i < n; ++i) u[i] = fraction(random.bits(i, attempt));
  const RedoLock guard = lock();
  if (total_of(tree_) == 0) {
    if (tickets_ != nullptr && tickets_->size() == 0) throw NothingLive(kEmptyStore);
    throw NothingLive("sample: every priority is zero", "Add data, or give rows a priority above zero");
  }
  among == nullptr ? tree_.find(u.data(), n, found.data()) : find_among(u, *among, found.data());
  std::copy(found.begin(), found.end(), rows);
  if (masses != nullptr) *masses = masses_locked();
  if (weights != nullptr) weigh_locked(found.data(), n, weights, masses, over);
  for (std::uint64_t i = 0; numbers != nullptr && i < n; ++i) {
    const auto row = static_cast<std::uint64_t>(found[i]);
    const std::uint64_t word = tickets_ == nullptr ? 0 : tickets_->word(row).load(std::memory_order_acquire);
    numbers[i] = is_committed(word) ? static_cast<std::int64_t>(number_of(word)) : -1;
  }
}

// As find() of the tree, with the leaves of some rows.
void Priorities::find_among(const std::vector<double>& u, const std::vector<std::int64_t>& among, std::int64_t* found) const {
  check_rows(among.data(), among.size(), tree_.leaves());
  std::vector<double> sums;
  std::vector<std::int64_t> drawable;  // of which each sum is
  double total = 0;
  for (const std::int64_t row : among) {
    const double leaf = std::abs(leaf_now(static_cast<std::uint64_t>(row)));
    if (leaf == 0) continue;
    sums.push_back(total += leaf);
    drawable.push_back(row);
  }
  if (drawable.empty()) throw NothingLive("sample: every priority is zero", "Add data, or give rows a priority above zero");
  for (std::size_t i = 0; i < u.size(); ++i) {
    const auto at = std::upper_bound(sums.begin(), sums.end(), u[i] * total) - sums.begin();
    found[i] = drawable[std::min(static_cast<std::size_t>(at), drawable.size() - 1)];  // where u * total is rounded up
  }
}

Masses Priorities::masses_locked() const {
  return {total_of(tree_), tree_.min_positive(), tickets_ == nullptr ? 0 : tickets_->size()};
}

void Priorities::weigh_locked(const std::int64_t* rows, std::uint64_t n, double* weights, Masses* masses, Over over) const {
  if (over != Over::store) {
    for (std::uint64_t i = 0; i < n; ++i) weights[i] = tree_.leaf(static_cast<std::uint64_t>(rows[i]));
    return over_largest(weights, n, masses, over);
  }
  const double least = tree_.min_positive(), power = -beta_now();
  bool sound = least > 0 || total_of(tree_) == 0;
  for (std::uint64_t i = 0; i < n; ++i) {
    const double leaf = tree_.leaf(static_cast<std::uint64_t>(rows[i]));
    weights[i] = leaf == 0 ? 0.0 : power == 0 ? 1.0 : std::pow(leaf / least, power);
    sound &= weights[i] <= 1;
  }
  intact(sound, kLeaves);
}

// Leaves become weights over the largest of them, unless leaves are asked for. `masses`: takes the smallest of those above zero.
void Priorities::over_largest(double* leaves, std::uint64_t n, Masses* masses, Over over) const {
  double least = std::numeric_limits<double>::infinity();
  bool sound = true;
  for (std::uint64_t i = 0; i < n; ++i) {
    sound &= leaves[i] >= 0 && std::isfinite(leaves[i]);
    if (leaves[i] > 0) least = std::min(least, leaves[i]);
  }
  intact(sound, kLeaves);
  if (masses != nullptr) masses->least = std::isfinite(least) ? least : 0;
  if (over == Over::leaves) return;
  const double power = -beta_now();
  for (std::uint64_t i = 0; i < n; ++i) {
    leaves[i] = leaves[i] == 0 ? 0.0 : power == 0 ? 1.0 : std::pow(leaves[i] / least, power);
  }
}

void Priorities::weigh(const std::int64_t* rows, std::uint64_t n, double* weights, Masses* masses, Over over) const {
  const OwnRows own(rows, n, tree_.leaves());
  const RedoLock guard = lock();
  if (masses != nullptr) *masses = masses_locked();
  weigh_locked(rows, n, weights, masses, over);
}

void Priorities::sample(const Store& store, std::uint64_t key, std::uint64_t n, Batch batch, std::int64_t* rows,
                        std::int64_t* numbers, double* weights, Masses* masses, Over over) const {
  const Over first = over == Over::batch ? Over::leaves : over;  // what is drawn again is of the batch, too
  draw(key, 0, n, rows, numbers, weights, masses, first);
  std::vector<std::int64_t> moved = store.gather(rows, n, store.all().first(batch.size()), batch, numbers, nullptr);
  const Deadline deadline;
  std::vector<std::int64_t> again, its_number;
  std::vector<double> its_weight;
  std::vector<std::byte*> memory(batch.size());
  for (std::uint64_t attempt = 1; !moved.empty(); ++attempt) {
    if (store.control().size() == 0) throw NothingLive(kEmptyStore);  // a copy of the priorities is not
    if (attempt > kRedraws) {
      if (deadline.passed()) throw in_vain("rows moved at every try");
      let_go();
      std::this_thread::yield();
    }
    again.resize(n);
    its_number.resize(n);
    its_weight.resize(n);
    Masses now;
    draw(key, attempt, n, again.data(), its_number.data(), its_weight.data(), masses == nullptr ? nullptr : &now, first);
    const double scale = masses == nullptr || over != Over::store ? 1.0 : std::pow(masses->least / now.least, beta());
    std::vector<std::int64_t> still;
    for (const std::int64_t position : moved) {
      const auto i = static_cast<std::uint64_t>(position);
      rows[i] = again[i];
      numbers[i] = its_number[i];
      if (weights != nullptr) weights[i] = its_weight[i] * scale;
      for (std::uint64_t f = 0; f < memory.size(); ++f) memory[f] = batch[f] + i * store.row_bytes(f);
      if (!store.gather(rows + i, 1, store.all().first(batch.size()), memory, numbers + i, nullptr).empty()) still.push_back(position);
    }
    moved = std::move(still);
    store.control().count_redraws(1);
  }
  if (over == Over::batch && weights != nullptr) over_largest(weights, n, masses, over);
}

}  // namespace engram
