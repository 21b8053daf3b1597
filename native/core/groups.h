// Which rows have the same key, the content of one field: an index of a store, for draws of whole groups.
//
//   memory   GroupsHeader, padded to a page · numbers u64[rows] · keys [rows] of a multiple of 8 bytes · roots RowSet ·
//            nodes {group, left, right, size} u32[4][rows] · groups {root, next} u32[2][rows] · buckets u32[rows]
//
// The rows of a group are a search tree by ticket number, the oldest first; its shape follows from which rows are in it, as the
// priority of a node is a hash of its row (Seidel and Aragon, "Randomized search trees", 1996). The row at the root stands for the
// group in the set of all groups. So what is drawn follows from the rows, their numbers and keys alone, however they came there.
// Groups are found by a hash of their key. All of it follows from the rows: what a process that died left half done is rebuilt.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "control.h"
#include "gather.h"
#include "index.h"
#include "random.h"
#include "row_set.h"
#include "shared_mutex.h"

namespace engram {

struct GroupsHeader {
  char magic[8];  // "enggrou\1"
  std::uint64_t rows;
  std::uint64_t field;      // number of the key's field
  std::uint64_t key_bytes;  // of a row
  std::uint32_t fresh;      // groups that were ever in use
  std::uint32_t free;       // the first one that is in use no more, + 1
  Word redo;                // 1: something is being changed
  Word missed;              // 1: the mutex was held for too long to note what was written
  SharedMutex mutex;
};
static_assert(sizeof(GroupsHeader) <= kPage);

class Groups : public Index {
 public:
  static constexpr std::uint64_t kMostKeyBytes = 1024;

  /// Throws std::invalid_argument: more rows than a set can have, or a key that is too long or empty.
  static std::uint64_t bytes(std::uint64_t rows, std::uint64_t key_bytes);
  /// Writes the header into zeroed memory of bytes().
  static void format(std::span<std::byte> memory, std::uint64_t rows, std::uint64_t field, std::uint64_t key_bytes);
  /// As Priorities::reset_mutex.
  static void reset_mutex(std::span<std::byte> memory);
  /// Into zeroed memory of that size, with nothing noted. Throws std::invalid_argument: no such memory.
  static void copy(std::span<std::byte> from, std::span<std::byte> to);
  static std::uint64_t field_of(std::span<std::byte> memory);

  /// A view of formatted memory, which must outlive it, as must the rows of `key`, the field that the header names. Throws
  /// std::invalid_argument: not such memory.
  Groups(std::span<std::byte> memory, const Control& tickets, const Field& key);

  std::uint64_t rows() const { return rows_; }
  std::uint64_t field() const { return field_; }
  /// How many groups there are.
  std::uint64_t groups();

  enum class Order { any, newest };
  struct Drawn {
    bool any;       // false: there is no group
    bool repeated;  // there were too few groups beside those left out, or too few rows in one of them
  };
  /// Draws n groups, each once and all equally likely, and `each` rows of every one: each once and all equally likely; or the newest,
  /// the oldest of them first. Where there are too few, all come, and after them some again. `without`: rows whose groups are to be
  /// left out, if that leaves enough. Puts n * each rows, group by group, and their ticket numbers.
  Drawn draw(std::uint64_t key, std::uint64_t n, std::uint64_t each, Order order, std::span<const std::int64_t> without,
             std::int64_t* rows, std::int64_t* numbers);

  /// The same groups, but all of their rows, the oldest first: of each how many, one after another.
  struct Members {
    std::vector<std::int64_t> rows, numbers, sizes;
    bool repeated = false;
  };
  Members draw_members(std::uint64_t key, std::uint64_t n, std::span<const std::int64_t> without);

  /// For a view of a store whose writers do not tell it: looks at what was appended since the last time, or at all rows after a write by
  /// number. O(rows written), or a word per row.
  void catch_up();

  /// Looks at the rows [begin, end). As Priorities::scan.
  void scan(std::uint64_t begin, std::uint64_t end);
  /// After a recovery of the rows: O(rows).
  void put_in_order();

  void written(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0) override;
  void edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0, std::span<const std::uint64_t> which,
              std::uint64_t scatter) override;
  void lost(const std::int64_t* rows, std::uint64_t n) override;
  void emptied() override;

  void after_fork();

 private:
  /// Held for every look; rebuilds what a dead holder left half done.
  class Lock;
  /// Around every change, noted in the memory.
  class Change;

  using Id = std::uint32_t;  // of a row or a group: its number + 1; 0 is none

  struct Node {
    Id group, left, right;
    std::uint32_t size;
  };
  struct Group {
    Id root, next;  // in its bucket; of one that is not in use the next such one
  };

  Node& node(Id id) const;
  Group& group(Id id) const;
  std::uint64_t number(Id id) const { return numbers_[id - 1]; }
  std::uint64_t size_of(Id id) const { return id == 0 ? 0 : node(id).size; }
  void resize(Id id) const { node(id).size = static_cast<std::uint32_t>(1 + size_of(node(id).left) + size_of(node(id).right)); }
  Id merge(Id a, Id b, unsigned depth = 0) const;
  bool is_older(Id a, Id b) const;
  void split(Id tree, Id row, Id& below, Id& above, unsigned depth = 0) const;
  Id without_row(Id tree, Id row, unsigned depth = 0) const;
  /// Of a row in a tree: where it was looked for until now, and its rank there.
  struct Place {
    Id id;
    bool found;
    std::uint64_t rank;
  };
  void find_all(std::vector<Place>& places) const;
  void ask_for(const std::vector<Id>& roots) const;
  void set_root(Group& group, Id root);

  std::uint64_t bucket_of(const std::byte* key) const;
  Id find_or_make(const std::byte* key);
  void remove_group(Id id);

  bool is_known(std::uint64_t row) const;
  void look_at(std::uint64_t row);
  void forget(std::uint64_t row);
  void look_at_all();
  void rebuild();
  template <class Rows>
  void look_at_these(const Rows* rows, std::uint64_t n);

  std::vector<Id> choose(const Random& random, std::uint64_t n, std::span<const std::int64_t> without, bool& repeated) const;

  GroupsHeader* header_;
  std::uint64_t rows_, field_, key_bytes_, key_stride_;  // copies: the memory may be shared
  std::uint64_t* numbers_;                               // 0: the row is in no group
  std::byte* keys_;                                      // of groups
  RowSet roots_;
  Node* nodes_;
  Group* groups_;
  Id* buckets_;
  const Control tickets_;
  Field key_;
  std::vector<std::byte> looked_at_;       // of the call under way
  std::vector<std::uint64_t> next_, base_;  // of catch_up(), for each lane
  std::uint64_t scatters_ = ~std::uint64_t{0};
};

}  // namespace engram
