// Reading rows that are not in memory: in the order of the files, all announced before the first is read.

#include <algorithm>
#include <array>
#include <cstdint>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "check.h"
#include "fence.h"
#include "pool.h"
#include "store.h"

namespace engram {
namespace {

constexpr std::uint64_t kAhead = 32 << 20;            // bytes announced before the first is read: more may be gone again by then
constexpr std::uint64_t kRefilled = 1 << 20;          // bytes of rows that are changed at a time

// The first error of any thread.
class FirstError {
 public:
  void note(std::optional<DiskError> error) {
    if (!error) return;
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
  }
  void raise() const {
    if (error_) throw *error_;
  }

 private:
  std::mutex mutex_;
  std::optional<DiskError> error_;
};

}  // namespace

void Store::use(std::unique_ptr<Disk> disk) {
  disk_ = std::move(disk);
  for (std::uint64_t f = 0; f < fields(); ++f) disk_->expect(rows_of_file(f), f, control_.capacity());
  longest_ = longest_of(all());
}

// Of the fields that lie in files the one with the longest rows, those of one file counted as one; null: none does.
const Field* Store::longest_of(std::span<const std::uint64_t> which) const {
  const Field* longest = nullptr;
  for (const std::uint64_t f : which) {
    const Field& rows = rows_of_file(f);
    if (disk_->has(file_of(f)) && (longest == nullptr || rows.row_bytes > longest->row_bytes)) longest = &rows;
  }
  return longest;
}

// The files of some fields, each once.
std::vector<std::uint64_t> Store::files_of(std::span<const std::uint64_t> which) const {
  std::vector<std::uint64_t> files;
  bool together = false;
  for (const std::uint64_t f : which) {
    if (field(f).contiguous() || !std::exchange(together, true)) files.push_back(file_of(f));
  }
  return files;
}

// Of fields that lie between one another, pieces of whole rows are read, changed and written back.
bool Store::refill(std::uint64_t f, std::uint64_t first, std::uint64_t n, const std::byte* from) const {
  const std::uint64_t file = file_of(f), bytes = row_bytes(f);
  if (disk_ == nullptr || !disk_->has(file) || !disk_->writes.is_cold()) return false;
  disk_->open({&file, 1});
  if (!disk_->is_open(file)) return false;
  if (field(f).contiguous()) {
    disk_->write(field(f), f, first, n, from, nullptr);
    return true;
  }
  const std::lock_guard one_at_a_time(disk_->changing);
  const std::uint64_t most = std::min(n, std::max<std::uint64_t>(1, kRefilled / group_.stride));
  std::vector<std::byte> rows(most * group_.stride);
  std::vector<std::int64_t> which(most);
  std::vector<std::uint32_t> at(most);
  std::iota(at.begin(), at.end(), 0);
  for (std::uint64_t i = 0; i < n; i += most) {
    const std::uint64_t count = std::min(most, n - i);
    std::iota(which.begin(), which.end(), static_cast<std::int64_t>(first + i));
    if (auto error = disk_->read(group_, lead_, std::span(which).first(count), at.data(), rows.data())) throw *error;
    scatter_run({rows.data() + offset_of(f), bytes, group_.stride}, 0, count, from + i * bytes, nullptr);
    disk_->write(group_, lead_, first + i, count, rows.data(), nullptr);
  }
  return true;
}

// Row rows[i] of each field goes to place at[i] of its column; rows ascend. Of fields that lie in one file, whole rows are read, once.
std::optional<DiskError> Store::read_fields(std::span<const std::int64_t> rows, const std::uint32_t* at,
                                            std::span<const std::uint64_t> which, Batch batch) const {
  std::vector<std::byte> together;
  std::optional<DiskError> error;
  for (std::uint64_t f = 0; f < which.size(); ++f) {
    const Field& field = this->field(which[f]);
    const auto out = [&](std::uint64_t i) { return batch[f] + at[i] * field.row_bytes; };
    if (!disk_->is_open(file_of(which[f]))) {
      for (std::uint64_t i = 0; i < rows.size(); ++i) gather_rows(field, &rows[i], 1, out(i), nullptr);
    } else if (field.contiguous()) {
      if (auto failed = disk_->read(field, which[f], rows, at, batch[f]); failed && !error) error = std::move(failed);
    } else {
      if (together.empty()) {
        together.resize(rows.size() * group_.stride);
        std::array<std::uint32_t, kMostBlockRows> in_order;
        std::iota(in_order.begin(), in_order.end(), 0);
        if (auto failed = disk_->read(group_, lead_, rows, in_order.data(), together.data()); failed && !error) error = std::move(failed);
      }
      const Field read{together.data() + offset_of(which[f]), field.row_bytes, field.stride};
      for (std::uint64_t i = 0; i < rows.size(); ++i) gather_run(read, i, 1, out(i));
    }
  }
  return error;
}

std::vector<std::int64_t> Store::gather_from_disk(const std::int64_t* rows, std::uint64_t n,
                                                  std::span<const std::uint64_t> which, Batch batch,
                                                  const std::int64_t* expected, std::int64_t* numbers_out) const {
  check(n <= UINT32_MAX, "a batch of more rows than there is memory");
  const std::vector<std::uint64_t> files = files_of(which);
  disk_->open(files);
  std::vector<std::uint32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [rows](std::uint32_t a, std::uint32_t b) { return rows[a] < rows[b]; });
  std::vector<std::int64_t> sorted(n);
  for (std::uint64_t i = 0; i < n; ++i) sorted[i] = rows[order[i]];
  std::uint64_t row_bytes = 0;
  for (const std::uint64_t f : which) row_bytes += field(f).row_bytes;
  const auto rows_from = [&](std::uint64_t begin, std::uint64_t count) {
    return std::span<const std::int64_t>(sorted).subspan(begin, std::min(count, n - begin));
  };
  const std::uint64_t block = block_rows(which), step = std::max(block, kAhead / std::max<std::uint64_t>(1, row_bytes) / block * block);
  const auto announce = [&](std::uint64_t begin) {
    for (const std::uint64_t f : files) {
      if (begin < n && disk_->is_open(f)) disk_->announce(rows_of_file(f), f, rows_from(begin, step));
    }
  };
  std::vector<std::uint8_t> moved(n);
  FirstError error;
  const auto read = [&](std::uint64_t begin) {
    const std::span<const std::int64_t> some = rows_from(begin, block);
    const std::uint64_t count = some.size();
    const std::uint32_t* at = order.data() + begin;
    std::uint64_t words[kMostBlockRows];
    for (std::uint64_t i = 0; i < count; ++i) {
      words[i] = control_.word(static_cast<std::uint64_t>(some[i])).load(std::memory_order_acquire);
      moved[at[i]] = !is_committed(words[i]) ||
                     (expected != nullptr && number_of(words[i]) != static_cast<std::uint64_t>(expected[at[i]]));
      if (numbers_out != nullptr) numbers_out[at[i]] = static_cast<std::int64_t>(number_of(words[i]));
    }
    error.note(read_fields(some, at, which, batch));
#ifndef ENGRAM_WITHOUT_TICKET_CHECK  // the tests must fail then: make negative-controls
    fence(std::memory_order_acquire);
    for (std::uint64_t i = 0; i < count; ++i) {
      moved[at[i]] |= control_.word(static_cast<std::uint64_t>(some[i])).load(std::memory_order_relaxed) != words[i];
    }
#endif
  };
  announce(0);
  for (std::uint64_t begin = 0; begin < n; begin += step) {
    announce(begin + step);
    const std::uint64_t end = std::min(n, begin + step), blocks = (end - begin + block - 1) / block;
    if ((end - begin) * row_bytes < kParallelBytes || num_threads() == 1) {
      for (std::uint64_t i = 0; i < blocks; ++i) read(begin + i * block);
    } else {
      parallel(blocks, [&](std::size_t i) { read(begin + i * block); });
    }
    error.raise();
  }
  disk_->counters().reads.fetch_add(1, std::memory_order_relaxed);
  disk_->counters().bytes_read.fetch_add(n * row_bytes, std::memory_order_relaxed);
  std::vector<std::int64_t> positions;
  for (std::uint64_t i = 0; i < n; ++i) {
    if (moved[i] != 0) positions.push_back(static_cast<std::int64_t>(i));
  }
  look_after_others(positions.empty() ? Need::none : Need::waiting);
  return positions;
}

}  // namespace engram
