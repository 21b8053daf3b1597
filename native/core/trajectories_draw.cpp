// Choosing windows from a table of trajectories.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "check.h"
#include "permutation.h"
#include "trajectories.h"
#include "wait.h"
#include "window_places.h"

namespace engram {
namespace {

constexpr std::uint64_t kAttempts = 32;  // of a rejection, before all that is left is listed
constexpr std::uint64_t kRounds = 16;    // windows drawn again because a writer was in them

}  // namespace

void WindowSpec::validate() const {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 62;
  check(length > 0 && left < length && right < length, "overhangs below the length");
  check(dilation > 0 && dilation < kMost / length && period > 0 && period < kMost, "steps and windows that lie apart");
  check(burn_in < length && padding < length && (padding == 0 || whole), "steps before an anchor or a trajectory below the length");
  check((dilation == 1 && period == 1 && !whole) || (left == 0 && right == 0), "overhangs of plain windows");
}

// Chooses windows from the tracks as they are. Numbers i of the random sequence belong to window i; `round` counts how
// often it is chosen again.
class Trajectories::Chooser {
 public:
  Chooser(const Trajectories& table, const Views& views, const WindowSpec& spec, std::uint64_t key)
      : table_(table), views_(views), spec_(spec), random_(key) {
    strict_ = spec.strict && spec.left == 0 && spec.right == 0;
    plain_ = strict_ && spec.period == 1 && spec.padding == 0;
    counted_ = spec.by_anchor && plain_ && spec.unfinished == 0 && spec.extent() == table.window_;
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
    const bool rejecting = total_ > 0 && (strict_ || !spec_.by_anchor) && listed_.empty();
    for (std::uint64_t attempt = salt; rejecting && attempt < salt + 2 * kAttempts; attempt += 2) {
      const auto [v, k] = locate(random_.below(total_, i, attempt));
      if (spec_.by_anchor) {
        if (!window_over(*v, v->low + k, window)) continue;
        return true;
      }
      const std::uint64_t steps = table_.usable(*v, k, spec_), windows = windows_in(steps, spec_);
      if (windows == 0) continue;
      *window = window_in(v->track, v->first(k), steps, random_.below(windows, i, attempt + 1), spec_);
      return true;
    }
    return choose_listed(i, salt, window);
  }

 private:
  // Of all windows, a place finds each equally often: where it begins, or by one of as many places up to its last one.
  bool window_over(const View& v, std::uint64_t place, Window* window) const {
    const std::uint64_t run = v.find(place), n = table_.usable(v, run, spec_), extent = spec_.extent();
    if (n == 0) return false;
    const std::uint64_t first = v.first(run), at = place - first;
    std::uint64_t from = at;
    if (!plain_) {
      const std::uint64_t last = extent - 1 - spec_.ahead();  // place of the first window's last step
      const std::uint64_t finders = std::min(spec_.period, last + 1);
      from = at > last ? (at - last + spec_.period - 1) / spec_.period * spec_.period : 0;
      if (last + from - at >= finders) return false;
    }
    if (from + extent > n + spec_.ahead()) return false;
    *window = window_from(v.track, first, n, from, 0, spec_);
    return true;
  }

  struct Listed {
    const View* view;
    std::uint64_t run, steps, end;  // windows up to and with this one
  };

  // What a track counts: its anchors, its places, or its runs.
  std::uint64_t weight(const View& v) const {
    if (counted_) {
      const std::uint64_t last = v.count - 1;
      return v.run(last).anchors + counted_in(v, last) - lost(v);
    }
    return spec_.by_anchor ? v.next - v.low : v.count;
  }

  std::uint64_t counted_in(const View& v, std::uint64_t run) const {
    return v.dead(run) ? 0 : anchors_in(v.end(run) - v.start(run), spec_.extent());
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
    return {v.track, v.start(from) + (target - v.run(from).anchors), spec_.extent()};
  }

  // Exact, once rejection has found nothing: most trajectories are too short.
  bool choose_listed(std::uint64_t i, std::uint64_t salt, Window* window) {
    if (listed_.empty()) list();
    if (listed_.empty()) return false;
    const std::uint64_t attempt = salt + 2 * kAttempts;
    const Listed* found = nullptr;
    std::uint64_t k = 0;
    if (spec_.by_anchor) {
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
    *window = window_in(v.track, v.first(found->run), found->steps, k, spec_);
    return true;
  }

  void list() {
    let_go();
    std::uint64_t total = 0;
    for (const View& v : views_) {
      for (std::uint64_t run = 0; run < v.count; ++run) {
        const std::uint64_t steps = table_.usable(v, run, spec_), windows = windows_in(steps, spec_);
        if (windows > 0) listed_.push_back({&v, run, steps, total += windows});
      }
    }
  }

  const Trajectories& table_;
  const Views& views_;
  const WindowSpec& spec_;
  Random random_;
  bool strict_, plain_, counted_;
  std::vector<std::uint64_t> ends_;
  std::uint64_t total_ = 0;
  std::vector<Listed> listed_;
};

// Steps of a run that windows may hold, from the first live one on. (A mark that is just being written may be read torn: what is read
// of the window's rows says what holds.)
std::uint64_t Trajectories::usable(const View& v, std::uint64_t run, const WindowSpec& spec) const {
  const std::uint64_t steps = v.length(run);
  if (spec.unfinished == 0 || steps == 0) return steps;
  std::byte mark[sizeof(std::int64_t)];
  copy_from_shared(mark, spec.final.row(static_cast<std::uint64_t>(row(v.track, v.end(run) - 1))), sizeof mark);
  std::int64_t final = 0;
  std::memcpy(&final, mark, sizeof final);
  return final >= 0 ? steps : steps - std::min(steps, spec.unfinished);
}

std::int64_t Trajectories::number_at(std::int64_t row) const {
  const std::uint64_t word = control_.word(static_cast<std::uint64_t>(row)).load(std::memory_order_acquire);
  return is_committed(word) ? static_cast<std::int64_t>(number_of(word)) : -1;
}

// Rows and tickets of n steps of a lane that ends before `end`, from a row on. False: a writer is in one of them.
bool Trajectories::list_steps(std::int64_t row, std::uint64_t n, std::int64_t end, std::int64_t* rows, std::int64_t* numbers) const {
  const std::uint64_t here = std::min(n, static_cast<std::uint64_t>(end - row));
  std::int64_t least = 0;
  for (std::uint64_t i = 0; i < n; ++i) {
    rows[i] = i < here ? row : row - static_cast<std::int64_t>(control_.lane_length());
    ++row;
  }
  for (std::uint64_t i = 0; i < n; ++i) {
    numbers[i] = number_at(rows[i]);
    least = std::min(least, numbers[i]);
  }
  return least >= 0;
}

// Adds a window's rows and tickets; not one that a writer is in, unless it need not be whole: then its tickets are -1.
bool Trajectories::append(Drawn& drawn, const Window& window, const WindowSpec& spec, bool certain) const {
  if (!add_rows(drawn, window, spec, certain)) return false;
  drawn.windows.push_back(window);
  return true;
}

bool Trajectories::add_rows(Drawn& drawn, const Window& window, const WindowSpec& spec, bool certain) const {
  if (window.length == 0) return false;  // of a damaged table
  const std::size_t before = drawn.rows.size(), after = before + spec.rows(window);
  drawn.rows.resize(after);
  drawn.numbers.resize(after);
  if (list_rows(window, spec, drawn.rows.data() + before, drawn.numbers.data() + before) || !certain) return true;
  drawn.rows.resize(before);
  drawn.numbers.resize(before);
  return false;
}

// The rows of a window and their tickets; false, and all tickets are -1: a writer is in one of them, or has overwritten it.
bool Trajectories::list_rows(const Window& window, const WindowSpec& spec, std::int64_t* const all_rows, std::int64_t* const all_numbers) const {
  const Steps steps = spec.steps(window);
  const std::uint64_t places = spec.rows(window);
  std::int64_t *rows = all_rows, *numbers = all_numbers;
  std::int64_t *const end_of_rows = rows + places;
  const auto step = static_cast<std::int64_t>(width_), length = static_cast<std::int64_t>(control_.lane_length());
  const std::int64_t first = row(window.track, window.first), begin = static_cast<std::int64_t>(window.track / width_) * length, end = begin + length;
  std::int64_t at = first, last = first, number = -1;
  bool stands = true;
  if (width_ == 1 && spec.dilation == 1) {
    stands = list_steps(first, window.length, end, rows + steps.before, numbers + steps.before);
    std::fill_n(rows, steps.before, first);
    std::fill_n(numbers, steps.before, numbers[steps.before]);
    rows += steps.before + window.length;
    numbers += steps.before + window.length;
    last = rows[-1];
    number = numbers[-1];
  } else {
    std::uint64_t wanted = steps.before * spec.dilation - window.ahead;  // the next step's place
    for (std::uint64_t i = 0; i < window.length; ++i) {
      number = number_at(at);
      stands &= number >= 0;
      if (i == 0) {
        rows = std::fill_n(rows, steps.before, at);
        numbers = std::fill_n(numbers, steps.before, number);
      }
      if (i == wanted) {
        *rows++ = at;
        *numbers++ = number;
        wanted += spec.dilation;
      }
      last = at;
      at += step;
      if (at >= end) at -= length;
    }
  }
  // A writer that edits a boundary tells the table after that: until then only the rows know. (One that changes from now on
  // has another ticket when it is read.)
  stands = stands && !ends_on_the_way(first, window.length, begin, end);
  std::fill_n(numbers, end_of_rows - rows, number);
  std::fill(rows, end_of_rows, last);
  // Who overwrites a row moves the cursor first: where that is not beyond the window, these are the window's own tickets.
  const bool lost = live(window.track / width_).low > window.first;
  if (lost || !stands) std::fill_n(all_numbers, places, -1);
  return !lost && stands;
}

bool Trajectories::is_being_edited(const Window& window) const {
  for (std::uint64_t i = 0; i < window.length; ++i) {
    const auto r = static_cast<std::uint64_t>(row(window.track, window.first + i));
    if (engram::is_being_edited(control_.held_word(r))) return true;
  }
  return false;
}

Drawn Trajectories::newest(std::span<std::int64_t> taken, std::uint64_t n, const WindowSpec& spec) {
  spec.validate();
  check(taken.size() == tracks_, "a ticket number for each track");
  WindowSpec complete = spec;
  complete.strict = true;
  const auto guard = locked();
  settle();
  const auto number = [&](std::uint64_t track, std::uint64_t place) {
    const std::uint64_t word = control_.word(static_cast<std::uint64_t>(row(track, place))).load(std::memory_order_acquire);
    return is_committed(word) ? static_cast<std::int64_t>(number_of(word)) : -1;
  };
  std::vector<std::pair<std::int64_t, Window>> found;  // by the ticket number of the last step
  for (const View& v : views()) {
    for (std::uint64_t run = v.count; run-- > 0;) {
      const std::uint64_t steps = usable(v, run, spec);
      if (steps == 0) continue;
      if (number(v.track, v.end(run) - 1) <= taken[v.track]) break;
      const std::uint64_t windows = windows_in(steps, complete);
      if (windows == 0) continue;
      const Window window = window_in(v.track, v.first(run), steps, windows - 1, complete);
      if (number(v.track, window.first) > taken[v.track]) {
        found.emplace_back(number(v.track, window.first + window.length - 1), window);
      }
      break;
    }
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  Drawn drawn;
  for (const auto& [last, window] : found) {
    if (drawn.windows.size() == n) break;
    if (append(drawn, window, complete, true)) taken[window.track] = last;
  }
  return drawn;
}

// The oldest whole window of a track from the place `next` on, which is moved to where that window begins; where there is none, to where
// one will begin, or to a place before it. A trajectory that lost its first steps keeps the beginnings of its windows, and the next one
// begins with its own first step, however many are lost.
bool Trajectories::find_completed(const View& v, std::int64_t& next, const WindowSpec& spec, Window* window) const {
  const std::uint64_t length = spec.length;
  auto from = static_cast<std::uint64_t>(std::max<std::int64_t>(next, 0));
  if (from >= v.next) return false;
  std::uint64_t begin = from;
  bool found = false;
  for (std::uint64_t run = from > v.low ? v.find(from) : 0; !found; ++run) {
    from = std::max(from, v.start(run));
    begin = from < v.low ? from + (v.low - from + length - 1) / length * length : from;
    const std::uint64_t end = v.first(run) + usable(v, run, spec);
    found = !v.dead(run) && begin < end && end - begin >= length;
    if (!found && run + 1 == v.count) break;
  }
  next = static_cast<std::int64_t>(found ? begin : from);
  *window = {v.track, begin, length};
  return found;
}

Drawn Trajectories::completed(std::span<std::int64_t> next, std::uint64_t n, const WindowSpec& spec) {
  spec.validate();
  check(next.size() == tracks_ && spec.dilation == 1 && spec.ahead() == 0, "a place for each track, and windows of consecutive steps");
  const auto guard = locked();
  settle();
  struct Oldest {
    std::int64_t number;  // of its last step's ticket
    const View* view;
    Window window;
  };
  const auto later = [](const Oldest& a, const Oldest& b) {
    return std::pair(a.number, a.window.track) > std::pair(b.number, b.window.track);
  };
  const Views tracks = views();
  std::vector<Oldest> heap;  // the oldest of each track
  const auto find = [&](const View& v) {
    Window window{};
    if (!find_completed(v, next[v.track], spec, &window)) return;
    const std::int64_t number = number_at(row(v.track, window.first + window.length - 1));
    heap.push_back({number, &v, window});
    std::push_heap(heap.begin(), heap.end(), later);
  };
  for (const View& v : tracks) find(v);
  Drawn drawn;
  while (!heap.empty() && drawn.windows.size() < n) {
    std::pop_heap(heap.begin(), heap.end(), later);
    const Oldest oldest = heap.back();
    heap.pop_back();
    const Window& window = oldest.window;
    const bool whole = append(drawn, window, spec, true), there = live(window.track / width_).low <= window.first;
    // One that is being edited is read once that is over. One that a row is being written in comes later.
    if (!whole && there && !append(drawn, window, spec, !is_being_edited(window))) continue;
    next[window.track] = static_cast<std::int64_t>(window.first + window.length);
    find(*oldest.view);
  }
  return drawn;
}

// The place at which the first step of a track lies that was appended since the store was emptied.
std::uint64_t Trajectories::first_position(std::uint64_t track) const {
  return control_.lane(track / width_).base.load(std::memory_order_acquire) / width_ + steps_;
}

std::vector<std::int64_t> Trajectories::positions_of(std::span<std::int64_t> next, const WindowSpec& spec) {
  check(next.size() == tracks_, "a place for each track");
  const auto guard = locked();
  settle();
  Window unused{};
  for (const View& v : views()) find_completed(v, next[v.track], spec, &unused);
  std::vector<std::int64_t> positions;
  for (std::uint64_t track = 0; track < tracks_; ++track) {
    positions.push_back(next[track] - static_cast<std::int64_t>(first_position(track)));
  }
  return positions;
}

std::vector<std::int64_t> Trajectories::places_of(std::span<const std::int64_t> positions) {
  check(positions.size() == tracks_, "a position for each track");
  std::vector<std::int64_t> next;
  for (std::uint64_t track = 0; track < tracks_; ++track) {
    next.push_back(positions[track] + static_cast<std::int64_t>(first_position(track)));
  }
  return next;
}

Drawn Trajectories::draw(std::uint64_t key, std::uint64_t n, const WindowSpec& spec) {
  spec.validate();
  const auto guard = locked();
  settle();
  const Views tracks = views();
  Chooser chooser(*this, tracks, spec, key);
  Drawn drawn;
  drawn.windows.reserve(n);
  const std::uint64_t longest = std::min(spec.length, control_.lane_length());
  drawn.rows.reserve(n * longest);
  drawn.numbers.reserve(n * longest);
  for (std::uint64_t i = 0; i < n; ++i) {
    Window window{};
    for (std::uint64_t round = 0; round <= kRounds; ++round) {
      if (!chooser.choose(i, round, &window)) return {};
      if (append(drawn, window, spec, round < kRounds)) break;
    }
  }
  return drawn;
}

// Whether a row holds the write of that number, be it just edited or about to be written over.
bool Trajectories::still(std::int64_t row, std::int64_t number) const {
  const auto r = static_cast<std::uint64_t>(row);
  if (row < 0 || r >= control_.capacity() || !control_.inside(r)) return false;
  return static_cast<std::int64_t>(control_.held_write(r)) == number;
}

// Of each trajectory the row of its last step, and the number of its write.
std::vector<std::int64_t> Trajectories::ends_of(const Views& tracks, std::uint64_t version) const {
  std::vector<std::int64_t> ends;
  std::uint64_t looks = 0;
  for (const View& v : tracks) {
    for (std::uint64_t i = 0; i < v.count; ++i) {
      if (++looks % 1024 == 0) let_go();
      if (v.length(i) == 0) continue;
      const std::int64_t last = row(v.track, v.end(i) - 1);
      const auto r = static_cast<std::uint64_t>(last);
      const std::uint64_t number = control_.held_write(r);
      if (number == 0 || number >= version) continue;  // it is being written over
      ends.push_back(last);
      ends.push_back(static_cast<std::int64_t>(number));
    }
  }
  return ends;
}

std::uint64_t Trajectories::left(TrajectoryEpoch& epoch, bool shuffle, std::uint64_t most) const {
  if (epoch.visited >= epoch.count) return 0;
  const Permutation permutation(epoch.key, epoch.count);
  std::uint64_t found = 0;
  for (std::uint64_t at = epoch.visited; at < epoch.count && found < most; ++at) {
    const std::uint64_t k = shuffle ? permutation(at) : at;
    if (still(epoch.known[2 * k], epoch.known[2 * k + 1])) {
      ++found;
    } else if (found == 0) {
      epoch.visited = at + 1;
    }
  }
  return found;
}

Drawn Trajectories::draw_epoch(TrajectoryEpoch& epoch, std::uint64_t key, std::uint64_t n, const WindowSpec& spec, bool shuffle,
                              bool drop_last) {
  spec.validate();
  check(epoch.known.empty() || epoch.known.size() / 2 == epoch.count, "an epoch of as many trajectories as it counts");
  const auto guard = locked();
  const std::uint64_t version = control_.counters().next_ticket.load(std::memory_order_acquire), needed = drop_last ? n : 1;
  settle();
  const Views tracks = views();
  const auto list = [&] {
    epoch.own = std::make_shared<const std::vector<std::int64_t>>(ends_of(tracks, version));
    epoch.known = *epoch.own;
  };
  if (epoch.known.empty()) {  // of a state
    list();
    if (epoch.version != version || epoch.known.size() / 2 != epoch.count) epoch.visited = epoch.count = 0;
  }
  Drawn drawn;
  const Random random(key);
  for (bool begun = false; !begun;) {
    if (left(epoch, shuffle, needed) < needed) {
      list();
      epoch.key = key, epoch.version = version, epoch.visited = 0, epoch.count = epoch.known.size() / 2;
      begun = true;
    }
    if (epoch.count == 0 || (drop_last && epoch.count < n)) return drawn;
    const Permutation permutation(epoch.key, epoch.count);
    std::uint64_t taken = 0;
    for (; taken < n && epoch.visited < epoch.count; ++epoch.visited) {
      const std::uint64_t k = shuffle ? permutation(epoch.visited) : epoch.visited;
      const std::int64_t last = epoch.known[2 * k];
      if (!still(last, epoch.known[2 * k + 1])) continue;
      const auto r = static_cast<std::uint64_t>(last);
      View v = view(track_of(r));
      const std::uint64_t place = place_of(r, cursor(r / control_.lane_length()));
      if (v.count == 0 || place < v.low || place >= v.next) continue;
      const std::uint64_t run = v.find(place);
      if (v.dead(run)) continue;
      v.count = run + 1, v.next = place + 1;  // later steps are not in the epoch
      const std::uint64_t steps = usable(v, run, spec), windows = windows_in(steps, spec);
      for (std::uint64_t round = 0; windows > 0 && round <= kRounds; ++round) {
        const std::uint64_t chosen = random.below(windows, taken, round);
        if (append(drawn, window_in(v.track, v.first(run), steps, chosen, spec), spec, round < kRounds)) break;
      }
      ++taken;
    }
    if (taken > 0) break;
  }
  if (left(epoch, shuffle, needed) < needed) epoch.visited = epoch.count;
  return drawn;
}

bool Trajectories::choose_again(const Window& window, const WindowSpec& spec, Drawn& drawn) {
  const auto guard = locked();
  settle();
  const View v = view(window.track);
  const std::uint64_t end = window.first + window.length;
  if (window.first < v.low) return false;
  if (v.count > 0 && window.first < v.next) {  // else a writer is in a row before it
    const std::uint64_t run = v.find(window.first);
    if (v.dead(run) || std::min(end, v.next) > v.end(run)) return false;
  }
  return append(drawn, window, spec, false);
}

Window Trajectories::window_at(std::int64_t row, const WindowSpec& spec) const {
  const auto r = static_cast<std::uint64_t>(row);
  const View v = view(track_of(r));
  const std::uint64_t place = place_of(r, cursor(r / control_.lane_length()));
  Window window{v.track, place, 0};
  if (place < v.low || place >= v.next) return window;
  const std::uint64_t run = v.find(place);
  const std::uint64_t n = usable(v, run, spec), first = v.first(run), lead = spec.burn_in * spec.dilation, padded = n + spec.ahead();
  if (place >= first + n || place - first + spec.ahead() < lead) return window;
  const std::uint64_t from = place - first + spec.ahead() - lead;
  const bool complete = padded - from + spec.right >= spec.extent();
  const bool short_one = !spec.strict && padded < spec.extent() && from == 0;
  return from % spec.period == 0 && (complete || short_one) ? window_from(v.track, first, n, from, 0, spec) : window;
}

std::vector<std::uint64_t> Trajectories::window_lengths(const std::int64_t* rows, std::uint64_t n, const WindowSpec& spec) {
  const OwnRows own(rows, n, control_.capacity());
  const auto guard = locked();
  settle();
  std::vector<std::uint64_t> lengths(n);
  for (std::uint64_t i = 0; i < n; ++i) lengths[i] = window_at(rows[i], spec).length;
  return lengths;
}

Drawn Trajectories::windows_at(const std::int64_t* rows, std::uint64_t n, const WindowSpec& spec, std::uint64_t most) {
  const OwnRows own(rows, n, control_.capacity());
  const auto guard = locked();
  settle();
  Drawn drawn;
  for (std::uint64_t i = 0; i < n && drawn.windows.size() < most; ++i) {
    const Window window = window_at(rows[i], spec);
    if (window.length > 0) append(drawn, window, spec, false);
  }
  return drawn;
}

// Empty where the row's step is not known.
Window Trajectories::window_around(std::int64_t row, const WindowSpec& spec, bool shifted) const {
  const auto r = static_cast<std::uint64_t>(row);
  const View v = view(track_of(r));
  std::uint64_t place = place_of(r, cursor(r / control_.lane_length()));
  if (v.count == 0 || place < v.low || place >= v.next) return {v.track, place, 0};
  const std::uint64_t run = v.find(place), lead = spec.burn_in * spec.dilation, tail = spec.extent() - 1 - lead;
  if (v.dead(run)) return {v.track, place, 0};
  const std::uint64_t first = v.first(run), end = v.end(run);
  if (shifted && place + tail >= end) place -= std::min(place + tail - (end - 1), place - first);
  const std::uint64_t ahead = lead > place - first ? lead - (place - first) : 0, begin = place + ahead - lead;
  return {v.track, begin, std::min(end - begin, spec.extent() - ahead), ahead};
}

std::vector<Window> Trajectories::windows_around(const std::int64_t* rows, std::uint64_t n, const WindowSpec& spec, bool shifted,
                                                 std::int64_t* steps, std::int64_t* numbers) {
  spec.validate();
  check(spec.whole && spec.extent() <= steps_, "whole windows of no more steps than a lane has");
  const OwnRows own(rows, n, control_.capacity());
  const auto guard = locked();
  settle();
  std::vector<Window> windows(n);
  for (std::uint64_t i = 0; i < n; ++i) windows[i] = window_around(rows[i], spec, shifted);
  constexpr std::uint64_t kAhead = 8;  // windows between asking for one and looking at it
  for (std::uint64_t i = 0; i < n; ++i, steps += spec.length, numbers += spec.length) {
    if (i + kAhead < n) ask_for(windows[i + kAhead]);
    if (windows[i].length > 0) {
      list_rows(windows[i], spec, steps, numbers);
    } else {
      std::fill_n(steps, spec.length, rows[i]);
      std::fill_n(numbers, spec.length, -1);
    }
  }
  return windows;
}

// Prefetches what says whether a window stands.
void Trajectories::ask_for(const Window& window) const {
  constexpr std::uint64_t kMostRows = 64, kWordsOfLine = 8;
  const std::uint64_t n = std::min(window.length, kMostRows), step = width_ == 1 ? kWordsOfLine : 1;
  for (std::uint64_t i = 0; i < n; i += step) {
    __builtin_prefetch(&control_.word(static_cast<std::uint64_t>(row(window.track, window.first + i))));
  }
  if (n == 0) return;
  for (const Field& field : boundaries_.fields) {
    prefetch_row(field, row(window.track, window.first));
    prefetch_row(field, row(window.track, window.first + n - 1));
  }
}

Surroundings Trajectories::around(const std::int64_t* rows, std::uint64_t n, std::uint64_t before, std::uint64_t after,
                                  std::uint64_t most) {
  const OwnRows own(rows, n, control_.capacity());
  const auto guard = locked();
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
    append(drawn, {v.track, first, last - first + 1}, WindowSpec{1}, false);
    const bool over = last + 1 == end && end < v.next && !v.dead(run + 1);
    found.around.push_back({from, place - first, last - first + 1, over});
  }
  found.rows = std::move(drawn.rows);
  found.numbers = std::move(drawn.numbers);
  return found;
}

std::uint64_t Trajectories::windows(const WindowSpec& spec) {
  spec.validate();
  const auto guard = locked();
  settle();
  std::uint64_t total = 0;
  for (const View& v : views()) {
    for (std::uint64_t run = 0; run < v.count; ++run) total += windows_in(usable(v, run, spec), spec);
  }
  return total;
}

std::uint64_t Trajectories::choices(const WindowSpec& spec) {
  if (spec.by_anchor) return windows(spec);
  spec.validate();
  const auto guard = locked();
  settle();
  std::uint64_t total = 0;
  for (const View& v : views()) {
    for (std::uint64_t run = 0; run < v.count; ++run) total += windows_in(usable(v, run, spec), spec) > 0 ? 1 : 0;
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
  const auto guard = locked();
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
