// Looking at torch tensors, and making them, without torch: through the DLPack exchange table that torch.Tensor publishes
// (torch >= 2.10).
//
// Reading address, dtype, shape and strides of a tensor takes 50 ns this way; asking its Python attributes takes 700.
// Making one around memory of ours takes 370 ns; torch.empty_like takes 750.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <span>
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

  const std::vector<RowSpec>& specs() const { return specs_; }

 private:
  std::vector<RowSpec> specs_;
};

/// dtypes of what accompanies rows.
inline const RowSpec kNumbers{0, 64, {}}, kFloat{2, 32, {}}, kDouble{2, 64, {}}, kFlag{6, 8, {}}, kFlagColumn{6, 8, {1}};

/// Memory for the values of one tensor of at most so many rows, which may be filled before the tensor is made. Taking it
/// needs no GIL. Of a torch with an exchange table a tensor takes 0.35 us. Where Python names a maker of tensors for this
/// thread, the memory is that of one of its tensors, and the GIL is taken to ask for it.
class Room {
 public:
  /// `spec` must outlive it.
  Room(const RowSpec& spec, std::int64_t most);
  Room(Room&& other) noexcept;
  ~Room();

  std::byte* data() const { return data_; }
  /// A CPU tensor [n, *shape] that owns the memory.
  nanobind::object tensor(std::int64_t n) &&;

 private:
  void take_made(std::int64_t most);

  const RowSpec* spec_;
  std::byte *memory_ = nullptr, *data_ = nullptr;
  nanobind::object made_;
};

/// Room for several.
class Rooms {
 public:
  void add(const RowSpec& spec, std::int64_t most);
  void add(const Layout& layout, std::int64_t most);

  /// Where the i-th begins, as T.
  template <class T>
  T* at(std::size_t i) const {
    return reinterpret_cast<T*>(addresses_[i]);
  }
  std::size_t size() const { return addresses_.size(); }
  /// Where the first n begin.
  std::span<std::byte* const> first(std::size_t n) const { return {addresses_.data(), n}; }

  nanobind::list tensors(std::int64_t n) &&;

 private:
  std::vector<Room> rooms_;
  std::vector<std::byte*> addresses_;
};

void bind_tensors(nanobind::module_& m);

}  // namespace engram
