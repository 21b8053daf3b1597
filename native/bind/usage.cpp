// Counts of samples, for Python. The memory is kept alive by the object handed over with its address.

#include "usage.h"

#include <nanobind/nanobind.h>

#include <cstdint>

#include "../core/usage.h"
#include "column.h"
#include "interpreter.h"
#include "memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {

void bind_usage(nb::module_& m) {
  m.def("usage_bytes", &Usage::bytes, "rows"_a, "Bytes of the counts of that many rows.");
  m.def(
      "format_usage", [](Address memory, std::uint64_t bytes, std::uint64_t rows) { Usage::format(block(memory, bytes), rows); }, "memory"_a,
      "bytes"_a, "rows"_a, "Writes the header into zeroed memory.");
  nb::class_<Usage, Index>(m, "Usage", nb::is_weak_referenceable(), "How often rows were sampled, in memory that `keep` keeps alive.")
      .def(
          "__init__",
          [](Usage* self, Address memory, std::uint64_t bytes, nb::handle) { new (self) Usage(block(memory, bytes)); },
          "memory"_a, "bytes"_a, "keep"_a, nb::keep_alive<1, 4>())
      .def_prop_ro("rows", &Usage::rows)
      .def(
          "counts",
          [](const Usage& self, Numbers rows, Column<std::int64_t> out) {
            const WithoutInterpreter running(rows.size <= 4096);
            self.copy_counts(rows.data, rows.size, out.of(rows.size));
          },
          "rows"_a, "out"_a, "Copies how often these rows were sampled, int64.")
      .def("scan", [](const Usage&, std::uint64_t, std::uint64_t) {}, "begin"_a, "end"_a, "What was sampled before is not known.")
      .def("after_fork", [](const Usage&) {});
}

}  // namespace engram
