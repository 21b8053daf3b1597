// A ring of updates as a device fills it, and priorities that a thread applies them to.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "core/control.h"
#include "core/priorities.h"
#include "core/update_drain.h"

/// Zeroed memory, exactly as large as it must be: the address sanitizer guards its ends.
class ZeroedMemory {
 public:
  explicit ZeroedMemory(std::size_t bytes) : bytes_(bytes), memory_(static_cast<std::byte*>(::operator new[](bytes, std::align_val_t(64)))) {
    std::memset(memory_.get(), 0, bytes);
  }
  std::span<std::byte> span() const { return {memory_.get(), bytes_}; }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  std::size_t bytes_;
  std::unique_ptr<std::byte[], Free> memory_;
};

struct FormattedPriorities {
  explicit FormattedPriorities(std::uint64_t rows, const engram::Control* tickets = nullptr, engram::Priorities::Config config = {0.7, 0.5, 0.01, false})
      : memory(engram::Priorities::bytes(rows, config.within_buffer)) {
    engram::Priorities::format(memory.span(), rows, config);
    priorities = std::make_unique<engram::Priorities>(memory.span(), tickets);
  }
  engram::PriorityHeader& header() const { return *reinterpret_cast<engram::PriorityHeader*>(memory.span().data()); }
  std::vector<double> leaves() const {
    std::vector<double> out(priorities->rows());
    priorities->copy_leaves(out.data(), out.size(), true);
    return out;
  }
  ZeroedMemory memory;
  std::unique_ptr<engram::Priorities> priorities;
};

struct Entry {
  std::int64_t row;
  double priority;
  std::int64_t ticket = 0;
};

/// The device's side: entries, then the length, then the number.
class Ring {
 public:
  Ring(std::uint64_t slots, std::uint64_t entries) : slots_(slots), entries_(entries), memory_((8 + slots * (4 + 3 * entries)) * 8) {}

  std::unique_ptr<engram::UpdateDrain> drain(engram::Priorities& priorities, bool single_precision = false) const {
    return std::make_unique<engram::UpdateDrain>(memory_.span(), slots_, entries_, single_precision, priorities);
  }

  /// False: the ring is full, and the batch was dropped. `length`: what the slot says, where that is not the truth.
  bool send(const std::vector<Entry>& batch, std::uint64_t length = ~std::uint64_t{0}) {
    if (sent - words()[1].load(std::memory_order_acquire) >= slots_) return false;
    engram::Word* slot = words() + 8 + sent % slots_ * (4 + 3 * entries_);
    for (std::size_t i = 0; i < batch.size(); ++i) {
      slot[4 + i].store(static_cast<std::uint64_t>(batch[i].row), std::memory_order_relaxed);
      slot[4 + entries_ + i].store(static_cast<std::uint64_t>(batch[i].ticket), std::memory_order_relaxed);
      slot[4 + 2 * entries_ + i].store(std::bit_cast<std::uint64_t>(batch[i].priority), std::memory_order_relaxed);
    }
    slot[1].store(length == ~std::uint64_t{0} ? batch.size() : length, std::memory_order_relaxed);
    slot[0].store(++sent, std::memory_order_release);
    return true;
  }

  engram::Word* words() const { return reinterpret_cast<engram::Word*>(memory_.span().data()); }

  std::uint64_t sent = 0;

 private:
  std::uint64_t slots_, entries_;
  ZeroedMemory memory_;
};
