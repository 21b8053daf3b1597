// Finds rows by their key, the content of one field: an index of a store.
//
//   memory   KeysHeader, padded to a page · nodes {hash, write, left, right} [rows] of 24 bytes · buckets u32[rows], padded to 8 bytes
//
// A bucket holds the rows whose hashes fall into it as one search tree, ordered by hash, then by the number of the write that the row
// holds, then by row. So rows with one key stand side by side, the newest last, and many of them cost no more than O(log rows)
// (row_trees.h). The key itself is not copied: a lookup compares the bytes of the row, under its ticket. Everything here follows from the rows, so a change that a
// dead process left half done is rebuilt from them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "content_index.h"
#include "control.h"
#include "row_key.h"
#include "row_trees.h"
#include "shared_mutex.h"

namespace engram {

struct KeysHeader {
  char magic[8];  // "engkeys\1"
  std::uint64_t rows;
  std::uint64_t field;      // number of the key's field
  std::uint64_t key_bytes;  // of a row
  Word redo;                // 1: something is being changed
  Word missed;              // 1: the mutex was held for too long to note what was written
  SharedMutex mutex;
};
static_assert(sizeof(KeysHeader) <= kPage);

/// The hash that places a key. Zeros at its end do not count: a text that is filled up to the length of its field has the hash of the
/// text alone, as it would have in a field whose rows differ in length.
std::uint64_t hash_of_key(const std::byte* key, std::uint64_t bytes);

class Keys : public ContentIndex {
 public:
  static constexpr std::uint64_t kMostKeyBytes = 1024;

  /// Throws std::invalid_argument: more rows than trees can have.
  static std::uint64_t bytes(std::uint64_t rows);
  /// Writes the header into zeroed memory of bytes(). Throws std::invalid_argument: a key that is too long or empty.
  static void format(std::span<std::byte> memory, std::uint64_t rows, std::uint64_t field, std::uint64_t key_bytes);
  /// As Priorities::reset_mutex.
  static void reset_mutex(std::span<std::byte> memory);
  /// Into zeroed memory of that size, with nothing noted. Throws std::invalid_argument: no such memory.
  static void copy(std::span<std::byte> from, std::span<std::byte> to);
  static std::uint64_t field_of(std::span<std::byte> memory);

  /// A view of formatted memory, which must outlive it, as must the rows of `key`, the field that the header names, and their items.
  /// `text`: the group that the field leads, if its rows have any number of bytes. Throws std::invalid_argument: not such memory.
  Keys(std::span<std::byte> memory, const Control& tickets, const Field& key, const RaggedGroup* text = nullptr);

  std::uint64_t field() const { return field_; }
  std::uint64_t key_bytes() const { return key_bytes_; }

  /// Finds the row of each of n keys of key_bytes(), one behind the other: of several live rows with that key the one with the largest
  /// number of a write. Puts the rows and the numbers of their writes; -1 and -1 for a key of no row. O(log rows) each at most.
  void find(const std::byte* keys, std::uint64_t n, std::int64_t* rows, std::int64_t* writes);

  /// All live rows with one of n keys, and the numbers of their writes. A key that is named twice gives its rows twice.
  struct Found {
    std::vector<std::int64_t> rows, writes;
  };
  Found find_all(const std::byte* keys, std::uint64_t n);

  void edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0, std::span<const std::uint64_t> which,
              std::uint64_t scatter) override;

 private:
  using Id = std::uint32_t;  // of a row: its number + 1; 0 is none

  struct Node {
    std::uint64_t hash, write;  // write 0: the row is in no tree
    Id left, right;
  };
  static_assert(sizeof(Node) == 24);

  struct Trees : RowTrees<Trees> {
    static constexpr char kTree[] = "keys: expected trees of rows";

    Node* nodes;
    std::uint64_t rows;

    Trees(Node* nodes, std::uint64_t rows) : nodes(nodes), rows(rows) {}

    Node& node(Id id) const;
    bool precedes(Id a, Id b) const;
    void resize(Id) const {}
  };

  Id& bucket(std::uint64_t hash) const;
  template <class Visit>
  bool newest_first(Id tree, std::uint64_t hash, Visit&& visit, unsigned depth = 0) const;

  std::uint64_t read_key(std::uint64_t row);
  bool is_read(const std::byte* key) const { return std::memcmp(read_.data(), key, key_bytes_) == 0; }
  void look_at(std::uint64_t row) override;
  void look_at_each(Rows rows, std::uint64_t n) override;
  void forget_all() override;
  void forget(std::uint64_t row);

  KeysHeader* header_;
  std::uint64_t field_, key_bytes_;  // copies: the memory may be shared
  Node* nodes_;
  Trees trees_;
  Id* buckets_;
  RowKey key_;
  std::vector<std::byte> read_;  // the key that was read last, by the call under way
};

}  // namespace engram
