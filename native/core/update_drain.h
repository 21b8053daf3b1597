// Updates of priorities that a device sends: a thread takes them from a ring in host memory that kernels fill.
//
//   memory   words of 64 bits: a header of 8, whose second word is the host's (batches taken) · slots
//   slot     a header of 4 (the number of its batch, from 1 on, which is written last; entries) · rows · tickets · priorities, as doubles
//
// A device never waits for the thread: it drops a batch that finds the ring full. The thread needs neither Python nor the device.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "control.h"
#include "priorities.h"

namespace engram {

class UpdateDrain {
 public:
  struct Counts {
    std::uint64_t batches;  // taken from the ring since its memory was zeroed
    std::uint64_t entries;  // handed to the priorities by this thread
    std::uint64_t refused;  // no priority, or of no row; or one for a batch that says it is longer than a slot
  };

  /// Starts the thread. Memory and priorities must outlive it. `single_precision`: priorities are rounded to floats first. Throws
  /// std::invalid_argument: memory of another size.
  UpdateDrain(std::span<std::byte> memory, std::uint64_t slots, std::uint64_t entries, bool single_precision, Priorities& priorities);
  ~UpdateDrain() { stop(); }
  UpdateDrain(const UpdateDrain&) = delete;
  UpdateDrain& operator=(const UpdateDrain&) = delete;

  Counts counts() const;

  /// Throws what ended the thread, if something has: Damaged, Stalled. The batch at which it ended stays in the ring.
  void check_thread() const;

  /// Waits until so many batches were taken since the memory was zeroed. False: they were not in that time, or the thread has ended.
  /// Throws as check_thread().
  bool flush(std::uint64_t sent, std::chrono::milliseconds wait) const;

  /// Applies what has arrived, and ends the thread. Repeatable, from any thread.
  void stop();

  /// No batch is half applied while the process forks. The child has no thread, and takes nothing.
  void before_fork();
  void after_fork();  // in the child
  void forked();      // in both

 private:
  void run();
  bool take();
  template <class Real>
  void apply(const Word* slot, std::uint64_t n, std::vector<Real>& priorities);

  Word* ring_;
  std::uint64_t slots_, entries_;
  bool single_precision_;
  Priorities& priorities_;
  std::vector<std::int64_t> rows_, tickets_;  // of the batch under way: a device may write to the ring at any moment
  std::vector<float> floats_;
  std::vector<double> doubles_;
  std::atomic<std::uint64_t> batches_{0}, applied_{0}, refused_{0};
  std::exception_ptr error_;  // before ended_
  std::atomic<bool> stop_{false}, ended_{false};
  std::mutex joining_, applying_;
  std::thread thread_;
};

}  // namespace engram
