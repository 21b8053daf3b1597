// An epoch, for Python. Its memory is kept alive by the object handed over with the address.

#include "../core/epoch.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../core/check.h"
#include "../core/permutation.h"
#include "../core/random.h"
#include "../core/store.h"
#include "../core/wait.h"
#include "block.h"
#include "epoch.h"
#include "interpreter.h"
#include "memory.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

constexpr std::uint64_t kKeyBits = ~std::uint64_t{0} >> 1;

// Ranks [start, start + n) of `rows` ones in the order of a key. The order is that of this thread's batch before, most often.
void order_ranks(std::uint64_t key, std::uint64_t rows, std::uint64_t start, std::uint64_t n, std::int64_t* ranks) {
  thread_local std::optional<Permutation> order;
  if (!order || !order->is(key, rows)) {
    order.emplace(key, rows);
  } else {
    order->tabulate();
  }
  (*order)(start, n, ranks);
}

// What a draw sees of an epoch: the rows that its ranks stand for, a lane after the other, and which of them are still in it.
class Walk {
 public:
  Walk(RowEpoch& epoch, const Store& store, bool shuffle) : epoch_(epoch), store_(store), shuffle_(shuffle) {}

  /// Takes the next n ranks: of a new epoch, under `key`, where the old one is over. False: too few rows are live.
  bool begin(std::uint64_t key, std::uint64_t n, bool whole) {
    const Control& control = store_.control();
    const std::uint64_t begun = control.counters().next_ticket.load(std::memory_order_acquire);
    std::uint64_t longest = 0;
    for (std::uint64_t lane = 0; lane < control.lanes(); ++lane) longest = std::max(longest, control.filled(lane));
    const std::uint64_t size = control.size(), ranks = longest * control.lanes();
    if (size < (whole ? n : 1) || ranks < size) return false;
    taken_ = epoch_.next(key, ranks, n, whole, begun, false);
    if (!plausible(taken_.rows)) {  // damaged: another one begins
      epoch_.set({});
      taken_ = epoch_.next(key, ranks, n, whole, begun, false);
      intact(plausible(taken_.rows), "an epoch: expected no more rows than the store has");
    }
    plain_ = ranks == size && taken_.rows == ranks && (taken_.begun == begun || taken_.begun == 0);
    end_ = taken_.start + taken_.count;
    if (plain_ && whole && taken_.rows - end_ < n) skip_rest();
    return true;
  }

  const RowEpoch::Stretch& taken() const { return taken_; }
  std::uint64_t left() const { return taken_.rows - std::min(end_, taken_.rows); }
  /// Whether every live row is in the epoch: its ranks are those of the store, and nothing was written since.
  bool plain() const { return plain_; }

  /// Whether a write with this number was there when the epoch began.
  bool has(std::int64_t number) const { return number >= 0 && (taken_.begun == 0 || static_cast<std::uint64_t>(number) < taken_.begun); }

  /// Whether a row is in the epoch: it holds what it held then, or is just being edited.
  bool alive(std::int64_t row) const {
    const auto r = static_cast<std::uint64_t>(row);
    if (r >= store_.control().capacity() || !store_.control().inside(r)) return false;
    const auto write = static_cast<std::int64_t>(store_.control().held_write(r));
    return write != 0 && has(write);
  }

  /// The rows of the ranks taken that are in the epoch, and of the following ones until there are n. Fewer at its end.
  void choose(std::vector<std::int64_t>& rows, std::uint64_t n) {
    add(rows, taken_);
    while (rows.size() < n && !taken_.last) {
      RowEpoch::Stretch more = epoch_.more(taken_.key, n - rows.size());
      if (more.rows != taken_.rows) more.count = 0, more.last = true;  // of another epoch
      add(rows, more);
      taken_.last = more.last;
      end_ = more.start + more.count;
    }
  }

  /// The next n rows of the epoch, or fewer at its end, and behind which rank each of them lies: nothing is taken.
  void look_ahead(std::uint64_t n, std::vector<std::int64_t>& rows, std::vector<std::int64_t>& ends) {
    std::array<std::int64_t, 64> some;
    for (std::uint64_t at = end_; at < taken_.rows && rows.size() < n; at += some.size()) {
      const std::uint64_t count = std::min<std::uint64_t>(some.size(), taken_.rows - at);
      order(at, count, some.data());
      for (std::uint64_t i = 0; i < count && rows.size() < n; ++i) {
        if (const std::int64_t row = row_of(some[i]); alive(row)) rows.push_back(row), ends.push_back(static_cast<std::int64_t>(at + i + 1));
      }
    }
  }

  /// Another row of the epoch; none at its end.
  void choose_more(std::vector<std::int64_t>& rows) {
    plain_ = false;
    taken_.count = 0;
    choose(rows, 1);
  }

  /// Whether fewer than `needed` rows of the epoch are left, which are skipped then. Ranks before those that are left are passed over.
  bool over(std::uint64_t needed) {
    if (taken_.last) return true;
    std::uint64_t found = 0, first = taken_.rows;
    std::array<std::int64_t, 64> some;
    for (std::uint64_t at = end_; at < taken_.rows && found < needed; at += some.size()) {
      if (at - end_ > kBrief) let_go();
      const std::uint64_t count = std::min<std::uint64_t>(some.size(), taken_.rows - at);
      order(at, count, some.data());
      for (std::uint64_t i = 0; i < count; ++i) {
        if (!alive(row_of(some[i]))) continue;
        if (found++ == 0) first = at + i;
      }
    }
    taken_.last = found < needed;
    const std::uint64_t to = taken_.last ? taken_.rows : first;
    if (to != end_) epoch_.pass_over(taken_.key, end_, to);
    return taken_.last;
  }

  /// As over(), of the epoch of that key, whatever was taken of it. True: another one has begun.
  bool over(std::uint64_t key, std::uint64_t needed) {
    const EpochState state = epoch_.state();
    if (state.key != key || state.visited >= state.rows || !plausible(state.rows)) return true;
    taken_ = {key, state.rows, state.visited, 0, false, state.begun};
    end_ = state.visited;
    return over(needed);
  }

 private:
  // What a page says of its ranks decides how many are looked at.
  bool plausible(std::uint64_t ranks) const { return ranks <= store_.control().capacity(); }

  void skip_rest() {
    if (!taken_.last) epoch_.pass_over(taken_.key, end_, taken_.rows);
    taken_.last = true;
  }

  void order(std::uint64_t start, std::uint64_t n, std::int64_t* out) const {
    if (shuffle_) {
      order_ranks(taken_.key, taken_.rows, start, n, out);
    } else {
      std::iota(out, out + n, static_cast<std::int64_t>(start));
    }
  }

  std::int64_t row_of(std::int64_t rank) const {
    const Control& control = store_.control();
    if (control.lanes() == 1) return rank;
    const std::uint64_t each = std::max<std::uint64_t>(taken_.rows / control.lanes(), 1), r = static_cast<std::uint64_t>(rank);
    return static_cast<std::int64_t>(r / each * control.lane_length() + r % each);
  }

  void add(std::vector<std::int64_t>& rows, const RowEpoch::Stretch& of) const {
    if (plain_ && rows.empty()) {
      rows.resize(of.count);
      order(of.start, of.count, rows.data());
      if (store_.control().lanes() > 1) std::transform(rows.begin(), rows.end(), rows.begin(), [this](std::int64_t rank) { return row_of(rank); });
      return;
    }
    std::vector<std::int64_t> some(of.count);
    order(of.start, of.count, some.data());
    for (const std::int64_t rank : some) {
      if (const std::int64_t row = row_of(rank); alive(row)) rows.push_back(row);
    }
  }

  static constexpr std::uint64_t kBrief = 4096;  // looks at rows that take no longer than another thread to wake up

  RowEpoch& epoch_;
  const Store& store_;
  bool shuffle_, plain_ = false;
  RowEpoch::Stretch taken_{};
  std::uint64_t end_ = 0;  // behind the last rank that was taken
};

// Before another choice of a batch, none of whose rows were to be had. An epoch that begins then has another key.
void start_over(const Walk& walk, std::vector<std::int64_t>& rows, std::uint64_t& key, const Deadline& deadline) {
  rows.clear();
  if (walk.taken().key == key) key = mix(key) & kKeyBits;
  let_go();
  if (deadline.passed()) throw in_vain("rows were written over before an epoch came to them");
}

// Begins or goes on with an epoch until there are rows for a batch; of an epoch that is over without one the next begins. False: too few
// rows are live.
bool choose(Walk& walk, std::vector<std::int64_t>& rows, std::uint64_t key, std::uint64_t n, bool whole) {
  const Deadline deadline;
  for (;;) {
    if (!walk.begin(key, n, whole)) return false;
    walk.choose(rows, n);
    if (rows.size() >= (whole ? n : 1)) return true;
    start_over(walk, rows, key, deadline);
  }
}

// Reads rows of an epoch. One that was written over just now is replaced by another of the epoch; without one the batch is shorter.
// Returns its rows. `named`: the numbers are those of the writes, which tickets are not smaller than.
std::uint64_t read(Walk& walk, const Store& store, std::vector<std::int64_t>& rows, Batch batch, std::int64_t* numbers, bool named) {
  const std::span<const std::uint64_t> which = store.all().first(batch.size());
  const std::vector<std::int64_t> moved = store.gather(rows.data(), rows.size(), which, batch, nullptr, numbers);
  const bool whole = moved.empty() && std::all_of(numbers, numbers + rows.size(), [&walk](std::int64_t number) { return walk.has(number); });
  if (named || !whole) store.control().name_writes(rows.data(), rows.size(), numbers);
  if (whole) return rows.size();
  std::vector<bool> doubtful(rows.size());
  for (const std::int64_t i : moved) doubtful[static_cast<std::size_t>(i)] = true;
  const Deadline deadline;
  std::vector<std::byte*> place(batch.size());
  for (std::uint64_t i = rows.size(); i-- > 0;) {
    if (!doubtful[i] && walk.has(numbers[i])) continue;
    let_go();
    for (std::uint64_t f = 0; f < place.size(); ++f) place[f] = batch[f] + i * store.row_bytes(f);
    for (;;) {
      if (!walk.alive(rows[i])) {
        std::vector<std::int64_t> other;
        walk.choose_more(other);
        if (other.empty()) {  // the last one, which was read, comes here
          const std::uint64_t last = rows.size() - 1;
          for (std::uint64_t f = 0; f < place.size(); ++f) std::memmove(place[f], batch[f] + last * store.row_bytes(f), store.row_bytes(f));
          rows[i] = rows[last], numbers[i] = numbers[last];
          rows.pop_back();
          break;
        }
        rows[i] = other.front();
      }
      const bool there = store.gather(&rows[i], 1, which, place, nullptr, numbers + i).empty();
      store.control().name_writes(&rows[i], 1, numbers + i);
      if (there && walk.has(numbers[i])) break;
      if (deadline.passed()) throw in_vain("row " + std::to_string(rows[i]) + " moved at every try");
      std::this_thread::yield();
    }
  }
  return rows.size();
}

// Takes the next batch of an epoch over the live rows, and reads it.
nb::object draw(RowEpoch& self, const Store& store, const Layout& layout, Address key_at, std::uint64_t n, bool whole, bool shuffle,
                bool with_rows, bool with_numbers) {
  std::uint64_t key = *at<const std::uint64_t>(key_at) & kKeyBits;  // read before the GIL is released
  check(n < std::uint64_t{1} << 48, "a batch of more rows than there is memory");
  Walk walk(self, store, shuffle);
  std::vector<std::int64_t> rows, unseen;
  OutputBuffers buffers;
  std::uint64_t count = 0;
  {
    const WithoutInterpreter running(store.reads_briefly(n));
    const Deadline deadline;
    while (choose(walk, rows, key, n, whole)) {  // again, where too many were written over before they were read
      buffers = {};
      const auto most = static_cast<std::int64_t>(rows.size());
      store.find_fields();
      const std::size_t fields = buffers.add(layout, most);
      if (with_rows) buffers.add(kNumbers, most);
      if (with_numbers) buffers.add(kNumbers, most);
      std::int64_t* numbers = with_numbers ? buffers.at<std::int64_t>(buffers.size() - 1) : nullptr;
      if (numbers == nullptr) unseen.resize(rows.size()), numbers = unseen.data();
      count = read(walk, store, rows, buffers.first(fields), numbers, with_numbers);
      if (with_rows) std::copy(rows.begin(), rows.end(), buffers.at<std::int64_t>(fields));
      if (!walk.plain()) walk.over(whole ? n : 1);
      if (count >= (whole ? n : 1)) break;
      start_over(walk, rows, key, deadline);
    }
    if (!rows.empty()) {
      if (Masses* masses = masses_of_block(); masses != nullptr) *masses = {static_cast<double>(walk.left()), 1.0, store.control().size()};
      store.count_sampled(rows.data(), count);
    }
  }
  if (rows.empty()) return nb::none();
  return nb::make_tuple(std::move(buffers).tensors(static_cast<std::int64_t>(count)), walk.taken().key, walk.taken().last);
}

// Takes the next batch of an epoch over the live rows: (rows, their ticket numbers, key of the order, whether the epoch is over).
nb::object take(RowEpoch& self, const Store& store, std::uint64_t key, std::uint64_t n, bool whole, bool shuffle) {
  check(n < std::uint64_t{1} << 48, "a batch of more rows than there is memory");
  Walk walk(self, store, shuffle);
  std::vector<std::int64_t> rows;
  OutputBuffers buffers;
  {
    const WithoutInterpreter running(store.reads_briefly(n));
    if (choose(walk, rows, key & kKeyBits, n, whole)) {
      walk.over(whole ? n : 1);
      buffers.add(kNumbers, static_cast<std::int64_t>(rows.size()));
      std::copy(rows.begin(), rows.end(), buffers.at<std::int64_t>(0));
    }
  }
  if (rows.empty()) return nb::none();
  const auto count = static_cast<std::int64_t>(rows.size());
  return nb::make_tuple(std::move(buffers).tensors(count)[0], walk.taken().key, walk.taken().last);
}

// The next rows of an epoch over the live rows, of which none is taken: (rows, behind which rank each lies, key of the order, first rank).
nb::object peek(RowEpoch& self, const Store& store, std::uint64_t key, std::uint64_t n, bool shuffle) {
  key &= kKeyBits;
  check(n > 0 && n < std::uint64_t{1} << 48, "a batch of at least one row, and no more than there is memory for");
  Walk walk(self, store, shuffle);
  std::vector<std::int64_t> rows, ends;
  OutputBuffers buffers;
  {
    const WithoutInterpreter running(store.reads_briefly(n));
    const Deadline deadline;
    while (walk.begin(key, 0, false)) {
      walk.look_ahead(n, rows, ends);
      if (!rows.empty()) break;
      const RowEpoch::Stretch& taken = walk.taken();
      self.pass_over(taken.key, taken.start, taken.rows);
      start_over(walk, rows, key, deadline);
    }
    for (const auto* numbers : {&rows, &ends}) {
      buffers.add(kNumbers, static_cast<std::int64_t>(rows.size()));
      std::copy(numbers->begin(), numbers->end(), buffers.at<std::int64_t>(buffers.size() - 1));
    }
  }
  if (rows.empty()) return nb::none();
  const auto count = static_cast<std::int64_t>(rows.size());
  nb::list tensors = std::move(buffers).tensors(count);
  return nb::make_tuple(tensors[0], tensors[1], walk.taken().key, walk.taken().start);
}

}  // namespace

void bind_epoch(nb::module_& m) {
  m.attr("epoch_bytes") = RowEpoch::kBytes;
  m.def(
      "format_epoch", [](Address memory, std::uint64_t bytes) { RowEpoch::format(block(memory, bytes)); }, "memory"_a, "bytes"_a,
      "Into zeroed memory of epoch_bytes.");
  m.def(
      "reset_epoch_mutex", [](Address memory, std::uint64_t bytes) { RowEpoch::reset_mutex(block(memory, bytes)); }, "memory"_a,
      "bytes"_a, "Before anything else, by the only process that uses this memory now.");
  nb::class_<RowEpoch, Index>(m, "Epoch", nb::is_weak_referenceable(), "An epoch over the live rows, in memory that `keep` keeps alive.")
      .def(
          "__init__",
          [](RowEpoch* self, Address memory, std::uint64_t bytes, nb::handle) { new (self) RowEpoch(block(memory, bytes)); },
          "memory"_a, "bytes"_a, "keep"_a, nb::keep_alive<1, 4>())
      .def(
          "next",
          [](RowEpoch& self, std::uint64_t key, std::uint64_t rows, std::uint64_t n, bool whole, std::uint64_t begun) {
            RowEpoch::Stretch taken;
            {
              const WithoutInterpreter running(true);
              taken = self.next(key, rows, n, whole, begun, false);
            }
            return nb::make_tuple(taken.key, taken.rows, taken.begun, taken.start, taken.count, taken.last);
          },
          "key"_a, "rows"_a, "n"_a, "whole"_a, "begun"_a,
          "The next n ranks of the epoch, or fewer at its end; `whole`: a rest smaller than n is no batch. (key of the order, ranks of the "
          "epoch, number of the next write when it began, first rank, number of ranks, whether the epoch is over). Waits for other "
          "processes, bounded.")
      .def("take", &take, "store"_a, "key"_a, "n"_a, "whole"_a, "shuffle"_a,
           "As draw, of rows that are not read: (rows, key of the order, whether the epoch is over).")
      .def("peek", &peek, "store"_a, "key"_a, "n"_a, "shuffle"_a,
           "The rows that take would return, or fewer at the end of the epoch, of which none is taken: (rows, behind which rank each lies, key "
           "of the order, first rank). None: there is no row.")
      .def(
          "advance",
          [](RowEpoch& self, std::uint64_t key, std::uint64_t from, std::uint64_t to) {
            const WithoutInterpreter running(true);
            return self.pass_over(key, from, to);
          },
          "key"_a, "from_"_a, "to"_a, "Takes ranks of the epoch of that key. False: others were taken meanwhile, and nothing is.")
      .def(
          "over",
          [](RowEpoch& self, const Store& store, std::uint64_t key, std::uint64_t needed, bool shuffle) {
            const WithoutInterpreter running(true);
            return Walk(self, store, shuffle).over(key, needed);
          },
          "store"_a, "key"_a, "needed"_a, "shuffle"_a, "Whether fewer rows than needed are left of the epoch of that key, or another one has begun.")
      .def("draw", &draw, "store"_a, "layout"_a, "key_at"_a, "n"_a, "whole"_a, "shuffle"_a, "with_rows"_a, "with_numbers"_a,
           "As next, of the live rows, with the key at an address; and reads them: (tensors, key of the order, whether the epoch is over). "
           "The tensors: one per field, then the rows and their ticket numbers, where wanted. `shuffle`: in the order of the key, else of "
           "rows. None: there is no row, or with `whole` fewer than n.")
      .def_prop_rw(
          "state",
          [](const RowEpoch& self) {
            const EpochState state = [&self] {
              const WithoutInterpreter running(true);
              return self.state();
            }();
            return nb::make_tuple(state.key, state.rows, state.visited, state.begun);
          },
          [](RowEpoch& self, const nb::tuple& state) {
            const EpochState next{nb::cast<std::uint64_t>(state[0]), nb::cast<std::uint64_t>(state[1]), nb::cast<std::uint64_t>(state[2]),
                                  nb::cast<std::uint64_t>(state[3])};
            const WithoutInterpreter running(true);
            self.set(next);
          },
          "(key of the order, rows, rows visited, number of the next write when it began).")
      .def("scan", [](const RowEpoch&, std::uint64_t, std::uint64_t) {}, "begin"_a, "end"_a, "An epoch does not depend on what rows hold.")
      .def("after_fork", &RowEpoch::after_fork);
}

}  // namespace engram
