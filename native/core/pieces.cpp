#include "pieces.h"

#include <algorithm>
#include <cstring>

#include "gather.h"

#if defined(__x86_64__) && !defined(ENGRAM_TSAN)
#include <emmintrin.h>
#define ENGRAM_COPIES_LINES
#endif

namespace engram {

#ifdef ENGRAM_COPIES_LINES

namespace {

constexpr std::uint64_t kLine = 64, kAhead = 2048;

// Moves that every x86-64 has: wider ones gain 3 %, as the memory is what takes the time.
struct Line {
  __m128i parts[4];

  explicit Line(const std::byte* from) {
    for (int i = 0; i < 4; ++i) parts[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
  }
  void put(std::byte* to) const {
    for (int i = 0; i < 4; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + i, parts[i]);
  }
  /// `to`: at a multiple of 16 bytes.
  void stream(std::byte* to) const {
    for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, parts[i]);
  }
};

}  // namespace

// What is asked for may lie behind the end of a piece, or of the memory: asking does no harm.
void copy_from_shared(std::span<const Piece> pieces) {
  for (std::size_t k = 0; k < pieces.size(); ++k) {
    const auto [to, from, bytes] = pieces[k];
    const std::byte* next = k + 1 < pieces.size() ? pieces[k + 1].from : from;
    const std::uint64_t ahead = std::min(kAhead, bytes);
    std::uint64_t i = 0;
    for (; i + kLine <= bytes; i += kLine) {
      __builtin_prefetch(i + ahead < bytes ? from + i + ahead : next + (i + ahead - bytes));
      Line(from + i).put(to + i);
    }
    copy_from_shared(to + i, from + i, bytes - i);
  }
}

void stream_to_shared(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  const std::uint64_t head = std::min(bytes, (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine);
  copy_to_shared(to, from, head);
  std::uint64_t i = head;
  _mm_sfence();  // no release orders what is written past the caches: it stays behind what was written before, and before what follows
  for (; i + kLine <= bytes; i += kLine) {
    __builtin_prefetch(from + i + kAhead);
    Line(from + i).stream(to + i);
  }
  _mm_sfence();
  copy_to_shared(to + i, from + i, bytes - i);
}

#else

void copy_from_shared(std::span<const Piece> pieces) {
  for (const Piece& piece : pieces) copy_from_shared(piece.to, piece.from, piece.bytes);
}

void stream_to_shared(std::byte* to, const std::byte* from, std::uint64_t bytes) { copy_to_shared(to, from, bytes); }

#endif

}  // namespace engram
