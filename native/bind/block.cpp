#include "block.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../core/gather.h"
#include "../core/pool.h"
#include "column.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

constexpr std::uintptr_t kLeastAlign = 8;
constexpr std::uint64_t kLarge = 1 << 16;  // bytes: other threads may run while they are copied

std::uint64_t aligned(std::uint64_t bytes) { return (bytes + OutputBlock::kAlign - 1) / OutputBlock::kAlign * OutputBlock::kAlign; }

thread_local OutputBlock* current_block = nullptr;

// Tensors [n, *shape] around parts of an object's bytes. Where they begin is checked here: it may have been computed from what another process sent.
nb::list views(nb::handle memory, const Layout& layout, const std::vector<std::uint64_t>& begins, std::int64_t n) {
  const auto [owner, bytes] = bytes_of_object(memory, false);
  check(begins.size() == layout.specs().size(), "a beginning for each column");
  check(n >= 0, "a number of rows that is not negative");
  nb::list tensors;
  for (std::size_t i = 0; i < begins.size(); ++i) {
    const RowSpec& spec = layout.specs()[i];
    const std::uint64_t size = bytes_of_rows(spec, n);
    check(begins[i] <= bytes.size() && size <= bytes.size() - begins[i], "columns within the block");
    check((reinterpret_cast<std::uintptr_t>(bytes.data()) + begins[i]) % kLeastAlign == 0, "columns at multiples of 8 bytes");
    tensors.append(view_of(spec, bytes.data() + begins[i], n, 0, owner));
  }
  return tensors;
}

// Rows [begin, begin + n) of columns that lie in an object each, as tensors. Large ones stay where they are, if that is aligned as their
// values must be, and keep the object; others are copied. What the objects hold is checked: another process sent it.
nb::list received(const nb::list& memories, const Layout& layout, std::int64_t begin, std::int64_t n) {
  check(memories.size() == layout.specs().size(), "an object for each column");
  check(begin >= 0 && n >= 0, "numbers of rows that are not negative");
  std::vector<std::pair<nb::object, std::byte*>> from;
  std::vector<std::uint64_t> sizes;
  std::vector<std::optional<OutputBuffer>> copies(memories.size());
  bool copied = false;
  for (std::size_t i = 0; i < memories.size(); ++i) {
    const RowSpec& spec = layout.specs()[i];
    sizes.push_back(bytes_of_rows(spec, n));
    if (sizes[i] == 0) {
      from.emplace_back();
    } else {
      auto [owner, bytes] = bytes_of_object(memories[i], false);
      const std::uint64_t before = bytes_of_rows(spec, begin);
      check(before <= bytes.size() && sizes[i] <= bytes.size() - before, "columns with the bytes of all rows");
      from.emplace_back(std::move(owner), bytes.data() + before);
    }
    const std::uintptr_t item = (spec.bits + 7u) / 8u;
    if (sizes[i] < kLarge || reinterpret_cast<std::uintptr_t>(from[i].second) % item != 0) {
      copies[i].emplace(spec, n);
      copied = copied || sizes[i] >= kLarge;
    }
  }
  const auto copy = [&] {
    for (std::size_t i = 0; i < copies.size(); ++i) {
      if (copies[i] && sizes[i] != 0) std::memcpy(copies[i]->data(), from[i].second, sizes[i]);
    }
  };
  if (copied) {
    nb::gil_scoped_release others_run;
    copy();
  } else {
    copy();
  }
  nb::list tensors;
  for (std::size_t i = 0; i < copies.size(); ++i) {
    tensors.append(copies[i] ? std::move(*copies[i]).tensor(n) : view_of(layout.specs()[i], from[i].second, n, 0, from[i].first));
  }
  return tensors;
}

// Some units, of `each` rows that lie one behind the other, of columns [rows, *shape]: [n, each, *shape], or [n * each, *shape] if `flat`.
nb::list units_of(const nb::list& columns, std::int64_t each, Numbers units, bool flat) {
  check(each > 0, "units of a row at least");
  std::vector<RowSpec> specs;  // buffers refer to them
  specs.reserve(columns.size());
  std::vector<Field> fields;
  OutputBuffers out;
  const auto n = static_cast<std::int64_t>(units.size);
  std::uint64_t bytes = 0;
  for (nb::handle column : columns) {
    Values values;
    check(look_at_tensor(column.ptr(), values) && values.ndim > 0 && values.contiguous(), "contiguous tensors on the CPU");
    const std::int64_t there = values.shape[0] / each;
    check(std::ranges::all_of(units.span(), [there](std::int64_t unit) { return unit >= 0 && unit < there; }), "units that there are");
    specs.push_back({values.code, values.bits, {values.shape + 1, values.shape + values.ndim}});
    fields.emplace_back(const_cast<std::byte*>(values.data), bytes_of_rows(specs.back(), each));
    out.add(specs.back(), n * each);
    bytes += bytes_of_rows(specs.back(), n * each);
  }
  const auto copy = [&] {
    for (std::size_t i = 0; i < fields.size(); ++i) {
      gather_rows(fields[i], units.data, units.size, out.at<std::byte>(i), i + 1 < fields.size() ? &fields[i + 1] : nullptr);
    }
  };
  if (bytes >= kLarge) {
    nb::gil_scoped_release others_run;
    copy();
  } else {
    copy();
  }
  return std::move(out).tensors(n * each, flat ? 0 : each);
}

}  // namespace

std::pair<nb::object, std::span<std::byte>> bytes_of_object(nb::handle object, bool writable) {
  nb::object view = nb::steal(PyMemoryView_FromObject(object.ptr()));
  Py_buffer buffer;
  if (!view.is_valid() || PyObject_GetBuffer(view.ptr(), &buffer, writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO) != 0) {
    throw nb::python_error();
  }
  const std::span<std::byte> bytes(static_cast<std::byte*>(buffer.buf), static_cast<std::size_t>(buffer.len));
  PyBuffer_Release(&buffer);  // the view has one of its own
  return {std::move(view), bytes};
}

OutputBlock::OutputBlock(nb::object memory, bool spills) : spills_(spills) {
  if (memory.is_none()) return;
  std::tie(view_, bytes_) = bytes_of_object(memory, true);
  check(bytes_.empty() || reinterpret_cast<std::uintptr_t>(bytes_.data()) % kAlign == 0, "a block at a multiple of 64 bytes");
}

OutputBlock* OutputBlock::current() { return current_block; }

OutputBlock* OutputBlock::of_memory() { return current_block == nullptr || current_block->is_part() ? nullptr : current_block; }

void OutputBlock::enter() {
  check(!std::exchange(entered_, true), "a block that one thread is within, once at a time");
  outer_ = std::exchange(current_block, this);
}

void OutputBlock::leave() {
  current_block = std::exchange(outer_, nullptr);
  entered_ = false;
}

std::byte* OutputBlock::take(std::uint64_t bytes) {
  const std::optional<std::uint64_t> begin = find_room(bytes);
  if (!begin && !spills_) {
    throw std::invalid_argument("expected a block with room for " + std::to_string(bytes) + " bytes more, got one of " +
                                std::to_string(bytes_.size()) + " of which " + std::to_string(used_) + " are in use");
  }
  if (!begin) return nullptr;
  ++open_;
  return bytes_.data() + *begin;
}

std::optional<std::uint64_t> OutputBlock::reserve(std::uint64_t bytes) {
  const std::optional<std::uint64_t> begin = find_room(bytes);
  settled_ = std::max(settled_, used_);
  return begin;
}

std::optional<std::uint64_t> OutputBlock::find_room(std::uint64_t bytes) {
  const std::uint64_t begin = used_;
  if (bytes > bytes_.size() - begin) {
    spilled_ += aligned(bytes);
    wanted_ = std::max(wanted_, used_ + spilled_);
    return std::nullopt;
  }
  used_ = std::min<std::uint64_t>(bytes_.size(), begin + aligned(bytes));
  wanted_ = std::max(wanted_, used_ + spilled_);
  return begin;
}

void OutputBlock::settle(const std::byte* end) {
  if (end != nullptr) {
    settled_ = std::max(settled_, std::min<std::uint64_t>(bytes_.size(), aligned(static_cast<std::uint64_t>(end - bytes_.data()))));
  }
  if (--open_ == 0) used_ = settled_;
}

nb::object OutputBlock::pack(const nb::list& tensors) {
  nb::list begins;
  std::vector<Part> parts;
  std::uint64_t end = used_, copied = 0;
  for (nb::handle tensor : tensors) {
    Values values;
    if (!look_at_tensor(tensor.ptr(), values) || !values.contiguous()) {
      begins.append(-1);
      continue;
    }
    const auto bytes = static_cast<std::uint64_t>(values.bytes());
    const std::uint64_t at = reinterpret_cast<std::uintptr_t>(values.data) - reinterpret_cast<std::uintptr_t>(bytes_.data());
    if (bytes != 0 && at < used_ && bytes <= used_ - at && at % static_cast<std::uint64_t>(values.item_bytes()) == 0) {
      begins.append(at);
      continue;
    }
    begins.append(end);
    parts.push_back({end, values.data, bytes});
    end += aligned(bytes);
    copied += bytes;
  }
  wanted_ = std::max(wanted_, end);
  if (end > bytes_.size()) return nb::none();
  const auto copy = [&] { copy_parts(bytes_.data(), parts); };
  if (copied >= kLarge) {
    nb::gil_scoped_release others_run;
    copy();
  } else {
    copy();
  }
  used_ = settled_ = end;
  return begins;
}

void bind_block(nb::module_& m) {
  nb::class_<OutputBlock>(m, "OutputBlock",
                          "A context manager: within it, the tensors that the core makes on this thread are views of some memory.")
      .def(nb::init<nb::object, bool>(), "memory"_a.none(), "spills"_a = false)
      .def("__enter__", [](nb::handle self) {
        nb::cast<OutputBlock&>(self).enter();
        return nb::borrow(self);
      })
      .def("__exit__", [](OutputBlock& self, nb::handle, nb::handle, nb::handle) { self.leave(); }, "kind"_a.none(), "error"_a.none(),
           "where"_a.none())
      .def("pack", &OutputBlock::pack, "tensors"_a,
           "Where in the block the values of tensors begin: those outside of it are copied behind what is in use. -1: torch has to copy it. "
           "None: there is no room for all.")
      .def("reserve", &OutputBlock::reserve, "nbytes"_a, "Where so many bytes begin that are in use from now on. None: there is no room.")
      .def_prop_ro("used", &OutputBlock::used, "Bytes up to the end of the last column.")
      .def_prop_ro("wanted", &OutputBlock::wanted, "Bytes that have room for all that was asked for.")
      .def_prop_ro("masses", [](const OutputBlock& self) {
        return nb::make_tuple(self.masses.total, self.masses.least, self.masses.live);
      }, "Of the last draw: sum of all leaves, the smallest above zero, and live rows.");
  m.attr("PARALLEL_BYTES") = kParallelBytes;
  m.def("block_views", &views, "memory"_a, "layout"_a, "begins"_a, "n"_a, "Tensors [n, *shape] around parts of an object's bytes.");
  m.def("received", &received, "memories"_a, "layout"_a, "begin"_a, "n"_a,
        "Tensors [n, *shape] of rows whose columns lie in an object each: copies, but for large ones.");
  m.def("units_of", &units_of, "columns"_a, "each"_a, "units"_a, "flat"_a,
        "Some units of `each` rows of columns [rows, *shape], as new tensors [n, each, *shape], or [n * each, *shape] if `flat`.");
}

}  // namespace engram
