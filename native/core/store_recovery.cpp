// Recovery from processes that died: at once by those that live, or by the next one to open the store.

#include "store.h"

#include <algorithm>
#include <vector>

#include "fence.h"
#include "store_indexes.h"

namespace engram {

std::uint64_t Store::reclaim() const {
  if (others_ == nullptr) return 0;
  // A pause of a free entry: its process left it behind, or a stray write set it. No process would end it.
  Word& word = control_.lock_page().pause;
  std::uint64_t pause = word.load(std::memory_order_acquire);
  const std::uint64_t entry = pause & ~kReplacing;
  const bool held = entry >= 1 && entry <= control_.participants() && control_.participant(entry - 1).state.load(std::memory_order_acquire) != 0;
  if (pause != 0 && !held) word.compare_exchange_strong(pause, 0, std::memory_order_acq_rel);
  return others_->recover_dead([this](Participant& dead) { repair(dead); });
}

void Store::repair(Participant& dead) const {
  const auto entry = static_cast<std::uint64_t>(&dead - &control_.participant(0));
  if (const std::uint64_t pause = control_.lock_page().pause.load(std::memory_order_acquire); (pause & ~kReplacing) == entry + 1) {
    if ((pause & kReplacing) != 0) end_replacing();
    control_.lock_page().pause.store(0, std::memory_order_release);
  }
  for (Claim& claim : dead.claims) {
    const std::uint64_t t0 = claim.t0.load(std::memory_order_acquire);
    if (t0 != 0 && t0 != kNoted) repair(claim);
    claim.t0.store(0, std::memory_order_release);
  }
  // A claim of no rows, in which rows are counted before they are void: another process that repairs meanwhile must not count.
  Claim& claim = dead.claims[0];
  claim.n = 0;
  claim.lane = -1;
  claim.t0.store(control_.counters().next_ticket.load(std::memory_order_acquire), std::memory_order_seq_cst);
  void_gaps();
  claim.t0.store(0, std::memory_order_seq_cst);
  count_voids();
  if (ragged_ != nullptr) {  // it may have died between evicting rows and telling the indexes
    const Rows gone = *voids();
    if (!gone.empty()) tell_indexes([&](Index& index) { index.lost(gone.data(), gone.size()); });
  }
  limits().return_prepaid_of(dead);
  count_in_flight(true);
}

// Of the indexes that are attached: a store that is being closed attaches none.
void Store::count_in_flight(bool died) const {
  const auto* list = indexes_->current.load(std::memory_order_acquire);
  if (list == nullptr) return;
  for (Index* index : *list) index->count_again(died);
}

void Store::waits_in_vain() const {
  if (!limits().on()) return;
  look_after_others(Need::waiting);
  count_in_flight(false);
}

// Rows that were reserved and never begun: a writer that died between the two left no claim. They become void under the number
// that they have: a living writer, who is just about to begin one, writes over it all the same. The extent is looked at after the
// row, so that a row which another process has just forgotten is outside.
void Store::void_gaps() const {
  for (std::uint64_t row = 0; row < control_.capacity(); ++row) {
    std::uint64_t seen = control_.word(row).load(std::memory_order_acquire);
    if (state_of(seen) != State::unused) continue;
    if (!control_.inside(row)) continue;
    control_.one_void_more();
    const std::uint64_t gone = ticket(number_of(seen), State::voided);
    if (!control_.word(row).compare_exchange_strong(seen, gone, std::memory_order_acq_rel)) {
      control_.one_void_less();
      continue;
    }
    control_.became_void();
    fence(std::memory_order_seq_cst);  // as in write_and_tell: who emptied the lane meanwhile may have passed the row by
    forget_if_outside(row, number_of(gone));
  }
}

// The claim goes last, so that a death in here is repaired again. Returns how many rows became void.
std::uint64_t Store::repair(Claim& claim) const {
  const std::int64_t lane = claim.lane.load(std::memory_order_acquire);
  if (lane <= kEmptying) {
    control_.empty(claim.t0.load(std::memory_order_acquire), claim, true);  // this very one: what was written since to lanes that are empty is not his to forget
    fence(std::memory_order_seq_cst);
    tell_indexes([](Index& index) { index.emptied(); });
    return 0;
  }
  const std::uint64_t t0 = claim.t0.load(std::memory_order_acquire), length = control_.lane_length();
  const std::uint64_t n = claim.n.load(std::memory_order_acquire), p0 = claim.p0.load(std::memory_order_acquire);
  const bool ring = lane >= 0 && static_cast<std::uint64_t>(lane) < control_.lanes();
  std::vector<std::int64_t> rows;     // that the claim names, and the numbers they would have
  std::vector<std::uint64_t> numbers;
  if (ring) {
    for (std::uint64_t i = n > length ? n - length : 0; i < n; ++i) {
      rows.push_back(static_cast<std::int64_t>(static_cast<std::uint64_t>(lane) * length + (p0 + i) % length));
      numbers.push_back(t0 + i);
    }
  } else {
    for (std::uint64_t row = 0; row < control_.capacity(); ++row) {
      const std::uint64_t number = number_of(control_.word(row).load(std::memory_order_acquire));
      if (number - t0 >= n) continue;
      rows.push_back(static_cast<std::int64_t>(row));
      numbers.push_back(number);
    }
  }
  std::vector<std::int64_t> lost;
  std::vector<std::uint64_t> whole;  // numbers
  std::uint64_t voided = 0;
  for (std::uint64_t i = 0; i < rows.size(); ++i) {
    Word& word = control_.word(static_cast<std::uint64_t>(rows[i]));
    std::uint64_t seen = word.load(std::memory_order_acquire);
    if (number_of(seen) == numbers[i] && state_of(seen) == State::writing) {
      control_.one_void_more();
      if (word.compare_exchange_strong(seen, ticket(numbers[i], State::voided), std::memory_order_acq_rel)) {
        control_.became_void();
        ++voided;
      } else {
        control_.one_void_less();
      }
    }
    fence(std::memory_order_seq_cst);  // as in write_and_tell
    forget_if_outside(static_cast<std::uint64_t>(rows[i]), numbers[i]);
    const std::uint64_t now = word.load(std::memory_order_acquire);
    if (number_of(now) == numbers[i]) is_committed(now) ? whole.push_back(numbers[i]) : lost.push_back(rows[i]);
  }
  fence(std::memory_order_seq_cst);
  // Rows of one claim are numbered one after another, and an index looks at their tickets: what was not written is passed
  // over. Those of a scattered write come one by one; tables of other processes must look at all rows again, as after any such write.
  const bool scattered = !ring && !rows.empty();
  const std::uint64_t scatter = scattered ? control_.counters().scatters.fetch_add(1, std::memory_order_acq_rel) + 1 : 0;
  const auto is_whole = [&](std::uint64_t number) { return std::find(whole.begin(), whole.end(), number) != whole.end(); };
  tell_indexes([&](Index& index) {
    index.recovered(t0, n, is_whole);
    if (!lost.empty()) index.lost(lost.data(), lost.size());
    if (rows.empty()) return;
    if (ring) {
      index.written(rows.data(), rows.size(), numbers[0]);
    } else {
      for (std::uint64_t i = 0; i < rows.size(); ++i) {
        if (is_edited(control_.word(static_cast<std::uint64_t>(rows[i])).load(std::memory_order_acquire))) {
          index.edited(&rows[i], 1, numbers[i], all(), scatter);
        } else {
          index.rewritten(&rows[i], 1, numbers[i], scatter);
        }
      }
    }
  });
  return voided;
}

// Claims are cleared only after what they stand for was done, so that a death in here is recovered from too.
Control::Repair Store::recover() const {
  control_.writable();
  if ((control_.lock_page().pause.load(std::memory_order_acquire) & kReplacing) != 0) end_replacing();
  std::uint64_t voided = 0;
  for (std::uint64_t i = 0; i < control_.participants(); ++i) {
    for (Claim& claim : control_.participant(i).claims) {
      const std::uint64_t t0 = claim.t0.load(std::memory_order_acquire);
      if (t0 != 0 && t0 != kNoted) voided += repair(claim);
    }
    limits().return_prepaid_of(control_.participant(i));
  }
  Control::Repair all = control_.recover();
  all.voided += voided;
  return all;
}

}  // namespace engram
