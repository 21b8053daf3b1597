// A ranking, for Python. It belongs to one writer, and a writer's thoughts are NumPy arrays: they cross as such, checked.
// The GIL is kept, so that no fork finds a ranking half changed.

#include "ranking.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "../core/check.h"
#include "../core/ranking.h"
#include "memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

}  // namespace

void bind_ranking(nb::module_& m) {
  nb::class_<Ranking>(m, "Ranking", "Ranks of rows, and which row is the worst. At first all ranks are infinite.")
      .def(nb::init<std::uint64_t>(), "rows"_a)
      .def_prop_ro("rows", &Ranking::rows)
      .def(
          "set",
          [](Ranking& self, const Array<std::int64_t>& rows, const Array<double>& ranks) {
            check(rows.shape(0) == ranks.shape(0), "one rank per row");
            self.set(rows.data(), ranks.data(), rows.shape(0));
          },
          "rows"_a, "ranks"_a, "Ranks, float64 [n], of rows, int64 [n]. A plan that was not kept is forgotten.")
      .def(
          "place",
          [](Ranking& self, const Array<double>& ranks, const Array<std::int64_t>& free) {
            std::vector<std::int64_t> rows, kept;
            self.place(ranks.data(), ranks.shape(0), free.data(), free.shape(0), rows, kept);
            return nb::make_tuple(array_of(std::move(rows)), array_of(std::move(kept)));
          },
          "ranks"_a, "free"_a,
          "Where data of these ranks goes: (rows int64 [k], which of the data int64 [k]). Forgotten by the next call, unless "
          "keep() is called.")
      .def("keep", &Ranking::keep, "The last plan was carried out.");
}

}  // namespace engram
