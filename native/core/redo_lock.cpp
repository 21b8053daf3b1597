#include "redo_lock.h"

#include <atomic>

namespace engram {

// A killed process leaves what it executed, in program order.
RedoChange::RedoChange(const RedoWords& words, [[maybe_unused]] std::uint64_t kind) : redo_(words.redo) {
#ifndef ENGRAM_WITHOUT_REDO  // the tests of death must fail then: make negative-controls
  redo_.store(kind, std::memory_order_relaxed);
#endif
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

void RedoChange::done() {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  redo_.store(0, std::memory_order_relaxed);
}

}  // namespace engram
