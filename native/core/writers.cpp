#include "writers.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "check.h"
#include "row_limits.h"
#include "wait.h"

namespace engram {
namespace {

constexpr char kMagic[8] = {'e', 'n', 'g', 'w', 'r', 'i', 't', '\1'};
constexpr std::uint64_t kMostWriters = std::uint64_t{1} << 20;

WritersPage* page_in(std::span<std::byte> memory) {
  check(memory.size() >= kPage && std::memcmp(memory.data(), kMagic, sizeof kMagic) == 0, "not a table of writers, or of another format");
  return reinterpret_cast<WritersPage*>(memory.data());
}

std::uint64_t begin_of_entries(std::uint64_t writers) { return kPage + (writers * sizeof(WriterId) + 63) / 64 * 64; }

// A killed process leaves what stands before in the program, and nothing behind it.
void step() { std::atomic_signal_fence(std::memory_order_seq_cst); }

constexpr auto nothing_to_recover = [] {};

}  // namespace

std::uint64_t Writers::bytes(std::uint64_t writers, std::uint64_t groups) {
  check(writers > 0 && writers <= kMostWriters, "1 to 2^20 writers");
  check(groups <= RaggedPage::kMostGroups, "at most 64 groups of ragged fields");
  return begin_of_entries(writers) + writers * (sizeof(Entry) + kWindow * groups * sizeof(RaggedWrite::Place));
}

void Writers::format(std::span<std::byte> memory, std::uint64_t writers, std::uint64_t groups) {
  check(memory.size() == bytes(writers, groups), "a table of writers in memory of another size");
  auto* page = new (memory.data()) WritersPage{};
  page->writers = writers, page->groups = groups;
  page->mutex.format();
  std::memcpy(page->magic, kMagic, sizeof kMagic);
}

void Writers::reset_mutex(std::span<std::byte> memory) { page_in(memory)->mutex.format(); }

Writers::Writers(std::span<std::byte> memory)
    : page_(page_in(memory)), writers_(copied(page_->writers)), groups_(copied(page_->groups)) {
  check(memory.size() == bytes(writers_, groups_), "a table of writers in memory of another size");
  ids_ = reinterpret_cast<WriterId*>(memory.data() + kPage);
  entries_ = reinterpret_cast<Entry*>(memory.data() + begin_of_entries(writers_));
  places_ = reinterpret_cast<RaggedWrite::Place*>(entries_ + writers_);
}

Writers::Entry* Writers::find(const WriterId& writer) const {
  for (std::uint64_t i = 0; i < writers_; ++i) {
    if (ids_[i] == writer && entries_[i].used.load(std::memory_order_relaxed) != 0) return &entries_[i];
  }
  return nullptr;
}

// The entry of a writer that is not known yet. It is free until all of it is there.
Writers::Entry& Writers::take(const WriterId& writer) const {
  Entry& entry = *std::min_element(entries_, entries_ + writers_, [](const Entry& a, const Entry& b) {
    return a.used.load(std::memory_order_relaxed) < b.used.load(std::memory_order_relaxed);
  });
  entry.used.store(0, std::memory_order_relaxed);
  step();
  for (Request& request : entry.requests) request.number.store(0, std::memory_order_relaxed);
  ids_[&entry - entries_] = writer;
  step();
  return entry;
}

std::uint64_t Writers::next_of(const Entry& entry) {
  std::uint64_t last = 0;
  for (const Request& request : entry.requests) last = std::max(last, request.number.load(std::memory_order_relaxed));
  return last + 1;
}

Store::Positions Writers::reserve(const Store& store, const WriterId& writer, std::uint64_t number, std::uint64_t lane, std::uint64_t n,
                                  RaggedWrite* items) const {
  const Control& control = store.control();
  const SharedLock lock(page_->mutex, nothing_to_recover);
  Entry* known = find(writer);
  const std::uint64_t next = known == nullptr ? 1 : next_of(*known);
  const bool repeated = known != nullptr && known->requests[number % kWindow].number.load(std::memory_order_relaxed) == number;
  if (number == 0 || (number != next && !repeated)) throw Store::OutOfOrder(next);
  if (!repeated) Limits(control).admit_insert(n);  // before anything changes
  Entry& entry = known == nullptr ? take(writer) : *known;
  entry.used.store(page_->clock.fetch_add(1, std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  Request& request = entry.requests[number % kWindow];
  RaggedWrite::Place* const places = places_ + (static_cast<std::uint64_t>(&entry - entries_) * kWindow + number % kWindow) * groups_;
  if (repeated) {
    check(copied(request.n) == n, "a request that is repeated with as many rows as it had first");
    for (std::uint64_t g = 0; g < groups_; ++g) items->put_back(g, {copied(places[g].first), copied(places[g].lengths)});
    const Store::Positions positions{copied(request.lane), copied(request.first), true};
    intact(positions.lane < control.lanes(), "writers: expected a lane of the store");
    return positions;
  }
  const std::uint64_t first = store.reserve(lane, n, nullptr, items, nullptr);
  request.number.store(0, std::memory_order_relaxed);
  step();
  request.lane = lane, request.first = first, request.n = n;
  for (std::uint64_t g = 0; g < groups_; ++g) places[g] = items->place(g);
#ifndef ENGRAM_WITHOUT_NOTE  // the tests must fail then: make negative-controls
  step();
  request.number.store(number, std::memory_order_relaxed);
#endif
  return {lane, first, false};
}

std::uint64_t Writers::append(Store& store, const WriterId& writer, std::uint64_t number, std::uint64_t lane, std::uint64_t n,
                              Columns columns, std::int64_t* rows_out, RaggedWrite* items) const {
  check(lane < store.control().lanes(), "a lane outside the store");
  check(groups_ == (store.ragged() == nullptr ? 0 : store.ragged()->groups().size()), "a table of writers of a store with as many ragged fields");
  check((items != nullptr) == (groups_ > 0), "rows with items, where a field is ragged, and without them elsewhere");
  check(n < std::uint64_t{1} << 56, "positions below 2^56");
  return store.append_once(n, columns, rows_out, [&] { return reserve(store, writer, number, lane, n, items); }, items);
}

std::uint64_t Writers::next(const WriterId& writer) const {
  const SharedLock lock(page_->mutex, nothing_to_recover);
  const Entry* known = find(writer);
  return known == nullptr ? 1 : next_of(*known);
}

std::optional<Writers::Rows> Writers::rows_of(const WriterId& writer, std::uint64_t number) const {
  const SharedLock lock(page_->mutex, nothing_to_recover);
  const Entry* known = find(writer);
  if (known == nullptr || number == 0) return std::nullopt;
  const Request& request = known->requests[number % kWindow];
  if (request.number.load(std::memory_order_relaxed) != number) return std::nullopt;
  return Rows{copied(request.lane), copied(request.first), copied(request.n)};
}

void Writers::after_fork() {
  if (page_->mutex.held()) page_->mutex.format();  // its owner does not exist here
}

}  // namespace engram
