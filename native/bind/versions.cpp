// Draws by version, for Python.

#include "versions.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "../core/store.h"
#include "../core/versions.h"
#include "column.h"
#include "interpreter.h"
#include "memory.h"
#include "rules.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

// Both as tensors.
template <class A, class B>
nb::object tensors_of(const RowSpec& a, const std::vector<A>& one, const RowSpec& b, const std::vector<B>& other) {
  const auto n = static_cast<std::int64_t>(one.size());
  OutputBuffers buffers;
  buffers.add(a, n);
  buffers.add(b, n);
  if (n > 0) {
    std::memcpy(buffers.at<std::byte>(0), one.data(), one.size() * sizeof(A));
    std::memcpy(buffers.at<std::byte>(1), other.data(), other.size() * sizeof(B));
  }
  return std::move(buffers).tensors(n);
}

nb::object versions(Versions& self) {
  std::vector<double> values;
  std::vector<std::int64_t> counts;
  {
    nb::gil_scoped_release release;
    self.catch_up();
    self.versions(values, counts);
  }
  return tensors_of(kDouble, values, kNumbers, counts);
}

nb::object draw(Versions& self, std::uint64_t key, std::uint64_t n, Column<const double> versions, Column<const double> weights) {
  check(n < std::uint64_t{1} << 48, "a batch of more rows than there is memory");
  OutputBuffers buffers;
  bool drawn;
  {
    const WithoutInterpreter running(n <= 256);
    const auto size = static_cast<std::int64_t>(n);
    buffers.add(kNumbers, size);
    buffers.add(kNumbers, size);
    buffers.add(kDouble, size);
    drawn = self.draw(key, n, versions.span(), weights.span(), buffers.at<std::int64_t>(0), buffers.at<std::int64_t>(1), buffers.at<double>(2));
  }
  if (!drawn) return nb::none();
  return std::move(buffers).tensors(static_cast<std::int64_t>(n));
}

void bind_rows(nb::module_& m) {
  nb::class_<Versions>(m, "Versions", nb::is_weak_referenceable(), "Rows of a store by version, those that follow rules.")
      .def(
          "__init__",
          [](Versions* self, const Store& store, const nb::tuple& rules, const std::vector<Address>& data,
             const std::vector<std::uint64_t>& row_bytes, const std::vector<std::uint64_t>& strides, nb::handle) {
            new (self) Versions(store.control(), rules_in(rules), fields_at(data, row_bytes, strides));
          },
          "store"_a, "rules"_a, "data"_a, "row_bytes"_a, "strides"_a, "keep"_a, nb::keep_alive<1, 7>(),
          "`rules`: (fields that are to be ready, field of the version); where the rows of these fields are. `keep` holds their memory and the "
          "store's.")
      .def("versions", &versions, "[versions, ascending, and how many rows have each], as rows now are.")
      .def("draw", &draw, "key"_a, "n"_a, "versions"_a, "weights"_a, "[rows, ticket numbers, versions]. None: every weight is zero.")
      .def("after_fork", &Versions::after_fork);
}

}  // namespace

void bind_versions(nb::module_& m) {
  m.attr("consumer_version_bytes") = ConsumerVersion::kBytes;
  m.def(
      "format_consumer_version", [](Address memory, std::uint64_t bytes) { ConsumerVersion::format(block(memory, bytes)); }, "memory"_a,
      "bytes"_a, "Into zeroed memory of consumer_version_bytes.");
  nb::class_<ConsumerVersion, Index>(m, "ConsumerVersion", nb::is_weak_referenceable(), "In memory that `keep` keeps alive.")
      .def(
          "__init__",
          [](ConsumerVersion* self, Address memory, std::uint64_t bytes, nb::handle) { new (self) ConsumerVersion(block(memory, bytes)); },
          "memory"_a, "bytes"_a, "keep"_a, nb::keep_alive<1, 4>())
      .def("follow", &follow<ConsumerVersion>, "memory"_a, "bytes"_a, "keep"_a, "copied"_a, nb::keep_alive<1, 4>(), kFollow)
      .def_prop_rw("version", &ConsumerVersion::version, &ConsumerVersion::set)
      .def("raise_to", &ConsumerVersion::raise_to, "version"_a, "Never lowers it.")
      .def("increment", &ConsumerVersion::increment)
      .def("scan", [](const ConsumerVersion&, std::uint64_t, std::uint64_t) {}, "begin"_a, "end"_a, "It does not depend on what rows hold.")
      .def("after_fork", [](const ConsumerVersion&) {});
  bind_rows(m);
}

}  // namespace engram
