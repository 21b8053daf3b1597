#include "gather.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "check.h"
#include "pool.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace engram {
namespace {

// Rows at least this long are copied as one stream across rows, fetched that far ahead: never farther than the next row.
constexpr std::uint64_t kLongRow = 4096;

// Calls `copy` with the size of a small row as a constant: a copy of constant size is a few moves, and a call of memcpy costs more
// than the bytes of a small row. False: the size is none of these.
template <class Copy, std::uint64_t... N>
bool in_moves(std::uint64_t bytes, Copy&& copy, std::integer_sequence<std::uint64_t, N...>) {
  return ((bytes == N && (copy(std::integral_constant<std::uint64_t, N>()), true)) || ...);
}
using Small = std::integer_sequence<std::uint64_t, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128>;

template <std::uint64_t N>
void gather_fixed(const Field& field, const std::int64_t* rows, std::uint64_t n, std::byte* out, Field next) {
  const std::byte* const data = field.data;
  const std::uint64_t stride = field.stride;
  for (std::uint64_t j = 0; j < n; ++j) {
    if (next.data != nullptr) prefetch_row(next, rows[j]);
    std::memcpy(out + j * N, data + static_cast<std::uint64_t>(rows[j]) * stride, N);
  }
}

[[maybe_unused]] void gather_any(const Field& field, const std::int64_t* rows, std::uint64_t n, std::byte* out,
                                 Field next) {
  const std::uint64_t bytes = field.row_bytes;
  // Of a long row the hardware prefetches the rest by itself once its first lines were touched.
  const std::uint64_t head = std::min<std::uint64_t>(bytes, 512);
  const std::uint64_t ahead = bytes <= 256 ? 16 : bytes <= kLongRow ? 4 : 1;
  for (std::uint64_t j = 0; j < n; ++j) {
    if (next.data != nullptr) prefetch_row(next, rows[j]);
    if (j + ahead < n) {
      const std::byte* row = field.row(static_cast<std::uint64_t>(rows[j + ahead]));
      for (std::uint64_t line = 0; line < head; line += 64) __builtin_prefetch(row + line);
    }
    std::memcpy(out + j * bytes, field.row(static_cast<std::uint64_t>(rows[j])), bytes);
  }
}

#if defined(__x86_64__) && !defined(ENGRAM_TSAN)

// Long rows, in wide moves that fetch what lies 4 KiB ahead, in this row or the next: memcpy leaves that to the hardware,
// which starts again at every row and page. 15 % less time for rows of 28 kB outside the caches; narrow moves gain nothing.
[[gnu::target("avx2")]] void gather_long_avx2(const Field& field, const std::int64_t* rows, std::uint64_t n,
                                              std::byte* out) {
  const std::uint64_t bytes = field.row_bytes;
  for (std::uint64_t j = 0; j < n; ++j) {
    const std::byte* from = field.row(static_cast<std::uint64_t>(rows[j]));
    const std::byte* next = j + 1 < n ? field.row(static_cast<std::uint64_t>(rows[j + 1])) : from;
    std::byte* to = out + j * bytes;
    std::uint64_t i = 0;
    for (; i + 64 <= bytes; i += 64) {
      __builtin_prefetch(i + kLongRow < bytes ? from + i + kLongRow : next + (i + kLongRow - bytes));
      const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
      const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), a);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i + 32), b);
    }
    std::memcpy(to + i, from + i, bytes - i);
  }
}

#endif

}  // namespace

bool mostly_runs(const std::int64_t* rows, std::uint64_t n) {
  std::uint64_t breaks = 0;
  for (std::uint64_t j = 1; j < n; ++j) breaks += rows[j] != rows[j - 1] + 1;
  return n > 1 && breaks * 4 < n;
}

std::uint64_t runs_of(const std::int64_t* rows, std::uint64_t n, std::uint64_t* ends) {
  std::uint64_t count = 0;
  for (std::uint64_t j = 1; j < n; ++j) {
    ends[count] = j;
    count += rows[j] != rows[j - 1] + 1;
  }
  ends[count] = n;
  return count + 1;
}

void gather_runs(const Field& field, const std::int64_t* rows, const std::uint64_t* ends, std::uint64_t runs, std::byte* out,
                 const Field* next) {
  const std::uint64_t bytes = field.row_bytes;
  for (std::uint64_t i = 0, j = 0; i < runs; j = ends[i++]) {
    const std::uint64_t n = ends[i] - j;
    if (next != nullptr) prefetch_run(*next, rows[j], n);
    gather_run(field, static_cast<std::uint64_t>(rows[j]), n, out + j * bytes);
  }
}

void place_runs(const std::byte* from, std::int64_t begin, std::uint64_t n, const RowRuns& given, const Field& to,
                std::uint64_t capacity) {
  check(begin >= 0 && n <= static_cast<std::uint64_t>(INT64_MAX - begin), "rows that there are");
  RowRuns runs = given;
  const Own first(runs.first, runs.n), target(runs.target, runs.n), counts(runs.count, runs.n);
  for (std::uint64_t i = 0; i < runs.n; ++i) {
    const auto count = static_cast<std::uint64_t>(runs.count[i]);
    check(runs.first[i] >= 0, "rows that there are");
    check(count <= capacity && static_cast<std::uint64_t>(runs.target[i]) <= capacity - count, "places in the field");
  }
  for (std::uint64_t i = 0; i < runs.n; ++i) {
    // Steps of the run that lie here.
    const std::int64_t low = std::max<std::int64_t>(begin - runs.first[i], 0);
    const std::int64_t high = std::min(begin - runs.first[i] + static_cast<std::int64_t>(n), runs.count[i]);
    if (low >= high) continue;
    scatter_run(to, static_cast<std::uint64_t>(runs.target[i] + low), static_cast<std::uint64_t>(high - low),
                from + static_cast<std::uint64_t>(runs.first[i] + low - begin) * to.row_bytes, nullptr);
  }
}

#ifdef ENGRAM_TSAN

void copy_from_shared(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  for (std::uint64_t i = 0; i < bytes; ++i) {
    to[i] = std::atomic_ref(const_cast<std::byte&>(from[i])).load(std::memory_order_acquire);
  }
}

void copy_to_shared(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  for (std::uint64_t i = 0; i < bytes; ++i) std::atomic_ref(to[i]).store(from[i], std::memory_order_release);
}

void gather_rows(const Field& field, const std::int64_t* rows, std::uint64_t n, std::byte* out, const Field*) {
  for (std::uint64_t j = 0; j < n; ++j) {
    copy_from_shared(out + j * field.row_bytes, field.row(static_cast<std::uint64_t>(rows[j])), field.row_bytes);
  }
}

#else

void gather_rows(const Field& field, const std::int64_t* rows, std::uint64_t n, std::byte* out, const Field* next) {
  const Field after = next == nullptr ? Field() : *next;
  if (field.row_bytes == 0) return;
  if (in_moves(field.row_bytes, [&](auto size) { gather_fixed<size()>(field, rows, n, out, after); }, Small())) return;
#ifdef __x86_64__
  if (field.row_bytes >= kLongRow && __builtin_cpu_supports("avx2")) return gather_long_avx2(field, rows, n, out);
#endif
  gather_any(field, rows, n, out, after);
}

#endif

void gather_run(const Field& field, std::uint64_t first, std::uint64_t n, std::byte* out) {
  if (field.contiguous()) return copy_from_shared(out, field.row(first), n * field.row_bytes);
  const auto copy = [&](auto bytes) {
    for (std::uint64_t j = 0; j < n; ++j) copy_from_shared(out + j * bytes, field.row(first + j), bytes);
  };
  if (!in_moves(field.row_bytes, copy, Small())) copy(field.row_bytes);
}

namespace {

template <class RowOf>
void scatter(const Field& field, RowOf&& row, std::uint64_t n, const std::byte* from, const std::int64_t* pick) {
  const auto copy = [&](auto bytes) {
    for (std::uint64_t j = 0; j < n; ++j) {
      copy_to_shared(field.row(row(j)), from + (pick == nullptr ? j : static_cast<std::uint64_t>(pick[j])) * bytes, bytes);
    }
  };
  if (!in_moves(field.row_bytes, copy, Small())) copy(field.row_bytes);
}

}  // namespace

void scatter_rows(const Field& field, const std::int64_t* rows, std::uint64_t n, const std::byte* from, const std::int64_t* pick) {
  scatter(field, [rows](std::uint64_t j) { return static_cast<std::uint64_t>(rows[j]); }, n, from, pick);
}

void scatter_run(const Field& field, std::uint64_t first, std::uint64_t n, const std::byte* from, const std::int64_t* pick) {
  if (pick == nullptr && field.contiguous()) return copy_to_shared(field.row(first), from, n * field.row_bytes);
  scatter(field, [first](std::uint64_t j) { return first + j; }, n, from, pick);
}

void copy_parts(std::byte* block, std::span<const Part> parts) {
  constexpr std::uint64_t kPiece = 128 * 1024;  // for one thread
  std::vector<Part> pieces;
  std::uint64_t bytes = 0;
  for (const Part& part : parts) {
    bytes += part.bytes;
    for (std::uint64_t at = 0; at < part.bytes; at += kPiece) {
      pieces.push_back({part.begin + at, part.from + at, std::min(kPiece, part.bytes - at)});
    }
  }
  const auto copy = [&](const Part& part) { std::memcpy(block + part.begin, part.from, part.bytes); };
  if (bytes >= kParallelBytes) return parallel(pieces.size(), [&](std::size_t i) { copy(pieces[i]); });
  std::for_each(pieces.begin(), pieces.end(), copy);
}

}  // namespace engram
