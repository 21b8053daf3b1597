// Counter-based random numbers: number i of a draw is a pure function of (key, i), so neither threads nor the order
// of evaluation change a draw.
//
// Source: the finaliser is SplitMix64's (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
// OOPSLA 2014), evaluated at its i-th state.
#pragma once

#include <cstdint>

namespace engram {

constexpr std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

/// The numbers of one draw. The key is mixed first: keys of a generator that differ by little give unrelated numbers.
class Random {
 public:
  constexpr explicit Random(std::uint64_t key) : state_(mix(key + kGamma)) {}

  /// 64 random bits, number `i` of the draw; `attempt` numbers the redraws of a row that moved.
  constexpr std::uint64_t bits(std::uint64_t i, std::uint64_t attempt = 0) const {
    return mix(mix(state_ + attempt * 0xD1342543DE82EF95ull) + (i + 1) * kGamma);
  }

  /// Uniform in [0, n), n > 0. The bias is below n / 2^64.
  std::uint64_t below(std::uint64_t n, std::uint64_t i, std::uint64_t attempt = 0) const {
    return static_cast<std::uint64_t>((static_cast<unsigned __int128>(bits(i, attempt)) * n) >> 64);
  }

 private:
  static constexpr std::uint64_t kGamma = 0x9E3779B97F4A7C15ull;
  std::uint64_t state_;
};

}  // namespace engram
