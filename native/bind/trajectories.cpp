// The table of trajectories, for Python. Memory crosses as plain addresses, as for the store.

#include "trajectories.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "../core/check.h"
#include "../core/store.h"
#include "../core/trajectories.h"
#include "memory.h"

namespace nb = nanobind;
using namespace nb::literals;
using engram::Address;
using engram::array_of;
using engram::at;
using engram::block;
using engram::Drawn;
using engram::Pass;
using engram::Shape;
using engram::Trajectories;
using engram::Window;

namespace {

// (track, first place, length), one behind the other.
nb::object triples_of(const std::vector<Window>& windows) {
  std::vector<std::int64_t> values;
  values.reserve(3 * windows.size());
  for (const Window& w : windows) {
    for (const std::uint64_t value : {w.track, w.first, w.length}) values.push_back(static_cast<std::int64_t>(value));
  }
  return array_of(std::move(values));
}

// Rows, tickets and marks of windows, each repeated in its last step up to `padded` steps.
void write(const Drawn& drawn, std::uint64_t padded, std::int64_t* rows, std::int64_t* numbers, bool* last, bool* first,
           bool* real, bool* never) {
  std::size_t from = 0, to = 0;
  for (const Window& w : drawn.windows) {
    if (w.length == 0) continue;
    const std::uint64_t steps = std::max(w.length, padded);
    for (std::uint64_t i = 0; i < steps; ++i, ++to) {
      const std::size_t source = from + std::min(i, w.length - 1);
      rows[to] = drawn.rows[source];
      numbers[to] = drawn.numbers[source];
      last[to] = i + 1 == w.length;
      first[to] = i == 0;
      real[to] = i < w.length;
      never[to] = false;
    }
    from += w.length;
  }
}

std::uint64_t total(const Drawn& drawn, std::uint64_t padded) {
  std::uint64_t rows = 0;
  for (const Window& w : drawn.windows) rows += w.length == 0 ? 0 : std::max(w.length, padded);
  return rows;
}

}  // namespace

namespace engram {

void bind_trajectories(nb::module_& m) {
  nb::class_<Shape>(m, "Shape", "Which windows may be drawn, and how likely each is.")
      .def(
          "__init__",
          [](Shape* self, std::uint64_t length, bool strict, bool by_anchor, std::uint64_t left, std::uint64_t right) {
            check(length > 0 && left < length && right < length, "overhangs below the length");
            new (self) Shape{length, strict, by_anchor, left, right};
          },
          "length"_a, "strict"_a = true, "by_anchor"_a = false, "left"_a = 0, "right"_a = 0);
  nb::class_<Drawn>(m, "Drawn", "Windows that were drawn, and the tickets that their rows had.")
      .def("total", &total, "padded"_a = 0, "Rows of all windows, each padded to so many steps.")
      .def_prop_ro("windows", [](const Drawn& self) { return triples_of(self.windows); },
                   "(track, first place, length) of each, one behind the other: an int64 array.")
      .def("lengths",
           [](const Drawn& self) {
             std::vector<std::int64_t> lengths;
             for (const Window& w : self.windows) lengths.push_back(static_cast<std::int64_t>(w.length));
             return lengths;
           })
      .def(
          "write",
          [](const Drawn& self, std::uint64_t padded, Address rows, Address numbers, Address last, Address first,
             Address real, Address never) {
            write(self, padded, at<std::int64_t>(rows), at<std::int64_t>(numbers), at<bool>(last), at<bool>(first),
                  at<bool>(real), at<bool>(never));
          },
          "padded"_a, "rows"_a, "numbers"_a, "last"_a, "first"_a, "real"_a, "never"_a,
          "Writes int64 rows and ticket numbers, and bools: whether a row ends its window, begins it, is not padding; and "
          "false, for a flag that is not stored.");
  nb::class_<Trajectories, Index>(m, "Trajectories", nb::is_weak_referenceable(), "Where trajectories begin and end.")
      .def(
          "__init__",
          [](Trajectories* self, Address control, std::uint64_t control_bytes, Address tickets,
             std::uint64_t tickets_bytes, bool by_id, const std::vector<std::uint64_t>& which,
             const std::vector<Address>& data, const std::vector<std::uint64_t>& row_bytes, std::uint64_t width,
             std::uint64_t window, Address memory, std::uint64_t memory_bytes, const nb::object&) {
            check(data.size() == row_bytes.size(), "one row size per field");
            Boundaries boundaries{by_id, {}, which};
            for (std::size_t i = 0; i < data.size(); ++i) {
              boundaries.fields.push_back({at<std::byte>(data[i]), row_bytes[i]});
            }
            new (self) Trajectories(Control(block(control, control_bytes), block(tickets, tickets_bytes)),
                                    std::move(boundaries), width, window, block(memory, memory_bytes));
          },
          "control"_a, "control_bytes"_a, "tickets"_a, "tickets_bytes"_a, "by_id"_a, "which"_a, "fields"_a,
          "row_bytes"_a, "width"_a, "window"_a, "memory"_a, "memory_bytes"_a, "owner"_a, nb::keep_alive<1, 14>(),
          "`owner` holds all that memory, and lives as long as the table.")
      .def_static("bytes", &Trajectories::bytes, "lanes"_a, "lane_length"_a, "width"_a, "Bytes of a table.")
      .def("catch_up", &Trajectories::catch_up, "steps"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Looks at up to so many steps of each lane that are new; how many are left.")
      .def("forget", &Trajectories::forget, nb::call_guard<nb::gil_scoped_release>())
      .def("after_fork", &Trajectories::after_fork, "In a child that was forked off, before anything else.")
      .def("draw", &Trajectories::draw, "key"_a, "n"_a, "shape"_a, nb::call_guard<nb::gil_scoped_release>(),
           "n windows with replacement; none if there are none to draw.")
      .def(
          "draw_pass",
          [](Trajectories& self, const nb::tuple& state, std::uint64_t key, std::uint64_t n, const Shape& shape,
             bool shuffle, bool drop_last) {
            check(state.size() == 4, "a pass is (key, version, visited, count)");
            Pass pass{nb::cast<std::uint64_t>(state[0]), nb::cast<std::uint64_t>(state[1]),
                      nb::cast<std::uint64_t>(state[2]), nb::cast<std::uint64_t>(state[3])};
            Drawn drawn;
            {
              nb::gil_scoped_release release;
              drawn = self.draw_pass(pass, key, n, shape, shuffle, drop_last);
            }
            return nb::make_tuple(nb::make_tuple(pass.key, pass.version, pass.visited, pass.count), std::move(drawn));
          },
          "state"_a, "key"_a, "n"_a, "shape"_a, "shuffle"_a, "drop_last"_a,
          "The next n trajectories of a pass (key, version, visited, count), one window each: (pass, windows).")
      .def(
          "windows_at",
          [](Trajectories& self, Address rows, std::uint64_t n, const Shape& shape) {
            nb::gil_scoped_release release;
            return self.windows_at(at<std::int64_t>(rows), n, shape);
          },
          "rows"_a, "n"_a, "shape"_a, "The windows that begin at given rows; of length 0 where none does.")
      .def(
          "admissible",
          [](Trajectories& self, Address rows, std::uint64_t n, std::uint64_t length, Address out) {
            nb::gil_scoped_release release;
            self.admissible(at<std::int64_t>(rows), n, length, at<bool>(out));
          },
          "rows"_a, "n"_a, "length"_a, "out"_a, "Whether a window of that length begins at each row: bools.")
      .def("anchors", &Trajectories::anchors, "length"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("anchor", &Trajectories::anchor, "k"_a, "length"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "census",
          [](Trajectories& self) {
            nb::gil_scoped_release release;
            const Census census = self.census();
            nb::gil_scoped_acquire acquire;
            return nb::make_tuple(census.trajectories, census.longest);
          },
          "(trajectories, length of the longest).")
      .def(
          "runs",
          [](Trajectories& self) {
            std::vector<Window> runs;
            {
              nb::gil_scoped_release release;
              runs = self.runs();
            }
            return triples_of(runs);
          },
          "(track, first place, length) of all, track by track, oldest first: an int64 array.")
      .def("row", &Trajectories::row, "track"_a, "place"_a)
      .def_prop_ro("window", &Trajectories::window);
}

}  // namespace engram
