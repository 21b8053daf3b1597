// An epoch, for Python. Its memory is kept alive by the object handed over with the address.

#include "../core/epoch.h"

#include <nanobind/nanobind.h>

#include <cstdint>

#include "memory.h"
#include "epoch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {

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
          [](RowEpoch& self, std::uint64_t key, std::uint64_t rows, std::uint64_t n, bool whole) {
            RowEpoch::Stretch taken;
            {
              nb::gil_scoped_release release;
              taken = self.next(key, rows, n, whole);
            }
            return nb::make_tuple(taken.key, taken.start, taken.count, taken.last);
          },
          "key"_a, "rows"_a, "n"_a, "whole"_a,
          "The next n ranks of the epoch, or fewer at its end; `whole`: a rest smaller than n is skipped. (key of the order, "
          "first rank, number of ranks, whether the epoch is over). Waits for other processes, bounded.")
      .def_prop_rw(
          "state",
          [](const RowEpoch& self) {
            const EpochState state = self.state();
            return nb::make_tuple(state.key, state.rows, state.visited);
          },
          [](RowEpoch& self, const nb::tuple& state) {
            self.set({nb::cast<std::uint64_t>(state[0]), nb::cast<std::uint64_t>(state[1]), nb::cast<std::uint64_t>(state[2])});
          },
          "(key of the order, rows, rows visited).")
      .def("scan", [](const RowEpoch&, std::uint64_t, std::uint64_t) {}, "begin"_a, "end"_a, "An epoch does not depend on what rows hold.")
      .def("after_fork", &RowEpoch::after_fork);
}

}  // namespace engram
