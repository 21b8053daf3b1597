// Rows of any length, for Python: memory crosses as plain addresses, as for the store.

#include "ragged.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "../core/check.h"
#include "../core/ragged.h"
#include "../core/store.h"
#include "interpreter.h"
#include "memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

std::vector<RaggedGroup> groups_in(const nb::tuple& groups) {
  std::vector<RaggedGroup> found;
  for (nb::handle group : groups) {
    RaggedGroup& one = found.emplace_back(RaggedGroup{nb::cast<std::uint64_t>(group[0]), nb::cast<std::uint64_t>(group[1]), {}});
    for (nb::handle field : nb::borrow<nb::tuple>(group[2])) {
      one.fields.push_back({nb::cast<std::uint64_t>(field[0]), at<std::byte>(nb::cast<Address>(field[1])), nb::cast<std::uint64_t>(field[2])});
    }
  }
  return found;
}

RaggedSource source_in(nb::handle source) {
  return {at<const std::uint32_t>(nb::cast<Address>(source[0])), at<const std::int64_t>(nb::cast<Address>(source[1])),
          nb::cast<std::uint64_t>(source[2]), addresses_in<const std::byte>(source[3])};
}

void bind_writes(nb::class_<Store>& type) {
  type
      .def(
          "append_ragged",
          [](Store& self, std::uint64_t lane, std::uint64_t n, const nb::tuple& columns, Address rows, const nb::tuple& items) {
            const auto inputs = addresses_in<const std::byte>(columns);
            RaggedWrite write = write_in(self, n, items);
            nb::gil_scoped_release release;
            return self.append(lane, n, inputs, at<std::int64_t>(rows), &write);
          },
          "lane"_a, "n"_a, "columns"_a, "rows"_a, "items"_a,
          "As append, of a store with ragged fields, whose columns are ignored. `items`: for each group (address of lengths, uint32 [n]; of "
          "starts, int64 [n]; items of the values; addresses of the values of its fields, 0: zeros).")
      .def(
          "append_ragged_by_lane",
          [](Store& self, Address lane_of, std::uint64_t n, const nb::tuple& columns, Address rows, const nb::tuple& items) {
            const auto inputs = addresses_in<const std::byte>(columns);
            RaggedWrite write = write_in(self, n, items);
            nb::gil_scoped_release release;
            return self.append_by_lane(at<std::int64_t>(lane_of), n, inputs, at<std::int64_t>(rows), &write);
          },
          "lane_of"_a, "n"_a, "columns"_a, "rows"_a, "items"_a, "As append_by_lane, with items as for append_ragged.")
      .def(
          "patch_items",
          [](Store& self, std::uint64_t group, Address rows, std::uint64_t n, const nb::tuple& items, Address expected, Address numbers,
             bool unedited) {
            const RaggedSource source = source_in(items);
            nb::gil_scoped_release release;
            const Patched made = self.patch_items(group, at<std::int64_t>(rows), n, source, at<std::int64_t>(expected),
                                                  at<std::int64_t>(numbers), unedited ? Store::Same::ticket : Store::Same::write);
            return std::pair(made.first, made.entries);
          },
          "group"_a, "rows"_a, "n"_a, "items"_a, "expected"_a, "numbers"_a, "unedited"_a,
          "As patch, of the items of a group's fields whose address is not 0: as many as each row has, else ValueError.");
}

}  // namespace

RaggedWrite write_in(const Store& store, std::uint64_t n, const nb::tuple& sources) {
  check(store.ragged() != nullptr, "a store with ragged fields");
  std::vector<RaggedSource> found;
  for (nb::handle source : sources) found.push_back(source_in(source));
  return {*store.ragged(), n, found};
}

void bind_ragged(nb::module_& m, nb::class_<Store>& type) {
  m.def("ragged_bytes", &Ragged::bytes, "lanes"_a, "groups"_a, "Bytes of the memory that says where the items of ragged fields are.");
  m.def(
      "format_ragged",
      [](Address memory, std::uint64_t bytes, std::uint64_t capacity, std::uint64_t lanes, const nb::tuple& groups) {
        std::vector<RaggedPage::Group> found;
        for (nb::handle group : groups) found.push_back({nb::cast<std::uint64_t>(group[0]), nb::cast<std::uint64_t>(group[1])});
        check(lanes > 0, "at least one lane");
        Ragged::format(block(memory, bytes), {capacity, lanes, capacity / lanes}, found);
      },
      "memory"_a, "nbytes"_a, "capacity"_a, "lanes"_a, "groups"_a, "Of zeroed memory. `groups`: (field of the spans, items of a lane's ring) each.");
  type.def(
          "use_ragged",
          [](Store& self, Address memory, std::uint64_t bytes, const nb::tuple& groups, bool alone) {
            self.use(std::make_unique<Ragged>(block(memory, bytes), self.control().geometry(), groups_in(groups), alone));
          },
          "memory"_a, "nbytes"_a, "groups"_a, "alone"_a,
          "The items of ragged fields: (field of the spans, items of a lane's ring, ((field, address, bytes of an item), …)) each. `alone`: no "
          "other process has the store open.")
      .def(
          "gather_items",
          [](const Store& self, std::uint64_t group, Address rows, std::uint64_t n, Address expected, Address spans, const nb::tuple& outputs,
             Address places) {
            const auto found = addresses_in<std::byte>(outputs);
            std::vector<std::int64_t> moved;
            {
              const WithoutInterpreter running(false);
              moved = self.gather_items(group, at<const std::int64_t>(rows), n, at<const std::int64_t>(expected), at<const std::byte>(spans),
                                        found, at<const std::int64_t>(places));
            }
            return moved;
          },
          "group"_a, "rows"_a, "n"_a, "expected"_a, "spans"_a, "outputs"_a, "places"_a,
          "Copies the items of rows with these tickets (int64 [n]) and spans (12 bytes each): of each field to an output, or 0, from item "
          "places[i] on. The positions of rows that have them no more.")
      .def_prop_ro(
          "evicted", [](const Store& self) { return self.ragged() == nullptr ? 0 : self.ragged()->page().evicted.load(); },
          "Rows that lost their items to newer ones, since the store was made.")
      .def(
          "ragged_lane",
          [](const Store& self, std::uint64_t lane) {
            check(self.ragged() != nullptr && lane < self.control().lanes(), "a lane of a store with ragged fields");
            std::vector<std::uint64_t> words{self.ragged()->tail(lane).load()};
            for (std::uint64_t g = 0; g < self.ragged()->groups().size(); ++g) words.push_back(self.ragged()->head(lane, g).load());
            return words;
          },
          "lane"_a, "The position of the oldest row that may have items, then the offset of the next item of each group.")
      .def(
          "set_ragged_lane",
          [](Store& self, std::uint64_t lane, const nb::tuple& heads) {
            const Ragged* ragged = self.ragged();
            check(ragged != nullptr && lane < self.control().lanes() && heads.size() == ragged->groups().size(), "a head for each group of a lane");
            check(self.paused(), "a store that this process has paused");
            for (std::uint64_t g = 0; g < heads.size(); ++g) {
              ragged->head(lane, g).store(nb::cast<std::uint64_t>(heads[g]), std::memory_order_seq_cst);
            }
            const std::uint64_t end = self.control().end(lane);
            ragged->tail(lane).store(end - std::min(self.control().filled(lane), end), std::memory_order_seq_cst);
          },
          "lane"_a, "heads"_a, "The offset of the next item of each group, of a paused store whose rows were replaced.");
  bind_writes(type);
}

}  // namespace engram
