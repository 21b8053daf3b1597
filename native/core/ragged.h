// Rows of any length: the items of ragged fields, in rings beside the rows.
//
//   memory   RaggedPage, padded to a page · per lane: tail, then head and floor of each group, padded to 64 bytes
//   items    per field lanes · items of the ring, wherever the caller says
//
// Fields that share lengths form a group. A row's column of the group's leader is its *span*: an offset and a length, in items. Offsets
// only grow within a lane; an item lies at `offset mod items of the ring`, and the items of a row are contiguous. Spans are written,
// and read, as any field, under the row's ticket. An append reserves positions and items under one mutex, so that both have the same
// order. Before it writes items it makes the rows void that they belonged to, the oldest first, and waits for writers of such rows. So a
// reader looks at the ticket, copies the items, and looks again, as for any field.
//
// In *slots* each row has room of its own for as many items as a row may have: the offset of a row's span is that room's, whatever was there
// before. Then the ticket of a row is all that its items need: nothing is evicted, no mutex is taken, and rows may be written anywhere.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "control.h"
#include "gather.h"
#include "shared_mutex.h"

namespace engram {

/// Where the items of a row lie, as its column says.
struct Span {
  std::uint64_t offset = 0;
  std::uint32_t length = 0;

  static constexpr std::uint64_t kBytes = 12;

  static Span at(const std::byte* column) {
    Span span;
    copy_from_shared(reinterpret_cast<std::byte*>(&span.offset), column, sizeof span.offset);
    copy_from_shared(reinterpret_cast<std::byte*>(&span.length), column + sizeof span.offset, sizeof span.length);
    return span;
  }
  void put(std::byte* column) const {
    std::memcpy(column, &offset, sizeof offset);
    std::memcpy(column + sizeof offset, &length, sizeof length);
  }
};

/// Items of one field: those of all lanes one behind the other.
struct ItemField {
  std::uint64_t field;  // its number in the store
  std::byte* data;
  std::uint64_t item_bytes;
};

/// Fields whose rows have the same lengths.
struct RaggedGroup {
  std::uint64_t leader;  // the field whose column has the spans
  std::uint64_t items;   // of the ring of a lane
  std::vector<ItemField> fields;
  std::uint64_t slot = 0;  // items of the room that each row has; 0: rows share the ring

  /// The most items that a row can have.
  std::uint64_t most() const { return slot > 0 ? slot : items; }
};

/// What a caller writes to the fields of a group: row i has lengths[i] items from starts[i] on, of each field's values.
struct RaggedSource {
  const std::uint32_t* lengths;
  const std::int64_t* starts;
  std::uint64_t total;                        // items of each field's values
  std::vector<const std::byte*> values;       // per field of the group; null: zeros
};

struct RaggedPage {
  static constexpr std::uint64_t kMostGroups = 64;
  struct Group {
    std::uint64_t leader, items;
  };

  char magic[8];  // "engragg\1"
  std::uint64_t capacity, lanes, groups;
  Word evicted;  // rows, since the store was made
  alignas(64) SharedMutex mutex;
  std::byte unused[1024 - 64 - sizeof(SharedMutex)];
  Group entries[kMostGroups];
};
static_assert(sizeof(RaggedPage) <= kPage && offsetof(RaggedPage, entries) == 1024);

/// The rings of a store.
class Ragged {
 public:
  static std::uint64_t bytes(std::uint64_t lanes, std::uint64_t groups) { return kPage + lanes * stride(groups) * sizeof(Word); }

  /// Writes the page into zeroed memory of bytes().
  static void format(std::span<std::byte> memory, const Geometry& geometry, std::span<const RaggedPage::Group> groups);

  /// A view of formatted memory, which must outlive it, as must the items. Throws std::invalid_argument: not such memory, or of other
  /// groups. `alone`: no other process uses it, so the mutex is formatted.
  Ragged(std::span<std::byte> memory, const Geometry& geometry, std::vector<RaggedGroup> groups, bool alone);

  const std::vector<RaggedGroup>& groups() const { return groups_; }
  /// Whether each row has room of its own.
  bool slots() const { return groups_.front().slot > 0; }
  RaggedPage& page() const { return *page_; }
  /// The mutex as no process holds it: in a forked child, of memory that it shares with none.
  void forget_holds() const { page_->mutex.format(); }

  /// Position of the oldest row of a lane whose items may be there still.
  Word& tail(std::uint64_t lane) const { return words_[lane * stride_]; }
  /// The offset of the next item.
  Word& head(std::uint64_t lane, std::uint64_t group) const { return words_[lane * stride_ + 1 + 2 * group]; }
  /// No row has, or is being given, items below this offset.
  Word& floor(std::uint64_t lane, std::uint64_t group) const { return words_[lane * stride_ + 2 + 2 * group]; }

  /// Where the items of a span begin in a field.
  static std::byte* items_of(const RaggedGroup& group, const ItemField& field, std::uint64_t lane, const Span& span) {
    return field.data + (lane * group.items + span.offset % group.items) * field.item_bytes;
  }
  /// Takes the memory of a span, which a file with holes may have no space for. False: it has none; where the kernel does not say, the
  /// writer finds out.
  static bool take(const RaggedGroup& group, std::uint64_t lane, const Span& span);
  /// Whether a span, which a caller may have made up, lies within the ring.
  static bool fits(const RaggedGroup& group, const Span& span) {
    return span.length <= group.items && span.offset % group.items <= group.items - span.length;
  }

 private:
  static std::uint64_t stride(std::uint64_t groups) { return (1 + 2 * groups + 7) / 8 * 8; }

  std::vector<RaggedGroup> groups_;
  std::uint64_t stride_;
  RaggedPage* page_;
  Word* words_;
};

/// A copy of what a caller says of the items of a group: lengths and starts decide addresses.
class RaggedItems {
 public:
  /// Throws std::invalid_argument: another number of fields than the group has, items outside of the values, or a row longer than a ring.
  RaggedItems(const RaggedGroup& group, std::uint64_t n, const RaggedSource& source);

  std::uint32_t length(std::uint64_t i) const { return lengths_[i]; }
  const std::byte* values(std::uint64_t field) const { return values_[field]; }
  /// Whether the items of row `next` follow those of a row that begin at `start`, and are `length`.
  bool follow(std::uint64_t next, std::uint64_t start, std::uint64_t length) const {
    return static_cast<std::uint64_t>(starts_[next]) == static_cast<std::uint64_t>(starts_[start]) + length;
  }

  /// Copies the items of row i to a span, of the fields that have values; `all`: and zeros to the others.
  void put(const Ragged& ragged, std::uint64_t lane, const Span& span, std::uint64_t i, bool all = false) const;
  /// Copies `length` items, from those of row i on, of one field; zeros where it has no values.
  void put(std::uint64_t field, std::byte* to, std::uint64_t i, std::uint64_t length) const;

 private:
  const RaggedGroup* group_;
  std::vector<std::uint32_t> lengths_;
  std::vector<std::int64_t> starts_;
  std::vector<const std::byte*> values_;
  bool streams_ = false;  // past the caches, where the items would drive all else out of them
};

/// One call that appends rows with items, and the spans that the rows are given.
class RaggedWrite {
 public:
  /// Throws as RaggedItems; std::invalid_argument: another number of groups than the store has.
  RaggedWrite(const Ragged& ragged, std::uint64_t n, std::span<const RaggedSource> sources);

  std::uint64_t rows() const { return n_; }
  const Ragged& ragged() const { return *ragged_; }
  Span span(std::uint64_t group, std::uint64_t i) const { return Span::at(spans_[group].data() + i * Span::kBytes); }

  /// The columns of a write, with spans in those of the leaders.
  std::vector<const std::byte*> columns(std::span<const std::byte* const> given) const;

  /// Gives rows their items, in order: n of them, those that `pick` names, or from the first on. The mutex is held. The heads move
  /// before any row is reserved, so a process that dies in here leaves items that no row has.
  void reserve(std::uint64_t lane, std::uint64_t n, const std::int64_t* pick);

  /// Where the items of all rows of a group begin, and their lengths in one number: rows of these lengths that begin there have the same
  /// items again.
  struct Place {
    std::uint64_t first, lengths;
  };
  Place place(std::uint64_t group) const;
  /// Gives all rows the items that they had; slots are given by position. Throws std::invalid_argument: rows of other lengths had them.
  void put_back(std::uint64_t group, const Place& place);

  /// The same in slots: rows are given those of the position `first` and the ones behind it.
  void give_slots(std::uint64_t lane_length, std::uint64_t first, std::uint64_t n, const std::int64_t* pick);
  /// What row i would have in a slot.
  Span in_slot(std::uint64_t group, std::uint64_t slot, std::uint64_t i) const {
    return {slot * ragged_->groups()[group].slot, groups_[group].length(i)};
  }

  /// How many of `most` rows from the i-th on are written together: some bytes, and no more items than half a ring.
  std::uint64_t chunk(std::uint64_t i, std::uint64_t most, const std::int64_t* pick, std::uint64_t bytes) const;

  /// Where the first row's ticket number is noted before the row is written; null: nowhere.
  Word* noted = nullptr;

  /// Copies the items of n rows from the i-th on. Their rows are marked.
  void put(std::uint64_t lane, std::uint64_t i, std::uint64_t n, const std::int64_t* pick) const;
  /// The items of a group of row i, to that span. Its row is marked.
  void put(std::uint64_t group, std::uint64_t lane, const Span& span, std::uint64_t i) const { groups_[group].put(*ragged_, lane, span, i, true); }

 private:
  static std::uint64_t source(const std::int64_t* pick, std::uint64_t i) { return pick == nullptr ? i : static_cast<std::uint64_t>(pick[i]); }
  std::uint64_t give(std::uint64_t group, std::uint64_t next, std::uint64_t n, const std::int64_t* pick);
  std::uint64_t hash_of_lengths(std::uint64_t group) const;

  const Ragged* ragged_;
  std::uint64_t n_;
  std::vector<RaggedItems> groups_;
  std::vector<std::vector<std::byte>> spans_;
};

}  // namespace engram
