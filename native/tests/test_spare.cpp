#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "core/spare.h"
#include "expect.h"

using engram::keep_or_free;
using engram::spare_or_new;

namespace {

constexpr std::size_t kKiB = 1024, kMiB = 1024 * kKiB;

// Whether large pieces are used again at all: not beside a sanitizer that looks for uses of memory that was freed.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kKeeps = false;
#else
constexpr bool kKeeps = true;
#endif

// Sixteen pieces of four MiB, which take the place of all others.
std::set<void*> keep_others() {
  std::vector<void*> taken;
  for (int i = 0; i < 16; ++i) taken.push_back(spare_or_new(4 * kMiB - 4 * kKiB));
  for (void* piece : taken) keep_or_free(piece);
  return {taken.begin(), taken.end()};
}

TEST(a_large_piece_is_used_again) {
  keep_others();
  void* first = spare_or_new(kMiB);
  keep_or_free(first);
  void* again = spare_or_new(kMiB);
  if (kKeeps) EXPECT(again == first);
  void* other = spare_or_new(kMiB);
  EXPECT(other != again);
  keep_or_free(other);
  keep_or_free(again);
}

TEST(a_piece_fits_what_is_a_little_smaller) {
  if (!kKeeps) return;
  keep_others();
  void* piece = spare_or_new(3 * kMiB);
  keep_or_free(piece);
  void* half = spare_or_new(3 * kMiB / 2);
  EXPECT(half != piece);
  void* less = spare_or_new(3 * kMiB - 256 * kKiB);
  EXPECT(less == piece);
  keep_or_free(less);
  void* more = spare_or_new(3 * kMiB + 64 * kKiB);
  EXPECT(more != piece);
  keep_or_free(half);
  keep_or_free(more);
}

TEST(nothing_is_kept_of_small_and_of_huge_pieces) {
  const std::set<void*> before = keep_others();
  keep_or_free(nullptr);
  keep_or_free(spare_or_new(0));
  keep_or_free(spare_or_new(65 * kMiB));
  if (kKeeps) EXPECT(keep_others() == before);
}

// A megabyte each: of two hundred that were freed, those that come again are among the last ones, and at most sixteen.
TEST(few_pieces_are_kept) {
  if (!kKeeps) return;
  keep_others();
  std::vector<void*> first;
  for (int i = 0; i < 200; ++i) first.push_back(spare_or_new(kMiB));
  for (void* piece : first) keep_or_free(piece);
  // The newest comes first, and only pieces that are kept come in this order.
  std::size_t again = 0;
  std::vector<void*> second;
  for (int i = 0; i < 16; ++i) {
    second.push_back(spare_or_new(kMiB));
    again += second.back() == first[first.size() - 1 - static_cast<std::size_t>(i)];
  }
  EXPECT_EQ(again, std::size_t{16});
  for (void* piece : second) keep_or_free(piece);
}

// What one thread holds is no other thread's: each fills its piece with its own number, and looks at it before it lets it go.
TEST(threads_never_hold_the_same_piece) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (std::uint8_t number = 1; number <= 4; ++number) {
    threads.emplace_back([number, &wrong] {
      for (std::size_t turn = 0; turn < 300; ++turn) {
        const std::size_t bytes = 128 * kKiB + turn % 7 * 16 * kKiB;
        auto* piece = static_cast<std::uint8_t*>(spare_or_new(bytes));
        std::memset(piece, number, bytes);
        std::this_thread::yield();
        wrong += std::count(piece, piece + bytes, number) != static_cast<std::ptrdiff_t>(bytes);
        keep_or_free(piece);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
}

}  // namespace
