// How writes and recovery tell the indexes of a store what they did.
#pragma once

#include <exception>
#include <stdexcept>

#include "store.h"
#include "wait.h"

namespace engram {

// After a fence: either this sees an index that was just attached, or that index, when it looks around, sees what was just
// committed.
template <class Tell>
void Store::tell_indexes(Tell&& tell) const {
  if (on_new_index_ && control_.counters().index_epoch.load(std::memory_order_relaxed) != indexes_->epoch) {
    let_go();
    on_new_index_();
  }
  const auto* list = indexes_->current.load(std::memory_order_acquire);
  if (list == nullptr) return;
  std::exception_ptr failed;  // one index that is held must not keep the news from the others
  for (Index* index : *list) {
    try {
      tell(*index);
    } catch (const std::runtime_error&) {  // it is stalled, or damaged
      failed = std::current_exception();
    }
  }
  if (failed) std::rethrow_exception(failed);
}

}  // namespace engram
