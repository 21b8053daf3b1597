// Rows by version beside a store whose writers do not tell, in memory that children share.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <vector>

#include "beside.h"
#include "core/store.h"
#include "core/versions.h"
#include "expect.h"

constexpr double kNotReady = std::numeric_limits<double>::quiet_NaN();

/// A store of one lane with rows of a number that is to be ready, and a version.
struct Versioned : Beside {
  explicit Versioned(std::uint64_t rows) : Beside(rows, {8, 8}, 4096) {}
};

/// A process that writes.
struct Writing {
  explicit Writing(const Versioned& shared, std::uint64_t participant = 0) : store(shared.blocks().open(participant)) {}

  /// Rows of these versions, that are ready. The first one's ticket number.
  std::uint64_t append(const std::vector<double>& versions) {
    const std::vector<double> ready(versions.size(), 1);
    const std::byte* columns[] = {reinterpret_cast<const std::byte*>(ready.data()), reinterpret_cast<const std::byte*>(versions.data())};
    return store.append(0, versions.size(), columns, nullptr);
  }
  /// The same for rows by number.
  void place(const std::vector<std::int64_t>& rows, const std::vector<double>& versions) {
    const std::byte* columns[] = {reinterpret_cast<const std::byte*>(versions.data()), reinterpret_cast<const std::byte*>(versions.data())};
    store.scatter(rows.data(), rows.size(), store.all(), columns, true);
  }
  void edit(const std::vector<std::int64_t>& rows, const std::vector<double>& values, std::uint64_t field) {
    const auto* column = reinterpret_cast<const std::byte*>(values.data());
    store.scatter(rows.data(), rows.size(), {&field, 1}, {&column, 1}, false);
  }
  void remove(const std::vector<std::int64_t>& rows) { store.remove(rows.data(), rows.size(), nullptr); }

  engram::Store store;
};

/// A process that draws.
struct Drawing {
  explicit Drawing(const Versioned& shared)
      : control(shared.blocks().view()), fields(shared.blocks().fields), index(control, rules(), fields) {}

  static engram::RowRules rules() {
    constexpr engram::RuleField ready{0, 2, 64, 0}, version{1, 2, 64, 0};  // float64, as DLPack names it
    return {{ready}, true, version};
  }

  double in(std::uint64_t field, std::int64_t row) const {
    double value = 0;
    std::memcpy(&value, fields[field].row(static_cast<std::uint64_t>(row)), sizeof value);
    return value;
  }
  /// What the store's rows say: those that follow the rules, by version.
  std::map<double, std::set<std::int64_t>> stored() const {
    std::map<double, std::set<std::int64_t>> rows;
    for (std::uint64_t row = 0; row < control.capacity(); ++row) {
      const auto number = static_cast<std::int64_t>(row);
      if (!engram::is_committed(control.word(row).load()) || std::isnan(in(0, number)) || std::isnan(in(1, number))) continue;
      rows[in(1, number)].insert(number);
    }
    return rows;
  }
  struct Drawn {
    bool any;
    std::vector<std::int64_t> rows, numbers;
    std::vector<double> versions;
  };
  Drawn draw(std::uint64_t key, std::uint64_t n, const std::vector<double>& of, const std::vector<double>& weights) {
    Drawn drawn{false, std::vector<std::int64_t>(n), std::vector<std::int64_t>(n), std::vector<double>(n)};
    drawn.any = index.draw(key, n, of, weights, drawn.rows.data(), drawn.numbers.data(), drawn.versions.data());
    return drawn;
  }
  /// Whether it says what the rows do once it has caught up, and draws them all, each once.
  bool agrees(std::uint64_t key = 0) {
    index.catch_up();
    std::vector<double> versions;
    std::vector<std::int64_t> counts;
    index.versions(versions, counts);
    const auto expected = stored();
    if (versions.size() != expected.size() || counts.size() != expected.size()) return false;
    std::size_t at = 0;
    std::uint64_t all = 0;
    for (const auto& [version, rows] : expected) {
      if (versions[at] != version || counts[at] != static_cast<std::int64_t>(rows.size())) return false;
      all += rows.size();
      ++at;
    }
    const Drawn drawn = draw(key, all, versions, std::vector<double>(versions.size(), 1));
    if (drawn.any != (all > 0)) return false;
    std::map<double, std::set<std::int64_t>> found;
    for (std::size_t i = 0; i < all; ++i) {
      found[drawn.versions[i]].insert(drawn.rows[i]);
      const std::uint64_t word = control.word(static_cast<std::uint64_t>(drawn.rows[i])).load();
      if (engram::number_of(word) != static_cast<std::uint64_t>(drawn.numbers[i])) return false;
    }
    return found == expected;
  }

  engram::Control control;
  std::vector<engram::Field> fields;
  engram::Versions index;
};
