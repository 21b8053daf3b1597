// Counts of draws beside a store, in memory that children share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
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

/// The first field holds no NaN, and the second is a version.
inline engram::RowRules rewarded_and_dated() {
  return {.ready = {{0, 2, 64, 0}}, .dated = true, .version = {1, 2, 64, 0}};
}

/// A store of one lane with rows of two numbers, and which of them may be drawn.
struct Ruled : Beside {
  explicit Ruled(std::uint64_t rows, std::uint64_t most, const engram::RowRules& rules = rewarded_and_dated())
      : Beside(rows, {8, 8}, engram::Consumption::bytes(rows, rules)) {
    engram::Consumption::format(index(), rows, most, rules);
  }
};

/// A process that uses both.
struct Consumer {
  static std::vector<engram::Field> fields_of(std::span<std::byte> index, const engram::Store& store) {
    std::vector<engram::Field> fields;
    for (const std::uint64_t number : engram::Consumption::rules_of(index).fields()) fields.push_back(store.field(number));
    return fields;
  }
  explicit Consumer(const Beside& shared, std::uint64_t participant = 0)
      : store(shared.blocks().open(participant)),
        control(shared.blocks().view()),
        index(shared.index(), &control, fields_of(shared.index(), store)) {
    store.attach(index);
  }
  void append(const std::vector<double>& rewards, const std::vector<double>& versions) {
    const std::byte* columns[] = {reinterpret_cast<const std::byte*>(rewards.data()), reinterpret_cast<const std::byte*>(versions.data())};
    store.append(0, rewards.size(), columns, nullptr);
  }
  void edit(const std::vector<std::int64_t>& rows, const std::vector<double>& values, std::uint64_t field = 0) {
    const auto* column = reinterpret_cast<const std::byte*>(values.data());
    store.scatter(rows.data(), rows.size(), {&field, 1}, {&column, 1}, false);
  }
  double value(std::int64_t row, std::uint64_t field) const {
    double value = 0;
    std::memcpy(&value, store.field(field).row(static_cast<std::uint64_t>(row)), 8);
    return value;
  }
  /// Offers rows that someone else has drawn. Those that were taken.
  std::vector<std::int64_t> admit(const std::vector<std::int64_t>& rows, std::uint64_t most = ~std::uint64_t{0}) {
    std::vector<std::int64_t> numbers, places(rows.size()), taken;
    for (const std::int64_t row : rows) {
      numbers.push_back(static_cast<std::int64_t>(engram::number_of(control.word(static_cast<std::uint64_t>(row)).load())));
    }
    places.resize(index.admit(rows.data(), numbers.data(), rows.size(), most, places.data()));
    for (const std::int64_t place : places) taken.push_back(rows[static_cast<std::size_t>(place)]);
    return taken;
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
