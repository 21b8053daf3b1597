// The extension module: exceptions, waits, threads and random numbers, and one bind_* per topic.
//
// A binding converts, checks, releases the GIL and calls the core.

#include <nanobind/nanobind.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <string>

#include "../core/check.h"
#include "../core/disk.h"
#include "../core/permutation.h"
#include "../core/pool.h"
#include "../core/random.h"
#include "../core/row_limits.h"
#include "../core/wait.h"
#include "block.h"
#include "changes.h"
#include "column.h"
#include "consumption.h"
#include "epoch.h"
#include "expand.h"
#include "goals.h"
#include "groups.h"
#include "hold.h"
#include "intake.h"
#include "keys.h"
#include "priorities.h"
#include "ragged.h"
#include "ranking.h"
#include "steps.h"
#include "store.h"
#include "tensors.h"
#include "trajectories.h"
#include "usage.h"
#include "versions.h"
#include "writers.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

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

void bind_random(nb::module_& m) {
  m.def(
      "permute",
      [](std::uint64_t key, std::uint64_t n, std::uint64_t start, engram::Column<std::int64_t> out) {
        nb::gil_scoped_release release;
        engram::Permutation(key, n)(start, out.size, out.data);
      },
      "key"_a, "n"_a, "start"_a, "out"_a, "Elements from `start` on of a random permutation of [0, n).");
  m.def(
      "uniform",
      [](std::uint64_t key, std::uint64_t n, engram::Column<std::int64_t> out) {
        engram::check(n > 0, "nothing to draw from");
        nb::gil_scoped_release release;
        const engram::Random random(key);
        for (std::uint64_t i = 0; i < out.size; ++i) out.data[i] = static_cast<std::int64_t>(random.below(n, i));
      },
      "key"_a, "n"_a, "out"_a, "Numbers drawn uniformly from [0, n), with replacement.");
}

void bind_waits(nb::module_& m) {
  m.def("wait_limit", [] { return std::chrono::duration<double>(engram::wait_limit.load()).count(); },
        "Seconds after which a wait for another thread or process ends in vain.");
  m.def(
      "set_wait_limit",
      [](double seconds) {
        engram::wait_limit.store(std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000)));
      },
      "seconds"_a, "For tests.");
}

void bind_threads(nb::module_& m) {
  m.def(
      "set_num_threads",
      [](std::uint64_t n) {
        nb::gil_scoped_release release;
        engram::set_num_threads(n);
      },
      "n"_a);
  m.def("num_threads", [] { return engram::num_threads(); });
}

}  // namespace

NB_MODULE(_core, m) {
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const engram::NoMemory& known) {
      PyErr_SetString(PyExc_MemoryError, (std::string(known.what()) + ".").c_str());
    } catch (const engram::DiskError& known) {
      const nb::object found = nb::steal(PyObject_CallFunction(PyExc_OSError, "iss", known.number, known.what(), known.path.c_str()));
      if (found.is_valid()) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(found.ptr())), found.ptr());
    } catch (const std::bad_alloc&) {  // its own text is that of C++
      PyErr_SetString(PyExc_MemoryError, "expected more free memory than this machine has. Ask for fewer rows.");
    } catch (const std::length_error&) {
      PyErr_SetString(PyExc_MemoryError, "expected fewer rows than any memory holds. Ask for fewer rows.");
    }
  });
  nb::set_leak_warnings(false);  // what a program holds at its end is not a leak
  m.doc() = "The native core of engram. Private: use the classes of the package.";
  m.def("raise_stalled_as", &raise_as<engram::Stalled>, "kind"_a, "The exception of waits that ended in vain, from now on.");
  m.def("raise_damaged_as", &raise_as<engram::Damaged>, "kind"_a,
        "The exception of shared memory that says what no store says, from now on.");
  m.def("raise_readonly_as", &raise_as<engram::ReadOnly>, "kind"_a, "The exception of writes to a store that is only read, from now on.");
  m.def("raise_nothing_live_as", &raise_as<engram::NothingLive>, "kind"_a, "The exception of draws without a live row, from now on.");
  m.def(
      "raise_limited_as",
      [](const nb::type_object& kind) {
        nb::register_exception_translator(
            [](const std::exception_ptr& error, void* raised) {
              try {
                std::rethrow_exception(error);
              } catch (const engram::Limited& known) {
                PyErr_SetObject(static_cast<PyObject*>(raised), nb::int_(known.rows).ptr());
              }
            },
            kind.inc_ref().ptr());
      },
      "kind"_a, "The exception of rows that are not admitted now, from now on: it is given their number.");
  nb::class_<engram::Index>(m, "Index", "What a store keeps up to date with every write.");
  engram::bind_hold(m);
  engram::bind_intake(m);
  engram::bind_writers(m);
  engram::bind_store(m);
  engram::bind_steps(m);
  engram::bind_epoch(m);
  engram::bind_consumption(m);
  engram::bind_groups(m);
  engram::bind_keys(m);
  engram::bind_usage(m);
  engram::bind_open_rows(m);
  engram::bind_changes(m);
  engram::bind_versions(m);
  engram::bind_priorities(m);
  engram::bind_ranking(m);
  engram::bind_trajectories(m);
  engram::bind_expand(m);
  engram::bind_goals(m);
  engram::bind_tensors(m);
  engram::bind_block(m);
  bind_random(m);
  bind_waits(m);
  bind_threads(m);
}
