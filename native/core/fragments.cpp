#include "fragments.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "check.h"
#include "fence.h"
#include "random.h"
#include "wait.h"
#include "window_places.h"

namespace engram {
namespace {

constexpr std::uint64_t kMostRows = (std::uint64_t{1} << 32) - 1;
constexpr std::uint64_t kAttempts = 64;  // of a rejection, before the runs that will do are listed

std::uint64_t words_for(std::uint64_t rows) { return RowSet::bytes(rows) / sizeof(std::uint64_t); }

std::byte* bytes_of(std::vector<std::uint64_t>& memory) { return reinterpret_cast<std::byte*>(memory.data()); }

void check_integer(const IntegerField& field) {
  const std::uint64_t size = field.field.row_bytes;
  check(size <= sizeof(std::int64_t) && std::has_single_bit(size), "fragments: expected fields of one integer per row");
}

std::int64_t integer_in(const std::byte* bytes, const IntegerField& field) {
  const std::uint64_t size = field.field.row_bytes, bits = 64 - 8 * size;
  std::uint64_t value = 0;
  std::memcpy(&value, bytes, size);  // little-endian, as stores are
  return field.is_signed ? static_cast<std::int64_t>(value << bits) >> bits : static_cast<std::int64_t>(value);
}

std::int64_t shifted(std::int64_t step, std::uint64_t by) {  // without overflow
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(step) + by);
}

}  // namespace

Fragments::Fragments(Control control, IntegerField trajectory, IntegerField step, std::uint64_t window, Boundaries ends)
    : control_(control),
      trajectory_(trajectory),
      step_(step),
      ends_(std::move(ends)),
      window_(window),
      nodes_((check(control.capacity() < kMostRows, "fragments: expected fewer than 2^32 - 1 rows"), control.capacity())),
      buckets_(std::bit_ceil(control.capacity())),
      extra_(control.capacity()),
      firsts_memory_(words_for(control.capacity())),
      long_memory_(words_for(control.capacity())),
      firsts_(bytes_of(firsts_memory_), control.capacity()),
      long_(bytes_of(long_memory_), control.capacity()),
      next_(control.lanes()),
      base_(control.lanes(), ~std::uint64_t{0}) {
  check_integer(trajectory);
  check_integer(step);
  check(window > 0, "a window of at least one step");
  check(ends_.ids == 0, "fragments: expected ends without ids");
  ends_.complete();
}

// ---- rows by trajectory and step -------------------------------------------------------------------------------------

std::size_t Fragments::bucket_of(std::int64_t trajectory, std::int64_t step) const {
  const std::uint64_t hash = mix(mix(static_cast<std::uint64_t>(trajectory)) + static_cast<std::uint64_t>(step));
  return hash & (buckets_.size() - 1);
}

Fragments::Id Fragments::find(std::int64_t trajectory, std::int64_t step) const {
  for (Id id = buckets_[bucket_of(trajectory, step)]; id != 0; id = node(id).next) {
    if (node(id).step == step && node(id).trajectory == trajectory && !extra_[id - 1]) return id;
  }
  return 0;
}

Fragments::Id Fragments::before(Id id) const {
  const Node& n = node(id);
  const Id found = n.begins || n.step == INT64_MIN ? 0 : find(n.trajectory, n.step - 1);
  return found != 0 && node(found).ends ? 0 : found;
}

Fragments::Id Fragments::after(Id id) const {
  const Node& n = node(id);
  const Id found = n.ends || n.step == INT64_MAX ? 0 : find(n.trajectory, n.step + 1);
  return found != 0 && node(found).begins ? 0 : found;
}

std::uint64_t Fragments::length(Id first) const {
  return static_cast<std::uint64_t>(node(node(first).other).step) - static_cast<std::uint64_t>(node(first).step) + 1;
}

void Fragments::add_run(Id first, Id last) {
  node(first).other = last;
  node(last).other = first;
  firsts_.insert(first - 1);
  if (length(first) >= window_) long_.insert(first - 1);
}

void Fragments::drop_run(Id first) {
  firsts_.erase(first - 1);
  long_.erase(first - 1);
}

// A step that is new: it lies between two runs, beside one, or alone.
void Fragments::join(Id id) {
  const Id left = before(id), right = after(id);
  const Id first = left == 0 ? id : node(left).other, last = right == 0 ? id : node(right).other;
  if (left != 0) drop_run(first);
  if (right != 0) drop_run(right);
  add_run(first, last);
}

// A step that is gone, and is in no bucket any more.
void Fragments::leave(Id id) {
  const Id left = before(id), right = after(id);
  Id first = left == 0 ? id : 0, last = right == 0 ? id : 0;
  if (first != 0) last = node(id).other;
  else if (last != 0) first = node(id).other;
  for (Id down = left, up = right; first == 0;) {  // it was inside: the nearer end knows the other one
    if (const Id next = before(down); next == 0) {
      first = down;
      last = node(down).other;
    } else if (const Id following = after(up); following == 0) {
      last = up;
      first = node(up).other;
    } else {
      down = next;
      up = following;
    }
  }
  drop_run(first);
  if (left != 0) add_run(first, left);
  if (right != 0) add_run(right, last);
}

void Fragments::insert(std::uint64_t row, const Node& read) {
  const Id id = static_cast<Id>(row + 1);
  const bool known = find(read.trajectory, read.step) != 0;
  Id& bucket = buckets_[bucket_of(read.trajectory, read.step)];
  node(id) = {read.trajectory, read.step, read.number, bucket, id, read.ends, read.begins};
  bucket = id;
  extra_[row] = known;
  extras_ += known;
  if (!known) join(id);
}

void Fragments::forget(std::uint64_t row) {
  const Id id = static_cast<Id>(row + 1);
  Node& n = node(id);
  if (n.number == 0) return;
  n.number = 0;
  Id* at = &buckets_[bucket_of(n.trajectory, n.step)];
  while (*at != id) at = &node(*at).next;
  *at = n.next;
  if (extra_[row]) {
    extra_[row] = false;
    --extras_;
    return;
  }
  leave(id);
  for (Id other = extras_ == 0 ? 0 : buckets_[bucket_of(n.trajectory, n.step)]; other != 0; other = node(other).next) {
    if (!extra_[other - 1] || node(other).step != n.step || node(other).trajectory != n.trajectory) continue;
    extra_[other - 1] = false;
    --extras_;
    return join(other);
  }
}

// A row that is being written is in no run: it is looked at when it is whole.
void Fragments::look_at(std::uint64_t row) {
  for (;;) {
    const std::uint64_t word = control_.word(row).load(std::memory_order_acquire);
    if (!is_committed(word)) return forget(row);
    const std::uint64_t number = number_of(word);
    if (nodes_[row].number == number) return;
    std::byte trajectory[sizeof(std::int64_t)], step[sizeof(std::int64_t)];
    copy_from_shared(trajectory, trajectory_.field.row(row), trajectory_.field.row_bytes);
    copy_from_shared(step, step_.field.row(row), step_.field.row_bytes);
    Node read{integer_in(trajectory, trajectory_), integer_in(step, step_), number, 0, 0, false, false};
    for (std::size_t i = 0; i < ends_.fields.size(); ++i) {
      read.ends |= ends_.ends_with(i, row);
      read.begins |= ends_.begins_with(i, row);
    }
    fence(std::memory_order_acquire);
    if (control_.word(row).load(std::memory_order_relaxed) != word) continue;
    Node& known = nodes_[row];
    if (known.number != 0 && known.trajectory == read.trajectory && known.step == read.step && known.ends == read.ends &&
        known.begins == read.begins) {  // another field was edited
      known.number = number;
      return;
    }
    forget(row);
    return insert(row, read);
  }
}

void Fragments::look_at_all() {
  for (std::uint64_t row = 0; row < nodes_.size(); ++row) look_at(row);
}

void Fragments::look_at_these(const std::int64_t* rows, std::uint64_t n, std::uint64_t scatter) {
  const OwnRows own(rows, n, nodes_.size());
  const auto guard = locked();
  if (scatter != 0 && scatter == scatters_ + 1) scatters_ = scatter;
  for (std::uint64_t i = 0; i < n; ++i) look_at(static_cast<std::uint64_t>(rows[i]));
}

// Whether a place that was not whole need not be looked at again.
bool Fragments::is_over(const Waiting& place) {
  const std::uint64_t length = control_.lane_length(), row = place.lane * length + place.position % length;
  look_at(row);
  const bool begun = control_.lap(row).load(std::memory_order_acquire) >= control_.lap_of(place.position);
  return control_.end(place.lane) > place.position + length ||
         (begun && state_of(control_.word(row).load(std::memory_order_acquire)) != State::writing);
}

void Fragments::look_for_new() {
  const std::uint64_t scatters = control_.counters().scatters.load(std::memory_order_acquire), length = control_.lane_length();
  bool all = std::exchange(scatters_, scatters) != scatters;
  for (std::uint64_t lane = 0; lane < control_.lanes(); ++lane) {
    const std::uint64_t base = control_.lane(lane).base.load(std::memory_order_acquire);
    all |= std::exchange(base_[lane], base) != base;
  }
  if (all) {
    let_go();
    look_at_all();
  }
  std::erase_if(waiting_, [this](const Waiting& place) { return is_over(place); });
  for (std::uint64_t lane = 0; lane < control_.lanes(); ++lane) {
    const std::uint64_t end = control_.end(lane), low = end > length ? end - length : 0;
    for (std::uint64_t p = std::max(next_[lane], low); p < end; ++p) {
      if (const Waiting place{lane, p}; !is_over(place)) waiting_.push_back(place);
    }
    next_[lane] = std::max(next_[lane], end);
  }
}

// ---- keeping the table -----------------------------------------------------------------------------------------------

std::unique_lock<std::mutex> Fragments::locked() {
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    let_go();
    lock.lock();
  }
  return lock;
}

void Fragments::catch_up() {
  const auto guard = locked();
  look_for_new();
}

void Fragments::count(std::uint64_t window) {
  check(window > 0, "a window of at least one step");
  const auto guard = locked();
  if (std::exchange(window_, window) == window) return;
  long_.assign([&](std::uint64_t row) { return firsts_.has(row) && length(static_cast<Id>(row + 1)) >= window; });
}

void Fragments::written(const std::int64_t* rows, std::uint64_t n, std::uint64_t) { look_at_these(rows, n, 0); }

void Fragments::rewritten(const std::int64_t* rows, std::uint64_t n, std::uint64_t, std::uint64_t scatter) {
  look_at_these(rows, n, scatter);
}

void Fragments::edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t, std::span<const std::uint64_t>, std::uint64_t scatter) {
  look_at_these(rows, n, scatter);
}

void Fragments::lost(const std::int64_t* rows, std::uint64_t n) { look_at_these(rows, n, 0); }

void Fragments::emptied() {
  const auto guard = locked();
  look_at_all();
}

void Fragments::after_fork() {
  if (mutex_.try_lock()) {
    mutex_.unlock();
    return;
  }
  new (&mutex_) std::mutex;  // held by a thread of the parent, and the table is half changed
  std::fill(nodes_.begin(), nodes_.end(), Node{});
  std::fill(buckets_.begin(), buckets_.end(), 0);
  extra_.assign(extra_.size(), false);
  extras_ = 0;
  firsts_.assign([](std::uint64_t) { return false; });
  long_.assign([](std::uint64_t) { return false; });
  waiting_.clear();
  scatters_ = ~std::uint64_t{0};
}

// ---- draws -----------------------------------------------------------------------------------------------------------

// Whether the write that gave the row its number is over, and the row has it still. Until it is over, a write that swaps rows leaves a
// step in two of them.
bool Fragments::is_at_rest(Id id) const {
  const std::uint64_t number = node(id).number;
  for (std::uint64_t i = 0; i < control_.participants(); ++i) {
    for (const Claim& claim : control_.participant(i).claims) {
      const std::uint64_t t0 = claim.t0.load(std::memory_order_acquire);
      if (t0 != 0 && t0 <= number) return false;
    }
  }
  return is_committed_as(control_.word(id - 1).load(std::memory_order_acquire), number);
}

// Of a step that is just being moved to another row, one of the two rows is in no run: it is drawn as long as it is there.
void Fragments::check_unique() {
  if (extras_ == 0) return;
  let_go();
  look_at_all();  // one of the two may be overwritten
  for (auto found = extra_.begin(); extras_ != 0 && (found = std::find(found, extra_.end(), true)) != extra_.end(); ++found) {
    const Id id = static_cast<Id>(found - extra_.begin() + 1);
    const Node& twice = node(id);
    if (!is_at_rest(id) || !is_at_rest(find(twice.trajectory, twice.step))) continue;
    throw std::runtime_error("sample: fragmented: expected each step of a trajectory in one row, got step " + std::to_string(twice.step) +
                             " of trajectory " + std::to_string(twice.trajectory) +
                             " in two, as where a trajectory's number is given again. Give every trajectory a number of its own, or empty "
                             "the buffer before numbers are given again");
  }
}

// As Trajectories::usable.
std::uint64_t Fragments::usable(Id first, const WindowSpec& spec) const {
  const std::uint64_t steps = length(first);
  if (spec.unfinished == 0) return steps;
  std::byte mark[sizeof(std::int64_t)];
  copy_from_shared(mark, spec.final.row(node(first).other - 1), sizeof mark);
  std::int64_t final = 0;
  std::memcpy(&final, mark, sizeof final);
  return final >= 0 ? steps : steps - std::min(steps, spec.unfinished);
}

// `window`: its first place counts from the first step of the run.
void Fragments::add_rows(Drawn& drawn, Id first, const Window& window, const WindowSpec& spec) const {
  const Steps steps = spec.steps(window);
  const std::uint64_t places = spec.whole ? spec.length : steps.real;
  const auto add = [&](std::uint64_t offset, std::uint64_t times) {
    const Id id = find(node(first).trajectory, shifted(node(first).step, window.first + offset));
    intact(id != 0, "fragments: expected runs without gaps");
    drawn.rows.insert(drawn.rows.end(), times, static_cast<std::int64_t>(id) - 1);
    drawn.numbers.insert(drawn.numbers.end(), times, static_cast<std::int64_t>(node(id).number));
  };
  if (steps.before > 0) add(0, steps.before);
  for (std::uint64_t i = 0; i < steps.real; ++i) add((steps.before + i) * spec.dilation - window.ahead, 1);
  if (places > steps.before + steps.real) add(window.length - 1, places - steps.before - steps.real);
  drawn.windows.push_back(window);
}

Drawn Fragments::draw(std::uint64_t key, std::uint64_t n, const WindowSpec& spec) {
  spec.validate();
  check(spec.left == 0 && spec.right == 0 && !spec.by_anchor, "fragments: windows without overhangs, of runs that are drawn uniformly");
  const auto guard = locked();
  look_for_new();
  check_unique();
  const Random random(key);
  const RowSet& runs = spec.strict && spec.extent() - spec.ahead() == window_ ? long_ : firsts_;
  const std::uint64_t size = runs.size();
  Drawn drawn;
  std::vector<Id> listed;  // once rejection has found nothing: all runs that give a window
  const auto choose = [&](std::uint64_t i) -> Id {
    for (std::uint64_t attempt = 1; listed.empty() && attempt <= kAttempts; ++attempt) {
      const Id first = static_cast<Id>(runs.at(random.below(size, i, attempt)) + 1);
      if (windows_in(usable(first, spec), spec) > 0) return first;
    }
    if (listed.empty()) {
      let_go();
      for (std::uint64_t r = 0; r < size; ++r) {
        const Id first = static_cast<Id>(runs.at(r) + 1);
        if (windows_in(usable(first, spec), spec) > 0) listed.push_back(first);
      }
    }
    return listed.empty() ? 0 : listed[random.below(listed.size(), i, kAttempts + 1)];
  };
  for (std::uint64_t i = 0; size > 0 && i < n; ++i) {
    const Id first = choose(i);
    if (first == 0) return {};
    const std::uint64_t steps = usable(first, spec), windows = windows_in(steps, spec);
    if (windows == 0) continue;  // a mark was written meanwhile
    add_rows(drawn, first, window_in(0, 0, steps, random.below(windows, i), spec), spec);
  }
  return drawn;
}

std::uint64_t Fragments::windows(const WindowSpec& spec) {
  spec.validate();
  const auto guard = locked();
  look_for_new();
  std::uint64_t total = 0;
  for (std::uint64_t r = 0, size = firsts_.size(); r < size; ++r) total += windows_in(usable(static_cast<Id>(firsts_.at(r) + 1), spec), spec);
  return total;
}

std::uint64_t Fragments::choices(const WindowSpec& spec) {
  spec.validate();
  const auto guard = locked();
  look_for_new();
  std::uint64_t total = 0;
  for (std::uint64_t r = 0, size = firsts_.size(); r < size; ++r) {
    total += windows_in(usable(static_cast<Id>(firsts_.at(r) + 1), spec), spec) > 0 ? 1 : 0;
  }
  return total;
}

Census Fragments::census() {
  const auto guard = locked();
  look_for_new();
  Census census;
  for (std::uint64_t r = 0, size = firsts_.size(); r < size; ++r) {
    ++census.trajectories;
    census.longest = std::max(census.longest, length(static_cast<Id>(firsts_.at(r) + 1)));
  }
  return census;
}

}  // namespace engram
