#pragma once

#include <nanobind/nanobind.h>

namespace engram {

/// Needs the classes Index and Store to be bound.
void bind_keys(nanobind::module_& m);

}  // namespace engram
