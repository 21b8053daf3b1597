// Rules of rows, as Python writes them: (fields that are to be ready, field of the version or None); a field is (its number, its spec).
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "../core/check.h"
#include "../core/row_rules.h"
#include "../core/store.h"
#include "memory.h"
#include "tensors.h"

namespace engram {

inline RuleField rule_field_in(nanobind::handle given) {
  const auto number = nanobind::cast<std::uint32_t>(given[0]);
  const RowSpec spec = spec_of(given[1]);
  return {number, spec.code, spec.bits, 0};
}

/// An empty tuple: no rules.
inline RowRules rules_in(const nanobind::tuple& given) {
  RowRules rules;
  if (given.size() == 0) return rules;
  for (const nanobind::handle field : given[0]) rules.ready.push_back(rule_field_in(field));
  rules.dated = !nanobind::handle(given[1]).is_none();
  if (rules.dated) rules.version = rule_field_in(given[1]);
  return rules;
}

/// Where the rows of fields are: addresses, bytes of a row, and from row to row.
inline std::vector<Field> fields_at(const std::vector<Address>& data, const std::vector<std::uint64_t>& row_bytes,
                                    const std::vector<std::uint64_t>& strides) {
  check(data.size() == row_bytes.size() && data.size() == strides.size(), "one address per field, the bytes of a row, and a stride");
  std::vector<Field> fields;
  for (std::size_t i = 0; i < data.size(); ++i) fields.emplace_back(at<std::byte>(data[i]), row_bytes[i], strides[i]);
  return fields;
}

inline std::vector<Field> fields_numbered(const std::vector<std::uint64_t>& numbers, const Store& store) {
  std::vector<Field> fields;
  for (const std::uint64_t number : numbers) {
    check(number < store.fields(), "an index of a field that the store does not have");
    fields.push_back(store.field(number));
  }
  return fields;
}

/// Of an index of a store that is only read, in whose memory others note what they do.
template <class T>
void follow(T& index, Address memory, std::uint64_t bytes, nanobind::handle, bool copied) {
  index.follow(block(memory, bytes), copied);
}
inline constexpr char kFollow[] =
    "Of a store that is only read: knows what others note in their memory of it, which `keep` keeps alive. `copied`: it began as a copy of that.";

}  // namespace engram
