// Rows that still grow, for Python. The memory is kept alive by the object handed over with its address. An owner is a process, as one
// number; 0: the slot is free.

#include "../core/open_rows.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "../core/check.h"
#include "../core/participants.h"
#include "../core/store.h"
#include "intake.h"
#include "interpreter.h"
#include "memory.h"
#include "ragged.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

// The kernel is asked once per process: it takes 100 us.
std::uint64_t own_owner() {
  static std::atomic<std::uint64_t> known{0};
  const auto pid = static_cast<std::uint32_t>(getpid());
  std::uint64_t owner = known.load(std::memory_order_relaxed);
  if (owner >> 32 != pid) known.store(owner = OpenRows::owner_of(pid, start_time_of(pid)), std::memory_order_relaxed);
  return owner;
}

// Of `groups` (items of a row, numbers of the fields) each.
SlotLayout slot_layout_in(std::vector<std::uint64_t> bytes, const nb::tuple& groups) {
  std::vector<SlotLayout::Group> found;
  for (nb::handle group : groups) found.push_back({nb::cast<std::uint64_t>(group[0]), nb::cast<std::vector<std::uint64_t>>(group[1])});
  return {std::move(bytes), std::move(found)};
}

// (field, address) each.
std::vector<SlotValue> values_in(const nb::tuple& values) {
  std::vector<SlotValue> found;
  for (nb::handle value : values) found.push_back({nb::cast<std::uint64_t>(value[0]), at<const std::byte>(nb::cast<Address>(value[1]))});
  return found;
}

constexpr std::uint64_t kBrief = 1 << 16;

std::uint64_t bytes_of(const SlotLayout& layout, const std::vector<SlotItems>& items) {
  std::uint64_t bytes = 0;
  for (const SlotItems& it : items) {
    if (it.group >= layout.groups().size()) continue;  // which append() refuses
    for (const std::uint64_t field : layout.groups()[it.group].fields) bytes += it.n * layout.bytes(field);
  }
  return bytes;
}

// (group, items, addresses of the values of its fields) each.
std::vector<SlotItems> slot_items_in(const nb::tuple& items) {
  std::vector<SlotItems> found;
  for (nb::handle it : items) {
    found.push_back({nb::cast<std::uint64_t>(it[0]), nb::cast<std::uint64_t>(it[1]), addresses_in<const std::byte>(it[2])});
  }
  return found;
}

// Values and items for a slot, from data as users hand it over.
struct Given {
  Taken taken{true};
  std::vector<std::uint64_t> which;
  std::vector<SlotValue> values;
  std::vector<SlotItems> items;

  // False: the data, or whether there is room for it, must be looked at in Python.
  bool take(const OpenRows& rows, const Intake& intake, const SlotLayout& layout, std::uint64_t slot, nb::handle data) {
    static constexpr std::byte kEmpty{};  // in place of the address of no items, which may be null
    if (!intake.take_some(data, -1, taken, which)) return false;
    if (layout.groups().size() != intake.groups().size() || layout.fields() != intake.specs().size()) return false;  // fields were added
    const std::vector<std::uint32_t> before = rows.lengths(slot, layout);
    for (std::size_t g = 0; g < before.size(); ++g) {
      if (!taken.has_items(g)) continue;
      const RaggedSource& source = taken.items()[g];
      if (source.total + before[g] > intake.groups()[g].most) return false;
      SlotItems& more = items.emplace_back(SlotItems{g, source.total, source.values});
      for (std::size_t f = 0; f < more.values.size(); ++f) {
        const bool given = std::find(which.begin(), which.end(), intake.groups()[g].fields[f]) != which.end();
        if (given && more.values[f] == nullptr) more.values[f] = &kEmpty;
      }
      if (more.values.front() == nullptr) return false;  // more items, but none of the field that says how many there are
    }
    for (const std::uint64_t field : which) {
      if (!intake.is_ragged(field)) values.push_back({field, taken.columns()[field]});
    }
    return true;
  }

  // Whether a row has all that it needs: ragged fields may be empty, but JSON may not.
  bool complete(const OpenRows& rows, const Intake& intake, const SlotLayout& layout, std::uint64_t slot) const {
    if (layout.nbytes() != rows.slot_bytes() || layout.fields() != intake.specs().size()) return false;
    for (std::uint64_t field = 0; field < layout.fields(); ++field) {
      const bool may_lack = (intake.is_ragged(field) && !intake.is_json(field)) || std::find(which.begin(), which.end(), field) != which.end();
      if (!may_lack && rows.data(slot)[layout.given(field)] == std::byte{}) return false;
    }
    return true;
  }
};

void bind_slots(nb::module_& m) {
  m.def("open_rows_bytes", &OpenRows::bytes, "slots"_a, "slot_bytes"_a, "Bytes of the memory of so many slots.");
  m.def("is_owner_alive", &OpenRows::is_alive, "owner"_a, "Whether that process still runs, as far as this one can see.");
  m.def("own_owner", &own_owner, "This process.");
  m.def(
      "format_open_rows",
      [](Address memory, std::uint64_t bytes, std::uint64_t slots, std::uint64_t slot_bytes) {
        OpenRows::format(block(memory, bytes), slots, slot_bytes);
      },
      "memory"_a, "nbytes"_a, "slots"_a, "slot_bytes"_a, "Writes the page into zeroed memory.");
  nb::class_<SlotLayout>(m, "SlotLayout", "Where things lie in a slot of a row that grows.")
      .def(
          "__init__",
          [](SlotLayout* self, std::vector<std::uint64_t> bytes, const nb::tuple& groups) {
            new (self) SlotLayout(slot_layout_in(std::move(bytes), groups));
          },
          "row_bytes"_a, "groups"_a,
          "`row_bytes`: of a row of each field; of an item of a ragged one. `groups`: (items of a row, numbers of its fields) each.")
      .def_prop_ro("nbytes", &SlotLayout::nbytes)
      .def_prop_ro("places", &SlotLayout::places)
      .def("given", &SlotLayout::given, "field"_a, "Where the byte is that says whether a field was given.");
}

void bind_growth(nb::class_<OpenRows, Index>& type) {
  type
      .def(
          "lengths", [](const OpenRows& self, const SlotLayout& layout, std::uint64_t slot) { return self.lengths(slot, layout); },
          "layout"_a, "slot"_a, "Items of the fields of each group.")
      .def(
          "append",
          [](const OpenRows& self, const SlotLayout& layout, std::uint64_t slot, std::uint64_t times, const nb::tuple& values,
             const nb::tuple& items) {
            const auto given = values_in(values);
            const auto more = slot_items_in(items);
            const WithoutInterpreter running(bytes_of(layout, more) < kBrief);
            check(self.is_held(slot, own_owner(), times), "an open row of this process");
            self.append(slot, layout, given, more);
          },
          "layout"_a, "slot"_a, "times"_a, "values"_a, "items"_a,
          "Puts in values, (field, address) each, and appends items, (group, items, addresses of the values of its fields, 0: zeros) each.")
      .def(
          "append_of",
          [](const OpenRows& self, const Intake& intake, const SlotLayout& layout, std::uint64_t slot, std::uint64_t times, std::uint64_t owner,
             nb::handle data, bool with_values) {
            Given given;
            if (owner != own_owner() || !self.is_held(slot, owner, times) || !given.take(self, intake, layout, slot, data)) return false;
            if (!with_values && !given.values.empty()) return false;
            const WithoutInterpreter running(bytes_of(layout, given.items) < kBrief);
            self.append(slot, layout, given.values, given.items);
            return true;
          },
          "intake"_a, "layout"_a, "slot"_a, "times"_a, "owner"_a, "data"_a.none(), "values"_a,
          "Appends items, and with `values` puts in values, of a dict as users hand it over. False: nothing was done, and it must be looked at "
          "in Python.")
      .def(
          "seal_of",
          [](const OpenRows& self, Store& store, const Intake& intake, const SlotLayout& layout, std::uint64_t slot, std::uint64_t times,
             std::uint64_t owner, std::uint64_t lane, nb::handle data) -> std::optional<std::pair<std::int64_t, std::uint64_t>> {
            Given given;
            const bool nothing = PyDict_CheckExact(data.ptr()) && PyDict_Size(data.ptr()) == 0;
            if (owner != own_owner() || !self.is_held(slot, owner, times) || !(nothing || given.take(self, intake, layout, slot, data)) ||
                !given.complete(self, intake, layout, slot)) {
              return std::nullopt;
            }
            std::int64_t row = -1;
            std::uint64_t number = 0;
            {
              const WithoutInterpreter running(false);
              number = store.seal(self, layout, slot, own_owner(), times, lane, given.values, given.items, &row);
            }
            return std::pair(row, number);
          },
          "store"_a, "intake"_a, "layout"_a, "slot"_a, "times"_a, "owner"_a, "lane"_a, "data"_a.none(),
          "As append_of, with values too; then as seal. None: nothing was done.")
      .def(
          "seal",
          [](const OpenRows& self, Store& store, const SlotLayout& layout, std::uint64_t slot, std::uint64_t times, std::uint64_t lane,
             const nb::tuple& values, const nb::tuple& items) {
            const auto given = values_in(values);
            const auto more = slot_items_in(items);
            std::int64_t row = -1;
            std::uint64_t number = 0;
            {
              nb::gil_scoped_release release;
              number = store.seal(self, layout, slot, own_owner(), times, lane, given, more, &row);
            }
            return std::pair(row, number);
          },
          "store"_a, "layout"_a, "slot"_a, "times"_a, "lane"_a, "values"_a, "items"_a,
          "As append; then appends the row to the store, and frees the slot that it grew in, in one step: (row, ticket number).");
}

}  // namespace

void bind_open_rows(nb::module_& m) {
  bind_slots(m);
  nb::class_<OpenRows, Index> type(m, "OpenRows", nb::is_weak_referenceable(), "Slots of rows that still grow, in memory that `keep` keeps alive.");
  bind_growth(type);
  type.def(
          "__init__", [](OpenRows* self, Address memory, std::uint64_t bytes, nb::handle) { new (self) OpenRows(block(memory, bytes)); },
          "memory"_a, "nbytes"_a, "keep"_a, nb::keep_alive<1, 4>())
      .def_prop_ro("slots", &OpenRows::slots)
      .def_prop_ro("slot_bytes", &OpenRows::slot_bytes)
      .def(
          "open",
          [](OpenRows& self, const Store& store, const SlotLayout& layout) -> std::optional<std::pair<std::uint64_t, std::uint64_t>> {
            const std::uint64_t owner = own_owner();
            std::optional<std::uint64_t> slot;
            {
              nb::gil_scoped_release release;
              store.free_sealed(self);
              slot = self.take(owner, layout);
            }
            if (!slot) return std::nullopt;
            return std::pair(*slot, self.times(*slot));
          },
          "store"_a, "layout"_a, "A free slot, empty, for this process, and how often it was taken; or None.")
      .def("owner", [](const OpenRows& self, std::uint64_t slot) { return self.slot(slot).owner.load(); }, "slot"_a)
      .def("times", &OpenRows::times, "slot"_a, "How often it was taken.")
      .def(
          "is_held", [](const OpenRows& self, std::uint64_t slot, std::uint64_t times) { return self.is_held(slot, own_owner(), times); },
          "slot"_a, "times"_a, "Whether it is this process's, and was taken that often.")
      .def(
          "address", [](const OpenRows& self, std::uint64_t slot) { return reinterpret_cast<Address>(self.data(slot)); }, "slot"_a,
          "Where the caller's part of a slot begins.")
      .def(
          "take_over", [](const OpenRows& self, std::uint64_t slot, std::uint64_t owner) { return self.hand_over(slot, owner, own_owner()); },
          "slot"_a, "owner"_a, "Whether it was that owner's, and is this process's now.")
      .def(
          "free",
          [](const OpenRows& self, std::uint64_t slot) {
            check(self.slot(slot).owner.load() == own_owner(), "an open row of this process");
            self.free(slot);
          },
          "slot"_a)
      .def(
          "free_sealed",
          [](OpenRows& self, const Store& store) {
            nb::gil_scoped_release release;
            store.free_sealed(self);
          },
          "store"_a, "Frees the slots of rows that were sealed by processes which died since.")
      .def("scan", [](const OpenRows&, std::uint64_t, std::uint64_t) {}, "begin"_a, "end"_a, "Rows that grow are none of the store.")
      .def("after_fork", [](const OpenRows&) {});
}

}  // namespace engram
