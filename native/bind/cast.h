// Values of one dtype as values of another.
#pragma once

#include <cstddef>
#include <cstdint>

namespace engram {

/// The DLPack type code and bits of values.
struct Dtype {
  std::uint8_t code, bits;
};

/// Writes n values, which need not be aligned, as another dtype. False, with nothing useful written: one of the dtypes is not
/// known here, or more than precision would be lost: an int that does not fit, a fraction, or a float that becomes infinite.
bool cast(const std::byte* from, Dtype was, std::byte* to, Dtype becomes, std::uint64_t n);

}  // namespace engram
