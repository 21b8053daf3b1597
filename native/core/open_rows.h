// Rows that still grow: slots of a store, each with one row that is being put together, and who has it.
//
//   memory   OpenRowsPage, padded to a page · slots of OpenSlot and what the caller keeps there
//
// A slot is free or has an owner, which one word says, so that it changes hands in one step and outlives its owner. The append that seals
// a row notes its ticket number in the slot before the row is written. A process that finds the number of a writer that died asks whether
// that row is whole: then the slot is free, and else the row grows on. So a row is sealed once, or not. While a slot is emptied for a new
// row, or given back, it says that nothing is in it: if its owner dies then, it is free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "control.h"
#include "index.h"

namespace engram {

struct OpenRowsPage {
  char magic[8];  // "engopen\1"
  std::uint64_t slots, slot_bytes;
};

struct OpenSlot {
  alignas(64) Word owner;  // 0: free
  Word sealed_as;          // number of the write that seals the row; 0: none; kNoRow: nothing is in it. Of a free slot it says nothing
};

/// Where things lie in the caller's part of a slot: how often it was taken; the items of each group, 4 bytes; a byte of each field, whether
/// it was given; then, each at a multiple of 64 bytes, a row of each field, or room for the items of a ragged one.
class SlotLayout {
 public:
  /// Fields that share lengths.
  struct Group {
    std::uint64_t most;  // items of a row
    std::vector<std::uint64_t> fields;
  };

  /// `bytes`: of a row of each field; of an item of those that are in a group.
  SlotLayout(std::vector<std::uint64_t> bytes, std::vector<Group> groups);

  std::uint64_t fields() const { return bytes_.size(); }
  std::uint64_t bytes(std::uint64_t field) const { return bytes_.at(field); }
  const std::vector<Group>& groups() const { return groups_; }
  bool is_ragged(std::uint64_t field) const { return ragged_.at(field); }
  std::uint64_t length(std::uint64_t group) const { return sizeof(std::uint64_t) + group * sizeof(std::uint32_t); }
  std::uint64_t given(std::uint64_t field) const { return length(groups_.size()) + field; }
  /// Where the row of a field, or its items, begin.
  const std::vector<std::uint64_t>& places() const { return places_; }
  std::uint64_t nbytes() const { return nbytes_; }

 private:
  std::vector<std::uint64_t> bytes_, places_;
  std::vector<Group> groups_;
  std::vector<bool> ragged_;
  std::uint64_t nbytes_;
};

/// A value of a field that is not ragged.
struct SlotValue {
  std::uint64_t field;
  const std::byte* data;
};

/// Items for the fields of a group.
struct SlotItems {
  std::uint64_t group, n;
  std::vector<const std::byte*> values;  // per field of the group; null: zeros
};

class OpenRows : public Index {
 public:
  static constexpr std::uint64_t kNoRow = ~std::uint64_t{0};  // no write has that number

  /// `slot_bytes`: what the caller keeps in a slot, behind its head.
  static std::uint64_t bytes(std::uint64_t slots, std::uint64_t slot_bytes) { return kPage + slots * stride(slot_bytes); }
  /// Writes the page into zeroed memory of bytes().
  static void format(std::span<std::byte> memory, std::uint64_t slots, std::uint64_t slot_bytes);

  /// A view of formatted memory, which must outlive it. Throws std::invalid_argument: not such memory.
  explicit OpenRows(std::span<std::byte> memory);

  std::uint64_t slots() const { return slots_; }
  std::uint64_t slot_bytes() const { return slot_bytes_; }
  OpenSlot& slot(std::uint64_t i) const;
  /// Where the caller's part of a slot begins.
  std::byte* data(std::uint64_t i) const { return reinterpret_cast<std::byte*>(&slot(i)) + sizeof(OpenSlot); }

  /// The owner that a process is: never 0.
  static std::uint64_t owner_of(std::uint32_t pid, std::uint64_t start_time);
  /// Whether the process still runs, as far as this one can see.
  static bool is_alive(std::uint64_t owner);

  /// A free slot, empty, for an owner. None: all are taken.
  std::optional<std::uint64_t> take(std::uint64_t owner, const SlotLayout& layout) const;
  /// From one owner, which has died, to another. False: it has another one than `from` by now, or its row may have been sealed.
  bool hand_over(std::uint64_t i, std::uint64_t from, std::uint64_t to) const;
  /// By its owner.
  void free(std::uint64_t i) const;
  /// Of a process that died, if it still has that owner, and nothing is in it.
  void free_empty(std::uint64_t i, std::uint64_t owner) const;

  /// How often it was taken: a later row in the slot has another number.
  std::uint64_t times(std::uint64_t i) const;
  bool is_held(std::uint64_t i, std::uint64_t owner, std::uint64_t times) const;
  /// Items of the fields of each group. Throws Damaged: more than there is room for.
  std::vector<std::uint32_t> lengths(std::uint64_t i, const SlotLayout& layout) const;
  /// Drops items, so that each group has as many as it had.
  void shorten(std::uint64_t i, const SlotLayout& layout, std::span<const std::uint32_t> lengths) const;
  /// Puts values in, and appends items. A process that dies in here leaves, of each group, the items of before or all of them, and each
  /// value as it was, as it is to be, or not given. Throws std::invalid_argument: there is no room. Nothing is changed then.
  void append(std::uint64_t i, const SlotLayout& layout, std::span<const SlotValue> values, std::span<const SlotItems> items) const;

  /// Rows that grow are none of the store yet.
  void written(const std::int64_t*, std::uint64_t, std::uint64_t) override {}
  void edited(const std::int64_t*, std::uint64_t, std::uint64_t, std::span<const std::uint64_t>, std::uint64_t) override {}
  void lost(const std::int64_t*, std::uint64_t) override {}
  void emptied() override {}
  void recovered(std::uint64_t t0, std::uint64_t n, const std::function<bool(std::uint64_t)>& is_whole) override;

 private:
  std::byte* row(std::uint64_t i, const SlotLayout& layout) const;
  static std::uint64_t stride(std::uint64_t slot_bytes) { return (sizeof(OpenSlot) + slot_bytes + 63) / 64 * 64; }

  std::uint64_t slots_, slot_bytes_, stride_;
  std::byte* first_;
};

}  // namespace engram
