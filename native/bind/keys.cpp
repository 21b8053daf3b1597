// Rows by their key, for Python. Memory, tickets and rows are kept alive by the object handed over with their addresses.

#include "keys.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>

#include "../core/keys.h"
#include "../core/store.h"
#include "interpreter.h"
#include "memory.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

constexpr std::uint64_t kBrief = 256;  // keys
const RowSpec kBytes{1, 8, {}};

void make_around(Keys* self, std::span<std::byte> memory, const Store& store) {
  const std::uint64_t field = Keys::field_of(memory);
  check(field < store.fields(), "keys in a field that the store does not have");
  new (self) Keys(memory, store.control(), store.field(field), store.led_by(field));
}

// Puts the bytes of a str, as UTF-8, or of a bytes object, filled up with zeros. False: it is neither, or too long.
bool put_text(PyObject* text, std::byte* to, std::uint64_t most) {
  const char* from = nullptr;
  Py_ssize_t size = 0;
  if (PyUnicode_Check(text)) {
    from = PyUnicode_AsUTF8AndSize(text, &size);
  } else if (PyBytes_Check(text)) {
    char* raw = nullptr;
    if (PyBytes_AsStringAndSize(text, &raw, &size) == 0) from = raw;
  }
  if (from == nullptr) {
    PyErr_Clear();  // a lone surrogate
    return false;
  }
  if (static_cast<std::uint64_t>(size) > most) return false;
  std::memcpy(to, from, static_cast<std::size_t>(size));
  std::memset(to + size, 0, most - static_cast<std::uint64_t>(size));
  return true;
}

nb::object pack_texts(const nb::list& texts, std::uint64_t key_bytes) {
  check(key_bytes <= Keys::kMostKeyBytes, "keys: expected a key of at most 1024 bytes");
  const std::uint64_t n = texts.size();
  OutputBuffer packed(kBytes, static_cast<std::int64_t>(n * key_bytes));
  for (std::uint64_t i = 0; i < n; ++i) {
    if (!put_text(texts[i].ptr(), packed.data() + i * key_bytes, key_bytes)) return nb::none();
  }
  return std::move(packed).tensor(static_cast<std::int64_t>(n * key_bytes));
}

nb::object find(Keys& self, Address keys, std::uint64_t n) {
  check(n < std::uint64_t{1} << 40, "more keys than there is memory");
  OutputBuffers buffers;
  {
    const WithoutInterpreter running(n <= kBrief);
    buffers.add(kNumbers, static_cast<std::int64_t>(n));
    buffers.add(kNumbers, static_cast<std::int64_t>(n));
    self.find(at<const std::byte>(keys), n, buffers.at<std::int64_t>(0), buffers.at<std::int64_t>(1));
  }
  return std::move(buffers).tensors(static_cast<std::int64_t>(n));
}

nb::object find_all(Keys& self, Address keys, std::uint64_t n) {
  Keys::Found found;
  OutputBuffers buffers;
  std::int64_t size = 0;
  {
    const WithoutInterpreter running(n <= kBrief);
    found = self.find_all(at<const std::byte>(keys), n);
    size = static_cast<std::int64_t>(found.rows.size());
    buffers.add(kNumbers, size);
    buffers.add(kNumbers, size);
    std::copy(found.rows.begin(), found.rows.end(), buffers.at<std::int64_t>(0));
    std::copy(found.writes.begin(), found.writes.end(), buffers.at<std::int64_t>(1));
  }
  return std::move(buffers).tensors(size);
}

void bind_memory(nb::module_& m) {
  m.def("keys_bytes", &Keys::bytes, "rows"_a, "Bytes of the index of that many rows.");
  m.def(
      "format_keys",
      [](Address memory, std::uint64_t bytes, std::uint64_t rows, std::uint64_t field, std::uint64_t key_bytes) {
        Keys::format(block(memory, bytes), rows, field, key_bytes);
      },
      "memory"_a, "bytes"_a, "rows"_a, "field"_a, "key_bytes"_a, "Writes the header into zeroed memory.");
  m.def(
      "copy_keys", [](Address from, Address to, std::uint64_t bytes) { Keys::copy(block(from, bytes), block(to, bytes)); }, "source"_a,
      "to"_a, "nbytes"_a, "Into zeroed memory, with no row noted: the copy is to scan.");
  m.def(
      "reset_keys_mutex", [](Address memory, std::uint64_t bytes) { Keys::reset_mutex(block(memory, bytes)); }, "memory"_a, "bytes"_a,
      "Before anything else, by the only process that uses this memory now.");
  m.def("pack_texts", &pack_texts, "texts"_a, "key_bytes"_a,
        "Each str or bytes filled up with zeros to that length, one behind the other: uint8 [n * key_bytes]. None: one is neither, or too "
        "long.");
}

}  // namespace

void bind_keys(nb::module_& m) {
  bind_memory(m);
  nb::class_<Keys, Index>(m, "Keys", nb::is_weak_referenceable(), "Finds rows by their key, in memory that `keep` keeps alive.")
      .def(
          "__init__",
          [](Keys* self, Address memory, std::uint64_t bytes, const Store& store, nb::handle) {
            make_around(self, block(memory, bytes), store);
          },
          "memory"_a, "bytes"_a, "store"_a, "keep"_a, nb::keep_alive<1, 5>())
      .def_prop_ro("field", [](const Keys& self) { return self.field(); }, "Number of the key's field.")
      .def("find", &find, "keys"_a, "n"_a,
           "[rows, numbers of their writes], the newest row of each of n keys, which lie one behind the other; -1: there is none.")
      .def("find_all", &find_all, "keys"_a, "n"_a, "[rows, numbers of their writes], all rows with one of these keys.")
      .def("catch_up", &Keys::catch_up, nb::call_guard<nb::gil_scoped_release>(), "For a store whose writers do not tell.")
      .def("scan", &Keys::scan, "begin"_a, "end"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("put_in_order", &Keys::put_in_order, nb::call_guard<nb::gil_scoped_release>())
      .def("after_fork", &Keys::after_fork);
}

}  // namespace engram
