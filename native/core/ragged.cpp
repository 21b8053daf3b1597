#include "ragged.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "check.h"
#include "pieces.h"
#include "random.h"

namespace engram {
namespace {

constexpr char kMagic[8] = {'e', 'n', 'g', 'r', 'a', 'g', 'g', '\1'};
constexpr std::uint64_t kMostItems = std::uint64_t{1} << 48;  // of a ring
constexpr std::uint64_t kMostOffset = std::uint64_t{1} << 62;
constexpr std::uint64_t kStreamedCall = 4 << 20;   // bytes of a call that go past the caches
constexpr std::uint64_t kStreamedPiece = 4 << 10;  // and of a piece of it

}  // namespace

void Ragged::format(std::span<std::byte> memory, const Geometry& geometry, std::span<const RaggedPage::Group> groups) {
  check(!groups.empty() && groups.size() <= RaggedPage::kMostGroups, "between 1 and 64 groups of ragged fields");
  check(memory.size() == bytes(geometry.lanes, groups.size()), "rings of items in memory of another size");
  for (const RaggedPage::Group& group : groups) check(group.items > 0 && group.items < kMostItems, "a ring of between 1 and 2^48 items");
  auto* page = new (memory.data()) RaggedPage{};
  page->capacity = geometry.capacity, page->lanes = geometry.lanes, page->groups = groups.size();
  std::copy(groups.begin(), groups.end(), page->entries);
  page->mutex.format();
  std::memcpy(page->magic, kMagic, sizeof kMagic);
}

Ragged::Ragged(std::span<std::byte> memory, const Geometry& geometry, std::vector<RaggedGroup> groups, bool alone)
    : groups_(std::move(groups)), stride_(stride(groups_.size())) {
  check(memory.size() >= kPage, "rings of items in memory too small for their page");
  page_ = reinterpret_cast<RaggedPage*>(memory.data());
  check(std::memcmp(page_->magic, kMagic, sizeof kMagic) == 0, "no rings of items, or of another format");
  check(copied(page_->capacity) == geometry.capacity && copied(page_->lanes) == geometry.lanes && copied(page_->groups) == groups_.size(),
        "rings of items of another store");
  check(memory.size() == bytes(geometry.lanes, groups_.size()), "rings of items in memory of another size");
  for (std::uint64_t g = 0; g < groups_.size(); ++g) {
    const RaggedPage::Group entry = {copied(page_->entries[g].leader), copied(page_->entries[g].items)};
    check(entry.leader == groups_[g].leader && entry.items == groups_[g].items && entry.items > 0 && entry.items < kMostItems,
          "rings of items of other fields, or of another length");
    check((groups_[g].slot > 0) == slots(), "all items in rings, or all in slots");
    check(!slots() || (groups_[g].slot < kMostItems && entry.items == groups_[g].slot * geometry.lane_length), "a slot for each row of a lane");
  }
  words_ = reinterpret_cast<Word*>(memory.data() + kPage);
  if (alone) page_->mutex.format();
}

// Through the mapping: a page for which a file has no block and the disk has no space would end the process.
bool Ragged::take(const RaggedGroup& group, std::uint64_t lane, const Span& span) {
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, of Linux 5.14 and later
  static const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  if (span.length == 0) return true;
  for (const ItemField& field : group.fields) {
    const auto begin = reinterpret_cast<std::uintptr_t>(items_of(group, field, lane, span)), first = begin / page * page;
    const std::uintptr_t bytes = begin + span.length * field.item_bytes - first;
    if (madvise(reinterpret_cast<void*>(first), bytes, kPopulateWrite) != 0 && (errno == EFAULT || errno == ENOMEM)) return false;
  }
  return true;
}

RaggedItems::RaggedItems(const RaggedGroup& group, std::uint64_t n, const RaggedSource& source)
    : group_(&group), lengths_(n), starts_(n), values_(source.values) {
  check(values_.size() == group.fields.size(), "another number of ragged fields than the group has");
  if (n == 0) return;
  std::memcpy(lengths_.data(), source.lengths, n * sizeof(std::uint32_t));
  std::memcpy(starts_.data(), source.starts, n * sizeof(std::int64_t));
  std::uint64_t items = 0, item_bytes = 0;
  for (std::uint64_t i = 0; i < n; ++i) {
    const std::uint64_t length = lengths_[i], start = static_cast<std::uint64_t>(starts_[i]);
    check(length <= group.most(), "a row of more items than a ring, or a slot, has");
    check(length <= source.total && start <= source.total - length, "items outside of the values");
    items += length;
  }
  for (const ItemField& field : group.fields) item_bytes += field.item_bytes;
  streams_ = items >= kStreamedCall / std::max<std::uint64_t>(1, item_bytes);
}

void RaggedItems::put(std::uint64_t field, std::byte* to, std::uint64_t i, std::uint64_t length) const {
  const std::uint64_t item_bytes = group_->fields[field].item_bytes, bytes = length * item_bytes;
  if (values_[field] != nullptr) {
    const std::byte* const from = values_[field] + static_cast<std::uint64_t>(starts_[i]) * item_bytes;
    streams_ && bytes >= kStreamedPiece ? stream_to_shared(to, from, bytes) : copy_to_shared(to, from, bytes);
  } else if (bytes > 0) {
    const std::vector<std::byte> zeros(bytes);
    copy_to_shared(to, zeros.data(), bytes);
  }
}

void RaggedItems::put(const Ragged& ragged, std::uint64_t lane, const Span& span, std::uint64_t i, bool all) const {
  for (std::uint64_t f = 0; f < values_.size(); ++f) {
    if (all || values_[f] != nullptr) put(f, ragged.items_of(*group_, group_->fields[f], lane, span), i, span.length);
  }
}

RaggedWrite::RaggedWrite(const Ragged& ragged, std::uint64_t n, std::span<const RaggedSource> sources) : ragged_(&ragged), n_(n) {
  const auto& groups = ragged.groups();
  check(sources.size() == groups.size(), "another number of groups of ragged fields than the store has");
  for (std::uint64_t g = 0; g < groups.size(); ++g) {
    groups_.emplace_back(groups[g], n, sources[g]);
    spans_.emplace_back(n * Span::kBytes);
  }
}

std::vector<const std::byte*> RaggedWrite::columns(std::span<const std::byte* const> given) const {
  std::vector<const std::byte*> columns(given.begin(), given.end());
  for (std::uint64_t g = 0; g < spans_.size(); ++g) {
    const RaggedGroup& group = ragged_->groups()[g];
    check(group.leader < columns.size(), "a write without the column of a ragged field");
    columns[group.leader] = spans_[g].data();
  }
  return columns;
}

// Gives rows of a group their items from the offset `next` on. Returns the offset behind them.
std::uint64_t RaggedWrite::give(std::uint64_t group, std::uint64_t next, std::uint64_t n, const std::int64_t* pick) {
  intact(next < kMostOffset, "the head of a ring of items lies beyond what any writer reaches");
  const std::uint64_t items = ragged_->groups()[group].items;
  for (std::uint64_t i = 0; i < n; ++i) {
    const std::uint64_t row = source(pick, i), length = groups_[group].length(row), at = next % items;
    if (at + length > items) next += items - at;
    Span{next, static_cast<std::uint32_t>(length)}.put(spans_[group].data() + row * Span::kBytes);
    next += length;
  }
  return next;
}

void RaggedWrite::reserve(std::uint64_t lane, std::uint64_t n, const std::int64_t* pick) {
  for (std::uint64_t g = 0; g < groups_.size(); ++g) {
    Word& head = ragged_->head(lane, g);
    head.store(give(g, head.load(std::memory_order_relaxed), n, pick), std::memory_order_seq_cst);
  }
}

void RaggedWrite::give_slots(std::uint64_t lane_length, std::uint64_t first, std::uint64_t n, const std::int64_t* pick) {
  for (std::uint64_t g = 0; g < groups_.size(); ++g) {
    for (std::uint64_t i = 0; i < n; ++i) {
      const std::uint64_t row = source(pick, i);
      in_slot(g, (first + i) % lane_length, row).put(spans_[g].data() + row * Span::kBytes);
    }
  }
}

std::uint64_t RaggedWrite::hash_of_lengths(std::uint64_t group) const {
  std::uint64_t hash = n_;
  for (std::uint64_t i = 0; i < n_; ++i) hash = mix(hash ^ groups_[group].length(i));
  return hash;
}

RaggedWrite::Place RaggedWrite::place(std::uint64_t group) const { return {n_ == 0 ? 0 : span(group, 0).offset, hash_of_lengths(group)}; }

void RaggedWrite::put_back(std::uint64_t group, const Place& place) {
  check(place.lengths == hash_of_lengths(group), "a request that is repeated with rows of the lengths that they had first");
  if (!ragged_->slots()) give(group, place.first, n_, nullptr);
}

std::uint64_t RaggedWrite::chunk(std::uint64_t i, std::uint64_t most, const std::int64_t* pick, std::uint64_t bytes) const {
  std::uint64_t count = most;
  for (std::uint64_t g = 0; g < groups_.size() && count > 1; ++g) {
    const RaggedGroup& group = ragged_->groups()[g];
    std::uint64_t item_bytes = 0;
    for (const ItemField& field : group.fields) item_bytes += field.item_bytes;
    const std::uint64_t first = span(g, source(pick, i)).offset;
    const std::uint64_t limit = std::min(group.items / 2, bytes / std::max<std::uint64_t>(1, item_bytes));
    std::uint64_t k = 1, items = span(g, source(pick, i)).length;  // those in slots have gaps between them
    for (; k < count; ++k) {
      const Span next = span(g, source(pick, i + k));
      items = group.slot > 0 ? items + next.length : next.offset + next.length - first;
      if (items > limit) break;
    }
    count = k;
  }
  return count;
}

// Rows whose items follow each other here and there are one copy.
void RaggedWrite::put(std::uint64_t lane, std::uint64_t i, std::uint64_t n, const std::int64_t* pick) const {
  for (std::uint64_t g = 0; g < groups_.size(); ++g) {
    const RaggedGroup& group = ragged_->groups()[g];
    for (std::uint64_t f = 0; f < group.fields.size(); ++f) {
      for (std::uint64_t k = i; k < i + n;) {
        const std::uint64_t row = source(pick, k);
        const Span first = span(g, row);
        std::uint64_t length = first.length;
        for (++k; k < i + n; ++k) {
          const std::uint64_t other = source(pick, k);
          const Span next = span(g, other);
          if (next.offset != first.offset + length || next.offset % group.items == 0 || !groups_[g].follow(other, row, length)) break;
          length += next.length;
        }
        groups_[g].put(f, ragged_->items_of(group, group.fields[f], lane, first), row, length);
      }
    }
  }
}

}  // namespace engram
