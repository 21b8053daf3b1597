#include "tensors.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "../core/check.h"
#include "../core/spare.h"
#include "../core/wait.h"
#include "block.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

// DLPack's versioned tensor with an owner, and the part of DLPack 1.3's exchange table that is used here. Both layouts are
// fixed for major version 1.
struct ManagedTensor {
  struct {
    std::uint32_t major, minor;
  } version;
  void* manager;
  void (*deleter)(ManagedTensor*);
  std::uint64_t flags;
  nb::dlpack::dltensor tensor;
};

struct ExchangeTable {
  struct {
    std::uint32_t major, minor;
  } version;
  void* previous;
  void* allocator;
  void* managed_from_object;
  int (*to_object)(ManagedTensor* tensor, void** out);  // takes ownership
  int (*borrow)(void* object, nb::dlpack::dltensor* out);  // the object keeps owning everything
  void* current_stream;
};

// Set once, when the package is imported, with the GIL held.
const ExchangeTable* exchange = nullptr;
PyTypeObject* tensor_type = nullptr;
PyObject* is_neg_name = nullptr;
PyObject* is_conj_name = nullptr;
PyObject* is_zero_name = nullptr;

// Makes tensors on this thread, as empty(shape, code, bits); null: the core does. Holds a reference.
thread_local PyObject* allocator = nullptr;

constexpr std::int32_t kCpu = 1;

bool says_yes(PyObject* tensor, PyObject* method) {
  PyObject* answer = PyObject_CallMethodObjArgs(tensor, method, nullptr);
  if (answer == nullptr) throw nb::python_error();
  const bool yes = answer != Py_False;
  Py_DECREF(answer);
  return yes;
}

// The table knows no conjugate or negative views: their bytes are not their values. Integers cannot be such views.
bool is_lazy_view(PyObject* tensor, std::uint8_t code) {
  constexpr std::uint8_t kFloat = 2, kComplex = 5, kBool = 6;
  if (code < kFloat || code == kBool) return false;
  return says_yes(tensor, is_neg_name) || (code == kComplex && says_yes(tensor, is_conj_name));
}

// The bytes of a tensor, if it is one on the CPU, of the spec's dtype, of shape [n, *shape] (n < 0: [*shape]), contiguous,
// and its bytes are its values; else null.
const std::byte* bytes_of(PyObject* object, const RowSpec& spec, std::int64_t n) {
  Values values;
  const bool fits = look_at_tensor(object, values) && values.code == spec.code && values.bits == spec.bits &&
                    have_shape(values, spec, n) && values.contiguous();
  return fits ? values.data : nullptr;
}

// Where the values of a tensor begin in memory of ours: behind the DLPack words, shape and strides, aligned to a cache line.
std::byte* values_in(std::byte* memory, std::size_t ndim) {
  constexpr std::size_t kAlign = 64;
  std::byte* data = memory + sizeof(ManagedTensor) + 2 * sizeof(std::int64_t) * ndim;
  return data + (kAlign - reinterpret_cast<std::uintptr_t>(data) % kAlign);
}

// Asks for objects scattered over the heap, and for what their first words point to, before they are used one by one: of a
// list of small tensors most of the time is waiting for memory, one miss after the other. Only hints: whatever the words
// are, asking for an address does no harm.
void prefetch_objects(const nb::list& items) {
  const std::size_t n = items.size();
  for (std::size_t i = 0; i < n; ++i) __builtin_prefetch(items[i].ptr(), 0, 3);
  constexpr std::size_t kHeader = 2, kMost = 6;
  PyTypeObject* type = nullptr;
  std::size_t words = 0;
  for (std::size_t i = 0; i < n; ++i) {
    PyObject* object = items[i].ptr();
    if (Py_TYPE(object) != type) {
      type = Py_TYPE(object);
      const auto bytes = nb::cast<std::size_t>(nb::handle(reinterpret_cast<PyObject*>(type)).attr("__basicsize__"));
      words = std::min(bytes / sizeof(void*), kMost);
    }
    for (std::size_t w = kHeader; w < words; ++w) {
      const auto* target = reinterpret_cast<char* const*>(object)[w];
      for (int line = 0; line < 3; ++line) __builtin_prefetch(target + 64 * line, 0, 3);
    }
  }
}

// Copies n tensors of equal dtype and shape one behind the other into `out`; false, and nothing useful in `out`, if one of
// them cannot be copied as bytes. The GIL is held: the tensors belong to lists that others may change.
bool stack(const nb::list& items, nb::handle out) {
  if (exchange == nullptr || !PyObject_TypeCheck(out.ptr(), tensor_type)) return false;
  nb::dlpack::dltensor target;
  if (exchange->borrow(out.ptr(), &target) != 0) throw nb::python_error();
  if (target.ndim < 1 || target.shape[0] != static_cast<std::int64_t>(items.size())) return false;
  RowSpec spec{target.dtype.code, target.dtype.bits, {target.shape + 1, target.shape + target.ndim}};
  std::uint64_t bytes = (spec.bits + 7u) / 8u;
  for (const std::int64_t size : spec.shape) bytes *= static_cast<std::uint64_t>(size);
  prefetch_objects(items);
  std::vector<const std::byte*> rows;
  rows.reserve(items.size());
  for (nb::handle item : items) {
    const std::byte* from = bytes_of(item.ptr(), spec, -1);
    if (from == nullptr) return false;
    __builtin_prefetch(from, 0, 3);
    rows.push_back(from);
  }
  auto* to = static_cast<std::byte*>(target.data) + target.byte_offset;
  for (const std::byte* from : rows) {
    if (bytes != 0) std::memcpy(to, from, bytes);
    to += bytes;
  }
  return true;
}

// Returns the previous allocator, or None.
nb::object set_allocator(nb::object allocate) {
  nb::object previous = allocator == nullptr ? nb::none() : nb::steal<nb::object>(allocator);
  allocator = allocate.is_none() ? nullptr : allocate.release().ptr();
  return previous;
}

bool use_tensor_type(nb::handle type) {
  exchange = nullptr;
  if (!nb::hasattr(type, "__dlpack_c_exchange_api__")) return false;
  const nb::object capsule = type.attr("__dlpack_c_exchange_api__");
  const auto* table = static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (table == nullptr) throw nb::python_error();
  if (table->version.major != 1 || table->borrow == nullptr) return false;
  exchange = table;
  tensor_type = reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());
  is_neg_name = PyUnicode_InternFromString("is_neg");
  is_conj_name = PyUnicode_InternFromString("is_conj");
  is_zero_name = PyUnicode_InternFromString("_is_zerotensor");
  return true;
}

// A tensor around values that lie behind the descriptor, in the same allocation; or that `owner` keeps, which the GIL must be taken
// for when the tensor is gone. The allocation is taken over, whatever comes.
nb::object tensor_around(std::byte* memory, const RowSpec& spec, std::byte* data, std::int64_t n, std::int64_t each, PyObject* owner) {
  const std::int32_t leading = each > 0 ? 2 : 1, ndim = static_cast<std::int32_t>(spec.shape.size()) + leading;
  auto* managed = new (memory) ManagedTensor{};
  auto* shape = reinterpret_cast<std::int64_t*>(memory + sizeof(ManagedTensor));
  std::int64_t* strides = shape + ndim;
  shape[0] = each > 0 ? n / each : n;
  if (each > 0) shape[1] = each;
  std::copy(spec.shape.begin(), spec.shape.end(), shape + leading);
  std::int64_t stride = 1;
  for (std::int32_t d = ndim; d-- > 0;) {
    strides[d] = stride;
    stride *= shape[d] > 1 ? shape[d] : 1;
  }
  managed->manager = owner;
  Py_XINCREF(owner);
  managed->deleter = [](ManagedTensor* self) {
    if (self->manager != nullptr && Py_IsInitialized() != 0) {
      const nb::gil_scoped_acquire acquire;
      Py_DECREF(static_cast<PyObject*>(self->manager));
    }
    keep_or_free(self);  // where the memory begins
  };
  if (exchange == nullptr) {  // an older torch: it takes a capsule of its own, some 10 us later
    std::vector<std::size_t> sizes(shape, shape + ndim);
    nb::capsule keeper(managed, [](void* self) noexcept { static_cast<ManagedTensor*>(self)->deleter(static_cast<ManagedTensor*>(self)); });
    return nb::cast(nb::ndarray<nb::pytorch>(data, sizes.size(), sizes.data(), keeper, nullptr, nb::dlpack::dtype{spec.code, spec.bits, 1}));
  }
  managed->version = {1, 0};
  managed->tensor.data = data;
  managed->tensor.device = {kCpu, 0};
  managed->tensor.ndim = ndim;
  managed->tensor.dtype = {spec.code, spec.bits, 1};
  managed->tensor.shape = shape;
  managed->tensor.strides = strides;
  void* object = nullptr;
  if (exchange->to_object(managed, &object) != 0) throw nb::python_error();
  return nb::steal<nb::object>(static_cast<PyObject*>(object));
}

}  // namespace

nb::object view_of(const RowSpec& spec, std::byte* data, std::int64_t n, std::int64_t each, nb::handle owner) {
  auto* memory = static_cast<std::byte*>(std::malloc(sizeof(ManagedTensor) + 2 * sizeof(std::int64_t) * (spec.shape.size() + 2)));
  if (memory == nullptr) throw std::bad_alloc();
  return tensor_around(memory, spec, data, n, each, owner.ptr());
}

RowSpec spec_of(nb::handle spec) {
  RowSpec made{nb::cast<std::uint8_t>(spec[0]), nb::cast<std::uint8_t>(spec[1]), {}};
  for (nb::handle size : spec[2]) made.shape.push_back(nb::cast<std::int64_t>(size));
  return made;
}

bool Values::contiguous() const {
  std::int64_t stride = item_bytes();
  bool dense = true, empty = false;
  for (std::int32_t d = ndim; d-- > 0;) {
    empty |= shape[d] == 0;
    dense &= shape[d] == 1 || strides[d] == stride;
    stride *= shape[d];
  }
  return dense || empty;
}

bool have_shape(const Values& values, const RowSpec& spec, std::int64_t n) {
  const std::size_t leading = n < 0 ? 0 : 1;
  return static_cast<std::size_t>(values.ndim) == spec.shape.size() + leading && (leading == 0 || values.shape[0] == n) &&
         std::equal(spec.shape.begin(), spec.shape.end(), values.shape + leading);
}

bool look_at_tensor(PyObject* object, Values& values, bool asks) {
  if (exchange == nullptr || !PyObject_TypeCheck(object, tensor_type)) return false;
  nb::dlpack::dltensor tensor;
  if (exchange->borrow(object, &tensor) != 0) {  // sparse, meta, quantised …
    PyErr_Clear();
    return false;
  }
  if (tensor.device.device_type != kCpu || tensor.dtype.lanes != 1 || tensor.ndim > Values::kMost ||
      (asks && is_lazy_view(object, tensor.dtype.code))) {
    return false;
  }
  values.code = tensor.dtype.code, values.bits = tensor.dtype.bits, values.ndim = tensor.ndim;
  bool empty = false;
  for (std::int32_t d = 0; d < tensor.ndim; ++d) {
    empty |= tensor.shape[d] == 0;
    values.shape[d] = tensor.shape[d];
    values.strides[d] = tensor.strides[d] * values.item_bytes();
  }
  // Zeros that autograd made have no memory: their address is an offset from null. Nearly no other tensor lies so low.
  constexpr std::uintptr_t kLow = std::uintptr_t{1} << 32;
  if (!empty && reinterpret_cast<std::uintptr_t>(tensor.data) < kLow &&
      (tensor.data == nullptr || says_yes(object, is_zero_name))) {
    return false;
  }
  // An empty tensor has no address, and needs none.
  static const std::byte nothing{};
  values.data = tensor.data == nullptr ? &nothing : static_cast<const std::byte*>(tensor.data) + tensor.byte_offset;
  return true;
}

Layout::Layout(const nb::list& specs) {
  std::vector<RowSpec> given;
  for (nb::handle spec : specs) given.push_back(spec_of(spec));
  set(std::move(given));
}

void Layout::add(std::span<const RowSpec> more) {
  std::vector<RowSpec> all = specs();
  all.insert(all.end(), more.begin(), more.end());
  set(std::move(all));
}

void Layout::set(std::vector<RowSpec> specs) {
  all_.push_back(std::make_unique<const std::vector<RowSpec>>(std::move(specs)));
  current_.store(all_.back().get(), std::memory_order_release);
}

bool Layout::fits(const nb::list& values, std::int64_t n) const {
  const std::vector<RowSpec>& specs = this->specs();
  if (exchange == nullptr || values.size() != specs.size()) return false;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (bytes_of(values[i].ptr(), specs[i], n) == nullptr) return false;
  }
  return true;
}

std::size_t bytes_of_rows(const RowSpec& spec, std::int64_t n) {
  std::size_t row_bytes = (spec.bits + 7u) / 8u, bytes = 0;
  bool too_large = false;
  for (const std::int64_t size : spec.shape) {
    too_large |= __builtin_mul_overflow(row_bytes, static_cast<std::size_t>(size), &row_bytes);
  }
  too_large |= __builtin_mul_overflow(row_bytes, static_cast<std::size_t>(n), &bytes);
  if (too_large || bytes > std::size_t{1} << 47) throw NoMemory(n, row_bytes);
  return bytes;
}

// The values and DLPack's descriptor share one allocation; padding it for alignment is cheaper than aligned_alloc.
OutputBuffer::OutputBuffer(const RowSpec& spec, std::int64_t most) : spec_(&spec) {
  if (most < 0) throw std::invalid_argument("a negative number of rows");
  if (OutputBlock* block = OutputBlock::of_memory(); block != nullptr) {
    data_ = block->take(bytes_of_rows(spec, most));
    if (data_ != nullptr) {
      block_ = block;
      return;
    }
  }
  if (allocator != nullptr) {
    take_allocated(most);
    return;
  }
  const std::size_t bytes = bytes_of_rows(spec, most);
  const std::size_t ndim = spec.shape.size() + 2;
  memory_ = static_cast<std::byte*>(spare_or_new(sizeof(ManagedTensor) + 2 * sizeof(std::int64_t) * ndim + 64 + bytes));
  if (memory_ == nullptr) throw NoMemory(most, most > 0 ? bytes / static_cast<std::size_t>(most) : 0);
  data_ = values_in(memory_, ndim);
}

void OutputBuffer::take_allocated(std::int64_t most) {
  let_go();  // it runs Python
  nb::gil_scoped_acquire acquire;
  nb::list shape;
  shape.append(most);
  for (const std::int64_t size : spec_->shape) shape.append(size);
  allocated_ = nb::handle(allocator)(nb::tuple(shape), spec_->code, spec_->bits);
  data_ = reinterpret_cast<std::byte*>(nb::cast<std::uintptr_t>(allocated_.attr("data_ptr")()));
  static std::byte nothing{};  // an empty tensor has no address, and needs none
  if (data_ == nullptr) data_ = &nothing;
}

OutputBuffer::OutputBuffer(OutputBuffer&& other) noexcept
    : spec_(other.spec_),
      block_(std::exchange(other.block_, nullptr)),
      memory_(std::exchange(other.memory_, nullptr)),
      data_(other.data_),
      allocated_(std::move(other.allocated_)) {}

OutputBuffer::~OutputBuffer() {
  keep_or_free(memory_);
  if (block_ != nullptr) block_->settle(nullptr);
  if (allocated_.is_valid()) {  // perhaps where the GIL is released
    let_go();
    nb::gil_scoped_acquire acquire;
    allocated_.reset();
  }
}

nb::object OutputBuffer::tensor(std::int64_t n, std::int64_t each) && {
  if (allocated_.is_valid()) {
    nb::object made = std::move(allocated_);
    if (nb::cast<std::int64_t>(made.attr("shape")[0]) != n) made = made.attr("narrow")(0, 0, n);
    return each > 0 ? made.attr("unflatten")(0, nb::make_tuple(n / each, each)) : made;
  }
  if (OutputBlock* block = std::exchange(block_, nullptr); block != nullptr) {
    block->settle(data_ + bytes_of_rows(*spec_, n));
    return view_of(*spec_, data_, n, each, block->owner());
  }
  return tensor_around(std::exchange(memory_, nullptr), *spec_, data_, n, each, nullptr);
}

void OutputBuffers::add(const RowSpec& spec, std::int64_t most) {
  buffers_.emplace_back(spec, most);
  addresses_.push_back(buffers_.back().data());
}

void OutputBuffers::add(const std::vector<RowSpec>& specs, std::int64_t most) {
  buffers_.reserve(specs.size() + 8);
  addresses_.reserve(specs.size() + 8);
  for (const RowSpec& spec : specs) add(spec, most);
}

nb::list OutputBuffers::tensors(std::int64_t n, std::int64_t each) && {
  nb::list tensors;
  for (OutputBuffer& buffer : buffers_) tensors.append(std::move(buffer).tensor(n, each));
  return tensors;
}

void bind_tensors(nb::module_& m) {
  nb::class_<Layout>(m, "Layout", "dtypes and shapes of rows: [(DLPack type code, bits, shape), …].")
      .def(nb::init<const nb::list&>(), "specs"_a)
      .def("fits", &Layout::fits, "values"_a, "n"_a,
           "Whether the values are n rows (n < 0: one row without that dimension) that can be copied as bytes as they are. "
           "False where that cannot be told.")
      .def(
          "allocate",
          [](const Layout& self, std::int64_t n) {
            OutputBuffers buffers;
            buffers.add(self, n);
            return std::move(buffers).tensors(n);
          },
          "n"_a, "Uninitialised CPU tensors [n, *shape], one per field.");
  m.def(
      "empty_rows",
      [](std::int64_t n) { return OutputBuffer(kNumbers, n).tensor(n); },
      "n"_a, "An uninitialised int64 tensor [n].");
  m.def("prefetch", &prefetch_objects, "items"_a, "Ask the memory for objects that are about to be used.");
  m.def("stack", &stack, "items"_a, "out"_a,
        "Copies tensors of equal dtype and shape into the rows of `out`; False if one of them cannot be copied as bytes.");
  m.def("set_allocator", &set_allocator, "allocator"_a.none(),
        "From now on allocator(shape, DLPack type code, bits) makes this thread's tensors, contiguous ones on the CPU; None: the "
        "core itself. The one before.");
  m.def("use_tensor_type", &use_tensor_type, "type"_a,
        "Learn how to look at torch.Tensor. False if it has no exchange table: fits and stack then always say False.");
}

}  // namespace engram
