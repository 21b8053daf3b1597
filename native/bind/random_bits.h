// Random bits from torch's generators, drawn while Python's lock is kept.
#pragma once

#include <nanobind/nanobind.h>

namespace engram {

void bind_random_bits(nanobind::module_& m);

}  // namespace engram
