#include "shared_mutex.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <ctime>
#include <new>
#include <string>
#include <thread>

#include "wait.h"

#ifdef __GLIBC__  // wheels are compiled with glibc 2.28, which lacks this, and run with later ones, which have it
#if !__GLIBC_PREREQ(2, 30)
extern "C" int pthread_mutex_clocklock(pthread_mutex_t*, clockid_t, const timespec*);
#endif
#pragma weak pthread_mutex_clocklock
#endif

namespace engram {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(50);
constexpr int kSpins = 64;

#if defined(__linux__) && !defined(ENGRAM_WITHOUT_ROBUST_MUTEX)  // the tests must fail then: make negative-controls
#define ENGRAM_ROBUST_MUTEX 1
constexpr bool kRobust = true;
#else
constexpr bool kRobust = false;
#endif

// Null where the C library has none.
int (*const kClockLock)(pthread_mutex_t*, clockid_t, const timespec*) =
#if defined(__GLIBC__) && !defined(ENGRAM_TSAN)
    &pthread_mutex_clocklock;
#else
    nullptr;
#endif

// Waits for the kernel to wake the thread where that goes by a clock that cannot be set; else looks again and again. In slices:
// if a thread is killed just when it was woken to take the mutex, and another one was faster, those behind it stay asleep.
int lock_slice(pthread_mutex_t* mutex) {
  if (kClockLock == nullptr) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    return pthread_mutex_trylock(mutex);
  }
  constexpr long kSecond = 1'000'000'000;
  timespec until{};
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_nsec += std::chrono::nanoseconds(std::min(kSlice, wait_limit.load())).count();
  until.tv_sec += until.tv_nsec / kSecond;
  until.tv_nsec %= kSecond;
  return kClockLock(mutex, CLOCK_MONOTONIC, &until);
}

int lock_within(pthread_mutex_t* mutex) {
  let_go();
  const Deadline deadline;
  for (;;) {
    const int result = lock_slice(mutex);
    if (result != EBUSY && result != ETIMEDOUT) return result;
    if (deadline.passed()) return ETIMEDOUT;
  }
}

#ifdef __GLIBC__
// What format() makes of it. The C library goes by it as it finds it, and ends the process where it makes no sense to it.
int kind_of(pthread_mutex_t& mutex) { return copied(mutex.__data.__kind); }

int usual_kind() {
  static const int kind = [] {
    alignas(SharedMutex) std::byte memory[sizeof(SharedMutex)];
    reinterpret_cast<SharedMutex*>(memory)->format();
    return kind_of(*reinterpret_cast<pthread_mutex_t*>(memory));
  }();
  return kind;
}

bool sound(pthread_mutex_t& mutex) { return kind_of(mutex) == usual_kind(); }
#else
bool sound(pthread_mutex_t&) { return true; }
#endif

}  // namespace

void SharedMutex::format() {
  new (&mutex_) pthread_mutex_t{};
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
#ifdef ENGRAM_ROBUST_MUTEX
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
#endif
  const int result = pthread_mutex_init(&mutex_, &attributes);
  pthread_mutexattr_destroy(&attributes);
  if (result != 0) throw std::runtime_error("a mutex cannot be made: error " + std::to_string(result));
}

bool SharedMutex::lock() {
  intact(sound(mutex_), "a lock: expected one of the kind that was made");
  int result = EBUSY;
  for (int spin = 0; spin < kSpins && result == EBUSY; ++spin) result = pthread_mutex_trylock(&mutex_);
  if (result == EBUSY) {
    let_go();
    result = lock_within(&mutex_);
  }
  switch (result) {
    case 0:
      return false;
    case EOWNERDEAD:
      return kRobust;
    case ETIMEDOUT:
      throw in_vain("an index has been in the hands of another process or thread");
    case ENOTRECOVERABLE:
      throw Damaged("an index was left half changed, and could not be recovered: load a checkpoint into a new store");
    default:
      throw Damaged("a lock in shared memory cannot be taken: error " + std::to_string(result));
  }
}

void SharedMutex::recovered() {
#ifdef ENGRAM_ROBUST_MUTEX
  pthread_mutex_consistent(&mutex_);
#endif
}

bool SharedMutex::held() {
  if (pthread_mutex_trylock(&mutex_) != 0) return true;
  pthread_mutex_unlock(&mutex_);
  return false;
}

void SharedMutex::unlock() { pthread_mutex_unlock(&mutex_); }

}  // namespace engram
