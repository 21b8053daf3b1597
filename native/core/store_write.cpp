// Writing: reserve, mark, copy, commit, and tell the indexes.

#include "store.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <string>
#include <thread>
#include <utility>

#include "check.h"
#include "fence.h"
#include "store_indexes.h"
#include "wait.h"

namespace engram {
namespace {

constexpr std::uint64_t kChunkBytes = 256 * 1024;  // copied between two looks at the tickets
constexpr std::uint64_t kFileBytes = 4 << 20;      // and where they go to files: a page that a call writes in part is read first
constexpr std::uint64_t kOwnCall = 4096;           // bytes of a piece that is worth a call of its own
constexpr std::uint64_t kAhead = 8;                // rows between asking for one and writing it
constexpr std::uint64_t kScattered = 32;           // rows anywhere that are asked for, marked and written together

}  // namespace

// Of a write that waits in vain for a row what is written stays, and what was reserved and is not begun becomes void. One that fails
// at the disk is recovered as if its process had died.
template <class Write, class Settle, class Tell>
void Store::write_and_tell(ClaimGuard& claim, Write&& write, Settle&& settle, Tell&& tell) const {
  std::exception_ptr stalled;
  try {
    write();
  } catch (const DiskError&) {
    repair(claim.claim());
    void_gaps();
    throw;
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
  Word& word = control_.word(row);
  std::uint64_t seen = word.load(std::memory_order_acquire);
  while (number_of(seen) == number && (is_committed(seen) || state_of(seen) == State::voided)) {
    if (!word.compare_exchange_weak(seen, ticket(number, State::unused), std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    if (state_of(seen) == State::voided) control_.one_void_less();
    return;
  }
}

void Store::forget_outside(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0) const {
  std::uint64_t lane = control_.lanes(), filled = 0;
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto row = static_cast<std::uint64_t>(copied(rows[i]));
    if (row >= control_.capacity()) continue;  // someone has written into a caller's memory
    if (control_.lane_of(row) != lane) lane = control_.lane_of(row), filled = control_.filled(lane);
    if (row - lane * control_.lane_length() >= filled) forget_if_outside(row, t0 + i);
  }
}

// Whether a writer one lap ahead has or will have the place's row.
bool Store::overtaken([[maybe_unused]] const Place& place) const {
#ifdef ENGRAM_WITHOUT_LAP_CHECK  // the tests must fail then: make negative-controls
  return false;
#else
  return control_.lane(place.lane).cursor.load(std::memory_order_acquire) > place.position + control_.lane_length();
#endif
}

// Whether the row's step is of an earlier lap than the place. Not once the store was emptied: then the place counts no more.
bool Store::holds_earlier_lap(std::uint64_t row, const Place& place) const {
  return control_.lap(row).load(std::memory_order_acquire) < place.lap &&
         control_.lane(place.lane).base.load(std::memory_order_acquire) <= place.position;
}

// Tries to mark a row as being written by `number`. Lapped: a newer write has or will have the row. Busy: another writer
// is writing it. Over::live: a row that holds nothing any more counts as lapped too, as what is not replaced of it may be torn.
// A whole row that is written by number is its lane's newest step there, so that the newest number wins over an append too. An
// edit leaves the step and the number of its write what they are: it gives way to newer writes, whatever numbers the two have, and to
// no other edit. Then the row's number may fall. No row has the same number twice.
Store::Mark Store::try_mark(std::uint64_t row, std::uint64_t number, const Place* place, Over over) {
  if (over == Over::missing) [[unlikely]] return try_mark_missing(row, number, *place);
  Word& word = control_.word(row);
  const bool edit = over == Over::live || over == Over::part_of_live;
  std::uint64_t seen = word.load(std::memory_order_acquire);
  do {
    const bool gone = edit && !is_committed(seen) && state_of(seen) != State::writing;
    const bool held = edit && state_of(seen) == State::writing;  // perhaps by another edit, which has not said so yet
    if ((place != nullptr && overtaken(*place)) || gone ||
        (!held && control_.write_of(row, seen) > number && !(place != nullptr && holds_earlier_lap(row, *place)))) {
      control_.counters().lapped_rows.fetch_add(1, std::memory_order_relaxed);
      return Mark::lapped;
    }
    if (state_of(seen) == State::writing) return Mark::busy;
#ifndef ENGRAM_WITHOUT_CAS  // the tests must fail then: make negative-controls
  } while (!word.compare_exchange_weak(seen, ticket(number, State::writing) | (edit ? seen & kEdited : 0), std::memory_order_acq_rel,
                                       std::memory_order_acquire));
#else
  } while (word.store(ticket(number, State::writing), std::memory_order_release), false);
#endif
  if (edit) {
    control_.begin_edit(row, seen, number);
  } else if (place != nullptr) {
    control_.lap(row).store(place->lap, std::memory_order_release);
  } else {
    const std::uint32_t lap = control_.newest_lap(row, control_.end(control_.lane_of(row)));
    control_.lap(row).store(lap, std::memory_order_release);
  }
  if (state_of(seen) == State::voided) control_.one_void_less();
  return Mark::marked;
}

// The same where the place's step is not there yet, whatever numbers the row had. There: it is whole; once the store was emptied the
// place counts no more.
Store::Mark Store::try_mark_missing(std::uint64_t row, std::uint64_t number, const Place& place) {
  Word& word = control_.word(row);
  for (std::uint64_t seen = word.load(std::memory_order_acquire);;) {
    if (overtaken(place)) {
      control_.counters().lapped_rows.fetch_add(1, std::memory_order_relaxed);
      return Mark::lapped;
    }
    if (control_.lane(place.lane).base.load(std::memory_order_acquire) > place.position) return Mark::there;
    if (state_of(seen) == State::writing) return Mark::busy;
#ifndef ENGRAM_WITHOUT_ONCE  // the tests must fail then: make negative-controls
    if (is_committed(seen) && control_.lap(row).load(std::memory_order_acquire) >= place.lap) {
      const std::uint64_t before = std::exchange(seen, word.load(std::memory_order_acquire));
      if (seen == before) return Mark::there;
      continue;  // the lap may be that of a writer who has marked the row since
    }
#endif
    if (word.compare_exchange_weak(seen, ticket(number, State::writing), std::memory_order_acq_rel, std::memory_order_acquire)) {
      control_.lap(row).store(place.lap, std::memory_order_release);
      if (state_of(seen) == State::voided) control_.one_void_less();
      return Mark::marked;
    }
  }
}

// Marks a row, waiting for another writer of it; the caller must have nothing marked.
Store::Mark Store::mark(std::uint64_t row, std::uint64_t number, const Place* place, Over over) {
  Mark mark = try_mark(row, number, place, over);
  if (mark != Mark::busy) return mark;  // the common case asks for no time
  let_go();
  const Deadline deadline;
  for (;;) {
    mark = try_mark(row, number, place, over);
    if (mark != Mark::busy) return mark;
    if (deadline.passed()) throw in_vain("row " + std::to_string(row) + " has been in the hands of another writer");
    look_after_others(Need::waiting);
    std::this_thread::yield();
  }
}

void Store::commit(std::uint64_t row, std::uint64_t number, bool edit) {
  control_.word(row).store(ticket(number, State::committed) | (edit ? kEdited : 0), std::memory_order_release);
}

// The row's word, once no edit of it is under way. The caller must have nothing marked.
std::uint64_t Store::settled_word(std::uint64_t row) const {
  std::uint64_t seen = control_.held_word(row);
  if (!is_being_edited(seen)) return seen;
  let_go();
  for (const Deadline deadline; is_being_edited(seen); seen = control_.held_word(row)) {
    if (deadline.passed()) throw in_vain("row " + std::to_string(row) + " has been in the hands of another writer");
    look_after_others(Need::waiting);
    std::this_thread::yield();
  }
  return seen;
}

// Whether rows that are about to be written are to go to their files, and not through the mapping.
template <class RowOf>
bool Store::goes_to_files(std::span<const std::uint64_t> which, std::uint64_t n, RowOf&& row) const {
  const Field* field = longest_in_file(which);
  if (field == nullptr || !disk_->writes.is_cold(*field, n, row)) return false;
  disk_->open(files_of(which));
  return true;
}

// Writes n rows to the rows first … of a field, which the caller has marked: those at `from`, or, of rows that begin there, the ones
// that `pick` names. To its file they go by a call: through the mapping each page would be read from the disk first. Small pieces
// share a page with those before and after, which is read only once; they take the mapping, unless calls are asked for. Throws
// DiskError.
void Store::put(std::uint64_t f, std::uint64_t first, std::uint64_t n, const std::byte* from, const std::int64_t* pick,
                bool to_file) const {
  const Field& field = this->field(f);
  const std::uint64_t bytes = field.row_bytes;
  const bool direct = to_file && n > 0 && disk_->is_open(file_of(f)) && disk_->writes.way() == Residency::Way::direct;
  if (field.contiguous() && (direct || (to_file && n * bytes >= kOwnCall && disk_->is_open(f)))) {
    disk_->write(field, f, first, n, from, pick);
  } else if (direct) {
    for (std::uint64_t i = 0; i < n; ++i) {  // other writers may have what lies between: as rows of one byte
      const std::byte* const row = from + (pick == nullptr ? i : static_cast<std::uint64_t>(pick[i])) * bytes;
      disk_->write({group_.data, 1}, lead_, offset_of(f) + (first + i) * group_.stride, bytes, row, nullptr);
    }
  } else {
    scatter_run(field, first, n, from, pick);
  }
}

// What rows hold in a field that their writer leaves out, as it knows fewer.
void Store::put_fill(std::uint64_t f, std::uint64_t first, std::uint64_t n) const {
  const Table& table = this->table();
  const Field& field = table.fields[f];
  const std::vector<std::byte>& fill = table.fills[f];
  for (std::uint64_t row = first; row < first + n; ++row) copy_to_shared(field.row(row), fill.data(), fill.size());
}

// The same of rows anywhere, in the fields from `from` on.
void Store::fill_others(std::uint64_t from, const std::int64_t* rows, std::uint64_t n) const {
  for (std::uint64_t f = from; f < fields(); ++f) {
    for (std::uint64_t i = 0; i < n; ++i) put_fill(f, static_cast<std::uint64_t>(rows[i]), 1);
  }
}

// The same of whole rows: those of the columns from `begin` on, or the ones that `pick` names. What lies in one file is put together,
// and written by one call. Fields that the columns lack are filled.
void Store::put_whole(std::uint64_t first, std::uint64_t n, Columns columns, std::uint64_t begin, const std::int64_t* pick,
                      bool to_files) const {
  const bool together = to_files && group_.stride > 0 && disk_->is_open(lead_) &&
                        (n * group_.stride >= kOwnCall || disk_->writes.way() == Residency::Way::direct);
  std::vector<std::byte> rows(together ? n * group_.stride : 0);
  for (std::uint64_t f = 0; f < columns.size(); ++f) {
    const Field& field = this->field(f);
    const std::byte* from = columns[f] + (pick == nullptr ? begin * field.row_bytes : 0);
    if (together && !field.contiguous()) {
      scatter_run({rows.data() + offset_of(f), field.row_bytes, field.stride}, 0, n, from, pick);
    } else {
      put(f, first, n, from, pick, to_files);
    }
  }
  if (together) disk_->write(group_, lead_, first, n, rows.data(), nullptr);
  for (std::uint64_t f = columns.size(); f < fields(); ++f) put_fill(f, first, n);
}

// The rows at positions p0 … of a lane. `pick`, if not null, names for each of them its place in rows_out.
void Store::place_ring(std::uint64_t lane, std::uint64_t p0, std::uint64_t n, const std::int64_t* pick,
                       std::int64_t* rows_out) const {
  const std::uint64_t length = control_.lane_length(), start = lane * length;
  for (std::uint64_t i = 0; i < n; ++i) {
    rows_out[pick == nullptr ? i : static_cast<std::uint64_t>(pick[i])] = static_cast<std::int64_t>(start + (p0 + i) % length);
  }
}

// Writes row i and those behind it, `most` at most: `at` says where each goes, `copy` moves what has been marked. Whatever cannot
// be marked at once ends the chunk, so that nothing stays marked during a wait. Returns the first row that is left.
template <class At, class Copy>
std::uint64_t Store::write_chunk(std::uint64_t i, std::uint64_t most, Over over, At&& at, Copy&& copy) {
  std::uint64_t marked = 0;
  Mark last = Mark::marked;
  for (; marked < most; ++marked) {
    const Target to = at(i + marked);
    const Place* const place = to.in_ring ? &to.place : nullptr;
    last = try_mark(to.row, to.number, place, over);
    if (last == Mark::busy && marked == 0) last = mark(to.row, to.number, place, over);
    if (last != Mark::marked) break;
  }
  fence(std::memory_order_release);
  copy(marked);
  fence(std::memory_order_release);
  for (std::uint64_t j = 0; j < marked; ++j) {
    const Target to = at(i + j);
    commit(to.row, to.number, over == Over::live || over == Over::part_of_live);
  }
  return i + marked + (last == Mark::lapped || last == Mark::there ? 1 : 0);
}

// Writes n rows at positions p0 … of a lane, claimed already. `pick`, if not null, names for each of them its row of the
// columns, which is also its place among the ticket numbers. `written` counts them. Of rows with items all are written, also those that
// this very batch overwrites: the ring of items has a place for each. Without a claim their items are the caller's already.
void Store::write_ring(std::uint64_t lane, std::uint64_t p0, std::uint64_t n, std::uint64_t t0, Columns columns, const std::int64_t* pick,
                       Over over, std::uint64_t* written, RaggedWrite* items, const Claim* claim) {
  const std::uint64_t length = control_.lane_length(), start = lane * length;
  const auto source = [pick](std::uint64_t i) { return pick == nullptr ? i : static_cast<std::uint64_t>(pick[i]); };
  const bool to_files = goes_to_files(all(), n, [&](std::uint64_t i) { return static_cast<std::int64_t>(start + (p0 + i) % length); });
  const std::uint64_t most = to_files ? kFileBytes : kChunkBytes;
  const std::uint64_t chunk = std::max<std::uint64_t>(1, most / std::max<std::uint64_t>(1, row_bytes()));
  const bool in_ring = items != nullptr && !ragged_->slots();
  std::uint64_t i = n > length && !in_ring ? n - length : 0;  // rows that this very batch would overwrite are not written
  if (over == Over::missing) {
    const std::uint64_t end = control_.end(lane), lapped = end - std::min(end, p0 + length);
    i = std::max(i, std::min(n, lapped));
  }
  while (i < n) {
    const std::uint64_t begin = i, first = start + (p0 + i) % length;
    std::uint64_t space = std::min({chunk, n - i, start + length - first});  // up to the end of the ring
    if (items != nullptr) {
      space = items->chunk(i, space, pick, most);
      if (in_ring && claim != nullptr) make_room(*items, lane, source(i + space - 1), p0 + i, *claim);  // before anything is marked
      for (std::uint64_t k = 0; k < space && !in_ring; ++k) take_slot(*items, first + k, source(i + k));
    }
    const std::uint32_t lap = control_.lap_of(p0 + i);
    const auto at = [&](std::uint64_t k) { return Target{first + k - begin, t0 + source(k), true, {lane, p0 + k, lap}}; };
    i = write_chunk(i, space, over, at, [&](std::uint64_t marked) {
      if (written != nullptr) *written += marked;
      put_whole(first, marked, columns, begin, pick == nullptr ? nullptr : pick + begin, to_files);
      if (items != nullptr) items->put(lane, begin, marked, pick);
    });
  }
}

std::uint64_t Store::append(std::uint64_t lane, std::uint64_t n, Columns columns, std::int64_t* rows_out, RaggedWrite* items) {
  check(lane < control_.lanes(), "a lane outside the store");
  check_columns(columns.size());
  check_items(n, items);
  look_after_others();
  ClaimGuard claim(writer());
  admit(claim);
  AdmittedInsert admitted(control_, n);  // behind the claim: who counts rows in flight again waits for it
  // Cursor before counter: a writer one lap ahead that got the smaller number is seen through the cursor (try_mark).
  const std::uint64_t p0 = reserve(lane, n, nullptr, items, participant_);
  const std::uint64_t t0 = control_.counters().next_ticket.fetch_add(n, std::memory_order_acq_rel);
  claim.note(t0, n, static_cast<std::int64_t>(lane), p0);
  std::vector<std::int64_t> rows;
  if (rows_out == nullptr) rows_out = (rows.resize(n), rows.data());
  place_ring(lane, p0, n, nullptr, rows_out);
  std::vector<const std::byte*> with_spans;
  if (items != nullptr) {
    columns = with_spans = items->columns(columns);
    if (items->noted != nullptr) items->noted->store(t0, std::memory_order_release);
  }
  write_and_tell(
      claim,
      [&] { write_ring(lane, p0, n, t0, columns, nullptr, Over::anything, nullptr, items, &claim.claim()); },
      [&] {
        if (control_.lane(lane).base.load(std::memory_order_acquire) > p0) forget_outside(rows_out, n, t0);
      },
      [&](Index& index) { index.written(rows_out, n, t0); });
  admitted.written();
  return t0;
}

// Rows that others reserved are claimed by their numbers, not as those of a ring: only what this call wrote has them. And the
// indexes are told as of rows by number, since some may have passed these positions by when their first writer died.
std::uint64_t Store::append_once(std::uint64_t n, Columns columns, std::int64_t* rows_out, const std::function<Positions()>& reserve,
                                 RaggedWrite* items) {
  check_columns(columns.size());
  check_items(n, items);
  look_after_others();
  ClaimGuard claim(writer());
  admit(claim);
  const auto [lane, p0, again] = reserve();
  if (items != nullptr && ragged_->slots()) items->give_slots(control_.lane_length(), p0, n, nullptr);
  const std::uint64_t t0 = control_.counters().next_ticket.fetch_add(n, std::memory_order_acq_rel);
  claim.note(t0, n, again ? -1 : static_cast<std::int64_t>(lane), p0);
  std::vector<std::int64_t> rows;
  if (rows_out == nullptr) rows_out = (rows.resize(n), rows.data());
  place_ring(lane, p0, n, nullptr, rows_out);
  std::vector<const std::byte*> with_spans;
  if (items != nullptr) columns = with_spans = items->columns(columns);
  std::uint64_t written = 0, scatter = 0;
  write_and_tell(
      claim,
      [&] {
        if (items != nullptr && again && !ragged_->slots()) {
          write_again(lane, p0, n, t0, columns, &written, *items, claim.claim());
        } else {
          write_ring(lane, p0, n, t0, columns, nullptr, Over::missing, &written, items, &claim.claim());
        }
      },
      [&] {
        if (control_.lane(lane).base.load(std::memory_order_acquire) > p0) forget_outside(rows_out, n, t0);
        if (again && written > 0) scatter = control_.counters().scatters.fetch_add(1, std::memory_order_acq_rel) + 1;
        control_.counters().write_count.fetch_add(written, std::memory_order_seq_cst);
      },
      [&](Index& index) {
        if (!again) {
          index.written(rows_out, n, t0);
        } else if (written > 0) {
          index.rewritten(rows_out, n, t0, scatter);
        }
      });
  if (written > 0 && limits().on()) limits().inserted();
  return written;
}

std::uint64_t Store::append_at(std::uint64_t lane, std::uint64_t position, std::uint64_t n, Columns columns, std::int64_t* rows_out) {
  check(lane < control_.lanes(), "a lane outside the store");
  constexpr std::uint64_t kMost = std::uint64_t{1} << 56;
  check(position < kMost && n < kMost, "positions below 2^56");
  return append_once(n, columns, rows_out, [&] {
    const auto missing = [&](std::uint64_t cursor) {
      return position <= cursor && cursor - position < n ? position + n - cursor : std::uint64_t{0};
    };
    const std::uint64_t admitted = limits().on() ? missing(control_.end(lane)) : 0;
    limits().admit_insert(admitted);
    const auto [cursor, granted] = control_.reserve_at(lane, position, n);
    const std::uint64_t reserved = granted ? missing(cursor) : 0;
    if (admitted > reserved) limits().give_back(Limits::kInsert, admitted - reserved);  // the same request came first
    if (!granted) throw OutOfOrder(cursor);
    return Positions{lane, position, cursor != position};
  });
}

std::uint64_t Store::append_by_lane(const std::int64_t* lane_of, std::uint64_t n, Columns columns,
                                    std::int64_t* rows_out, RaggedWrite* items) {
  check_columns(columns.size());
  check_items(n, items);
  const Own own(lane_of, n);
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
  ClaimGuard claim(writer());
  admit(claim);
  AdmittedInsert admitted(control_, n);
  for (Run& run : runs) run.p0 = reserve(run.lane, run.end - run.begin, order.data() + run.begin, items, participant_);
  const std::uint64_t t0 = control_.counters().next_ticket.fetch_add(n, std::memory_order_acq_rel);
  claim.note(t0, n, -1, 0);
  std::vector<std::int64_t> rows;
  if (rows_out == nullptr) rows_out = (rows.resize(n), rows.data());
  for (const Run& run : runs) place_ring(run.lane, run.p0, run.end - run.begin, order.data() + run.begin, rows_out);
  std::vector<const std::byte*> with_spans;
  if (items != nullptr) columns = with_spans = items->columns(columns);
  write_and_tell(
      claim,
      [&] {
        for (const Run& run : runs) {
          write_ring(run.lane, run.p0, run.end - run.begin, t0, columns, order.data() + run.begin, Over::anything, nullptr, items,
                     &claim.claim());
        }
      },
      [&] {
        bool emptied = false;
        for (const Run& run : runs) emptied |= control_.lane(run.lane).base.load(std::memory_order_acquire) > run.p0;
        if (emptied) forget_outside(rows_out, n, t0);
      },
      [&](Index& index) { index.written(rows_out, n, t0); });
  admitted.written();
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
    const std::uint64_t lane = control_.lane_of(row), covered = row - lane * length + 1;
    const std::uint64_t filled = control_.filled(lane);
    if (covered <= filled) continue;
    if (covered > filled + 1 && number == 0) {
      zeros.resize(row_bytes());
      number = control_.counters().next_ticket.fetch_add(1, std::memory_order_acq_rel);
      claim.note(number, 1, -1, 0);
    }
    const std::uint64_t before = control_.raise_high(lane, covered);
    if (before + 1 < covered && number == 0) {  // the store was emptied since: no zeros, as they have no number
      void_gaps();
      continue;
    }
    for (std::uint64_t gap = lane * length + before; number != 0 && gap < row; ++gap) {
      if (mark(gap, number, nullptr) != Mark::marked) {
        lapped = true;
        continue;
      }
      fence(std::memory_order_release);
      for (std::uint64_t f = 0; f < fields(); ++f) {
        copy_to_shared(field(f).row(gap), zeros.data(), row_bytes(f));
        put_fill(f, gap, 1);
      }
      fence(std::memory_order_release);
      commit(gap, number, false);
      fence(std::memory_order_seq_cst);  // as in write_and_tell
      forget_if_outside(gap, number);
      limits().revived(1);  // in flight from now on, though nothing has admitted it
      const auto zeroed = static_cast<std::int64_t>(gap);
      tell_indexes([&](Index& index) { index.written(&zeroed, 1, number); });
    }
  }
  if (lapped) void_gaps();  // by a writer, or by a process that emptied the store: then no other one will do it
  if (number != 0) claim.forget_note();
}

// One that is being written is waited for; one outside the extent is just being forgotten.
void Store::check_live(const std::int64_t* rows, std::uint64_t n) const {
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto row = static_cast<std::uint64_t>(rows[i]);
    const State state = state_of(control_.word(row).load(std::memory_order_acquire));
    if ((state != State::committed && state != State::writing) || !control_.inside(row)) {
      throw std::out_of_range("row " + std::to_string(rows[i]) + " is not live");
    }
  }
}

void Store::check_scatter(std::uint64_t n, std::span<const std::uint64_t> which, Columns columns, bool grow, const RaggedWrite* items) const {
  check(columns.size() == which.size(), "another number of columns than fields named");
  for (const std::uint64_t f : which) check(f < fields(), "a field outside the store");
  check(!grow || (needed_ <= which.size() && which.size() <= fields()), "rows by number without all fields");
  if (!grow) return check_no_spans(which);
  check_items(n, items);
  check(items == nullptr || ragged_->slots(), "items in slots, where rows are written by number");
}

std::uint64_t Store::scatter(const std::int64_t* rows, std::uint64_t n, std::span<const std::uint64_t> which,
                             Columns columns, bool grow, const std::int64_t* pick, std::uint64_t of, const RaggedWrite* items) {
  check_scatter(pick == nullptr ? n : of, which, columns, grow, items);
  const bool whole = !which.empty() && which.size() == fields();  // of those here: others may lie elsewhere
  const Over over = grow ? Over::anything : whole ? Over::live : Over::part_of_live;
  const OwnRows own_rows(rows, n, control_.capacity()), own_pick(pick, n, of);
  if (n == 0) return control_.writable().counters().next_ticket.load(std::memory_order_acquire);
  const auto ask_for = [&](std::int64_t row) {
    __builtin_prefetch(&control_.word(static_cast<std::uint64_t>(row)), 1);
    __builtin_prefetch(&control_.lap(static_cast<std::uint64_t>(row)), 1);
    for (const std::uint64_t f : which) prefetch_row(field(f), row);
  };
  const std::uint64_t chunk = std::clamp<std::uint64_t>(kChunkBytes / std::max<std::uint64_t>(1, row_bytes()), 1, kScattered);
  for (std::uint64_t i = 0; i < std::min(n, chunk); ++i) ask_for(rows[i]);
  look_after_others();
  ClaimGuard claim(writer());
  admit(claim);
  AdmittedInsert admitted(control_, grow ? n : 0);
  if (grow) {
    try {
      grow_over(rows, n, claim);
    } catch (const Stalled&) {
      void_gaps();
      throw;
    }
  } else {
    check_live(rows, n);
  }
  const std::uint64_t t0 = control_.counters().next_ticket.fetch_add(n, std::memory_order_acq_rel);
  claim.note(t0, n, -1, 0);
  const bool to_files = goes_to_files(which, n, [rows](std::uint64_t i) { return rows[i]; });
  std::uint64_t scatter = 0;
  const auto write = [&] {
    const struct Counted {  // once they are written, also if some wait in vain
      Word& scatters;
      std::uint64_t& scatter;
      ~Counted() { scatter = scatters.fetch_add(1, std::memory_order_acq_rel) + 1; }
    } counted{control_.counters().scatters, scatter};
    const auto at = [&](std::uint64_t k) { return Target{static_cast<std::uint64_t>(rows[k]), t0 + k, false, {}}; };
    // A writer that dies amid edits of live rows loses one of them: the fields that it does not write are older.
    const std::uint64_t step = to_files || over == Over::part_of_live ? 1 : chunk;
    for (std::uint64_t i = 0; i < n;) {
      const std::uint64_t begin = i, most = std::min(step, n - i);
      for (std::uint64_t k = i + chunk; k < std::min(n, i + chunk + most); ++k) ask_for(rows[k]);
      const auto source = [pick](std::uint64_t k) { return pick == nullptr ? k : static_cast<std::uint64_t>(pick[k]); };
      for (std::uint64_t k = i; k < i + most && items != nullptr; ++k) take_slot(*items, static_cast<std::uint64_t>(rows[k]), source(k));
      i = write_chunk(i, most, over, at, [&](std::uint64_t marked) {
        for (std::uint64_t f = 0; f < which.size(); ++f) {
          if (items != nullptr && led_by(which[f]) != nullptr) continue;
          const Field& field = this->field(which[f]);
          const std::byte* from = columns[f] + (pick == nullptr ? begin * field.row_bytes : 0);
          const std::int64_t* const picked = pick == nullptr ? nullptr : pick + begin;
          to_files ? put(which[f], static_cast<std::uint64_t>(rows[begin]), marked, from, picked, true)  // one row
                   : scatter_rows(field, rows + begin, marked, from, picked);
        }
        for (std::uint64_t k = begin; k < begin + marked && items != nullptr; ++k) put_in_slot(*items, static_cast<std::uint64_t>(rows[k]), source(k));
        if (grow) fill_others(which.size(), rows + begin, marked);
      });
    }
  };
  write_and_tell(claim, write, [&] { forget_outside(rows, n, t0); }, [&](Index& index) {
    if (grow) {
      index.rewritten(rows, n, t0, scatter);
    } else {
      index.edited(rows, n, t0, which, scatter);
    }
  });
  if (grow) admitted.written();
  return t0;
}

// The look at a row's ticket and its mark are one step: a row that another one has written, or is writing, is left alone, and so
// nothing is waited for. `put` writes the i-th entry to its row, which is marked.
template <class Put>
Patched Store::patch_with(const std::int64_t* rows, std::uint64_t n, std::span<const std::uint64_t> which, const std::int64_t* expected,
                          std::int64_t* numbers_out, Same same, Put&& put) {
  std::fill_n(numbers_out, n, -1);
  if (n == 0) return {control_.writable().counters().next_ticket.load(std::memory_order_acquire), 0};
  look_after_others();
  ClaimGuard claim(writer());
  admit(claim);
  const std::uint64_t t0 = control_.counters().next_ticket.fetch_add(n, std::memory_order_acq_rel);
  claim.note(t0, n, -1, 0);
  std::vector<std::int64_t> written;  // rows, under the numbers t0 ...
  written.reserve(n);
  std::uint64_t scatter = 0;
  const auto write = [&] {
    for (std::uint64_t i = 0; i < n; ++i) {
      if (i + kAhead < n && rows[i + kAhead] >= 0) {
        __builtin_prefetch(&control_.word(static_cast<std::uint64_t>(rows[i + kAhead])), 1);
        for (const std::uint64_t f : which) prefetch_row(field(f), rows[i + kAhead]);
      }
      const auto row = static_cast<std::uint64_t>(rows[i]);
      if (rows[i] < 0 || !control_.inside(row)) continue;
      std::uint64_t seen = settled_word(row);
      if (!is_committed(seen)) continue;
      const std::uint64_t number = t0 + written.size(), write = control_.write_of(row, seen);
      const std::uint64_t holds = same == Same::write ? write : number_of(seen);
      if (expected[i] <= 0 || holds != static_cast<std::uint64_t>(expected[i]) || write >= t0) continue;
      if (!control_.word(row).compare_exchange_strong(seen, ticket(number, State::writing) | (seen & kEdited), std::memory_order_acq_rel)) {
        --i;  // another one edits it, or writes it: as it says then
        continue;
      }
      control_.begin_edit(row, seen, number);
      fence(std::memory_order_release);
      put(i, row);
      fence(std::memory_order_release);
      commit(row, number, true);
      written.push_back(rows[i]);
      numbers_out[i] = static_cast<std::int64_t>(write);
    }
    scatter = control_.counters().scatters.fetch_add(1, std::memory_order_acq_rel) + 1;
  };
  write_and_tell(claim, write, [&] { forget_outside(written.data(), written.size(), t0); }, [&](Index& index) {
    index.edited(written.data(), written.size(), t0, which, scatter);
  });
  const std::uint64_t patched = written.size();
  control_.counters().patches.fetch_add(patched, std::memory_order_relaxed);
  control_.counters().patches_dropped.fetch_add(n - patched, std::memory_order_relaxed);
  return {t0, patched};
}

Patched Store::patch(const std::int64_t* rows, std::uint64_t n, std::span<const std::uint64_t> which, Columns columns,
                     const std::int64_t* expected, std::int64_t* numbers_out, Same same) {
  check(columns.size() == which.size(), "another number of columns than fields named");
  for (const std::uint64_t f : which) check(f < fields(), "a field outside the store");
  check_no_spans(which);
  const OwnRowsOrNone own_rows(rows, n, control_.capacity());
  const bool to_files = goes_to_files(which, n, [rows](std::uint64_t i) { return std::max<std::int64_t>(rows[i], 0); });
  return patch_with(rows, n, which, expected, numbers_out, same, [&](std::uint64_t i, std::uint64_t row) {
    for (std::uint64_t f = 0; f < which.size(); ++f) put(which[f], row, 1, columns[f] + i * row_bytes(which[f]), nullptr, to_files);
  });
}

// A row that has another length is found before any is marked: while a row has its ticket, its span stays.
Patched Store::patch_items(std::uint64_t group, const std::int64_t* rows, std::uint64_t n, const RaggedSource& source,
                           const std::int64_t* expected, std::int64_t* numbers_out, Same same) {
  check(ragged_ != nullptr && group < ragged_->groups().size(), "a group of ragged fields outside the store");
  const RaggedGroup& to = ragged_->groups()[group];
  const OwnRowsOrNone own_rows(rows, n, control_.capacity());
  const RaggedItems items(to, n, source);
  std::vector<std::uint64_t> which;
  for (std::uint64_t f = 0; f < to.fields.size(); ++f) {
    if (items.values(f) != nullptr) which.push_back(to.fields[f].field);
  }
  for (std::uint64_t i = 0; i < n; ++i) {
    if (rows[i] < 0) continue;
    const auto row = static_cast<std::uint64_t>(rows[i]);
    const std::uint64_t word = control_.word(row).load(std::memory_order_acquire);
    const std::uint64_t holds = same == Same::write ? control_.write_of(row, word) : number_of(word);
    if (!is_committed(word) || holds != static_cast<std::uint64_t>(expected[i])) continue;
    if (const auto span = span_of(group, row, word)) check(span->length == items.length(i), "items of another length than the row has");
  }
  return patch_with(rows, n, which, expected, numbers_out, same, [&](std::uint64_t i, std::uint64_t row) {
    const std::uint64_t lane = control_.lane_of(row);
    const Span span = Span::at(field(to.leader).row(row));
    intact(span.length == items.length(i) && Ragged::fits(to, span), "the span of a row lies outside of its ring");
    items.put(*ragged_, lane, span, i);
  });
}

void Store::tickets_of_writes(const std::int64_t* rows, std::uint64_t n, const std::int64_t* expected, std::int64_t* numbers_out) const {
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto row = static_cast<std::uint64_t>(copied(rows[i])), write = static_cast<std::uint64_t>(copied(expected[i]));
    numbers_out[i] = -1;
    if (write == 0 || write >> 63 != 0 || row >= control_.capacity() || !control_.inside(row)) continue;
    const std::uint64_t word = settled_word(row);
    if (is_committed(word) && control_.write_of(row, word) == write) numbers_out[i] = static_cast<std::int64_t>(number_of(word));
  }
}

// If the process dies in here, the one that finds the claim finishes it: else some lanes would be empty, and indexes would know
// rows that cannot be drawn.
void Store::empty(bool keep_write_count) {
  ClaimGuard claim(writer());
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

}  // namespace engram
