// Rows of any length, for Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "../core/ragged.h"
#include "../core/store.h"
#include "memory.h"

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

void bind_ragged(nanobind::module_& m, nanobind::class_<Store>& type);

/// Needs the classes Index and Store to be bound.
void bind_open_rows(nanobind::module_& m);

}  // namespace engram
