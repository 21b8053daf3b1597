#include "trajectories.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "check.h"
#include "fence.h"
#include "wait.h"

namespace engram {
namespace {

constexpr std::uint64_t kMost = ~std::uint64_t{0};
constexpr std::uint64_t kMostFlagBytes = 16;
constexpr std::uint64_t kBrief = 1024;  // steps that are looked at before another thread has been woken
constexpr int kLooks = 64;  // at a row that an edit may have marked and not said so yet

}  // namespace

bool any_is(const std::byte* from, std::uint64_t bytes, std::uint64_t size, StepType type) {
  for (std::uint64_t i = 0; i + size <= bytes; i += size) {
    std::uint64_t value = 0;
    std::memcpy(&value, from + i, size);  // little-endian, as stores are
    if (value == static_cast<std::uint64_t>(type)) return true;
  }
  return false;
}

bool all_set(const std::byte* from, std::uint64_t bytes, std::uint64_t size) {
  for (std::uint64_t i = 0; i + size <= bytes; i += size) {
    if (std::none_of(from + i, from + i + size, [](std::byte b) { return b != std::byte{0}; })) return false;
  }
  return bytes > 0;
}

namespace {

bool any(const Field& field, std::uint64_t row) {
  std::byte bytes[64];
  const std::byte* from = field.row(row);
  if (field.row_bytes == 1) {  // as flags are
    copy_from_shared(bytes, from, 1);
    return bytes[0] != std::byte{0};
  }
  for (std::uint64_t i = 0; i < field.row_bytes; i += sizeof bytes) {
    const std::uint64_t n = std::min<std::uint64_t>(sizeof bytes, field.row_bytes - i);
    copy_from_shared(bytes, from + i, n);
    if (std::any_of(bytes, bytes + n, [](std::byte b) { return b != std::byte{0}; })) return true;
  }
  return false;
}

bool all(const Field& field, std::uint64_t size, std::uint64_t row) {
  std::byte bytes[64];
  const std::byte* from = field.row(row);
  for (std::uint64_t i = 0; i < field.row_bytes; i += sizeof bytes) {
    const std::uint64_t n = std::min<std::uint64_t>(sizeof bytes, field.row_bytes - i);
    copy_from_shared(bytes, from + i, n);
    if (!all_set(bytes, n, size)) return false;
  }
  return field.row_bytes > 0;
}

bool is(const Field& field, std::uint64_t size, std::uint64_t row, StepType type) {
  std::byte bytes[64];
  const std::byte* from = field.row(row);
  for (std::uint64_t i = 0; i < field.row_bytes; i += sizeof bytes) {
    const std::uint64_t n = std::min<std::uint64_t>(sizeof bytes, field.row_bytes - i);
    copy_from_shared(bytes, from + i, n);
    if (any_is(bytes, n, size, type)) return true;
  }
  return false;
}

}  // namespace

void Boundaries::complete() {
  step_types.resize(fields.size());
  whole.resize(fields.size());
  for (const std::uint64_t size : whole) check(size <= kMostFlagBytes && std::has_single_bit(size | (size == 0)), "flags of a dtype");
  for (std::size_t i = 0; i < fields.size(); ++i) {
    const std::uint64_t size = step_types[i];
    check(size == 0 || (i >= ids && size <= sizeof(std::uint64_t) && fields[i].row_bytes % size == 0), "step types that are integers");
  }
}

bool Boundaries::ends_with(std::size_t i, std::uint64_t row) const {
  if (whole[i] != 0) return all(fields[i], whole[i], row);
  return step_types[i] == 0 ? any(fields[i], row) : is(fields[i], step_types[i], row, StepType::last);
}

bool Boundaries::begins_with(std::size_t i, std::uint64_t row) const {
  return step_types[i] != 0 && whole[i] == 0 && is(fields[i], step_types[i], row, StepType::first);
}

std::uint64_t Trajectories::bytes(std::uint64_t lanes, std::uint64_t lane_length, std::uint64_t width) {
  return sizeof(Header) + lanes * (sizeof(LaneState) + width * sizeof(TrackState) + lane_length * sizeof(Run));
}

Trajectories::Trajectories(Control control, Boundaries boundaries, std::uint64_t width, std::uint64_t window,
                           std::span<std::byte> memory)
    : control_(control), boundaries_(std::move(boundaries)), width_(width), window_(window) {
  check(width > 0 && (width == 1 || control_.lanes() == 1) && control_.lane_length() % width == 0,
        "columns that do not divide the only lane");
  check(window > 0, "a window of at least one step");
  check(boundaries_.ids <= boundaries_.fields.size(), "id fields that are among the fields");
  boundaries_.complete();
  for (std::size_t i = 0; i < boundaries_.fields.size(); ++i) {
    const std::uint64_t size = boundaries_.step_types[i];
    const bool flag = i >= boundaries_.ids && size == 0 && boundaries_.whole[i] == 0 && boundaries_.fields[i].row_bytes == 1;
    flag ? flags_.push_back(boundaries_.fields[i]) : others_.push_back(i);
  }
  check(memory.size() >= bytes(control_.lanes(), control_.lane_length(), width), "a block shorter than the table");
  check(reinterpret_cast<std::uintptr_t>(memory.data()) % alignof(Run) == 0, "a block that is not aligned to 8 bytes");
  steps_ = control_.lane_length() / width;
  seen_.resize(width);
  tracks_ = control_.lanes() * width;
  lanes_ = reinterpret_cast<LaneState*>(memory.data() + sizeof(Header));
  track_states_ = reinterpret_cast<TrackState*>(lanes_ + control_.lanes());
  rings_ = reinterpret_cast<Run*>(track_states_ + tracks_);
  scatters_ = control_.counters().scatters.load(std::memory_order_acquire);
}

// ---- places --------------------------------------------------------------------------------------------------------

// The base is read before the cursor: a writer that empties a lane moves the base first, then the cursor.
Trajectories::Live Trajectories::live(std::uint64_t lane) const {
  const Lane& words = control_.lane(lane);
  const std::uint64_t base = words.base.load(std::memory_order_acquire);
  const std::uint64_t high = words.high.load(std::memory_order_acquire);
  const std::uint64_t cursor = std::max(words.cursor.load(std::memory_order_acquire), base), end = cursor / width_ + steps_;
  const bool by_number = high > cursor;  // rows ahead of the cursor: they belong to the lap before
  return {by_number ? end - steps_ : std::max(end - steps_, base / width_ + steps_), end};
}

Trajectories::Views Trajectories::views() const {
  Views views;
  views.reserve(tracks_);
  for (std::uint64_t track = 0; track < tracks_; ++track) {
    if (track_states_[track].count > track_states_[track].dead) views.push_back(view(track));
  }
  return views;
}

// ---- what the rows say ---------------------------------------------------------------------------------------------

// An edit leaves a step where it is. One that may move a boundary is heard of once it is over, as any edit is.
Trajectories::Look Trajectories::look(std::uint64_t lane, std::uint64_t column, std::uint64_t place) const {
  const std::uint64_t in_lane = place % steps_ * width_ + column, row = lane * control_.lane_length() + in_lane;
  const std::uint64_t word = control_.word(row).load(std::memory_order_acquire);
  std::uint32_t lap = control_.lap(row).load(std::memory_order_acquire);
#ifdef ENGRAM_WITHOUT_LAPS  // the tests must fail then: make negative-controls
  lap = static_cast<std::uint32_t>(place / steps_);
#endif
  const bool moved = control_.word(row).load(std::memory_order_relaxed) != word;
  const State state = state_of(word);
  if (control_.left_behind(row, word)) return Look::dead;
  if (moved || (state == State::writing && !engram::is_being_edited(word))) return Look::writing;
  if (state != State::unused && lap == static_cast<std::uint32_t>(place / steps_)) {
    return Control::holds_write(word) && in_lane < control_.filled(lane) ? Look::whole : Look::dead;
  }
  // The row holds nothing, or a step of another lap. Places before the base were never reserved: no writer will come.
  const std::uint64_t base = control_.lane(lane).base.load(std::memory_order_acquire) / width_ + steps_;
  return place >= base ? Look::reserved : Look::dead;
}

// Looks at a place in all columns, and again at a row that is being written. False: it is at the last look, too.
bool Trajectories::look_at(std::uint64_t lane, std::uint64_t place, int looks) {
  for (std::uint64_t column = 0; column < width_; ++column) {
    for (int k = 1; (seen_[column] = look(lane, column, place)) == Look::writing; ++k) {
      if (k >= looks) return false;
      if (k < kLooks / 2) continue;
      let_go();
      std::this_thread::yield();
    }
  }
  return true;
}

bool Trajectories::same(const Field& field, std::int64_t a, std::int64_t b) const {
  std::byte left[64], right[64];
  const std::byte* from = field.row(static_cast<std::uint64_t>(a));
  const std::byte* to = field.row(static_cast<std::uint64_t>(b));
  if (field.row_bytes == sizeof(std::uint64_t)) {  // as ids are: a compare, and no call
    copy_from_shared(left, from, sizeof(std::uint64_t));
    copy_from_shared(right, to, sizeof(std::uint64_t));
    return std::memcmp(left, right, sizeof(std::uint64_t)) == 0;
  }
  for (std::uint64_t i = 0; i < field.row_bytes; i += sizeof left) {
    const std::uint64_t n = std::min<std::uint64_t>(sizeof left, field.row_bytes - i);
    copy_from_shared(left, from + i, n);
    copy_from_shared(right, to + i, n);
    if (std::memcmp(left, right, n) != 0) return false;
  }
  return true;
}

// Whether a trajectory ends between two rows. A first step begins one also where the last step before it was lost.
bool Trajectories::ends_in(std::size_t i, std::int64_t row, std::int64_t next) const {
  if (i < boundaries_.ids) return !same(boundaries_.fields[i], row, next);
  return boundaries_.ends_with(i, static_cast<std::uint64_t>(row)) || boundaries_.begins_with(i, static_cast<std::uint64_t>(next));
}

bool Trajectories::ends(std::int64_t row, std::int64_t next) const {
  std::byte set{0};
  for (const Field& flag : flags_) {
    std::byte one;
    copy_from_shared(&one, flag.row(static_cast<std::uint64_t>(row)), 1);
    set |= one;
  }
  return set != std::byte{0} || std::any_of(others_.begin(), others_.end(), [&](std::size_t i) { return ends_in(i, row, next); });
}

bool Trajectories::mixed() {
  if (boundaries_.ids != 0 || boundaries_.which.empty() || said_.load(std::memory_order_relaxed)) return false;
  const std::uint64_t asked = asked_.fetch_add(1, std::memory_order_relaxed) + 1;
  return std::has_single_bit(asked) && meets() && !said_.exchange(true, std::memory_order_relaxed);
}

bool Trajectories::meets() const {
  const std::uint64_t length = control_.lane_length();
  for (std::uint64_t lane = 0; width_ == 1 && lane < control_.lanes(); ++lane) {
    const std::uint64_t end = control_.end(lane), base = control_.lane(lane).base.load(std::memory_order_acquire);
    for (const Word& met : control_.lane(lane).met) {
      const std::uint64_t at = met.load(std::memory_order_relaxed);
      if (at <= base || at >= end || end - at >= length) continue;  // one of the two steps is not there
      const std::uint64_t before = lane * length + (at - 1) % length, behind = lane * length + at % length;
      const bool whole = is_committed(control_.word(before).load(std::memory_order_acquire)) &&
                         is_committed(control_.word(behind).load(std::memory_order_acquire));
      if (whole && !ends(static_cast<std::int64_t>(before), static_cast<std::int64_t>(behind))) return true;
    }
  }
  return false;
}

// Whether a trajectory ends between two of n rows that follow one another. Of ids and flags, which are short, many are looked at at once.
bool Trajectories::ends_within(std::int64_t row, std::uint64_t n) const {
  std::byte bytes[512];
  for (std::size_t i = 0; i < boundaries_.fields.size(); ++i) {
    const Field& field = boundaries_.fields[i];
    const std::uint64_t size = field.row_bytes;
    const bool short_ones = boundaries_.step_types[i] == 0 && boundaries_.whole[i] == 0 && size * 8 <= sizeof bytes;
    const std::uint64_t most = !short_ones ? 2 : n * size <= sizeof bytes ? n : 8;
    for (std::uint64_t from = 0; from + 1 < n; from += most - 1) {
      const std::int64_t first = row + static_cast<std::int64_t>(from);
      if (!short_ones) {
        if (ends_in(i, first, first + 1)) return true;
        continue;
      }
      const std::uint64_t count = std::min(most, n - from), before_last = (count - 1) * size;
      gather_run(field, static_cast<std::uint64_t>(first), count, bytes);
      if (i < boundaries_.ids ? std::memcmp(bytes, bytes + size, before_last) != 0
                              : std::any_of(bytes, bytes + before_last, [](std::byte b) { return b != std::byte{0}; })) {
        return true;
      }
    }
  }
  return false;
}

// The same of n steps of a track whose lane has the rows [begin, end), from the step of a row on.
bool Trajectories::ends_on_the_way(std::int64_t row, std::uint64_t n, std::int64_t begin, std::int64_t end) const {
  if (width_ == 1) {
    const std::uint64_t here = std::min(n, static_cast<std::uint64_t>(end - row));
    return ends_within(row, here) || (here < n && (ends(end - 1, begin) || ends_within(begin, n - here)));
  }
  for (const auto step = static_cast<std::int64_t>(width_); n > 1; --n) {
    const std::int64_t next = row + step < end ? row + step : row + step - (end - begin);
    if (ends(row, next)) return true;
    row = next;
  }
  return false;
}

// Whether a trajectory ends between the place and the one before it. Yes, too, while a writer is writing one of the two:
// that writer compares them afterwards. So does one that edits a boundary; other edits change nothing here.
bool Trajectories::boundary(std::uint64_t track, std::uint64_t place) const {
  const std::int64_t before = row(track, place - 1), after = row(track, place);
  const Word &first = control_.word(static_cast<std::uint64_t>(before)),
             &second = control_.word(static_cast<std::uint64_t>(after));
  for (int looks = kLooks; looks > 0; --looks) {
    const std::uint64_t a = first.load(std::memory_order_acquire), b = second.load(std::memory_order_acquire);
    const bool over = ends(before, after);
    fence(std::memory_order_acquire);
    const bool stood = Control::holds_write(a) && Control::holds_write(b) && first.load(std::memory_order_relaxed) == a &&
                       second.load(std::memory_order_relaxed) == b;
    if (over || stood) return over;
  }
  return true;
}

// Whether a reserved place will never be written: its writer died, or gave up.
bool Trajectories::abandoned(std::uint64_t lane, std::uint64_t place) {
  std::vector<Held>& claims = writers_.claims;
  std::erase_if(claims, [](Held& held) {
    const std::uint64_t now = held.claim->t0.load(std::memory_order_acquire);
    if (held.t0 == kNoted && now != 0) held.t0 = now;  // it may be the same write, which has its numbers by now
    return now != held.t0;
  });
  if (!claims.empty()) return false;
  if (!writers_.ends.empty() && place < writers_.ends[lane]) return true;
  writers_.ends.resize(control_.lanes());
  for (std::uint64_t i = 0; i < control_.lanes(); ++i) writers_.ends[i] = live(i).end;  // before the claims are read
  for (std::uint64_t i = 0; i < control_.participants(); ++i) {
    for (const Claim& claim : control_.participant(i).claims) {
      const std::uint64_t t0 = claim.t0.load(std::memory_order_acquire);
      if (t0 != 0) claims.push_back({&claim, t0});
    }
  }
  return claims.empty();
}

// ---- keeping the table ---------------------------------------------------------------------------------------------

std::unique_lock<std::mutex> Trajectories::locked() {
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    let_go();
    lock.lock();
  }
  return lock;
}

void Trajectories::forget_lane(std::uint64_t lane) {
  lanes_[lane].next = lanes_[lane].low = lanes_[lane].dirty = 0;
  std::fill_n(track_states_ + lane * width_, width_, TrackState{});
}

// Forgets what was overwritten.
Trajectories::Live Trajectories::refresh(std::uint64_t lane) {
  LaneState& s = lanes_[lane];
  const Live now = live(lane);
  if (now.low < s.low) forget_lane(lane);  // rows ahead of the cursor were written by number
  if (now.low == s.low) return now;
  s.low = now.low;
  for (std::uint64_t track = lane * width_; track < (lane + 1) * width_; ++track) {
    TrackState& t = track_states_[track];
    const Run* ring = rings_ + track * steps_;
    while (t.count > 0) {
      const std::uint64_t second = t.head + 1 < steps_ ? t.head + 1 : 0;
      const std::uint64_t end = t.count > 1 ? ring[second].start & ~kDead : s.next;
      if (end > s.low) break;
      t.dead -= (ring[t.head].start & kDead) != 0;
      t.head = second;
      --t.count;
    }
  }
  s.next = std::max(s.next, s.low);
  return now;
}

// Adds the step behind the last one of a track.
void Trajectories::push(std::uint64_t track, std::uint64_t place, bool dead) {
  TrackState& t = track_states_[track];
  Run* ring = rings_ + track * steps_;
  std::uint64_t anchors = 0;
  if (t.count > 0) {
    const std::uint64_t at = t.head + t.count - 1;
    const Run& last = ring[at < steps_ ? at : at - steps_];
    const bool was_dead = (last.start & kDead) != 0;
    if (dead ? was_dead : !was_dead && !boundary(track, place)) return;
    anchors = last.anchors + (was_dead ? 0 : anchors_in(place - last.start, window_));
  }
  const std::uint64_t at = t.head + t.count;
  ring[at < steps_ ? at : at - steps_] = {place | (dead ? kDead : 0), anchors};
  ++t.count;
  t.dead += dead;
}

// Adds up to `steps` steps of a lane. How many are left, 0 where the next one is being written. `settle`: a lane that is
// known to be wrong is scanned again, and rows that will never be written are passed over.
std::uint64_t Trajectories::advance(std::uint64_t lane, std::uint64_t steps, bool settle) {
  LaneState& s = lanes_[lane];
  if (s.dirty != 0) {
    if (!settle) return 0;
    forget_lane(lane);
  }
  const int looks = settle && s.next == 0 ? kLooks : 1;  // what was appended since the last look is mostly in the hands of its writer
  const Live now = refresh(lane);
  if (steps > kBrief && now.end > s.next + kBrief) let_go();
  for (; s.next < now.end && steps > 0; --steps) {
    if (!look_at(lane, s.next, looks)) return 0;
    const auto reserved = [&] { return std::find(seen_.begin(), seen_.end(), Look::reserved) != seen_.end(); };
    // Once it is abandoned, it is looked at again: it may have been written until then.
    if (reserved() && !(settle && abandoned(lane, s.next) && look_at(lane, s.next, 1))) return 0;
    for (std::uint64_t column = 0; column < width_; ++column) {
      push(lane * width_ + column, s.next, seen_[column] != Look::whole);
    }
    ++s.next;
  }
  return now.end - s.next;
}

// Rows that any process appends are found behind the last one that is known. Of another process's writes by
// number only the count is seen: then everything is looked at again.
void Trajectories::settle() {
  if (const std::uint64_t now = control_.counters().scatters.load(std::memory_order_acquire); now != scatters_) {
    scatters_ = now;
    for (std::uint64_t lane = 0; lane < control_.lanes(); ++lane) lanes_[lane].dirty = 1;
  }
  for (std::uint64_t lane = 0; lane < control_.lanes(); ++lane) advance(lane, kMost, true);
}

// Whether the table says of a place what its row says.
bool Trajectories::agrees(std::uint64_t track, std::uint64_t place) const {
  const Look seen = look(track / width_, track % width_, place);
  if (seen == Look::writing || seen == Look::reserved) return true;  // its writer comes later
  const View v = view(track);
  const std::uint64_t run = v.find(place);
  if (v.dead(run) != (seen == Look::dead)) return false;
  if (v.dead(run)) return true;
  const auto right = [&](std::uint64_t at, std::uint64_t holder) {  // about the border before `at`
    const bool begins = v.start(holder) == at;
    if (begins && holder > 0 && v.dead(holder - 1)) return true;
    return begins == boundary(track, at);
  };
  if (place > v.low && !right(place, run)) return false;
  if (place + 1 >= v.next) return true;
  const std::uint64_t following = v.end(run) == place + 1 ? run + 1 : run;
  return v.dead(following) || right(place + 1, following);
}

void Trajectories::changed(const std::int64_t* rows, std::uint64_t n, bool compare, std::uint64_t scatter) {
  const OwnRows own(rows, n, control_.capacity());
  const auto guard = locked();
  if (scatter == scatters_ + 1) scatters_ = scatter;  // else settle() has seen it already, or has one before it to see
  const std::uint64_t length = control_.lane_length();
  for (std::uint64_t i = 0; i < n;) {
    const std::uint64_t lane = static_cast<std::uint64_t>(rows[i]) / length, from = i;
    LaneState& s = lanes_[lane];
    const Live now = refresh(lane);
    for (; i < n && static_cast<std::uint64_t>(rows[i]) / length == lane; ++i) {
      if (!compare || s.dirty != 0) continue;
      const auto row = static_cast<std::uint64_t>(rows[i]);
      const std::uint64_t place = place_of(row, now.end);
      if (place >= s.low && place < s.next && !agrees(track_of(row), place)) s.dirty = 1;
    }
    advance(lane, 2 * (i - from) + 64, false);  // a scan that is under way goes on here, a little
  }
}

void Trajectories::written(const std::int64_t* rows, std::uint64_t n, std::uint64_t) { changed(rows, n, true, 0); }

void Trajectories::rewritten(const std::int64_t* rows, std::uint64_t n, std::uint64_t, std::uint64_t scatter) {
  changed(rows, n, true, scatter);
}

void Trajectories::edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t,
                          std::span<const std::uint64_t> which, std::uint64_t scatter) {
  const auto& ours = boundaries_.which;
  changed(rows, n, std::any_of(which.begin(), which.end(), [&](std::uint64_t field) {
            return std::find(ours.begin(), ours.end(), field) != ours.end();
          }), scatter);
}

void Trajectories::lost(const std::int64_t* rows, std::uint64_t n) { changed(rows, n, true, 0); }

void Trajectories::emptied() {
  const auto guard = locked();
  for (std::uint64_t lane = 0; lane < control_.lanes(); ++lane) refresh(lane);
}

std::uint64_t Trajectories::catch_up(std::uint64_t steps) {
  const auto guard = locked();
  std::uint64_t left = 0;
  for (std::uint64_t lane = 0; lane < control_.lanes(); ++lane) left += advance(lane, steps, true);
  return left;
}

void Trajectories::forget() {
  const auto guard = locked();
  forget_all();
}

void Trajectories::count(std::uint64_t window) {
  check(window > 0, "a window of at least one step");
  const auto guard = locked();
  if (window == window_) return;
  window_ = window;
  forget_all();
}

void Trajectories::forget_all() {
  for (std::uint64_t lane = 0; lane < control_.lanes(); ++lane) {
    forget_lane(lane);
    lanes_[lane] = LaneState{};
  }
}

void Trajectories::after_fork() {
  if (mutex_.try_lock()) {
    mutex_.unlock();
    return;
  }
  new (&mutex_) std::mutex;  // held by a thread of the parent, and the table is half changed
  forget();
}

}  // namespace engram
