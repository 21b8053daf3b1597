#pragma once

#include <nanobind/nanobind.h>

namespace engram {

/// Needs the class Index to be bound.
void bind_changes(nanobind::module_& m);

}  // namespace engram
