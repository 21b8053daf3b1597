// How often each row was sampled since it was written: an index of a store, for people.
//
//   memory   UsageHeader, padded to a page · counts u32[rows]
//
// No mutex: each count is an atomic word. What is sampled while its row is being written over may be counted for the new step.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "control.h"
#include "index.h"

namespace engram {

struct UsageHeader {
  char magic[8];  // "engusag\1"
  std::uint64_t rows;
};

class Usage : public Index {
 public:
  static std::uint64_t bytes(std::uint64_t rows) { return kPage + rows * sizeof(Count); }

  /// Writes the header into zeroed memory of bytes().
  static void format(std::span<std::byte> memory, std::uint64_t rows);

  /// A view of formatted memory, which must outlive it. Throws std::invalid_argument: not such memory.
  explicit Usage(std::span<std::byte> memory);

  std::uint64_t rows() const { return rows_; }

  /// How often rows were sampled. Throws std::out_of_range.
  void copy_counts(const std::int64_t* rows, std::uint64_t n, std::int64_t* out) const;

  void written(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0) override;
  /// A row keeps its count.
  void edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0, std::span<const std::uint64_t> which,
              std::uint64_t scatter) override;
  void lost(const std::int64_t* rows, std::uint64_t n) override;
  void emptied() override;
  bool hears_samples() const override { return true; }
  void sampled(const std::int64_t* rows, std::uint64_t n) override;

 private:
  using Count = std::atomic<std::uint32_t>;
  static_assert(sizeof(Count) == 4 && Count::is_always_lock_free);

  std::uint64_t rows_;  // a copy: the memory may be shared
  Count* counts_;
};

}  // namespace engram
