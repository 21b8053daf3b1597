#include "intake.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "cast.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

// NumPy's ndarray and generic, set once with the GIL held.
PyTypeObject* array_type = nullptr;
PyTypeObject* scalar_type = nullptr;

constexpr std::uint8_t kInt = 0, kUnsigned = 1, kFloating = 2, kComplex = 5, kBool = 6;
// Values of an array that is not contiguous, or is cast; larger ones torch copies faster.
constexpr std::uint64_t kMostStrided = 1 << 16, kMostCast = 1 << 20;

// The DLPack type code of a format of Python's struct module, in this machine's byte order; -1 for others.
int code_of(const char* format) {
  if (format == nullptr) return kUnsigned;
  if (*format == '@' || *format == '=' || *format == '<') ++format;
  const bool pair = *format == 'Z';
  if (pair) ++format;
  if (*format == 0 || format[1] != 0) return -1;
  if (std::strchr("efd", *format) != nullptr) return pair ? kComplex : kFloating;
  if (pair) return -1;
  if (*format == '?') return kBool;
  if (std::strchr("bhilq", *format) != nullptr) return kInt;
  return std::strchr("BHILQ", *format) != nullptr ? kUnsigned : -1;
}

// Looks at an array or a scalar of NumPy. True: the buffer is to be released.
bool look_at_array(PyObject* object, Py_buffer& buffer, Values& values) {
  const bool scalar = PyObject_TypeCheck(object, scalar_type);
  if (!scalar && !PyObject_TypeCheck(object, array_type)) return false;
  if (PyObject_GetBuffer(object, &buffer, PyBUF_STRIDED_RO | PyBUF_FORMAT) != 0) {  // objects, dates, strings …
    PyErr_Clear();
    return false;
  }
  const int code = code_of(buffer.format);
  const bool laid_out = buffer.ndim == 0 || (buffer.shape != nullptr && buffer.strides != nullptr);
  // A date is a scalar of eight bytes in one dimension.
  if (code < 0 || !laid_out || (scalar && buffer.ndim != 0) || buffer.ndim > Values::kMost || buffer.itemsize > 16) {
    PyBuffer_Release(&buffer);
    return false;
  }
  values.data = static_cast<const std::byte*>(buffer.buf);
  values.code = static_cast<std::uint8_t>(code), values.bits = static_cast<std::uint8_t>(8 * buffer.itemsize);
  values.ndim = buffer.ndim;
  for (int d = 0; d < buffer.ndim; ++d) values.shape[d] = buffer.shape[d], values.strides[d] = buffer.strides[d];
  return true;
}

// Copies values one behind the other.
void copy_strided(const Values& values, std::byte* to) {
  const auto item = static_cast<std::size_t>(values.item_bytes());
  std::int64_t at[Values::kMost] = {};
  const std::byte* from = values.data;
  for (;;) {
    std::memcpy(to, from, item);
    to += item;
    std::int32_t d = values.ndim;
    while (d-- > 0) {
      from += values.strides[d];
      if (++at[d] < values.shape[d]) break;
      from -= values.strides[d] * values.shape[d];
      at[d] = 0;
    }
    if (d < 0) return;
  }
}

template <class T>
bool put_int(std::int64_t value, std::byte* to) {
  T cast;
  if constexpr (std::is_integral_v<T>) {
    cast = static_cast<T>(value);
    if (static_cast<std::int64_t>(cast) != value || (std::is_unsigned_v<T> && value < 0)) return false;
  } else {
    const auto exact = static_cast<double>(value);
    if (std::abs(exact) > 9007199254740992.0) return false;  // 2^53: how it is rounded depends on what stands beside it
    cast = static_cast<T>(exact);
  }
  std::memcpy(to, &cast, sizeof cast);
  return true;
}

bool put_int_as(std::int64_t value, std::uint8_t code, std::uint8_t bits, std::byte* to) {
  if (code == kFloating) return bits == 32 ? put_int<float>(value, to) : bits == 64 && put_int<double>(value, to);
  if (code != kInt && code != kUnsigned) return false;
  const bool is_signed = code == kInt;
  switch (bits) {
    case 8: return is_signed ? put_int<std::int8_t>(value, to) : put_int<std::uint8_t>(value, to);
    case 16: return is_signed ? put_int<std::int16_t>(value, to) : put_int<std::uint16_t>(value, to);
    case 32: return is_signed ? put_int<std::int32_t>(value, to) : put_int<std::uint32_t>(value, to);
    case 64: return is_signed ? put_int<std::int64_t>(value, to) : put_int<std::uint64_t>(value, to);
    default: return false;
  }
}

// Writes a number of Python's as a value of the dtype: a bool as a bool, an int as an int that holds it or as a float, a float as
// a float that does not become infinite. `casts`: a bool also as a number. False for everything else.
bool put_number(PyObject* number, std::uint8_t code, std::uint8_t bits, bool casts, std::byte* to) {
  if (number == Py_True || number == Py_False) {
    if (code != kBool) return casts && put_int_as(number == Py_True, code, bits, to);
    *to = std::byte{number == Py_True};
    return true;
  }
  if (PyLong_CheckExact(number)) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    return overflow == 0 && put_int_as(value, code, bits, to);
  }
  if (!PyFloat_CheckExact(number) || code != kFloating) return false;
  const double value = PyFloat_AsDouble(number);
  const auto narrow = static_cast<float>(value);
  if (bits == 64) {
    std::memcpy(to, &value, sizeof value);
  } else if (bits == 32) {
    if (std::isinf(narrow) && !std::isinf(value)) return false;
    std::memcpy(to, &narrow, sizeof narrow);
  } else {
    return false;
  }
  return true;
}

bool is_number(PyObject* object) {
  return PyFloat_CheckExact(object) || PyLong_CheckExact(object) || object == Py_True || object == Py_False;
}

// Writes nested lists of numbers of this shape.
bool put_numbers(PyObject* list, const std::int64_t* shape, std::size_t dims, const RowSpec& spec, bool casts,
                 std::byte*& to) {
  if (dims == 0) {
    if (!put_number(list, spec.code, spec.bits, casts, to)) return false;
    to += (spec.bits + 7) / 8;
    return true;
  }
  if (!PyList_CheckExact(list) || PyList_Size(list) != *shape || *shape == 0) return false;
  for (Py_ssize_t i = 0; i < *shape; ++i) {
    PyObject* item = PyList_GetItem(list, i);  // borrowed; no Python code runs that could change the list
    if (item == nullptr || !put_numbers(item, shape + 1, dims - 1, spec, casts, to)) return PyErr_Clear(), false;
  }
  return true;
}

// Whether all keys of a dict are strings and ints: 1 is equal to True and to 1.0, too.
bool are_strings_and_ints(PyObject* dict) {
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value);) {
    if (!PyUnicode_CheckExact(key) && !PyLong_CheckExact(key)) return false;
  }
  return true;
}

// An attribute of a TensorDict; null if this version has none of that name.
nb::object attribute(PyObject* object, const char* name) {
  PyObject* found = PyObject_GetAttrString(object, name);
  if (found == nullptr) PyErr_Clear();
  return nb::steal<nb::object>(found);
}

}  // namespace

Taken::~Taken() {
  for (Py_buffer& buffer : buffers_) PyBuffer_Release(&buffer);
}

Intake::Intake(const nb::list& specs, nb::handle tree, nb::handle casts, nb::handle groups) {
  for (nb::handle spec : specs) specs_.push_back(spec_of(spec));
  members_.resize(specs_.size());
  for (nb::handle group : groups) {
    Group& made = groups_.emplace_back(Group{nb::cast<std::uint32_t>(group[0]), {}});
    for (nb::handle member : group[1]) {
      const auto kind = nb::cast<std::string>(member[1]);
      made.fields.push_back(nb::cast<std::size_t>(member[0]));
      members_.at(made.fields.back()) = {groups_.size() - 1, made.fields.size() - 1,
                                         kind.empty()       ? Kind::numbers
                                         : kind == "utf-8"  ? Kind::utf8
                                         : kind == "bytes"  ? Kind::bytes
                                                            : Kind::other};
    }
  }
  casts_.resize(specs_.size());
  for (nb::handle field : casts) casts_.at(nb::cast<std::size_t>(field)) = true;
  root_ = node_of(tree, specs_.size());
}

Intake::Node Intake::node_of(nb::handle tree, std::size_t fields) {
  Node node;
  if (PyLong_Check(tree.ptr())) {
    node.field = nb::cast<std::size_t>(tree);
    if (node.field >= fields) throw std::invalid_argument("a leaf of a field that is not there");
    return node;
  }
  const auto kind = nb::cast<std::string>(tree[0]);
  node.kind = kind == "dict"         ? Node::dict
              : kind == "tensordict" ? Node::tensordict
              : kind == "object"     ? Node::attributes
                                     : Node::sequence;
  node.type = nb::borrow(tree[1]);
  for (nb::handle key : tree[2]) {
    node.keys.push_back(nb::borrow(key));
    node.has_ints |= PyLong_CheckExact(key.ptr());
  }
  for (nb::handle child : tree[3]) node.children.push_back(node_of(child, fields));
  if (node.keys.size() != node.children.size()) throw std::invalid_argument("a key for each tree");
  return node;
}

void Intake::list(const Node& node, std::vector<std::uint64_t>& fields) {
  if (node.kind == Node::leaf) fields.push_back(node.field);
  for (const Node& child : node.children) list(child, fields);
}

std::vector<std::uint64_t> Intake::fields() const {
  std::vector<std::uint64_t> found;
  list(root_, found);
  return found;
}

bool Intake::take(nb::handle data, bool batched, Taken& taken) const {
#ifdef Py_GIL_DISABLED  // what containers hold is borrowed for a moment, in which another thread may replace it
  return false;
#endif
  if (batched && root_.kind == Node::sequence && PyList_Check(data.ptr())) return false;  // a list is a list of rows
  taken.rows_ = batched ? Taken::kUnknown : -1;
  begin(taken);
  return walk(root_, data.ptr(), taken) && taken.rows_ != 0 && settle(taken, true);
}

void Intake::begin(Taken& taken) const {
  taken.columns_.resize(specs_.size());
  taken.kept_.reserve(specs_.size() + 4);
  taken.buffers_.reserve(specs_.size());
  taken.lengths_.assign(groups_.size(), Taken::kUnknown);
  for (const Group& group : groups_) taken.items_.push_back({nullptr, nullptr, 0, std::vector<const std::byte*>(group.fields.size())});
}

// Says how many items the row has of each group. `whole`: of all groups.
bool Intake::settle(Taken& taken, bool whole) const {
  static constexpr std::int64_t kStart = 0;
  taken.counts_.resize(groups_.size());
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const std::int64_t length = taken.lengths_[g];
    if (length > groups_[g].most || (whole && length < 0)) return false;
    taken.counts_[g] = static_cast<std::uint32_t>(std::max<std::int64_t>(length, 0));
    RaggedSource& source = taken.items_[g];
    source.lengths = &taken.counts_[g], source.starts = &kStart, source.total = taken.counts_[g];
  }
  return true;
}

bool Intake::walk(const Node& node, PyObject* data, Taken& taken) const {
  taken.kept_.push_back(nb::borrow(data));  // other threads may change the containers
  if (node.kind == Node::leaf) {
    return take_leaf(node.field, data, taken);
  }
  if (reinterpret_cast<PyObject*>(Py_TYPE(data)) != node.type.ptr()) return false;
  if (node.kind == Node::attributes) {
    for (std::size_t i = 0; i < node.children.size(); ++i) {
      const auto child = nb::steal<nb::object>(PyObject_GetAttr(data, node.keys[i].ptr()));
      if (!child.is_valid()) return PyErr_Clear(), false;
      if (!walk(node.children[i], child.ptr(), taken)) return false;
    }
    return true;
  }
  if (node.kind == Node::sequence) {
    const bool list = PyList_CheckExact(data);
    const auto n = static_cast<Py_ssize_t>(node.children.size());
    if ((list ? PyList_Size(data) : PyTuple_Size(data)) != n) return PyErr_Clear(), false;
    for (Py_ssize_t i = 0; i < n; ++i) {
      PyObject* item = list ? PyList_GetItem(data, i) : PyTuple_GetItem(data, i);
      if (item == nullptr || !walk(node.children[static_cast<std::size_t>(i)], item, taken)) return PyErr_Clear(), false;
    }
    return true;
  }
  if (node.kind == Node::tensordict) {
    const nb::object batch = attribute(data, "_batch_size"), entries = attribute(data, "_tensordict");
    if (!batch.is_valid() || !entries.is_valid() || !PyDict_CheckExact(entries.ptr())) return false;
    if (taken.rows_ != -1) {  // one row, if it has no batch dimension, whatever its leaves have
      if (!PyTuple_Check(batch.ptr()) || PyTuple_Size(batch.ptr()) < 1) return false;
      const std::int64_t rows = PyLong_AsLongLong(PyTuple_GetItem(batch.ptr(), 0));
      if (taken.rows_ == Taken::kUnknown) taken.rows_ = rows;
      if (taken.rows_ != rows) return false;
    }
    taken.kept_.push_back(entries);
    data = entries.ptr();
  }
  if (PyDict_Size(data) != static_cast<Py_ssize_t>(node.children.size())) return false;
  if (node.has_ints && !are_strings_and_ints(data)) return false;
  for (std::size_t i = 0; i < node.children.size(); ++i) {
    PyObject* child = PyDict_GetItemWithError(data, node.keys[i].ptr());
    if (child == nullptr) return PyErr_Clear(), false;
    if (!walk(node.children[i], child, taken)) return false;
  }
  return true;
}

bool Intake::take_some(nb::handle data, std::int64_t n, Taken& taken, std::vector<std::uint64_t>& which) const {
#ifdef Py_GIL_DISABLED
  return false;
#endif
  taken.rows_ = n;
  begin(taken);
  return walk_some(root_, data.ptr(), taken, which) && !which.empty() && settle(taken, false);
}

bool Intake::walk_some(const Node& node, PyObject* data, Taken& taken, std::vector<std::uint64_t>& which) const {
  taken.kept_.push_back(nb::borrow(data));
  if (node.kind == Node::leaf) {
    which.push_back(node.field);
    const bool one = taken.rows_ == -1;
    if (data == Py_None || PyObject_TypeCheck(data, scalar_type)) return false;  // which Python looks at
    return (one || (!PyList_CheckExact(data) && !is_number(data))) && take_leaf(node.field, data, taken);
  }
  if (node.kind != Node::dict && node.kind != Node::tensordict) return false;
  if (node.kind == Node::tensordict && reinterpret_cast<PyObject*>(Py_TYPE(data)) == node.type.ptr()) {
    const nb::object entries = attribute(data, "_tensordict");
    if (!entries.is_valid()) return false;
    taken.kept_.push_back(entries);
    data = entries.ptr();
  }
  if (!PyDict_CheckExact(data)) return false;
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(data, &at, &key, &value);) {
    const auto same = [key](const nb::object& known) {
      return PyUnicode_CheckExact(key) && PyUnicode_CheckExact(known.ptr()) && PyUnicode_Compare(key, known.ptr()) == 0;
    };
    const auto found = std::find_if(node.keys.begin(), node.keys.end(), same);
    if (found == node.keys.end()) return false;
    if (!walk_some(node.children[static_cast<std::size_t>(found - node.keys.begin())], value, taken, which)) return false;
  }
  return true;
}

bool Intake::take_leaf(std::size_t field, PyObject* leaf, Taken& taken) const {
  if (is_ragged(field)) return taken.with_items_ && taken.rows_ == -1 && take_items(field, leaf, taken);
  if (PyList_CheckExact(leaf) || is_number(leaf)) return take_numbers(field, leaf, taken);
  return take_column(field, leaf, taken.rows_, taken.columns_[field], taken);
}

// Notes where the values of a tensor or an array begin, `rows` rows of the field's spec; kUnknown: as many as it says.
bool Intake::take_column(std::size_t field, PyObject* leaf, std::int64_t& rows, const std::byte*& column, Taken& taken) const {
  const RowSpec& spec = specs_[field];
  Values values;
  if (!look_at_tensor(leaf, values)) {
    Py_buffer buffer;
    if (!look_at_array(leaf, buffer, values)) return false;
    taken.buffers_.push_back(buffer);
  }
  const bool same = values.code == spec.code && values.bits == spec.bits;
  // A scalar of NumPy's is a number as one of Python's: what a reward from an environment is.
  const auto is_number_of_kind = [&] {
    return PyObject_TypeCheck(leaf, scalar_type) && (values.code == kBool) == (spec.code == kBool);
  };
  if (!same && !casts_[field] && !is_number_of_kind()) return false;
  if (rows == Taken::kUnknown) rows = values.ndim > 0 ? values.shape[0] : 0;
  if (!have_shape(values, spec, rows)) return false;
  column = values.data;
  const bool contiguous = values.contiguous();
  if (same && contiguous) return true;
  std::uint64_t count = 1;
  for (std::int32_t d = 0; d < values.ndim; ++d) count *= static_cast<std::uint64_t>(values.shape[d]);
  if (count > (contiguous ? kMostCast : kMostStrided)) return false;
  if (!contiguous) {
    std::byte* const copy = taken.room(count * static_cast<std::uint64_t>(values.item_bytes()));
    copy_strided(values, copy);
    column = copy;
  }
  if (same) return true;
  std::byte* const made = taken.room(count * ((spec.bits + 7u) / 8u));
  const std::byte* const from = column;
  column = made;
  return cast(from, {values.code, values.bits}, made, {spec.code, spec.bits}, count);
}

// Notes the items of one row of a ragged field: those of a tensor, an array or a list, or a text; or none, which come later.
bool Intake::take_items(std::size_t field, PyObject* leaf, Taken& taken) const {
  const Member& member = members_[field];
  if (leaf == Py_None) return member.place > 0;
  std::int64_t length = Taken::kUnknown;
  const std::byte*& values = taken.items_[member.group].values[member.place];
  if (member.kind != Kind::numbers) {
    const char* text = nullptr;
    Py_ssize_t size = 0;
    if (member.kind == Kind::utf8 && PyUnicode_CheckExact(leaf)) {
      text = PyUnicode_AsUTF8AndSize(leaf, &size);  // of the string, which keeps it
    } else if (member.kind == Kind::bytes && PyBytes_CheckExact(leaf)) {
      text = PyBytes_AsString(leaf), size = PyBytes_Size(leaf);
    }
    if (text == nullptr) return PyErr_Clear(), false;
    values = reinterpret_cast<const std::byte*>(text), length = size;
  } else if (PyList_CheckExact(leaf)) {
    length = PyList_Size(leaf);
    if (length > groups_[member.group].most || !put_list(field, leaf, length, values, taken)) return false;
  } else if (!take_column(field, leaf, length, values, taken)) {
    return false;
  }
  std::int64_t& known = taken.lengths_[member.group];
  if (known != Taken::kUnknown && known != length) return false;
  known = length;
  return true;
}

bool Intake::take_numbers(std::size_t field, PyObject* leaf, Taken& taken) const {
  if (taken.rows_ == Taken::kUnknown) taken.rows_ = PyList_CheckExact(leaf) ? PyList_Size(leaf) : 0;
  return put_list(field, leaf, taken.rows_, taken.columns_[field], taken);
}

// Copies a number, or nested lists of them: n rows of a field (n < 0: one without that dimension).
bool Intake::put_list(std::size_t field, PyObject* leaf, std::int64_t n, const std::byte*& column, Taken& taken) const {
  const RowSpec& spec = specs_[field];
  std::vector<std::int64_t> shape(spec.shape);
  if (n >= 0) shape.insert(shape.begin(), n);
  std::uint64_t bytes = (spec.bits + 7u) / 8u;
  for (const std::int64_t size : shape) {
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes) || bytes > std::uint64_t{1} << 30) return false;
  }
  std::byte* to = taken.room(bytes);
  column = to;
  return put_numbers(leaf, shape.data(), shape.size(), spec, casts_[field], to);
}

bool NamedLanes::read_one(PyObject* named, std::uint64_t lanes) {
  const Py_ssize_t lane = PyNumber_AsSsize_t(named, PyExc_IndexError);
  if (lane == -1 && PyErr_Occurred()) return PyErr_Clear(), false;
  lane_ = static_cast<std::uint64_t>(lane);
  return lane >= 0 && lane_ < lanes;
}

bool NamedLanes::read(nb::handle named, std::uint64_t n, std::uint64_t lanes) {
  if (PyLong_CheckExact(named.ptr())) return one_ = read_one(named.ptr(), lanes);
  if (PyUnicode_CheckExact(named.ptr())) {
    if (n != lanes || PyUnicode_CompareWithASCIIString(named.ptr(), "each") != 0) return false;
    for (std::uint64_t lane = 0; lane < lanes; ++lane) each_.push_back(static_cast<std::int64_t>(lane));
    return true;
  }
  Values values;
  Py_buffer buffer;
  const bool tensor = look_at_tensor(named.ptr(), values), array = !tensor && look_at_array(named.ptr(), buffer, values);
  if (tensor || array) {
    const bool single = values.ndim == 0;
    bool fits = (values.code == kInt || values.code == kUnsigned) &&
                (single || (values.ndim == 1 && values.shape[0] == static_cast<std::int64_t>(n)));
    for (std::uint64_t i = 0; fits && i < (single ? 1 : n); ++i) {
      const std::byte* from = values.data + (single ? 0 : static_cast<std::int64_t>(i) * values.strides[0]);
      lane_ = 0;
      std::memcpy(&lane_, from, static_cast<std::size_t>(values.item_bytes()));
      fits = lane_ < lanes && (values.code != kInt || lane_ >> (values.bits - 1) == 0);  // the latter: it is not negative
      each_.push_back(static_cast<std::int64_t>(lane_));
    }
    one_ = single && fits;
    if (array) PyBuffer_Release(&buffer);
    return fits;
  }
  if (!PyList_CheckExact(named.ptr()) && !PyTuple_CheckExact(named.ptr()) && !PyRange_Check(named.ptr())) return false;
  if (PySequence_Size(named.ptr()) != static_cast<Py_ssize_t>(n)) return false;
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto item = nb::steal<nb::object>(PySequence_GetItem(named.ptr(), static_cast<Py_ssize_t>(i)));
    if (!item.is_valid() || !PyLong_CheckExact(item.ptr()) || !read_one(item.ptr(), lanes)) return PyErr_Clear(), false;
    each_.push_back(static_cast<std::int64_t>(lane_));
  }
  return true;
}

void bind_intake(nb::module_& m) {
  nb::class_<Intake>(m, "Intake", "How the data of one storage is put together, and the dtypes and shapes of its leaves.")
      .def(nb::init<const nb::list&, nb::handle, nb::handle, nb::handle>(), "specs"_a, "tree"_a, "casts"_a, "groups"_a = nb::tuple())
      .def(
          "bytes_of",
          [](const Intake& self, nb::handle data) -> nb::object {
            Taken taken;
            if (!self.take(data, false, taken)) return nb::none();
            nb::list made;
            for (std::size_t f = 0; f < self.specs().size(); ++f) {
              made.append(nb::bytes(taken.columns()[f], bytes_of_rows(self.specs()[f], 1)));
            }
            return made;
          },
          "data"_a.none(), "The bytes of each field of one row; None: it must be looked at in Python.");
  m.def(
      "use_array_types",
      [](nb::handle array, nb::handle scalar) {
        array_type = reinterpret_cast<PyTypeObject*>(array.inc_ref().ptr());
        scalar_type = reinterpret_cast<PyTypeObject*>(scalar.inc_ref().ptr());
      },
      "array"_a, "scalar"_a, "Learn which types NumPy's ndarray and generic are.");
}

}  // namespace engram
