// A fence between threads.
#pragma once

#include <atomic>

namespace engram {

/// gcc's TSan does not model fences; its build orders each copied byte instead (gather.cpp).
inline void fence([[maybe_unused]] std::memory_order order) {
#ifndef ENGRAM_TSAN
  std::atomic_thread_fence(order);
#endif
}

}  // namespace engram
