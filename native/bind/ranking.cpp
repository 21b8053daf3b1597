// A ranking, for Python. It belongs to one writer, and a writer's thoughts are NumPy arrays: they cross as such, checked.
// The GIL is kept, so that no fork finds a ranking half changed.

#include "ranking.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "../core/check.h"
#include "../core/control.h"
#include "../core/ranking.h"
#include "../core/store.h"
#include "cast.h"
#include "intake.h"
#include "memory.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// One number per row as ranks. False: there are several, their dtype is not known here, or one is NaN.
bool ranks_of(const RowSpec& spec, const std::byte* column, std::vector<double>& ranks) {
  for (const std::int64_t size : spec.shape) {
    if (size != 1) return false;
  }
  if (!cast(column, {spec.code, spec.bits}, reinterpret_cast<std::byte*>(ranks.data()), {kDouble.code, kDouble.bits}, ranks.size())) {
    return false;
  }
  return std::none_of(ranks.begin(), ranks.end(), [](double rank) { return std::isnan(rank); });
}

// Whether every row is live, none is just being written, and the next ticket is this one.
bool is_settled(const Control& control, std::uint64_t next) {
  if (control.counters().next_ticket.load(std::memory_order_acquire) != next) return false;
  for (std::uint64_t i = 0; i < kParticipants; ++i) {
    for (const auto& claim : control.participant(i).claims) {
      if (claim.t0.load() != 0) return false;
    }
  }
  return control.size() == control.capacity();
}

nb::object write_of(Ranking& self, Store& store, const Intake& intake, std::uint64_t field, nb::handle data, bool batched,
                    std::uint64_t settled) {
  check(field < intake.specs().size(), "a field outside the data");
  check(self.rows() == store.control().capacity(), "a ranking of other rows");
  Taken taken;
  if (!is_settled(store.control(), settled) || !intake.take(data, batched, taken)) return nb::none();
  std::vector<double> ranks(batched ? static_cast<std::size_t>(taken.rows()) : 1);
  if (!ranks_of(intake.specs()[field], taken.columns()[field], ranks)) return nb::none();
  std::vector<std::int64_t> rows, kept;
  self.place(ranks.data(), ranks.size(), nullptr, 0, rows, kept);
  std::uint64_t first = 0;
  if (!rows.empty()) {  // else no index need hear of it
    nb::gil_scoped_release release;
    first = store.scatter(rows.data(), rows.size(), store.all().first(taken.columns().size()), taken.columns(), true, kept.data(), ranks.size());
  }
  const auto n = static_cast<std::int64_t>(ranks.size());
  OutputBuffer written(kNumbers, n), lasting(kNumbers, n);
  auto* const all = reinterpret_cast<std::int64_t*>(written.data());
  auto* const last = reinterpret_cast<std::int64_t*>(lasting.data());
  std::fill_n(all, n, -1);
  std::fill_n(last, n, -1);
  for (std::size_t k = 0; k < rows.size(); ++k) {
    all[kept[k]] = rows[k];
    const bool stays = self.rank(static_cast<std::uint64_t>(rows[k])) == ranks[static_cast<std::size_t>(kept[k])];
    last[kept[k]] = stays ? rows[k] : -1;  // else a later row of the data, which ranks higher, has taken its place
  }
  const bool alone = rows.empty() || first == settled;
  if (alone) self.keep();
  nb::object next = alone ? nb::cast(settled + rows.size()) : nb::none();
  return nb::make_tuple(std::move(written).tensor(n), std::move(lasting).tensor(n), first, next);
}

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
      .def("write_of", &write_of, "store"_a, "intake"_a, "field"_a, "data"_a.none(), "batched"_a, "settled"_a,
           "Places and writes data as users hand it over, ranked by a field of one number, into a full store: (rows, those that "
           "no later row of the data replaced, first ticket number, the next one or None if others have written meanwhile). None: "
           "nothing was done, as something must be looked at in Python first.")
      .def("keep", &Ranking::keep, "The last plan was carried out.");
}

}  // namespace engram
