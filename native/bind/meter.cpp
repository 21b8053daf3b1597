// What a store counts for people, for Python.

#include "../core/meter.h"

#include <nanobind/nanobind.h>

#include <chrono>
#include <cstdint>

#include "../core/store.h"
#include "column.h"
#include "store.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

nb::dict counts_of(const Store& store) {
  const Meter::Counts counts = store.meter().counts();
  nb::dict all;
  all["sample_count"] = counts.sampled;
  all["replay_ratio"] = static_cast<double>(counts.sampled) / static_cast<double>(counts.inserted == 0 ? 1 : counts.inserted);
  all["add_per_s"] = counts.inserts_per_s;
  all["sample_per_s"] = counts.samples_per_s;
  if (counts.wait_median_ms >= 0) {
    all["sample_wait_ms_p50"] = counts.wait_median_ms;
    all["sample_wait_ms_p99"] = counts.wait_p99_ms;
  }
  if (counts.saved_ago_s >= 0) all["checkpoint_age_s"] = counts.saved_ago_s;
  return all;
}

nb::list curve_of(const Store& store) {
  nb::list points;
  for (const Meter::Point& point : store.meter().curve()) {
    points.append(nb::make_tuple(point.seconds, point.inserted, point.sampled, point.wait_median_ms, point.wait_p99_ms));
  }
  return points;
}

nb::list sampled_by(const Store& store) {
  nb::list found;
  for (std::uint64_t i = 0; i < store.control().participants(); ++i) {
    const Participant& by = store.control().participant(i);
    const std::uint64_t sampled = by.sampled.load(std::memory_order_relaxed);
    const bool here = by.state.load(std::memory_order_acquire) != 0;
    if (here || sampled != 0) found.append(nb::make_tuple(here ? by.pid : 0, sampled));
  }
  return found;
}

}  // namespace

void bind_meter(nb::class_<Store>& type) {
  type.def("meter", &counts_of, "What is counted for people, by the names of stats(). What is not known is not there.")
      .def("curve", &curve_of, "[(seconds since 1970, rows inserted, rows sampled, median wait in ms, 99th percentile; -1: none)], oldest first.")
      .def("counted", [](const Store& self) { return nb::make_tuple(self.meter().inserted(), self.meter().sampled()); },
           "(rows ever inserted, rows ever sampled), as in the curve: only differences count.")
      .def("sampled_by", &sampled_by, "[(pid, or 0, rows sampled by the processes that had this entry)].")
      .def(
          "count_sampled",
          [](const Store& self, Numbers rows) { self.count_sampled(rows.data, rows.size); }, "rows"_a, "Counts rows that were sampled.")
      .def("count_all_sampled", [](const Store& self, std::uint64_t n) { self.count_sampled(nullptr, n); }, "n"_a,
           "The same of so many, for a store that does not hear which.")
      .def_prop_ro("hears_samples", &Store::hears_samples, "Whether an index wants to know which rows are sampled.")
      .def(
          "begin_wait",
          [](const Store& self) -> std::int64_t {
            const Waiting call = self.begin_wait();
            const std::int64_t since = std::chrono::duration_cast<std::chrono::nanoseconds>(call.since.time_since_epoch()).count();
            return call.calls > 1 ? -since : since;
          },
          "Before a call that waits for a batch: what count_wait() is to be told after it. 0: nothing, as the call is not timed.")
      .def(
          "count_wait",
          [](const Store& self, std::int64_t since) {
            const std::chrono::steady_clock::time_point from{std::chrono::nanoseconds(since < 0 ? -since : since)};
            self.count_wait({from, since == 0 ? 0 : since < 0 ? 1U << WaitTimer::kShareBits : 1U});
          },
          "since"_a,
          "Counts a call that has waited for a batch since then, by time.perf_counter_ns(); below 0: since the opposite, and it counts for "
          "all calls of which one was to be timed; 0: counts nothing.")
      .def("ask_for_usage", &Store::ask_for_usage, "Processes that sample look for an index that counts samples of each row.")
      .def_prop_ro("asked_usage", [](const Store& self) { return self.control().meter_page().asked_usage.load(); }, "How often that was called.")
      .def("count_save", [](const Store& self) { self.control().writable(), self.meter().saved(); }, "A checkpoint of the rows was saved.");
}

}  // namespace engram
