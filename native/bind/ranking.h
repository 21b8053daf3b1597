#pragma once

#include <nanobind/nanobind.h>

namespace engram {

void bind_ranking(nanobind::module_& m);

}  // namespace engram
