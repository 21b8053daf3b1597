#pragma once

#include <nanobind/nanobind.h>

#include "../core/store.h"

namespace engram {

/// Needs the classes Hold and Index to be bound. Binds Participants, too.
void bind_store(nanobind::module_& m);

/// The files of its fields.
void bind_disk(nanobind::class_<Store>& type);

/// Updates of fields of rows that still hold what was drawn.
void bind_field_updates(nanobind::module_& m, nanobind::class_<Store>& type);

/// How fast rows may come and go.
void bind_limits(nanobind::class_<Store>& type);

/// What it counts for people.
void bind_meter(nanobind::class_<Store>& type);

/// What concerns the store's control memory and not its rows.
void bind_store_control(nanobind::module_& m, nanobind::class_<Store>& type);

}  // namespace engram
