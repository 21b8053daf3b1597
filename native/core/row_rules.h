// What rows must say to be drawn: that they are ready, and which version of a policy made them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "gather.h"

namespace engram {

/// A field of numbers, and their dtype, as DLPack names it.
struct RuleField {
  std::uint32_t number;
  std::uint8_t code, bits;
  std::uint16_t unused;
};
static_assert(sizeof(RuleField) == 8);

/// A number of that dtype as a double; null: no real numbers.
using Number = double (*)(const std::byte* row);
Number number_as(const RuleField& field);

struct RowRules {
  static constexpr std::uint64_t kReady = 16;

  std::vector<RuleField> ready = {};  // fields without NaN
  bool dated = false;                 // rows have versions
  RuleField version = {};

  bool any() const { return dated || !ready.empty(); }
  /// Numbers of the fields that are looked at: those that are to be ready, then the version.
  std::vector<std::uint64_t> fields() const;
  /// Throws std::invalid_argument: fields without such numbers, or too many of them.
  void check() const;
};

/// Looks at rows by some rules.
class RuleReader {
 public:
  RuleReader() = default;
  /// `fields`: those that the rules name. Throws std::invalid_argument: they are others.
  RuleReader(const RowRules& rules, std::span<const Field> fields);

  /// The version of a row, 0 where rows have none; NaN: it is not ready, or has none. To be believed if its ticket is as it was before.
  double read(std::uint64_t row);

 private:
  RowRules rules_;
  std::vector<Field> fields_;
  std::vector<std::byte> values_;
};

/// Rows by their versions, the oldest first: a heap in memory that may be shared.
///
///   memory   versions f64[rows] · rows in order u32[rows] · of each row its place there u32[rows]
///
/// In zeroed memory, with a size of 0, it is empty.
class VersionHeap {
 public:
  static std::uint64_t bytes(std::uint64_t rows) { return rows * (sizeof(double) + 2 * sizeof(std::uint32_t)); }

  VersionHeap() = default;
  /// `size`: how many there are, a word of the header.
  VersionHeap(std::byte* memory, std::uint64_t rows, std::uint64_t& size);

  bool has(std::uint64_t row) const { return places_[row] != 0; }
  bool has(std::uint64_t row, double version) const { return has(row) && versions_[row] == version; }
  /// Of a row that is not in it. O(log rows), as is erase().
  void insert(std::uint64_t row, double version);
  void erase(std::uint64_t row);
  void clear();
  /// The row of the oldest version, if that is below `floor`.
  std::optional<std::uint64_t> below(double floor) const;

 private:
  using Id = std::uint32_t;  // of a row: its number + 1; 0 is none

  Id at(std::uint64_t place) const;
  std::uint64_t size() const;
  bool is_older(Id a, Id b) const;
  void put(std::uint64_t place, Id id);
  void sift(std::uint64_t place);

  double* versions_ = nullptr;
  Id *order_ = nullptr, *places_ = nullptr;  // places + 1
  std::uint64_t rows_ = 0, *size_ = nullptr;
};

}  // namespace engram
