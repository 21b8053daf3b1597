// Torch's own method gives Python's lock up while it draws, for a tenth of the time that handing it over takes: threads that draw
// at the same time wake each other at every batch. Here torch is called through the C interface that it keeps stable for
// libraries that are built without it, and the lock is kept.

#include "random_bits.h"

#include <dlfcn.h>

#include <cstdint>
#include <utility>

#include "memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

using Value = std::uint64_t;  // an argument or a result; 0: none

// Functions that return something else than 0 if they fail.
struct Torch {
  int (*tensor_around)(void* data, std::int64_t ndim, const std::int64_t* sizes, const std::int64_t* strides, std::int64_t offset,
                       std::int32_t dtype, std::int32_t device_type, std::int32_t device, void** made);
  int (*new_tensor)(void* tensor, void** made);
  int (*delete_tensor)(void* tensor);
  int (*call)(const char* name, const char* overload, Value* stack);  // takes the arguments, and leaves the results
};

// Set once, when the package is imported, with the GIL held. Without `call`, tensors draw.
Torch torch{};

template <class Function>
bool find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

// `library`: any that is loaded and depends on torch.
void use_torch(const char* library) {
  void* const loaded = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (loaded == nullptr) return;
  Torch found{};
  if (find(loaded, "aoti_torch_create_tensor_from_blob", found.tensor_around) &&
      find(loaded, "aoti_torch_new_tensor_handle", found.new_tensor) &&
      find(loaded, "aoti_torch_delete_tensor_object", found.delete_tensor) &&
      find(loaded, "aoti_torch_call_dispatcher", found.call)) {
    torch = found;
  }
}

// 64 random bits at an address, as an int64 tensor without dimensions draws them there.
class RandomBits {
 public:
  RandomBits(Address bits, nb::object otherwise) : bits_(at<std::uint64_t>(bits)), otherwise_(std::move(otherwise)) {
    constexpr std::int32_t kInt64 = 4, kCpu = 0;
    const std::int64_t none = 0;
    if (torch.call != nullptr && torch.tensor_around(at<void>(bits), 0, &none, &none, 0, kInt64, kCpu, 0, &tensor_) != 0) tensor_ = nullptr;
  }
  RandomBits(const RandomBits&) = delete;
  RandomBits& operator=(const RandomBits&) = delete;
  ~RandomBits() {
    if (tensor_ != nullptr) torch.delete_tensor(tensor_);
  }

  std::uint64_t value() const { return *bits_; }
  void set_value(std::uint64_t value) { *bits_ = value; }

  void draw(nb::handle generator) const {
    if (!generator.is_none()) {
      otherwise_("generator"_a = generator);
    } else if (!drawn()) {  // torch cannot, or refuses: it says why when it is asked that way
      otherwise_();
    }
  }

 private:
  bool drawn() const {
    void* tensor = nullptr;
    if (tensor_ == nullptr || torch.new_tensor(tensor_, &tensor) != 0) return false;
    Value stack[] = {reinterpret_cast<Value>(tensor), 0};  // of the default generator
    if (torch.call("aten::random_", "", stack) != 0) {
      PyErr_Clear();  // of a mode that is written in Python
      return false;
    }
    torch.delete_tensor(reinterpret_cast<void*>(stack[0]));
    return true;
  }

  std::uint64_t* bits_;
  nb::object otherwise_;
  void* tensor_ = nullptr;
};

}  // namespace

void bind_random_bits(nb::module_& m) {
  m.def("use_torch", &use_torch, "library"_a,
        "To be called once: `library` is one that is loaded and depends on torch. Without this tensors draw random bits themselves.");
  nb::class_<RandomBits>(m, "RandomBits", "64 random bits at an address; torch draws the highest as 0.")
      .def(nb::init<Address, nb::object>(), "bits"_a, "otherwise"_a,
           "`otherwise`: random_ of a tensor at that address, which must be no inference tensor. It is kept, and called where torch "
           "lets nothing else draw.")
      .def_prop_rw("value", &RandomBits::value, &RandomBits::set_value)
      .def("draw", &RandomBits::draw, nb::kw_only(), "generator"_a = nb::none(),
           "The next bits of torch's default generator, while Python's lock is kept; or those of another one.");
}

}  // namespace engram
