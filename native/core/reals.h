// Real numbers as they lie in memory, by the dtype that DLPack names.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace engram {

// Stored as 16 bits.
struct Half {
  std::uint16_t bits;
  explicit operator double() const {
    const unsigned exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double sign = bits >> 15 != 0 ? -1 : 1;
    if (exponent == 31) return fraction != 0 ? std::nan("") : sign * INFINITY;
    if (exponent == 0) return sign * std::ldexp(fraction, -24);
    return sign * std::ldexp(1024 + fraction, static_cast<int>(exponent) - 25);
  }
};
struct BrainFloat {
  std::uint16_t bits;
  explicit operator double() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
};

/// What `of` returns for the type of numbers of a dtype, which converts to double; `otherwise`: they are no real ones.
template <class Result, class Of>
Result of_reals(std::uint8_t code, std::uint8_t bits, Of of, Result otherwise) {
  constexpr std::uint8_t kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4, kBool = 6;
  switch (code << 8 | bits) {
    case kInt << 8 | 8: return of.template operator()<std::int8_t>();
    case kInt << 8 | 16: return of.template operator()<std::int16_t>();
    case kInt << 8 | 32: return of.template operator()<std::int32_t>();
    case kInt << 8 | 64: return of.template operator()<std::int64_t>();
    case kBool << 8 | 8:
    case kUint << 8 | 8: return of.template operator()<std::uint8_t>();
    case kUint << 8 | 16: return of.template operator()<std::uint16_t>();
    case kUint << 8 | 32: return of.template operator()<std::uint32_t>();
    case kUint << 8 | 64: return of.template operator()<std::uint64_t>();
    case kFloat << 8 | 16: return of.template operator()<Half>();
    case kFloat << 8 | 32: return of.template operator()<float>();
    case kFloat << 8 | 64: return of.template operator()<double>();
    case kBfloat << 8 | 16: return of.template operator()<BrainFloat>();
    default: return otherwise;
  }
}

}  // namespace engram
