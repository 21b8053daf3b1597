// Which rows have the same key, the content of one field: an index of a store, for draws of whole groups.
//
//   memory   GroupsHeader, padded to a page · numbers u64[rows] · keys [rows] of a multiple of 8 bytes · roots RowSet ·
//            nodes {group, left, right, size} u32[4][rows] · groups {root, next} u32[2][rows] · buckets u32[rows]
//            · roots of complete groups RowSet[kComplete]
//            · where uses are counted: writes u64[rows] · uses u32[rows] · where rows have versions: versions f64[rows] · ages u32[2][rows]
//            · where groups are in order: places u64[rows] · nodes u32[4][rows] · newest u32[rows]
//
// A row is in its group while it is admitted: it is whole, its fields say that it is ready, it is not used up, and its version is not
// too old. So each draw draws of admitted rows, and no draw looks at others. Groups that have so many rows are a set for each such number
// that draws have asked for, up to kComplete of them.
//
// The rows of a group are a search tree by ticket number, the oldest first (row_trees.h). The row at the root stands for the group in
// the set of all groups. So what is drawn follows from the rows, their numbers and keys alone, however they came there.
// Groups are found by a hash of their key. All of it follows from the rows and their uses: what a process that died left half done is
// rebuilt. A use counts for all rows that a group has, and for all groups of a draw at once: each row is marked, then one word says that
// the marks count. A use belongs to the write that a row holds, which edits leave as it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <unordered_set>
#include <vector>

#include "content_index.h"
#include "control.h"
#include "gather.h"
#include "others_uses.h"
#include "random.h"
#include "row_key.h"
#include "row_rules.h"
#include "row_set.h"
#include "row_trees.h"
#include "shared_mutex.h"

namespace engram {

using GroupsField = RuleField;

/// By which groups are in order: by when their newest row was written or edited, or by the variance of their rewards.
enum class GroupsOrder : std::uint64_t { none, age, spread };

struct GroupsHeader {
  static constexpr std::uint64_t kReady = RowRules::kReady, kComplete = 4;

  char magic[8];  // "enggrou\2"; of earlier versions, which end behind the mutex and the buckets, \1
  std::uint64_t rows;
  std::uint64_t field;      // number of the key's field
  std::uint64_t key_bytes;  // of a row
  std::uint32_t fresh;      // groups that were ever in use
  std::uint32_t free;       // the first one that is in use no more, + 1
  Word redo;                // 1: something is being changed
  Word missed;              // 1: the mutex was held for too long to note what was written
  SharedMutex mutex;
  std::uint64_t most;          // uses of a row; 0: any number, and none is counted
  std::uint64_t ready_fields;  // how many
  GroupsField ready[kReady];   // fields without NaN
  std::uint64_t dated;         // 1: rows have versions
  GroupsField version;
  std::uint64_t staleness;     // how much older than its consumer a version may be
  Word counting;               // 1: marked uses count
  double floor;                // the oldest version
  std::uint64_t dated_rows;    // admitted ones
  struct Complete {
    std::uint64_t least, asked;  // rows of each of its groups, 0: not in use; when it was asked for last
  } complete[kComplete];
  std::uint64_t asked;  // how often
  Word used, expired, evicted;  // rows that were used up, that became too old, and that were overwritten before they were used up
  Word starved;                 // draws that found too few complete groups
  std::uint64_t order, least;   // GroupsOrder of the groups of so many rows
  GroupsField reward;           // that the order is by
  std::uint64_t first;          // root of the tree of groups in order
  Word dropped;                 // rows that were removed, or lost with their writer, before they were used up
};
static_assert(sizeof(GroupsHeader) <= kPage);

/// Which rows are in groups, and which field says in which one.
struct GroupsPolicy {
  std::uint64_t field = 0, key_bytes = 0;
  std::vector<GroupsField> ready = {};
  std::uint64_t most = 0;        // uses; 0: any number
  bool dated = false;            // they have versions
  GroupsField version = {};
  std::uint64_t staleness = 0;
  GroupsOrder order = GroupsOrder::none;
  std::uint64_t least = 0;       // rows of each group that is in order
  GroupsField reward = {};       // that the spread is of

  RowRules rules() const { return {ready, dated, version}; }
};

class Groups : public ContentIndex {
 public:
  static constexpr std::uint64_t kMostKeyBytes = 1024;
  static constexpr std::uint64_t kMostUses = std::uint64_t{1} << 24;

  /// Throws std::invalid_argument: more rows than a set can have, a key that is too long or empty, fields without such numbers, or too
  /// many of them.
  static std::uint64_t bytes(std::uint64_t rows, const GroupsPolicy& policy);
  /// Writes the header into zeroed memory of bytes().
  static void format(std::span<std::byte> memory, std::uint64_t rows, const GroupsPolicy& policy);
  /// As Priorities::reset_mutex.
  static void reset_mutex(std::span<std::byte> memory);
  /// Into zeroed memory of that size, with nothing noted. Throws std::invalid_argument: no such memory.
  static void copy(std::span<std::byte> from, std::span<std::byte> to);
  static GroupsPolicy policy_of(std::span<std::byte> memory);

  /// A view of formatted memory, which must outlive it, as must the rows of `fields`: the key, those that say whether a row is ready, and
  /// the version and the reward if there are such, as policy_of() names them. `text`: as for RowKey. Throws std::invalid_argument: not
  /// such memory.
  Groups(std::span<std::byte> memory, const Control& tickets, std::vector<Field> fields, const RaggedGroup* text = nullptr);

  /// As Consumption::follow, of uses.
  void follow(std::span<std::byte> theirs, bool copied);
  /// As ContentIndex::catch_up, and takes over what others have used, if it follows them: a look at a word per row.
  void catch_up();

  std::uint64_t field() const { return policy_.field; }
  const GroupsPolicy& policy() const { return policy_; }
  /// Of Asked::floor: it stays as it is.
  static constexpr double kSame = std::numeric_limits<double>::quiet_NaN();

  /// How many groups have `least` rows, or more. `floor`: as of a draw. O(1); in memory of earlier versions O(groups).
  std::uint64_t groups(std::uint64_t least = 1, double floor = kSame);
  /// What was counted since there are these groups; looked at without the mutex.
  struct Counts {
    std::uint64_t groups;                  // as of now
    std::uint64_t used, expired, evicted;  // rows that were used up, became too old, or were overwritten before they were used up
    std::uint64_t dropped, starved;        // rows that were removed or lost before that; draws that found too few complete groups
  };
  Counts counted() const;

  /// Which groups: at random, or the first or last ones that are in order.
  enum class Which { any, first, last };

  struct Asked {
    std::uint64_t n, each;  // groups, and rows of each
    bool complete = false;  // no row comes twice, and no group: where there are too few, none is drawn
    double floor = kSame;                        // rows of older versions are not admitted any more
    Which which = Which::any;                    // else `each` is the policy's, and `complete`
    std::span<const std::int64_t> without = {};  // rows whose groups are to be left out; unless `complete`, if that leaves enough
  };
  enum class Order { any, newest };
  struct Drawn {
    bool any;       // false: there is no group, or not enough complete ones
    bool repeated;  // there were too few groups beside those left out, or too few rows in one of them
  };
  /// Draws groups, each once and all equally likely, and rows of every one: each once and all equally likely; or the newest, the oldest
  /// of them first. Where there are too few, all come, and after them some again, unless `complete`. Puts n * each rows, group by
  /// group, and their ticket numbers. Where uses are counted, all rows of these groups have one more when this returns.
  Drawn draw(std::uint64_t key, const Asked& asked, Order order, std::int64_t* rows, std::int64_t* numbers);

  /// The same groups, but all of their rows, the oldest first: of each how many, one after another.
  struct Members {
    std::vector<std::int64_t> rows, numbers, sizes;
    bool repeated = false;
  };
  Members draw_members(std::uint64_t key, const Asked& asked);

  /// Rows that were drawn with these ticket numbers do not count as used by that, if they hold the same writes still.
  void take_back(const std::int64_t* rows, const std::int64_t* numbers, std::uint64_t n);
  /// How often each of the rows [0, n) was used. Throws std::invalid_argument for more than there are, or where uses are not counted.
  void copy_uses(std::int32_t* out, std::uint64_t n);
  /// Rows [0, n) were used so often, and others not yet. O(rows).
  void restore_uses(const std::int32_t* uses, std::uint64_t n);

  void lost(const std::int64_t* rows, std::uint64_t n) override;
  void evicted(const std::int64_t* rows, std::uint64_t n) override;

 private:
  using Id = std::uint32_t;  // of a row or a group: its number + 1; 0 is none

  struct Node {
    Id group, left, right;
    std::uint32_t size;
  };
  struct Group {
    Id root, next;  // in its bucket; of one that is not in use the next such one
  };

  // Beside the uses of a row: it is being counted.
  static constexpr std::uint32_t kUses = kMostUses - 1, kMarked = std::uint32_t{1} << 31;

  /// Search trees of rows by a number of each, and by the row where that is the same.
  struct Trees : RowTrees<Trees> {
    static constexpr char kTree[] = "groups: expected trees of rows";

    Node* nodes = nullptr;
    const std::uint64_t* numbers = nullptr;
    std::uint64_t rows = 0;

    Trees() = default;
    Trees(Node* nodes, const std::uint64_t* numbers, std::uint64_t rows) : nodes(nodes), numbers(numbers), rows(rows) {}

    Node& node(Id id) const;
    std::uint64_t size_of(Id id) const { return id == 0 ? 0 : node(id).size; }
    void resize(Id id) const { node(id).size = static_cast<std::uint32_t>(1 + size_of(node(id).left) + size_of(node(id).right)); }
    bool precedes(Id a, Id b) const;
    Id at(Id tree, std::uint64_t rank) const;
  };

  Node& node(Id id) const { return trees_.node(id); }
  Group& group(Id id) const;
  std::uint64_t number(Id id) const { return numbers_[id - 1]; }
  /// Of a row in a tree: where it was looked for until now, and its rank there.
  struct Place {
    Id id;
    bool found;
    std::uint64_t rank;
  };
  void find_all(std::vector<Place>& places) const;
  void ask_for(const std::vector<Id>& roots) const;
  void set_root(Group& group, Id root);
  RowSet& complete(std::uint64_t least);
  void order(Id of, Id root);
  std::uint64_t place_of(Id root, Id newest);

  std::uint64_t bucket_of(const std::byte* key) const;
  Id find_or_make(const std::byte* key);
  void remove_group(Id id);

  bool is_known(std::uint64_t row) const;
  bool read(std::uint64_t row, std::uint64_t word);
  bool has_uses_left(std::uint64_t row);
  void look_at(std::uint64_t row) override;
  void forget_all() override;
  void forget(std::uint64_t row);
  void leave(const std::int64_t* rows, std::uint64_t n, Word& counter);

  void expire(double floor);

  std::vector<Id> choose(const Random& random, const Asked& asked, bool& repeated);
  std::vector<Id> in_order(const Asked& asked, const std::unordered_set<Id>& out) const;
  void each_of(Id root, std::vector<std::int64_t>& rows) const;
  void count(std::vector<Id> roots);
  void end_counting();
  bool counts() const { return policy_.most > 0; }

  GroupsHeader* header_;
  GroupsPolicy policy_;                     // a copy, as are the next: the memory may be shared
  std::uint64_t key_bytes_, key_stride_;
  std::uint64_t* numbers_;                  // 0: the row is in no group
  std::byte* keys_;                                      // of groups
  RowSet roots_;
  Trees trees_;  // of groups
  Group* groups_;
  Id* buckets_;
  std::vector<RowSet> complete_;  // none in memory of earlier versions
  std::uint64_t* writes_ = nullptr;  // that the uses are of
  std::uint32_t* uses_ = nullptr;
  const GroupsHeader* totals_;       // that of others, if it follows them
  std::optional<OthersUses> others_;
  VersionHeap versions_;        // of admitted rows
  std::uint64_t* order_ = nullptr;  // of the newest row of a group that is in order, its place there: what it is compared by
  Trees in_order_;                  // of these rows, one tree
  Id* newest_ = nullptr;            // of a group that is in order: that row; else 0
  std::vector<Field> fields_;               // the key, those that say whether a row is ready, the version, the reward
  RowKey key_;
  RuleReader reader_;                       // of the second and the third
  std::vector<std::byte> looked_at_;        // the key of a row, of the call under way, filled up to key_stride_
  double version_ = 0;                      // and its version
  std::uint64_t write_ = 0;                 // and the number of its write
};

}  // namespace engram
