// Rows that still grow, for Python. The memory is kept alive by the object handed over with its address. An owner is a process, as one
// number; 0: the slot is free.

#include "../core/open_rows.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <utility>

#include "../core/check.h"
#include "../core/participants.h"
#include "../core/store.h"
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

}  // namespace

void bind_open_rows(nb::module_& m) {
  m.def("open_rows_bytes", &OpenRows::bytes, "slots"_a, "slot_bytes"_a, "Bytes of the memory of so many slots.");
  m.def("is_owner_alive", &OpenRows::is_alive, "owner"_a, "Whether that process still runs, as far as this one can see.");
  m.def("own_owner", &own_owner, "This process.");
  m.def(
      "format_open_rows",
      [](Address memory, std::uint64_t bytes, std::uint64_t slots, std::uint64_t slot_bytes) {
        OpenRows::format(block(memory, bytes), slots, slot_bytes);
      },
      "memory"_a, "nbytes"_a, "slots"_a, "slot_bytes"_a, "Writes the page into zeroed memory.");
  nb::class_<OpenRows, Index>(m, "OpenRows", nb::is_weak_referenceable(), "Slots of rows that still grow, in memory that `keep` keeps alive.")
      .def(
          "__init__", [](OpenRows* self, Address memory, std::uint64_t bytes, nb::handle) { new (self) OpenRows(block(memory, bytes)); },
          "memory"_a, "nbytes"_a, "keep"_a, nb::keep_alive<1, 4>())
      .def_prop_ro("slots", &OpenRows::slots)
      .def_prop_ro("slot_bytes", &OpenRows::slot_bytes)
      .def("take", [](const OpenRows& self) { return self.take(own_owner()); }, "A free slot, for this process; or None.")
      .def("owner", [](const OpenRows& self, std::uint64_t slot) { return self.slot(slot).owner.load(); }, "slot"_a)
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
      .def(
          "seal",
          [](const OpenRows& self, Store& store, std::uint64_t slot, std::uint64_t lane, const nb::tuple& columns, const nb::tuple& items) {
            const auto inputs = addresses_in<const std::byte>(columns);
            RaggedWrite write = write_in(store, 1, items);
            std::int64_t row = -1;
            std::uint64_t number = 0;
            {
              nb::gil_scoped_release release;
              number = store.seal(self, slot, own_owner(), lane, inputs, &row, write);
            }
            return std::pair(row, number);
          },
          "store"_a, "slot"_a, "lane"_a, "columns"_a, "items"_a,
          "Appends a row, and frees the slot that it grew in, in one step: (row, ticket number).")
      .def("scan", [](const OpenRows&, std::uint64_t, std::uint64_t) {}, "begin"_a, "end"_a, "Rows that grow are none of the store.")
      .def("after_fork", [](const OpenRows&) {});
}

}  // namespace engram
