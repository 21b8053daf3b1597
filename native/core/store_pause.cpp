// What a process holds for a while: pauses, placing, replacing.

#include "store.h"

#include <string>
#include <thread>

#include "check.h"
#include "fence.h"
#include "store_indexes.h"
#include "wait.h"

namespace engram {
namespace {

constexpr auto kPauseLooks = std::chrono::microseconds(200);  // between two, at whether the store is still paused

}  // namespace

std::uint64_t Store::own_pause() const {
  return static_cast<std::uint64_t>(&writer() - &control_.participant(0)) + 1;
}

Stalled Store::paused_in_vain() const {
  const std::uint64_t entry = control_.lock_page().pause.load(std::memory_order_acquire) & ~kReplacing;
  const std::uint32_t pid = entry == 0 || entry > control_.participants() ? 0 : control_.participant(entry - 1).pid;
  const bool own = entry == own_pause();
  const std::string who = own ? "this process" : pid != 0 ? "process " + std::to_string(pid) : "another process";
  return in_vain(who + " has paused the store, to save or load it,",
                 "Try again when that is over. A Checkpointer pauses it for a moment only, whatever its size");
}

// Lets a writer through that has just taken a claim: at once, but for a store that is paused, or has got fields meanwhile. Fields are
// added while it is paused: a writer that does not see them is over before they are there.
void Store::admit(ClaimGuard& claim) const {
  for (wait_while_paused(claim); on_new_fields_ && has_new_fields(); wait_while_paused(claim)) {
    claim.give_back();  // its thread may wait for the one that adds fields, and that one for all claims
    find_fields();
    claim.take_again();
  }
}

void Store::wait_while_paused([[maybe_unused]] ClaimGuard& claim) const {
#ifndef ENGRAM_WITHOUT_PAUSE  // the tests must fail then: make negative-controls
  if (control_.lock_page().pause.load(std::memory_order_seq_cst) == 0) return;
  let_go();
  const Deadline deadline;
  do {
    claim.give_back();
    while (control_.lock_page().pause.load(std::memory_order_acquire) != 0) {
      if (deadline.passed()) throw paused_in_vain();
      look_after_others(Need::waiting);
      std::this_thread::sleep_for(kPauseLooks);
    }
    claim.take_again();
  } while (control_.lock_page().pause.load(std::memory_order_seq_cst) != 0);
#endif
}

void Store::pause() {
  const Deadline deadline;
  Word& pause = control_.lock_page().pause;
  std::uint64_t none = 0;
  while (!pause.compare_exchange_strong(none, own_pause(), std::memory_order_seq_cst)) {
    if (deadline.passed()) throw paused_in_vain();
    look_after_others(Need::waiting);
    std::this_thread::sleep_for(kPauseLooks);
    none = 0;
  }
  for (std::uint64_t i = 0; i < control_.participants(); ++i) {
    for (const Claim& claim : control_.participant(i).claims) {
      while (claim.t0.load(std::memory_order_seq_cst) != 0) {
        if (deadline.passed()) {
          resume();
          throw in_vain("another writer has been writing");
        }
        look_after_others(Need::waiting);
        std::this_thread::yield();
      }
    }
  }
}

void Store::resume() { control_.lock_page().pause.store(0, std::memory_order_release); }

void Store::begin_pause() {
  if (pauses_ == 0) pause();
  ++pauses_;
}

void Store::end_pause(bool failed) {
  if (pauses_ == 0 || --pauses_ > 0) return;
  if (failed && (control_.lock_page().pause.load(std::memory_order_acquire) & kReplacing) != 0) end_replacing();
  resume();
}

// Until the writes that are under way now are over, and those of dead participants recovered. Bounded: then they go on.
void Store::await_claims() const {
  const Deadline deadline;
  for (std::uint64_t i = 0; i < control_.participants(); ++i) {
    for (const Claim& claim : control_.participant(i).claims) {
      const std::uint64_t t0 = claim.t0.load(std::memory_order_seq_cst);
      while (t0 != 0 && claim.t0.load(std::memory_order_seq_cst) == t0 && !deadline.passed()) {
        look_after_others(Need::waiting);
        std::this_thread::sleep_for(kPauseLooks);
      }
    }
  }
}

void Store::begin_placing() {
  if (placings_ == 0) {
    auto& mutex = control_.writable().lock_page().placing;
    try {
      if (mutex.lock()) {
        mutex.recovered();  // a plan that was not written is forgotten
        await_claims();     // one that was written in part is recovered: indexes have not heard of its rows
      }
    } catch (const Stalled&) {           // which says what an index would
      throw in_vain("another process has been placing rows");
    }
  }
  ++placings_;
}

void Store::end_placing() {
  if (placings_ > 0 && --placings_ == 0) control_.lock_page().placing.unlock();
}

void Store::forget_holds() {
  pauses_ = placings_ = 0;
  if (ragged_ != nullptr && others_ == nullptr) ragged_->forget_holds();
}

void Store::begin_replacing(bool keep_write_count) {
  const std::uint64_t pause = control_.lock_page().pause.load(std::memory_order_acquire);
  check((pause & ~kReplacing) == own_pause(), "rows replaced in a store that this process has not paused");
  control_.lock_page().pause.store(own_pause() | kReplacing, std::memory_order_release);
  ClaimGuard claim(writer());
  empty(claim, keep_write_count);
}

std::uint64_t Store::replaced(std::uint64_t clock, const Control::LaneState* lanes, const std::int64_t* numbers, const std::int64_t* writes) {
  check(control_.lock_page().pause.load(std::memory_order_acquire) == (own_pause() | kReplacing), "rows replaced that were not begun with");
  const std::uint64_t later = control_.put_state(clock, lanes, numbers, writes);
  limits().restart(control_.size());
  return later;
}

void Store::end_replacing() const {
#ifndef ENGRAM_WITHOUT_REPLACING  // the tests of death must fail then: make negative-controls
  control_.empty(false);
  fence(std::memory_order_seq_cst);
  tell_indexes([](Index& index) { index.emptied(); });
#endif
}

}  // namespace engram
