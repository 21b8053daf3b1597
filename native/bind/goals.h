// Goals of hindsight, for Python.
#pragma once

#include <nanobind/nanobind.h>

namespace engram {

void bind_goals(nanobind::module_& m);

}  // namespace engram
