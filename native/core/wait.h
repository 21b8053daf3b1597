// How long a call waits for what another thread or process holds. No call waits for a process that has died; but a holder may be
// stopped, and keeps what it holds.
#pragma once

#include <atomic>
#include <chrono>
#include <string>

#include "check.h"

namespace engram {

/// Tests of waits that end in vain shorten it.
inline std::atomic<std::chrono::milliseconds> wait_limit{std::chrono::seconds(5)};

/// What the caller of a short call holds, and others may need: it is let go before the call waits, or does more than it seemed.
class Kept {
 public:
  virtual void let_go() = 0;

 protected:
  ~Kept() = default;
};

/// Of this thread; null: nothing is kept.
inline thread_local Kept* kept = nullptr;

inline void let_go() {
  if (kept != nullptr) kept->let_go();
}

/// When a wait that begins now ends in vain.
class Deadline {
 public:
  explicit Deadline(std::chrono::milliseconds wait = wait_limit.load()) : at_(std::chrono::steady_clock::now() + wait) {}

  bool passed() const { return std::chrono::steady_clock::now() > at_; }

 private:
  std::chrono::steady_clock::time_point at_;
};

/// "… for 5 s", and what to do
inline Stalled in_vain(const std::string& what,
                       const std::string& advice = "A process that is stopped or very slow may hold it: try again when it goes on, or end it") {
  const auto ms = wait_limit.load().count();
  return Stalled(what + " for " + (ms % 1000 == 0 ? std::to_string(ms / 1000) + " s" : std::to_string(ms) + " ms") + ". " + advice);
}

}  // namespace engram
