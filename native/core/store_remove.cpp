// Removing rows: they become void, as rows of a writer that died, and the indexes are told.

#include "store.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "check.h"
#include "fence.h"
#include "store_indexes.h"

namespace engram {

// The claim names numbers, as that of a scattered write: if the process dies in here, the one that finds the claim tells the indexes
// of the rows that have these numbers. A row gets its new number in the same step in which it becomes void, so it is never half of
// both. A row that got a newer number than these while this call looked was edited meanwhile, or written: it is looked at again under
// newer numbers, as numbers of a row only grow.
std::uint64_t Store::remove(const std::int64_t* rows, std::uint64_t n, const std::int64_t* expected, bool paused) {
  const OwnRowsOrNone own_rows(rows, n, control_.capacity());
  Participant& own = writer();
  if (n == 0) return 0;
  check(!paused || control_.lock_page().pause.load(std::memory_order_acquire) == own_pause(),
        "rows removed in a store that this process has not paused");
  look_after_others();
  std::vector<std::uint64_t> left(n);
  std::iota(left.begin(), left.end(), 0);
  std::uint64_t removed = 0;
  while (!left.empty()) {
    ClaimGuard claim(own);
    if (!paused) admit(claim);
    const std::uint64_t t0 = control_.counters().next_ticket.fetch_add(left.size(), std::memory_order_acq_rel);
    claim.note(t0, left.size(), -1, 0);
    removed += remove_under(t0, rows, expected, left);
  }
  return removed;
}

// Removes the rows of the entries `left`; those that must be looked at again are left.
std::uint64_t Store::remove_under(std::uint64_t t0, const std::int64_t* rows, const std::int64_t* expected,
                                  std::vector<std::uint64_t>& left) const {
  std::vector<std::int64_t> gone;
  const auto stays = [&](std::uint64_t i) {
    const auto row = static_cast<std::uint64_t>(rows[i]);
    if (rows[i] < 0 || !control_.inside(row)) return false;
    Word& word = control_.word(row);
    for (std::uint64_t seen = settled_word(row); is_committed(seen); seen = settled_word(row)) {
      if (expected != nullptr && control_.write_of(row, seen) != static_cast<std::uint64_t>(expected[i])) return false;
      const std::uint64_t number = t0 + gone.size();
      if (number_of(seen) >= t0) return true;
      control_.one_void_more();
      if (word.compare_exchange_strong(seen, ticket(number, State::voided), std::memory_order_acq_rel)) {
        control_.became_void();
        fence(std::memory_order_seq_cst);  // as in write_and_tell: who emptied the lane meanwhile may have passed the row by
        forget_if_outside(row, number);
        gone.push_back(rows[i]);
        return false;
      }
      control_.one_void_less();
    }
    return false;
  };
  std::erase_if(left, [&](std::uint64_t i) { return !stays(i); });
  if (gone.empty()) return 0;
  control_.counters().scatters.fetch_add(1, std::memory_order_acq_rel);  // tables of other processes hear of it by that
  fence(std::memory_order_seq_cst);
  tell_indexes([&](Index& index) { index.lost(gone.data(), gone.size()); });
  return gone.size();
}

// A process that dies between counting a row as void and making it void leaves one counted too many. If no process writes, the rows are
// counted again, and the count is exact. If one does, the count stays until the store is opened by a first process again.
void Store::count_voids() const {
#ifndef ENGRAM_WITHOUT_RECOUNT  // the tests must fail then: make negative-controls
  const std::uint64_t next = control_.counters().next_ticket.load(std::memory_order_seq_cst);
  std::uint64_t counted = control_.counters().void_rows.load(std::memory_order_seq_cst), voids = 0;
  if (!control_.at_rest(next)) return;
  for (std::uint64_t row = 0; row < control_.capacity(); ++row) {
    voids += state_of(control_.word(row).load(std::memory_order_acquire)) == State::voided && control_.inside(row);
  }
  if (control_.at_rest(next)) control_.counters().void_rows.compare_exchange_strong(counted, voids, std::memory_order_acq_rel);
#endif
}

}  // namespace engram
