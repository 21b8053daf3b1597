// Batches with what lies around their rows, for Python.
#pragma once

#include <nanobind/nanobind.h>

namespace engram {

void bind_expand(nanobind::module_& m);

}  // namespace engram
