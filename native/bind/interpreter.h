// Python's lock around a call of the core: given up, as other threads may run meanwhile; but kept by a call that is shorter than
// handing it over, which costs 5 to 50 us where threads wait for it.
#pragma once

#include <Python.h>

#include "../core/wait.h"

namespace engram {

class WithoutInterpreter final : Kept {
 public:
  /// `briefly`: the call is short unless it has to wait. Then the lock is given up before it does.
  explicit WithoutInterpreter(bool briefly) : outer_(kept) {
    kept = nullptr;
    if (briefly) {
      kept = this;
    } else {
      state_ = PyEval_SaveThread();
    }
  }
  ~WithoutInterpreter() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
    kept = outer_;
  }
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

 private:
  void let_go() override {
    kept = nullptr;
    state_ = PyEval_SaveThread();
  }

  Kept* outer_;  // of a call that this one is made from, by way of Python
  PyThreadState* state_ = nullptr;
};

}  // namespace engram
