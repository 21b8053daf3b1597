// Goals of hindsight, for Python. Memory crosses as plain addresses.

#include "goals.h"

#include "../core/goals.h"

#include <nanobind/stl/vector.h>

#include <vector>

#include "../core/check.h"
#include "column.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;
namespace engram {
namespace {

// Which field is read of which step.
struct BoundGoals {
  Goal goal;
  std::uint64_t field;
  RowSpec spec;
};

nb::tuple read(const BoundGoals& self, const Store& store, Trajectories& table, Numbers rows, Numbers expected, Numbers places,
               std::uint64_t n, std::uint64_t key, std::uint64_t attempt) {
  check(n < std::uint64_t{1} << 48, "a batch of more rows than there is memory");
  const GoalDraw draw{self.goal, key, attempt};
  const auto count = static_cast<std::int64_t>(n);
  OutputBuffers buffers;
  std::vector<std::int64_t> missing;
  {
    nb::gil_scoped_release release;
    buffers.add(self.spec, count);
    missing = read_goals(store, table, draw, self.field, rows.first(n), expected.first(n), places.of_any(n), n, buffers.at<std::byte>(0));
  }
  return nb::make_tuple(std::move(buffers).tensors(count)[0], missing);
}

// The first n rows of a column: a view.
nb::object head_of(const nb::handle& column, std::int64_t n) {
  Values seen;
  if (!look_at_tensor(column.ptr(), seen) || !seen.contiguous() || seen.ndim < 1 || seen.shape[0] < n) {
    return column.attr("narrow")(0, 0, n);
  }
  const RowSpec spec{seen.code, seen.bits, {seen.shape + 1, seen.shape + seen.ndim}};
  return view_of(spec, const_cast<std::byte*>(seen.data), n, 0, column);
}

nb::list put(const nb::list& columns, const std::vector<std::uint64_t>& targets, const nb::object& values, std::int64_t n) {
  nb::list heads;
  for (const nb::handle column : columns) heads.append(head_of(column, n));
  for (const std::uint64_t target : targets) {
    check(target < heads.size(), "a column of the batch");
    heads[target].attr("copy_")(values);
  }
  return heads;
}

}  // namespace

void bind_goals(nb::module_& m) {
  nb::class_<BoundGoals>(m, "Goals", "A field of the steps that are the goals of rows.")
      .def(
          "__init__",
          [](BoundGoals* self, std::uint64_t goal, std::uint64_t field, const nb::tuple& spec) {
            check(goal <= static_cast<std::uint64_t>(Goal::random), "one of four kinds of goals");
            new (self) BoundGoals{static_cast<Goal>(goal), field, spec_of(spec)};
          },
          "goal"_a, "field"_a, "spec"_a,
          "goal: 0 this step or a later one of its trajectory, 1 the last one, 2 any, 3 any step of the store.")
      .def("read", &read, "store"_a, "table"_a, "rows"_a, "expected"_a, "places"_a.none(), "n"_a, "key"_a, "attempt"_a,
           "Of n rows with these tickets: ([n, *shape], positions without a goal now). The i-th takes the random numbers of position "
           "places[i]; None: i.");
  m.def("put_goals", &put, "columns"_a, "targets"_a, "values"_a, "n"_a,
        "Copies [n, *shape] into the first n rows of some columns. Returns the first n rows of all: views.");
}

}  // namespace engram
