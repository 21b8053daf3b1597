// Rows that still grow: slots of a store, each with one row that is being put together, and who has it.
//
//   memory   OpenRowsPage, padded to a page · slots of OpenSlot and what the caller keeps there
//
// A slot is free or has an owner, which one word says, so that it changes hands in one step and outlives its owner. The append that seals
// a row notes its ticket number in the slot before the row is written. A process that finds the number of a writer that died asks whether
// that row is whole: then the slot is free, and else the row grows on. So a row is sealed once, or not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "control.h"
#include "index.h"

namespace engram {

struct OpenRowsPage {
  char magic[8];  // "engopen\1"
  std::uint64_t slots, slot_bytes;
};

struct OpenSlot {
  alignas(64) Word owner;  // 0: free
  Word sealed_as;          // number of the write that seals the row; 0: none. Of a free slot it says nothing
};

class OpenRows : public Index {
 public:
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

  /// A free slot, for an owner. None: all are taken.
  std::optional<std::uint64_t> take(std::uint64_t owner) const;
  /// From one owner to another. False: it has another one than `from` by now.
  bool hand_over(std::uint64_t i, std::uint64_t from, std::uint64_t to) const;
  void free(std::uint64_t i) const { slot(i).owner.store(0, std::memory_order_release); }

  /// Rows that grow are none of the store yet.
  void written(const std::int64_t*, std::uint64_t, std::uint64_t) override {}
  void edited(const std::int64_t*, std::uint64_t, std::uint64_t, std::span<const std::uint64_t>, std::uint64_t) override {}
  void lost(const std::int64_t*, std::uint64_t) override {}
  void emptied() override {}
  void recovered(std::uint64_t t0, std::uint64_t n, const std::function<bool(std::uint64_t)>& is_whole) override;

 private:
  static std::uint64_t stride(std::uint64_t slot_bytes) { return (sizeof(OpenSlot) + slot_bytes + 63) / 64 * 64; }

  std::uint64_t slots_, slot_bytes_, stride_;
  std::byte* first_;
};

}  // namespace engram
