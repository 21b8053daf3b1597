// A mutex in memory that processes may share, whose holder may die: the next one is told, and mends what it left.
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
  /// In memory that holds anything: before anybody else sees it, or when nobody who did is alive.
  void format();

  /// Waits, bounded: throws Stalled after wait_limit (5 s), Damaged if this is no such mutex any more. True: the holder before died, and what it guards must be mended and
  /// mended() called, before unlock(); otherwise nobody gets it any more.
  [[nodiscard]] bool lock();
  void mended();
  void unlock();
  /// Whether somebody holds it. (In the only thread of a process, of memory that is its own: for ever.)
  bool held();

 private:
  pthread_mutex_t mutex_;
};

/// Holds a SharedMutex; `mend` is called first if the holder before died.
class SharedLock {
 public:
  template <class Mend>
  SharedLock(SharedMutex& mutex, Mend&& mend) : mutex_(mutex) {
    if (!mutex_.lock()) return;
    try {
      mend();
    } catch (...) {  // left unrecoverable: better an error than what was half done
      mutex_.unlock();
      throw;
    }
    mutex_.mended();
  }
  ~SharedLock() { mutex_.unlock(); }
  SharedLock(const SharedLock&) = delete;
  SharedLock& operator=(const SharedLock&) = delete;

 private:
  SharedMutex& mutex_;
};

}  // namespace engram
