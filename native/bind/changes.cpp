// Marks of changed rows, for Python. The memory is kept alive by the object handed over with its address.

#include "changes.h"

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "../core/changes.h"
#include "memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {

void bind_changes(nb::module_& m) {
  m.def("changes_bytes", &Changes::bytes, "rows"_a, "Bytes of the marks of that many rows.");
  m.def(
      "format_changes",
      [](Address memory, std::uint64_t bytes, std::uint64_t rows, bool samples) { Changes::format(block(memory, bytes), rows, samples); },
      "memory"_a, "bytes"_a, "rows"_a, "samples"_a, "Writes the header into zeroed memory.");
  m.def(
      "reset_changes", [](Address memory, std::uint64_t bytes) { Changes::reset(block(memory, bytes)); }, "memory"_a, "bytes"_a,
      "As if no look had been made.");
  nb::class_<Changes, Index>(m, "Changes", nb::is_weak_referenceable(), "Which rows may have changed, in memory that `keep` keeps alive.")
      .def(
          "__init__",
          [](Changes* self, Address memory, std::uint64_t bytes, nb::handle) { new (self) Changes(block(memory, bytes)); },
          "memory"_a, "bytes"_a, "keep"_a, nb::keep_alive<1, 4>())
      .def_prop_ro("rows", &Changes::rows)
      .def(
          "look",
          [](Changes& self, std::uint64_t since) {
            std::vector<std::int64_t> rows;
            const std::uint64_t number = self.look(since, rows);
            return nb::make_tuple(number, array_of(std::move(rows)));
          },
          "since"_a, "The number of this look, and rows that may have changed since that one, int64.")
      .def("scan", &Changes::scan, "begin"_a, "end"_a, "These rows may have changed.")
      .def("after_fork", [](const Changes&) {});
}

}  // namespace engram
