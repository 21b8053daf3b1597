// The mutex of an index in shared memory, and what its next holder makes good: a change that a process left half done when it died,
// and news that a process could not note, as the mutex was held for too long.
#pragma once

#include <cstdint>

#include "control.h"
#include "shared_mutex.h"
#include "wait.h"

namespace engram {

/// Where they stand in the header of an index.
struct RedoWords {
  Word& redo;    // not 0: something is being changed
  Word& missed;  // not 0: the mutex was held for too long to note something
  SharedMutex& mutex;

  template <class Header>
  static RedoWords of(Header& header) {
    return {header.redo, header.missed, header.mutex};
  }
  /// In the child of a fork, for private memory: its owner does not exist here.
  void after_fork() const {
    if (mutex.held()) mutex.format();
  }
};

/// Held for every look at an index.
class RedoLock {
 public:
  /// `repair(redo, missed)` is called under the mutex if one of the words is not 0. `news`: what `missed` says from then on if this wait
  /// is in vain. Throws Stalled.
  template <class Repair>
  RedoLock(const RedoWords& words, Repair&& repair, std::uint64_t news = 0) try : lock_(words.mutex, [] {}) {
    const std::uint64_t missed = words.missed.load(std::memory_order_acquire), redo = words.redo.load(std::memory_order_relaxed);
    if ((missed | redo) == 0) [[likely]] return;
    let_go();
    repair(redo, missed);
  } catch (const Stalled&) {
    words.missed.fetch_or(news, std::memory_order_acq_rel);
  }

 private:
  SharedLock lock_;
};

/// Around every change of an index: noted in the memory. Without done() the next holder of the mutex makes it good.
class RedoChange {
 public:
  explicit RedoChange(const RedoWords& words, std::uint64_t kind = 1);
  void done();

 private:
  Word& redo_;
};

}  // namespace engram
