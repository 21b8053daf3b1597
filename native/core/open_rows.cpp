#include "open_rows.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "check.h"
#include "participants.h"

namespace engram {
namespace {

constexpr char kMagic[8] = {'e', 'n', 'g', 'o', 'p', 'e', 'n', '\1'};
constexpr std::uint64_t kMostSlots = 1 << 20, kMostBytes = std::uint64_t{1} << 40;

}  // namespace

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

// The number is that of an earlier row until it is cleared. If the process dies before, the slot is taken for sealed: nothing is in it.
std::optional<std::uint64_t> OpenRows::take(std::uint64_t owner) const {
  for (std::uint64_t i = 0; i < slots_; ++i) {
    OpenSlot& slot = this->slot(i);
    std::uint64_t free = 0;
    if (slot.owner.load(std::memory_order_relaxed) != 0 || !slot.owner.compare_exchange_strong(free, owner, std::memory_order_acq_rel)) continue;
    slot.sealed_as.store(0, std::memory_order_release);
    return i;
  }
  return std::nullopt;
}

bool OpenRows::hand_over(std::uint64_t i, std::uint64_t from, std::uint64_t to) const {
  return from != 0 && slot(i).owner.compare_exchange_strong(from, to, std::memory_order_acq_rel);
}

// The slot is free before its number is gone: a death in between leaves a free slot.
void OpenRows::recovered(std::uint64_t t0, std::uint64_t n, const std::function<bool(std::uint64_t)>& is_whole) {
  for (std::uint64_t i = 0; i < slots_; ++i) {
    OpenSlot& slot = this->slot(i);
    const std::uint64_t number = slot.sealed_as.load(std::memory_order_acquire);
    if (number == 0 || number - t0 >= n || slot.owner.load(std::memory_order_acquire) == 0) continue;
    if (is_whole(number)) slot.owner.store(0, std::memory_order_release);
    slot.sealed_as.store(0, std::memory_order_release);
  }
}

}  // namespace engram
