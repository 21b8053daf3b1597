#pragma once

#include <nanobind/nanobind.h>

namespace engram {

/// Needs the class Index to be bound; what is bound of the store takes them.
void bind_writers(nanobind::module_& m);

}  // namespace engram
