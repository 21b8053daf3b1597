// Groups beside a store, in memory that children share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "beside.h"
#include "core/groups.h"
#include "core/store.h"
#include "expect.h"

/// Rows by their key.
using Parts = std::map<std::uint64_t, std::set<std::int64_t>>;

/// Groups by the second field.
inline engram::GroupsPolicy by_key() { return {.field = 1, .key_bytes = 8}; }

/// A store of one lane with rows of a word and a key, and the groups of these keys. Where the rules ask for it, the word is a number.
struct Grouped : Beside {
  explicit Grouped(std::uint64_t rows, const engram::GroupsPolicy& policy = by_key())
      : Beside(rows, {8, 8}, engram::Groups::bytes(rows, policy)) {
    engram::Groups::format(index(), rows, policy);
  }
};

/// A process that uses both.
struct Grouping {
  /// The fields that groups read.
  std::vector<engram::Field> fields_of(std::span<std::byte> groups) const {
    const engram::GroupsPolicy policy = engram::Groups::policy_of(groups);
    std::vector<engram::Field> fields{store.field(policy.field)};
    for (const auto& ready : policy.ready) fields.push_back(store.field(ready.number));
    if (policy.dated) fields.push_back(store.field(policy.version.number));
    if (policy.order == engram::GroupsOrder::spread) fields.push_back(store.field(policy.reward.number));
    return fields;
  }
  explicit Grouping(const Grouped& shared, std::uint64_t participant = 0)
      : store(shared.blocks().open(participant)), control(shared.blocks().view()), index(shared.index(), control, fields_of(shared.index())) {
    store.attach(index);
  }
  void append(const std::vector<std::uint64_t>& keys) {
    const std::byte* columns[] = {reinterpret_cast<const std::byte*>(keys.data()), reinterpret_cast<const std::byte*>(keys.data())};
    store.append(0, keys.size(), columns, nullptr);
  }
  /// Rows by number, in this order; those below them that hold nothing become zeros, all under one ticket number.
  void place(const std::vector<std::int64_t>& rows, const std::vector<std::uint64_t>& keys) {
    const std::byte* columns[] = {reinterpret_cast<const std::byte*>(keys.data()), reinterpret_cast<const std::byte*>(keys.data())};
    store.scatter(rows.data(), rows.size(), store.all(), columns, true);
  }
  /// Another key for live rows.
  void edit(const std::vector<std::int64_t>& rows, const std::vector<std::uint64_t>& keys) {
    const std::uint64_t which = 1;
    const auto* column = reinterpret_cast<const std::byte*>(keys.data());
    store.scatter(rows.data(), rows.size(), {&which, 1}, {&column, 1}, false);
  }
  /// Another word for live rows.
  void edit_words(const std::vector<std::int64_t>& rows, const std::vector<double>& words) {
    const std::uint64_t which = 0;
    const auto* column = reinterpret_cast<const std::byte*>(words.data());
    store.scatter(rows.data(), rows.size(), {&which, 1}, {&column, 1}, false);
  }
  void append(const std::vector<double>& words, const std::vector<std::uint64_t>& keys) {
    const std::byte* columns[] = {reinterpret_cast<const std::byte*>(words.data()), reinterpret_cast<const std::byte*>(keys.data())};
    store.append(0, keys.size(), columns, nullptr);
  }
  double word(std::int64_t row) const {
    double word = 0;
    std::memcpy(&word, store.field(0).row(static_cast<std::uint64_t>(row)), 8);
    return word;
  }
  /// What the store's rows say.
  Parts stored() const {
    Parts parts;
    for (std::uint64_t row = 0; row < control.capacity(); ++row) {
      if (!engram::is_committed(control.word(row).load())) continue;
      std::uint64_t key = 0;
      std::memcpy(&key, store.field(1).row(row), 8);
      parts[key].insert(static_cast<std::int64_t>(row));
    }
    return parts;
  }
  /// What the index says, all groups once.
  Parts noted(std::uint64_t draw = 1) {
    const auto all = index.draw_members(draw, {.n = index.groups(), .each = 1});
    Parts parts;
    std::size_t at = 0;
    for (const std::int64_t size : all.sizes) {
      std::set<std::int64_t> rows;
      std::uint64_t key = 0;
      for (std::int64_t i = 0; i < size; ++i, ++at) {
        if (i > 0) EXPECT(std::pair(all.numbers[at], all.rows[at]) > std::pair(all.numbers[at - 1], all.rows[at - 1]));
        rows.insert(all.rows[at]);
        std::memcpy(&key, store.field(1).row(static_cast<std::uint64_t>(all.rows[at])), 8);
      }
      EXPECT_EQ(rows.size(), static_cast<std::size_t>(size));
      EXPECT(!parts.contains(key));
      parts[key] = rows;
    }
    return parts;
  }

  engram::Store store;
  engram::Control control;
  engram::Groups index;
};
