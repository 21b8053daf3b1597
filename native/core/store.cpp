#include "store.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <exception>
#include <numeric>
#include <string>
#include <thread>

#include "check.h"
#include "pool.h"
#include "random.h"
#include "wait.h"

namespace engram {
namespace {

constexpr std::uint64_t kChunkBytes = 256 * 1024;  // copied between two looks at the tickets
constexpr std::uint64_t kBlockRows = 64;           // rows per block of a read, at most
constexpr std::uint64_t kAhead = 8;                // rows between asking for one and writing it
constexpr std::uint64_t kParallelBytes = 512 * 1024;  // a batch below this is not worth waking a thread for
constexpr std::uint64_t kRedraws = 8;              // before a reader begins to yield
constexpr std::uint64_t kPatience = 64;            // attempts before the live rows are listed
constexpr auto kBetweenLooks = std::chrono::milliseconds(500);  // at who died
constexpr auto kWhileWaiting = std::chrono::milliseconds(10);
constexpr auto kPauseLooks = std::chrono::microseconds(200);  // between two, at whether the store is still paused

// gcc's TSan does not model fences; its build orders each copied byte instead (gather.cpp).
inline void fence([[maybe_unused]] std::memory_order order) {
#ifndef ENGRAM_TSAN
  std::atomic_thread_fence(order);
#endif
}

// Uniform choice among the rows inside the lanes' extents, void ones included.
class Spans {
 public:
  explicit Spans(const Control& control) : length_(control.lane_length()) {
    if (control.lanes() == 1) {
      total_ = control.filled(0);
      return;
    }
    ends_.reserve(control.lanes());
    for (std::uint64_t lane = 0; lane < control.lanes(); ++lane) ends_.push_back(total_ += control.filled(lane));
    if (total_ == control.capacity()) ends_.clear();  // all full: the k-th row is row k
  }

  std::uint64_t total() const { return total_; }

  std::int64_t row(std::uint64_t k) const {
    if (ends_.empty()) return static_cast<std::int64_t>(k);
    const auto end = std::upper_bound(ends_.begin(), ends_.end(), k);
    const auto lane = static_cast<std::uint64_t>(end - ends_.begin());
    const std::uint64_t before = lane == 0 ? 0 : ends_[lane - 1];
    return static_cast<std::int64_t>(lane * length_ + (k - before));
  }

 private:
  std::uint64_t length_, total_ = 0;
  std::vector<std::uint64_t> ends_;
};

}  // namespace

Store::Store(Control control, std::vector<Field> fields, std::uint64_t participant)
    : control_(control), participant_(&control_.participant(participant)), fields_(std::move(fields)) {
  all_.resize(fields_.size());
  std::iota(all_.begin(), all_.end(), std::uint64_t{0});
  for (const Field& field : fields_) row_bytes_ += field.row_bytes;
}

void Store::add_field(Field field) {
  all_.push_back(fields_.size());
  fields_.push_back(field);
  row_bytes_ += field.row_bytes;
}

// After a fence: either this sees an index that was just attached, or that index, when it looks around, sees what was just
// committed.
template <class Tell>
void Store::tell_indexes(Tell&& tell) const {
  if (on_new_index_ && control_.counters().index_epoch.load(std::memory_order_relaxed) != indexes_->epoch) {
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

// Of a write that waits in vain for a row what is written stays, and what was reserved and is not begun becomes void.
template <class Write, class Settle, class Tell>
void Store::write_and_tell(Write&& write, Settle&& settle, Tell&& tell) const {
  std::exception_ptr stalled;
  try {
    write();
  } catch (const Stalled&) {
    stalled = std::current_exception();
    void_gaps();
  }
  fence(std::memory_order_seq_cst);
  settle();  // what a store that was emptied meanwhile must not show: who empties it sees these rows, or this sees that he does
  tell_indexes(tell);
  if (stalled) std::rethrow_exception(stalled);
}

// A row that was being written when another one emptied the store was left to its writer, and may lie outside the extent now:
// it is forgotten, like all that was written before.
void Store::forget_if_outside(std::uint64_t row, std::uint64_t number) const {
  if (control_.inside(row)) return;
  for (const State state : {State::committed, State::voided}) {
    std::uint64_t seen = ticket(number, state);
    const bool forgotten =
        control_.word(row).compare_exchange_strong(seen, ticket(number, State::unused), std::memory_order_acq_rel);
    if (forgotten && state == State::voided) control_.one_void_less();
  }
}

void Store::forget_outside(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0) const {
  for (std::uint64_t i = 0; i < n; ++i) forget_if_outside(static_cast<std::uint64_t>(rows[i]), t0 + i);
}

void Store::join(std::shared_ptr<Participants> participants) {
  std::uint64_t entry = participants->join();
  if (entry == Participants::kNobody) {  // nobody may have looked who died: whoever lives does so when he reads or writes
    participants->bury_dead([this](Participant& dead) { repair(dead); });
    entry = participants->join();
  }
  if (entry == Participants::kNobody) throw Stalled("as many processes share the store as can");
  participant_ = &control_.participant(entry);
  others_ = std::move(participants);
}

void Store::look_after_others(Need need) const {
  if (others_ == nullptr) return;
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  std::atomic<std::int64_t>& last = *last_look_;
  const auto before = last.load(std::memory_order_relaxed);
  const auto pause = need == Need::waiting ? kWhileWaiting : kBetweenLooks;
  if (now - before < std::chrono::duration_cast<std::chrono::steady_clock::duration>(pause).count()) return;
  last.store(now, std::memory_order_relaxed);
  mend();
}

std::uint64_t Store::mend() const {
  if (others_ == nullptr) return 0;
  // A pause of a free entry: its process left it behind, or a stray write set it. No process would end it.
  Word& word = control_.lock_page().pause;
  std::uint64_t pause = word.load(std::memory_order_acquire);
  const std::uint64_t entry = pause & ~kReplacing;
  const bool held = entry >= 1 && entry <= control_.participants() && control_.participant(entry - 1).state.load(std::memory_order_acquire) != 0;
  if (pause != 0 && !held) word.compare_exchange_strong(pause, 0, std::memory_order_acq_rel);
  return others_->bury_dead([this](Participant& dead) { repair(dead); });
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
  void_gaps();
}

// Rows that were reserved and never begun: whoever died between the two left no claim. They become void under the number that
// they have: a living writer, who is just about to begin one, writes over it all the same. The extent is looked at after the
// row, so that a row which somebody just forgot is outside.
void Store::void_gaps() const {
  for (std::uint64_t row = 0; row < control_.capacity(); ++row) {
    std::uint64_t seen = control_.word(row).load(std::memory_order_acquire);
    if (state_of(seen) != State::unused) continue;
    if (!control_.inside(row)) continue;
    control_.counters().void_rows.fetch_add(1, std::memory_order_acq_rel);
    const std::uint64_t gone = ticket(number_of(seen), State::voided);
    if (!control_.word(row).compare_exchange_strong(seen, gone, std::memory_order_acq_rel)) {
      control_.one_void_less();
      continue;
    }
    fence(std::memory_order_seq_cst);  // as in write_and_tell: who emptied the lane meanwhile may have passed the row by
    forget_if_outside(row, number_of(gone));
  }
}

// In this order: a row is counted as void before it is, so that void_rows is never too small; and the claim goes last, so
// that a death in here is repaired again. Returns how many rows became void.
std::uint64_t Store::repair(Claim& claim) const {
  const std::int64_t lane = copied(claim.lane);
  if (lane <= kEmptying) {
    control_.empty(claim.t0.load(std::memory_order_acquire), claim, true);  // this very one: what was written since to lanes that are empty is not his to forget
    fence(std::memory_order_seq_cst);
    tell_indexes([](Index& index) { index.emptied(); });
    return 0;
  }
  const std::uint64_t t0 = claim.t0.load(std::memory_order_acquire), length = control_.lane_length();
  const std::uint64_t n = copied(claim.n), p0 = copied(claim.p0);
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
  std::uint64_t voided = 0;
  for (std::uint64_t i = 0; i < rows.size(); ++i) {
    Word& word = control_.word(static_cast<std::uint64_t>(rows[i]));
    std::uint64_t seen = ticket(numbers[i], State::writing);
    if (word.load(std::memory_order_acquire) == seen) {
      control_.counters().void_rows.fetch_add(1, std::memory_order_acq_rel);
      if (word.compare_exchange_strong(seen, ticket(numbers[i], State::voided), std::memory_order_acq_rel)) {
        ++voided;
      } else {
        control_.one_void_less();
      }
    }
    fence(std::memory_order_seq_cst);  // as in write_and_tell
    forget_if_outside(static_cast<std::uint64_t>(rows[i]), numbers[i]);
    const std::uint64_t now = word.load(std::memory_order_acquire);
    if (number_of(now) == numbers[i] && !is_committed(now)) lost.push_back(rows[i]);
  }
  fence(std::memory_order_seq_cst);
  // Rows of one claim are numbered one after another, and an index looks at their tickets: what was not written is passed
  // over. Those of a scattered write come one by one.
  tell_indexes([&](Index& index) {
    if (!lost.empty()) index.lost(lost.data(), lost.size());
    if (rows.empty()) return;
    if (ring) {
      index.written(rows.data(), rows.size(), numbers[0]);
    } else {
      for (std::uint64_t i = 0; i < rows.size(); ++i) index.written(&rows[i], 1, numbers[i]);
    }
  });
  return voided;
}

// Claims are cleared only after what they stand for was done, so that a death in here is recovered from too.
Control::Repair Store::recover() const {
  if ((control_.lock_page().pause.load(std::memory_order_acquire) & kReplacing) != 0) end_replacing();
  std::uint64_t voided = 0;
  for (std::uint64_t i = 0; i < control_.participants(); ++i) {
    for (Claim& claim : control_.participant(i).claims) {
      const std::uint64_t t0 = claim.t0.load(std::memory_order_acquire);
      if (t0 != 0 && t0 != kNoted) voided += repair(claim);
    }
  }
  Control::Repair all = control_.recover();
  all.voided += voided;
  return all;
}

// Tries to mark a row as being written by `number`. Lapped: a newer write has or will have the row. Busy: somebody else
// is writing it. Over::live: a row that holds nothing any more counts as lapped too, as what is not replaced of it may be torn.
Store::Mark Store::try_mark(std::uint64_t row, std::uint64_t number, const Place* place, Over over) {
  Word& word = control_.word(row);
  std::uint64_t seen = word.load(std::memory_order_acquire);
  do {
#ifdef ENGRAM_WITHOUT_LAP_CHECK  // the tests must fail then: make negative-controls
    const bool overtaken = false;
#else
    const bool overtaken =
        place != nullptr && control_.lane(place->lane).cursor.load(std::memory_order_acquire) >
                                place->position + control_.lane_length();
#endif
    const bool gone = over == Over::live && !is_committed(seen) && state_of(seen) != State::writing;
    if (overtaken || gone || number_of(seen) > number) {
      control_.counters().lapped_rows.fetch_add(1, std::memory_order_relaxed);
      return Mark::lapped;
    }
    if (state_of(seen) == State::writing) return Mark::busy;
#ifndef ENGRAM_WITHOUT_CAS  // the tests must fail then: make negative-controls
  } while (!word.compare_exchange_weak(seen, ticket(number, State::writing), std::memory_order_acq_rel,
                                       std::memory_order_acquire));
#else
  } while (word.store(ticket(number, State::writing), std::memory_order_release), false);
#endif
  if (place != nullptr) {
    control_.lap(row).store(place->lap, std::memory_order_release);
  } else if (!is_committed(seen)) {  // by number: a row that held nothing gets its newest step, another one keeps its own
    const std::uint32_t lap = control_.newest_lap(row, control_.end(row / control_.lane_length()));
    control_.lap(row).store(lap, std::memory_order_release);
  }
  if (state_of(seen) == State::voided) control_.one_void_less();
  return Mark::marked;
}

// Marks a row, waiting for another writer of it; the caller must have nothing marked. False: lapped.
bool Store::mark(std::uint64_t row, std::uint64_t number, const Place* place, Over over) {
  const Deadline deadline;
  for (;;) {
    const Mark mark = try_mark(row, number, place, over);
    if (mark != Mark::busy) return mark == Mark::marked;
    if (deadline.passed()) throw in_vain("row " + std::to_string(row) + " has been in the hands of another writer");
    look_after_others(Need::waiting);
    std::this_thread::yield();
  }
}

void Store::commit(std::uint64_t row, std::uint64_t number) {
  control_.word(row).store(ticket(number, State::committed), std::memory_order_release);
}

// The rows at positions p0 … of a lane. `pick`, if not null, names for each of them its place in rows_out.
void Store::place_ring(std::uint64_t lane, std::uint64_t p0, std::uint64_t n, const std::int64_t* pick,
                       std::int64_t* rows_out) const {
  const std::uint64_t length = control_.lane_length(), start = lane * length;
  for (std::uint64_t i = 0; i < n; ++i) {
    rows_out[pick == nullptr ? i : static_cast<std::uint64_t>(pick[i])] = static_cast<std::int64_t>(start + (p0 + i) % length);
  }
}

// Writes n rows at positions p0 … of a lane, claimed already. `pick`, if not null, names for each of them its row of the
// columns, which is also its place among the ticket numbers.
void Store::write_ring(std::uint64_t lane, std::uint64_t p0, std::uint64_t n, std::uint64_t t0, Columns columns,
                       const std::int64_t* pick) {
  const std::uint64_t length = control_.lane_length(), start = lane * length;
  const auto source = [pick](std::uint64_t i) { return pick == nullptr ? i : static_cast<std::uint64_t>(pick[i]); };
  const std::uint64_t chunk = std::max<std::uint64_t>(1, kChunkBytes / std::max<std::uint64_t>(1, row_bytes_));
  std::uint64_t i = n > length ? n - length : 0;  // rows that this very batch would overwrite are not written
  while (i < n) {
    const std::uint64_t first = start + (p0 + i) % length;
    const std::uint64_t room = std::min({chunk, n - i, start + length - first});  // up to the end of the ring
    const std::uint32_t lap = control_.lap_of(p0 + i);
    // Whatever cannot be marked at once ends the chunk, so that nothing stays marked during a wait.
    std::uint64_t marked = 0;
    Mark last = Mark::marked;
    for (; marked < room; ++marked) {
      const Place place{lane, p0 + i + marked, lap};
      const std::uint64_t number = t0 + source(i + marked);
      last = try_mark(first + marked, number, &place);
      if (last == Mark::busy && marked == 0) last = mark(first, number, &place) ? Mark::marked : Mark::lapped;
      if (last != Mark::marked) break;
    }
    fence(std::memory_order_release);
    for (std::uint64_t f = 0; f < fields_.size(); ++f) {
      const std::uint64_t bytes = fields_[f].row_bytes;
      std::byte* to = fields_[f].data + first * bytes;
      if (pick == nullptr) {
        copy_to_shared(to, columns[f] + i * bytes, marked * bytes);
      } else {
        for (std::uint64_t j = 0; j < marked; ++j) {
          copy_to_shared(to + j * bytes, columns[f] + source(i + j) * bytes, bytes);
        }
      }
    }
    fence(std::memory_order_release);
    for (std::uint64_t j = 0; j < marked; ++j) commit(first + j, t0 + source(i + j));
    i += marked + (last == Mark::lapped ? 1 : 0);
  }
}

std::uint64_t Store::append(std::uint64_t lane, std::uint64_t n, Columns columns, std::int64_t* rows_out) {
  check(lane < control_.lanes(), "a lane outside the store");
  check(columns.size() == fields_.size(), "another number of columns than the store has fields");
  look_after_others();
  ClaimGuard claim(*participant_);
  admit(claim);
  // Cursor before counter: a writer one lap ahead that got the smaller number is seen through the cursor (try_mark).
  const std::uint64_t p0 = control_.reserve(lane, n);
  const std::uint64_t t0 = control_.counters().next_ticket.fetch_add(n, std::memory_order_acq_rel);
  claim.note(t0, n, static_cast<std::int64_t>(lane), p0);
  std::vector<std::int64_t> rows;
  if (rows_out == nullptr) rows_out = (rows.resize(n), rows.data());
  place_ring(lane, p0, n, nullptr, rows_out);
  write_and_tell(
      [&] { write_ring(lane, p0, n, t0, columns, nullptr); },
      [&] {
        if (control_.lane(lane).base.load(std::memory_order_acquire) > p0) forget_outside(rows_out, n, t0);
      },
      [&](Index& index) { index.written(rows_out, n, t0); });
  control_.counters().write_count.fetch_add(n, std::memory_order_relaxed);
  return t0;
}

std::uint64_t Store::append_by_lane(const std::int64_t* lane_of, std::uint64_t n, Columns columns,
                                    std::int64_t* rows_out) {
  check(columns.size() == fields_.size(), "another number of columns than the store has fields");
  for (std::uint64_t i = 0; i < n; ++i) {
    check(static_cast<std::uint64_t>(lane_of[i]) < control_.lanes(), "a lane outside the store");
  }
  look_after_others();
  struct Run {
    std::uint64_t lane, begin, end, p0;
  };
  std::vector<std::int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [lane_of](std::int64_t a, std::int64_t b) { return lane_of[a] < lane_of[b]; });
  std::vector<Run> runs;
  for (std::uint64_t begin = 0, end = 0; begin < n; begin = end) {
    const std::int64_t lane = lane_of[order[begin]];
    while (end < n && lane_of[order[end]] == lane) ++end;
    runs.push_back({static_cast<std::uint64_t>(lane), begin, end, 0});
  }
  ClaimGuard claim(*participant_);
  admit(claim);
  for (Run& run : runs) {
    run.p0 = control_.reserve(run.lane, run.end - run.begin);
  }
  const std::uint64_t t0 = control_.counters().next_ticket.fetch_add(n, std::memory_order_acq_rel);
  claim.note(t0, n, -1, 0);
  std::vector<std::int64_t> rows;
  if (rows_out == nullptr) rows_out = (rows.resize(n), rows.data());
  for (const Run& run : runs) place_ring(run.lane, run.p0, run.end - run.begin, order.data() + run.begin, rows_out);
  write_and_tell(
      [&] {
        for (const Run& run : runs) {
          write_ring(run.lane, run.p0, run.end - run.begin, t0, columns, order.data() + run.begin);
        }
      },
      [&] {
        bool emptied = false;
        for (const Run& run : runs) emptied |= control_.lane(run.lane).base.load(std::memory_order_acquire) > run.p0;
        if (emptied) forget_outside(rows_out, n, t0);
      },
      [&](Index& index) { index.written(rows_out, n, t0); });
  control_.counters().write_count.fetch_add(n, std::memory_order_relaxed);
  return t0;
}

// Makes the lanes' extents cover the rows, and unwritten rows below them live as zeros. The zeros' number is taken before
// the extent is looked at, and every writer takes his after he has extended it: so zeros are older than any write that
// they meet, and hide none.
void Store::grow_over(const std::int64_t* rows, std::uint64_t n, ClaimGuard& claim) {
  const std::uint64_t length = control_.lane_length();
  std::vector<std::byte> zeros;
  std::uint64_t number = 0;  // of the zeros; 0: none are needed
  bool lapped = false;
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto row = static_cast<std::uint64_t>(rows[i]);
    const std::uint64_t lane = row / length, covered = row % length + 1;
    if (covered > control_.filled(lane) + 1 && number == 0) {
      zeros.resize(row_bytes_);
      number = control_.counters().next_ticket.fetch_add(1, std::memory_order_acq_rel);
      claim.note(number, 1, -1, 0);
    }
    if (covered <= control_.filled(lane)) continue;
    const std::uint64_t before = control_.raise_high(lane, covered);
    if (before + 1 < covered && number == 0) {  // somebody has emptied the store since: no zeros, as they have no number
      void_gaps();
      continue;
    }
    for (std::uint64_t gap = lane * length + before; number != 0 && gap < row; ++gap) {
      if (!mark(gap, number, nullptr)) {
        lapped = true;
        continue;
      }
      fence(std::memory_order_release);
      for (const Field& field : fields_) {
        copy_to_shared(field.data + gap * field.row_bytes, zeros.data(), field.row_bytes);
      }
      fence(std::memory_order_release);
      commit(gap, number);
      fence(std::memory_order_seq_cst);  // as in write_and_tell
      forget_if_outside(gap, number);
      const auto zeroed = static_cast<std::int64_t>(gap);
      tell_indexes([&](Index& index) { index.written(&zeroed, 1, number); });
    }
  }
  if (lapped) void_gaps();  // by a writer, or by somebody who emptied the store: then nobody else comes
  if (number != 0) claim.forget_note();
}

std::uint64_t Store::scatter(const std::int64_t* rows, std::uint64_t n, std::span<const std::uint64_t> which,
                             Columns columns, bool grow, const std::int64_t* pick, std::uint64_t of) {
  check(columns.size() == which.size(), "another number of columns than fields named");
  for (const std::uint64_t f : which) check(f < fields_.size(), "a field outside the store");
  check_rows(rows, n, control_.capacity());
  if (pick != nullptr) check_rows(pick, n, of);
  look_after_others();
  ClaimGuard claim(*participant_);
  admit(claim);
  if (grow) {
    try {
      grow_over(rows, n, claim);
    } catch (const Stalled&) {
      void_gaps();
      throw;
    }
  } else {
    for (std::uint64_t i = 0; i < n; ++i) {
      const auto row = static_cast<std::uint64_t>(rows[i]);
      const State state = state_of(control_.word(row).load(std::memory_order_acquire));
      // One that is being written is waited for; one outside the extent is just being forgotten.
      if ((state != State::committed && state != State::writing) || !control_.inside(row)) {
        throw std::out_of_range("row " + std::to_string(rows[i]) + " is not live");
      }
    }
  }
  const std::uint64_t t0 = control_.counters().next_ticket.fetch_add(n, std::memory_order_acq_rel);
  claim.note(t0, n, -1, 0);
  const auto write = [&] {
    const struct Counted {  // once they are written, also if some wait in vain
      Word& scatters;
      std::uint64_t one;
      ~Counted() { scatters.fetch_add(one, std::memory_order_acq_rel); }
    } counted{control_.counters().scatters, n > 0};
    for (std::uint64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) {  // rows lie anywhere: their memory is asked for while others are copied
        __builtin_prefetch(&control_.word(static_cast<std::uint64_t>(rows[i + kAhead])), 1);
        for (const std::uint64_t f : which) prefetch_row(fields_[f], rows[i + kAhead]);
      }
      const auto row = static_cast<std::uint64_t>(rows[i]);
      const std::uint64_t source = pick == nullptr ? i : static_cast<std::uint64_t>(pick[i]);
      if (!mark(row, t0 + i, nullptr, grow ? Over::anything : Over::live)) continue;
      fence(std::memory_order_release);
      for (std::uint64_t f = 0; f < which.size(); ++f) {
        const std::uint64_t bytes = fields_[which[f]].row_bytes;
        copy_to_shared(fields_[which[f]].data + row * bytes, columns[f] + source * bytes, bytes);
      }
      fence(std::memory_order_release);
      commit(row, t0 + i);
    }
  };
  write_and_tell(write, [&] { forget_outside(rows, n, t0); }, [&](Index& index) {
    if (grow) {
      index.rewritten(rows, n, t0);
    } else {
      index.edited(rows, n, t0, which);
    }
  });
  if (grow) control_.counters().write_count.fetch_add(n, std::memory_order_relaxed);
  return t0;
}

// If this ends by a death whoever finds the claim finishes it: else some lanes would be empty, and indexes would know rows that
// nobody can draw.
void Store::empty(bool keep_write_count) {
  ClaimGuard claim(*participant_);
  admit(claim);
  empty(claim, keep_write_count);
}

void Store::empty(ClaimGuard& claim, bool keep_write_count) const {
  const std::uint64_t t = control_.counters().next_ticket.fetch_add(1, std::memory_order_acq_rel);
  claim.note(t, 0, kEmptying, keep_write_count ? 1 : 0);
  control_.empty(t, claim.claim(), false);
  fence(std::memory_order_seq_cst);
  tell_indexes([](Index& index) { index.emptied(); });
}

// ---- pausing -------------------------------------------------------------------------------------------------------

std::uint64_t Store::own_pause() const {
  return static_cast<std::uint64_t>(participant_ - &control_.participant(0)) + 1;
}

Stalled Store::paused_in_vain() const {
  const std::uint64_t entry = control_.lock_page().pause.load(std::memory_order_acquire) & ~kReplacing;
  const std::uint32_t pid = entry == 0 || entry > control_.participants() ? 0 : control_.participant(entry - 1).pid;
  const bool own = entry == own_pause();
  const std::string who = own ? "this process" : pid != 0 ? "process " + std::to_string(pid) : "another process";
  return in_vain(who + " has paused the store, to save or load it,",
                 "Try again when that is over. A Checkpointer pauses it for a moment only, whatever its size");
}

// Lets a writer through that has just taken a claim: at once, but for a store that is paused.
void Store::admit([[maybe_unused]] ClaimGuard& claim) const {
#ifndef ENGRAM_WITHOUT_PAUSE  // the tests must fail then: make negative-controls
  if (control_.lock_page().pause.load(std::memory_order_seq_cst) == 0) return;
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
  std::uint64_t nobody = 0;
  while (!pause.compare_exchange_strong(nobody, own_pause(), std::memory_order_seq_cst)) {
    if (deadline.passed()) throw paused_in_vain();
    look_after_others(Need::waiting);
    std::this_thread::sleep_for(kPauseLooks);
    nobody = 0;
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

void Store::begin_placing() {
  if (placings_ == 0) {
    auto& mutex = control_.lock_page().placing;
    try {
      if (mutex.lock()) mutex.mended();  // a plan that was not written is forgotten
    } catch (const Stalled&) {           // which says what an index would
      throw in_vain("another process has been placing rows");
    }
  }
  ++placings_;
}

void Store::end_placing() {
  if (placings_ > 0 && --placings_ == 0) control_.lock_page().placing.unlock();
}

void Store::forget_holds() { pauses_ = placings_ = 0; }

void Store::begin_replacing(bool keep_write_count) {
  const std::uint64_t pause = control_.lock_page().pause.load(std::memory_order_acquire);
  check((pause & ~kReplacing) == own_pause(), "rows replaced in a store that this process has not paused");
  control_.lock_page().pause.store(own_pause() | kReplacing, std::memory_order_release);
  ClaimGuard claim(*participant_);
  empty(claim, keep_write_count);
}

void Store::replaced(std::uint64_t clock, const Control::LaneWords* lanes, const std::int64_t* numbers) {
  check(control_.lock_page().pause.load(std::memory_order_acquire) == (own_pause() | kReplacing), "rows replaced that were not begun with");
  control_.put_words(clock, lanes, numbers);
}

void Store::end_replacing() const {
#ifndef ENGRAM_WITHOUT_REPLACING  // the tests of death must fail then: make negative-controls
  control_.empty(false);
  fence(std::memory_order_seq_cst);
  tell_indexes([](Index& index) { index.emptied(); });
#endif
}

void Store::attach(Index& index) {
  std::lock_guard<std::mutex> guard(indexes_->attaching);
  const auto* before = indexes_->current.load(std::memory_order_relaxed);
  auto list = before == nullptr ? std::vector<Index*>{} : *before;
  list.push_back(&index);
  indexes_->lists.push_back(std::make_unique<const std::vector<Index*>>(std::move(list)));
  indexes_->current.store(indexes_->lists.back().get(), std::memory_order_release);
  fence(std::memory_order_seq_cst);
}

void Store::knows_indexes(std::uint64_t epoch) { indexes_->epoch.store(epoch, std::memory_order_release); }

std::uint64_t Store::block_rows(std::span<const std::uint64_t> which) const {
  std::uint64_t bytes = 0;
  for (const std::uint64_t f : which) bytes += fields_[f].row_bytes;
  return std::clamp<std::uint64_t>(kChunkBytes / std::max<std::uint64_t>(1, bytes), 1, kBlockRows);
}

// Asks for the tickets of rows that will be read soon: one block ahead, so that nobody waits for them.
void Store::prefetch_tickets(const std::int64_t* rows, std::uint64_t n) const {
  for (std::uint64_t i = 0; i < n; ++i) __builtin_prefetch(&control_.word(static_cast<std::uint64_t>(rows[i])));
}

// Reads rows[0, n), n <= 64, into places at … of the batch; bit i of *moved says that rows[i] was not whole throughout.
bool Store::read_block(const std::int64_t* rows, std::uint64_t n, std::span<const std::uint64_t> which, Batch batch,
                       std::uint64_t at, const std::int64_t* expected, std::int64_t* numbers_out,
                       std::uint64_t* moved) const {
  static_assert(kBlockRows <= 64);
  std::uint64_t words[kBlockRows];
  const Field* first = which.empty() ? nullptr : &fields_[which[0]];
  std::uint64_t bad = 0;
  for (std::uint64_t i = 0; i < n; ++i) {
    if (first != nullptr) prefetch_row(*first, rows[i]);
    words[i] = control_.word(static_cast<std::uint64_t>(rows[i])).load(std::memory_order_acquire);
    const bool ok = is_committed(words[i]) &&
                    (expected == nullptr || number_of(words[i]) == static_cast<std::uint64_t>(expected[i]));
    bad |= static_cast<std::uint64_t>(!ok) << i;
    if (numbers_out != nullptr) numbers_out[i] = static_cast<std::int64_t>(number_of(words[i]));
  }
  const bool runs = mostly_runs(rows, n);
  for (std::uint64_t f = 0; f < which.size(); ++f) {
    const Field& field = fields_[which[f]];
    std::byte* out = batch[f] + at * field.row_bytes;
    if (runs) {
      gather_runs(field, rows, n, out);
    } else {
      gather_rows(field, rows, n, out, f + 1 < which.size() ? &fields_[which[f + 1]] : nullptr);
    }
  }
#ifndef ENGRAM_WITHOUT_TICKET_CHECK  // the tests must fail then: make negative-controls
  fence(std::memory_order_acquire);
  for (std::uint64_t i = 0; i < n; ++i) {
    const std::uint64_t now = control_.word(static_cast<std::uint64_t>(rows[i])).load(std::memory_order_relaxed);
    bad |= static_cast<std::uint64_t>(now != words[i]) << i;
  }
#endif
  *moved = bad;
  return bad == 0;
}

namespace {

// Splits n rows of `bytes` each into chunks for the pool: several per thread, so that a late thread costs little.
template <class Body>
void for_each_chunk(std::uint64_t n, std::uint64_t bytes, std::uint64_t block, Body&& body) {
  const std::uint64_t threads = n * bytes < kParallelBytes ? 1 : num_threads();
  if (threads == 1) {
    body(std::uint64_t{0}, n);
    return;
  }
  const std::uint64_t blocks = (n + block - 1) / block;
  const std::uint64_t chunks = std::min<std::uint64_t>(blocks, threads * 8);
  parallel(chunks, [&](std::size_t c) {
    const std::uint64_t begin = blocks * c / chunks * block, end = std::min(blocks * (c + 1) / chunks * block, n);
    body(begin, end);
  });
}

}  // namespace

std::vector<std::int64_t> Store::gather(const std::int64_t* rows, std::uint64_t n,
                                        std::span<const std::uint64_t> which, Batch batch,
                                        const std::int64_t* expected, std::int64_t* numbers_out) const {
  check(batch.size() == which.size(), "another number of outputs than fields named");
  std::uint64_t bytes = 0;
  for (const std::uint64_t f : which) {
    check(f < fields_.size(), "a field outside the store");
    bytes += fields_[f].row_bytes;
  }
  check_rows(rows, n, control_.capacity());
  const std::uint64_t block = block_rows(which);
  std::vector<std::uint64_t> moved((n + block - 1) / block);
  for_each_chunk(n, bytes, block, [&](std::uint64_t begin, std::uint64_t end) {
    prefetch_tickets(rows + begin, std::min(block, end - begin));
    for (std::uint64_t i = begin; i < end; i += block) {
      if (i + block < end) prefetch_tickets(rows + i + block, std::min(block, end - i - block));
      read_block(rows + i, std::min(block, end - i), which, batch, i, expected == nullptr ? nullptr : expected + i,
                 numbers_out == nullptr ? nullptr : numbers_out + i, &moved[i / block]);
    }
  });
  std::vector<std::int64_t> positions;
  look_after_others(std::any_of(moved.begin(), moved.end(), [](auto bits) { return bits != 0; }) ? Need::waiting : Need::none);
  for (std::uint64_t b = 0; b < moved.size(); ++b) {
    for (std::uint64_t bits = moved[b]; bits != 0; bits &= bits - 1) {
      positions.push_back(static_cast<std::int64_t>(b * block + static_cast<std::uint64_t>(std::countr_zero(bits))));
    }
  }
  return positions;
}

void Store::sample_uniform(std::uint64_t key, std::uint64_t n, Batch batch, std::int64_t* rows_out,
                           std::int64_t* numbers_out) const {
  check(batch.size() == fields_.size(), "another number of outputs than the store has fields");
  look_after_others();
  const Spans spans(control_);
  if (spans.total() == 0) throw NothingLive("no row has been written");
  const Random random(key);
  const std::uint64_t block = block_rows(all_);
  std::atomic<bool> impatient{false};

  // Draws position i again until its row is whole. Rejection keeps the draw uniform over the live rows.
  const auto redraw = [&](std::uint64_t i, std::int64_t* row) {
    std::uint64_t moved = 0;
    for (std::uint64_t attempt = 1; attempt <= kPatience; ++attempt) {
      if (attempt > kRedraws) std::this_thread::yield();
      *row = spans.row(random.below(spans.total(), i, attempt));
      control_.counters().redraws.fetch_add(1, std::memory_order_relaxed);
      if (read_block(row, 1, all_, batch, i, nullptr, numbers_out == nullptr ? nullptr : numbers_out + i, &moved)) {
        return;
      }
    }
    impatient.store(true, std::memory_order_relaxed);
  };

  for_each_chunk(n, row_bytes_, block, [&](std::uint64_t begin, std::uint64_t end) {
    std::int64_t drawn[2][kBlockRows];
    std::int64_t *chosen = drawn[0], *upcoming = drawn[1];
    const auto choose = [&](std::uint64_t i, std::int64_t* rows) {
      const std::uint64_t count = std::min(block, end - i);
      for (std::uint64_t j = 0; j < count; ++j) rows[j] = spans.row(random.below(spans.total(), i + j));
      prefetch_tickets(rows, count);
    };
    choose(begin, chosen);
    for (std::uint64_t i = begin; i < end && !impatient.load(std::memory_order_relaxed); i += block) {
      if (i + block < end) choose(i + block, upcoming);
      const std::uint64_t count = std::min(block, end - i);
      std::uint64_t moved = 0;
      read_block(chosen, count, all_, batch, i, nullptr, numbers_out == nullptr ? nullptr : numbers_out + i, &moved);
      for (; moved != 0; moved &= moved - 1) {
        const auto j = static_cast<std::uint64_t>(std::countr_zero(moved));
        redraw(i + j, &chosen[j]);
      }
      if (rows_out != nullptr) std::memcpy(rows_out + i, chosen, count * sizeof(std::int64_t));
      std::swap(chosen, upcoming);
    }
  });
  if (impatient.load(std::memory_order_relaxed)) sample_listed(random, n, batch, rows_out, numbers_out);
}

// Draws from a list of the live rows: where nearly everything inside the extent is void, or part of a large batch that is
// still being written.
void Store::sample_listed(const Random& random, std::uint64_t n, Batch batch, std::int64_t* rows_out,
                          std::int64_t* numbers_out) const {
  std::vector<std::int64_t> live = live_rows();
  for (std::uint64_t i = 0; i < n; ++i) {
    for (std::uint64_t attempt = kPatience + 1;; ++attempt) {
      if (live.empty()) throw NothingLive("no row is live: the store was just emptied, or all its rows are void");
      const std::int64_t row = live[random.below(live.size(), i, attempt)];
      if (rows_out != nullptr) rows_out[i] = row;
      control_.counters().redraws.fetch_add(1, std::memory_order_relaxed);
      std::uint64_t moved = 0;
      if (read_block(&row, 1, all_, batch, i, nullptr, numbers_out == nullptr ? nullptr : numbers_out + i, &moved)) {
        break;
      }
      live = live_rows();
    }
  }
}

void Store::read_ranked(std::int64_t* ranks, std::uint64_t n, Batch batch, std::int64_t* numbers_out) const {
  const bool gaps = control_.counters().void_rows.load(std::memory_order_relaxed) > 0;
  const Spans spans(control_);
  std::vector<std::int64_t> live;  // one that is being written keeps its rank, as it counts in size()
  for (std::uint64_t k = 0; gaps && k < spans.total(); ++k) {
    const std::int64_t row = spans.row(k);
    const std::uint64_t word = control_.word(static_cast<std::uint64_t>(row)).load(std::memory_order_acquire);
    if (state_of(word) != State::voided) live.push_back(row);
  }
  const std::uint64_t total = gaps ? live.size() : spans.total();
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto rank = static_cast<std::uint64_t>(ranks[i]);
    if (rank >= total) throw NothingLive("rows were forgotten meanwhile");
    ranks[i] = gaps ? live[rank] : spans.row(rank);
  }
  std::vector<std::int64_t> moved = gather(ranks, n, all_, batch, nullptr, numbers_out);
  const Deadline deadline;
  std::vector<std::byte*> fields(batch.size());
  while (!moved.empty()) {
    const auto i = static_cast<std::uint64_t>(moved.back());
    for (std::uint64_t f = 0; f < fields.size(); ++f) fields[f] = batch[f] + i * fields_[f].row_bytes;
    if (gather(ranks + i, 1, all_, fields, nullptr, numbers_out == nullptr ? nullptr : numbers_out + i).empty()) {
      moved.pop_back();
      continue;
    }
    if (control_.size() == 0) throw NothingLive("rows were forgotten meanwhile");
    const auto row = static_cast<std::uint64_t>(ranks[i]);
    if (!control_.inside(row) || state_of(control_.word(row).load(std::memory_order_acquire)) == State::voided) {
      ranks[i] = another_live(ranks[i], ranks, n);  // nobody will write it: no use to wait
    }
    if (deadline.passed()) throw in_vain("row " + std::to_string(ranks[i]) + " moved at every try");
    std::this_thread::yield();
  }
}

// The next live row behind a given one, round and round, that is not among rows[0, n).
std::int64_t Store::another_live(std::int64_t gone, const std::int64_t* rows, std::uint64_t n) const {
  const std::vector<std::int64_t> live = live_rows();
  const auto start = static_cast<std::uint64_t>(std::lower_bound(live.begin(), live.end(), gone) - live.begin());
  for (std::uint64_t i = 0; i < live.size(); ++i) {
    const std::int64_t row = live[(start + i) % live.size()];
    if (std::find(rows, rows + n, row) == rows + n) return row;
  }
  throw NothingLive("rows were forgotten meanwhile");
}

void Store::numbers_of(const std::int64_t* rows, std::uint64_t n, std::int64_t* numbers_out) const {
  for (std::uint64_t i = 0; i < n; ++i) {
    numbers_out[i] = -1;
    if (static_cast<std::uint64_t>(rows[i]) >= control_.capacity()) continue;
    const std::uint64_t word = control_.word(static_cast<std::uint64_t>(rows[i])).load(std::memory_order_acquire);
    if (is_committed(word)) numbers_out[i] = static_cast<std::int64_t>(number_of(word));
  }
}

// Of every number below the counter its claim is there to be seen, if the write is not done.
std::uint64_t Store::first_unfinished() const {
  std::uint64_t first = control_.counters().next_ticket.load(std::memory_order_acquire);
  const Deadline deadline;
  for (std::uint64_t i = 0; i < control_.participants(); ++i) {
    for (const Claim& claim : control_.participant(i).claims) {
      std::uint64_t t0;
      while ((t0 = claim.t0.load(std::memory_order_acquire)) == kNoted) {  // for some instructions, or its owner is stopped
        if (deadline.passed()) throw in_vain("another writer has been about to write");
        look_after_others(Need::waiting);
        std::this_thread::yield();
      }
      if (t0 != 0) first = std::min(first, t0);
    }
  }
  return first;
}

std::uint64_t Store::changes(std::uint64_t since, std::vector<std::int64_t>& rows, std::vector<std::int64_t>& numbers) const {
  const std::uint64_t next = first_unfinished();
  std::vector<std::pair<std::int64_t, std::int64_t>> found;  // numbers and rows
  for (std::uint64_t row = 0; row < control_.capacity(); ++row) {
    const std::uint64_t word = control_.word(row).load(std::memory_order_acquire);
    if (!is_committed(word) || number_of(word) < since) continue;
    if (!control_.inside(row)) continue;  // just being forgotten
    found.emplace_back(static_cast<std::int64_t>(number_of(word)), static_cast<std::int64_t>(row));
  }
  std::sort(found.begin(), found.end());
  for (const auto& [number, row] : found) {
    numbers.push_back(number);
    rows.push_back(row);
  }
  return next;
}

// The live rows, in row order. If there are none because all are just being overwritten, waits for them, bounded.
std::vector<std::int64_t> Store::live_rows() const {
  const Deadline deadline;
  for (;;) {
    std::vector<std::int64_t> live;
    bool writing = false;
    for (std::uint64_t lane = 0; lane < control_.lanes(); ++lane) {
      const std::uint64_t start = lane * control_.lane_length(), end = start + control_.filled(lane);
      for (std::uint64_t row = start; row < end; ++row) {
        const std::uint64_t word = control_.word(row).load(std::memory_order_acquire);
        if (is_committed(word)) live.push_back(static_cast<std::int64_t>(row));
        writing |= state_of(word) == State::writing;
      }
    }
    if (!live.empty() || !writing || deadline.passed()) return live;
    look_after_others(Need::waiting);
    std::this_thread::yield();
  }
}

std::vector<std::int64_t> Store::holes() const {
  std::vector<std::int64_t> holes;
  for (std::uint64_t lane = 0; lane < control_.lanes(); ++lane) {
    const std::uint64_t start = lane * control_.lane_length(), end = start + control_.filled(lane);
    for (std::uint64_t row = start; row < end; ++row) {
      if (!is_committed(control_.word(row).load(std::memory_order_acquire))) {
        holes.push_back(static_cast<std::int64_t>(row));
      }
    }
  }
  return holes;
}

}  // namespace engram
