// The windows of a run of steps: how many there are, and which places each has.
#pragma once

#include <algorithm>
#include <cstdint>

#include "trajectories.h"

namespace engram {

/// Windows that a run of n steps gives: one per place where it may begin, overhangs included.
inline std::uint64_t windows_in(std::uint64_t n, const WindowSpec& spec) {
  const std::uint64_t padded = n + spec.ahead(), extent = spec.extent();
  if (n == 0 || (spec.strict && padded < extent)) return 0;
  const std::uint64_t beyond = padded >= extent ? padded - extent : 0, space = spec.period == 1 ? beyond : beyond / spec.period;
  return space + 1 + spec.left + std::min(spec.right, n - 1 - space);
}

/// The window that begins `from` places behind the first one of a run of n steps, without its first `missing` places; only the
/// places that are really there. The run begins at `first`, the first window perhaps before it.
inline Window window_from(std::uint64_t track, std::uint64_t first, std::uint64_t n, std::uint64_t from, std::uint64_t missing,
                          const WindowSpec& spec) {
  const std::uint64_t ahead = spec.ahead() > from ? spec.ahead() - from : 0, skipped = from + ahead - spec.ahead();
  return {track, first + skipped, std::min(spec.extent() - missing - ahead, n - skipped), ahead};
}

/// The k-th of windows_in.
inline Window window_in(std::uint64_t track, std::uint64_t first, std::uint64_t n, std::uint64_t k, const WindowSpec& spec) {
  const std::uint64_t from = k > spec.left ? (k - spec.left) * spec.period : 0;
  return window_from(track, first, n, from, k < spec.left ? spec.left - k : 0, spec);
}

}  // namespace engram
