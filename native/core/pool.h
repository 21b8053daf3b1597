// A standing pool of threads for large copies. A thread per call cost 1.6 to 1.9 times a plain copy.
#pragma once

#include <cstddef>
#include <cstdint>

namespace engram {

/// A copy below this is not worth waking a thread for.
inline constexpr std::uint64_t kParallelBytes = 512 * 1024;

using Task = void (*)(void* context, std::size_t chunk) noexcept;

/// Threads used for one call, the caller included. n >= 1. Waits for running work; starts threads lazily.
void set_num_threads(std::size_t n);
std::size_t num_threads();

/// Runs task(context, c) for every c in [0, chunks), on the pool and on the caller; returns when all are done. If the
/// pool is at work for another caller, or has one thread, the caller does everything itself: no caller waits for another one.
/// After a fork the child starts threads of its own.
void run_chunks(std::size_t chunks, Task task, void* context);

template <class F>
void parallel(std::size_t chunks, F&& body) {
  run_chunks(
      chunks, [](void* context, std::size_t chunk) noexcept { (*static_cast<F*>(context))(chunk); }, &body);
}

}  // namespace engram
