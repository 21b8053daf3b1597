#include "priorities.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <new>
#include <string>
#include <thread>

#include "check.h"
#include "random.h"
#include "wait.h"

namespace engram {
namespace {

constexpr char kMagic[8] = {'e', 'n', 'g', 'p', 'r', 'i', 'o', 1};
constexpr std::uint64_t kRedraws = 8;  // of a row that moves each time, before the thread lets others run

#ifdef ENGRAM_WITHOUT_LATE_CHECK  // the tests must fail then: make negative-controls
constexpr bool kLateCheck = false;
#else
constexpr bool kLateCheck = true;
#endif

bool usable(double x) { return std::isfinite(x) && x >= 0; }

// A leaf that somebody made zero is -0.0, and so apart from that of a row whose priority nobody has told yet.
double given(double leaf) { return leaf > 0 ? leaf : -0.0; }
bool is_given(double leaf) { return leaf > 0 || std::signbit(leaf); }

PriorityHeader* header_in(std::span<std::byte> memory) {
  check(memory.size() >= kPage, "priorities in memory without room for their header");
  auto* header = reinterpret_cast<PriorityHeader*>(memory.data());
  check(std::memcmp(header->magic, kMagic, sizeof kMagic) == 0, "not priorities, or of another format");
  return header;
}

// 53 random bits as a number in [0, 1).
double fraction(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

}  // namespace

class Priorities::Lock {
 public:
  static constexpr std::uint64_t kRows = 1, kEmptying = 2;

  /// `news`: what whoever gets it next makes good, if this waits in vain: the rows are written, and their writer will not come
  /// again.
  explicit Lock(const Priorities& self, std::uint64_t news = 0) try : lock_(self.header_->mutex, [] {}) {
    PriorityHeader& header = *self.header_;
    const std::uint64_t left = header.redo.load(std::memory_order_relaxed) | header.missed.load(std::memory_order_relaxed);
    if (left != 0) [[unlikely]] self.mend();
  } catch (const Stalled&) {
    self.header_->missed.fetch_or(news, std::memory_order_acq_rel);
  }

 private:
  SharedLock lock_;
};

class Priorities::Change {
 public:
  static constexpr std::uint64_t kSome = 1, kAll = 2;

  explicit Change(const Priorities& self, std::uint64_t kind = kSome) : redo_(self.header_->redo) {
#ifndef ENGRAM_WITHOUT_REDO  // the tests of death must fail then: make negative-controls
    redo_.store(kind, std::memory_order_relaxed);
#else
    (void)kind;
#endif
    std::atomic_signal_fence(std::memory_order_seq_cst);  // a killed process leaves what it executed, in program order
  }
  /// The tree is as it must be. Without this call whoever locks next puts it in order.
  void done() {
    std::atomic_signal_fence(std::memory_order_seq_cst);
    redo_.store(0, std::memory_order_relaxed);
  }

 private:
  Word& redo_;
};

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

Priorities::Priorities(std::span<std::byte> memory, const Control* tickets)
    : header_(header_in(memory)),
      tree_(memory.subspan(kPage), header_->leaves, header_->within_buffer != 0),
      tickets_(tickets) {
  check(usable(header_->alpha) && usable(header_->beta) && usable(header_->eps) && usable(header_->highest),
        "priorities whose alpha, beta, eps or highest is negative or not finite");
  check(tickets == nullptr || tickets->capacity() == header_->leaves, "priorities of a store of another capacity");
}

double Priorities::alpha() const {
  const Lock guard(*this);
  return header_->alpha;
}

double Priorities::beta() const {
  const Lock guard(*this);
  return header_->beta;
}

double Priorities::total() const {
  const Lock guard(*this);
  return tree_.sum();
}

double Priorities::leaf(std::uint64_t row) const {
  check_row(static_cast<std::int64_t>(row), tree_.leaves());
  const Lock guard(*this);
  return std::abs(tree_.leaf(row));
}

bool Priorities::is_live(std::uint64_t row) const {
  return tickets_ == nullptr || is_committed(tickets_->word(row).load(std::memory_order_acquire));
}

double Priorities::largest_leaf() const { return 1e300 / static_cast<double>(tree_.leaves()); }

double Priorities::leaf_of(double priority) const { return std::pow(priority + header_->eps, header_->alpha); }

double Priorities::leaf_of(float priority) const {
  const float leaf = std::pow(priority + static_cast<float>(header_->eps), static_cast<float>(header_->alpha));
  return std::isnormal(leaf) ? static_cast<double>(leaf) : leaf_of(static_cast<double>(priority));
}

double Priorities::default_leaf() const {
  if (header_->within_buffer != 0 && tree_.max() > 0) return tree_.max();
  return leaf_of(header_->highest > 0 ? header_->highest : 1.0);
}

double Priorities::default_priority() const {
  const Lock guard(*this);
  if (header_->within_buffer != 0 && tree_.max() > 0 && header_->alpha > 0) {
    return std::max(0.0, std::pow(tree_.max(), 1 / header_->alpha) - header_->eps);
  }
  return header_->highest > 0 ? header_->highest : 1.0;
}

void Priorities::set_alpha(double alpha) {
  check(usable(alpha), "alpha must be finite and not negative");
  const Lock guard(*this);
  const double power = header_->alpha > 0 ? alpha / header_->alpha : 1.0;
  const double most = largest_leaf();
  for (std::uint64_t row = 0; row < tree_.leaves(); ++row) {
    check(tree_.leaf(row) == 0 || std::pow(tree_.leaf(row), power) < most, "with that alpha a priority is too large");
  }
  header_->raised_alpha = alpha;
  header_->raised_power = power;
  Change change(*this);
  raise_leaves(0);
  change.done();
}

// Each leaf is noted before it is changed, so that whoever finds this half done knows which ones are raised already.
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
void Priorities::mend() const {
  const std::uint64_t missed = header_->missed.load(std::memory_order_acquire);
  const bool forget = header_->redo.load(std::memory_order_relaxed) == Change::kAll || (missed & Lock::kEmptying) != 0;
  if (forget) forget_leaves();
  if (const std::uint64_t next = header_->raising.load(std::memory_order_relaxed); next != 0) {
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
  const Lock guard(*this);
  Change change(*this);
  mend();
  change.done();
}

void Priorities::set_beta(double beta) {
  check(usable(beta), "beta must be finite and not negative");
  const Lock guard(*this);
  header_->beta = beta;
}

double Priorities::highest() const {
  const Lock guard(*this);
  return header_->highest;
}

void Priorities::copy_leaves(double* out, std::uint64_t n, bool signs) const {
  check(n <= tree_.leaves(), "more leaves than there are rows");
  const Lock guard(*this);
  for (std::uint64_t row = 0; row < n; ++row) out[row] = signs ? tree_.leaf(row) : std::abs(tree_.leaf(row));
}

void Priorities::restore(const double* leaves, std::uint64_t n, double alpha) {
  check(usable(alpha), "alpha must be finite and not negative");
  check(n <= tree_.leaves(), "more leaves than there are rows");
  const double most = largest_leaf();
  for (std::uint64_t row = 0; row < n; ++row) {
    if (!usable(leaves[row]) || !(leaves[row] < most)) {
      throw BadPriority("the leaf of row " + std::to_string(row) + " is " + std::to_string(leaves[row]));
    }
  }
  const Lock guard(*this);
  Change change(*this);
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
  const Lock guard(*this);
  header_->highest = highest;
}

void Priorities::scan(std::uint64_t begin, std::uint64_t end) {
  if (begin > end || end > rows()) throw std::out_of_range("a scan of rows that there are not");
  const Lock guard(*this);
  const double leaf = default_leaf();
  Change change(*this);
  tree_.transform(begin, end, [&](std::uint64_t row, double old) { return !is_live(row) ? 0.0 : is_given(old) ? old : leaf; });
  change.done();
}

void Priorities::after_fork() {
  if (header_->mutex.held()) header_->mutex.format();  // its owner does not exist here
}

void Priorities::emptied() {
  const Lock guard(*this, Lock::kEmptying);
  Change change(*this, Change::kAll);
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
  const double leaf = leaf_of(1.0);
  tree_.transform(0, rows(), [&](std::uint64_t row, double) { return is_live(row) ? leaf : 0.0; });
}

void Priorities::set_leaves() {
  Change change(*this);
  tree_.set(rows_.data(), leaves_.data(), rows_.size());
  change.done();
}

void Priorities::lost(const std::int64_t* rows, std::uint64_t n) {
  check_rows(rows, n, tree_.leaves());
  const Lock guard(*this, Lock::kRows);
  rows_.clear();
  std::copy_if(rows, rows + n, std::back_inserter(rows_),
               [this](std::int64_t row) { return !is_live(static_cast<std::uint64_t>(row)); });
  leaves_.assign(rows_.size(), 0.0);
  set_leaves();
}

void Priorities::written(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0) {
  const Lock guard(*this, Lock::kRows);
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

void Priorities::edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t, std::span<const std::uint64_t>) {
  const Lock guard(*this, Lock::kRows);
  rows_.clear();
  std::copy_if(rows, rows + n, std::back_inserter(rows_), [this](std::int64_t row) {
    return !is_given(tree_.leaf(static_cast<std::uint64_t>(row))) && is_live(static_cast<std::uint64_t>(row));
  });
  if (rows_.empty()) return;
  leaves_.assign(rows_.size(), default_leaf());
  set_leaves();
}

void Priorities::reset(const std::int64_t* rows, std::uint64_t n) {
  for (std::uint64_t i = 0; i < n; ++i) {
    if (rows[i] != -1) check_row(rows[i], tree_.leaves());
  }
  const Lock guard(*this);
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
  update_all(rows, priorities, n, expected);
}

void Priorities::update(const std::int64_t* rows, const float* priorities, std::uint64_t n,
                        const std::int64_t* expected) {
  update_all(rows, priorities, n, expected);
}

template <class Real>
void Priorities::update_all(const std::int64_t* rows, const Real* priorities, std::uint64_t n,
                            const std::int64_t* expected) {
  const Lock guard(*this);
  rows_.clear();
  leaves_.clear();
  const double most = largest_leaf();
  double highest = header_->highest;
  std::uint64_t dropped = 0;
  for (std::uint64_t i = 0; i < n; ++i) {
    if (rows[i] != -1) check_row(rows[i], tree_.leaves());
    const double leaf = usable(priorities[i]) ? leaf_of(priorities[i]) : -1;
    if (!(leaf >= 0 && leaf < most)) {
      throw BadPriority("a priority at position " + std::to_string(i) + " is " + std::to_string(priorities[i]));
    }
    if (rows[i] == -1) continue;
    if (tickets_ != nullptr) {
      const std::uint64_t word = tickets_->word(static_cast<std::uint64_t>(rows[i])).load(std::memory_order_acquire);
      const bool late = expected != nullptr && number_of(word) != static_cast<std::uint64_t>(expected[i]);
      if (!is_committed(word) || (late && kLateCheck)) {
        ++dropped;
        continue;
      }
    }
    rows_.push_back(rows[i]);
    leaves_.push_back(given(leaf));
    highest = std::max(highest, static_cast<double>(priorities[i]));
  }
  header_->highest = highest;
  header_->dropped.fetch_add(dropped, std::memory_order_relaxed);
  set_leaves();
}

void Priorities::draw(std::uint64_t key, std::uint64_t attempt, std::uint64_t n, std::int64_t* rows,
                      std::int64_t* numbers, double* weights) const {
  const Random random(key);
  std::vector<double> u(n);
  for (std::uint64_t i = 0; i < n; ++i) u[i] = fraction(random.bits(i, attempt));
  const Lock guard(*this);
  if (!(tree_.sum() > 0)) throw NothingLive("every priority is zero");
  tree_.find(u.data(), n, rows);
  if (weights != nullptr) weigh_locked(rows, n, weights);
  for (std::uint64_t i = 0; numbers != nullptr && i < n; ++i) {
    const auto row = static_cast<std::uint64_t>(rows[i]);
    const std::uint64_t word = tickets_ == nullptr ? 0 : tickets_->word(row).load(std::memory_order_acquire);
    numbers[i] = is_committed(word) ? static_cast<std::int64_t>(number_of(word)) : -1;
  }
}

void Priorities::weigh_locked(const std::int64_t* rows, std::uint64_t n, double* weights) const {
  const double least = tree_.min_positive(), power = -header_->beta;
  for (std::uint64_t i = 0; i < n; ++i) {
    const double leaf = tree_.leaf(static_cast<std::uint64_t>(rows[i]));
    weights[i] = leaf == 0 ? 0.0 : power == 0 ? 1.0 : std::pow(leaf / least, power);
  }
}

void Priorities::weigh(const std::int64_t* rows, std::uint64_t n, double* weights) const {
  check_rows(rows, n, tree_.leaves());
  const Lock guard(*this);
  weigh_locked(rows, n, weights);
}

void Priorities::sample(const Store& store, std::uint64_t key, std::uint64_t n, Batch batch, std::int64_t* rows,
                        std::int64_t* numbers, double* weights) const {
  draw(key, 0, n, rows, numbers, weights);
  std::vector<std::int64_t> moved = store.gather(rows, n, store.all(), batch, numbers, nullptr);
  const Deadline deadline;
  std::vector<std::int64_t> again, its_number;
  std::vector<double> its_weight;
  std::vector<std::byte*> room(batch.size());
  for (std::uint64_t attempt = 1; !moved.empty(); ++attempt) {
    if (attempt > kRedraws) {
      if (deadline.passed()) throw in_vain("rows moved at every try");
      std::this_thread::yield();
    }
    again.resize(n);
    its_number.resize(n);
    its_weight.resize(n);
    draw(key, attempt, n, again.data(), its_number.data(), its_weight.data());
    std::vector<std::int64_t> still;
    for (const std::int64_t position : moved) {
      const auto i = static_cast<std::uint64_t>(position);
      rows[i] = again[i];
      numbers[i] = its_number[i];
      if (weights != nullptr) weights[i] = its_weight[i];
      for (std::uint64_t f = 0; f < room.size(); ++f) room[f] = batch[f] + i * store.row_bytes(f);
      if (!store.gather(rows + i, 1, store.all(), room, numbers + i, nullptr).empty()) still.push_back(position);
    }
    moved = std::move(still);
    store.control().counters().redraws.fetch_add(1, std::memory_order_relaxed);
  }
}

}  // namespace engram
