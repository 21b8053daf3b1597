#include "pool.h"

#include <pthread.h>
#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "check.h"

namespace engram {
namespace {

#ifdef __linux__

int current_core() { return sched_getcpu(); }

// Moves the calling thread from `core` to any other that it may use. Linux takes an idle virtual core for one that the
// host has preempted, and wakes a thread on its waker's core instead: there it waits until the waker has done the work.
// (A change of the process's cores in this very moment is undone for this thread.)
void leave_core(int core) {
  if (core < 0 || current_core() != core) return;
  cpu_set_t all;
  if (sched_getaffinity(0, sizeof all, &all) != 0) return;
  cpu_set_t others = all;
  CPU_CLR(static_cast<std::size_t>(core), &others);
  if (CPU_COUNT(&others) > 0 && sched_setaffinity(0, sizeof others, &others) == 0) {
    sched_setaffinity(0, sizeof all, &all);
  }
}

#else

int current_core() { return -1; }
void leave_core(int) {}

#endif

class Pool {
 public:
  static Pool& instance() {
    // Never destroyed: its threads may outlive static destruction at exit.
    static Pool* pool = [] {
      auto* made = new Pool;
      pthread_atfork(before_fork, after_fork_parent, after_fork_child);
      return made;
    }();
    return *pool;
  }

  void resize(std::size_t n) {
    check(n >= 1 && n <= 1024, "the number of threads must be in [1, 1024]");
    std::lock_guard<std::mutex> call(call_);
    if (n == size()) return;
    stop_workers();
    wanted_.store(n, std::memory_order_relaxed);
  }

  std::size_t size() const { return wanted_.load(std::memory_order_relaxed); }

  void run(std::size_t chunks, Task task, void* context) {
    std::unique_lock<std::mutex> call(call_, std::defer_lock);
    if (chunks < 2 || size() < 2 || !call.try_lock()) {
      for (std::size_t c = 0; c < chunks; ++c) task(context, c);
      return;
    }
    if (workers_.empty()) start_workers();
    {
      std::lock_guard<std::mutex> guard(state_);
      task_ = task;
      context_ = context;
      chunks_ = chunks;
      open_ = true;
      core_ = current_core();
      next_.store(0, std::memory_order_relaxed);
      round_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    take_chunks();
    {
      std::lock_guard<std::mutex> guard(state_);
      open_ = false;  // nothing is left to take: a thread that wakes only now is not waited for
    }
    spin_until([this] { return busy_.load(std::memory_order_acquire) == 0; });
    std::unique_lock<std::mutex> guard(state_);
    done_.wait(guard, [this] { return busy_ == 0; });
  }

 private:
  Pool() {
    const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
    // Four threads saturate the memory of most machines; more only take cores from the learner.
    wanted_.store(std::min<std::size_t>(cores, 4), std::memory_order_relaxed);
  }

  void take_chunks() {
    for (;;) {
      const std::size_t c = next_.fetch_add(1, std::memory_order_relaxed);
      if (c >= chunks_) return;
      task_(context_, c);
    }
  }

  void start_workers() {
    for (std::size_t i = 1; i < size(); ++i) {
      workers_.emplace_back([this, seen = round_.load()]() mutable { work(seen); });
    }
  }

  // Waking a thread takes as long as a job lasts: a thread that waits looks for a moment before it sleeps. Short, because
  // the core may be the learner's.
  template <class Ready>
  static void spin_until(Ready ready) {
    constexpr auto kSpin = std::chrono::microseconds(100);
    const auto end = std::chrono::steady_clock::now() + kSpin;
    while (!ready() && std::chrono::steady_clock::now() < end) {
    }
  }

  void work(std::size_t seen) {
    std::unique_lock<std::mutex> guard(state_, std::defer_lock);
    for (;;) {
      spin_until([&] { return round_.load(std::memory_order_acquire) != seen; });
      guard.lock();
      wake_.wait(guard, [&] { return stop_ || round_ != seen; });
      if (stop_) return;
      seen = round_;
      const int core = core_;
      if (open_) {
        ++busy_;
        guard.unlock();
        take_chunks();
        guard.lock();
        if (--busy_ == 0) done_.notify_one();
      }
      guard.unlock();
      leave_core(core);
    }
  }

  void stop_workers() {
    {
      std::lock_guard<std::mutex> guard(state_);
      stop_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
    stop_ = false;
  }

  // A fork copies only the calling thread. It waits for running work, so that every lock is free; the child then
  // forgets the threads that it does not have.
  static void before_fork() { instance().call_.lock(); }
  static void after_fork_parent() { instance().call_.unlock(); }
  static void after_fork_child() {
    Pool& pool = instance();
    // The std::thread objects name threads of the parent: neither joinable here nor destructible. They are leaked.
    new std::vector<std::thread>(std::move(pool.workers_));
    pool.workers_.clear();
    // Workers of the parent may have waited on these at the moment of the fork.
    new (&pool.wake_) std::condition_variable;
    new (&pool.done_) std::condition_variable;
    new (&pool.state_) std::mutex;
    pool.call_.unlock();
  }

  std::mutex call_;  // held for a whole call: one job at a time
  std::mutex state_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  std::atomic<std::size_t> wanted_{1};
  std::atomic<std::size_t> next_{0};
  std::atomic<std::size_t> round_{0};  // counts jobs
  std::atomic<std::size_t> busy_{0};   // workers inside the job
  std::size_t chunks_ = 0;
  Task task_ = nullptr;
  void* context_ = nullptr;
  int core_ = -1;      // the caller's
  bool open_ = false;  // the job has chunks to take
  bool stop_ = false;
};

}  // namespace

void set_num_threads(std::size_t n) { Pool::instance().resize(n); }
std::size_t num_threads() { return Pool::instance().size(); }
void run_chunks(std::size_t chunks, Task task, void* context) { Pool::instance().run(chunks, task, context); }

}  // namespace engram
