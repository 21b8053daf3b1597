// Which rows may have changed since an earlier look: an index of a store, for what ranks rows.
//
//   memory   ChangesHeader, padded to a page · marks u64[n1] · marks u64[n2] · … , of 16 rows each, of 64 of those, and so on
//
// Each look has a number. A process that changes a row, or samples it where that is asked for, raises the marks above it to the number
// of the last look, the topmost first. A look goes down where a mark is at least as high as the caller's last look. No mutex.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "control.h"
#include "index.h"

namespace engram {

struct ChangesHeader {
  char magic[8];  // "engchng\1"
  std::uint64_t rows;
  std::uint64_t samples;  // 1: rows that are sampled count as changed
  std::atomic<std::uint64_t> looks;
};
static_assert(sizeof(ChangesHeader) <= kPage);

class Changes : public Index {
 public:
  static std::uint64_t bytes(std::uint64_t rows);

  /// Writes the header into zeroed memory of bytes().
  static void format(std::span<std::byte> memory, std::uint64_t rows, bool samples);

  /// As if no look had been made: no other process may have the memory. Throws std::invalid_argument: not such memory.
  static void reset(std::span<std::byte> memory);

  /// A view of formatted memory, which must outlive it. Throws std::invalid_argument: not such memory.
  explicit Changes(std::span<std::byte> memory);

  std::uint64_t rows() const { return rows_; }

  /// Appends the rows, in order, that may have changed since the look of that number, 0: all. Returns this look's number. What is
  /// marked while it looks comes again at the next look. Cost: O(rows that changed), with 16 rows for each at most.
  std::uint64_t look(std::uint64_t since, std::vector<std::int64_t>& rows);

  /// The rows begin … end - 1 may have changed.
  void scan(std::uint64_t begin, std::uint64_t end);

  void written(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0) override;
  void edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0, std::span<const std::uint64_t> which,
              std::uint64_t scatter) override;
  void lost(const std::int64_t* rows, std::uint64_t n) override;
  void emptied() override;
  bool hears_samples() const override { return samples_; }
  void sampled(const std::int64_t* rows, std::uint64_t n) override;

 private:
  using Mark = std::atomic<std::uint64_t>;
  static_assert(sizeof(Mark) == 8 && Mark::is_always_lock_free);
  static constexpr std::uint64_t kLevels = 12;

  template <class RowOf>
  void mark(std::uint64_t n, RowOf&& row_of);
  void raise(std::uint64_t row, std::uint64_t number);

  std::uint64_t rows_;  // copies: the memory may be shared
  bool samples_;
  ChangesHeader* header_;
  std::uint64_t levels_ = 0;
  std::array<Mark*, kLevels> marks_{};  // of each level, the lowest first
  std::array<std::uint64_t, kLevels> sizes_{};
};

}  // namespace engram
