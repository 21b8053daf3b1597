#include "changes.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "check.h"
#include "fence.h"

namespace engram {
namespace {

constexpr char kMagic[8] = {'e', 'n', 'g', 'c', 'h', 'n', 'g', '\1'};
constexpr std::uint64_t kLeafBits = 4, kBits = 6;  // 16 rows below a lowest mark, 64 marks below each other one

std::uint64_t above(std::uint64_t n, std::uint64_t bits) { return (n + (std::uint64_t{1} << bits) - 1) >> bits; }

// Sizes of the levels, the lowest first: the last one has 64 marks at most.
template <class Use>
void each_level(std::uint64_t rows, Use&& use) {
  for (std::uint64_t size = above(rows, kLeafBits);; size = above(size, kBits)) {
    use(size);
    if (size <= std::uint64_t{1} << kBits) return;
  }
}

ChangesHeader* header_in(std::span<std::byte> memory) {
  check(memory.size() >= kPage, "marks of changes in memory too small for their header");
  auto* header = reinterpret_cast<ChangesHeader*>(memory.data());
  check(std::memcmp(header->magic, kMagic, sizeof kMagic) == 0, "no marks of changes, or of another format");
  const std::uint64_t rows = copied(header->rows);
  check(rows > 0 && rows < std::uint64_t{1} << 56 && memory.size() == Changes::bytes(rows), "marks of changes in memory of another size");
  return header;
}

}  // namespace

std::uint64_t Changes::bytes(std::uint64_t rows) {
  std::uint64_t marks = 0;
  each_level(rows, [&](std::uint64_t size) { marks += size; });
  return kPage + marks * sizeof(Mark);
}

void Changes::format(std::span<std::byte> memory, std::uint64_t rows, bool samples) {
  check(rows > 0 && memory.size() == bytes(rows), "marks of changes in memory of another size");
  auto* header = new (memory.data()) ChangesHeader{};
  header->rows = rows;
  header->samples = samples ? 1 : 0;
  std::memcpy(header->magic, kMagic, sizeof kMagic);
}

// Marks of before may be higher than those above them: the machine may have been switched off between writing the one and the other.
void Changes::reset(std::span<std::byte> memory) {
  header_in(memory)->looks.store(0, std::memory_order_relaxed);
  std::memset(memory.data() + kPage, 0, memory.size() - kPage);
}

Changes::Changes(std::span<std::byte> memory) : header_(header_in(memory)) {
  rows_ = copied(header_->rows);
  samples_ = copied(header_->samples) != 0;
  auto* marks = reinterpret_cast<Mark*>(memory.data() + kPage);
  each_level(rows_, [&](std::uint64_t size) {
    marks_[levels_] = marks;
    sizes_[levels_++] = size;
    marks += size;
  });
}

// The lowest mark goes last: where it is high enough, those above it are, too, though their writer may have died in here.
void Changes::raise(std::uint64_t row, std::uint64_t number) {
  std::uint64_t place = row >> kLeafBits;
  if (marks_[0][place].load(std::memory_order_acquire) >= number) return;
  for (std::uint64_t rest = levels_; rest-- > 0;) {
#ifdef ENGRAM_WITHOUT_MARKS_IN_ORDER  // the tests of death must fail then: make negative-controls
    const std::uint64_t level = levels_ - 1 - rest;
#else
    const std::uint64_t level = rest;
#endif
    Mark& mark = marks_[level][place >> kBits * level];
    std::uint64_t now = mark.load(std::memory_order_acquire);
    while (now < number && !mark.compare_exchange_weak(now, number, std::memory_order_acq_rel)) {
    }
  }
}

// Marks of an earlier look are too low for one that began meanwhile and has passed them by: they are raised again. Otherwise that look
// begins after the fence, and finds them.
template <class RowOf>
void Changes::mark(std::uint64_t n, RowOf&& row_of) {
  std::uint64_t number = header_->looks.load(std::memory_order_seq_cst);
  for (;;) {
    for (std::uint64_t i = 0; i < n; ++i) {
      const auto row = static_cast<std::uint64_t>(row_of(i));
      if (row < rows_) raise(row, number);
    }
    fence(std::memory_order_seq_cst);
    const std::uint64_t now = header_->looks.load(std::memory_order_seq_cst);
#ifdef ENGRAM_WITHOUT_MARKING_AGAIN  // the tests of death must fail then: make negative-controls
    return;
#endif
    if (now == number) return;
    number = now;
  }
}

std::uint64_t Changes::look(std::uint64_t since, std::vector<std::int64_t>& rows) {
  const std::uint64_t number = header_->looks.fetch_add(1, std::memory_order_seq_cst) + 1;
  fence(std::memory_order_seq_cst);
  const auto visit = [&](auto& self, std::uint64_t level, std::uint64_t begin, std::uint64_t end) -> void {
    for (std::uint64_t place = begin; place < std::min(end, sizes_[level]); ++place) {
      if (marks_[level][place].load(std::memory_order_acquire) < since) continue;
      if (level > 0) {
        self(self, level - 1, place << kBits, (place + 1) << kBits);
        continue;
      }
      const std::uint64_t stop = std::min((place + 1) << kLeafBits, rows_);
      for (std::uint64_t row = place << kLeafBits; row < stop; ++row) rows.push_back(static_cast<std::int64_t>(row));
    }
  };
  visit(visit, levels_ - 1, 0, sizes_[levels_ - 1]);
  return number;
}

void Changes::scan(std::uint64_t begin, std::uint64_t end) {
  constexpr std::uint64_t kStep = std::uint64_t{1} << kLeafBits;
  if (begin >= end) return;
  const std::uint64_t first = begin / kStep, last = (end - 1) / kStep;
  mark(last - first + 1, [&](std::uint64_t i) { return (first + i) * kStep; });
}

void Changes::written(const std::int64_t* rows, std::uint64_t n, std::uint64_t) {
  mark(n, [&](std::uint64_t i) { return copied(rows[i]); });
}

void Changes::edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0, std::span<const std::uint64_t>, std::uint64_t) {
  written(rows, n, t0);
}

void Changes::lost(const std::int64_t* rows, std::uint64_t n) { written(rows, n, 0); }

void Changes::emptied() { scan(0, rows_); }

void Changes::sampled(const std::int64_t* rows, std::uint64_t n) {
  if (samples_) written(rows, n, 0);
}

}  // namespace engram
