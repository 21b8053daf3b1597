// Looking at torch tensors, and making them, without torch: through the DLPack exchange table that torch.Tensor publishes
// (torch >= 2.10).
//
// Reading address, dtype, shape and strides of a tensor takes 50 ns this way; asking its Python attributes takes 700.
// Making one around memory of ours takes 370 ns; torch.empty_like takes 750.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

namespace engram {

/// dtype, as DLPack names it, and shape of a row.
struct RowSpec {
  std::uint8_t code, bits;
  std::vector<std::int64_t> shape;
};

/// How the values of a tensor or an array lie in memory.
struct Values {
  static constexpr std::int32_t kMost = 16;  // dimensions
  const std::byte* data;
  std::uint8_t code, bits;
  std::int32_t ndim;
  std::int64_t shape[kMost], strides[kMost];  // in bytes

  std::int64_t item_bytes() const { return (bits + 7) / 8; }
  /// Of all values, one behind the other.
  std::int64_t bytes() const { return std::accumulate(shape, shape + ndim, item_bytes(), std::multiplies<>()); }
  bool contiguous() const;
};

/// False if the object is no tensor on the CPU whose bytes are its values. Not `asks`: it may be a conjugate or negative view, which
/// torch alone can say, and gives the interpreter up meanwhile.
bool look_at_tensor(PyObject* object, Values& values, bool asks = true);

/// Whether values are n rows of this spec (n < 0: one row without that dimension).
bool have_shape(const Values& values, const RowSpec& spec, std::int64_t n);

RowSpec spec_of(nanobind::handle spec);  // (DLPack type code, bits, shape)

/// Bytes of n rows. Throws NoMemory: more than a machine has.
std::size_t bytes_of_rows(const RowSpec& spec, std::int64_t n);

/// A tensor [n, *shape], with `each` [n / each, each, *shape], around memory that an object keeps.
nanobind::object view_of(const RowSpec& spec, std::byte* data, std::int64_t n, std::int64_t each, nanobind::handle owner);

/// The dtypes and shapes that rows of a store have.
class Layout {
 public:
  explicit Layout(const nanobind::list& specs);

  /// Whether the values are n rows (n < 0: one row without that dimension) that can be copied as bytes as they are.
  bool fits(const nanobind::list& values, std::int64_t n) const;

  /// More fields. Calls that have begun with those of before end with them; one thread at a time adds.
  void add(std::span<const RowSpec> more);

  const std::vector<RowSpec>& specs() const { return *current_.load(std::memory_order_acquire); }

 private:
  void set(std::vector<RowSpec> specs);

  std::vector<std::unique_ptr<const std::vector<RowSpec>>> all_;
  std::atomic<const std::vector<RowSpec>*> current_;
};

/// dtypes of what accompanies rows.
inline const RowSpec kNumbers{0, 64, {}}, kFloat{2, 32, {}}, kDouble{2, 64, {}}, kFlag{6, 8, {}}, kFlagColumn{6, 8, {1}};

class OutputBlock;

/// Memory for one tensor of at most so many rows, which may be filled before the tensor is made. Allocating it needs no GIL.
/// With an exchange table of torch, making the tensor takes 0.35 us. If this thread is within an OutputBlock with room, the memory is a part
/// of it; if Python has set an allocator for this thread, that of one of its tensors, and the GIL is taken to call it.
class OutputBuffer {
 public:
  /// `spec` must outlive it.
  OutputBuffer(const RowSpec& spec, std::int64_t most);
  OutputBuffer(OutputBuffer&& other) noexcept;
  ~OutputBuffer();

  std::byte* data() const { return data_; }
  /// A CPU tensor [n, *shape] that owns the memory; with `each` [n / each, each, *shape].
  nanobind::object tensor(std::int64_t n, std::int64_t each = 0) &&;

 private:
  void take_allocated(std::int64_t most);

  const RowSpec* spec_;
  OutputBlock* block_ = nullptr;
  std::byte *memory_ = nullptr, *data_ = nullptr;
  nanobind::object allocated_;
};

/// Memory for several tensors.
class OutputBuffers {
 public:
  void add(const RowSpec& spec, std::int64_t most);
  void add(const std::vector<RowSpec>& specs, std::int64_t most);
  /// Returns the number of fields.
  std::size_t add(const Layout& layout, std::int64_t most) { return add(layout.specs(), most), buffers_.size(); }

  /// Where the i-th begins, as T.
  template <class T>
  T* at(std::size_t i) const {
    return reinterpret_cast<T*>(addresses_[i]);
  }
  std::size_t size() const { return addresses_.size(); }
  /// Where the first n begin.
  std::span<std::byte* const> first(std::size_t n) const { return {addresses_.data(), n}; }

  nanobind::list tensors(std::int64_t n, std::int64_t each = 0) &&;

 private:
  std::vector<OutputBuffer> buffers_;
  std::vector<std::byte*> addresses_;
};

void bind_tensors(nanobind::module_& m);

}  // namespace engram
