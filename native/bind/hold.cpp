#include "hold.h"

#include <nanobind/stl/unique_ptr.h>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../core/check.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {

Hold::Hold(nb::object owner, nb::tuple locks, std::function<void()> take, std::function<void(bool)> give)
    : owner_(std::move(owner)), locks_(std::move(locks)), take_(std::move(take)), give_(std::move(give)) {}

Hold::~Hold() {
  const nb::error_scope keep;  // an exception may be on its way
  try {
    leave(true);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("a hold that is dropped");
  } catch (const std::exception&) {  // as much as could be was given back
  }
}

void Hold::enter() {
  check(!taken_ && locked_ == 0, "a hold that is entered once at a time");
  try {
    for (; locked_ < locks_.size(); ++locked_) nb::object(locks_[locked_]).attr("acquire")();
    take_();
    taken_ = true;
  } catch (...) {
    unlock();
    throw;
  }
}

void Hold::leave(bool failed) {
  try {
    if (std::exchange(taken_, false)) give_(failed);
  } catch (...) {
    unlock();
    throw;
  }
  unlock();
}

void Hold::unlock() {
  while (locked_ > 0) nb::object(locks_[--locked_]).attr("release")();
}

namespace {

constexpr auto kLook = std::chrono::milliseconds(1);  // between two, at whether a folder is still locked

/// A folder that this thread has locked. It is listed for as long as the lock lives.
struct Locked {
  std::string path;
  std::weak_ptr<int> descriptor;
};
thread_local std::vector<Locked> locked_here;

bool is_locked_here(const std::string& path) {
  std::erase_if(locked_here, [](const Locked& one) { return one.descriptor.expired(); });
  return std::any_of(locked_here.begin(), locked_here.end(), [&](const Locked& one) { return one.path == path; });
}

std::shared_ptr<int> opened(const std::string& path, const nb::object& name) {
  int fd;
  do fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  while (fd < 0 && errno == EINTR);
  if (fd < 0) {
    PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, name.ptr());
    throw nb::python_error();
  }
  return {new int(fd), [](const int* held) {
            flock(*held, LOCK_UN);  // a child that was forked meanwhile has the descriptor, too
            close(*held);
            delete held;
          }};
}

/// Waits for the only lock of a folder. Signals are handled meanwhile.
void lock_folder(int fd, const nb::object& name, std::chrono::duration<double> wait, const nb::object& busy) {
  const auto until = std::chrono::steady_clock::now() + wait;
  while (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) {
      PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, name.ptr());
      throw nb::python_error();
    }
    if (std::chrono::steady_clock::now() >= until) {
      const nb::object error = busy();
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
      throw nb::python_error();
    }
    {
      nb::gil_scoped_release release;
      std::this_thread::sleep_for(kLook);
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

std::unique_ptr<Hold> folder_lock(nb::object path, double wait_s, nb::object busy) {
  PyObject* encoded = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), &encoded) == 0) throw nb::python_error();
  const auto bytes = nb::steal<nb::bytes>(encoded);
  auto descriptor = std::make_shared<std::shared_ptr<int>>();
  const nb::object name = path;
  auto take = [descriptor, name, busy, wait_s, key = std::string(bytes.c_str(), bytes.size())] {
    if (is_locked_here(key)) return;  // a collected store is closed in the middle of something
    auto made = opened(key, name);
    lock_folder(*made, name, std::chrono::duration<double>(wait_s), busy);
    locked_here.push_back({key, made});
    *descriptor = std::move(made);
  };
  return std::make_unique<Hold>(path, nb::tuple(), std::move(take), [descriptor](bool) { descriptor->reset(); });
}

}  // namespace

void bind_hold(nb::module_& m) {
  nb::class_<Hold>(m, "Hold", "A context manager of something that is taken in one step, and given back in one.")
      .def("__enter__", &Hold::enter)
      .def(
          "__exit__",
          [](Hold& self, nb::handle kind, nb::handle, nb::handle) { self.leave(!kind.is_none()); },
          "kind"_a.none(), "error"_a.none(), "where"_a.none());
  m.def("folder_lock", &folder_lock, "path"_a, "wait_s"_a, "busy"_a,
        "The only lock of a folder, which its thread may take again. `busy()`: what is raised after `wait_s` seconds.");
}

}  // namespace engram
