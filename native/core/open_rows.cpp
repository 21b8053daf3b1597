#include "open_rows.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "check.h"
#include "fence.h"
#include "participants.h"

namespace engram {
namespace {

constexpr char kMagic[8] = {'e', 'n', 'g', 'o', 'p', 'e', 'n', '\1'};
constexpr std::uint64_t kMostSlots = 1 << 20, kMostBytes = std::uint64_t{1} << 40;

std::uint64_t aligned(std::uint64_t bytes) { return (bytes + 63) / 64 * 64; }

// Words of a slot that other processes read at any time.
template <class T>
std::atomic_ref<T> word(std::byte* at) {
  return std::atomic_ref<T>(*reinterpret_cast<T*>(at));
}

}  // namespace

SlotLayout::SlotLayout(std::vector<std::uint64_t> bytes, std::vector<Group> groups)
    : bytes_(std::move(bytes)), groups_(std::move(groups)), ragged_(bytes_.size()) {
  std::vector<std::uint64_t> rows = bytes_;
  for (const Group& group : groups_) {
    for (const std::uint64_t field : group.fields) {
      check(field < fields() && !ragged_[field], "ragged fields of the row, each in one group");
      check(group.most < kMostBytes && bytes_[field] < kMostBytes / (group.most + 1), "items of a row of less than 2^40 bytes");
      ragged_[field] = true;
      rows[field] *= group.most;
    }
  }
  nbytes_ = given(fields());
  for (const std::uint64_t size : rows) {
    check(size < kMostBytes && nbytes_ < kMostBytes, "rows of less than 2^40 bytes");
    places_.push_back(aligned(nbytes_));
    nbytes_ = places_.back() + size;
  }
}

void OpenRows::format(std::span<std::byte> memory, std::uint64_t slots, std::uint64_t slot_bytes) {
  check(slots > 0 && slots <= kMostSlots && slot_bytes < kMostBytes, "between 1 and 2^20 slots of less than 2^40 bytes");
  check(memory.size() == bytes(slots, slot_bytes), "open rows in memory of another size");
  auto* page = new (memory.data()) OpenRowsPage{};
  page->slots = slots, page->slot_bytes = slot_bytes;
  std::memcpy(page->magic, kMagic, sizeof kMagic);
}

OpenRows::OpenRows(std::span<std::byte> memory) {
  check(memory.size() >= kPage, "open rows in memory too small for their page");
  const auto* page = reinterpret_cast<const OpenRowsPage*>(memory.data());
  check(std::memcmp(page->magic, kMagic, sizeof kMagic) == 0, "no open rows, or of another format");
  slots_ = copied(page->slots), slot_bytes_ = copied(page->slot_bytes);
  check(slots_ > 0 && slots_ <= kMostSlots && slot_bytes_ < kMostBytes && memory.size() == bytes(slots_, slot_bytes_),
        "open rows in memory of another size");
  stride_ = stride(slot_bytes_);
  first_ = memory.data() + kPage;
}

OpenSlot& OpenRows::slot(std::uint64_t i) const {
  check(i < slots_, "a slot outside the open rows");
  return *reinterpret_cast<OpenSlot*>(first_ + i * stride_);
}

std::uint64_t OpenRows::owner_of(std::uint32_t pid, std::uint64_t start_time) {
  return std::uint64_t{pid} << 32 | (start_time & 0x7fffffff) << 1 | 1;
}

bool OpenRows::is_alive(std::uint64_t owner) {
  const auto pid = static_cast<std::uint32_t>(owner >> 32);
  const std::uint64_t start = start_time_of(pid);
  return start != 0 && owner_of(pid, start) == owner;
}

// The slot may have the row of before until it is empty: so long it says that there is none.
std::optional<std::uint64_t> OpenRows::take(std::uint64_t owner, const SlotLayout& layout) const {
  for (std::uint64_t i = 0; i < slots_; ++i) {
    OpenSlot& slot = this->slot(i);
    std::uint64_t free = 0;
    if (slot.owner.load(std::memory_order_relaxed) != 0 || !slot.owner.compare_exchange_strong(free, owner, std::memory_order_acq_rel)) continue;
    slot.sealed_as.store(kNoRow, std::memory_order_seq_cst);
    std::byte* row = this->row(i, layout);
    std::memset(row + layout.length(0), 0, layout.given(layout.fields()) - layout.length(0));
    word<std::uint64_t>(row).fetch_add(1, std::memory_order_acq_rel);
    slot.sealed_as.store(0, std::memory_order_release);
    return i;
  }
  return std::nullopt;
}

void OpenRows::free(std::uint64_t i) const {
  slot(i).sealed_as.store(kNoRow, std::memory_order_release);
  slot(i).owner.store(0, std::memory_order_release);
}

void OpenRows::free_empty(std::uint64_t i, std::uint64_t owner) const {
  if (slot(i).sealed_as.load(std::memory_order_acquire) == kNoRow) slot(i).owner.compare_exchange_strong(owner, 0, std::memory_order_acq_rel);
}

// An owner that has died notes no number any more, and no other process does.
bool OpenRows::hand_over(std::uint64_t i, std::uint64_t from, std::uint64_t to) const {
  return from != 0 && slot(i).sealed_as.load(std::memory_order_acquire) == 0 && slot(i).owner.compare_exchange_strong(from, to, std::memory_order_acq_rel);
}

std::byte* OpenRows::row(std::uint64_t i, const SlotLayout& layout) const {
  check(layout.nbytes() == slot_bytes_, "slots for rows of these fields");
  return data(i);
}

std::uint64_t OpenRows::times(std::uint64_t i) const { return word<std::uint64_t>(data(i)).load(std::memory_order_acquire); }

bool OpenRows::is_held(std::uint64_t i, std::uint64_t owner, std::uint64_t times) const {
  return slot(i).owner.load(std::memory_order_acquire) == owner && this->times(i) == times;
}

std::vector<std::uint32_t> OpenRows::lengths(std::uint64_t i, const SlotLayout& layout) const {
  std::byte* row = this->row(i, layout);
  std::vector<std::uint32_t> found;
  for (const SlotLayout::Group& group : layout.groups()) {
    found.push_back(word<std::uint32_t>(row + layout.length(found.size())).load(std::memory_order_acquire));
    if (found.back() <= group.most) continue;
    throw Damaged("open rows: expected at most " + std::to_string(group.most) + " items in slot " + std::to_string(i) + ", got " +
                  std::to_string(found.back()) + ". Something else has written there");
  }
  return found;
}

void OpenRows::shorten(std::uint64_t i, const SlotLayout& layout, std::span<const std::uint32_t> lengths) const {
  check(lengths.size() == layout.groups().size(), "a length of each group");
  std::byte* row = this->row(i, layout);
  for (std::uint64_t g = 0; g < lengths.size(); ++g) word<std::uint32_t>(row + layout.length(g)).store(lengths[g], std::memory_order_release);
}

void OpenRows::append(std::uint64_t i, const SlotLayout& layout, std::span<const SlotValue> values, std::span<const SlotItems> items) const {
  std::byte* row = this->row(i, layout);
  const std::vector<std::uint32_t> before = lengths(i, layout);
  for (const SlotValue& value : values) check(value.field < layout.fields() && !layout.is_ragged(value.field), "a field that is not ragged");
  for (std::size_t k = 0; k < items.size(); ++k) {
    const SlotItems& it = items[k];
    check(it.group < before.size() && (k == 0 || items[k - 1].group < it.group), "groups of ragged fields, each once and in order");
    const SlotLayout::Group& group = layout.groups()[it.group];
    check(it.values.size() == group.fields.size(), "values, or null, of each field of the group");
    check(it.n <= group.most - before[it.group], "no more items than the slot has room for");
  }
  const auto give = [&](std::uint64_t field, std::uint8_t is) { word<std::uint8_t>(row + layout.given(field)).store(is, std::memory_order_release); };
  for (const SlotValue& value : values) {
    give(value.field, 0);
    fence(std::memory_order_release);
    if (layout.bytes(value.field) != 0) std::memcpy(row + layout.places()[value.field], value.data, layout.bytes(value.field));
    give(value.field, 1);
  }
  for (const SlotItems& it : items) {
    const std::vector<std::uint64_t>& fields = layout.groups()[it.group].fields;
    for (std::size_t f = 0; f < fields.size(); ++f) {
      const std::uint64_t bytes = layout.bytes(fields[f]);
      std::byte* to = row + layout.places()[fields[f]] + before[it.group] * bytes;
      if (it.n == 0) continue;
      if (it.values[f] == nullptr) std::memset(to, 0, it.n * bytes);
      if (it.values[f] != nullptr) std::memcpy(to, it.values[f], it.n * bytes);
    }
    for (std::size_t f = 0; f < fields.size(); ++f) {
      if (it.values[f] != nullptr) give(fields[f], 1);
    }
    word<std::uint32_t>(row + layout.length(it.group)).store(before[it.group] + static_cast<std::uint32_t>(it.n), std::memory_order_release);
  }
}

// The owner has died, or no other process has the store open. What another process has done meanwhile is left alone.
void OpenRows::recovered(std::uint64_t t0, std::uint64_t n, const std::function<bool(std::uint64_t)>& is_whole) {
  for (std::uint64_t i = 0; i < slots_; ++i) {
    OpenSlot& slot = this->slot(i);
    const std::uint64_t owner = slot.owner.load(std::memory_order_acquire);
    std::uint64_t number = slot.sealed_as.load(std::memory_order_acquire);
    if (number == 0 || number == kNoRow || number - t0 >= n || owner == 0) continue;
    const bool whole = is_whole(number);
    if (slot.sealed_as.compare_exchange_strong(number, whole ? kNoRow : 0, std::memory_order_acq_rel) && whole) free_empty(i, owner);
  }
}

}  // namespace engram
