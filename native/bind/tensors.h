// Looking at torch tensors, and making them, without torch: through the DLPack exchange table that torch.Tensor publishes
// (torch >= 2.10).
//
// Reading address, dtype, shape and strides of a tensor takes 50 ns this way; asking its Python attributes takes 700.
// Making one around memory of ours takes 370 ns; torch.empty_like takes 750.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace engram {

/// dtype, as DLPack names it, and shape of a row.
struct RowSpec {
  std::uint8_t code, bits;
  std::vector<std::int64_t> shape;
};

/// The dtypes and shapes that rows of a store have.
class Layout {
 public:
  explicit Layout(const nanobind::list& specs);

  /// Whether the values are n rows (n < 0: one row without that dimension) that can be copied as bytes as they are.
  bool fits(const nanobind::list& values, std::int64_t n) const;

  /// Appends uninitialised CPU tensors [n, *shape] of every field, and their addresses.
  void allocate(std::int64_t n, nanobind::list& tensors, std::vector<std::byte*>& addresses) const;

 private:
  std::vector<RowSpec> specs_;
};

/// As Layout::allocate, one int64 tensor [n].
void allocate_rows(std::int64_t n, nanobind::list& tensors, std::vector<std::byte*>& addresses);

/// As Layout::allocate, one float32 or float64 tensor [n].
void allocate_weights(std::int64_t n, bool single_precision, nanobind::list& tensors,
                      std::vector<std::byte*>& addresses);

void bind_tensors(nanobind::module_& m);

}  // namespace engram
