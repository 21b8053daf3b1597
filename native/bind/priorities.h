#pragma once

#include <nanobind/nanobind.h>

#include <span>

#include "../core/priorities.h"

namespace engram {

/// An index with its own view of the tickets: it must not hold the store, which holds it.
class BoundPriorities : public Priorities {
 public:
  BoundPriorities(std::span<std::byte> memory, const Store* store)
      : BoundPriorities(memory, store == nullptr ? nullptr : new Control(store->control())) {}
  ~BoundPriorities() override { delete control_; }

 private:
  BoundPriorities(std::span<std::byte> memory, const Control* control) : Priorities(memory, control), control_(control) {}
  const Control* control_;
};

/// Needs the class Index to be bound.
void bind_priorities(nanobind::module_& m);

}  // namespace engram
