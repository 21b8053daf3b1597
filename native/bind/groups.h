#pragma once

#include <nanobind/nanobind.h>

namespace engram {

/// Needs the classes Index and Store to be bound.
void bind_groups(nanobind::module_& m);

}  // namespace engram
