// The table of writers, for Python. Its memory is kept alive by the object handed over with the address.

#include "writers.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "../core/writers.h"
#include "interpreter.h"
#include "memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {

void bind_writers(nb::module_& m) {
  m.attr("requests_in_doubt") = Writers::kWindow;
  m.def("writers_bytes", &Writers::bytes, "writers"_a, "groups"_a = 0, "Bytes of a table of that many, for so many groups of ragged fields.");
  m.def(
      "format_writers",
      [](Address memory, std::uint64_t bytes, std::uint64_t writers, std::uint64_t groups) {
        Writers::format(block(memory, bytes), writers, groups);
      },
      "memory"_a, "bytes"_a, "writers"_a, "groups"_a = 0, "Into zeroed memory of writers_bytes.");
  m.def(
      "reset_writers_mutex", [](Address memory, std::uint64_t bytes) { Writers::reset_mutex(block(memory, bytes)); }, "memory"_a,
      "bytes"_a, "Before anything else, by the only process that uses this memory now.");
  nb::class_<Writers, Index>(m, "Writers", nb::is_weak_referenceable(), "A table of writers, in memory that `keep` keeps alive.")
      .def(
          "__init__", [](Writers* self, Address memory, std::uint64_t bytes, nb::handle) { new (self) Writers(block(memory, bytes)); },
          "memory"_a, "bytes"_a, "keep"_a, nb::keep_alive<1, 4>())
      .def_prop_ro("writers", &Writers::writers)
      .def(
          "next",
          [](const Writers& self, std::uint64_t high, std::uint64_t low) {
            const WithoutInterpreter running(true);
            return self.next({high, low});
          },
          "high"_a, "low"_a, "Number of the writer's next request.")
      .def(
          "rows_of",
          [](const Writers& self, std::uint64_t high, std::uint64_t low, std::uint64_t number) {
            const WithoutInterpreter running(true);
            using Place = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;
            const auto found = self.rows_of({high, low}, number);
            return found ? std::optional<Place>({found->lane, found->first, found->n}) : std::nullopt;
          },
          "high"_a, "low"_a, "number"_a, "Lane, first position and number of the rows of a request; None: it is not known.")
      .def("scan", [](const Writers&, std::uint64_t, std::uint64_t) {}, "begin"_a, "end"_a, "It does not depend on what rows hold.")
      .def("after_fork", &Writers::after_fork);
}

}  // namespace engram
