// Counts of draws, for Python. Memory and tickets are kept alive by the object handed over with their addresses.

#include "consumption.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "../core/consumption.h"
#include "../core/store.h"
#include "column.h"
#include "interpreter.h"
#include "memory.h"
#include "rules.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

constexpr std::uint64_t kBrief = 256;  // rows

/// An index with its own view of the tickets: it must not hold the store, which holds it.
struct Tickets {
  explicit Tickets(const Store* store) : control(store == nullptr ? nullptr : std::make_unique<const Control>(store->control())) {}
  std::unique_ptr<const Control> control;
};

class BoundConsumption : private Tickets, public Consumption {
 public:
  BoundConsumption(std::span<std::byte> memory, const Store* store)
      : Tickets(store), Consumption(memory, control.get(), fields_of(memory, store)) {}

 private:
  static std::vector<Field> fields_of(std::span<std::byte> memory, const Store* store) {
    const RowRules rules = Consumption::rules_of(memory);
    check(store != nullptr || !rules.any(), "rules of rows that are no fields");
    return store == nullptr ? std::vector<Field>() : fields_numbered(rules.fields(), *store);
  }
};

// As others have left it, of a store that is only read.
BoundConsumption& current(BoundConsumption& self) {
  if (self.follows_writers()) {
    const nb::gil_scoped_release running;
    self.catch_up();
  }
  return self;
}

// As Python compares it: (fields that are to be ready, field of the version or None, most draws), fields by their numbers.
nb::tuple policy_of(const BoundConsumption& self) {
  const RowRules& rules = self.rules();
  nb::list ready;
  for (const RuleField& field : rules.ready) ready.append(field.number);
  nb::object version = nb::none();
  if (rules.dated) version = nb::int_(rules.version.number);
  return nb::make_tuple(nb::tuple(ready), version, self.most());
}

// By the names that statistics give it.
nb::dict totals(BoundConsumption& self) {
  const Consumption::Totals of = current(self).totals();
  nb::dict said;
  said["drawable_rows"] = self.drawable();
  said["starved_draws"] = of.starved;
  if (self.most() > 0) said["used_rows"] = of.used, said["evicted_rows"] = of.evicted, said["dropped_rows"] = of.dropped;
  if (self.rules().dated) said["expired_rows"] = of.expired;
  return said;
}

nb::object admit(BoundConsumption& self, Numbers rows, Numbers numbers, std::uint64_t most) {
  std::uint64_t taken;
  OutputBuffers buffers;
  current(self);
  {
    const WithoutInterpreter running(rows.size <= kBrief);
    buffers.add(kNumbers, static_cast<std::int64_t>(rows.size));
    taken = self.admit(rows.data, numbers.of(rows.size), rows.size, most, buffers.at<std::int64_t>(0));
  }
  return std::move(buffers).tensors(static_cast<std::int64_t>(taken))[0];
}

nb::object drawable_rows(BoundConsumption& self) {
  std::vector<std::int64_t> rows;
  {
    const nb::gil_scoped_release running;
    self.catch_up();
    rows = self.drawable_rows();
  }
  OutputBuffers buffers;
  buffers.add(kNumbers, static_cast<std::int64_t>(rows.size()));
  std::copy(rows.begin(), rows.end(), buffers.at<std::int64_t>(0));
  return std::move(buffers).tensors(static_cast<std::int64_t>(rows.size()))[0];
}

nb::object claim(BoundConsumption& self, std::uint64_t key, std::uint64_t n) {
  check(n < std::uint64_t{1} << 48, "a batch of more rows than there is memory");
  std::uint64_t taken;
  OutputBuffers buffers;
  current(self);
  {
    const WithoutInterpreter running(n <= kBrief);
    n = std::min(n, self.rows());
    buffers.add(kNumbers, static_cast<std::int64_t>(n));
    buffers.add(kNumbers, static_cast<std::int64_t>(n));
    taken = self.claim(key, n, buffers.at<std::int64_t>(0), buffers.at<std::int64_t>(1));
  }
  return std::move(buffers).tensors(static_cast<std::int64_t>(taken));
}

nb::object used_rows(BoundConsumption& self, std::uint64_t n) {
  std::uint64_t found;
  OutputBuffers buffers;
  current(self);
  {
    const WithoutInterpreter running(n <= kBrief);
    n = std::min(n, self.used());
    buffers.add(kNumbers, static_cast<std::int64_t>(n));
    found = self.used_rows(n, buffers.at<std::int64_t>(0));
  }
  return std::move(buffers).tensors(static_cast<std::int64_t>(found))[0];
}

void bind_memory(nb::module_& m) {
  m.def(
      "consumption_bytes", [](std::uint64_t rows, const nb::tuple& rules) { return Consumption::bytes(rows, rules_in(rules)); }, "rows"_a,
      "rules"_a = nb::tuple(), "Bytes of the counts of that many rows.");
  m.def(
      "format_consumption",
      [](Address memory, std::uint64_t bytes, std::uint64_t rows, std::uint64_t most, const nb::tuple& rules) {
        Consumption::format(block(memory, bytes), rows, most, rules_in(rules));
      },
      "memory"_a, "bytes"_a, "rows"_a, "most"_a, "rules"_a = nb::tuple(),
      "Writes the header into zeroed memory. `rules`: none, or (fields that are to be ready, field of the version or None); such a field is "
      "(its number, its spec). With rules `most` may be 0: any number.");
  m.def(
      "copy_consumption",
      [](Address from, Address to, std::uint64_t bytes) {
        nb::gil_scoped_release release;
        Consumption::copy(block(from, bytes), block(to, bytes));
      },
      "source"_a, "to"_a, "nbytes"_a, "Copies memory that other processes may be changing; the copy's mutex is free.");
  m.def(
      "reset_consumption_mutex", [](Address memory, std::uint64_t bytes) { Consumption::reset_mutex(block(memory, bytes)); }, "memory"_a,
      "bytes"_a, "Before anything else, by the only process that uses this memory now.");
}

void bind_claims(nb::class_<BoundConsumption, Index>& type) {
  type
      .def("claim", &claim, "key"_a, "n"_a, "Draws up to n rows, and counts them: [rows, ticket numbers].")
      .def(
          "were_read",
          [](BoundConsumption& self, Numbers rows, Numbers numbers) {
            const WithoutInterpreter running(rows.size <= kBrief);
            self.were_read(rows.data, numbers.of(rows.size), rows.size);
          },
          "rows"_a, "numbers"_a, "What claim returned was read: rows that are used up may be written over.")
      .def(
          "take_back",
          [](BoundConsumption& self, Numbers rows, Numbers numbers) {
            const WithoutInterpreter running(rows.size <= kBrief);
            self.take_back(rows.data, numbers.of(rows.size), rows.size);
          },
          "rows"_a, "numbers"_a, "What claim returned was not read: it counts as drawn once less.")
      .def("admit", &admit, "rows"_a, "numbers"_a, "most"_a,
           "Of rows that someone else has drawn: at which places are those that are taken, so many at most, and counted.")
      .def("drawable_rows", &drawable_rows, "Rows that can be drawn, ascending.")
      .def("set_floor", &BoundConsumption::set_floor, "floor"_a, nb::call_guard<nb::gil_scoped_release>(), "The oldest version from now on.")
      .def("count_starved", &BoundConsumption::count_starved, "A draw found no row.")
      .def("used_rows", &used_rows, "n"_a, "The first n rows that are used up.");
}

}  // namespace

void bind_consumption(nb::module_& m) {
  bind_memory(m);
  nb::class_<BoundConsumption, Index> type(m, "Consumption", nb::is_weak_referenceable(), "Counts of draws, in memory that `keep` keeps alive.");
  bind_claims(type);
  type
      .def(
          "__init__",
          [](BoundConsumption* self, Address memory, std::uint64_t bytes, const Store* store, nb::handle) {
            new (self) BoundConsumption(block(memory, bytes), store);
          },
          "memory"_a, "bytes"_a, "store"_a.none(), "keep"_a, nb::keep_alive<1, 5>())
      .def("follow", &follow<BoundConsumption>, "memory"_a, "bytes"_a, "keep"_a, "copied"_a, nb::keep_alive<1, 4>(), kFollow)
      .def_prop_ro("rows", [](const BoundConsumption& self) { return self.rows(); })
      .def_prop_ro("most", [](const BoundConsumption& self) { return self.most(); }, "Draws of a row.")
      .def_prop_ro("policy", &policy_of, "(fields that are to be ready, field of the version or None, most draws), fields by their numbers.")
      .def_prop_ro("totals", &totals, "Rows that can be drawn and, where there are rules, what was counted of others, by name.")
      .def_prop_ro("drawable", [](BoundConsumption& self) { return current(self).drawable(); }, "Rows that can be drawn.")
      .def_prop_ro("used", [](BoundConsumption& self) { return current(self).used(); }, "Rows that are used up.")
      .def(
          "counts",
          [](BoundConsumption& self, Column<std::int32_t> out) {
            current(self);
            const WithoutInterpreter running(out.size <= kBrief);
            self.copy_counts(out.data, out.size);
          },
          "out"_a, "Copies how often the first rows were drawn, int32 [n].")
      .def(
          "restore",
          [](BoundConsumption& self, Column<const std::int32_t> counts) {
            const WithoutInterpreter running(self.rows() <= kBrief);
            self.restore(counts.data, counts.size);
          },
          "counts"_a)
      .def(
          "reset",
          [](BoundConsumption& self, Numbers rows) {
            const WithoutInterpreter running(rows.size <= kBrief);
            self.reset(rows.data, rows.size);
          },
          "rows"_a, "Live rows count as not drawn yet.")
      .def(
          "written",
          [](BoundConsumption& self, Numbers rows, std::uint64_t first) {
            const WithoutInterpreter running(rows.size <= kBrief);
            self.written(rows.data, rows.size, first);
          },
          "rows"_a, "first"_a, "For rows without tickets: they hold new items, of the numbers first, first + 1, ...")
      .def(
          "edited",
          [](BoundConsumption& self, Numbers rows, std::uint64_t first) {
            const WithoutInterpreter running(rows.size <= kBrief);
            self.edited(rows.data, rows.size, first, {}, 0);
          },
          "rows"_a, "first"_a, "The same for rows that were edited: they keep their counts.")
      .def(
          "lost",
          [](BoundConsumption& self, Numbers rows) {
            const WithoutInterpreter running(rows.size <= kBrief);
            self.lost(rows.data, rows.size);
          },
          "rows"_a, "For rows without tickets: they hold nothing.")
      .def("scan", &BoundConsumption::scan, "begin"_a, "end"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("put_in_order", &BoundConsumption::put_in_order, nb::call_guard<nb::gil_scoped_release>())
      .def("emptied", &BoundConsumption::emptied, nb::call_guard<nb::gil_scoped_release>())
      .def("after_fork", &BoundConsumption::after_fork);
}

}  // namespace engram
