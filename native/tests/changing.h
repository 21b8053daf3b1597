// Marks of changed rows beside a store, in memory that children share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "beside.h"
#include "core/changes.h"
#include "core/store.h"
#include "expect.h"

/// A store of one lane with rows of a word, and marks of those that changed.
struct Changing : Beside {
  explicit Changing(std::uint64_t rows, bool samples = false) : Beside(rows, {8}, engram::Changes::bytes(rows)) {
    engram::Changes::format(index(), rows, samples);
  }
};

/// A process that writes, and looks.
struct Watching {
  explicit Watching(const Changing& shared, std::uint64_t participant = 0)
      : store(shared.blocks().open(participant)), control(shared.blocks().view()), index(shared.index()), seen(control.capacity()) {
    store.attach(index);
  }
  void append(std::uint64_t n) {
    const std::vector<std::uint64_t> ids(n, 1);
    const auto* column = reinterpret_cast<const std::byte*>(ids.data());
    store.append(0, n, {&column, 1}, nullptr);
  }
  void edit(const std::vector<std::int64_t>& rows) {
    const std::vector<std::uint64_t> ids(rows.size(), 2);
    const std::uint64_t which = 0;
    const auto* column = reinterpret_cast<const std::byte*>(ids.data());
    store.scatter(rows.data(), rows.size(), {&which, 1}, {&column, 1}, true);
  }
  std::uint64_t word(std::uint64_t row) const { return control.word(row).load(std::memory_order_acquire); }
  /// Takes over the words of the rows that may have changed. Returns how many rows it looked at.
  std::uint64_t catch_up() {
    std::vector<std::int64_t> rows;
    since = index.look(since, rows);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (i > 0) EXPECT(rows[i - 1] < rows[i]);
      seen[static_cast<std::size_t>(rows[i])] = word(static_cast<std::uint64_t>(rows[i]));
    }
    return rows.size();
  }
  bool knows_all() const {
    for (std::uint64_t row = 0; row < control.capacity(); ++row) {
      if (seen[row] != word(row)) return false;
    }
    return true;
  }

  engram::Store store;
  engram::Control control;
  engram::Changes index;
  std::vector<std::uint64_t> seen;
  std::uint64_t since = 0;
};
