// What a store says of its rows, for Python: processes that share it, pauses, indexes, snapshots, recovery and counters.

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "../core/check.h"
#include "../core/control.h"
#include "../core/meter.h"
#include "../core/store.h"
#include "column.h"
#include "hold.h"
#include "memory.h"
#include "store.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

std::string boot_id_of(const Store& store) {
  const auto& id = store.control().lock_page().boot_id;
  return {id, strnlen(id, sizeof id)};
}

void bind_participants(nb::module_& m) {
  m.def("start_time_of", &start_time_of, "pid"_a, "When a process began, as the kernel counts it; 0: there is none.");
  m.def("pid_namespace", &pid_namespace, "What names this process's view of process numbers.");
  nb::class_<Participants>(m, "Participants", "The processes attached to a shared store.")
      .def(
          "__init__",
          [](Participants* self, Address control, std::uint64_t control_bytes, Address tickets,
             std::uint64_t tickets_bytes, int file) {
            new (self) Participants(Control(block(control, control_bytes), block(tickets, tickets_bytes)), file);
          },
          "control"_a, "control_bytes"_a, "tickets"_a, "tickets_bytes"_a, "file"_a,
          "`file`: a descriptor of `alive`, which stays open for as long as this lives.")
      .def("leave", &Participants::leave, "Gives this process's entry back.")
      .def_prop_ro("number", &Participants::number, "The entry that this process holds, once it has joined.")
      .def_prop_ro("joined", &Participants::joined, "Whether this process holds an entry.")
      .def_prop_ro("others", &Participants::others, "Whether another process holds an entry.");
}

// Processes that share the store, and what those that died left behind.
void bind_sharing(nb::class_<Store>& type) {
  type
      .def(
          "join", [](Store& self, std::shared_ptr<Participants> participants) { self.join(std::move(participants)); },
          "participants"_a, "From now on other processes share the store.")
      .def(
          "reset_locks",
          [](Store& self, bool clean) {
            self.control().writable().lock_page().placing.format();
            self.limits().forget_waits();
            if (clean) self.control().lock_page().pause.store(0);  // else recover() has to know
          },
          "clean"_a, "For the only process that has the store open.")
      .def(
          "reclaim",
          [](const Store& self) {
            nb::gil_scoped_release release;
            return self.reclaim();
          },
          "Recovers what dead participants left; how many there were.")
      .def(
          "recover",
          [](Store& self) {
            nb::gil_scoped_release release;
            const Control::Repair repair = self.recover();
            nb::gil_scoped_acquire acquire;
            return nb::make_tuple(repair.claims, repair.voided, repair.gaps);
          },
          "For the only process attached: (claims of dead writers, rows left half written, rows never begun).");
}

// What a process holds for a while: pauses, placing, replacing.
void bind_holds(nb::class_<Store>& type) {
  type
      .def(
          "placing",
          [](nb::object self, nb::tuple locks, bool shared) {
            Store& store = nb::cast<Store&>(self);
            if (!shared) return std::make_unique<Hold>(self, std::move(locks), [] {}, [](bool) {});
            return std::make_unique<Hold>(
                self, std::move(locks),
                [&store] {
                  nb::gil_scoped_release release;
                  store.begin_placing();
                },
                [&store](bool) { store.end_placing(); });
          },
          "locks"_a, "shared"_a,
          "A context manager: inside no other process looks for rows before it writes. `locks` keep other threads out.")
      .def(
          "pausing",
          [](nb::object self, nb::tuple locks) {
            Store& store = nb::cast<Store&>(self);
            return std::make_unique<Hold>(
                self, std::move(locks),
                [&store] {
                  nb::gil_scoped_release release;
                  store.begin_pause();
                },
                [&store](bool failed) {
                  nb::gil_scoped_release release;
                  store.end_pause(failed);
                });
          },
          "locks"_a,
          "A context manager: inside, no process writes, and no write is under way. Waits for those, bounded. `locks` "
          "keep other threads out; the thread that has them may come in again.")
      .def(
          "left_behind",
          [](const Store& self, std::uint64_t row) {
            return self.control().left_behind(row, self.control().word(row).load(std::memory_order_acquire));
          },
          "row"_a, "Whether a process that was dead when a store that is only read was opened left the row half written, or reserved it.")
      .def("forget_holds", &Store::forget_holds, "In a forked child: what its parent has paused is not paused by it.")
      .def_prop_ro("paused", &Store::paused)
      .def(
          "replacing",
          [](nb::object self) {
            Store& store = nb::cast<Store&>(self);
            return std::make_unique<Hold>(
                self, nb::tuple(),
                [&store] {
                  nb::gil_scoped_release release;
                  store.begin_replacing(false);
                },
                [&store](bool failed) {
                  nb::gil_scoped_release release;
                  if (failed) store.end_replacing();
                });
          },
          "A context manager: empties a paused store, whose rows may be written to directly inside. If that fails it stays empty.");
}

// What calls a callable of Python's. The store keeps that alive: so it must not keep the store alive.
std::function<void()> calling(nb::callable callable) {
  auto held = std::shared_ptr<nb::callable>(new nb::callable(std::move(callable)), [](nb::callable* callable) {
    nb::gil_scoped_acquire acquire;
    delete callable;
  });
  return [held] {
    nb::gil_scoped_acquire acquire;
    (*held)();
  };
}

// Indexes, which hear of every write, and fields.
void bind_indexes(nb::class_<Store>& type) {
  type
      .def(
          "on_new_index",
          [](Store& self, nb::callable attach) { self.on_new_index(calling(std::move(attach))); },
          "attach"_a, "Called by a write that finds that another process has made an index.")
      .def("knows_indexes", &Store::knows_indexes, "epoch"_a)
      .def_prop_ro("index_epoch", [](const Store& self) { return self.control().counters().index_epoch.load(); })
      .def("next_index_epoch",
           [](Store& self) { return self.control().writable().counters().index_epoch.fetch_add(1, std::memory_order_seq_cst) + 1; })
      .def(
          "on_new_fields",
          [](Store& self, nb::callable adopt) { self.on_new_fields(calling(std::move(adopt))); },
          "adopt"_a, "Called by a call that finds that another process has added fields.")
      .def("find_fields", [](const Store& self) { self.find_fields(); }, "Adopts the fields that another process has added.")
      .def("knows_fields", &Store::knows_fields, "epoch"_a)
      .def_prop_ro("fields_epoch", [](const Store& self) { return self.control().counters().fields_epoch.load(); })
      .def("next_fields_epoch",
           [](Store& self) { return self.control().writable().counters().fields_epoch.fetch_add(1, std::memory_order_seq_cst) + 1; })
      .def("attach", &Store::attach, "index"_a, nb::keep_alive<1, 2>(), "Tells an index of every write from now on.");
}

// What the store says of its rows, read and put.
void bind_state(nb::class_<Store>& type) {
  type
      .def("copy_state", [](Store& self, const Store& from) { self.control().writable().copy_state(from.control()); }, "from"_a,
           "Copies tickets, cursors and counters of another store.")
      .def("check_closed", [](const Store& self) { self.control().check_closed(); }, "What a store that was closed in order says of itself.")
      .def(
          "read_lanes", [](const Store& self, Address lanes) { self.control().read_lanes(at<Control::LaneState>(lanes)); },
          "lanes"_a, "int64 [lanes, 4]: position, live rows.")
      .def(
          "read_numbers",
          [](const Store& self, std::uint64_t clock, Address lanes, Address numbers, std::uint64_t rows, Address writes) {
            nb::gil_scoped_release release;
            self.control().read_numbers(clock, at<const Control::LaneState>(lanes), at<std::int64_t>(numbers), rows, at<std::int64_t>(writes));
          },
          "clock"_a, "lanes"_a, "numbers"_a, "rows"_a, "writes"_a,
          "int64 [rows]: ticket numbers below the clock; and, unless null, the numbers of the rows' writes.")
      .def(
          "replaced",
          [](Store& self, std::uint64_t clock, Address lanes, Address numbers, Address writes) {
            nb::gil_scoped_release release;
            return self.replaced(clock, at<const Control::LaneState>(lanes), at<const std::int64_t>(numbers), at<const std::int64_t>(writes));
          },
          "clock"_a, "lanes"_a, "numbers"_a, "writes"_a,
          "The rows are there, as read_lanes and read_numbers would say: by how much their tickets are larger here.")
      .def(
          "extent",
          [](const Store& self) {
            const Control& control = self.control();
            nb::list filled, seam;
            for (std::uint64_t lane = 0; lane < control.lanes(); ++lane) {
              filled.append(control.filled(lane));
              seam.append(control.cursor_row(lane));
            }
            return nb::make_tuple(nb::tuple(filled), nb::tuple(seam));
          },
          "(rows inside each lane's extent, row that each lane writes next).");
}

// Geometry and counters.
void bind_counters(nb::class_<Store>& type) {
  type
      .def("size", [](const Store& self) { return self.control().size(); })
      .def(
          "next_position",
          [](const Store& self, std::uint64_t lane) {
            check(lane < self.control().lanes(), "a lane outside the store");
            return self.control().end(lane);
          },
          "lane"_a, "Position of the lane's next step: what append_at can begin with.")
      .def_prop_ro("capacity", [](const Store& self) { return self.control().capacity(); })
      .def_prop_ro("lanes", [](const Store& self) { return self.control().lanes(); })
      .def_prop_ro("lane_length", [](const Store& self) { return self.control().lane_length(); })
      .def_prop_ro("schema_sum", [](const Store& self) { return self.control().schema_sum(); })
      .def_prop_ro("next_ticket", [](const Store& self) { return counted(self.control().counters().next_ticket); })
      .def_prop_rw(
          "write_count", [](const Store& self) { return counted(self.control().counters().write_count); },
          [](Store& self, std::uint64_t n) { Meter(self.control().writable()).set_write_count(n); })
      .def_prop_ro("void_rows", [](const Store& self) { return self.control().void_rows(); })
      .def_prop_ro("lapped_rows", [](const Store& self) { return self.control().counters().lapped_rows.load(); })
      .def_prop_ro("redraws", [](const Store& self) { return self.control().redraws(); })
      .def_prop_ro("patches", [](const Store& self) { return self.control().counters().patches.load(); })
      .def_prop_ro("patches_dropped", [](const Store& self) { return self.control().counters().patches_dropped.load(); })
      .def_prop_ro("in_flight",
                   [](Store& self) {
                     std::uint64_t claims = 0;
                     const Control& control = self.control();
                     for (std::uint64_t i = 0; i < kParticipants; ++i) {
                       for (const auto& claim : control.participant(i).claims) claims += claim.t0.load() != 0;
                     }
                     return claims;
                   })
      .def_prop_rw(
          "clean", [](const Store& self) { return self.control().lock_page().clean.load() == 1; },
          [](Store& self, bool clean) { self.control().writable().lock_page().clean.store(clean ? 1 : 0); })
      .def_prop_rw(
          "pid_namespace", [](const Store& self) { return self.control().lock_page().pid_namespace; },
          [](Store& self, std::uint64_t name) { self.control().writable().lock_page().pid_namespace = name; })
      .def_prop_rw("boot_id", &boot_id_of, [](Store& self, const std::string& id) {
        auto& field = self.control().writable().lock_page().boot_id;
        std::memset(field, 0, sizeof field);
        std::memcpy(field, id.data(), std::min(id.size(), sizeof field - 1));
      });
}

}  // namespace

void bind_store_control(nb::module_& m, nb::class_<Store>& type) {
  bind_participants(m);
  bind_sharing(type);
  bind_holds(type);
  bind_indexes(type);
  bind_state(type);
  bind_counters(type);
  m.def("control_bytes", &control_bytes, "lanes"_a, "Size of the control block of a store with that many lanes.");
  m.def(
      "format_control",
      [](Address control, std::uint64_t bytes, std::uint64_t capacity, std::uint64_t lanes, std::uint64_t schema_sum) {
        check(lanes >= 1, "at least one lane");
        Control::format(block(control, bytes), {capacity, lanes, capacity / lanes}, schema_sum);
      },
      "control"_a, "control_bytes"_a, "capacity"_a, "lanes"_a, "schema_sum"_a,
      "Writes the header of a new store into zeroed memory.");
  m.def(
      "check_state",
      [](std::uint64_t lane_length, std::uint64_t clock, Address lanes, std::uint64_t lane_count, Address numbers, Address writes) {
        nb::gil_scoped_release release;
        Control::check_state({lane_length * lane_count, lane_count, lane_length}, clock,
                             at<const Control::LaneState>(lanes), at<const std::int64_t>(numbers), at<const std::int64_t>(writes));
      },
      "lane_length"_a, "clock"_a, "lanes"_a, "lane_count"_a, "numbers"_a, "writes"_a, "Raises ValueError unless a store may say so.");
  m.def(
      "place_runs",
      [](Address from, std::int64_t begin, std::uint64_t n, Numbers first, Numbers target, Numbers count, Address to,
         std::uint64_t capacity, std::uint64_t row_bytes, std::uint64_t stride) {
        nb::gil_scoped_release release;
        place_runs(at<std::byte>(from), begin, n, {first.data, target.of(first.size), count.of(first.size), first.size},
                   {at<std::byte>(to), row_bytes, stride}, capacity);
      },
      "source"_a, "begin"_a, "n"_a, "first"_a, "target"_a, "count"_a, "to"_a, "capacity"_a, "row_bytes"_a, "stride"_a,
      "Copies what runs want of rows [begin, begin + n) of a source into a field.");
}

}  // namespace engram
