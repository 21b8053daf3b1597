#include "epoch.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "check.h"

namespace engram {
namespace {

constexpr char kMagic[8] = {'e', 'n', 'g', 'p', 'a', 's', 's', '\1'};

EpochPage* page_in(std::span<std::byte> memory) {
  check(memory.size() == RowEpoch::kBytes, "an epoch in memory of another size");
  check(std::memcmp(memory.data(), kMagic, sizeof kMagic) == 0, "not an epoch, or of another format");
  return reinterpret_cast<EpochPage*>(memory.data());
}

constexpr auto nothing_to_recover = [] {};

}  // namespace

void RowEpoch::format(std::span<std::byte> memory) {
  check(memory.size() == kBytes, "an epoch in memory of another size");
  auto* page = new (memory.data()) EpochPage{};
  page->mutex.format();
  std::memcpy(page->magic, kMagic, sizeof kMagic);
}

void RowEpoch::reset_mutex(std::span<std::byte> memory) { page_in(memory)->mutex.format(); }

// Does not check the state: without the mutex it may be torn, and next() begins a new epoch where it is not plausible.
RowEpoch::RowEpoch(std::span<std::byte> memory) : page_(page_in(memory)) {}

void RowEpoch::put(const EpochState& state) {
  const std::uint64_t other = ~page_->current.load(std::memory_order_relaxed) & 1;
  page_->states[other] = {state.key, state.rows, state.visited};
  page_->begun[other] = state.begun;
  page_->current.store(other, std::memory_order_release);
}

RowEpoch::Stretch RowEpoch::next(std::uint64_t key, std::uint64_t rows, std::uint64_t n, bool whole, std::uint64_t begun,
                                  bool skips) {
  check(rows > 0 && (!whole || (n > 0 && n <= rows)), "an epoch over at least one row, and a batch that it can fill");
  const SharedLock lock(page_->mutex, nothing_to_recover);
  EpochState state = current();
  const bool over = state.visited > state.rows || state.rows - state.visited < (whole ? n : 1);
  if (over || state.begun > begun) state = {key, rows, 0, begun};  // it may be that of other rows
  return take(state, n, whole && skips);
}

RowEpoch::Stretch RowEpoch::more(std::uint64_t key, std::uint64_t n) {
  const SharedLock lock(page_->mutex, nothing_to_recover);
  EpochState state = current();
  if (state.key != key || state.visited >= state.rows) return {key, state.rows, state.rows, 0, true, state.begun};
  return take(state, n, false);
}

// Takes the next n ranks of an epoch, which becomes the current one.
RowEpoch::Stretch RowEpoch::take(EpochState& state, std::uint64_t n, bool whole) {
  const std::uint64_t start = state.visited, count = std::min(n, state.rows - start);
  state.visited += count;
  if (whole && state.rows - state.visited < n) state.visited = state.rows;  // the rest is skipped, whatever the next call asks for
  put(state);
  return {state.key, state.rows, start, count, state.visited == state.rows, state.begun};
}

bool RowEpoch::pass_over(std::uint64_t key, std::uint64_t from, std::uint64_t to) {
  const SharedLock lock(page_->mutex, nothing_to_recover);
  EpochState state = current();
  if (state.key != key || state.visited != from || to < from || to > state.rows) return false;
  state.visited = to;
  put(state);
  return true;
}

EpochState RowEpoch::state() const {
  const SharedLock lock(page_->mutex, nothing_to_recover);
  const EpochState state = current();
  intact(state.visited <= state.rows && state.rows >> 62 == 0 && state.key >> 63 == 0, "an epoch: expected no more rows visited than there are");
  return state;
}

EpochState RowEpoch::current() const {
  const std::uint64_t which = page_->current.load(std::memory_order_acquire) & 1;
  const EpochPage::Stored& state = page_->states[which];
  return {copied(state.key), copied(state.rows), copied(state.visited), copied(page_->begun[which])};
}

void RowEpoch::set(const EpochState& state) {
  check(state.visited <= state.rows, "no more rows visited than there are");
  const SharedLock lock(page_->mutex, nothing_to_recover);
  put(state);
}

void RowEpoch::after_fork() {
  if (page_->mutex.held()) page_->mutex.format();  // its owner does not exist here
}

}  // namespace engram
