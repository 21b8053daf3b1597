// An index of keys beside a store, in memory that children share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "beside.h"
#include "core/keys.h"
#include "core/store.h"
#include "expect.h"

/// Of each key the number of the newest write, and its row.
using Newest = std::map<std::uint64_t, std::pair<std::uint64_t, std::int64_t>>;

/// A store of one lane with rows of a word and a key, and the index of these keys.
struct Keyed : Beside {
  explicit Keyed(std::uint64_t rows) : Beside(rows, {8, 8}, engram::Keys::bytes(rows)) { engram::Keys::format(index(), rows, 1, 8); }
};

/// A process that uses both.
struct Keying {
  explicit Keying(const Keyed& shared, std::uint64_t participant = 0)
      : store(shared.blocks().open(participant)), control(shared.blocks().view()), index(shared.index(), control, store.field(1)) {
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
  /// Another word for live rows, in one field.
  void edit(const std::vector<std::int64_t>& rows, const std::vector<std::uint64_t>& words, std::uint64_t field = 1) {
    const auto* column = reinterpret_cast<const std::byte*>(words.data());
    store.scatter(rows.data(), rows.size(), {&field, 1}, {&column, 1}, false);
  }
  void remove(const std::vector<std::int64_t>& rows) { store.remove(rows.data(), rows.size(), nullptr); }
  std::uint64_t key_in(std::uint64_t row) const {
    std::uint64_t key = 0;
    std::memcpy(&key, store.field(1).row(row), 8);
    return key;
  }
  std::vector<std::int64_t> live() const {
    std::vector<std::int64_t> rows;
    for (std::uint64_t row = 0; row < control.capacity(); ++row) {
      if (engram::is_committed(control.word(row).load())) rows.push_back(static_cast<std::int64_t>(row));
    }
    return rows;
  }
  /// What the store's rows say.
  Newest stored() const {
    Newest newest;
    for (const std::int64_t row : live()) {
      const auto number = static_cast<std::uint64_t>(row);
      auto& known = newest[key_in(number)];
      known = std::max(known, {control.write_of(number, control.word(number).load()), row});
    }
    return newest;
  }
  /// What the index says of some keys.
  Newest noted(const std::vector<std::uint64_t>& keys) {
    std::vector<std::int64_t> rows(keys.size()), writes(keys.size());
    index.find(reinterpret_cast<const std::byte*>(keys.data()), keys.size(), rows.data(), writes.data());
    Newest newest;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      EXPECT_EQ(rows[i] < 0, writes[i] < 0);
      if (rows[i] >= 0) newest[keys[i]] = {static_cast<std::uint64_t>(writes[i]), rows[i]};
    }
    return newest;
  }
  /// Whether the index says of these keys, and of no other one, what the rows do: the newest rows, and all.
  bool agrees(std::vector<std::uint64_t> keys) {
    const Newest newest = stored();
    for (const auto& [key, row] : newest) keys.push_back(key);
    if (noted(keys) != newest) return false;
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    std::vector<std::int64_t> rows = index.find_all(reinterpret_cast<const std::byte*>(keys.data()), keys.size()).rows;
    std::sort(rows.begin(), rows.end());
    return rows == live();
  }

  engram::Store store;
  engram::Control control;
  engram::Keys index;
};
