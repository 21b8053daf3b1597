// What is taken in one step and given back in one, whatever interrupts the Python code around it.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>

namespace engram {

/// A context manager. Signals are handled between bytecodes only, so none comes between taking and noting that it is taken.
/// Dropped without having been left, as by an exception in between, it gives back as well.
class Hold {
 public:
  /// `owner` is kept alive. `locks`: Python locks, taken before and released behind. `give` hears whether the block failed.
  Hold(nanobind::object owner, nanobind::tuple locks, std::function<void()> take, std::function<void(bool)> give);
  ~Hold();
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  void enter();
  void leave(bool failed);

 private:
  void unlock();

  nanobind::object owner_;
  nanobind::tuple locks_;
  std::function<void()> take_;
  std::function<void(bool)> give_;
  std::size_t locked_ = 0;  // of the locks
  bool taken_ = false;
};

void bind_hold(nanobind::module_& m);

}  // namespace engram
