#include "groups.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <stdexcept>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "best_rows.h"
#include "check.h"
#include "fence.h"
#include "reals.h"
#include "wait.h"

namespace engram {
namespace {

constexpr char kMagic[8] = {'e', 'n', 'g', 'g', 'r', 'o', 'u', '\2'}, kEarlierMagic[8] = {'e', 'n', 'g', 'g', 'r', 'o', 'u', '\1'};
constexpr int kLooks = 16;             // at rows that changed and were not told yet, per draw

std::uint64_t whole_words(std::uint64_t bytes) { return (bytes + 7) / 8 * 8; }

bool is_earlier(const GroupsHeader& header) { return std::memcmp(header.magic, kEarlierMagic, sizeof kEarlierMagic) == 0; }

// What the parts take that memory of every version has.
std::uint64_t earlier_bytes(std::uint64_t rows, std::uint64_t key_bytes) {
  check(rows > 0 && rows < kMostTreeRows, "groups: expected a store of 1 to 2^32 - 2 rows");
  check(key_bytes > 0 && key_bytes <= Groups::kMostKeyBytes, "groups: expected a key of 1 to 1024 bytes");
  return kPage + rows * (sizeof(std::uint64_t) + whole_words(key_bytes)) + RowSet::bytes(rows) +
         rows * (4 * sizeof(std::uint32_t) + 2 * sizeof(std::uint32_t)) + whole_words(rows * sizeof(std::uint32_t));
}

std::uint64_t uses_bytes(std::uint64_t rows) { return rows * sizeof(std::uint64_t) + whole_words(rows * sizeof(std::uint32_t)); }
std::uint64_t order_bytes(std::uint64_t rows) { return rows * (sizeof(std::uint64_t) + 4 * sizeof(std::uint32_t)) + whole_words(rows * sizeof(std::uint32_t)); }

GroupsHeader* begin_of(std::span<std::byte> memory) {
  check(memory.size() >= kPage, "groups in memory too small for their header");
  auto* header = reinterpret_cast<GroupsHeader*>(memory.data());
  check(std::memcmp(header->magic, kMagic, sizeof kMagic) == 0 || is_earlier(*header), "no groups, or of another format");
  return header;
}

GroupsHeader* header_in(std::span<std::byte> memory) {
  GroupsHeader* header = begin_of(memory);
  const std::uint64_t rows = copied(header->rows);
  const std::uint64_t size =
      is_earlier(*header) ? earlier_bytes(rows, copied(header->key_bytes)) : Groups::bytes(rows, Groups::policy_of(memory));
  check(memory.size() == size, "groups in memory of another size");
  return header;
}

/// Different numbers below n, in random order. Cost: O(1) each.
class Shuffled {
 public:
  Shuffled(const Random& random, std::uint64_t n, std::uint64_t stream) : random_(random), n_(n), stream_(stream) {
    if (n <= kFew) std::iota(few_, few_ + n, std::uint64_t{0});
  }

  bool done() const { return drawn_ == n_; }
  std::uint64_t next() {
    const std::uint64_t i = drawn_++, j = i + random_.below(n_ - i, i, stream_);
    if (n_ <= kFew) {
      std::swap(few_[i], few_[j]);
      return few_[i];
    }
    const std::uint64_t mine = at(i), chosen = at(j);
    if (i != j) moved_[j] = mine;
    return chosen;
  }

 private:
  static constexpr std::uint64_t kFew = 64;

  std::uint64_t at(std::uint64_t i) const {
    const auto found = moved_.find(i);
    return found == moved_.end() ? i : found->second;
  }

  const Random& random_;
  std::uint64_t n_, stream_, drawn_ = 0, few_[kFew];
  std::unordered_map<std::uint64_t, std::uint64_t> moved_;
};

}  // namespace

std::uint64_t Groups::bytes(std::uint64_t rows, const GroupsPolicy& policy) {
  policy.rules().check();
  check(policy.most < kMostUses, "groups: expected fewer than 2^24 uses");
  check(policy.order <= GroupsOrder::spread && (policy.order == GroupsOrder::none || policy.least > 0), "groups: expected an order of groups");
  check(policy.order != GroupsOrder::spread || number_as(policy.reward) != nullptr, "groups: expected rewards that are real numbers");
  return earlier_bytes(rows, policy.key_bytes) + GroupsHeader::kComplete * RowSet::bytes(rows) + (policy.most > 0 ? uses_bytes(rows) : 0) +
         (policy.dated ? VersionHeap::bytes(rows) : 0) + (policy.order != GroupsOrder::none ? order_bytes(rows) : 0);
}

void Groups::format(std::span<std::byte> memory, std::uint64_t rows, const GroupsPolicy& policy) {
  check(memory.size() == bytes(rows, policy), "groups in memory of another size");
  auto* header = new (memory.data()) GroupsHeader{};
  header->rows = rows;
  header->field = policy.field;
  header->key_bytes = policy.key_bytes;
  header->most = policy.most;
  header->ready_fields = policy.ready.size();
  std::copy(policy.ready.begin(), policy.ready.end(), header->ready);
  header->dated = policy.dated ? 1 : 0;
  header->version = policy.version;
  header->staleness = policy.staleness;
  header->order = static_cast<std::uint64_t>(policy.order);
  header->least = policy.least;
  header->reward = policy.reward;
  header->floor = -std::numeric_limits<double>::infinity();
  header->mutex.format();
  std::memcpy(header->magic, kMagic, sizeof kMagic);
}

void Groups::reset_mutex(std::span<std::byte> memory) { header_in(memory)->mutex.format(); }

void Groups::copy(std::span<std::byte> from, std::span<std::byte> to) {
  const GroupsHeader* theirs = header_in(from);
  check(from.size() == to.size(), "groups in memory of another size");
  const GroupsPolicy policy = policy_of(from);
  const std::uint64_t rows = copied(theirs->rows);
  if (is_earlier(*theirs)) {
    auto* header = new (to.data()) GroupsHeader{};
    header->rows = rows;
    header->field = policy.field;
    header->key_bytes = policy.key_bytes;
    header->mutex.format();
    std::memcpy(header->magic, kEarlierMagic, sizeof kEarlierMagic);
    return;
  }
  format(to, rows, policy);
  if (policy.most == 0) return;
  const std::uint64_t at = earlier_bytes(rows, policy.key_bytes) + GroupsHeader::kComplete * RowSet::bytes(rows);
  copy_from_shared(to.data() + at, from.data() + at, uses_bytes(rows));
}

GroupsPolicy Groups::policy_of(std::span<std::byte> memory) {
  const GroupsHeader* header = begin_of(memory);
  GroupsPolicy policy{.field = copied(header->field), .key_bytes = copied(header->key_bytes)};
  if (is_earlier(*header)) return policy;
  const std::uint64_t ready = copied(header->ready_fields);
  check(ready <= GroupsHeader::kReady, "groups: expected at most 16 fields that are to be ready");
  policy.ready.assign(header->ready, header->ready + ready);
  policy.most = copied(header->most);
  policy.dated = copied(header->dated) != 0;
  if (policy.dated) policy.version = header->version;
  policy.staleness = copied(header->staleness);
  policy.order = static_cast<GroupsOrder>(copied(header->order));
  policy.least = copied(header->least);
  policy.reward = header->reward;
  return policy;
}

Groups::Groups(std::span<std::byte> memory, const Control& tickets, std::vector<Field> fields, const RaggedGroup* text)
    : ContentIndex(RedoWords::of(*header_in(memory)), tickets, copied(header_in(memory)->rows)),
      header_(header_in(memory)),
      policy_(policy_of(memory)),
      key_bytes_(policy_.key_bytes),
      key_stride_(whole_words(key_bytes_)),
      numbers_(reinterpret_cast<std::uint64_t*>(memory.data() + kPage)),
      keys_(memory.data() + kPage + rows_ * sizeof(std::uint64_t)),
      roots_(keys_ + rows_ * key_stride_, rows_),
      trees_{reinterpret_cast<Node*>(keys_ + rows_ * key_stride_ + RowSet::bytes(rows_)), numbers_, rows_},
      groups_(reinterpret_cast<Group*>(trees_.nodes + rows_)),
      buckets_(reinterpret_cast<Id*>(groups_ + rows_)),
      totals_(header_),
      fields_(std::move(fields)),
      looked_at_(key_stride_) {
  const bool by_spread = policy_.order == GroupsOrder::spread;
  check(fields_.size() == 1 + policy_.ready.size() + (policy_.dated ? 1 : 0) + (by_spread ? 1 : 0), "groups with other fields than theirs");
  for (const Field& field : fields_) check(field.data != nullptr, "groups by a field that is not there");
  key_ = RowKey(fields_[0], key_bytes_, text);
  const RowRules rules = policy_.rules();
  reader_ = RuleReader(rules, std::span(fields_).subspan(1, rules.fields().size()));
  if (is_earlier(*header_)) return;
  std::byte* at = memory.data() + earlier_bytes(rows_, key_bytes_);
  for (std::uint64_t i = 0; i < GroupsHeader::kComplete; ++i, at += RowSet::bytes(rows_)) complete_.emplace_back(at, rows_);
  if (counts()) {
    writes_ = reinterpret_cast<std::uint64_t*>(at);
    uses_ = reinterpret_cast<std::uint32_t*>(writes_ + rows_);
    at += uses_bytes(rows_);
  }
  if (policy_.dated) {
    versions_ = VersionHeap(at, rows_, header_->dated_rows);
    at += VersionHeap::bytes(rows_);
  }
  if (policy_.order != GroupsOrder::none) {
    order_ = reinterpret_cast<std::uint64_t*>(at);
    in_order_ = {reinterpret_cast<Node*>(order_ + rows_), order_, rows_};
    newest_ = reinterpret_cast<Id*>(in_order_.nodes + rows_);
  }
}

void Groups::follow(std::span<std::byte> theirs, bool copied) {
  const GroupsHeader* header = header_in(theirs);
  const GroupsPolicy policy = policy_of(theirs);
  if (is_earlier(*header) || engram::copied(header->rows) != rows_ || policy.field != policy_.field) return;
  if (policy.key_bytes != key_bytes_ || policy.most != policy_.most || policy.dated != policy_.dated) return;
  if (policy.rules().fields() != policy_.rules().fields()) return;
  const RedoLock guard = lock();
  totals_ = header;
  if (!counts()) return;
  const auto* writes = theirs.data() + earlier_bytes(rows_, key_bytes_) + GroupsHeader::kComplete * RowSet::bytes(rows_);
  const auto* uses = reinterpret_cast<const std::uint32_t*>(writes + rows_ * sizeof(std::uint64_t));
  others_.emplace(reinterpret_cast<const std::uint64_t*>(writes), uses, kUses, copied ? uses_ : nullptr, rows_);
}

void Groups::catch_up() {
  ContentIndex::catch_up();
  if (!others_) return;
  const RedoLock guard = lock();
  RedoChange change(redo_);
  others_->each(writes_, uses_, [this](std::uint64_t row, std::uint64_t uses) {
    uses_[row] = static_cast<std::uint32_t>(uses);
    forget(row);
    look_at(row);
  });
  change.done();
}

// ---- trees ---------------------------------------------------------------------------------------------------------

Groups::Node& Groups::Trees::node(Id id) const {
  intact(id > 0 && id <= rows, Trees::kTree);
  return nodes[id - 1];
}

// Rows of zeros that one write by number has made have the same ticket number: the row decides.
bool Groups::Trees::precedes(Id a, Id b) const {
  const std::uint64_t mine = numbers[a - 1], other = numbers[b - 1];
  return mine < other || (mine == other && a < b);
}

Groups::Id Groups::Trees::at(Id tree, std::uint64_t rank) const {
  for (unsigned depth = 0;; ++depth) {
    intact(depth < Trees::kMostDepth, Trees::kTree);
    const Node& root = node(tree);
    const std::uint64_t before = size_of(root.left);
    if (rank == before) return tree;
    tree = rank < before ? root.left : root.right;
    if (rank > before) rank -= before + 1;
  }
}

Groups::Group& Groups::group(Id id) const {
  intact(id > 0 && id <= rows_, Trees::kTree);
  return groups_[id - 1];
}

// All of them step by step together, so that the waits for memory lie beside each other.
void Groups::find_all(std::vector<Place>& places) const {
  for (Place& place : places) __builtin_prefetch(&node(place.id));
  bool going = true;
  for (unsigned depth = 0; going; ++depth) {
    intact(depth < Trees::kMostDepth, Trees::kTree);
    for (const Place& place : places) {
      if (const Id left = node(place.id).left; !place.found && left != 0) __builtin_prefetch(&node(left));
    }
    going = false;
    for (Place& place : places) {
      if (place.found) continue;
      const Node& root = node(place.id);
      const std::uint64_t before = trees_.size_of(root.left);
      if (place.rank == before) {
        place.found = true;
        __builtin_prefetch(&numbers_[place.id - 1]);
        __builtin_prefetch(&tickets_.word(place.id - 1));
        continue;
      }
      going = true;
      place.id = place.rank < before ? root.left : root.right;
      if (place.rank > before) place.rank -= before + 1;
      __builtin_prefetch(&node(place.id));
    }
  }
}

// Asks for all rows of some groups, level by level, so that the waits for memory lie beside each other.
void Groups::ask_for(const std::vector<Id>& roots) const {
  std::uint64_t left = 0;  // rows: a damaged tree has no more, either
  for (const Id root : roots) __builtin_prefetch(&node(root));
  for (const Id root : roots) left += node(root).size;
  std::vector<Id> level = roots, below;
  while (!level.empty() && left >= level.size()) {
    left -= level.size();
    below.clear();
    for (const Id id : level) {
      __builtin_prefetch(&numbers_[id - 1]);
      __builtin_prefetch(&tickets_.word(id - 1));
      for (const Id branch : {node(id).left, node(id).right}) {
        if (branch == 0) continue;
        __builtin_prefetch(&node(branch));
        below.push_back(branch);
      }
    }
    level.swap(below);
  }
}

// Whenever a tree of a group has changed: also where its root has not.
void Groups::set_root(Group& group, Id root) {
  const Id before = copied(group.root);
  intact(before <= rows_ && root <= rows_, Trees::kTree);
  if (before != root) {
    if (before != 0) roots_.erase(before - 1);
    if (root != 0) roots_.insert(root - 1);
    group.root = root;
  }
  for (std::size_t i = 0; i < complete_.size(); ++i) {
    const std::uint64_t least = copied(header_->complete[i].least);
    if (least == 0) continue;
    if (before != 0 && before != root) complete_[i].erase(before - 1);
    if (root != 0) node(root).size >= least ? complete_[i].insert(root - 1) : complete_[i].erase(root - 1);
  }
  if (newest_ != nullptr) order(static_cast<Id>(&group - groups_ + 1), root);
}

// A group is in order while it has enough rows: its newest row stands for it.
void Groups::order(Id of, Id root) {
  Id& newest = newest_[of - 1];
  Id first = static_cast<Id>(copied(header_->first));
  if (newest != 0) first = in_order_.without(first, newest);
  newest = root != 0 && node(root).size >= policy_.least ? trees_.at(root, node(root).size - 1) : 0;
  if (newest != 0) {
    order_[newest - 1] = place_of(root, newest);
    in_order_.node(newest) = {of, 0, 0, 1};
    first = in_order_.with(first, newest);
  }
  header_->first = first;
}

// By what a group is compared: a larger number comes later. The spread is that of rewards that are finite, else none.
std::uint64_t Groups::place_of(Id root, Id newest) {
  if (policy_.order == GroupsOrder::age) return number(newest);
  const Field& field = fields_.back();
  std::vector<std::int64_t> rows;
  each_of(root, rows);
  std::vector<std::byte> values(rows.size() * field.row_bytes);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    copy_from_shared(values.data() + i * field.row_bytes, field.row(static_cast<std::uint64_t>(rows[i])), field.row_bytes);
  }
  const std::vector<double> rewards = Rewards(policy_.reward.code, policy_.reward.bits, field.row_bytes).means(values.data(), rows.size());
  const auto n = static_cast<double>(rewards.size());
  double mean = 0, spread = 0;
  for (const double reward : rewards) mean += reward / n;
  for (const double reward : rewards) spread += (reward - mean) * (reward - mean) / n;
  return std::isfinite(spread) ? std::bit_cast<std::uint64_t>(spread) : 0;
}

// Roots of the groups of so many rows, or more. In memory of earlier versions those of all groups. O(1) but for the first time.
RowSet& Groups::complete(std::uint64_t least) {
  if (least <= 1 || complete_.empty()) return roots_;
  auto* const sets = header_->complete;
  std::size_t at = 0;
  for (std::size_t i = 0; i < complete_.size(); ++i) {
    if (copied(sets[i].least) == least) {
      sets[i].asked = ++header_->asked;
      return complete_[i];
    }
    if (copied(sets[i].asked) < copied(sets[at].asked)) at = i;
  }
  RedoChange change(redo_);
  sets[at].least = least;
  complete_[at].assign([&](std::uint64_t row) { return roots_.has(row) && trees_.nodes[row].size >= least; });
  change.done();
  sets[at].asked = ++header_->asked;
  return complete_[at];
}

// ---- versions --------------------------------------------------------------------------------------------------------

// Rows of versions below it leave their groups. O(log rows) for each; a lower floor than before: O(rows).
void Groups::expire(double floor) {
  const double before = copied(header_->floor);
  if (!policy_.dated || std::isnan(floor) || floor == before) return;
  RedoChange change(redo_);
  header_->floor = floor;
  if (floor < before) {
    for (std::uint64_t row = 0; row < rows_; ++row) look_at(row);
  }
  while (const auto oldest = versions_.below(floor)) {
    intact(numbers_[*oldest] != 0, Trees::kTree);
    forget(*oldest);
    header_->expired.fetch_add(1, std::memory_order_relaxed);
  }
  change.done();
}

// ---- groups by key ---------------------------------------------------------------------------------------------------

std::uint64_t Groups::bucket_of(const std::byte* key) const {
  std::uint64_t hash = key_bytes_;
  for (std::uint64_t i = 0; i < key_stride_; i += 8) {
    std::uint64_t word;
    std::memcpy(&word, key + i, sizeof word);
    hash = mix(hash ^ word) + 0x9E3779B97F4A7C15ull;
  }
  return static_cast<std::uint64_t>((static_cast<unsigned __int128>(mix(hash)) * rows_) >> 64);
}

Groups::Id Groups::find_or_make(const std::byte* key) {
  Id& bucket = buckets_[bucket_of(key)];
  std::uint64_t passed = 0;
  for (Id id = bucket; id != 0;) {
    const Id next = group(id).next;  // looked at first: it checks the number
    if (std::memcmp(keys_ + (id - 1) * key_stride_, key, key_stride_) == 0) return id;
    intact(++passed <= rows_, Trees::kTree);
    id = next;
  }
  Id id = copied(header_->free);
  if (id != 0) {
    header_->free = group(id).next;
  } else {
    id = copied(header_->fresh) + 1;
    intact(id > 0 && id <= rows_, Trees::kTree);
    header_->fresh = id;
  }
  group(id) = {0, bucket};
  std::memcpy(keys_ + (id - 1) * key_stride_, key, key_stride_);
  bucket = id;
  return id;
}

void Groups::remove_group(Id id) {
  intact(id > 0 && id <= rows_, Trees::kTree);
  Id* at = &buckets_[bucket_of(keys_ + (id - 1) * key_stride_)];
  for (std::uint64_t passed = 0; *at != id; at = &group(*at).next) intact(*at != 0 && ++passed <= rows_, Trees::kTree);
  *at = group(id).next;
  group(id) = {0, header_->free};
  header_->free = id;
}

// ---- rows ------------------------------------------------------------------------------------------------------------

bool Groups::is_known(std::uint64_t row) const {
  const std::uint64_t word = tickets_.word(row).load(std::memory_order_acquire);
  return is_committed(word) && number_of(word) == numbers_[row];
}

void Groups::forget(std::uint64_t row) {
  if (numbers_[row] == 0) return;
  const Id id = static_cast<Id>(row + 1), of = node(id).group;
  Group& from = group(of);
  set_root(from, trees_.without(from.root, id));
  if (from.root == 0) remove_group(of);
  if (policy_.dated) versions_.erase(row);
  numbers_[row] = 0;
}

// Notes what a row says that was whole under that word. Whether it is admitted; its ticket is to be looked at again.
bool Groups::read(std::uint64_t row, std::uint64_t word) {
  key_.copy(tickets_, row, looked_at_.data());
  version_ = reader_.read(row);
  const bool ready = policy_.dated ? version_ >= copied(header_->floor) : !std::isnan(version_);  // NaN is not
  if (!counts()) return ready;
  write_ = tickets_.write_of(row, word);
  return ready;
}

// Whether its write may be used once more. The uses first: if the process dies behind them, the row is not known, and is looked at again.
bool Groups::has_uses_left(std::uint64_t row) {
  if (!counts()) return true;
  if (writes_[row] != write_) {
    if (writes_[row] != 0 && (uses_[row] & kUses) < policy_.most) header_->evicted.fetch_add(1, std::memory_order_relaxed);
    uses_[row] = 0;
    if (others_) others_->forget(row);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    writes_[row] = write_;
  }
  return (uses_[row] & kUses) < policy_.most;
}

// A row that is being written is in no group: its writer tells when it is whole.
void Groups::look_at(std::uint64_t row) {
  for (;;) {
    const std::uint64_t word = tickets_.word(row).load(std::memory_order_acquire);
    if (!is_committed(word)) return forget(row);
    const std::uint64_t number = number_of(word);
    if (numbers_[row] == number) return;
    const bool ready = read(row, word);
    fence(std::memory_order_acquire);
    if (tickets_.word(row).load(std::memory_order_relaxed) != word) continue;
    forget(row);
    if (!has_uses_left(row) || !ready) return;
    const Id id = static_cast<Id>(row + 1), of = find_or_make(looked_at_.data());
    Group& to = group(of);
    numbers_[row] = number;
    if (policy_.dated) versions_.insert(row, version_);
    node(id) = {of, 0, 0, 1};
    set_root(to, trees_.with(to.root, id));
    return;
  }
}

void Groups::lost(const std::int64_t* rows, std::uint64_t n) { leave(rows, n, header_->dropped); }
void Groups::evicted(const std::int64_t* rows, std::uint64_t n) { leave(rows, n, header_->evicted); }

// Rows that hold nothing any more. What is written to them next has no uses, and they are counted once.
void Groups::leave(const std::int64_t* rows, std::uint64_t n, Word& counter) {
  const OwnRows own(rows, n, rows_);
  const RedoLock guard = lock(1);
  look_at_these({rows}, n);
  for (std::uint64_t i = 0; counts() && i < n; ++i) {
    const auto row = static_cast<std::uint64_t>(rows[i]);
    const std::uint64_t word = tickets_.word(row).load(std::memory_order_acquire);
    if (writes_[row] == 0 || is_committed(word) || state_of(word) == State::writing) continue;
    if ((uses_[row] & kUses) < policy_.most) counter.fetch_add(1, std::memory_order_relaxed);
    writes_[row] = 0;
  }
}

void Groups::forget_all() {
  if (counts()) end_counting();
  std::fill_n(numbers_, rows_, 0);
  std::fill_n(buckets_, rows_, 0);
  header_->dated_rows = 0;
  roots_.assign([](std::uint64_t) { return false; });
  for (RowSet& set : complete_) set.assign([](std::uint64_t) { return false; });
  header_->first = 0;
  if (newest_ != nullptr) std::fill_n(newest_, rows_, 0);
  header_->fresh = header_->free = 0;
}

std::uint64_t Groups::groups(std::uint64_t least, double floor) {
  const RedoLock guard = lock();
  expire(floor);
  const RowSet& set = complete(least);
  const std::uint64_t size = set.size();
  if (least <= 1 || !complete_.empty()) return size;
  std::uint64_t found = 0;
  for (std::uint64_t i = 0; i < size; ++i) found += node(static_cast<Id>(set.at(i) + 1)).size >= least ? 1 : 0;
  return found;
}

Groups::Counts Groups::counted() const {
  const auto of = [](const Word& word) { return word.load(std::memory_order_relaxed); };
  if (complete_.empty()) return {.groups = roots_.size(), .used = 0, .expired = 0, .evicted = 0, .dropped = 0, .starved = 0};
  return {roots_.size(), of(totals_->used), of(totals_->expired), of(totals_->evicted), of(totals_->dropped), of(totals_->starved)};
}

// ---- uses ------------------------------------------------------------------------------------------------------------

// The rows of a tree, the oldest first.
void Groups::each_of(Id root, std::vector<std::int64_t>& rows) const {
  const std::uint64_t size = node(root).size, end = rows.size() + size;
  std::vector<Id> path;
  for (Id id = root; id != 0 || !path.empty();) {
    while (id != 0) {
      intact(path.size() < Trees::kMostDepth, Trees::kTree);
      path.push_back(id);
      id = node(id).left;
    }
    const Id here = path.back();
    path.pop_back();
    intact(rows.size() < end, Trees::kTree);
    rows.push_back(static_cast<std::int64_t>(here) - 1);
    id = node(here).right;
  }
  intact(size > 0 && rows.size() == end, Trees::kTree);
}

// All rows of these groups are used once more: all of them or none, wherever the process dies.
void Groups::count(std::vector<Id> roots) {
  if (!counts()) return;
  std::sort(roots.begin(), roots.end());
  roots.erase(std::unique(roots.begin(), roots.end()), roots.end());
  std::vector<std::int64_t> rows;
  for (const Id root : roots) each_of(root, rows);
  RedoChange change(redo_);
  for (const std::int64_t row : rows) uses_[row] |= kMarked;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  header_->counting.store(1, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  for (const std::int64_t row : rows) uses_[row] = (uses_[row] & kUses) + 1;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  header_->counting.store(0, std::memory_order_relaxed);
  for (const std::int64_t row : rows) {
    if (uses_[row] < policy_.most) continue;
    forget(static_cast<std::uint64_t>(row));
    header_->used.fetch_add(1, std::memory_order_relaxed);
  }
  change.done();
}

// What a process marked that died: it counts if that was said already.
void Groups::end_counting() {
  const std::uint32_t more = header_->counting.load(std::memory_order_relaxed) != 0 ? 1 : 0;
  for (std::uint64_t row = 0; row < rows_; ++row) {
    if ((uses_[row] & kMarked) != 0) uses_[row] = (uses_[row] & kUses) + more;
  }
  std::atomic_signal_fence(std::memory_order_seq_cst);
  header_->counting.store(0, std::memory_order_relaxed);
}

void Groups::take_back(const std::int64_t* rows, const std::int64_t* numbers, std::uint64_t n) {
  if (!counts()) return;
  const OwnRows own(rows, n, rows_);
  const RedoLock guard = lock();
  RedoChange change(redo_);
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto row = static_cast<std::uint64_t>(rows[i]);
    const std::uint64_t word = tickets_.held_word(row);
    const bool same = Control::holds_write(word) && tickets_.write_of(row, word) == writes_[row] &&
                      writes_[row] <= static_cast<std::uint64_t>(copied(numbers[i]));
    if (!same || (uses_[row] & kUses) == 0) continue;
    --uses_[row];
    look_at(row);
  }
  change.done();
}

void Groups::copy_uses(std::int32_t* out, std::uint64_t n) {
  check(counts(), "uses of groups that are not counted");
  check(n <= rows_, "more uses than there are rows");
  const RedoLock guard = lock();
  for (std::uint64_t row = 0; row < n; ++row) {
    const std::uint64_t word = tickets_.held_word(row);
    const bool same = Control::holds_write(word) && tickets_.write_of(row, word) == writes_[row];
    out[row] = same ? static_cast<std::int32_t>(uses_[row] & kUses) : 0;
  }
}

void Groups::restore_uses(const std::int32_t* uses, std::uint64_t n) {
  check(counts(), "uses of groups that are not counted");
  check(n <= rows_, "more uses than there are rows");
  const RedoLock guard = lock();
  header_->redo.store(1, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  for (std::uint64_t row = 0; row < rows_; ++row) {  // also of one that is being edited
    const std::uint64_t word = tickets_.held_word(row);
    uses_[row] = row < n ? static_cast<std::uint32_t>(uses[row]) & kUses : 0;
    if (Control::holds_write(word)) writes_[row] = tickets_.write_of(row, word);
  }
  rebuild();
}

// ---- draws -----------------------------------------------------------------------------------------------------------

// The first groups that are in order, or the last ones, the last first.
std::vector<Groups::Id> Groups::in_order(const Asked& asked, const std::unordered_set<Id>& out) const {
  check(newest_ != nullptr && asked.complete && asked.each == policy_.least, "groups: expected groups that are in order");
  const Id first = static_cast<Id>(copied(header_->first));
  const std::uint64_t size = in_order_.size_of(first);
  std::vector<Id> roots;
  for (std::uint64_t i = 0; i < size && roots.size() < asked.n; ++i) {
    const Id newest = in_order_.at(first, asked.which == Which::first ? i : size - 1 - i);
    const Id root = group(in_order_.node(newest).group).root;
    intact(root != 0, Trees::kTree);
    if (!out.contains(root)) roots.push_back(root);
  }
  if (roots.size() == asked.n) return roots;
  header_->starved.fetch_add(1, std::memory_order_relaxed);
  return {};
}

std::vector<Groups::Id> Groups::choose(const Random& random, const Asked& asked, bool& repeated) {
  const RowSet& set = complete(asked.complete ? asked.each : 1);
  const std::uint64_t size = set.size(), n = asked.n;
  std::vector<Id> roots;
  roots.reserve(std::min(n, size));
  std::unordered_set<Id> out;
  for (const std::int64_t& named : asked.without) {
    const auto row = static_cast<std::uint64_t>(copied(named));
    if (row < rows_ && numbers_[row] != 0) out.insert(group(copied(node(static_cast<Id>(row + 1)).group)).root);
  }
  if (asked.which != Which::any) return in_order(asked, out);
  const bool too_few = !asked.complete && out.size() + n > size;
  if (too_few) out.clear();
  Shuffled order(random, size, 0);
  while (roots.size() < n && !order.done()) {
    const Id root = static_cast<Id>(set.at(order.next()) + 1);
    if (!out.contains(root) && !(asked.complete && node(root).size < asked.each)) roots.push_back(root);
  }
  if (asked.complete && roots.size() < n) {
    if (!complete_.empty()) header_->starved.fetch_add(1, std::memory_order_relaxed);
    return {};
  }
  if (asked.complete || roots.empty()) return roots;
  repeated = roots.size() < n || (too_few && !asked.without.empty());
  for (std::uint64_t i = 0; roots.size() < n; ++i) roots.push_back(static_cast<Id>(set.at(random.below(size, i, 1)) + 1));
  return roots;
}

Groups::Drawn Groups::draw(std::uint64_t key, const Asked& asked, Order order, std::int64_t* rows, std::int64_t* numbers) {
  const std::uint64_t n = asked.n, each = asked.each;
  const RedoLock guard = lock();
  expire(asked.floor);
  std::vector<std::int64_t> stale;
  std::vector<Place> places;
  places.reserve(n * each);
  for (int look = 0;; ++look) {
    const Random random(key + static_cast<std::uint64_t>(look) * 0xD1342543DE82EF95ull);
    bool repeated = false;
    places.clear();
    const std::vector<Id> roots = choose(random, asked, repeated);
    if (roots.empty()) return {false, false};
    stale.clear();
    const auto take = [&](Id root, std::uint64_t rank) { places.push_back({root, false, rank}); };
    for (const Id root : roots) __builtin_prefetch(&node(root));
    for (std::uint64_t g = 0; g < n; ++g) {
      const std::uint64_t size = node(roots[g]).size, once = std::min(size, each);
      intact(size > 0, Trees::kTree);
      if (order == Order::newest) {
        for (std::uint64_t j = size - once; j < size; ++j) take(roots[g], j);
      } else {
        Shuffled ranks(random, size, 2 + 2 * g);
        for (std::uint64_t j = 0; j < once; ++j) take(roots[g], ranks.next());
      }
      repeated |= once < each;
      for (std::uint64_t j = once; j < each; ++j) take(roots[g], random.below(size, j, 3 + 2 * g));
    }
    find_all(places);
    for (std::uint64_t i = 0; i < places.size(); ++i) {
      const std::uint64_t row = places[i].id - 1;
      rows[i] = static_cast<std::int64_t>(row);
      numbers[i] = static_cast<std::int64_t>(numbers_[row]);
      if (!is_known(row)) stale.push_back(rows[i]);
    }
    if (stale.empty() || look == kLooks) {  // in the end reading finds out
      count(roots);
      return {true, repeated};
    }
    look_at_these({stale.data()}, stale.size());
  }
}

Groups::Members Groups::draw_members(std::uint64_t key, const Asked& asked) {
  const RedoLock guard = lock();
  expire(asked.floor);
  Members all;
  std::vector<std::int64_t> stale;
  for (int look = 0;; ++look) {
    const Random random(key + static_cast<std::uint64_t>(look) * 0xD1342543DE82EF95ull);
    all = {};
    stale.clear();
    const std::vector<Id> roots = choose(random, asked, all.repeated);
    ask_for(roots);
    for (const Id root : roots) {
      const std::size_t begin = all.rows.size();
      each_of(root, all.rows);
      all.sizes.push_back(static_cast<std::int64_t>(all.rows.size() - begin));
    }
    for (const std::int64_t row : all.rows) {
      all.numbers.push_back(static_cast<std::int64_t>(numbers_[row]));
      if (!is_known(static_cast<std::uint64_t>(row))) stale.push_back(row);
    }
    if (stale.empty() || look == kLooks) {
      count(roots);
      return all;
    }
    look_at_these({stale.data()}, stale.size());
  }
}

}  // namespace engram
