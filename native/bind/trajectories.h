// Bindings of the table of trajectories.
#pragma once

#include <nanobind/nanobind.h>

namespace engram {

void bind_trajectories(nanobind::module_& m);

}  // namespace engram
