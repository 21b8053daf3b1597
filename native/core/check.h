// Checks that are never compiled out, and the errors of the core.
//
// The core reports a mistake of its caller by throwing one of these on the calling thread, before it has changed
// anything. No exception ever crosses a thread: work handed to the pool cannot throw.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace engram {

/// A bounded wait ended: a row stayed "being written" by somebody else for too long.
struct Stalled : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Nothing can be drawn: no row is live.
struct NothingLive : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A row outside [0, capacity): one unsigned comparison covers negative rows too.
inline void check_row(std::int64_t row, std::uint64_t capacity) {
  if (static_cast<std::uint64_t>(row) >= capacity) [[unlikely]] {
    throw std::out_of_range("row " + std::to_string(row) + " is outside [0, " + std::to_string(capacity) + ")");
  }
}

inline void check_rows(const std::int64_t* rows, std::uint64_t n, std::uint64_t capacity) {
  for (std::uint64_t i = 0; i < n; ++i) check_row(rows[i], capacity);
}

inline void check(bool ok, const char* message) {
  if (!ok) [[unlikely]] throw std::invalid_argument(message);
}

}  // namespace engram
