// What a call is given to read or to fill: a tensor, and never the address of one, so that it is there for as long as the call runs.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <type_traits>

#include "../core/check.h"
#include "cast.h"
#include "tensors.h"

namespace engram {

/// The values of a tensor of T on the CPU, one behind the other, whatever its shape; none, and null, of None.
template <class T>
struct Column {
  T* data = nullptr;
  std::size_t size = 0;

  std::span<T> span() const { return {data, size}; }
  /// Its values, of which there are n. Throws std::invalid_argument: there are not.
  T* of(std::size_t n) const {
    check(size == n, "as many values as rows");
    return data;
  }
  /// The same of the first n.
  T* first(std::size_t n) const {
    check(size >= n, "as many values as rows");
    return data;
  }
  /// As of(); null of None.
  T* of_any(std::size_t n) const { return data == nullptr ? nullptr : of(n); }
};

using Numbers = Column<const std::int64_t>;

/// The dtype that a tensor must have for it, as DLPack names it.
template <class T>
constexpr Dtype dtype_of() {
  using Value = std::remove_const_t<T>;
  constexpr std::uint8_t kSigned = 0, kFloating = 2, kBool = 6;
  return {std::is_same_v<Value, bool> ? kBool : std::is_floating_point_v<Value> ? kFloating : kSigned, 8 * sizeof(Value)};
}

}  // namespace engram

namespace nanobind::detail {

template <class T>
struct type_caster<engram::Column<T>> {
  NB_TYPE_CASTER(engram::Column<T>, const_name("torch.Tensor"))

  bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
    value = {};
    if (source.is_none()) return true;  // where the argument may be
    try {
      engram::Values seen;
      const engram::Dtype wanted = engram::dtype_of<T>();
      if (!engram::look_at_tensor(source.ptr(), seen, false) || seen.code != wanted.code || seen.bits != wanted.bits || !seen.contiguous()) {
        return false;
      }
      value.data = reinterpret_cast<T*>(const_cast<std::byte*>(seen.data));
      value.size = 1;
      for (std::int32_t d = 0; d < seen.ndim; ++d) value.size *= static_cast<std::size_t>(seen.shape[d]);
      // Asking torch gives the interpreter up. The negative view of several numbers has gaps: it is an imaginary part.
      return value.size > 1 || engram::look_at_tensor(source.ptr(), seen);
    } catch (const std::exception&) {
      return false;
    }
  }
};

}  // namespace nanobind::detail
