// The processes attached to a shared store: the table in its control block, and the proof that one of them is dead.
//
// Every process holds a lock on one byte of the file `alive`, that of its entry, for as long as it lives: the kernel lets go
// of it however the process ends. Such locks belong to the process, not to the descriptor: they are not inherited by fork, and
// closing *any* descriptor of the file drops all of them. So the file is opened once per process, and by no other code.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>

#include "control.h"

namespace engram {

class Participants {
 public:
  static constexpr std::uint64_t kNoEntry = ~std::uint64_t{0};

  /// `file`: a descriptor of `alive`, open for writing for as long as this lives.
  Participants(Control control, int file) : control_(control), file_(file) {}

  /// Takes a free entry and notes this process in it. Entries of dead participants are not free before recover_dead().
  /// Returns kNoEntry if there is none.
  std::uint64_t join();

  /// Gives this process's entry back. If one of its threads is still writing, that stays noted until the process ends.
  void leave();

  /// Whether the store's files lie in a file system in memory: no read of them waits for a disk.
  bool in_memory() const;

  /// Whether this process holds an entry.
  bool joined() const { return own_ != kNoEntry; }

  /// The entry that this process holds; kNoEntry: none.
  std::uint64_t number() const { return own_; }

  /// Whether a process other than this one holds an entry.
  bool others() const;

  /// Calls `recover` for the entry of every dead participant and frees the entry. Meanwhile no other process can take or
  /// recover it. Returns how many there were. Only one thread of a process does this; the others return at once.
  std::uint64_t recover_dead(const std::function<void(Participant&)>& recover);

 private:
  bool lock(std::uint64_t entry) const;
  void unlock(std::uint64_t entry) const;
  bool held_by_another(std::uint64_t entry) const;
  bool runs(const Participant& entry) const;

  Control control_;
  int file_;
  std::uint64_t own_ = kNoEntry;
  std::mutex recovering_;
};

/// When a process began, as the kernel counts it; 0 if there is no such process, or it has ended and was not waited for yet.
std::uint64_t start_time_of(std::uint32_t pid);

/// What names this process's view of process numbers; 0 where there is only one.
std::uint64_t pid_namespace();

}  // namespace engram
