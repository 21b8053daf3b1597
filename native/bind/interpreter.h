// Python's lock around a call of the core: given up, as other threads may run meanwhile; but kept by a call that is shorter than
// handing it over, which costs 5 to 50 us where threads wait for it.
#pragma once

#include <Python.h>
#include <dlfcn.h>
#include <unistd.h>

#include "../core/wait.h"

namespace engram {

/// Whether the interpreter ends. Then only the thread that ends it gets its lock. The stable ABI of Python 3.12 does not declare what says
/// so, and later ones have it under another name: it is looked up.
inline bool interpreter_ends() {
  static const auto find = [] {
    void* found = dlsym(RTLD_DEFAULT, "Py_IsFinalizing");
    return reinterpret_cast<int (*)()>(found != nullptr ? found : dlsym(RTLD_DEFAULT, "_Py_IsFinalizing"));
  }();
  return find != nullptr && find() != 0;
}

class WithoutInterpreter final : Kept {
 public:
  /// `briefly`: the call is short unless it has to wait. Then the lock is given up before it does.
  explicit WithoutInterpreter(bool briefly) : outer_(kept) {
    kept = nullptr;
    if (briefly) {
      kept = this;
    } else {
      give_up();
    }
  }
  // Python ends a daemon thread that comes back too late by unwinding its stack. Destructors do not let that through, and the process
  // would abort: such a thread sleeps until the process is gone.
  ~WithoutInterpreter() {
    while (state_ != nullptr && !ends_ && interpreter_ends()) pause();
    if (state_ != nullptr) PyEval_RestoreThread(state_);
    kept = outer_;
  }
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

 private:
  void let_go() override {
    kept = nullptr;
    give_up();
  }

  void give_up() {
    ends_ = interpreter_ends();
    state_ = PyEval_SaveThread();
  }

  Kept* outer_;  // of a call that this one is made from, by way of Python
  PyThreadState* state_ = nullptr;
  bool ends_ = false;  // it ended before: this is the thread that ends it
};

}  // namespace engram
