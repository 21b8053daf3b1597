#include "groups.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "check.h"
#include "fence.h"
#include "wait.h"

namespace engram {
namespace {

constexpr char kMagic[8] = {'e', 'n', 'g', 'g', 'r', 'o', 'u', '\1'};
constexpr char kTree[] = "groups: expected trees of rows";
constexpr std::uint64_t kMostRows = (std::uint64_t{1} << 32) - 1;
constexpr unsigned kMostDepth = 1024;  // of a tree: of 2^32 rows it is about 80
constexpr int kLooks = 16;             // at rows that changed and were not told yet, per draw

std::uint64_t whole_words(std::uint64_t bytes) { return (bytes + 7) / 8 * 8; }

GroupsHeader* header_in(std::span<std::byte> memory) {
  check(memory.size() >= kPage, "groups in memory too small for their header");
  auto* header = reinterpret_cast<GroupsHeader*>(memory.data());
  check(std::memcmp(header->magic, kMagic, sizeof kMagic) == 0, "no groups, or of another format");
  check(memory.size() == Groups::bytes(copied(header->rows), copied(header->key_bytes)), "groups in memory of another size");
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

class Groups::Lock {
 public:
  /// `news`: 1: if this wait is in vain, the next holder of the mutex looks at all rows.
  explicit Lock(Groups& self, std::uint64_t news = 0) try : lock_(self.header_->mutex, [] {}) {
    const bool missed = self.header_->missed.load(std::memory_order_acquire) != 0;
    const bool redo = self.header_->redo.load(std::memory_order_relaxed) != 0;
    if (!missed && !redo) [[likely]] return;
    let_go();
    redo ? self.rebuild() : self.look_at_all();
  } catch (const Stalled&) {
    self.header_->missed.fetch_or(news, std::memory_order_acq_rel);
  }

 private:
  SharedLock lock_;
};

// A killed process leaves what it executed, in program order.
class Groups::Change {
 public:
  explicit Change(Groups& self) : self_(self) {
#ifndef ENGRAM_WITHOUT_REDO  // the tests of death must fail then: make negative-controls
    self_.header_->redo.store(1, std::memory_order_relaxed);
#endif
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
  void done() {
    std::atomic_signal_fence(std::memory_order_seq_cst);
    self_.header_->redo.store(0, std::memory_order_relaxed);
  }

 private:
  Groups& self_;
};

std::uint64_t Groups::bytes(std::uint64_t rows, std::uint64_t key_bytes) {
  check(rows > 0 && rows < kMostRows, "groups: expected a store of 1 to 2^32 - 2 rows");
  check(key_bytes > 0 && key_bytes <= kMostKeyBytes, "groups: expected a key of 1 to 1024 bytes");
  return kPage + rows * (sizeof(std::uint64_t) + whole_words(key_bytes)) + RowSet::bytes(rows) +
         rows * (sizeof(Node) + sizeof(Group)) + whole_words(rows * sizeof(Id));
}

void Groups::format(std::span<std::byte> memory, std::uint64_t rows, std::uint64_t field, std::uint64_t key_bytes) {
  check(memory.size() == bytes(rows, key_bytes), "groups in memory of another size");
  auto* header = new (memory.data()) GroupsHeader{};
  header->rows = rows;
  header->field = field;
  header->key_bytes = key_bytes;
  header->mutex.format();
  std::memcpy(header->magic, kMagic, sizeof kMagic);
}

void Groups::reset_mutex(std::span<std::byte> memory) { header_in(memory)->mutex.format(); }

void Groups::copy(std::span<std::byte> from, std::span<std::byte> to) {
  const GroupsHeader* theirs = header_in(from);
  check(from.size() == to.size(), "groups in memory of another size");
  format(to, copied(theirs->rows), copied(theirs->field), copied(theirs->key_bytes));
}

std::uint64_t Groups::field_of(std::span<std::byte> memory) { return copied(header_in(memory)->field); }

Groups::Groups(std::span<std::byte> memory, const Control& tickets, const Field& key)
    : header_(header_in(memory)),
      rows_(copied(header_->rows)),
      field_(copied(header_->field)),
      key_bytes_(copied(header_->key_bytes)),
      key_stride_(whole_words(key_bytes_)),
      numbers_(reinterpret_cast<std::uint64_t*>(memory.data() + kPage)),
      keys_(memory.data() + kPage + rows_ * sizeof(std::uint64_t)),
      roots_(keys_ + rows_ * key_stride_, rows_),
      nodes_(reinterpret_cast<Node*>(keys_ + rows_ * key_stride_ + RowSet::bytes(rows_))),
      groups_(reinterpret_cast<Group*>(nodes_ + rows_)),
      buckets_(reinterpret_cast<Id*>(groups_ + rows_)),
      tickets_(tickets),
      key_(key),
      looked_at_(key_stride_),
      next_(tickets.lanes()),
      base_(tickets.lanes(), ~std::uint64_t{0}) {
  check(tickets_.capacity() == rows_, "groups of a store of another capacity");
  check(key_.data != nullptr && key_.row_bytes == key_bytes_, "groups by a field of another size");
}

// ---- trees ---------------------------------------------------------------------------------------------------------

Groups::Node& Groups::node(Id id) const {
  intact(id > 0 && id <= rows_, kTree);
  return nodes_[id - 1];
}

Groups::Group& Groups::group(Id id) const {
  intact(id > 0 && id <= rows_, kTree);
  return groups_[id - 1];
}

Groups::Id Groups::merge(Id a, Id b, unsigned depth) const {
  if (a == 0 || b == 0) return a + b;
  intact(depth < kMostDepth, kTree);
  if (mix(a) > mix(b)) {
    node(a).right = merge(node(a).right, b, depth + 1);
    resize(a);
    return a;
  }
  node(b).left = merge(a, node(b).left, depth + 1);
  resize(b);
  return b;
}

// Rows of zeros that one write by number has made have the same ticket number: the row decides.
bool Groups::is_older(Id a, Id b) const { return number(a) < number(b) || (number(a) == number(b) && a < b); }

// `below`: rows that are older than this one, which is not in the tree.
void Groups::split(Id tree, Id row, Id& below, Id& above, unsigned depth) const {
  if (tree == 0) {
    below = above = 0;
    return;
  }
  intact(depth < kMostDepth, kTree);
  Node& root = node(tree);
  if (is_older(tree, row)) {
    split(root.right, row, root.right, above, depth + 1);
    below = tree;
  } else {
    split(root.left, row, below, root.left, depth + 1);
    above = tree;
  }
  resize(tree);
}

Groups::Id Groups::without_row(Id tree, Id row, unsigned depth) const {
  intact(tree != 0 && depth < kMostDepth, kTree);
  Node& root = node(tree);
  if (tree == row) return merge(root.left, root.right);
  Id& branch = is_older(row, tree) ? root.left : root.right;
  branch = without_row(branch, row, depth + 1);
  resize(tree);
  return tree;
}

// All of them step by step together, so that the waits for memory lie beside each other.
void Groups::find_all(std::vector<Place>& places) const {
  for (Place& place : places) __builtin_prefetch(&node(place.id));
  bool going = true;
  for (unsigned depth = 0; going; ++depth) {
    intact(depth < kMostDepth, kTree);
    for (const Place& place : places) {
      if (const Id left = node(place.id).left; !place.found && left != 0) __builtin_prefetch(&node(left));
    }
    going = false;
    for (Place& place : places) {
      if (place.found) continue;
      const Node& root = node(place.id);
      const std::uint64_t before = size_of(root.left);
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

void Groups::set_root(Group& group, Id root) {
  const Id before = copied(group.root);
  if (before == root) return;
  intact(before <= rows_ && root <= rows_, kTree);
  if (before != 0) roots_.erase(before - 1);
  if (root != 0) roots_.insert(root - 1);
  group.root = root;
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
    intact(++passed <= rows_, kTree);
    id = next;
  }
  Id id = copied(header_->free);
  if (id != 0) {
    header_->free = group(id).next;
  } else {
    id = copied(header_->fresh) + 1;
    intact(id > 0 && id <= rows_, kTree);
    header_->fresh = id;
  }
  group(id) = {0, bucket};
  std::memcpy(keys_ + (id - 1) * key_stride_, key, key_stride_);
  bucket = id;
  return id;
}

void Groups::remove_group(Id id) {
  intact(id > 0 && id <= rows_, kTree);
  Id* at = &buckets_[bucket_of(keys_ + (id - 1) * key_stride_)];
  for (std::uint64_t passed = 0; *at != id; at = &group(*at).next) intact(*at != 0 && ++passed <= rows_, kTree);
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
  set_root(from, without_row(from.root, id));
  if (from.root == 0) remove_group(of);
  numbers_[row] = 0;
}

// A row that is being written is in no group: its writer tells when it is whole.
void Groups::look_at(std::uint64_t row) {
  for (;;) {
    const std::uint64_t word = tickets_.word(row).load(std::memory_order_acquire);
    if (!is_committed(word)) return forget(row);
    const std::uint64_t number = number_of(word);
    if (numbers_[row] == number) return;
    copy_from_shared(looked_at_.data(), key_.row(row), key_bytes_);
    fence(std::memory_order_acquire);
    if (tickets_.word(row).load(std::memory_order_relaxed) != word) continue;
    forget(row);
    const Id id = static_cast<Id>(row + 1), of = find_or_make(looked_at_.data());
    Group& to = group(of);
    numbers_[row] = number;
    node(id) = {of, 0, 0, 1};
    Id below, above;
    split(to.root, id, below, above);
    set_root(to, merge(merge(below, id), above));
    return;
  }
}

template <class Rows>
void Groups::look_at_these(const Rows* rows, std::uint64_t n) {
  Change change(*this);
  for (std::uint64_t i = 0; i < n; ++i) look_at(static_cast<std::uint64_t>(rows[i]));
  change.done();
}

void Groups::look_at_all() {
  Change change(*this);
  header_->missed.exchange(0, std::memory_order_acq_rel);  // what those wrote who set it is seen below
  for (std::uint64_t row = 0; row < rows_; ++row) look_at(row);
  change.done();
}

void Groups::rebuild() {
  header_->redo.store(1, std::memory_order_relaxed);  // until it is done, if this process dies, too
  std::atomic_signal_fence(std::memory_order_seq_cst);
  std::fill_n(numbers_, rows_, 0);
  std::fill_n(buckets_, rows_, 0);
  roots_.assign([](std::uint64_t) { return false; });
  header_->fresh = header_->free = 0;
  look_at_all();
}

void Groups::put_in_order() {
  const Lock guard(*this);
  rebuild();
}

void Groups::scan(std::uint64_t begin, std::uint64_t end) {
  if (begin > end || end > rows_) throw std::out_of_range("a scan of rows that there are not");
  const Lock guard(*this);
  Change change(*this);
  for (std::uint64_t row = begin; row < end; ++row) look_at(row);
  change.done();
}

void Groups::catch_up() {
  const Lock guard(*this);
  const std::uint64_t scatters = tickets_.counters().scatters.load(std::memory_order_acquire), length = tickets_.lane_length();
  bool all = std::exchange(scatters_, scatters) != scatters;
  for (std::uint64_t lane = 0; lane < tickets_.lanes(); ++lane) {
    const std::uint64_t base = tickets_.lane(lane).base.load(std::memory_order_acquire);
    all |= std::exchange(base_[lane], base) != base;
  }
  std::vector<std::uint64_t> ends(tickets_.lanes());
  for (std::uint64_t lane = 0; lane < tickets_.lanes(); ++lane) ends[lane] = tickets_.end(lane);
  if (all) look_at_all();
  Change change(*this);
  for (std::uint64_t lane = 0; lane < tickets_.lanes(); ++lane) {
    const std::uint64_t end = ends[lane], low = end > length ? end - length : 0;
    std::uint64_t first = end;  // that is not whole yet
    for (std::uint64_t p = std::max(all ? low : next_[lane], low); p < end; ++p) {
      const std::uint64_t row = lane * length + p % length;
      const bool begun = tickets_.lap(row).load(std::memory_order_acquire) >= tickets_.lap_of(p);
      look_at(row);
      if (!begun || numbers_[row] == 0) first = std::min(first, p);
    }
    next_[lane] = first;
  }
  change.done();
}

std::uint64_t Groups::groups() {
  const Lock guard(*this);
  return roots_.size();
}

// ---- draws -----------------------------------------------------------------------------------------------------------

std::vector<Groups::Id> Groups::choose(const Random& random, std::uint64_t n, std::span<const std::int64_t> without,
                                       bool& repeated) const {
  const std::uint64_t size = roots_.size();
  std::vector<Id> roots;
  if (size == 0) return roots;
  roots.reserve(n);
  std::unordered_set<Id> out;
  for (const std::int64_t& named : without) {
    const auto row = static_cast<std::uint64_t>(copied(named));
    if (row < rows_ && numbers_[row] != 0) out.insert(group(copied(node(static_cast<Id>(row + 1)).group)).root);
  }
  const bool too_few = out.size() + n > size;
  if (too_few) out.clear();
  Shuffled order(random, size, 0);
  while (roots.size() < n && !order.done()) {
    const Id root = static_cast<Id>(roots_.at(order.next()) + 1);
    if (!out.contains(root)) roots.push_back(root);
  }
  repeated = roots.size() < n || (too_few && !without.empty());
  for (std::uint64_t i = 0; roots.size() < n; ++i) roots.push_back(static_cast<Id>(roots_.at(random.below(size, i, 1)) + 1));
  return roots;
}

Groups::Drawn Groups::draw(std::uint64_t key, std::uint64_t n, std::uint64_t each, Order order,
                           std::span<const std::int64_t> without, std::int64_t* rows, std::int64_t* numbers) {
  const Lock guard(*this);
  std::vector<std::uint64_t> stale;
  std::vector<Place> places;
  places.reserve(n * each);
  for (int look = 0;; ++look) {
    const Random random(key + static_cast<std::uint64_t>(look) * 0xD1342543DE82EF95ull);
    bool repeated = false;
    places.clear();
    const std::vector<Id> roots = choose(random, n, without, repeated);
    if (roots.empty()) return {false, false};
    stale.clear();
    const auto take = [&](Id root, std::uint64_t rank) { places.push_back({root, false, rank}); };
    for (const Id root : roots) __builtin_prefetch(&node(root));
    for (std::uint64_t g = 0; g < n; ++g) {
      const std::uint64_t size = node(roots[g]).size, once = std::min(size, each);
      intact(size > 0, kTree);
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
      if (!is_known(row)) stale.push_back(row);
    }
    if (stale.empty() || look == kLooks) return {true, repeated};  // in the end reading finds out
    look_at_these(stale.data(), stale.size());
  }
}

Groups::Members Groups::draw_members(std::uint64_t key, std::uint64_t n, std::span<const std::int64_t> without) {
  const Lock guard(*this);
  Members all;
  std::vector<std::uint64_t> stale;
  for (int look = 0;; ++look) {
    const Random random(key + static_cast<std::uint64_t>(look) * 0xD1342543DE82EF95ull);
    all = {};
    stale.clear();
    std::vector<std::pair<Id, unsigned>> path;
    const std::vector<Id> roots = choose(random, n, without, all.repeated);
    ask_for(roots);
    for (const Id root : roots) {
      const std::uint64_t size = node(root).size, end = all.rows.size() + size;
      all.sizes.push_back(static_cast<std::int64_t>(size));
      path.clear();
      for (Id id = root; id != 0 || !path.empty();) {
        while (id != 0) {
          intact(path.size() < kMostDepth, kTree);
          path.push_back({id, 0});
          id = node(id).left;
        }
        const Id here = path.back().first;
        path.pop_back();
        intact(all.rows.size() < end, kTree);
        all.rows.push_back(static_cast<std::int64_t>(here) - 1);
        all.numbers.push_back(static_cast<std::int64_t>(number(here)));
        if (!is_known(here - 1)) stale.push_back(here - 1);
        id = node(here).right;
      }
      intact(size > 0 && all.rows.size() == end, kTree);
    }
    if (stale.empty() || look == kLooks) return all;
    look_at_these(stale.data(), stale.size());
  }
}

// ---- what writers tell -------------------------------------------------------------------------------------------------

void Groups::written(const std::int64_t* rows, std::uint64_t n, std::uint64_t) {
  const OwnRows own(rows, n, rows_);
  const Lock guard(*this, 1);
  look_at_these(rows, n);
}

void Groups::edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0, std::span<const std::uint64_t>, std::uint64_t) {
  written(rows, n, t0);
}

void Groups::lost(const std::int64_t* rows, std::uint64_t n) { written(rows, n, 0); }

void Groups::emptied() {
  const Lock guard(*this, 1);
  rebuild();
}

void Groups::after_fork() {
  if (header_->mutex.held()) header_->mutex.format();  // its owner does not exist here
}

}  // namespace engram
