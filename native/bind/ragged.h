// Rows of any length, for Python.
#pragma once

#include <nanobind/nanobind.h>

#include "../core/store.h"

namespace engram {

void bind_ragged(nanobind::module_& m, nanobind::class_<Store>& type);

}  // namespace engram
