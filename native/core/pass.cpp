#include "pass.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "check.h"

namespace engram {
namespace {

constexpr char kMagic[8] = {'e', 'n', 'g', 'p', 'a', 's', 's', '\1'};

PassPage* page_in(std::span<std::byte> memory) {
  check(memory.size() == RowPass::kBytes, "a pass in memory of another size");
  check(std::memcmp(memory.data(), kMagic, sizeof kMagic) == 0, "not a pass, or of another format");
  return reinterpret_cast<PassPage*>(memory.data());
}

constexpr auto nothing_to_mend = [] {};

}  // namespace

void RowPass::format(std::span<std::byte> memory) {
  check(memory.size() == kBytes, "a pass in memory of another size");
  auto* page = new (memory.data()) PassPage{};
  page->mutex.format();
  std::memcpy(page->magic, kMagic, sizeof kMagic);
}

void RowPass::reset_mutex(std::span<std::byte> memory) { page_in(memory)->mutex.format(); }

// The walk is not looked at: without the mutex it may be torn, and next() begins a new one where it makes no sense.
RowPass::RowPass(std::span<std::byte> memory) : page_(page_in(memory)) {}

void RowPass::put(const Walk& walk) {
  const std::uint64_t other = ~page_->current.load(std::memory_order_relaxed) & 1;
  page_->walks[other] = walk;
  page_->current.store(other, std::memory_order_release);
}

RowPass::Stretch RowPass::next(std::uint64_t key, std::uint64_t rows, std::uint64_t n, bool whole) {
  check(rows > 0 && n > 0 && (!whole || n <= rows), "a walk over at least one row, and a batch that it can fill");
  const SharedLock lock(page_->mutex, nothing_to_mend);
  Walk walk = current();
  if (walk.rows != rows || walk.visited > rows || rows - walk.visited < (whole ? n : 1)) walk = {key, rows, 0};
  const std::uint64_t start = walk.visited, count = std::min(n, rows - start);
  walk.visited += count;
  if (whole && rows - walk.visited < n) walk.visited = rows;  // the rest is skipped, whatever is asked for next
  put(walk);
  return {walk.key, rows, start, count, walk.visited == rows};
}

Walk RowPass::walk() const {
  const SharedLock lock(page_->mutex, nothing_to_mend);
  const Walk walk = current();
  intact(walk.visited <= walk.rows && walk.rows >> 62 == 0 && walk.key >> 63 == 0, "a pass: expected no more rows visited than there are");
  return walk;
}

Walk RowPass::current() const {
  const Walk& walk = page_->walks[page_->current.load(std::memory_order_acquire) & 1];
  return {copied(walk.key), copied(walk.rows), copied(walk.visited)};
}

void RowPass::set(const Walk& walk) {
  check(walk.visited <= walk.rows, "no more rows visited than there are");
  const SharedLock lock(page_->mutex, nothing_to_mend);
  put(walk);
}

void RowPass::after_fork() {
  if (page_->mutex.held()) page_->mutex.format();  // its owner does not exist here
}

}  // namespace engram
