// A robust mutex in shared memory: if its holder dies, the next process to lock it is told and recovers what it guards.
//
// Held for microseconds, one at a time. The memory must stay mapped until every call on it has returned: within unlock() it is
// still on glibc's list of robust mutexes, and the kernel writes there if the process is killed. Where robust mutexes are missing (macOS) it is a plain one: a holder that is killed
// stops the others, until the wait ends.
#pragma once

#include <pthread.h>

#include <cstdint>

namespace engram {

class SharedMutex {
 public:
  /// In any memory, before another process sees it, or when no process that did is alive.
  void format();

  /// Waits, bounded: throws Stalled after wait_limit (5 s), Damaged if this is no such mutex any more. True: the previous holder
  /// died. Recover what the mutex guards and call recovered() before unlock(); without that it can never be locked again.
  [[nodiscard]] bool lock();
  void recovered();
  void unlock();
  /// Whether it is locked. (In the only thread of a process, in private memory: for ever.)
  bool held();

 private:
  pthread_mutex_t mutex_;
};

/// Holds a SharedMutex; calls `recover` first if the previous holder died.
class SharedLock {
 public:
  template <class Recover>
  SharedLock(SharedMutex& mutex, Recover&& recover) : mutex_(mutex) {
    if (!mutex_.lock()) return;
    try {
      recover();
    } catch (...) {  // left unrecoverable: better an error than what was half done
      mutex_.unlock();
      throw;
    }
    mutex_.recovered();
  }
  ~SharedLock() { mutex_.unlock(); }
  SharedLock(const SharedLock&) = delete;
  SharedLock& operator=(const SharedLock&) = delete;

 private:
  SharedMutex& mutex_;
};

}  // namespace engram
