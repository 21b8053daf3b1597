// One block of memory for all columns of a batch, as it is sent: each begins at a multiple of 64 bytes.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
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
  /// is a part of a batch that other stores have rows of, too. Raises BufferError, ValueError: it has no bytes.
  explicit OutputBlock(nanobind::object memory);

  /// What this thread is within; null: nothing.
  static OutputBlock* current();
  /// That whose memory tensors of this thread have; null: they have their own.
  static OutputBlock* of_memory();

  void enter();
  void leave();

  /// Memory for so many bytes. Throws std::invalid_argument: there is less.
  std::byte* take(std::uint64_t bytes);
  /// Memory that no tensor was made of, with all that was taken since.
  void give_back(const std::byte* taken);

  nanobind::handle owner() const { return view_; }
  std::uint64_t used() const { return used_; }
  std::span<std::byte> bytes() const { return bytes_; }
  /// Whether an anchor where no window lies stays without one: all stores have to choose again.
  bool is_part() const { return !view_.is_valid(); }

  /// What the last draw of this thread found: what to hand a draw.
  Masses masses{};

 private:
  nanobind::object view_;  // of the memory, which it keeps where it is
  std::span<std::byte> bytes_;
  std::uint64_t used_ = 0;
  OutputBlock* outer_ = nullptr;
  bool entered_ = false;
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
