// Rules of rows, as Python writes them: (fields that are to be ready, field of the version or None); a field is (its number, its spec).
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "../core/check.h"
#include "../core/row_rules.h"
#include "../core/store.h"
#include "tensors.h"

namespace engram {

inline RuleField rule_field_in(nanobind::handle given) {
  const auto number = nanobind::cast<std::uint32_t>(given[0]);
  const RowSpec spec = spec_of(given[1]);
  return {number, spec.code, spec.bits, 0};
}

inline std::vector<Field> fields_numbered(const std::vector<std::uint64_t>& numbers, const Store& store) {
  std::vector<Field> fields;
  for (const std::uint64_t number : numbers) {
    check(number < store.fields(), "an index of a field that the store does not have");
    fields.push_back(store.field(number));
  }
  return fields;
}

}  // namespace engram
