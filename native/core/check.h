// Checks that are never compiled out, and the errors of the core.
//
// The core reports a mistake of its caller by throwing one of these on the calling thread, before it has changed
// anything. No exception ever crosses a thread: work handed to the pool cannot throw.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

namespace engram {

/// A bounded wait ended: a row stayed "being written" by another writer for too long.
struct Stalled : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A write to a store that is only read.
struct ReadOnly : std::runtime_error {
  ReadOnly()
      : std::runtime_error(
            "expected a store that may be written to, got one that was opened with readonly=True: its rows and all that belongs to "
            "them stay as they are, and it cannot be saved either, as its writers would have to wait. Open it without readonly=True") {}
};

/// How each message about a draw from a store without live rows begins, as TorchRL's does: programs look for it.
inline constexpr const char* kEmptyStore = "Cannot sample from an empty storage: no row is live";

/// Nothing can be drawn: no row is live. Says why, and what to do.
struct NothingLive : std::runtime_error {
  explicit NothingLive(const std::string& why, const std::string& advice = "Add data before sampling")
      : std::runtime_error(why + ". " + advice) {}
};

/// Memory for so many rows of so many bytes is not there.
class NoMemory : public std::bad_alloc {
 public:
  NoMemory(std::int64_t rows, std::size_t row_bytes)
      : what_("expected memory for a batch of " + std::to_string(rows) + " rows of " + std::to_string(row_bytes) +
              " bytes in one field, which this machine does not have. Ask for fewer rows") {}
  const char* what() const noexcept override { return what_.what(); }

 private:
  std::runtime_error what_;  // copied without an exception
};

/// Shared memory says what no store says: something else has written there.
struct Damaged : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void intact(bool ok, const char* what) {
  if (!ok) [[unlikely]] {
    throw Damaged(std::string(what) + ". Something else has written into the store's memory: load a checkpoint into a new one");
  }
}

/// What a plain word of shared memory is now. It may change at any moment, so code that checks it and then relies on it needs a copy,
/// which the compiler must not read again.
template <class T>
T copied(const T& word) {
  const T copy = *static_cast<const volatile T*>(&word);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  return copy;
}

/// A row outside [0, capacity): one unsigned comparison covers negative rows too.
inline void check_row(std::int64_t row, std::uint64_t capacity) {
  if (static_cast<std::uint64_t>(row) >= capacity) [[unlikely]] {
    throw std::out_of_range("row " + std::to_string(row) + " is outside [0, " + std::to_string(capacity) + ")");
  }
}

inline void check_rows(const std::int64_t* rows, std::uint64_t n, std::uint64_t capacity) {
  for (std::uint64_t i = 0; i < n; ++i) check_row(rows[i], capacity);
}

/// Numbers of a caller that decide addresses. They are copied before anything looks at them, and the pointer says where the copy is from
/// then on: another thread may change, or give back, the caller's memory, and what was checked must be what is used. Null stays null.
class Own {
 public:
  Own(const std::int64_t*& numbers, std::uint64_t n) {
    if (numbers == nullptr) return;
    std::int64_t* to = few_;
    if (n > kFew) many_ = std::make_unique_for_overwrite<std::int64_t[]>(n), to = many_.get();
    if (n != 0) std::memcpy(to, numbers, n * sizeof(std::int64_t));
    numbers = to;
  }
  Own(const Own&) = delete;
  Own& operator=(const Own&) = delete;

 private:
  static constexpr std::uint64_t kFew = 128;
  std::int64_t few_[kFew];
  std::unique_ptr<std::int64_t[]> many_;
};

/// The same of rows, each of which is below the capacity.
class OwnRows : Own {
 public:
  OwnRows(const std::int64_t*& rows, std::uint64_t n, std::uint64_t capacity) : Own(rows, n) {
    if (rows != nullptr) check_rows(rows, n, capacity);
  }
};

/// The same, where -1 is no row.
class OwnRowsOrNone : Own {
 public:
  OwnRowsOrNone(const std::int64_t*& rows, std::uint64_t n, std::uint64_t capacity) : Own(rows, n) {
    for (std::uint64_t i = 0; i < n; ++i) {
      if (rows[i] != -1) check_row(rows[i], capacity);
    }
  }
};

inline void check(bool ok, const char* message) {
  if (!ok) [[unlikely]] throw std::invalid_argument(message);
}

}  // namespace engram
