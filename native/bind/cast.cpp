#include "cast.h"

#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

namespace engram {
namespace {

template <class From, class To>
bool cast_all(const std::byte* from, std::byte* to, std::uint64_t n) {
  if constexpr (std::is_floating_point_v<From> && !std::is_floating_point_v<To>) {
    return false;
  } else {
    bool lost = false;
    for (std::uint64_t i = 0; i < n; ++i, from += sizeof(From), to += sizeof(To)) {
      From value;
      if constexpr (std::is_same_v<From, bool>) {
        value = *from != std::byte{0};
      } else {
        std::memcpy(&value, from, sizeof value);
        if constexpr (std::is_same_v<To, bool>) {
          lost |= value != 0 && value != 1;
        } else if constexpr (std::is_integral_v<To>) {
          lost |= !std::in_range<To>(value);
        }
      }
      const auto made = static_cast<To>(value);
      if constexpr (std::is_same_v<From, double> && std::is_same_v<To, float>) lost |= std::isinf(made) && !std::isinf(value);
      std::memcpy(to, &made, sizeof made);
    }
    return !lost;
  }
}

// Calls `use` with a value of the type of a dtype.
template <class Use>
bool with_type(Dtype dtype, const Use& use) {
  switch (dtype.code << 8 | dtype.bits) {
    case 0x008: return use(std::int8_t{});
    case 0x010: return use(std::int16_t{});
    case 0x020: return use(std::int32_t{});
    case 0x040: return use(std::int64_t{});
    case 0x108: return use(std::uint8_t{});
    case 0x110: return use(std::uint16_t{});
    case 0x120: return use(std::uint32_t{});
    case 0x140: return use(std::uint64_t{});
    case 0x220: return use(float{});
    case 0x240: return use(double{});
    case 0x608: return use(bool{});
    default: return false;
  }
}

}  // namespace

bool cast(const std::byte* from, Dtype was, std::byte* to, Dtype becomes, std::uint64_t n) {
  return with_type(was, [&](auto a) {
    return with_type(becomes, [&](auto b) { return cast_all<decltype(a), decltype(b)>(from, to, n); });
  });
}

}  // namespace engram
