// Counts of draws beside a store, in memory that children share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "beside.h"
#include "core/consumption.h"
#include "core/store.h"
#include "expect.h"

/// A store of one lane with rows of a word, and the counts of their draws.
struct Counted : Beside {
  Counted(std::uint64_t rows, std::uint64_t most) : Beside(rows, {8}, engram::Consumption::bytes(rows)) {
    engram::Consumption::format(index(), rows, most);
  }
};

/// A process that uses both.
struct Consumer {
  explicit Consumer(const Counted& shared, std::uint64_t participant = 0)
      : store(shared.blocks().open(participant)), control(shared.blocks().view()), index(shared.index(), &control) {
    store.attach(index);
  }
  std::vector<std::int64_t> claim(std::uint64_t key, std::uint64_t n) {
    std::vector<std::int64_t> rows(n), numbers(n);
    rows.resize(index.claim(key, n, rows.data(), numbers.data()));
    index.were_read(rows.data(), numbers.data(), rows.size());
    return rows;
  }
  void append(std::uint64_t n) {
    const std::vector<std::byte> data(8 * n);
    const std::byte* column = data.data();
    store.append(0, n, {&column, 1}, nullptr);
  }
  std::vector<std::int32_t> drawn() {
    std::vector<std::int32_t> counts(index.rows());
    index.copy_counts(counts.data(), counts.size());
    return counts;
  }

  engram::Store store;
  engram::Control control;
  engram::Consumption index;
};
