// Copies of rows between a field and a batch. Nothing here knows about tickets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace engram {

/// One column of a store: `capacity` rows of `row_bytes` each, `stride` bytes from row to row. They follow one another, unless other
/// fields' rows lie in between.
struct Field {
  std::byte* data = nullptr;
  std::uint64_t row_bytes = 0, stride = 0;

  Field() = default;
  Field(std::byte* data, std::uint64_t row_bytes) : Field(data, row_bytes, row_bytes) {}
  Field(std::byte* data, std::uint64_t row_bytes, std::uint64_t stride) : data(data), row_bytes(row_bytes), stride(stride) {}

  std::byte* row(std::uint64_t number) const { return data + number * stride; }
  bool contiguous() const { return stride == row_bytes; }
};

/// memcpy beside possible concurrent writers. Formally a data race where a reader meets a writer, and a benign one: the
/// reader looks at the row's ticket after a fence and throws away what moved. The TSan build copies atomic bytes.
#ifdef ENGRAM_TSAN
void copy_from_shared(std::byte* to, const std::byte* from, std::uint64_t bytes);
void copy_to_shared(std::byte* to, const std::byte* from, std::uint64_t bytes);
#else
// Memory without bytes may be nowhere, which memcpy does not allow.
inline void copy_from_shared(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}
inline void copy_to_shared(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}
#endif

/// Asks the memory for a row that is about to be copied: a small row lies in one cache line or across two.
inline void prefetch_row(const Field& field, std::int64_t row) {
  const std::byte* first = field.row(static_cast<std::uint64_t>(row));
  __builtin_prefetch(first);
  if (field.row_bytes > 16) __builtin_prefetch(first + field.row_bytes - 1);
}

/// The same of n rows that follow one another: of their first bytes, as the hardware finds the rest by itself.
inline void prefetch_run(const Field& field, std::int64_t row, std::uint64_t n) {
  constexpr std::uint64_t kHead = 512;
  const std::byte* head = field.row(static_cast<std::uint64_t>(row));
  const std::uint64_t ahead = n * field.stride < kHead ? n * field.stride : kHead;
  for (std::uint64_t line = 0; line < ahead; line += 64) __builtin_prefetch(head + line);
  if (ahead > 0) __builtin_prefetch(head + ahead - 1);
}

/// Whether most of the rows follow the one before them, as those of windows do.
bool mostly_runs(const std::int64_t* rows, std::uint64_t n);

/// Runs of n > 0 rows that follow one another: how many, and where among the rows each ends.
std::uint64_t runs_of(const std::int64_t* rows, std::uint64_t n, std::uint64_t* ends);

/// Copies n rows that follow one another, from `first` on.
void gather_run(const Field& field, std::uint64_t first, std::uint64_t n, std::byte* out);

/// field[first + j] = from[pick[j]] for j in [0, n); `pick` null: from[j].
void scatter_run(const Field& field, std::uint64_t first, std::uint64_t n, const std::byte* from, const std::int64_t* pick);

/// As gather_rows, run by run.
void gather_runs(const Field& field, const std::int64_t* rows, const std::uint64_t* ends, std::uint64_t runs, std::byte* out,
                 const Field* next);

/// Rows that follow each other in one place and will in another: for run i, rows [first[i], first[i] + count[i]) of a source become
/// rows [target[i], target[i] + count[i]) of a field.
struct RowRuns {
  const std::int64_t* first;
  const std::int64_t* target;
  const std::int64_t* count;
  std::uint64_t n;
};

/// Copies what runs want of rows [begin, begin + n) of a source, which lie at `from`, into a field of `capacity` rows. Throws before
/// anything was copied if a run does not fit.
void place_runs(const std::byte* from, std::int64_t begin, std::uint64_t n, const RowRuns& runs, const Field& to,
                std::uint64_t capacity);

/// out[j] = field[rows[j]] for j in [0, n). Rows must have been checked. Meanwhile the same rows of `next`, the field that
/// will be gathered after this one (or null), are asked for: the waits for memory then lie beside the copies. Beside long
/// rows nothing is: there the memory is busy anyway.
void gather_rows(const Field& field, const std::int64_t* rows, std::uint64_t n, std::byte* out, const Field* next);

/// field[rows[j]] = from[pick[j]] for j in [0, n); `pick` null: from[j]. Rows must have been checked.
void scatter_rows(const Field& field, const std::int64_t* rows, std::uint64_t n, const std::byte* from, const std::int64_t* pick);

/// Bytes that are copied to a place in a block.
struct Part {
  std::uint64_t begin;
  const std::byte* from;
  std::uint64_t bytes;
};

/// Copies parts to their places behind `block`, on the pool where they are large. No two overlap.
void copy_parts(std::byte* block, std::span<const Part> parts);

}  // namespace engram
