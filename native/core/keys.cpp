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

std::uint64_t Keys::bytes(std::uint64_t rows) {
  check(rows > 0 && rows < kMostTreeRows, "keys: expected a store of 1 to 2^32 - 2 rows");
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

Keys::Keys(std::span<std::byte> memory, const Control& tickets, const Field& key, const RaggedGroup* text)
    : ContentIndex(RedoWords::of(*header_in(memory)), tickets, copied(header_in(memory)->rows)),
      header_(header_in(memory)),
      field_(copied(header_->field)),
      key_bytes_(copied(header_->key_bytes)),
      nodes_(reinterpret_cast<Node*>(memory.data() + kPage)),
      trees_(nodes_, rows_),
      buckets_(reinterpret_cast<Id*>(nodes_ + rows_)),
      key_(key, key_bytes_, text),
      read_(key_bytes_) {}

// ---- trees ---------------------------------------------------------------------------------------------------------

Keys::Node& Keys::Trees::node(Id id) const {
  intact(id > 0 && id <= rows, kTree);
  return nodes[id - 1];
}

Keys::Id& Keys::bucket(std::uint64_t hash) const {
  return buckets_[static_cast<std::uint64_t>((static_cast<unsigned __int128>(hash) * rows_) >> 64)];
}

// Rows of zeros that one write by number has made have the same number: the row decides.
bool Keys::Trees::precedes(Id a, Id b) const {
  const Node &one = node(a), &other = node(b);
  if (one.hash != other.hash) return one.hash < other.hash;
  return one.write != other.write ? one.write < other.write : a < b;
}

// Visits the rows with a hash, the newest first, until `visit` returns true; whether it did.
template <class Visit>
bool Keys::newest_first(Id tree, std::uint64_t hash, Visit&& visit, unsigned depth) const {
  while (tree != 0) {
    intact(depth < Trees::kMostDepth, Trees::kTree);
    const Node here = trees_.node(tree);
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

// Reads the key of a row; the number of the write that the row holds, or 0: it holds none.  A row that is
// being edited holds its write all the same; if its key is being replaced, what is read may be torn.
std::uint64_t Keys::read_key(std::uint64_t row) {
  for (;;) {
    const std::uint64_t word = tickets_.held_word(row);
    if (!Control::holds_write(word) || tickets_.left_behind(row, word)) return 0;
    const std::uint64_t write = tickets_.write_of(row, word);
    key_.copy(tickets_, row, read_.data());
    fence(std::memory_order_acquire);
    if (tickets_.word(row).load(std::memory_order_relaxed) == word) return write;
  }
}

void Keys::forget(std::uint64_t row) {
  Node& gone = nodes_[row];
  if (gone.write == 0) return;
  Id& root = bucket(gone.hash);
  root = trees_.without(root, static_cast<Id>(row + 1));
  gone.write = 0;
}

// A row that is being written is in no tree: its writer tells when it is whole. One that is being edited stays. Who edits its key
// tells of it when the key is whole.
void Keys::look_at(std::uint64_t row) {
  const std::uint64_t write = read_key(row);
  if (write == 0) return forget(row);
  const std::uint64_t hash = hash_of_key(read_.data(), key_bytes_);
  if (nodes_[row].write == write && nodes_[row].hash == hash) return;
  forget(row);
  nodes_[row] = {hash, write, 0, 0};
  Id& root = bucket(hash);
  root = trees_.with(root, static_cast<Id>(row + 1));
}

// Asks for the memory ahead, as most of it waits for memory: the row, then the buckets that it leaves and enters, then their roots.
void Keys::look_at_each(Rows rows, std::uint64_t n) {
  std::uint64_t hashes[2 * kAhead];  // of the rows that come next
  const auto ask_for_row = [&](std::uint64_t row) {
    __builtin_prefetch(&tickets_.word(row));
    __builtin_prefetch(&nodes_[row], 1);
    key_.prefetch(static_cast<std::int64_t>(row));
  };
  const auto ask_for_buckets = [&](std::uint64_t row, std::uint64_t& hash) {
    key_.copy(tickets_, row, read_.data());
    hash = hash_of_key(read_.data(), key_bytes_);
    __builtin_prefetch(&bucket(hash), 1);
    if (nodes_[row].write != 0) __builtin_prefetch(&bucket(nodes_[row].hash), 1);
  };
  const auto ask_for_root = [&](std::uint64_t hash) {
    const Id root = copied(bucket(hash));
    if (root != 0 && root <= rows_) __builtin_prefetch(&nodes_[root - 1], 1);
  };
  for (std::uint64_t i = 0; i < n + 3 * kAhead; ++i) {
    if (i < n) ask_for_row(rows[i]);
    if (i >= kAhead && i - kAhead < n) ask_for_buckets(rows[i - kAhead], hashes[i % (2 * kAhead)]);
    if (i >= 2 * kAhead && i - 2 * kAhead < n) {
      ask_for_root(hashes[(i - kAhead) % (2 * kAhead)]);
      if (const Node& known = nodes_[rows[i - 2 * kAhead]]; known.write != 0) ask_for_root(known.hash);
    }
    if (i >= 3 * kAhead) look_at(rows[i - 3 * kAhead]);
  }
}

void Keys::forget_all() {
  for (std::uint64_t row = 0; row < rows_; ++row) nodes_[row].write = 0;
  std::fill_n(buckets_, rows_, 0);
}

// ---- lookups ---------------------------------------------------------------------------------------------------------

void Keys::find(const std::byte* keys, std::uint64_t n, std::int64_t* rows, std::int64_t* writes) {
  std::vector<std::uint64_t> hashes;
  for (std::uint64_t begin = 0; begin < n; begin += kPiece) {
    const std::uint64_t end = std::min(n, begin + kPiece);
    hashes.clear();
    for (std::uint64_t i = begin; i < end; ++i) hashes.push_back(hash_of_key(keys + i * key_bytes_, key_bytes_));
    const RedoLock guard = lock();
    const auto ask_for_root = [&](std::uint64_t i) {
      const Id root = copied(bucket(hashes[i - begin]));
      if (root == 0 || root > rows_) return;
      __builtin_prefetch(&nodes_[root - 1]);
      __builtin_prefetch(&tickets_.word(root - 1));  // mostly it is the row
      key_.prefetch(static_cast<std::int64_t>(root) - 1);
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
    const RedoLock guard = lock();
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

// An edit of other fields leaves the key and the number of the write as they are. It is looked at all the same where the row is not
// known: a process that looked at it while its ticket did not yet say that it is an edit took it for a row that is being written.
void Keys::edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t, std::span<const std::uint64_t> which, std::uint64_t) {
  const OwnRows own(rows, n, rows_);
  const bool keys = std::find(which.begin(), which.end(), field_) != which.end();
  const RedoLock guard = lock(1);
  RedoChange change(redo_);
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto row = static_cast<std::uint64_t>(rows[i]);
    if (!keys && nodes_[row].write != 0 && nodes_[row].write == tickets_.held_write(row)) continue;
    look_at(row);
  }
  change.done();
}

}  // namespace engram
