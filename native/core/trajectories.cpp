#include "trajectories.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <utility>

#include "check.h"
#include "permutation.h"

namespace engram {
namespace {

constexpr std::uint64_t kAttempts = 32;  // of a rejection, before all that is left is listed
constexpr std::uint64_t kRounds = 16;    // windows drawn again because a writer was in them
constexpr std::uint64_t kMost = ~std::uint64_t{0};

// gcc's TSan does not model fences; its build orders each copied byte instead (gather.cpp).
inline void fence([[maybe_unused]] std::memory_order order) {
#ifndef ENGRAM_TSAN
  std::atomic_thread_fence(order);
#endif
}

// Anchors of windows of `length` steps in a run.
constexpr std::uint64_t anchors_in(std::uint64_t steps, std::uint64_t length) {
  return steps >= length ? steps - length + 1 : 0;
}

// Windows that a run of n > 0 steps gives: one per place where it may begin, overhangs included.
std::uint64_t windows_in(std::uint64_t n, const Shape& shape) {
  if (n == 0 || (shape.strict && n < shape.length)) return 0;
  const std::uint64_t room = n >= shape.length ? n - shape.length : 0;
  return room + 1 + shape.left + std::min(shape.right, n - 1 - room);
}

// The k-th of them, of a run that begins at `first`; only the steps that are really there.
Window window_in(std::uint64_t track, std::uint64_t first, std::uint64_t n, std::uint64_t k, const Shape& shape) {
  const std::uint64_t skipped = k > shape.left ? k - shape.left : 0, missing = k < shape.left ? shape.left - k : 0;
  return {track, first + skipped, std::min(shape.length - missing, n - skipped)};
}

}  // namespace

bool any_is(const std::byte* from, std::uint64_t bytes, std::uint64_t size, StepType type) {
  for (std::uint64_t i = 0; i + size <= bytes; i += size) {
    std::uint64_t value = 0;
    std::memcpy(&value, from + i, size);  // little-endian, as stores are
    if (value == static_cast<std::uint64_t>(type)) return true;
  }
  return false;
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
  check(!boundaries_.fields.empty() && (!boundaries_.by_id || boundaries_.fields.size() == 1),
        "one id field, or end fields");
  boundaries_.step_types.resize(boundaries_.fields.size());
  for (std::size_t i = 0; i < boundaries_.fields.size(); ++i) {
    const std::uint64_t size = boundaries_.step_types[i];
    check(size == 0 || (!boundaries_.by_id && size <= sizeof(std::uint64_t) && boundaries_.fields[i].row_bytes % size == 0),
          "step types that are integers");
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

// The base is read before the cursor, which whoever empties a lane moves after it.
Trajectories::Live Trajectories::live(std::uint64_t lane) const {
  const Lane& words = control_.lane(lane);
  const std::uint64_t base = words.base.load(std::memory_order_acquire);
  const std::uint64_t high = words.high.load(std::memory_order_acquire);
  const std::uint64_t cursor = std::max(words.cursor.load(std::memory_order_acquire), base), end = cursor / width_ + steps_;
  const bool by_number = high > cursor;  // rows ahead of the cursor: they belong to the lap before
  return {by_number ? end - steps_ : std::max(end - steps_, base / width_ + steps_), end};
}

// The newest place of a row before `end`.
std::uint64_t Trajectories::place_of(std::uint64_t row, std::uint64_t end) const {
  const std::uint64_t step = row % control_.lane_length() / width_, seam = end % steps_;
  return end - steps_ + (step >= seam ? step - seam : step + steps_ - seam);
}

std::uint64_t Trajectories::track_of(std::uint64_t row) const {
  return row / control_.lane_length() * width_ + row % width_;
}

std::uint64_t Trajectories::View::find(std::uint64_t place) const {
  std::uint64_t from = 0, to = count;  // start(from) <= place, and start(to) is behind it
  while (to - from > 1) {
    const std::uint64_t middle = from + (to - from) / 2;
    (start(middle) <= place ? from : to) = middle;
  }
  return from;
}

Trajectories::View Trajectories::view(std::uint64_t track) const {
  const TrackState& t = track_states_[track];
  const LaneState& lane = lanes_[track / width_];
  return {track, lane.low, lane.next, rings_ + track * steps_, t.head, t.count, t.dead, steps_};
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

Trajectories::Look Trajectories::look(std::uint64_t lane, std::uint64_t column, std::uint64_t place) const {
  const std::uint64_t in_lane = place % steps_ * width_ + column, row = lane * control_.lane_length() + in_lane;
  const std::uint64_t word = control_.word(row).load(std::memory_order_acquire);
  std::uint32_t lap = control_.lap(row).load(std::memory_order_acquire);
#ifdef ENGRAM_WITHOUT_LAPS  // the tests must fail then: make negative-controls
  lap = static_cast<std::uint32_t>(place / steps_);
#endif
  const bool moved = control_.word(row).load(std::memory_order_relaxed) != word;
  const State state = state_of(word);
  if (moved || state == State::writing) return Look::writing;
  if (state != State::unused && lap == static_cast<std::uint32_t>(place / steps_)) {
    return state == State::committed && in_lane < control_.filled(lane) ? Look::whole : Look::dead;
  }
  // The row holds nothing, or a step of another lap. Places before the base were never reserved: no writer will come.
  const std::uint64_t base = control_.lane(lane).base.load(std::memory_order_acquire) / width_ + steps_;
  return place >= base ? Look::reserved : Look::dead;
}

// Looks at a place in all columns. False: one of its rows is being written.
bool Trajectories::look_at(std::uint64_t lane, std::uint64_t place) {
  for (std::uint64_t column = 0; column < width_; ++column) {
    seen_[column] = look(lane, column, place);
    if (seen_[column] == Look::writing) return false;
  }
  return true;
}

bool Trajectories::same(const Field& field, std::int64_t a, std::int64_t b) const {
  std::byte left[64], right[64];
  const std::byte* from = field.data + static_cast<std::uint64_t>(a) * field.row_bytes;
  const std::byte* to = field.data + static_cast<std::uint64_t>(b) * field.row_bytes;
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

bool Trajectories::any(const Field& field, std::int64_t row) const {
  std::byte bytes[64];
  const std::byte* from = field.data + static_cast<std::uint64_t>(row) * field.row_bytes;
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

bool Trajectories::is(const Field& field, std::uint64_t size, std::int64_t row, StepType type) const {
  std::byte bytes[64];
  const std::byte* from = field.data + static_cast<std::uint64_t>(row) * field.row_bytes;
  for (std::uint64_t i = 0; i < field.row_bytes; i += sizeof bytes) {
    const std::uint64_t n = std::min<std::uint64_t>(sizeof bytes, field.row_bytes - i);
    copy_from_shared(bytes, from + i, n);
    if (any_is(bytes, n, size, type)) return true;
  }
  return false;
}

// Whether the bytes of a row and of the one after it say that a trajectory ends between them. A first step begins one also where
// the last step before it was lost.
bool Trajectories::ends(std::int64_t row, std::int64_t next) const {
  if (boundaries_.by_id) return !same(boundaries_.fields[0], row, next);
  for (std::size_t i = 0; i < boundaries_.fields.size(); ++i) {
    const Field& field = boundaries_.fields[i];
    const std::uint64_t size = boundaries_.step_types[i];
    if (size == 0 ? any(field, row) : is(field, size, row, StepType::last) || is(field, size, next, StepType::first)) {
      return true;
    }
  }
  return false;
}

// Whether a trajectory ends between the place and the one before it. Yes, too, where somebody is writing one of the two:
// he will come and compare.
bool Trajectories::boundary(std::uint64_t track, std::uint64_t place) const {
  const std::int64_t before = row(track, place - 1), after = row(track, place);
  const Word &first = control_.word(static_cast<std::uint64_t>(before)),
             &second = control_.word(static_cast<std::uint64_t>(after));
  const std::uint64_t a = first.load(std::memory_order_acquire), b = second.load(std::memory_order_acquire);
  const bool over = ends(before, after);
  fence(std::memory_order_acquire);
  const bool stood = is_committed(a) && is_committed(b) && first.load(std::memory_order_relaxed) == a &&
                     second.load(std::memory_order_relaxed) == b;
  return over || !stood;
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
  const Live now = refresh(lane);
  for (; s.next < now.end && steps > 0; --steps) {
    if (!look_at(lane, s.next)) return 0;
    const auto reserved = [&] { return std::find(seen_.begin(), seen_.end(), Look::reserved) != seen_.end(); };
    // Once it is abandoned, it is looked at again: it may have been written until then.
    if (reserved() && !(settle && abandoned(lane, s.next) && look_at(lane, s.next))) return 0;
    for (std::uint64_t column = 0; column < width_; ++column) {
      push(lane * width_ + column, s.next, seen_[column] != Look::whole);
    }
    ++s.next;
  }
  return now.end - s.next;
}

// Rows that are appended are found behind the last one that is known, whoever appends them. Of another process's writes by
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

void Trajectories::changed(const std::int64_t* rows, std::uint64_t n, bool compare, std::uint64_t scatters) {
  const std::lock_guard<std::mutex> guard(mutex_);
  scatters_ += scatters;
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

void Trajectories::rewritten(const std::int64_t* rows, std::uint64_t n, std::uint64_t) { changed(rows, n, true, n > 0); }

void Trajectories::edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t,
                          std::span<const std::uint64_t> which) {
  const auto& ours = boundaries_.which;
  changed(rows, n, std::any_of(which.begin(), which.end(), [&](std::uint64_t field) {
            return std::find(ours.begin(), ours.end(), field) != ours.end();
          }), n > 0);
}

void Trajectories::lost(const std::int64_t* rows, std::uint64_t n) { changed(rows, n, true, 0); }

void Trajectories::emptied() {
  const std::lock_guard<std::mutex> guard(mutex_);
  for (std::uint64_t lane = 0; lane < control_.lanes(); ++lane) refresh(lane);
}

std::uint64_t Trajectories::catch_up(std::uint64_t steps) {
  const std::lock_guard<std::mutex> guard(mutex_);
  std::uint64_t left = 0;
  for (std::uint64_t lane = 0; lane < control_.lanes(); ++lane) left += advance(lane, steps, true);
  return left;
}

void Trajectories::forget() {
  const std::lock_guard<std::mutex> guard(mutex_);
  forget_all();
}

void Trajectories::count(std::uint64_t window) {
  check(window > 0, "a window of at least one step");
  const std::lock_guard<std::mutex> guard(mutex_);
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
  new (&mutex_) std::mutex;  // held by a thread of the parent: nobody will unlock it, and the table is half changed
  forget();
}

// ---- choosing windows ----------------------------------------------------------------------------------------------

// Chooses windows from the tracks as they are. Numbers i of the random sequence belong to window i; `round` counts how
// often it is chosen again.
class Trajectories::Chooser {
 public:
  Chooser(const Views& views, const Shape& shape, std::uint64_t counted, std::uint64_t key)
      : views_(views), shape_(shape), random_(key) {
    plain_ = shape.strict && shape.left == 0 && shape.right == 0;
    counted_ = shape.by_anchor && plain_ && shape.length == counted;
    ends_.reserve(views.size());
    for (const View& v : views) ends_.push_back(total_ += weight(v));
  }

  /// False: there is none.
  bool choose(std::uint64_t i, std::uint64_t round, Window* window) {
    const std::uint64_t salt = round * (2 * kAttempts + 1);
    if (counted_) {
      if (total_ == 0) return false;
      const auto [v, k] = locate(random_.below(total_, i, salt));
      *window = counted_anchor(*v, k);
      return true;
    }
    const bool rejecting = total_ > 0 && (plain_ || !shape_.by_anchor) && listed_.empty();
    for (std::uint64_t attempt = salt; rejecting && attempt < salt + 2 * kAttempts; attempt += 2) {
      const auto [v, k] = locate(random_.below(total_, i, attempt));
      if (shape_.by_anchor) {
        const std::uint64_t place = v->low + k, run = v->find(place);
        if (v->dead(run) || place + shape_.length > v->end(run)) continue;
        *window = {v->track, place, shape_.length};
        return true;
      }
      const std::uint64_t windows = windows_in(v->length(k), shape_);
      if (windows == 0) continue;
      *window = window_in(v->track, v->first(k), v->length(k), random_.below(windows, i, attempt + 1), shape_);
      return true;
    }
    return choose_listed(i, salt, window);
  }

 private:
  struct Listed {
    const View* view;
    std::uint64_t run, end;  // windows up to and with this one
  };

  // What a track counts: its anchors, its places, or its runs.
  std::uint64_t weight(const View& v) const {
    if (counted_) {
      const std::uint64_t last = v.count - 1;
      return v.run(last).anchors + counted_in(v, last) - lost(v);
    }
    return shape_.by_anchor ? v.next - v.low : v.count;
  }

  std::uint64_t counted_in(const View& v, std::uint64_t run) const {
    return v.dead(run) ? 0 : anchors_in(v.end(run) - v.start(run), shape_.length);
  }

  // Anchors before the first that is left: the oldest run may have lost its first steps.
  std::uint64_t lost(const View& v) const {
    return v.run(0).anchors + std::min(v.first(0) - v.start(0), counted_in(v, 0));
  }

  std::pair<const View*, std::uint64_t> locate(std::uint64_t k) const {
    if (views_.size() == 1) return {views_.data(), k};
    const auto at = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), k) - ends_.begin());
    return {&views_[at], at == 0 ? k : k - ends_[at - 1]};
  }

  Window counted_anchor(const View& v, std::uint64_t k) const {
    const std::uint64_t target = lost(v) + k;
    std::uint64_t from = 0, to = v.count;
    while (to - from > 1) {
      const std::uint64_t middle = from + (to - from) / 2;
      (v.run(middle).anchors <= target ? from : to) = middle;
    }
    return {v.track, v.start(from) + (target - v.run(from).anchors), shape_.length};
  }

  // Exact, once rejection has found nothing: most trajectories are too short.
  bool choose_listed(std::uint64_t i, std::uint64_t salt, Window* window) {
    if (listed_.empty()) list();
    if (listed_.empty()) return false;
    const std::uint64_t attempt = salt + 2 * kAttempts;
    const Listed* found = nullptr;
    std::uint64_t k = 0;
    if (shape_.by_anchor) {
      const std::uint64_t target = random_.below(listed_.back().end, i, attempt);
      found = &*std::upper_bound(listed_.begin(), listed_.end(), target,
                                 [](std::uint64_t value, const Listed& l) { return value < l.end; });
      k = target - (found == listed_.data() ? 0 : (found - 1)->end);
    } else {
      found = &listed_[random_.below(listed_.size(), i, attempt)];
      const std::uint64_t windows = found->end - (found == listed_.data() ? 0 : (found - 1)->end);
      k = random_.below(windows, i, attempt - 1);
    }
    const View& v = *found->view;
    *window = window_in(v.track, v.first(found->run), v.length(found->run), k, shape_);
    return true;
  }

  void list() {
    std::uint64_t total = 0;
    for (const View& v : views_) {
      for (std::uint64_t run = 0; run < v.count; ++run) {
        const std::uint64_t windows = windows_in(v.length(run), shape_);
        if (windows > 0) listed_.push_back({&v, run, total += windows});
      }
    }
  }

  const Views& views_;
  const Shape& shape_;
  Random random_;
  bool plain_, counted_;
  std::vector<std::uint64_t> ends_;
  std::uint64_t total_ = 0;
  std::vector<Listed> listed_;
};

// Adds a window's rows and tickets; not one that a writer is in, unless it need not be whole: then its tickets are -1.
bool Trajectories::append(Drawn& drawn, const Window& window, bool whole) const {
  const std::size_t before = drawn.rows.size();
  drawn.rows.resize(before + window.length);
  drawn.numbers.resize(before + window.length);
  std::int64_t *rows = drawn.rows.data() + before, *numbers = drawn.numbers.data() + before;
  std::int64_t at = row(window.track, window.first);
  const std::uint64_t lane = window.track / width_;
  const auto step = static_cast<std::int64_t>(width_), length = static_cast<std::int64_t>(control_.lane_length());
  const std::int64_t end = (static_cast<std::int64_t>(lane) + 1) * length;
  bool stands = true;
  for (std::uint64_t i = 0; i < window.length; ++i, at += step) {
    if (at >= end) at -= length;
    const std::uint64_t word = control_.word(static_cast<std::uint64_t>(at)).load(std::memory_order_acquire);
    rows[i] = at;
    numbers[i] = is_committed(word) ? static_cast<std::int64_t>(number_of(word)) : -1;
    // Whoever edits a boundary tells the table after that: until then only the rows know. (One that changes from now on
    // has another ticket when it is read.)
    stands = stands && is_committed(word) && (i == 0 || !ends(rows[i - 1], at));
  }
  // Who overwrites a row moves the cursor first: where that is not beyond the window, these are the window's own tickets.
  const bool lost = live(lane).low > window.first;
  if (whole && (lost || !stands)) {
    drawn.rows.resize(before);
    drawn.numbers.resize(before);
    return false;
  }
  if (lost || !stands) std::fill(drawn.numbers.begin() + static_cast<std::ptrdiff_t>(before), drawn.numbers.end(), -1);
  drawn.windows.push_back(window);
  return true;
}

Drawn Trajectories::draw(std::uint64_t key, std::uint64_t n, const Shape& shape) {
  check(shape.length > 0 && shape.left < shape.length && shape.right < shape.length, "overhangs below the length");
  const std::lock_guard<std::mutex> guard(mutex_);
  settle();
  const Views tracks = views();
  Chooser chooser(tracks, shape, window_, key);
  Drawn drawn;
  drawn.windows.reserve(n);
  const std::uint64_t longest = std::min(shape.length, control_.lane_length());
  drawn.rows.reserve(n * longest);
  drawn.numbers.reserve(n * longest);
  for (std::uint64_t i = 0; i < n; ++i) {
    Window window{};
    for (std::uint64_t round = 0; round <= kRounds; ++round) {
      if (!chooser.choose(i, round, &window)) return {};
      if (append(drawn, window, round < kRounds)) break;
    }
  }
  return drawn;
}

Drawn Trajectories::draw_pass(Pass& pass, std::uint64_t key, std::uint64_t n, const Shape& shape, bool shuffle,
                              bool drop_last) {
  check(shape.length > 0 && shape.left < shape.length && shape.right < shape.length, "overhangs below the length");
  const std::lock_guard<std::mutex> guard(mutex_);
  const std::uint64_t version = control_.counters().next_ticket.load(std::memory_order_acquire);
  settle();
  const Views tracks = views();
  std::vector<std::uint64_t> ends;  // trajectories up to and with each track
  std::uint64_t count = 0;
  for (const View& v : tracks) ends.push_back(count += v.count - v.holes);
  const bool over = pass.visited >= pass.count || (drop_last && pass.count - pass.visited < n);
  if (pass.version != version || over || pass.count != count) pass = {key, version, 0, count};
  Drawn drawn;
  if (count == 0 || (drop_last && count < n)) return drawn;
  const Permutation permutation(pass.key, count);
  const Random random(key);
  const std::uint64_t taken = std::min(n, count - pass.visited);
  for (std::uint64_t i = 0; i < taken; ++i) {
    const std::uint64_t k = shuffle ? permutation(pass.visited + i) : pass.visited + i;
    const auto at = static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), k) - ends.begin());
    const View& v = tracks[at];
    std::uint64_t run = at == 0 ? k : k - ends[at - 1];
    if (v.holes > 0) {  // of the runs that are trajectories, the run-th
      std::uint64_t seen = 0, j = 0;
      for (;; ++j) {
        if (!v.dead(j) && seen++ == run) break;
      }
      run = j;
    }
    const std::uint64_t windows = windows_in(v.length(run), shape);
    for (std::uint64_t round = 0; windows > 0 && round <= kRounds; ++round) {
      const std::uint64_t chosen = random.below(windows, i, round);
      if (append(drawn, window_in(v.track, v.first(run), v.length(run), chosen, shape), round < kRounds)) break;
    }
  }
  pass.visited += taken;
  if (drop_last && count - pass.visited < n) pass.visited = count;
  return drawn;
}

Window Trajectories::window_at(std::int64_t row, const Shape& shape) const {
  const auto r = static_cast<std::uint64_t>(row);
  const View v = view(track_of(r));
  const std::uint64_t place = place_of(r, cursor(r / control_.lane_length()));
  Window window{v.track, place, 0};
  if (place < v.low || place >= v.next) return window;
  const std::uint64_t run = v.find(place);
  const std::uint64_t length = v.dead(run) ? 0 : std::min(shape.length, v.end(run) - place);
  const bool whole = length + shape.right >= shape.length;
  const bool short_one = !shape.strict && v.length(run) < shape.length && place + v.length(run) == v.end(run);
  if (whole || short_one) window.length = length;
  return window;
}

std::vector<std::uint64_t> Trajectories::window_lengths(const std::int64_t* rows, std::uint64_t n, const Shape& shape) {
  check_rows(rows, n, control_.capacity());
  const std::lock_guard<std::mutex> guard(mutex_);
  settle();
  std::vector<std::uint64_t> lengths(n);
  for (std::uint64_t i = 0; i < n; ++i) lengths[i] = window_at(rows[i], shape).length;
  return lengths;
}

Drawn Trajectories::windows_at(const std::int64_t* rows, std::uint64_t n, const Shape& shape, std::uint64_t most) {
  check_rows(rows, n, control_.capacity());
  const std::lock_guard<std::mutex> guard(mutex_);
  settle();
  Drawn drawn;
  for (std::uint64_t i = 0; i < n && drawn.windows.size() < most; ++i) {
    const Window window = window_at(rows[i], shape);
    if (window.length > 0) append(drawn, window, false);
  }
  return drawn;
}

Surroundings Trajectories::around(const std::int64_t* rows, std::uint64_t n, std::uint64_t before, std::uint64_t after,
                                  std::uint64_t most) {
  check_rows(rows, n, control_.capacity());
  const std::lock_guard<std::mutex> guard(mutex_);
  settle();
  Surroundings found;
  Drawn drawn;
  const std::uint64_t longest = std::min(before, steps_) + std::min(after, steps_) + 1;
  found.around.reserve(n);
  if (longest <= 64) {
    drawn.rows.reserve(n * longest);
    drawn.numbers.reserve(n * longest);
  }
  constexpr std::uint64_t kAhead = 8;  // rows between asking for one and looking at it
  for (std::uint64_t i = 0; i < n && (i == 0 || drawn.rows.size() < most); ++i) {
    if (i + kAhead < n) {
      __builtin_prefetch(&control_.word(static_cast<std::uint64_t>(rows[i + kAhead])));
      for (const Field& field : boundaries_.fields) prefetch_row(field, rows[i + kAhead]);
    }
    const auto r = static_cast<std::uint64_t>(rows[i]);
    const View v = view(track_of(r));
    const std::uint64_t place = place_of(r, cursor(r / control_.lane_length())), from = drawn.rows.size();
    const bool known = v.count > 0 && place >= v.low && place < v.next;
    const std::uint64_t run = known ? v.find(place) : 0;
    if (!known || v.dead(run)) {
      drawn.rows.push_back(rows[i]);
      drawn.numbers.push_back(-1);
      found.around.push_back({from, 0, 0, false});
      continue;
    }
    const std::uint64_t first = place - std::min(before, place - v.first(run)), end = v.end(run);
    const std::uint64_t last = place + std::min(after, end - 1 - place);
    append(drawn, {v.track, first, last - first + 1}, false);
    const bool over = last + 1 == end && end < v.next && !v.dead(run + 1);
    found.around.push_back({from, place - first, last - first + 1, over});
  }
  found.rows = std::move(drawn.rows);
  found.numbers = std::move(drawn.numbers);
  return found;
}

std::uint64_t Trajectories::anchors(std::uint64_t length) {
  check(length > 0, "a window of at least one step");
  const std::lock_guard<std::mutex> guard(mutex_);
  settle();
  std::uint64_t total = 0;
  for (const View& v : views()) {
    for (std::uint64_t run = 0; run < v.count; ++run) total += anchors_in(v.length(run), length);
  }
  return total;
}

Census Trajectories::census() {
  Census census;
  for (const Window& run : runs()) {
    ++census.trajectories;
    census.longest = std::max(census.longest, run.length);
  }
  return census;
}

std::vector<Window> Trajectories::runs() {
  const std::lock_guard<std::mutex> guard(mutex_);
  settle();
  std::vector<Window> all;
  for (const View& v : views()) {
    for (std::uint64_t run = 0; run < v.count; ++run) {
      if (!v.dead(run)) all.push_back({v.track, v.first(run), v.length(run)});
    }
  }
  return all;
}

}  // namespace engram
