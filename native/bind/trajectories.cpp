// The table of trajectories, for Python. Memory crosses as plain addresses, as for the store.

#include "trajectories.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "../core/check.h"
#include "../core/fragments.h"
#include "../core/store.h"
#include "../core/trajectories.h"
#include "../core/windows.h"
#include "block.h"
#include "column.h"
#include "interpreter.h"
#include "memory.h"
#include "rules.h"
#include "priorities.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;
namespace engram {
namespace {

// (track, first place, length), one behind the other.
nb::object triples_of(const std::vector<Window>& windows) {
  std::vector<std::int64_t> values;
  values.reserve(3 * windows.size());
  for (const Window& w : windows) {
    for (const std::uint64_t value : {w.track, w.first, w.length}) values.push_back(static_cast<std::int64_t>(value));
  }
  return array_of(std::move(values));
}

// What a batch of windows says of its steps beside what is stored.
struct Marks {
  static constexpr std::int64_t kUnwanted = -2, kAlone = -1;

  std::int64_t ends;     // the last step of each window: alone, or in place of the stored flag with this number
  bool never;            // false
  std::int64_t done;     // the stored flag with this number, or kAlone, and the ends
  bool done_in_place;    // that flag itself gets them
  std::int64_t begun;    // the stored flag with this number, or kAlone, and the first steps
  bool begun_is_column;  // [n, 1] as the others, else [n]
  bool real;             // no padding: [n]
  bool learning;         // from the anchor on: [n]
};

// How a batch of windows is drawn and laid out.
struct Batched {
  bool padded;    // short windows have all steps of the spec
  bool shown;     // with rows
  bool numbered;  // with the numbers of the writes
  bool flat;      // [n * length, ...]; else [n, length, ...]
  std::span<std::int64_t> taken;  // by the queue, for each track; empty: there is none
  bool streaming = false;         // the queue is that of completed windows, else the online one
  bool tickets = false;           // numbered with the tickets, which the caller compares when it reads the rows
};

// Windows in new tensors: one per field of the layout, which are those of the store or none; the rows, then marks, weights and
// tickets as they are added.
class Sampled {
 public:
  Sampled(const Store& store, const Layout& layout, const ChooseWindows& choose, std::uint64_t n, const WindowSpec& spec,
          const Batched& batched, const ChooseAgain& again = {})
      : store_(store),
        specs_(layout.specs()),
        fields_(specs_.size()),
        stride_(batched.padded || spec.whole ? spec.length : 0),
        burn_in_(spec.burn_in),
        shown_(batched.shown),
        flat_(batched.flat) {
    check(fields_ <= store.fields(), "a layout of all fields, or of none");
    check(flat_ || stride_ > 0, "windows of equal length");
    constexpr std::uint64_t kMost = std::uint64_t{1} << 40;
    check(n < kMost && (stride_ == 0 || n == 0 || stride_ < kMost / n), "a batch of more rows than there is memory");
    const auto allocate = [&](std::uint64_t places) -> WindowMemory {
      most_ = static_cast<std::int64_t>(places);
      buffers_ = {};
      buffers_.add(specs_, most_);
      if (shown_) {
        buffers_.add(kNumbers, most_);
      } else {
        unseen_.resize(places);
      }
      numbers_.resize(places);
      return {buffers_.first(fields_), rows(), numbers_.data()};
    };
    windows_ = read_windows(store, fields_ == 0 ? std::span<const std::uint64_t>{} : store.all().first(fields_), choose, n, spec,
                            batched.padded, allocate, again);
    for (const Steps& steps : windows_) total_ += places(steps);
    count();
  }

  void add(const Marks& marks) {
    if (marks.ends == Marks::kAlone) flag(kFlagColumn, Marks::kAlone, Step::last);
    if (marks.ends >= 0) {
      std::fill_n(stored_flag(marks.ends), total_, std::uint8_t{0});
      mark(stored_flag(marks.ends), Step::last);
    }
    if (marks.done_in_place) {
      mark(stored_flag(marks.done), Step::last);
    } else if (marks.done != Marks::kUnwanted) {
      flag(kFlagColumn, marks.done, Step::last);
    }
    if (marks.never) flag(kFlagColumn, Marks::kAlone, Step::none);
    if (marks.begun != Marks::kUnwanted) flag(marks.begun_is_column ? kFlagColumn : kFlag, marks.begun, Step::first);
    if (marks.real) {
      bool* to = output<bool>(kFlag);
      for (const Steps& steps : windows_) {
        bool* const end = to + places(steps);
        std::fill(std::fill_n(std::fill_n(to, steps.before, false), steps.real, true), end, false);
        to = end;
      }
    }
    if (marks.learning) {
      bool* to = output<bool>(kFlag);
      for (const Steps& steps : windows_) to = std::fill_n(std::fill_n(to, burn_in_, false), places(steps) - burn_in_, true);
    }
  }

  /// The weights that the anchors have among all rows, or those of the batch, at every step of their windows.
  void add_weights(const Priorities& priorities, bool single_precision, Priorities::Over over) {
    std::vector<std::int64_t> starts;
    const std::int64_t* at = rows();
    for (const Steps& steps : windows_) {
      starts.push_back(at[burn_in_]);
      at += places(steps);
    }
    std::vector<double> weights(starts.size());
    priorities.weigh(starts.data(), starts.size(), weights.data(), masses_of_block(), over);
    if (single_precision) {
      repeat(weights, output<float>(kFloat));
    } else {
      repeat(weights, output<double>(kDouble));
    }
  }

  /// The numbers of the writes of all steps, or their tickets.
  void add_numbers(bool tickets) {
    auto* const to = output<std::int64_t>(kNumbers);
    std::copy_n(numbers_.begin(), total_, to);
    if (!tickets) store_.control().name_writes(rows(), total_, to);
  }

  nb::list tensors() && {
    return std::move(buffers_).tensors(static_cast<std::int64_t>(total_), flat_ ? 0 : static_cast<std::int64_t>(stride_));
  }

 private:
  enum class Step { none, first, last };

  // Steps that are there: padding names some of them again.
  void count() {
    std::vector<std::int64_t> real;
    if (store_.hears_samples()) {
      const std::int64_t* at = rows();
      for (const Steps& steps : windows_) {
        real.insert(real.end(), at + steps.before, at + steps.before + steps.real);
        at += places(steps);
      }
    }
    std::uint64_t n = 0;
    for (const Steps& steps : windows_) n += steps.real;
    store_.count_sampled(real.empty() ? nullptr : real.data(), n);
  }

  std::int64_t* rows() { return shown_ ? buffers_.at<std::int64_t>(fields_) : unseen_.data(); }
  std::uint64_t places(const Steps& steps) const { return std::max(steps.real, stride_); }

  template <class T>
  T* output(const RowSpec& spec) {
    buffers_.add(spec, most_);
    return buffers_.at<T>(buffers_.size() - 1);
  }

  // A column of the batch.
  std::uint8_t* stored_flag(std::int64_t number) const {
    const auto field = static_cast<std::uint64_t>(number);
    check(field < fields_ && store_.row_bytes(field) == 1, "a stored flag of one byte");
    return buffers_.at<std::uint8_t>(field);
  }

  void flag(const RowSpec& spec, std::int64_t stored, Step step) {
    auto* to = output<std::uint8_t>(spec);
    if (stored == Marks::kAlone) {
      std::fill_n(to, total_, std::uint8_t{0});
    } else {
      std::copy_n(stored_flag(stored), total_, to);
    }
    mark(to, step);
  }

  void mark(std::uint8_t* to, Step step) const {
    if (step == Step::none) return;
    for (const Steps& steps : windows_) {
      to[step == Step::first ? 0 : steps.before + steps.real - 1] = 1;
      to += places(steps);
    }
  }

  template <class T>
  void repeat(const std::vector<double>& values, T* to) const {
    for (std::size_t i = 0; i < values.size(); ++i) to = std::fill_n(to, places(windows_[i]), static_cast<T>(values[i]));
  }

  const Store& store_;
  const std::vector<RowSpec>& specs_;
  std::uint64_t fields_;  // that are read
  std::int64_t most_ = 0;  // places while they are read
  std::uint64_t stride_, burn_in_;
  bool shown_, flat_;
  std::uint64_t total_ = 0;
  std::vector<Steps> windows_;
  std::vector<std::int64_t> numbers_, unseen_;  // unseen: rows that are not shown
  OutputBuffers buffers_;
};

// Which windows may be drawn, as Python says it: a field by its number.
struct BoundSpec {
  WindowSpec spec;
  std::int64_t final = -1;

  WindowSpec in(const Store& store) const {
    WindowSpec found = spec;
    if (final < 0) return found;
    const auto number = static_cast<std::uint64_t>(final);
    check(number < store.fields() && store.row_bytes(number) >= sizeof(std::int64_t), "a field of int64");
    found.final = store.field(number);
    return found;
  }
};

// The key of a choice, by its attempt; the first is the batch's own.
std::uint64_t key_of(std::uint64_t key, std::uint64_t attempt) { return key + attempt * 0x9E3779B97F4A7C15ull; }

// Chooses from the queue first, if there is one; what replaces moved windows does not come from it.
ChooseWindows chosen_by(Trajectories& table, const WindowSpec& spec, const Batched& batched, ChooseWindows choose) {
  if (batched.taken.empty()) return choose;
  return [&table, &spec, &batched, choose](std::uint64_t n, std::uint64_t attempt) {
    if (attempt > 0) return choose(n, attempt);
    const auto first = batched.streaming ? completed_first : newest_first;
    return first(table, batched.taken, n, spec, [&](std::uint64_t rest) { return choose(rest, 0); });
  };
}

// For windows that have their turn once, of a queue or an epoch.
ChooseAgain again(Trajectories& table, const WindowSpec& spec) {
  return [&table, &spec](const Window& window, Drawn& drawn) { return table.choose_again(window, spec, drawn); };
}

// Whether a batch of windows is drawn and read before another thread has been woken: of few tracks, as each of them is looked at.
bool brief(const Trajectories& table, const Store& store, const WindowSpec& spec, std::uint64_t n) {
  constexpr std::uint64_t kTracks = 64, kWindows = 128, kSteps = 1024;
  return table.tracks() <= kTracks && n <= kWindows && spec.length <= kSteps && store.reads_briefly(n * spec.length);
}

nb::list sample(Trajectories& table, const Store& store, const Layout& layout, Address key_at, std::uint64_t n,
                const BoundSpec& bound, const Batched& batched, const Marks& marks) {
  const std::uint64_t key = *at<const std::uint64_t>(key_at);  // read before the GIL is released
  const WindowSpec spec = bound.in(store);
  std::optional<Sampled> sampled;
  {
    const WithoutInterpreter running(brief(table, store, spec, n));
    sampled.emplace(store, layout, chosen_by(table, spec, batched, [&](std::uint64_t count, std::uint64_t attempt) {
      return table.draw(key_of(key, attempt), count, spec);
    }), n, spec, batched, batched.taken.empty() ? ChooseAgain{} : again(table, spec));
    sampled->add(marks);
    if (batched.numbered) sampled->add_numbers(batched.tickets);
    if (OutputBlock* part = OutputBlock::current(); part != nullptr && part->is_part()) {
      part->masses = {static_cast<double>(table.choices(spec)), 1.0, store.control().size()};
    }
  }
  return std::move(*sampled).tensors();
}

nb::list sample_fragments(Fragments& table, const Store& store, const Layout& layout, Address key_at, std::uint64_t n,
                          const BoundSpec& bound, const Batched& batched, const Marks& marks) {
  const std::uint64_t key = *at<const std::uint64_t>(key_at);
  const WindowSpec spec = bound.in(store);
  std::optional<Sampled> sampled;
  {
    const WithoutInterpreter running(n <= 128 && spec.length <= 1024 && store.reads_briefly(n * spec.length));
    sampled.emplace(store, layout, [&](std::uint64_t count, std::uint64_t attempt) {
      return table.draw(key_of(key, attempt), count, spec);
    }, n, spec, batched);
    sampled->add(marks);
    if (batched.numbered) sampled->add_numbers(batched.tickets);
    if (OutputBlock* part = OutputBlock::current(); part != nullptr && part->is_part()) {
      part->masses = {static_cast<double>(table.choices(spec)), 1.0, store.control().size()};
    }
  }
  return std::move(*sampled).tensors();
}

// The ticket number of each row; -1 where it holds nothing, or is being written.
void read_numbers(const Store& store, const std::int64_t* rows, std::uint64_t n, std::int64_t* numbers) {
  for (std::uint64_t i = 0; i < n; ++i) {
    const std::uint64_t word = store.control().word(static_cast<std::uint64_t>(rows[i])).load(std::memory_order_acquire);
    numbers[i] = is_committed(word) ? static_cast<std::int64_t>(number_of(word)) : -1;
  }
}

// The windows around anchors, in new tensors: what each step is, one int64 or flag each; and, with a layout, the rows themselves.
class Surrounding {
 public:
  Surrounding(Trajectories& table, const Store& store, const Layout* layout, std::span<const std::int64_t> given,
              const std::int64_t* expected, const WindowSpec& spec, bool shifted)
      : anchors_(given.begin(), given.end()), length_(spec.length), total_(given.size() * spec.length), before_(given.size()) {
    check_rows(anchors_.data(), anchors_.size(), store.control().capacity());
    std::int64_t *rows = column(), *numbers = column();
    bool* real = flags();
    std::vector<std::int64_t> after(anchors_.size());
    read_numbers(store, anchors_.data(), anchors_.size(), before_.data());
    const std::vector<Window> windows = table.windows_around(anchors_.data(), anchors_.size(), spec, shifted, rows, numbers);
    read_numbers(store, anchors_.data(), anchors_.size(), after.data());
    for (std::uint64_t i = 0; i < anchors_.size(); ++i) {  // the anchor need not be a step of a shifted window
      const bool stood = before_[i] >= 0 && before_[i] == after[i] && (expected == nullptr || expected[i] == before_[i]);
      if (!stood) std::fill_n(numbers + i * length_, length_, -1);
      const Steps steps = windows[i].length == 0 ? Steps{0, 0} : spec.steps(windows[i]);
      bool* const end = real + length_;
      std::fill(std::fill_n(std::fill_n(real, steps.before, false), steps.real, true), end, false);
      steps_ += steps.real;
      real = end;
    }
    if (layout != nullptr) read(store, *layout, rows, numbers);
  }

  /// What is said of the steps, of which those from `from` to before `to` are learned from; and the tickets of the anchors.
  void add(std::uint64_t from, std::uint64_t to, bool numbered) {
    check(from < to && to <= length_, "steps of a window");
    std::int64_t *which = column(), *step = column(), *anchor = column();
    bool* learned = flags();
    for (std::size_t i = 0; i < anchors_.size(); ++i) {
      which = std::fill_n(which, length_, static_cast<std::int64_t>(i));
      std::iota(step, step + length_, std::int64_t{0});
      step += length_;
      anchor = std::fill_n(anchor, length_, anchors_[i]);
      std::fill_n(learned, length_, false);
      std::fill_n(learned + from, to - from, true);
      learned += length_;
    }
    if (!numbered) return;
    std::int64_t* number = column();
    for (const std::int64_t value : before_) number = std::fill_n(number, length_, value);
  }

  /// (what is said, columns, the windows that moved, how many steps are real).
  nb::tuple result() && {
    const auto n = static_cast<std::int64_t>(total_);
    nb::list said = std::move(said_).tensors(n), columns = std::move(columns_).tensors(n);
    return nb::make_tuple(std::move(said), std::move(columns), moved_, steps_);
  }

 private:
  void read(const Store& store, const Layout& layout, const std::int64_t* rows, const std::int64_t* numbers) {
    store.find_fields();
    const std::size_t fields = columns_.add(layout, static_cast<std::int64_t>(total_));
    for (const std::int64_t place : store.gather(rows, total_, store.all().first(fields), columns_.first(fields), numbers, nullptr)) {
      const std::uint64_t window = static_cast<std::uint64_t>(place) / length_;
      if (moved_.empty() || moved_.back() != window) moved_.push_back(window);
    }
  }

  std::int64_t* column() {
    said_.add(kNumbers, static_cast<std::int64_t>(total_));
    return said_.at<std::int64_t>(said_.size() - 1);
  }
  bool* flags() {
    said_.add(kFlag, static_cast<std::int64_t>(total_));
    return said_.at<bool>(said_.size() - 1);
  }

  std::vector<std::int64_t> anchors_;  // a copy: others may change the caller's
  std::uint64_t length_, total_, steps_ = 0;
  std::vector<std::int64_t> before_;  // their tickets
  std::vector<std::uint64_t> moved_;
  OutputBuffers columns_, said_;
};

nb::tuple around(Trajectories& table, const Store& store, const Layout* layout, Numbers anchors, Numbers expected, const BoundSpec& bound,
                 bool shifted, std::uint64_t learned, bool numbered) {
  const WindowSpec& spec = bound.spec;
  constexpr std::uint64_t kMost = std::uint64_t{1} << 40;
  const std::uint64_t n = anchors.size;
  check(n < kMost && n < kMost / spec.length, "a batch of more rows than there is memory");
  std::optional<Surrounding> found;
  {
    const WithoutInterpreter running(brief(table, store, spec, n));
    found.emplace(table, store, layout, anchors.span(), expected.of_any(n), spec, shifted);
    if (learned > 0) found->add(spec.burn_in, spec.burn_in + learned, numbered);
  }
  return std::move(*found).result();
}

// Of its trajectories, bytes say which they are.
TrajectoryEpoch epoch_of(const nb::tuple& state, const nb::bytes& known) {
  check(state.size() == 4, "an epoch is (key, version, visited, count)");
  TrajectoryEpoch epoch{nb::cast<std::uint64_t>(state[0]), nb::cast<std::uint64_t>(state[1]), nb::cast<std::uint64_t>(state[2]),
                        nb::cast<std::uint64_t>(state[3])};
  if (known.size() == 0) return epoch;
  check(epoch.count < std::uint64_t{1} << 40 && known.size() == 16 * epoch.count, "a row and a number of each trajectory");
  epoch.known = {static_cast<const std::int64_t*>(known.data()), 2 * epoch.count};
  return epoch;
}

nb::tuple sample_epoch(Trajectories& table, const Store& store, const Layout& layout, Address key_at, std::uint64_t n,
                      const BoundSpec& bound, const Batched& batched, const Marks& marks, const nb::tuple& state,
                      const nb::bytes& known, bool shuffle, bool drop_last) {
  const std::uint64_t key = *at<const std::uint64_t>(key_at);
  TrajectoryEpoch epoch = epoch_of(state, known);
  const WindowSpec spec = bound.in(store);
  std::optional<Sampled> sampled;
  {
    const WithoutInterpreter running(brief(table, store, spec, n));
    const auto choose = [&](std::uint64_t count, std::uint64_t attempt) {
      const std::uint64_t mixed = key_of(key, attempt);
      TrajectoryEpoch next = epoch;
      Drawn drawn = table.draw_epoch(next, mixed, count, spec, shuffle, drop_last && attempt == 0);
      if (attempt > 0 && next.key != epoch.key) {  // windows that replace moved ones do not begin the next epoch
        next = epoch;
        next.key = mixed, next.visited = 0;
        return table.draw_epoch(next, mixed, count, spec, true, false);
      }
      epoch = std::move(next);
      return drawn;
    };
    sampled.emplace(store, layout, choose, n, spec, batched, again(table, spec));
    sampled->add(marks);
    if (batched.numbered) sampled->add_numbers(batched.tickets);
    if (Masses* masses = masses_of_block(); masses != nullptr) {
      *masses = {static_cast<double>(epoch.count - epoch.visited), 1.0, store.control().size()};
    }
  }
  const nb::bytes now = epoch.own == nullptr ? known : nb::bytes(epoch.known.data(), epoch.known.size_bytes());
  return nb::make_tuple(nb::make_tuple(epoch.key, epoch.version, epoch.visited, epoch.count), now, std::move(*sampled).tensors());
}

std::uint64_t left_of(const Trajectories& table, const nb::tuple& state, const nb::bytes& known, bool shuffle, std::uint64_t most) {
  TrajectoryEpoch epoch = epoch_of(state, known);
  const WithoutInterpreter running(true);
  return table.left(epoch, shuffle, most);
}

nb::list sample_anchored(Trajectories& table, const Store& store, const Layout& layout, Address key_at, std::uint64_t n,
                         const BoundSpec& bound, const Batched& batched, const Marks& marks,
                         const BoundPriorities& priorities, bool single_precision, bool over_batch) {
  const std::uint64_t key = *at<const std::uint64_t>(key_at);
  const WindowSpec spec = bound.in(store);
  const OutputBlock* const block = OutputBlock::current();
  const bool part = block != nullptr && block->is_part();
  std::optional<Sampled> sampled;
  {
    const WithoutInterpreter running(brief(table, store, spec, n));
    sampled.emplace(store, layout, chosen_by(table, spec, batched, [&](std::uint64_t count, std::uint64_t attempt) {
      if (part && attempt == 0) return propose_anchored(priorities, table, key, count, spec);
      return draw_anchored(priorities, table, key_of(key, attempt), count, spec);
    }), n, spec, batched, batched.taken.empty() ? ChooseAgain{} : again(table, spec));
    sampled->add(marks);
    sampled->add_weights(priorities, single_precision, over_batch ? Priorities::Over::batch : Priorities::Over::store);
    if (batched.numbered) sampled->add_numbers(batched.tickets);
  }
  return std::move(*sampled).tensors();
}

void bind_windows(nb::module_& m) {
  nb::class_<BoundSpec>(m, "WindowSpec", "Which windows may be drawn, and how likely each is.")
      .def(
          "__init__",
          [](BoundSpec* self, std::uint64_t length, bool strict, bool by_anchor, std::uint64_t left, std::uint64_t right,
             std::uint64_t period, std::uint64_t dilation, std::uint64_t burn_in, std::uint64_t padding, bool whole) {
            const WindowSpec spec{length, strict, by_anchor, left, right, period, dilation, burn_in, padding, whole};
            spec.validate();
            new (self) BoundSpec{spec};
          },
          "length"_a, "strict"_a = true, "by_anchor"_a = false, "left"_a = 0, "right"_a = 0, "period"_a = 1, "dilation"_a = 1,
          "burn_in"_a = 0, "padding"_a = 0, "whole"_a = false)
      .def(
          "finished",
          [](const BoundSpec& self, std::uint64_t final, std::uint64_t steps) {
            check(final < std::uint64_t{1} << 32, "a field of the store");
            BoundSpec made = self;
            made.final = static_cast<std::int64_t>(final);
            made.spec.unfinished = steps;
            return made;
          },
          "final"_a, "steps"_a,
          "These windows without the last steps of trajectories, so many of each, whose last step has a negative int64 in that field.");
  nb::class_<Batched>(m, "Batched", "How a batch of windows is drawn and laid out.")
      .def(
          "__init__",
          [](Batched* self, bool padded, bool shown, bool numbered, bool flat, Column<std::int64_t> taken, bool streaming,
             bool tickets) {
            new (self) Batched{padded, shown, numbered, flat, taken.span(), streaming, tickets};
          },
          "padded"_a, "shown"_a, "numbered"_a, "flat"_a, "taken"_a.none() = nb::none(), "streaming"_a = false, "tickets"_a = false,
          nb::keep_alive<1, 6>(),
          "Whether short windows have all steps; whether there are rows, and the numbers of their writes; [n * length, ...] or [n, length, ...]. "
          "Ticket numbers of the steps that the online queue took last, int64 [tracks], which the draw changes; None: there is no queue. "
          "`streaming`: the queue is that of completed windows instead, and these are the places at which the next ones begin. `tickets`: "
          "these take the place of the numbers of the writes.");
  nb::class_<Marks>(m, "Marks", "What a batch of windows says of its steps beside what is stored.")
      .def(
          "__init__",
          [](Marks* self, std::int64_t ends, bool never, std::int64_t done, bool done_in_place, std::int64_t begun,
             bool begun_is_column, bool real, bool learning) {
            check(!done_in_place || done >= 0, "a stored flag");
            new (self) Marks{ends, never, done, done_in_place, begun, begun_is_column, real, learning};
          },
          "ends"_a, "never"_a, "done"_a, "done_in_place"_a, "begun"_a, "begun_is_column"_a, "real"_a, "learning"_a,
          "Numbers of stored flags, -1 for none of them, -2 for unwanted. ends: whose column the last step of each window takes; -1: "
          "a tensor [n, 1]. done: what the last steps are added to, a tensor [n, 1], or its column itself. begun: what the first steps "
          "are added to, a tensor [n, 1] or [n]. Whether wanted: false, [n, 1]; no padding, [n]; no burn-in, [n].");
}

}  // namespace

static void bind_completed(nb::class_<Trajectories, Index>& table) {
  table
      .def(
          "positions_of",
          [](Trajectories& self, Column<std::int64_t> next, const BoundSpec& bound) {
            std::vector<std::int64_t> positions;
            {
              const nb::gil_scoped_release running;
              positions = self.positions_of(next.span(), bound.spec);
            }
            return array_of(std::move(positions));
          },
          "places"_a, "spec"_a,
          "Of the places at which the next completed windows begin, int64 [tracks], how many steps were appended before; moves them on "
          "over what gives no window any more.")
      .def(
          "places_of",
          [](Trajectories& self, Numbers positions) { return array_of(self.places_of(positions.span())); },
          "positions"_a, "The reverse of positions_of, for a store that holds the same rows.");
}

static void bind_fragments(nb::module_& m) {
  nb::class_<Fragments, Index>(m, "Fragments", nb::is_weak_referenceable(), "Rows by trajectory and step, which lie anywhere.")
      .def(
          "__init__",
          [](Fragments* self, const Store& store, Address trajectory, std::uint64_t trajectory_bytes, std::uint64_t trajectory_stride,
             bool trajectory_signed, Address step, std::uint64_t step_bytes, std::uint64_t step_stride, bool step_signed,
             const std::vector<Address>& ends, const std::vector<std::uint64_t>& end_bytes, const std::vector<std::uint64_t>& end_strides,
             const std::vector<std::uint64_t>& step_types, const std::vector<std::uint64_t>& whole, std::uint64_t window, nb::handle) {
            Boundaries boundaries{0, fields_at(ends, end_bytes, end_strides), {}, step_types, whole};
            new (self) Fragments(store.control(), {{at<std::byte>(trajectory), trajectory_bytes, trajectory_stride}, trajectory_signed},
                                 {{at<std::byte>(step), step_bytes, step_stride}, step_signed}, window, std::move(boundaries));
          },
          "store"_a, "trajectory"_a, "trajectory_bytes"_a, "trajectory_stride"_a, "trajectory_signed"_a, "step"_a, "step_bytes"_a,
          "step_stride"_a, "step_signed"_a, "ends"_a, "end_bytes"_a, "end_strides"_a, "step_types"_a, "whole"_a, "window"_a, "owner"_a,
          nb::keep_alive<1, 17>(),
          "Addresses of two fields of integers, bytes of one, bytes from row to row, and whether they are signed; then of fields that end "
          "trajectories, as of Trajectories. `owner` holds their memory and the store's.")
      .def("catch_up", &Fragments::catch_up, nb::call_guard<nb::gil_scoped_release>(), "Looks at all rows that are new.")
      .def("count", &Fragments::count, "window"_a, nb::call_guard<nb::gil_scoped_release>(), "Runs of so many steps are found at once.")
      .def("after_fork", &Fragments::after_fork, "In a child that was forked off, before anything else.")
      .def("sample", &sample_fragments, "store"_a, "layout"_a, "key_at"_a, "n"_a, "spec"_a, "batched"_a, "marks"_a, "As Trajectories.sample.")
      .def(
          "windows", [](Fragments& self, const Store& store, const BoundSpec& bound) { return self.windows(bound.in(store)); },
          "store"_a, "spec"_a, nb::call_guard<nb::gil_scoped_release>(), "How many windows there are of which one is drawn.")
      .def(
          "choices", [](Fragments& self, const Store& store, const BoundSpec& bound) { return self.choices(bound.in(store)); },
          "store"_a, "spec"_a, nb::call_guard<nb::gil_scoped_release>(), "How many runs give a window.")
      .def(
          "census",
          [](Fragments& self) {
            Census found;
            {
              const nb::gil_scoped_release running;
              found = self.census();
            }
            return nb::make_tuple(found.trajectories, found.longest);
          },
          "Runs, and the length of the longest.");
}

// What a table knows of its trajectories.
void bind_census(nb::class_<Trajectories, Index>& table) {
  table
      .def(
          "windows",
          [](Trajectories& self, const Store& store, const BoundSpec& bound) { return self.windows(bound.in(store)); },
          "store"_a, "spec"_a, nb::call_guard<nb::gil_scoped_release>(), "How many windows there are of which one is drawn.")
      .def(
          "choices",
          [](Trajectories& self, const Store& store, const BoundSpec& bound) { return self.choices(bound.in(store)); },
          "store"_a, "spec"_a, nb::call_guard<nb::gil_scoped_release>(),
          "How many there are of what a draw chooses among: trajectories with a window, or all their windows.")
      .def_prop_ro("tracks", &Trajectories::tracks).def("mixed", &Trajectories::mixed, "Whether steps of one process follow another's; said once.")
      .def(
          "census",
          [](Trajectories& self) {
            nb::gil_scoped_release release;
            const Census census = self.census();
            nb::gil_scoped_acquire acquire;
            return nb::make_tuple(census.trajectories, census.longest);
          },
          "(trajectories, length of the longest).")
      .def(
          "runs",
          [](Trajectories& self) {
            std::vector<Window> runs;
            {
              nb::gil_scoped_release release;
              runs = self.runs();
            }
            return triples_of(runs);
          },
          "(track, first place, length) of all, track by track, oldest first: an int64 array.")
      .def("row", &Trajectories::row, "track"_a, "place"_a);
}

void bind_trajectories(nb::module_& m) {
  bind_windows(m);
  nb::class_<Trajectories, Index> table(m, "Trajectories", nb::is_weak_referenceable(), "Where trajectories begin and end.");
  bind_completed(table);
  table.def(
          "__init__",
          [](Trajectories* self, const Store& store, std::uint64_t ids, const std::vector<std::uint64_t>& which,
             const std::vector<std::uint64_t>& step_types, const std::vector<std::uint64_t>& whole, const std::vector<Address>& data, const std::vector<std::uint64_t>& row_bytes,
             const std::vector<std::uint64_t>& strides, std::uint64_t width, std::uint64_t window, Address memory, std::uint64_t memory_bytes, const nb::object&) {
            Boundaries boundaries{ids, fields_at(data, row_bytes, strides), which, step_types, whole};
            new (self) Trajectories(store.control(), std::move(boundaries), width, window, block(memory, memory_bytes));
          },
          "store"_a, "ids"_a, "which"_a, "step_types"_a, "whole"_a, "fields"_a,
          "row_bytes"_a, "strides"_a, "width"_a, "window"_a, "memory"_a, "memory_bytes"_a, "owner"_a, nb::keep_alive<1, 14>(),
          "ids: how many of the fields, the first ones, hold ids. `owner` holds all that memory and the store's, and lives as long as the table.")
      .def_static("bytes", &Trajectories::bytes, "lanes"_a, "lane_length"_a, "width"_a, "Bytes of a table.")
      .def("catch_up", &Trajectories::catch_up, "steps"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Looks at up to so many steps of each lane that are new; how many are left.")
      .def("forget", &Trajectories::forget, nb::call_guard<nb::gil_scoped_release>())
      .def("count", &Trajectories::count, "window"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Windows of that length are counted from now on.")
      .def("after_fork", &Trajectories::after_fork, "In a child that was forked off, before anything else.")
      .def("sample", &sample, "store"_a, "layout"_a, "key_at"_a, "n"_a, "spec"_a, "batched"_a, "marks"_a,
           "n windows with replacement, in new tensors: one per field, or none with an empty layout; int64 rows, marks, and "
           "tickets if numbered.")
      .def("sample_epoch", &sample_epoch, "store"_a, "layout"_a, "key_at"_a, "n"_a, "spec"_a, "batched"_a, "marks"_a, "state"_a,
           "known"_a, "shuffle"_a, "drop_last"_a,
           "As draw_epoch and sample: (epoch, its trajectories, tensors). `known`: those of the epoch of that state, empty if it is not known.")
      .def("left", &left_of, "state"_a, "known"_a, "shuffle"_a, "most"_a, "How many trajectories are left of an epoch, at most `most`.")
      .def("sample_anchored", &sample_anchored, "store"_a, "layout"_a, "key_at"_a, "n"_a, "spec"_a, "batched"_a,
           "marks"_a, "priorities"_a, "single_precision"_a, "over_batch"_a,
           "As sample, with first steps drawn by priority; behind the marks come their weights.")
      .def("around", &around, "store"_a, "layout"_a.none(), "anchors"_a, "expected"_a.none(), "spec"_a, "shifted"_a, "learned"_a, "numbered"_a,
           "The whole windows around n rows, which must have those tickets (None: any): (int64 rows, tickets, -1 where a window moved, which "
           "steps are real; unless `learned` is 0 also numbers of windows, of steps, anchors, which steps are the `learned` ones after the "
           "burn-in; if numbered the anchors' tickets), the columns of a layout, the windows that moved before, the number of real steps.");
  table.def(
      "nearest",
      [](Trajectories& self, const Store& store, std::uint64_t field, std::uint8_t code, std::uint8_t bits, Numbers rows,
         Column<const double> deltas, Column<std::int64_t> out, Column<std::int64_t> numbers, Column<double> after, Column<bool> is_last) {
        constexpr std::size_t kMost = std::size_t{1} << 40;
        check(rows.size < kMost && deltas.size < kMost / std::max<std::size_t>(rows.size, 1), "a batch of more rows than there is memory");
        const std::size_t all = rows.size * deltas.size;
        const Moments found{out.of(all), numbers.of(all), after.of(all), is_last.of(all)};
        const nb::gil_scoped_release running;
        store.find_fields();
        check(field < store.all().size(), "a field of the store");
        const std::vector<double> own(deltas.data, deltas.data + deltas.size);
        return self.nearest(store.field(field), code, bits, rows.data, rows.size, own, found);
      },
      "store"_a, "field"_a, "code"_a, "bits"_a, "rows"_a, "deltas"_a, "out"_a, "numbers"_a, "after"_a, "is_last"_a,
      "The steps nearest to the times of n rows plus each delta, float64 [T], by a field with the timestamps and the dtype that DLPack names "
      "so: fills int64 [n, T] rows and tickets (-1 where one is being written), float64 [n, T] times less that of the row, and bool [n, T] "
      "whether nothing lies beyond. Returns -1, or a row whose timestamp is not finite.");
  bind_census(table);
  bind_fragments(m);
}

}  // namespace engram
