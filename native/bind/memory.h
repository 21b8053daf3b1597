// Memory as it crosses the binding: plain addresses, whose dtype, shape and lifetime the Python side has seen to.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace engram {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

inline std::span<std::byte> block(Address address, std::uint64_t bytes) { return {at<std::byte>(address), bytes}; }

/// A NumPy array around the values, which it owns.
inline nanobind::object array_of(std::vector<std::int64_t>&& values) {
  auto owned = std::make_unique<std::vector<std::int64_t>>(std::move(values));
  auto* vector = owned.get();
  nanobind::capsule owner(owned.release(),
                          [](void* p) noexcept { delete static_cast<std::vector<std::int64_t>*>(p); });
  return nanobind::cast(nanobind::ndarray<nanobind::numpy, std::int64_t, nanobind::ndim<1>>(
      vector->data(), {vector->size()}, owner));
}

}  // namespace engram
