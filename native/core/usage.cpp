#include "usage.h"

#include <cstring>
#include <new>

#include "check.h"

namespace engram {
namespace {

constexpr char kMagic[8] = {'e', 'n', 'g', 'u', 's', 'a', 'g', '\1'};

UsageHeader* header_in(std::span<std::byte> memory) {
  check(memory.size() >= kPage, "counts of samples in memory too small for their header");
  auto* header = reinterpret_cast<UsageHeader*>(memory.data());
  check(std::memcmp(header->magic, kMagic, sizeof kMagic) == 0, "no counts of samples, or of another format");
  const std::uint64_t rows = copied(header->rows);
  check(rows < std::uint64_t{1} << 56 && memory.size() == Usage::bytes(rows), "counts of samples in memory of another size");
  return header;
}

}  // namespace

void Usage::format(std::span<std::byte> memory, std::uint64_t rows) {
  check(memory.size() == bytes(rows), "counts of samples in memory of another size");
  auto* header = new (memory.data()) UsageHeader{};
  header->rows = rows;
  std::memcpy(header->magic, kMagic, sizeof kMagic);
}

Usage::Usage(std::span<std::byte> memory)
    : rows_(copied(header_in(memory)->rows)), counts_(reinterpret_cast<Count*>(memory.data() + kPage)) {}

void Usage::copy_counts(const std::int64_t* rows, std::uint64_t n, std::int64_t* out) const {
  const OwnRows own(rows, n, rows_);
  for (std::uint64_t i = 0; i < n; ++i) out[i] = counts_[rows[i]].load(std::memory_order_relaxed);
}

void Usage::written(const std::int64_t* rows, std::uint64_t n, std::uint64_t) {
  const OwnRows own(rows, n, rows_);
  for (std::uint64_t i = 0; i < n; ++i) counts_[rows[i]].store(0, std::memory_order_relaxed);
}

void Usage::edited(const std::int64_t*, std::uint64_t, std::uint64_t, std::span<const std::uint64_t>, std::uint64_t) {}

void Usage::lost(const std::int64_t* rows, std::uint64_t n) { written(rows, n, 0); }

void Usage::emptied() {
  for (std::uint64_t row = 0; row < rows_; ++row) counts_[row].store(0, std::memory_order_relaxed);
}

// A count that has come to its end stays there.
void Usage::sampled(const std::int64_t* rows, std::uint64_t n) {
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto row = static_cast<std::uint64_t>(copied(rows[i]));
    if (row >= rows_) continue;
    if (counts_[row].fetch_add(1, std::memory_order_relaxed) == ~std::uint32_t{0}) counts_[row].store(~std::uint32_t{0}, std::memory_order_relaxed);
  }
}

}  // namespace engram
