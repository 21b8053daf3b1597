#include "spare.h"

#include <malloc.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>

namespace engram {
namespace {

constexpr std::size_t kLeast = 128 * 1024, kMost = 64 * 1024 * 1024;

struct Piece {
  void* memory;
  std::size_t bytes;
};

// Pieces that are free, the last one that was freed at the end.
std::array<Piece, 16> pieces;
std::size_t count = 0, held = 0;
// A thread that holds it when its process forks leaves the child without spare memory, and does not stop it.
std::atomic_flag busy = ATOMIC_FLAG_INIT;

class TryLock {
 public:
  TryLock() : held_(!busy.test_and_set(std::memory_order_acquire)) {}
  ~TryLock() {
    if (held_) busy.clear(std::memory_order_release);
  }
  TryLock(const TryLock&) = delete;
  TryLock& operator=(const TryLock&) = delete;
  explicit operator bool() const { return held_; }

 private:
  bool held_;
};

Piece take(std::size_t place) {
  const Piece piece = pieces[place];
  std::copy(pieces.begin() + place + 1, pieces.begin() + count, pieces.begin() + place);
  --count, held -= piece.bytes;
  return piece;
}

}  // namespace

void* spare_or_new(std::size_t bytes) noexcept {
  if (bytes >= kLeast) {
    if (const TryLock lock; lock) {
      for (std::size_t i = count; i-- > 0;) {
        // One that is far too large is left for those that need it.
        if (pieces[i].bytes >= bytes && pieces[i].bytes - bytes <= bytes / 4) return take(i).memory;
      }
    }
  }
  return std::malloc(bytes);
}

void keep_or_free(void* memory) noexcept {
#if !defined(__SANITIZE_ADDRESS__)  // which is to see who uses memory that was freed
  const std::size_t bytes = memory == nullptr ? 0 : malloc_usable_size(memory);
  if (bytes >= kLeast && bytes <= kMost) {
    if (const TryLock lock; lock) {
      while (count == pieces.size() || (count > 0 && held + bytes > kMost)) std::free(take(0).memory);
      pieces[count++] = {memory, bytes}, held += bytes;
      return;
    }
  }
#endif
  std::free(memory);
}

}  // namespace engram
