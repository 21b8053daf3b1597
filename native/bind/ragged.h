// Rows of any length, for Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "../core/ragged.h"
#include "../core/store.h"
#include "memory.h"
#include "tensors.h"

namespace engram {

template <class T>
std::vector<T*> addresses_in(nanobind::handle tuple) {
  std::vector<T*> found;
  for (nanobind::handle address : tuple) found.push_back(at<T>(nanobind::cast<Address>(address)));
  return found;
}

/// The items of a call, copied where they decide addresses. `sources`: for each group (address of lengths, of starts, items of the values,
/// addresses of the values).
RaggedWrite write_in(const Store& store, std::uint64_t n, const nanobind::tuple& sources);

/// What the items of ragged fields are, of each group of the store.
struct ItemLayout {
  struct Group {
    std::vector<std::uint64_t> fields;
    std::vector<RowSpec> specs;  // of an item of each
  };
  std::vector<Group> groups;
};

/// The items of rows whose columns were read, row after row, and where each row lies among them.
class ItemsRead {
 public:
  /// `layout` must outlive it.
  explicit ItemsRead(const ItemLayout& layout) : layout_(layout) {}

  /// Reads some fields, or all. Needs no GIL. `tickets`: those that the rows were read with. `spans`: of each group, as they were read; of a
  /// group without such fields anything. Those of rows at positions `moved`, which were not whole, become empty. Returns the positions of
  /// rows that moved, or have lost their items.
  std::vector<std::int64_t> read(const Store& store, const std::vector<std::uint64_t>* which, const std::int64_t* rows, std::uint64_t n,
                                 const std::int64_t* tickets, std::span<std::byte* const> spans, std::vector<std::int64_t> moved);

  /// Of each group (fields, items of the longest row, lengths int32 [n], where rows begin int64 [n], the same and where the last one ends
  /// int64 [n + 1], that as int32, values of each field).
  nanobind::list groups() &&;

 private:
  struct Group {
    std::int64_t total = 0, longest = 0;
    OutputBuffer lengths, offsets, ends;
    std::vector<std::uint64_t> fields;
    OutputBuffers values;
  };

  const ItemLayout& layout_;
  std::int64_t n_ = 0;
  std::vector<Group> groups_;
};

void bind_ragged(nanobind::module_& m, nanobind::class_<Store>& type);

/// Needs the classes Index and Store to be bound.
void bind_open_rows(nanobind::module_& m);

}  // namespace engram
