#include "keys.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "check.h"
#include "fence.h"
#include "random.h"
#include "wait.h"

namespace engram {
namespace {

constexpr char kMagic[8] = {'e', 'n', 'g', 'k', 'e', 'y', 's', '\1'};
constexpr char kTree[] = "keys: expected trees of rows";
constexpr std::uint64_t kMostRows = (std::uint64_t{1} << 32) - 1;
constexpr unsigned kMostDepth = 1024;   // of a tree: of 2^32 rows it is about 80
constexpr std::uint64_t kAhead = 8;     // rows between asking for the memory of one and looking at it
constexpr std::uint64_t kPiece = 4096;  // keys that are looked up while the mutex is held

KeysHeader* header_in(std::span<std::byte> memory) {
  check(memory.size() >= kPage, "keys in memory too small for their header");
  auto* header = reinterpret_cast<KeysHeader*>(memory.data());
  check(std::memcmp(header->magic, kMagic, sizeof kMagic) == 0, "no keys, or of another format");
  check(memory.size() == Keys::bytes(copied(header->rows)), "keys in memory of another size");
  const std::uint64_t key_bytes = copied(header->key_bytes);
  check(key_bytes > 0 && key_bytes <= Keys::kMostKeyBytes, "keys: expected a key of 1 to 1024 bytes");
  return header;
}

}  // namespace

std::uint64_t hash_of_key(const std::byte* key, std::uint64_t bytes) {
  while (bytes > 0 && key[bytes - 1] == std::byte{0}) --bytes;
  std::uint64_t hash = 0x9E3779B97F4A7C15ull;
  for (std::uint64_t i = 0; i < bytes; i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, key + i, std::min<std::uint64_t>(8, bytes - i));
    hash = mix(hash ^ word) + 0x9E3779B97F4A7C15ull;
  }
  return mix(hash);
}

class Keys::Lock {
 public:
  /// `news`: 1: if this wait is in vain, the next holder of the mutex looks at all rows.
  explicit Lock(Keys& self, std::uint64_t news = 0) try : lock_(self.header_->mutex, [] {}) {
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
class Keys::Change {
 public:
  explicit Change(Keys& self) : self_(self) {
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
  Keys& self_;
};

std::uint64_t Keys::bytes(std::uint64_t rows) {
  check(rows > 0 && rows < kMostRows, "keys: expected a store of 1 to 2^32 - 2 rows");
  return kPage + rows * sizeof(Node) + (rows * sizeof(Id) + 7) / 8 * 8;
}

void Keys::format(std::span<std::byte> memory, std::uint64_t rows, std::uint64_t field, std::uint64_t key_bytes) {
  check(memory.size() == bytes(rows), "keys in memory of another size");
  check(key_bytes > 0 && key_bytes <= kMostKeyBytes, "keys: expected a key of 1 to 1024 bytes");
  auto* header = new (memory.data()) KeysHeader{};
  header->rows = rows;
  header->field = field;
  header->key_bytes = key_bytes;
  header->mutex.format();
  std::memcpy(header->magic, kMagic, sizeof kMagic);
}

void Keys::reset_mutex(std::span<std::byte> memory) { header_in(memory)->mutex.format(); }

void Keys::copy(std::span<std::byte> from, std::span<std::byte> to) {
  const KeysHeader* theirs = header_in(from);
  check(from.size() == to.size(), "keys in memory of another size");
  format(to, copied(theirs->rows), copied(theirs->field), copied(theirs->key_bytes));
}

std::uint64_t Keys::field_of(std::span<std::byte> memory) { return copied(header_in(memory)->field); }

Keys::Keys(std::span<std::byte> memory, const Control& tickets, const Field& key)
    : header_(header_in(memory)),
      rows_(copied(header_->rows)),
      field_(copied(header_->field)),
      key_bytes_(copied(header_->key_bytes)),
      nodes_(reinterpret_cast<Node*>(memory.data() + kPage)),
      buckets_(reinterpret_cast<Id*>(nodes_ + rows_)),
      tickets_(tickets),
      key_(key),
      read_(key_bytes_),
      next_(tickets.lanes()),
      base_(tickets.lanes(), ~std::uint64_t{0}) {
  check(tickets_.capacity() == rows_, "keys of a store of another capacity");
  check(key_.data != nullptr && key_.row_bytes == key_bytes_, "keys in a field of another size");
}

// ---- trees ---------------------------------------------------------------------------------------------------------

Keys::Node& Keys::node(Id id) const {
  intact(id > 0 && id <= rows_, kTree);
  return nodes_[id - 1];
}

Keys::Id& Keys::bucket(std::uint64_t hash) const {
  return buckets_[static_cast<std::uint64_t>((static_cast<unsigned __int128>(hash) * rows_) >> 64)];
}

// Rows of zeros that one write by number has made have the same number: the row decides.
bool Keys::precedes(Id a, Id b) const {
  const Node &one = node(a), &other = node(b);
  if (one.hash != other.hash) return one.hash < other.hash;
  return one.write != other.write ? one.write < other.write : a < b;
}

Keys::Id Keys::merge(Id a, Id b, unsigned depth) const {
  if (a == 0 || b == 0) return a + b;
  intact(depth < kMostDepth, kTree);
  if (mix(a) > mix(b)) {
    node(a).right = merge(node(a).right, b, depth + 1);
    return a;
  }
  node(b).left = merge(a, node(b).left, depth + 1);
  return b;
}

// `below`: the rows before this one, which is not in the tree.
void Keys::split(Id tree, Id row, Id& below, Id& above, unsigned depth) const {
  if (tree == 0) {
    below = above = 0;
    return;
  }
  intact(depth < kMostDepth, kTree);
  Node& root = node(tree);
  if (precedes(tree, row)) {
    split(root.right, row, root.right, above, depth + 1);
    below = tree;
  } else {
    split(root.left, row, below, root.left, depth + 1);
    above = tree;
  }
}

Keys::Id Keys::without_row(Id tree, Id row, unsigned depth) const {
  intact(tree != 0 && depth < kMostDepth, kTree);
  Node& root = node(tree);
  if (tree == row) return merge(root.left, root.right);
  Id& branch = precedes(row, tree) ? root.left : root.right;
  branch = without_row(branch, row, depth + 1);
  return tree;
}

// Visits the rows with a hash, the newest first, until `visit` returns true; whether it did.
template <class Visit>
bool Keys::newest_first(Id tree, std::uint64_t hash, Visit&& visit, unsigned depth) const {
  while (tree != 0) {
    intact(depth < kMostDepth, kTree);
    const Node here = node(tree);
    if (here.hash > hash) {
      tree = here.left;
      ++depth;
      continue;
    }
    if (newest_first(here.right, hash, visit, depth + 1)) return true;
    if (here.hash < hash) return false;
    if (visit(tree - 1)) return true;
    tree = here.left;
    ++depth;
  }
  return false;
}

// ---- rows ------------------------------------------------------------------------------------------------------------

// Reads the key of a row; the number of the write that the row holds, or 0: it holds none. Where keys lie is known here alone. A row that is
// being edited holds its write all the same; if its key is being replaced, what is read may be torn.
std::uint64_t Keys::read_key(std::uint64_t row) {
  for (;;) {
    const std::uint64_t word = tickets_.held_word(row);
    if (!Control::holds_write(word) || tickets_.left_behind(row, word)) return 0;
    const std::uint64_t write = tickets_.write_of(row, word);
    copy_from_shared(read_.data(), key_.row(row), key_bytes_);
    fence(std::memory_order_acquire);
    if (tickets_.word(row).load(std::memory_order_relaxed) == word) return write;
  }
}

void Keys::forget(std::uint64_t row) {
  Node& gone = nodes_[row];
  if (gone.write == 0) return;
  Id& root = bucket(gone.hash);
  root = without_row(root, static_cast<Id>(row + 1));
  gone.write = 0;
}

void Keys::enter(std::uint64_t row, std::uint64_t hash, std::uint64_t write) {
  const Id id = static_cast<Id>(row + 1);
  nodes_[row] = {hash, write, 0, 0};
  Id& root = bucket(hash);
  Id below, above;
  split(root, id, below, above);
  root = merge(merge(below, id), above);
}

// A row that is being written is in no tree: its writer tells when it is whole. One that is being edited stays. Who edits its key
// tells of it when the key is whole.
void Keys::look_at(std::uint64_t row) {
  const std::uint64_t write = read_key(row);
  if (write == 0) return forget(row);
  const std::uint64_t hash = hash_of_key(read_.data(), key_bytes_);
  if (nodes_[row].write == write && nodes_[row].hash == hash) return;
  forget(row);
  enter(row, hash, write);
}

// Asks for the memory ahead, as most of it waits for memory: the row, then the buckets that it leaves and enters, then their roots.
template <class RowOf>
void Keys::look_at_these(std::uint64_t n, RowOf&& row_of) {
  std::uint64_t hashes[2 * kAhead];  // of the rows that come next
  const auto ask_for_row = [&](std::uint64_t row) {
    __builtin_prefetch(&tickets_.word(row));
    __builtin_prefetch(&nodes_[row], 1);
    prefetch_row(key_, static_cast<std::int64_t>(row));
  };
  const auto ask_for_buckets = [&](std::uint64_t row, std::uint64_t& hash) {
    copy_from_shared(read_.data(), key_.row(row), key_bytes_);
    hash = hash_of_key(read_.data(), key_bytes_);
    __builtin_prefetch(&bucket(hash), 1);
    if (nodes_[row].write != 0) __builtin_prefetch(&bucket(nodes_[row].hash), 1);
  };
  const auto ask_for_root = [&](std::uint64_t hash) {
    const Id root = copied(bucket(hash));
    if (root != 0 && root <= rows_) __builtin_prefetch(&nodes_[root - 1], 1);
  };
  Change change(*this);
  for (std::uint64_t i = 0; i < n + 3 * kAhead; ++i) {
    if (i < n) ask_for_row(row_of(i));
    if (i >= kAhead && i - kAhead < n) ask_for_buckets(row_of(i - kAhead), hashes[i % (2 * kAhead)]);
    if (i >= 2 * kAhead && i - 2 * kAhead < n) {
      ask_for_root(hashes[(i - kAhead) % (2 * kAhead)]);
      if (const Node& known = nodes_[row_of(i - 2 * kAhead)]; known.write != 0) ask_for_root(known.hash);
    }
    if (i >= 3 * kAhead) look_at(row_of(i - 3 * kAhead));
  }
  change.done();
}

void Keys::look_at_all() {
  Change change(*this);
  header_->missed.exchange(0, std::memory_order_acq_rel);  // what those wrote who set it is seen below
  look_at_these(rows_, [](std::uint64_t i) { return i; });
  change.done();
}

void Keys::rebuild() {
  header_->redo.store(1, std::memory_order_relaxed);  // until it is done, if this process dies, too
  std::atomic_signal_fence(std::memory_order_seq_cst);
  for (std::uint64_t row = 0; row < rows_; ++row) nodes_[row].write = 0;
  std::fill_n(buckets_, rows_, 0);
  look_at_all();
}

void Keys::put_in_order() {
  const Lock guard(*this);
  rebuild();
}

void Keys::scan(std::uint64_t begin, std::uint64_t end) {
  if (begin > end || end > rows_) throw std::out_of_range("a scan of rows that there are not");
  const Lock guard(*this);
  look_at_these(end - begin, [begin](std::uint64_t i) { return begin + i; });
}

void Keys::catch_up() {
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
      if (!begun || nodes_[row].write == 0) first = std::min(first, p);
    }
    next_[lane] = first;
  }
  change.done();
}

// ---- lookups ---------------------------------------------------------------------------------------------------------

void Keys::find(const std::byte* keys, std::uint64_t n, std::int64_t* rows, std::int64_t* writes) {
  std::vector<std::uint64_t> hashes;
  for (std::uint64_t begin = 0; begin < n; begin += kPiece) {
    const std::uint64_t end = std::min(n, begin + kPiece);
    hashes.clear();
    for (std::uint64_t i = begin; i < end; ++i) hashes.push_back(hash_of_key(keys + i * key_bytes_, key_bytes_));
    const Lock guard(*this);
    const auto ask_for_root = [&](std::uint64_t i) {
      const Id root = copied(bucket(hashes[i - begin]));
      if (root == 0 || root > rows_) return;
      __builtin_prefetch(&nodes_[root - 1]);
      __builtin_prefetch(&tickets_.word(root - 1));  // mostly it is the row
      prefetch_row(key_, static_cast<std::int64_t>(root) - 1);
    };
    for (std::uint64_t i = begin; i < std::min(end, begin + 2 * kAhead); ++i) __builtin_prefetch(&bucket(hashes[i - begin]));
    for (std::uint64_t i = begin; i < std::min(end, begin + kAhead); ++i) ask_for_root(i);
    for (std::uint64_t i = begin; i < end; ++i) {
      if (i + 2 * kAhead < end) __builtin_prefetch(&bucket(hashes[i + 2 * kAhead - begin]));
      if (i + kAhead < end) ask_for_root(i + kAhead);
      rows[i] = writes[i] = -1;
      newest_first(bucket(hashes[i - begin]), hashes[i - begin], [&](std::uint64_t row) {
        const std::uint64_t write = read_key(row);
        if (write == 0 || !is_read(keys + i * key_bytes_)) return false;
        rows[i] = static_cast<std::int64_t>(row);
        writes[i] = static_cast<std::int64_t>(write);
        return true;
      });
    }
  }
}

Keys::Found Keys::find_all(const std::byte* keys, std::uint64_t n) {
  Found found;
  for (std::uint64_t begin = 0; begin < n; begin += kPiece) {
    const std::uint64_t end = std::min(n, begin + kPiece);
    const Lock guard(*this);
    for (const std::byte* key = keys + begin * key_bytes_; key != keys + end * key_bytes_; key += key_bytes_) {
      const std::uint64_t hash = hash_of_key(key, key_bytes_);
      newest_first(bucket(hash), hash, [&](std::uint64_t row) {
        const std::uint64_t write = read_key(row);
        if (write == 0 || !is_read(key)) return false;
        found.rows.push_back(static_cast<std::int64_t>(row));
        found.writes.push_back(static_cast<std::int64_t>(write));
        return false;
      });
    }
  }
  return found;
}

// ---- what writers tell -------------------------------------------------------------------------------------------------

void Keys::written(const std::int64_t* rows, std::uint64_t n, std::uint64_t) {
  const OwnRows own(rows, n, rows_);
  const Lock guard(*this, 1);
  look_at_these(n, [rows](std::uint64_t i) { return static_cast<std::uint64_t>(rows[i]); });
}

// An edit of other fields leaves the key and the number of the write as they are. It is looked at all the same where the row is not
// known: a process that looked at it while its ticket did not yet say that it is an edit took it for a row that is being written.
void Keys::edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t, std::span<const std::uint64_t> which, std::uint64_t) {
  const OwnRows own(rows, n, rows_);
  const bool keys = std::find(which.begin(), which.end(), field_) != which.end();
  const Lock guard(*this, 1);
  Change change(*this);
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto row = static_cast<std::uint64_t>(rows[i]);
    if (!keys && nodes_[row].write != 0 && nodes_[row].write == tickets_.held_write(row)) continue;
    look_at(row);
  }
  change.done();
}

void Keys::lost(const std::int64_t* rows, std::uint64_t n) { written(rows, n, 0); }

void Keys::emptied() {
  const Lock guard(*this, 1);
  rebuild();
}

void Keys::after_fork() {
  if (header_->mutex.held()) header_->mutex.format();  // its owner does not exist here
}

}  // namespace engram
