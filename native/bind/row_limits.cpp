// Limits of a store, for Python, which waits in a loop of its own: each call sleeps once at most, so that signals are handled in between.

#include "../core/row_limits.h"

#include <nanobind/nanobind.h>

#include <cstdint>

#include "../core/store.h"
#include "interpreter.h"
#include "store.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

nb::dict counts_of(const Store& store) {
  const Limits limits = store.limits();
  const Rules rules = limits.rules();
  const Limits::Counts counts = limits.counts();
  nb::dict all;
  all["limit_inserts"] = counts.inserts;
  all["limit_samples"] = counts.samples;
  all["limit_in_flight"] = counts.in_flight;
  all["limit_level"] = counts.level;
  all["limit_lowest"] = rules.centre() - rules.slack();
  all["limit_highest"] = rules.centre() + rules.slack();
  all["insert_waits"] = counts.waits[Limits::kInsert];
  all["sample_waits"] = counts.waits[Limits::kSample];
  all["insert_waited_s"] = static_cast<double>(counts.waited_ns[Limits::kInsert]) * 1e-9;
  all["sample_waited_s"] = static_cast<double>(counts.waited_ns[Limits::kSample]) * 1e-9;
  all["inserts_waiting"] = counts.waiting[Limits::kInsert];
  all["samples_waiting"] = counts.waiting[Limits::kSample];
  return all;
}

void bind_setting(nb::class_<Store>& type) {
  type.def_prop_ro(
          "fleet_limit",
          [](const Store& self) {
            const Rules rules = self.limits().rules();
            return nb::make_tuple(rules.fleet, rules.stores);
          },
          "(number, stores) of the limits of several stores which those of this one are, or which has taken them away. Zeros: of none; no "
          "stores: the counts began again here since.")
      .def(
          "set_fleet_limit",
          [](const Store& self, double ratio, double tolerance, std::uint64_t min_size, std::uint64_t in_flight, std::uint64_t unconsumed,
             std::uint64_t fleet, std::uint64_t stores, double level) {
            nb::gil_scoped_release release;
            self.limits().set({ratio, tolerance, min_size, in_flight, fleet, stores}, unconsumed, level);
          },
          "ratio"_a, "tolerance"_a, "min_size"_a, "in_flight"_a, "unconsumed"_a, "fleet"_a, "stores"_a, "level"_a,
          "As set_limit, of several stores, of which this one's part begins at a level. Newer ones stay.")
      .def(
          "set_limit",
          [](const Store& self, double ratio, double tolerance, std::uint64_t min_size, std::uint64_t in_flight, std::uint64_t unconsumed) {
            nb::gil_scoped_release release;
            self.limits().set({ratio, tolerance, min_size, in_flight}, unconsumed);
            self.waits_in_vain();
          },
          "ratio"_a, "tolerance"_a, "min_size"_a, "in_flight"_a, "unconsumed"_a,
          "Replaces the limits in one step, and begins balanced. Those that are in force already stay, with their counts; rows in flight are counted "
          "again.");
}

}  // namespace

void bind_limits(nb::class_<Store>& type) {
  bind_setting(type);
  type.def_prop_ro("limited", [](const Store& self) { return self.limits().on(); }, "Whether the store has limits that count here.")
      .def_prop_ro(
          "limit",
          [](const Store& self) {
            const Rules rules = self.limits().rules();
            return nb::make_tuple(rules.ratio, rules.tolerance, rules.min_size, rules.in_flight);
          },
          "(samples per insert, tolerance, smallest size, rows in flight); 0 where there is no such limit.")
      .def(
          "admit_samples", [](const Store& self, std::uint64_t n) { return self.limits().admit(Limits::kSample, n); }, "n"_a,
          "Whether n rows may be sampled now; then they are counted.")
      .def(
          "admits_samples", [](const Store& self, std::uint64_t n) { return self.limits().would_admit(Limits::kSample, n); }, "n"_a,
          "Whether n rows could be sampled now.")
      .def(
          "give_back_samples", [](const Store& self, std::uint64_t n) { self.limits().give_back(Limits::kSample, n); }, "n"_a,
          "n admitted rows were not sampled.")
      .def(
          "prepay_inserts", [](const Store& self, std::uint64_t n) { self.prepay(n); }, "n"_a,
          "Admits n rows that this thread is to insert by several calls.")
      .def("return_prepaid", [](const Store& self) { self.limits().return_prepaid(); }, "Gives back what they did not insert.")
      .def(
          "consumed", [](const Store& self, std::uint64_t n) { self.limits().consumed(n); }, "n"_a,
          "n rows were drawn for the last time, or overwritten before that: as many more may be inserted.")
      .def(
          "limit_event", [](const Store& self, bool samples) { return self.limits().event(samples ? Limits::kSample : Limits::kInsert); },
          "samples"_a, "A number that changes when inserts, or samples, that wait are to look again.")
      .def(
          "await_limit",
          [](const Store& self, bool samples, std::uint64_t n, std::uint32_t event, double seconds) {
            const WithoutInterpreter without(false);
            const Limits::Side side = samples ? Limits::kSample : Limits::kInsert;
            if (self.limits().wait(side, n, event, seconds)) return true;
            self.waits_in_vain();
            return self.limits().would_admit(side, n);
          },
          "samples"_a, "n"_a, "event"_a, "seconds"_a,
          "Sleeps until n rows may be admitted, the event is another one, or a signal has come; a second at most. Whether they may be.")
      .def(
          "await_insert",
          [](const Store& self, std::uint64_t written, double seconds) {
            const WithoutInterpreter without(false);
            self.limits().wait_for_insert(written, seconds);
          },
          "written"_a, "seconds"_a, "Sleeps as await_limit, until rows are inserted, if the write count still is `written`.")
      .def(
          "count_limit_wait", [](const Store& self, bool samples) { self.limits().count_wait(samples ? Limits::kSample : Limits::kInsert); },
          "samples"_a, "One more insert, or sample, has had to wait.")
      .def("wake_limits", [](const Store& self) { self.limits().wake(); }, "All that waits, in all processes, looks again.")
      .def("limit_counts", &counts_of, "What the limits have counted, for stats().");
}

}  // namespace engram
