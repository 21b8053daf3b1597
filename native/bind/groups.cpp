// Groups of rows by key, for Python. Memory, tickets and rows are kept alive by the object handed over with their addresses.

#include "groups.h"

#include <nanobind/nanobind.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "../core/groups.h"
#include "../core/store.h"
#include "interpreter.h"
#include "memory.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

constexpr std::uint64_t kBrief = 256;  // rows

const Field& key_of(std::span<std::byte> memory, const Store& store) {
  const std::uint64_t field = Groups::field_of(memory);
  check(field < store.fields(), "groups by a field that the store does not have");
  return store.field(field);
}

void check_batch(std::uint64_t n, std::uint64_t each) {
  check(n < std::uint64_t{1} << 31 && each < std::uint64_t{1} << 31 && n * each < std::uint64_t{1} << 48,
        "a batch of more rows than there is memory");
}

nb::object draw(Groups& self, std::uint64_t key, std::uint64_t n, std::uint64_t each, bool newest, Address without,
                std::uint64_t n_without) {
  check_batch(n, each);
  Groups::Drawn drawn{};
  OutputBuffers buffers;
  {
    const WithoutInterpreter running(n * each <= kBrief);
    buffers.add(kNumbers, static_cast<std::int64_t>(n * each));
    buffers.add(kNumbers, static_cast<std::int64_t>(n * each));
    drawn = self.draw(key, n, each, newest ? Groups::Order::newest : Groups::Order::any, {at<const std::int64_t>(without), n_without},
                      buffers.at<std::int64_t>(0), buffers.at<std::int64_t>(1));
  }
  if (!drawn.any) return nb::none();
  nb::list made = std::move(buffers).tensors(static_cast<std::int64_t>(n * each));
  return nb::make_tuple(made[0], made[1], drawn.repeated);
}

nb::object members(Groups& self, std::uint64_t key, std::uint64_t n, Address without, std::uint64_t n_without) {
  check_batch(n, 1);
  Groups::Members drawn;
  {
    const nb::gil_scoped_release release;
    drawn = self.draw_members(key, n, {at<const std::int64_t>(without), n_without});
  }
  if (drawn.sizes.empty()) return nb::none();
  const auto tensor = [](const std::vector<std::int64_t>& values) {
    OutputBuffers buffer;
    const auto size = static_cast<std::int64_t>(values.size());
    buffer.add(kNumbers, size);
    std::memcpy(buffer.at<std::byte>(0), values.data(), values.size() * sizeof(std::int64_t));
    return nb::object(std::move(buffer).tensors(size)[0]);
  };
  return nb::make_tuple(tensor(drawn.rows), tensor(drawn.numbers), tensor(drawn.sizes), drawn.repeated);
}

void bind_memory(nb::module_& m) {
  m.def("groups_bytes", &Groups::bytes, "rows"_a, "key_bytes"_a, "Bytes of the groups of that many rows.");
  m.def(
      "format_groups",
      [](Address memory, std::uint64_t bytes, std::uint64_t rows, std::uint64_t field, std::uint64_t key_bytes) {
        Groups::format(block(memory, bytes), rows, field, key_bytes);
      },
      "memory"_a, "bytes"_a, "rows"_a, "field"_a, "key_bytes"_a, "Writes the header into zeroed memory.");
  m.def(
      "copy_groups", [](Address from, Address to, std::uint64_t bytes) { Groups::copy(block(from, bytes), block(to, bytes)); },
      "source"_a, "to"_a, "nbytes"_a, "Into zeroed memory, with no row in a group: the copy is to scan.");
  m.def(
      "reset_groups_mutex", [](Address memory, std::uint64_t bytes) { Groups::reset_mutex(block(memory, bytes)); }, "memory"_a, "bytes"_a,
      "Before anything else, by the only process that uses this memory now.");
}

}  // namespace

void bind_groups(nb::module_& m) {
  bind_memory(m);
  nb::class_<Groups, Index>(m, "Groups", nb::is_weak_referenceable(), "Rows by key, in memory that `keep` keeps alive.")
      .def(
          "__init__",
          [](Groups* self, Address memory, std::uint64_t bytes, const Store& store, nb::handle) {
            const std::span<std::byte> inside = block(memory, bytes);
            new (self) Groups(inside, store.control(), key_of(inside, store));
          },
          "memory"_a, "bytes"_a, "store"_a, "keep"_a, nb::keep_alive<1, 5>())
      .def_prop_ro("field", [](const Groups& self) { return self.field(); }, "Number of the key's field.")
      .def_prop_ro(
          "groups",
          [](Groups& self) {
            const WithoutInterpreter running(true);
            return self.groups();
          },
          "How many groups there are.")
      .def("draw", &draw, "key"_a, "n"_a, "each"_a, "newest"_a, "without"_a, "n_without"_a,
           "(rows, ticket numbers, whether some come again) of n groups. None: there is none.")
      .def("members", &members, "key"_a, "n"_a, "without"_a, "n_without"_a,
           "(rows, ticket numbers, sizes, whether groups come again): all rows of n groups. None: there is none.")
      .def("catch_up", &Groups::catch_up, nb::call_guard<nb::gil_scoped_release>(), "For a store whose writers do not tell.")
      .def("scan", &Groups::scan, "begin"_a, "end"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("put_in_order", &Groups::put_in_order, nb::call_guard<nb::gil_scoped_release>())
      .def("after_fork", &Groups::after_fork);
}

}  // namespace engram
