// Steps of recorded environments, for Python: a row of each, in one call before a step and one after it.
#pragma once

#include <nanobind/nanobind.h>

namespace engram {

void bind_steps(nanobind::module_& m);

}  // namespace engram
