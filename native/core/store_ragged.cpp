// Rows of any length: reserving and clearing the items of ragged fields, and reading them.

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <iterator>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "fence.h"
#include "pieces.h"
#include "pool.h"
#include "store.h"
#include "store_indexes.h"
#include "wait.h"

namespace engram {

void Store::use(std::unique_ptr<Ragged> ragged) {
  for (const RaggedGroup& group : ragged->groups()) {
    check(group.leader < fields() && row_bytes(group.leader) == Span::kBytes, "spans in a field of rows of 12 bytes");
    for (const ItemField& items : group.fields) check(items.field < fields() && items.item_bytes > 0, "items of a field of the store");
  }
  ragged_ = std::move(ragged);
}

const RaggedGroup* Store::led_by(std::uint64_t field) const {
  if (ragged_ == nullptr) return nullptr;
  const auto found = std::find_if(ragged_->groups().begin(), ragged_->groups().end(), [&](const RaggedGroup& it) { return it.leader == field; });
  return found == ragged_->groups().end() ? nullptr : &*found;
}

void Store::check_items(std::uint64_t n, const RaggedWrite* items) const {
  check((items != nullptr) == (ragged_ != nullptr), "rows with items, where a field is ragged, and without them elsewhere");
  check(items == nullptr || (&items->ragged() == ragged_.get() && items->rows() == n), "items of as many rows as are written");
}

void Store::check_no_spans(std::span<const std::uint64_t> which) const {
  if (ragged_ == nullptr) return;
  for (const RaggedGroup& group : ragged_->groups()) {
    for (const ItemField& items : group.fields) {
      check(std::find(which.begin(), which.end(), items.field) == which.end(), "the column of a ragged field, which no edit replaces");
    }
  }
}

// Of a lane, positions and items have one order. A death in here leaves items that no row has, and perhaps positions that no writer
// begins: the next sweep passes both by.
std::uint64_t Store::reserve(std::uint64_t lane, std::uint64_t n, const std::int64_t* pick, RaggedWrite* items,
                             const Participant* by) const {
  if (items == nullptr) return control_.reserve(lane, n, by);
  if (ragged_->slots()) {
    const std::uint64_t first = control_.reserve(lane, n, by);
    items->give_slots(control_.lane_length(), first, n, pick);
    return first;
  }
  const SharedLock lock(ragged_->page().mutex, [] {});
  items->reserve(lane, n, pick);
  return control_.reserve(lane, n, by);
}

// The span of a row, if it still has that word. None: it has another one by now.
std::optional<Span> Store::span_of(std::uint64_t group, std::uint64_t row, std::uint64_t word) const {
  const Span span = Span::at(field(ragged_->groups()[group].leader).row(row));
  fence(std::memory_order_acquire);
  if (control_.word(row).load(std::memory_order_relaxed) != word) return std::nullopt;
  return span;
}

// Whether a writer may be about to begin rows at positions [from, to) of a lane, other than the caller's claim.
bool Store::is_under_way(std::uint64_t lane, std::uint64_t from, std::uint64_t to, const Claim& own) const {
  for (std::uint64_t i = 0; i < control_.participants(); ++i) {
    for (const Claim& claim : control_.participant(i).claims) {
      const std::uint64_t t0 = claim.t0.load(std::memory_order_acquire);
      if (t0 == 0 || &claim == &own) continue;
      const std::int64_t of = claim.lane.load(std::memory_order_acquire);
      const std::uint64_t p0 = claim.p0.load(std::memory_order_acquire), n = claim.n.load(std::memory_order_acquire);
      if (t0 == kNoted || of == -1 || (static_cast<std::uint64_t>(of) == lane && p0 < to && from < p0 + n)) return true;
    }
  }
  return false;
}

// Makes a row void that loses its items, under the number that it has. False: it has another word by now.
bool Store::evict(std::uint64_t row, std::uint64_t seen) const {
  control_.one_void_more();
  const std::uint64_t gone = ticket(number_of(seen), State::voided);
  if (!control_.word(row).compare_exchange_strong(seen, gone, std::memory_order_acq_rel)) {
    control_.one_void_less();
    return false;
  }
  control_.became_void();
  fence(std::memory_order_seq_cst);  // as in write_and_tell
  forget_if_outside(row, number_of(gone));
  return true;
}

void Store::tell_evicted(const std::vector<std::int64_t>& rows) const {
  if (rows.empty()) return;
  ragged_->page().evicted.fetch_add(rows.size(), std::memory_order_relaxed);
  control_.counters().scatters.fetch_add(1, std::memory_order_acq_rel);  // tables of other processes hear of it by that
  fence(std::memory_order_seq_cst);
  tell_indexes([&](Index& index) { index.evicted(rows.data(), rows.size()); });
}

// Goes through the positions of a lane from its tail on, up to `position`, until no row has items below the offsets `below`. The mutex
// is held. False: a writer has, or is about to begin, a row whose items may be among them: to be tried again.
//
// A position's row holds its step, or that of a lap before or after. A later one has written over it. An earlier one stays where the
// writer of the position died before it began; then no writer replaces it, and it goes here.
bool Store::clear_items(const std::vector<std::uint64_t>& below, std::uint64_t lane, std::uint64_t position, const Claim& own,
                        std::vector<std::int64_t>& evicted) const {
  const std::uint64_t length = control_.lane_length(), start = lane * length, groups = below.size();
  Word& tail = ragged_->tail(lane);
  std::uint64_t at = tail.load(std::memory_order_relaxed);
  const auto move_to = [&](std::uint64_t next) { tail.store(at = next, std::memory_order_release); };
  // Rows that were emptied are no more, unless a writer is late.
  const std::uint64_t base = std::min(control_.lane(lane).base.load(std::memory_order_acquire), position);
  if (at < base) {
    if (is_under_way(lane, at, base, own)) return false;
    move_to(base);
  }
  std::vector<Span> spans(groups);
  while (at < position) {
    const std::uint64_t row = start + at % length, word = control_.word(row).load(std::memory_order_acquire);
    const std::uint32_t lap = control_.lap_of(at), held = control_.lap(row).load(std::memory_order_acquire);
#ifndef ENGRAM_WITHOUT_WAITS_FOR_ITEMS  // the tests must fail then: make negative-controls
    if (state_of(word) == State::writing) return false;
#endif
    if (is_committed(word)) {
      bool same = true;
      for (std::uint64_t g = 0; g < groups && same; ++g) {
        const auto span = span_of(g, row, word);
        same = span.has_value();
        if (same) spans[g] = *span;
      }
      if (!same) continue;
      if (held == lap) {
        bool needed = false;
        for (std::uint64_t g = 0; g < groups; ++g) needed |= spans[g].offset < below[g];
        if (!needed) break;
        if (!evict(row, word)) continue;
        evicted.push_back(static_cast<std::int64_t>(row));
        move_to(at + 1);
        continue;
      }
    }
    const bool later = static_cast<std::int32_t>(held - lap) > 0;
    if (!later && !(state_of(word) == State::voided && held == lap)) {
#ifndef ENGRAM_WITHOUT_WAITS_FOR_ITEMS  // the tests must fail then: make negative-controls
      if (is_under_way(lane, at, at + 1, own)) return false;
#endif
      if (control_.word(row).load(std::memory_order_acquire) != word) continue;  // it was begun, and that is over
      if (is_committed(word)) {
        if (!evict(row, word)) continue;
        evicted.push_back(static_cast<std::int64_t>(row));
      }
    }
    move_to(at + 1);
  }
  for (std::uint64_t g = 0; g < groups; ++g) {
    Word& floor = ragged_->floor(lane, g);
    if (floor.load(std::memory_order_relaxed) < below[g]) floor.store(below[g], std::memory_order_release);
  }
  return true;
}

// Of each group the offset below which no row may have items, before those of row `last` are copied.
std::vector<std::uint64_t> Store::floors_of(const RaggedWrite& items, std::uint64_t last) const {
  const auto& groups = ragged_->groups();
  std::vector<std::uint64_t> below(groups.size());
  for (std::uint64_t g = 0; g < groups.size(); ++g) {
    const Span span = items.span(g, last);
    const std::uint64_t end = span.offset + span.length;
    below[g] = end - std::min(end, groups[g].items);
  }
  return below;
}

// Before a writer copies items up to those of row `last`, the first of which has that position: no other row has, or is being given, the
// memory. Nothing is marked meanwhile, and the mutex is let go between two looks, so that others go on. Where rows go sooner than items
// the tail follows some laps behind, so that no sweep is long.
void Store::make_room(const RaggedWrite& items, std::uint64_t lane, std::uint64_t last, std::uint64_t position, const Claim& own) const {
  const std::vector<std::uint64_t> below = floors_of(items, last);
  bool is_clear = position <= ragged_->tail(lane).load(std::memory_order_acquire) + 2 * control_.lane_length();
  for (std::uint64_t g = 0; g < below.size(); ++g) is_clear &= below[g] <= ragged_->floor(lane, g).load(std::memory_order_acquire);
  if (is_clear) return;
  let_go();
  for (const Deadline deadline;;) {
    std::vector<std::int64_t> evicted;
    bool done = false;
    {
      const SharedLock lock(ragged_->page().mutex, [] {});
      done = clear_items(below, lane, position, own, evicted);
    }
    tell_evicted(evicted);
    if (done) return;
    if (deadline.passed()) throw in_vain("rows whose items are to be written over have been in the hands of other writers");
    look_after_others(Need::waiting);
    std::this_thread::yield();
  }
}

// Before a writer marks rows whose slots may lie in holes of files: the memory of all their items is there.
void Store::take_slot(const RaggedWrite& items, std::uint64_t row, std::uint64_t i) const {
  if (disk_ == nullptr) return;
  const std::uint64_t lane = control_.lane_of(row), slot = row % control_.lane_length();
  for (std::uint64_t g = 0; g < ragged_->groups().size(); ++g) {
    const RaggedGroup& group = ragged_->groups()[g];
    if (Ragged::take(group, lane, items.in_slot(g, slot, i))) continue;
    throw DiskError(ENOSPC, "ragged/" + std::to_string(group.leader) + ".values", "write of the items of row " + std::to_string(row));
  }
}

// Writes the spans and items of row i of a call to the slots of a row, which is marked.
void Store::put_in_slot(const RaggedWrite& items, std::uint64_t row, std::uint64_t i) const {
  for (std::uint64_t g = 0; g < ragged_->groups().size(); ++g) {
    const Span span = items.in_slot(g, row % control_.lane_length(), i);
    std::byte column[Span::kBytes];
    span.put(column);
    copy_to_shared(field(ragged_->groups()[g].leader).row(row), column, sizeof column);
    items.put(g, control_.lane_of(row), span, i);
  }
}

// Writes what is missing of rows that have positions and items since an earlier try, whose process may have died, or be slow. Sweeps
// may have gone by: rows whose items others have by now are lapped, and the tail goes back to the others, so that the next sweep finds
// them. All of it is under the mutex, as nothing else keeps sweeps away from positions that they have seen void.
void Store::write_again(std::uint64_t lane, std::uint64_t p0, std::uint64_t n, std::uint64_t t0, Columns columns, std::uint64_t* written,
                        RaggedWrite& items, const Claim& own) {
  if (n == 0) return;
  std::vector<std::int64_t> all(n);
  std::iota(all.begin(), all.end(), 0);
  const std::vector<std::uint64_t> below = floors_of(items, n - 1);
  const std::uint64_t length = control_.lane_length();
  let_go();
  for (const Deadline deadline;;) {
    std::vector<std::int64_t> evicted;
    bool done = false;
    {
      const SharedLock lock(ragged_->page().mutex, [] {});
      done = clear_items(below, lane, p0, own, evicted);
      if (done) {
        std::uint64_t begin = n > length ? n - length : 0;
        const std::uint64_t end = control_.end(lane);
        if (end > p0 + length) begin = std::max(begin, std::min(n, end - length - p0));
        for (std::uint64_t g = 0; g < below.size(); ++g) {
          const std::uint64_t floor = ragged_->floor(lane, g).load(std::memory_order_acquire);
          while (begin < n && items.span(g, begin).offset < floor) ++begin;
        }
        Word& tail = ragged_->tail(lane);
        if (begin < n && tail.load(std::memory_order_relaxed) > p0 + begin) tail.store(p0 + begin, std::memory_order_release);
        write_ring(lane, p0 + begin, n - begin, t0, columns, all.data() + begin, Over::missing, written, &items, nullptr);
      }
    }
    tell_evicted(evicted);
    if (done) return;
    if (deadline.passed()) throw in_vain("rows whose items are to be written over have been in the hands of other writers");
    look_after_others(Need::waiting);
    std::this_thread::yield();
  }
}

// While the claim is there, its repair asks whether the row is whole; once it is gone, the row was written.
std::uint64_t Store::seal(const OpenRows& open, std::uint64_t slot, std::uint64_t owner, std::uint64_t lane, Columns columns, std::int64_t* row,
                          RaggedWrite& items) {
  check(open.slot(slot).owner.load(std::memory_order_acquire) == owner, "an open row of another process");
  Word& noted = open.slot(slot).sealed_as;
  items.noted = &noted;
  *row = -1;
  try {
    const std::uint64_t number = append(lane, 1, columns, row, &items);
    open.free(slot);
    return number;
  } catch (...) {  // it may have been written, and an index be stalled
    const std::uint64_t number = noted.load(std::memory_order_acquire);
    const bool whole = number != 0 && *row >= 0 && is_committed_as(control_.word(static_cast<std::uint64_t>(*row)).load(std::memory_order_acquire), number);
    whole ? open.free(slot) : noted.store(0, std::memory_order_release);
    throw;
  }
}

std::uint64_t Store::seal(const OpenRows& open, const SlotLayout& layout, std::uint64_t slot, std::uint64_t owner, std::uint64_t times,
                          std::uint64_t lane, std::span<const SlotValue> values, std::span<const SlotItems> items, std::int64_t* row) {
  check(ragged_ != nullptr && layout.fields() == fields() && layout.groups().size() == ragged_->groups().size(), "slots for rows of the store");
  check(open.is_held(slot, owner, times), "an open row of this process");
  const std::vector<std::uint32_t> before = open.lengths(slot, layout);
  open.append(slot, layout, values, items);
  try {
    std::vector<std::uint32_t> lengths = before;
    for (const SlotItems& more : items) lengths[more.group] += static_cast<std::uint32_t>(more.n);
    const std::int64_t start = 0;
    std::vector<const std::byte*> columns(fields());
    for (std::uint64_t f = 0; f < columns.size(); ++f) columns[f] = layout.is_ragged(f) ? nullptr : open.data(slot) + layout.places()[f];
    std::vector<RaggedSource> sources;
    for (std::uint64_t g = 0; g < lengths.size(); ++g) {
      RaggedSource& source = sources.emplace_back(RaggedSource{&lengths[g], &start, lengths[g], {}});
      for (const std::uint64_t f : layout.groups()[g].fields) source.values.push_back(open.data(slot) + layout.places()[f]);
    }
    RaggedWrite write(*ragged_, 1, sources);
    return seal(open, slot, owner, lane, columns, row, write);
  } catch (...) {
    if (open.is_held(slot, owner, times)) open.shorten(slot, layout, before);
    throw;
  }
}

void Store::free_sealed(OpenRows& open) const {
  for (std::uint64_t i = 0; i < open.slots(); ++i) {
    const OpenSlot& slot = open.slot(i);
    const std::uint64_t owner = slot.owner.load(std::memory_order_acquire), number = slot.sealed_as.load(std::memory_order_acquire);
    if (owner == 0 || number == 0 || OpenRows::is_alive(owner)) continue;
    if (number == OpenRows::kNoRow) {
      open.free_empty(i, owner);
      continue;
    }
    if (first_unfinished() <= number) reclaim();
    if (first_unfinished() > number) open.recovered(number, 1, [](std::uint64_t) { return true; });
  }
}

std::vector<std::int64_t> Store::gather_items(std::uint64_t group, const std::int64_t* rows, std::uint64_t n, const std::int64_t* expected,
                                              const std::byte* given, std::span<std::byte* const> outputs, const std::int64_t* places) const {
  check(ragged_ != nullptr && group < ragged_->groups().size(), "a group of ragged fields outside the store");
  const RaggedGroup& from = ragged_->groups()[group];
  check(outputs.size() == from.fields.size(), "an output, or null, for each field of the group");
  const OwnRows own_rows(rows, n, control_.capacity());
  const Own own_places(places, n);
  std::vector<Span> spans(n);
  std::uint64_t items = 0, item_bytes = 0;
  for (std::uint64_t i = 0; i < n; ++i) {
    spans[i] = Span::at(given + i * Span::kBytes);
    items += spans[i].length;
  }
  for (std::uint64_t f = 0; f < outputs.size(); ++f) item_bytes += outputs[f] == nullptr ? 0 : from.fields[f].item_bytes;
  constexpr std::uint64_t kRows = 16;  // between two looks at the tickets
  std::vector<std::uint16_t> moved((n + kRows - 1) / kRows);
  const auto has_moved = [&](std::uint64_t i, std::memory_order order) {
    const std::uint64_t word = control_.word(static_cast<std::uint64_t>(rows[i])).load(order);
    return !is_committed_as(word, static_cast<std::uint64_t>(expected[i]));
  };
  const auto read = [&](std::uint64_t block) {
    const std::uint64_t begin = block * kRows, end = std::min(n, begin + kRows);
    std::uint64_t bad = 0;
    Piece pieces[4 * kRows];
    std::size_t found = 0;
    for (std::uint64_t i = begin; i < end; ++i) {
      if (has_moved(i, std::memory_order_acquire) || !Ragged::fits(from, spans[i])) {
        bad |= std::uint64_t{1} << (i - begin);
        continue;
      }
      const std::uint64_t lane = control_.lane_of(static_cast<std::uint64_t>(rows[i]));
      for (std::uint64_t f = 0; f < outputs.size(); ++f) {
        const ItemField& field = from.fields[f];
        if (outputs[f] == nullptr) continue;
        pieces[found++] = {outputs[f] + static_cast<std::uint64_t>(places[i]) * field.item_bytes, Ragged::items_of(from, field, lane, spans[i]),
                           spans[i].length * field.item_bytes};
        if (found == std::size(pieces)) copy_from_shared({pieces, std::exchange(found, 0)});
      }
    }
    copy_from_shared({pieces, found});
#ifndef ENGRAM_WITHOUT_TICKET_CHECK  // the tests must fail then: make negative-controls
    fence(std::memory_order_acquire);
    for (std::uint64_t i = begin; i < end; ++i) bad |= std::uint64_t{has_moved(i, std::memory_order_relaxed)} << (i - begin);
#endif
    moved[block] = static_cast<std::uint16_t>(bad);
  };
  if (items * item_bytes >= kParallelBytes && num_threads() > 1) {
    parallel(moved.size(), [&](std::size_t block) { read(block); });
  } else {
    for (std::uint64_t block = 0; block < moved.size(); ++block) read(block);
  }
  std::vector<std::int64_t> positions;
  for (std::uint64_t i = 0; i < n; ++i) {
    if ((moved[i / kRows] >> i % kRows & 1) != 0) positions.push_back(static_cast<std::int64_t>(i));
  }
  look_after_others(positions.empty() ? Need::none : Need::waiting);
  return positions;
}

}  // namespace engram
