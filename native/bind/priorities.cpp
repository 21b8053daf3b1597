// Priorities, for Python. Memory and tickets are kept alive by the object handed over with their addresses.

#include "../core/priorities.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "../core/update_drain.h"
#include "block.h"
#include "column.h"
#include "interpreter.h"
#include "memory.h"
#include "priorities.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

// Rows with their numbers and weights, as tensors: [fields…, rows, numbers, weights].
nb::list draw(const BoundPriorities& priorities, const Store& store, const Layout& layout, Address key_at,
              std::uint64_t n, bool single_precision, bool over_batch) {
  const std::uint64_t key = *at<const std::uint64_t>(key_at);  // read before the GIL is released
  check(n < std::uint64_t{1} << 48, "a batch of more rows than there is memory");
  const auto size = static_cast<std::int64_t>(n);
  OutputBuffers buffers;
  {
    const WithoutInterpreter running(Priorities::brief(n) && store.reads_briefly(n));
    store.find_fields();
    const std::size_t f = buffers.add(layout, size);
    buffers.add(kNumbers, size);
    buffers.add(kNumbers, size);
    buffers.add(single_precision ? kFloat : kDouble, size);
    std::vector<double> wide(single_precision ? n : 0);
    double* weights = single_precision ? wide.data() : buffers.at<double>(f + 2);
    priorities.sample(store, key, n, buffers.first(f), buffers.at<std::int64_t>(f), buffers.at<std::int64_t>(f + 1), weights,
                      masses_of_block(), over_batch ? Priorities::Over::batch : Priorities::Over::store);
    store.control().name_writes(buffers.at<std::int64_t>(f), n, buffers.at<std::int64_t>(f + 1));
    store.count_sampled(buffers.at<std::int64_t>(f), n);
    std::transform(wide.begin(), wide.end(), buffers.at<float>(f + 2), [](double w) { return static_cast<float>(w); });
  }
  return std::move(buffers).tensors(size);
}

// Memory of priorities, before an object is made around it.
void bind_memory(nb::module_& m) {
  nb::exception<BadPriority>(m, "BadPriority", PyExc_ValueError);
  m.def("priority_bytes", &Priorities::bytes, "rows"_a, "within_buffer"_a, "Bytes of the priorities of that many rows.");
  m.def(
      "format_priorities",
      [](Address memory, std::uint64_t bytes, std::uint64_t rows, double alpha, double beta, double eps,
         bool within_buffer) { Priorities::format(block(memory, bytes), rows, {alpha, beta, eps, within_buffer}); },
      "memory"_a, "bytes"_a, "rows"_a, "alpha"_a, "beta"_a, "eps"_a, "within_buffer"_a,
      "Writes the header into zeroed memory.");
  m.def(
      "copy_priorities",
      [](Address from, Address to, std::uint64_t bytes) {
        nb::gil_scoped_release release;
        Priorities::copy(block(from, bytes), block(to, bytes));
      },
      "source"_a, "to"_a, "nbytes"_a, "Copies memory that other processes may be changing; the copy's mutex is free.");
  m.def(
      "reset_priorities_mutex",
      [](Address memory, std::uint64_t bytes) { Priorities::reset_mutex(block(memory, bytes)); }, "memory"_a, "bytes"_a,
      "Before anything else, by the only process that uses this memory now.");
}

// A method that looks at a few words, and waits where another thread or process holds them.
template <auto Method, class... Arguments>
auto briefly(BoundPriorities& self, Arguments... arguments) {
  const WithoutInterpreter running(true);
  return (self.*Method)(arguments...);
}

// Leaves, and what writes tell the index.
void bind_values(nb::class_<BoundPriorities, Index>& type) {
  type
      .def(
          "leaves",
          [](const BoundPriorities& self, Column<double> out, bool signs) {
            const WithoutInterpreter running(Priorities::brief(out.size));
            self.copy_leaves(out.data, out.size, signs);
          },
          "out"_a, "signs"_a, "Copies the leaves of the first rows, float64 [n]; `signs`: a priority of zero is -0.0.")
      .def(
          "lowest",
          [](const BoundPriorities& self, Column<std::int64_t> rows) {
            const WithoutInterpreter running(Priorities::brief(rows.size));
            return self.lowest(rows.size, rows.data);
          },
          "rows"_a, "Up to n rows of the lowest priority above zero, in order: how many.")
      .def(
          "leaves_of",
          [](const BoundPriorities& self, Numbers rows, Column<double> out) {
            const WithoutInterpreter running(Priorities::brief(rows.size));
            self.copy_leaves_of(rows.data, rows.size, out.of(rows.size));
          },
          "rows"_a, "out"_a, "Copies the leaves of these rows, float64.")
      .def(
          "restore",
          [](BoundPriorities& self, Column<const double> leaves, double alpha) {
            const WithoutInterpreter running(Priorities::brief(self.rows()));
            self.restore(leaves.data, leaves.size, alpha);
          },
          "leaves"_a, "alpha"_a, "Takes over the leaves of the first rows, float64 [n]; others become zero.")
      .def(
          "written",
          [](BoundPriorities& self, Numbers rows) {
            const WithoutInterpreter running(Priorities::brief(rows.size));
            self.written(rows.data, rows.size, 0);
          },
          "rows"_a, "For rows without tickets: they hold new steps.")
      .def(
          "lost",
          [](BoundPriorities& self, Numbers rows) {
            const WithoutInterpreter running(Priorities::brief(rows.size));
            self.lost(rows.data, rows.size);
          },
          "rows"_a, "For rows without tickets: they hold nothing.")
      .def(
          "reset",
          [](BoundPriorities& self, Numbers rows) {
            const WithoutInterpreter running(Priorities::brief(rows.size));
            self.reset(rows.data, rows.size);
          },
          "rows"_a);
}

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The same of NumPy's arrays, which the general path would make tensors of first.
template <class Real>
void update_arrays(BoundPriorities& self, const Array<std::int64_t>& rows, const Array<Real>& priorities,
                   const std::optional<Array<std::int64_t>>& expected) {
  const std::size_t n = rows.shape(0);
  check(priorities.shape(0) == n && (!expected || expected->shape(0) == n), "as many priorities as rows");
  const std::int64_t* wanted = expected ? expected->data() : nullptr;
  const WithoutInterpreter running(Priorities::brief(n));
  if constexpr (std::is_same_v<Real, double>) {
    self.update(rows.data(), priorities.data(), n, wanted);
  } else {
    const std::vector<double> wide(priorities.data(), priorities.data() + n);
    self.update(rows.data(), wide.data(), n, wanted);
  }
}

template <class Real>
void update(BoundPriorities& self, Numbers rows, Column<const Real> priorities, Numbers expected) {
  const WithoutInterpreter running(Priorities::brief(rows.size));
  self.update(rows.data, priorities.of(rows.size), rows.size, expected.of_any(rows.size));
}

// Updates and draws.
void bind_draws(nb::class_<BoundPriorities, Index>& type) {
  type
      .def("update", &update<double>, "rows"_a, "priorities"_a, "expected"_a.none())
      .def("update", &update<float>, "rows"_a, "priorities"_a, "expected"_a.none(), "Of float64 or float32 [n]. None: whatever the tickets are.")
      .def("update_arrays", &update_arrays<float>, "rows"_a.noconvert(), "priorities"_a.noconvert(), "expected"_a.noconvert().none(),
           "update, of arrays of one dimension: int64, float32 or float64, and int64 or None. TypeError: others.")
      .def("update_arrays", &update_arrays<double>, "rows"_a.noconvert(), "priorities"_a.noconvert(), "expected"_a.noconvert().none())
      .def(
          "draw",
          [](const BoundPriorities& self, std::uint64_t key, Column<std::int64_t> rows, Column<std::int64_t> numbers, Column<double> weights,
             bool leaves, std::optional<Numbers> among) {
            std::vector<std::int64_t> some;
            if (among) some.assign(among->data, among->data + among->size);
            const WithoutInterpreter running(Priorities::brief(rows.size + some.size()));
            self.draw(key, 0, rows.size, rows.data, numbers.of(rows.size), weights.of(rows.size), masses_of_block(),
                      leaves ? Priorities::Over::leaves : Priorities::Over::store, among ? &some : nullptr);
          },
          "key"_a, "rows"_a, "numbers"_a, "weights"_a, "leaves"_a = false, "among"_a = nb::none(),
          "Draws as many rows, all or `among` some. `leaves`: in place of weights.")
      .def(
          "weigh",
          [](const BoundPriorities& self, Numbers rows, Column<double> weights) {
            const WithoutInterpreter running(Priorities::brief(rows.size));
            self.weigh(rows.data, rows.size, weights.of(rows.size), masses_of_block());
          },
          "rows"_a.none(), "weights"_a.none(), "The weights that draws of these rows would have. None: of no row, for what it says of all.")
      .def("sample", &draw, "store"_a, "layout"_a, "key_at"_a, "n"_a, "single_precision"_a, "over_batch"_a = false,
           "Draws n rows and copies them into new tensors: one per field, rows, ticket numbers and weights.");
}

void bind_update_drain(nb::module_& m) {
  nb::class_<UpdateDrain>(m, "UpdateDrain", nb::is_weak_referenceable(), "A thread that applies the updates of priorities that a device sends.")
      .def(
          "__init__",
          [](UpdateDrain* self, Address memory, std::uint64_t bytes, std::uint64_t slots, std::uint64_t entries, bool single_precision,
             BoundPriorities& priorities, nb::handle) {
            new (self) UpdateDrain(block(memory, bytes), slots, entries, single_precision, priorities);
          },
          "memory"_a, "bytes"_a, "slots"_a, "entries"_a, "single_precision"_a, "priorities"_a, "keep"_a, nb::keep_alive<1, 7>(),
          nb::keep_alive<1, 8>())
      .def_prop_ro("counts", [](const UpdateDrain& self) {
        const UpdateDrain::Counts counts = self.counts();
        return nb::make_tuple(counts.batches, counts.entries, counts.refused);
      }, "Batches that were taken from the ring; of this thread, the entries that were handed over, and those that were refused.")
      .def("check", &UpdateDrain::check_thread, "Raises what has ended the thread.")
      .def(
          "flush",
          [](const UpdateDrain& self, std::uint64_t sent, double timeout_s) {
            const nb::gil_scoped_release release;
            return self.flush(sent, std::chrono::milliseconds(static_cast<std::int64_t>(std::min(1e9, std::max(0.0, timeout_s * 1000)))));
          },
          "sent"_a, "timeout_s"_a, "Whether so many batches are taken in that time. Raises as check().")
      .def("stop", &UpdateDrain::stop, nb::call_guard<nb::gil_scoped_release>(), "Applies what has arrived, and ends the thread. Repeatable.")
      .def("before_fork", &UpdateDrain::before_fork, nb::call_guard<nb::gil_scoped_release>())
      .def("after_fork", &UpdateDrain::after_fork)
      .def("forked", [](UpdateDrain& self, nb::handle) { self.forked(); }, "token"_a.none());
}

}  // namespace

void bind_priorities(nb::module_& m) {
  bind_memory(m);
  nb::class_<BoundPriorities, Index> type(m, "Priorities", nb::is_weak_referenceable(), "A priority index in memory that `keep` keeps alive.");
  type
      .def(
          "__init__",
          [](BoundPriorities* self, Address memory, std::uint64_t bytes, const Store* store, nb::handle) {
            new (self) BoundPriorities(block(memory, bytes), store);
          },
          "memory"_a, "bytes"_a, "store"_a.none(), "keep"_a, nb::keep_alive<1, 5>())
      .def_prop_rw("alpha", &briefly<&BoundPriorities::alpha>,
                   [](BoundPriorities& self, double alpha) {
                     const WithoutInterpreter running(Priorities::brief(self.rows()));
                     self.set_alpha(alpha);
                   })
      .def_prop_rw("beta", &briefly<&BoundPriorities::beta>, &briefly<&BoundPriorities::set_beta, double>)
      .def_prop_ro("eps", &BoundPriorities::eps)
      .def_prop_ro("within_buffer", &BoundPriorities::within_buffer)
      .def_prop_ro("rows", &BoundPriorities::rows)
      .def_prop_ro("dropped", &BoundPriorities::dropped)
      .def_prop_ro("total", &briefly<&BoundPriorities::total>)
      .def_prop_rw("highest", &briefly<&BoundPriorities::highest>, &briefly<&BoundPriorities::set_highest, double>)
      .def_prop_ro("default_priority", &briefly<&BoundPriorities::default_priority>)
      .def("leaf", &briefly<&BoundPriorities::leaf, std::uint64_t>, "row"_a)
      .def("drop", &BoundPriorities::drop, "n"_a, "Counts updates that the caller dropped.")
      .def("scan", &BoundPriorities::scan, "begin"_a, "end"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("after_fork", &BoundPriorities::after_fork)
      .def("put_in_order", &BoundPriorities::put_in_order, nb::call_guard<nb::gil_scoped_release>(),
           "Leaves of rows that hold nothing become zero, and all parents are recomputed.")
      .def("emptied", &BoundPriorities::emptied, nb::call_guard<nb::gil_scoped_release>());
  bind_values(type);
  bind_draws(type);
  bind_update_drain(m);
}

}  // namespace engram
