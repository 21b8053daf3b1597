// A pass, for Python. Its memory is kept alive by the object handed over with the address.

#include "../core/pass.h"

#include <nanobind/nanobind.h>

#include <cstdint>

#include "memory.h"
#include "pass.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {

void bind_pass(nb::module_& m) {
  m.attr("pass_bytes") = RowPass::kBytes;
  m.def(
      "format_pass", [](Address memory, std::uint64_t bytes) { RowPass::format(block(memory, bytes)); }, "memory"_a, "bytes"_a,
      "Into zeroed memory of pass_bytes.");
  m.def(
      "reset_pass_mutex", [](Address memory, std::uint64_t bytes) { RowPass::reset_mutex(block(memory, bytes)); }, "memory"_a,
      "bytes"_a, "Before anything else, by the only process that uses this memory now.");
  nb::class_<RowPass, Index>(m, "Pass", nb::is_weak_referenceable(), "A walk over the live rows, in memory that `keep` keeps alive.")
      .def(
          "__init__",
          [](RowPass* self, Address memory, std::uint64_t bytes, nb::handle) { new (self) RowPass(block(memory, bytes)); },
          "memory"_a, "bytes"_a, "keep"_a, nb::keep_alive<1, 4>())
      .def(
          "next",
          [](RowPass& self, std::uint64_t key, std::uint64_t rows, std::uint64_t n, bool whole) {
            RowPass::Stretch taken;
            {
              nb::gil_scoped_release release;
              taken = self.next(key, rows, n, whole);
            }
            return nb::make_tuple(taken.key, taken.start, taken.count, taken.last);
          },
          "key"_a, "rows"_a, "n"_a, "whole"_a,
          "The next n rows of the walk, or what is left; `whole`: what does not fill n is skipped. (key of the order, first "
          "rank, ranks, whether the walk is over). Waits for other processes, bounded.")
      .def_prop_rw(
          "walk",
          [](const RowPass& self) {
            const Walk walk = self.walk();
            return nb::make_tuple(walk.key, walk.rows, walk.visited);
          },
          [](RowPass& self, const nb::tuple& walk) {
            self.set({nb::cast<std::uint64_t>(walk[0]), nb::cast<std::uint64_t>(walk[1]), nb::cast<std::uint64_t>(walk[2])});
          },
          "(key of the order, rows, rows visited).")
      .def("scan", [](const RowPass&, std::uint64_t, std::uint64_t) {}, "begin"_a, "end"_a, "Rows say nothing of a walk.")
      .def("after_fork", &RowPass::after_fork);
}

}  // namespace engram
