// The store, for Python. It converts, checks, releases the GIL and calls the core.
//
// Memory crosses as plain addresses: whoever calls has checked dtype, shape and contiguity once per storage, and keeps
// the memory alive during the call. Row numbers and counts are checked by the core, always.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <numeric>
#include <string>

#include "../core/check.h"
#include "../core/control.h"
#include "../core/permutation.h"
#include "../core/pool.h"
#include "../core/random.h"
#include "../core/store.h"
#include "../core/wait.h"
#include "expand.h"
#include "hold.h"
#include "memory.h"
#include "pass.h"
#include "priorities.h"
#include "ranking.h"
#include "tensors.h"
#include "trajectories.h"

namespace nb = nanobind;
using namespace nb::literals;
using engram::Address;
using engram::array_of;
using engram::at;
using engram::block;
using engram::Control;
using engram::Field;
using engram::Participants;
using engram::Store;

namespace {

// Numbers of a Python tuple; short ones stay on the stack.
template <class T>
class Values {
 public:
  explicit Values(const nb::tuple& values) : size_(values.size()) {
    if (size_ > kInline) heap_.resize(size_);
    data_ = size_ > kInline ? heap_.data() : stack_;
    for (std::size_t i = 0; i < size_; ++i) {
      const std::uint64_t value = PyLong_AsUnsignedLongLong(PyTuple_GetItem(values.ptr(), static_cast<Py_ssize_t>(i)));
      if (value == ~std::uint64_t{0} && PyErr_Occurred()) throw nb::python_error();
      if constexpr (std::is_pointer_v<T>) {
        data_[i] = reinterpret_cast<T>(static_cast<Address>(value));
      } else {
        data_[i] = static_cast<T>(value);
      }
    }
  }
  std::span<const T> span() const { return {data_, size_}; }

 private:
  static constexpr std::size_t kInline = 16;
  std::size_t size_;
  T stack_[kInline];
  std::vector<T> heap_;
  T* data_;
};

using Inputs = Values<const std::byte*>;
using Outputs = Values<std::byte*>;
using Which = Values<std::uint64_t>;

std::string boot_id_of(const Store& store) {
  const auto& id = store.control().lock_page().boot_id;
  return {id, strnlen(id, sizeof id)};
}

// From now on the core's Error is this exception of Python's.
template <class Error>
void raise_as(const nb::type_object& kind) {
  nb::register_exception_translator(
      [](const std::exception_ptr& error, void* raised) {
        try {
          std::rethrow_exception(error);
        } catch (const Error& known) {
          const std::string message = std::string(known.what()) + ".";
          PyErr_SetString(static_cast<PyObject*>(raised), message.c_str());
        }
      },
      kind.inc_ref().ptr());
}

void bind_participants(nb::module_& m) {
  m.def("start_time_of", &engram::start_time_of, "pid"_a, "When a process began, as the kernel counts it; 0: there is none.");
  m.def("pid_namespace", &engram::pid_namespace, "What names this process's view of process numbers.");
  nb::class_<Participants>(m, "Participants", "Who is attached to a store that processes share.")
      .def(
          "__init__",
          [](Participants* self, Address control, std::uint64_t control_bytes, Address tickets,
             std::uint64_t tickets_bytes, int file) {
            new (self) Participants(Control(block(control, control_bytes), block(tickets, tickets_bytes)), file);
          },
          "control"_a, "control_bytes"_a, "tickets"_a, "tickets_bytes"_a, "file"_a,
          "`file`: a descriptor of `alive`, which stays open for as long as this lives.")
      .def("leave", &Participants::leave, "Gives this process's entry back.")
      .def_prop_ro("joined", &Participants::joined, "Whether this process holds an entry.")
      .def_prop_ro("others", &Participants::others, "Whether another process holds an entry.");
}

void bind_store(nb::module_& m) {
  nb::class_<Store>(m, "Store", "Fields, tickets and lane cursors at given addresses, which must outlive it.")
      .def(
          "__init__",
          [](Store* self, Address control, std::uint64_t control_bytes, Address tickets, std::uint64_t tickets_bytes,
             const nb::tuple& data, const nb::tuple& row_bytes, std::uint64_t participant) {
            const Outputs addresses(data);
            const Which sizes(row_bytes);
            engram::check(data.size() == row_bytes.size(), "one row size per field");
            std::vector<Field> fields;
            for (std::size_t i = 0; i < data.size(); ++i) fields.push_back({addresses.span()[i], sizes.span()[i]});
            new (self) Store(Control(block(control, control_bytes), block(tickets, tickets_bytes)), std::move(fields),
                             participant);
          },
          "control"_a, "control_bytes"_a, "tickets"_a, "tickets_bytes"_a, "fields"_a, "row_bytes"_a,
          "participant"_a = 0)
      .def("add_field", [](Store& self, Address data, std::uint64_t row_bytes) {
             self.add_field({at<std::byte>(data), row_bytes});
           }, "data"_a, "row_bytes"_a,
           "One field more, which holds what the live rows have; nobody else may be using the store meanwhile.")
      .def(
          "append_row",
          [](Store& self, std::uint64_t lane, const nb::tuple& columns) {
            const Inputs inputs(columns);
            std::int64_t row = -1;
            std::uint64_t number = 0;
            {
              nb::gil_scoped_release release;
              number = self.append(lane, 1, inputs.span(), &row);
            }
            return nb::make_tuple(row, number);
          },
          "lane"_a, "columns"_a, "Appends one row: (row, ticket number).")
      .def(
          "append",
          [](Store& self, std::uint64_t lane, std::uint64_t n, const nb::tuple& columns, Address rows) {
            const Inputs inputs(columns);
            nb::gil_scoped_release release;
            return self.append(lane, n, inputs.span(), at<std::int64_t>(rows));
          },
          "lane"_a, "n"_a, "columns"_a, "rows"_a, "Appends rows; the first ticket number.")
      .def(
          "append_by_lane",
          [](Store& self, Address lane_of, std::uint64_t n, const nb::tuple& columns, Address rows) {
            const Inputs inputs(columns);
            nb::gil_scoped_release release;
            return self.append_by_lane(at<std::int64_t>(lane_of), n, inputs.span(), at<std::int64_t>(rows));
          },
          "lane_of"_a, "n"_a, "columns"_a, "rows"_a)
      .def(
          "scatter",
          [](Store& self, Address rows, std::uint64_t n, const nb::tuple& which, const nb::tuple& columns, bool grow,
             Address pick, std::uint64_t of) {
            const Which fields(which);
            const Inputs inputs(columns);
            nb::gil_scoped_release release;
            return self.scatter(at<std::int64_t>(rows), n, fields.span(), inputs.span(), grow, at<std::int64_t>(pick), of);
          },
          "rows"_a, "n"_a, "which"_a, "columns"_a, "grow"_a, "pick"_a = 0, "of"_a = 0,
          "Writes rows by number; the first ticket number. `pick`: their places among the `of` rows of the columns.")
      .def(
          "gather",
          [](const Store& self, Address rows, std::uint64_t n, const nb::tuple& which, const nb::tuple& batch,
             Address expected, Address numbers) {
            const Which fields(which);
            const Outputs outputs(batch);
            std::vector<std::int64_t> moved;
            {
              nb::gil_scoped_release release;
              moved = self.gather(at<std::int64_t>(rows), n, fields.span(), outputs.span(), at<std::int64_t>(expected),
                                  at<std::int64_t>(numbers));
            }
            return moved;
          },
          "rows"_a, "n"_a, "which"_a, "batch"_a, "expected"_a, "numbers"_a)
      .def(
          "take",
          [](const Store& self, const engram::Layout& layout, Address rows, std::uint64_t n, Address expected) {
            engram::Rooms rooms;
            std::vector<std::int64_t> moved;
            {
              nb::gil_scoped_release release;
              rooms.add(layout, static_cast<std::int64_t>(n));
              moved = self.gather(at<std::int64_t>(rows), n, self.all(), rooms.first(self.fields()),
                                  at<std::int64_t>(expected), nullptr);
            }
            return nb::make_tuple(std::move(rooms).tensors(static_cast<std::int64_t>(n)), moved);
          },
          "layout"_a, "rows"_a, "n"_a, "expected"_a, "As gather, of all fields into new tensors: (tensors, moved).")
      .def(
          "sample_uniform",
          [](const Store& self, std::uint64_t key, std::uint64_t n, const nb::tuple& batch, Address rows, Address numbers) {
            const Outputs outputs(batch);
            nb::gil_scoped_release release;
            self.sample_uniform(key, n, outputs.span(), at<std::int64_t>(rows), at<std::int64_t>(numbers));
          },
          "key"_a, "n"_a, "batch"_a, "rows"_a, "numbers"_a)
      .def(
          "draw_uniform",
          [](const Store& self, const engram::Layout& layout, Address key_at, std::uint64_t n, bool with_rows,
             bool with_numbers) {
            const std::uint64_t key = *at<const std::uint64_t>(key_at);  // read before the GIL is released
            engram::check(n < std::uint64_t{1} << 48, "a batch of more rows than there is memory");
            const auto size = static_cast<std::int64_t>(n);
            engram::Rooms rooms;
            {
              nb::gil_scoped_release release;
              rooms.add(layout, size);
              const auto extra = [&](bool wanted) -> std::int64_t* {
                if (!wanted) return nullptr;
                rooms.add(engram::kNumbers, size);
                return rooms.at<std::int64_t>(rooms.size() - 1);
              };
              std::int64_t* rows = extra(with_rows);
              std::int64_t* numbers = extra(with_numbers);
              self.sample_uniform(key, n, rooms.first(self.fields()), rows, numbers);
            }
            return std::move(rooms).tensors(size);
          },
          "layout"_a, "key_at"_a, "n"_a, "with_rows"_a, "with_numbers"_a,
          "As sample_uniform, with the key at an address, into new tensors: one per field, then int64 [n] for the rows and "
          "for their ticket numbers, where wanted.")
      .def(
          "draw_ranked",
          [](const Store& self, const engram::Layout& layout, std::uint64_t key, std::uint64_t size, std::uint64_t start,
             std::uint64_t n, bool shuffle, bool with_numbers) {
            engram::check(start <= size && n <= size - start, "ranks below the number of rows");
            const auto count = static_cast<std::int64_t>(n);
            engram::Rooms rooms;
            {
              nb::gil_scoped_release release;
              rooms.add(layout, count);
              rooms.add(engram::kNumbers, count);
              auto* ranks = rooms.at<std::int64_t>(self.fields());
              if (with_numbers) rooms.add(engram::kNumbers, count);
              if (shuffle && n > 0) {
                engram::Permutation(key, size)(start, n, ranks);
              } else {
                std::iota(ranks, ranks + n, static_cast<std::int64_t>(start));
              }
              self.read_ranked(ranks, n, rooms.first(self.fields()),
                               with_numbers ? rooms.at<std::int64_t>(self.fields() + 1) : nullptr);
            }
            return std::move(rooms).tensors(count);
          },
          "layout"_a, "key"_a, "size"_a, "start"_a, "n"_a, "shuffle"_a, "with_numbers"_a,
          "The live rows of ranks start ... in the order of a key, of `size` ones, in new tensors: one per field, then the "
          "rows and, if wanted, their ticket numbers.")
      .def(
          "numbers_of",
          [](const Store& self, Address rows, std::uint64_t n, Address numbers) {
            nb::gil_scoped_release release;
            self.numbers_of(at<std::int64_t>(rows), n, at<std::int64_t>(numbers));
          },
          "rows"_a, "n"_a, "numbers"_a)
      .def(
          "changes",
          [](const Store& self, std::uint64_t since) {
            std::vector<std::int64_t> rows, numbers;
            std::uint64_t next = 0;
            {
              nb::gil_scoped_release release;
              next = self.changes(since, rows, numbers);
            }
            return nb::make_tuple(array_of(std::move(rows)), array_of(std::move(numbers)), next);
          },
          "since"_a, "Rows whose number is at least `since`: (rows, numbers, what to ask for the next time).")
      .def(
          "holes",
          [](const Store& self) {
            std::vector<std::int64_t> holes;
            {
              nb::gil_scoped_release release;
              holes = self.holes();
            }
            return array_of(std::move(holes));
          },
          "The rows inside the extent that are not whole, in row order: an int64 array.")
      .def(
          "join", [](Store& self, std::shared_ptr<Participants> participants) { self.join(std::move(participants)); },
          "participants"_a, "From now on other processes share the store.")
      .def("take_words", [](Store& self, const Store& from) { self.control().take_words(from.control()); }, "from"_a,
           "Tickets, cursors and counters of another store.")
      .def("check_closed", [](const Store& self) { self.control().check_closed(); }, "What a store that was closed in order says of itself.")
      .def(
          "reset_locks",
          [](Store& self, bool clean) {
            self.control().lock_page().placing.format();
            if (clean) self.control().lock_page().pause.store(0);  // else recover() has to know
          },
          "clean"_a, "For the only process that has the store open.")
      .def(
          "placing",
          [](nb::object self, nb::tuple locks, bool shared) {
            Store& store = nb::cast<Store&>(self);
            if (!shared) return std::make_unique<engram::Hold>(self, std::move(locks), [] {}, [](bool) {});
            return std::make_unique<engram::Hold>(
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
          "mend",
          [](const Store& self) {
            nb::gil_scoped_release release;
            return self.mend();
          },
          "Puts in order what dead processes left; how many they were.")
      .def(
          "on_new_index",
          [](Store& self, nb::callable attach) {
            // Held weakly by nobody: the callable must not hold the store.
            auto held = std::shared_ptr<nb::callable>(new nb::callable(std::move(attach)), [](nb::callable* callable) {
              nb::gil_scoped_acquire acquire;
              delete callable;
            });
            self.on_new_index([held] {
              nb::gil_scoped_acquire acquire;
              (*held)();
            });
          },
          "attach"_a, "Called by a write that finds that another process has made an index.")
      .def("knows_indexes", &Store::knows_indexes, "epoch"_a)
      .def_prop_ro("index_epoch", [](const Store& self) { return self.control().counters().index_epoch.load(); })
      .def("next_index_epoch",
           [](Store& self) { return self.control().counters().index_epoch.fetch_add(1, std::memory_order_seq_cst) + 1; })
      .def("attach", &Store::attach, "index"_a, nb::keep_alive<1, 2>(), "Tells an index of every write from now on.")
      .def(
          "empty",
          [](Store& self, bool keep_write_count) {
            nb::gil_scoped_release release;
            self.empty(keep_write_count);
          },
          "keep_write_count"_a)
      .def(
          "pausing",
          [](nb::object self, nb::tuple locks) {
            Store& store = nb::cast<Store&>(self);
            return std::make_unique<engram::Hold>(
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
      .def("forget_holds", &Store::forget_holds, "In a forked child: what its parent has paused is not paused by it.")
      .def_prop_ro("paused", &Store::paused)
      .def(
          "read_lanes", [](const Store& self, Address lanes) { self.control().read_lanes(at<Control::LaneWords>(lanes)); },
          "lanes"_a, "int64 [lanes, 4]: position, live rows.")
      .def(
          "read_numbers",
          [](const Store& self, std::uint64_t clock, Address lanes, Address numbers, std::uint64_t rows) {
            nb::gil_scoped_release release;
            self.control().read_numbers(clock, at<const Control::LaneWords>(lanes), at<std::int64_t>(numbers), rows);
          },
          "clock"_a, "lanes"_a, "numbers"_a, "rows"_a, "int64 [rows]: ticket numbers below the clock.")
      .def(
          "replacing",
          [](nb::object self) {
            Store& store = nb::cast<Store&>(self);
            return std::make_unique<engram::Hold>(
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
          "A context manager: empties a paused store, whose rows may be written to directly inside. If that fails it stays empty.")
      .def(
          "replaced",
          [](Store& self, std::uint64_t clock, Address lanes, Address numbers) {
            nb::gil_scoped_release release;
            self.replaced(clock, at<const Control::LaneWords>(lanes), at<const std::int64_t>(numbers));
          },
          "clock"_a, "lanes"_a, "numbers"_a, "The rows are there, as read_lanes and read_numbers would say.")
      .def(
          "fill",
          [](Store& self) {
            nb::gil_scoped_release release;
            self.control().fill();
          },
          "Commits every row as it stands.")
      .def(
          "recover",
          [](Store& self) {
            nb::gil_scoped_release release;
            const Control::Repair repair = self.recover();
            nb::gil_scoped_acquire acquire;
            return nb::make_tuple(repair.claims, repair.voided, repair.gaps);
          },
          "For the only process attached: (claims of dead writers, rows left half written, rows never begun).")
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
          "(rows inside each lane's extent, row that each lane writes next).")
      .def("size", [](const Store& self) { return self.control().size(); })
      .def_prop_ro("capacity", [](const Store& self) { return self.control().capacity(); })
      .def_prop_ro("lanes", [](const Store& self) { return self.control().lanes(); })
      .def_prop_ro("lane_length", [](const Store& self) { return self.control().lane_length(); })
      .def_prop_ro("schema_sum", [](const Store& self) { return self.control().schema_sum(); })
      .def_prop_ro("next_ticket", [](const Store& self) { return engram::counted(self.control().counters().next_ticket); })
      .def_prop_rw(
          "write_count", [](const Store& self) { return engram::counted(self.control().counters().write_count); },
          [](Store& self, std::uint64_t n) { self.control().counters().write_count.store(n); })
      .def_prop_ro("void_rows", [](const Store& self) { return self.control().counters().void_rows.load(); })
      .def_prop_ro("lapped_rows", [](const Store& self) { return self.control().counters().lapped_rows.load(); })
      .def_prop_ro("redraws", [](const Store& self) { return self.control().counters().redraws.load(); })
      .def_prop_ro("in_flight",
                   [](Store& self) {
                     std::uint64_t claims = 0;
                     const Control& control = self.control();
                     for (std::uint64_t i = 0; i < engram::kParticipants; ++i) {
                       for (const auto& claim : control.participant(i).claims) claims += claim.t0.load() != 0;
                     }
                     return claims;
                   })
      .def_prop_rw(
          "clean", [](const Store& self) { return self.control().lock_page().clean.load() == 1; },
          [](Store& self, bool clean) { self.control().lock_page().clean.store(clean ? 1 : 0); })
      .def_prop_rw(
          "pid_namespace", [](const Store& self) { return self.control().lock_page().pid_namespace; },
          [](Store& self, std::uint64_t name) { self.control().lock_page().pid_namespace = name; })
      .def_prop_rw("boot_id", &boot_id_of, [](Store& self, const std::string& id) {
        auto& field = self.control().lock_page().boot_id;
        std::memset(field, 0, sizeof field);
        std::memcpy(field, id.data(), std::min(id.size(), sizeof field - 1));
      });
}

}  // namespace

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);  // what a program holds at its end is not a leak
  m.doc() = "The native core of engram. Private: use the classes of the package.";
  m.def("raise_stalled_as", &raise_as<engram::Stalled>, "kind"_a, "The exception of waits that ended in vain, from now on.");
  m.def("raise_damaged_as", &raise_as<engram::Damaged>, "kind"_a,
        "The exception of shared memory that says what no store says, from now on.");
  m.def("wait_limit", [] { return std::chrono::duration<double>(engram::wait_limit.load()).count(); },
        "Seconds after which a wait for another thread or process ends in vain.");
  m.def(
      "set_wait_limit",
      [](double seconds) {
        engram::wait_limit.store(std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000)));
      },
      "seconds"_a, "For tests.");
  nb::exception<engram::NothingLive>(m, "NothingLive", PyExc_RuntimeError);
  nb::class_<engram::Index>(m, "Index", "What a store keeps up to date with every write.");
  engram::bind_hold(m);
  bind_participants(m);
  bind_store(m);
  engram::bind_pass(m);
  engram::bind_priorities(m);
  engram::bind_ranking(m);
  engram::bind_trajectories(m);
  engram::bind_expand(m);
  engram::bind_tensors(m);
  m.def("control_bytes", &engram::control_bytes, "lanes"_a, "Size of the control block of a store with that many lanes.");
  m.def(
      "format_control",
      [](Address control, std::uint64_t bytes, std::uint64_t capacity, std::uint64_t lanes, std::uint64_t schema_sum) {
        engram::check(lanes >= 1, "at least one lane");
        Control::format(block(control, bytes), {capacity, lanes, capacity / lanes}, schema_sum);
      },
      "control"_a, "control_bytes"_a, "capacity"_a, "lanes"_a, "schema_sum"_a,
      "Writes the header of a new store into zeroed memory.");
  m.def(
      "check_words",
      [](std::uint64_t lane_length, std::uint64_t clock, Address lanes, std::uint64_t lane_count, Address numbers) {
        nb::gil_scoped_release release;
        Control::check_words({lane_length * lane_count, lane_count, lane_length}, clock,
                             at<const Control::LaneWords>(lanes), at<const std::int64_t>(numbers));
      },
      "lane_length"_a, "clock"_a, "lanes"_a, "lane_count"_a, "numbers"_a, "Raises ValueError unless a store may say so.");
  m.def(
      "place_runs",
      [](Address from, std::int64_t begin, std::uint64_t n, Address first, Address target, Address count,
         std::uint64_t runs, Address to, std::uint64_t capacity, std::uint64_t row_bytes) {
        nb::gil_scoped_release release;
        engram::place_runs(at<std::byte>(from), begin, n,
                           {at<std::int64_t>(first), at<std::int64_t>(target), at<std::int64_t>(count), runs},
                           {at<std::byte>(to), row_bytes}, capacity);
      },
      "source"_a, "begin"_a, "n"_a, "first"_a, "target"_a, "count"_a, "runs"_a, "to"_a, "capacity"_a, "row_bytes"_a,
      "Copies what runs want of rows [begin, begin + n) of a source into a field.");
  m.def(
      "permute",
      [](std::uint64_t key, std::uint64_t n, std::uint64_t start, std::uint64_t count, Address out) {
        nb::gil_scoped_release release;
        engram::Permutation(key, n)(start, count, at<std::int64_t>(out));
      },
      "key"_a, "n"_a, "start"_a, "count"_a, "out"_a, "Elements [start, start + count) of a random permutation of [0, n).");
  m.def(
      "uniform",
      [](std::uint64_t key, std::uint64_t n, std::uint64_t count, Address out) {
        engram::check(n > 0, "nothing to draw from");
        nb::gil_scoped_release release;
        const engram::Random random(key);
        for (std::uint64_t i = 0; i < count; ++i) at<std::int64_t>(out)[i] = static_cast<std::int64_t>(random.below(n, i));
      },
      "key"_a, "n"_a, "count"_a, "out"_a, "Numbers drawn uniformly from [0, n), with replacement.");
  m.def(
      "set_num_threads",
      [](std::uint64_t n) {
        nb::gil_scoped_release release;
        engram::set_num_threads(n);
      },
      "n"_a);
  m.def("num_threads", [] { return engram::num_threads(); });
}
