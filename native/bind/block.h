// One block of memory for all columns of a batch, as it is sent: each begins at a multiple of 64 bytes.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "../core/check.h"
#include "../core/store.h"

namespace engram {

/// While a thread is within one, the tensors that the core makes there are views of its memory, one behind the other.
class OutputBlock {
 public:
  static constexpr std::uint64_t kAlign = 64;

  /// `memory`: an object whose bytes may be written to. The views keep it. None: tensors have memory of their own, and what is drawn
  /// is a part of a batch that other stores have rows of, too. `spills`: a tensor for which there is no room has memory of its own.
  /// Raises BufferError, ValueError: it has no bytes.
  explicit OutputBlock(nanobind::object memory, bool spills = false);

  /// What this thread is within; null: nothing.
  static OutputBlock* current();
  /// That whose memory tensors of this thread have; null: they have their own.
  static OutputBlock* of_memory();

  void enter();
  void leave();

  /// Memory for so many bytes. Null: there is less, and it spills. Throws std::invalid_argument: there is less.
  std::byte* take(std::uint64_t bytes);
  /// Memory that was taken has become a tensor, which ends at `end`; null: it has not, and is free once all that is taken has become one
  /// or not.
  void settle(const std::byte* end);

  /// Where in the block the values of tensors begin. Those that lie in it, contiguous, stay there; others are copied behind all that is
  /// in use. -1: torch has to copy it, as it is not contiguous, or its bytes are not its values. None: there is no room for all, and
  /// nothing is copied.
  nanobind::object pack(const nanobind::list& tensors);
  /// Where so many bytes begin that are in use from now on; none: there is no room.
  std::optional<std::uint64_t> reserve(std::uint64_t bytes);

  nanobind::handle owner() const { return view_; }
  std::uint64_t used() const { return used_; }
  /// Bytes that would have had room for what was taken, spilled and packed.
  std::uint64_t wanted() const { return wanted_; }
  std::span<std::byte> bytes() const { return bytes_; }
  /// Whether an anchor where no window lies stays without one: all stores have to choose again.
  bool is_part() const { return !view_.is_valid(); }

  /// What the last draw of this thread found: what to hand a draw.
  Masses masses{};

 private:
  std::optional<std::uint64_t> find_room(std::uint64_t bytes);

  nanobind::object view_;  // of the memory, which it keeps where it is
  std::span<std::byte> bytes_;
  std::uint64_t used_ = 0, settled_ = 0;        // up to the last part that is taken; that is a tensor's
  std::uint64_t open_ = 0;                      // parts that are taken and not settled
  std::uint64_t spilled_ = 0, wanted_ = 0;
  bool spills_ = false, entered_ = false;
  OutputBlock* outer_ = nullptr;
};

/// Where a draw notes what it found; null: nothing asks for it.
inline Masses* masses_of_block() {
  OutputBlock* block = OutputBlock::current();
  return block == nullptr ? nullptr : &block->masses;
}

/// A view of an object's bytes, and where they are. Raises BufferError: it has none.
std::pair<nanobind::object, std::span<std::byte>> bytes_of_object(nanobind::handle object, bool writable);

void bind_block(nanobind::module_& m);

}  // namespace engram
