#include "row_rules.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "check.h"
#include "reals.h"

namespace engram {
namespace {

constexpr char kHeap[] = "versions: expected rows in order";

// Null: no numbers of which one can be NaN.
using HasNan = bool (*)(const std::byte* row, std::uint64_t bytes);
HasNan has_nan(const RuleField& field) {
  return of_reals<HasNan>(
      field.code, field.bits,
      []<class T>() -> HasNan {
        if constexpr (std::is_integral_v<T>) {
          return nullptr;
        } else {
          return [](const std::byte* row, std::uint64_t bytes) {
            for (std::uint64_t i = 0; i + sizeof(T) <= bytes; i += sizeof(T)) {
              T value;
              std::memcpy(&value, row + i, sizeof value);
              if (std::isnan(static_cast<double>(value))) return true;
            }
            return false;
          };
        }
      },
      nullptr);
}

}  // namespace

Number number_as(const RuleField& field) {
  return of_reals<Number>(
      field.code, field.bits,
      []<class T>() -> Number {
        return [](const std::byte* row) {
          T value;
          std::memcpy(&value, row, sizeof value);
          return static_cast<double>(value);
        };
      },
      nullptr);
}

std::vector<std::uint64_t> RowRules::fields() const {
  std::vector<std::uint64_t> numbers;
  for (const RuleField& field : ready) numbers.push_back(field.number);
  if (dated) numbers.push_back(version.number);
  return numbers;
}

void RowRules::check() const {
  engram::check(ready.size() <= kReady, "rules of rows: expected at most 16 fields that are to be ready");
  for (const RuleField& field : ready) engram::check(has_nan(field) != nullptr, "rules of rows: expected floating numbers where NaN is not ready");
  engram::check(!dated || number_as(version) != nullptr, "rules of rows: expected versions that are real numbers");
}

RuleReader::RuleReader(const RowRules& rules, std::span<const Field> fields) : rules_(rules), fields_(fields.begin(), fields.end()) {
  check(fields_.size() == rules_.fields().size(), "rules of rows of other fields than theirs");
  std::uint64_t most = 0;
  for (const Field& field : fields_) {
    check(field.data != nullptr, "rules of rows of a field that is not there");
    most = std::max(most, field.row_bytes);
  }
  check(!rules_.dated || fields_.back().row_bytes * 8 == rules_.version.bits, "rules of rows: expected one version per row");
  values_.resize(most);
}

double RuleReader::read(std::uint64_t row) {
  for (std::size_t i = 0; i < rules_.ready.size(); ++i) {
    const Field& field = fields_[i];
    copy_from_shared(values_.data(), field.row(row), field.row_bytes);
    if (has_nan(rules_.ready[i])(values_.data(), field.row_bytes)) return std::numeric_limits<double>::quiet_NaN();
  }
  if (!rules_.dated) return 0;
  copy_from_shared(values_.data(), fields_.back().row(row), fields_.back().row_bytes);
  return number_as(rules_.version)(values_.data());
}

VersionHeap::VersionHeap(std::byte* memory, std::uint64_t rows, std::uint64_t& size)
    : versions_(reinterpret_cast<double*>(memory)),
      order_(reinterpret_cast<Id*>(versions_ + rows)),
      places_(order_ + rows),
      rows_(rows),
      size_(&size) {}

std::uint64_t VersionHeap::size() const {
  const std::uint64_t size = copied(*size_);
  intact(size <= rows_, kHeap);
  return size;
}

VersionHeap::Id VersionHeap::at(std::uint64_t place) const {
  const Id id = copied(order_[place]);
  intact(id > 0 && id <= rows_, kHeap);
  return id;
}

bool VersionHeap::is_older(Id a, Id b) const {
  const double mine = versions_[a - 1], other = versions_[b - 1];
  return mine < other || (mine == other && a < b);
}

void VersionHeap::put(std::uint64_t place, Id id) {
  order_[place] = id;
  places_[id - 1] = static_cast<Id>(place + 1);
}

// The row at that place goes up or down until none above it is newer.
void VersionHeap::sift(std::uint64_t place) {
  const std::uint64_t n = size();
  const Id id = at(place);
  for (; place > 0 && is_older(id, at((place - 1) / 2)); place = (place - 1) / 2) put(place, at((place - 1) / 2));
  for (std::uint64_t child; (child = 2 * place + 1) < n; place = child) {
    if (child + 1 < n && is_older(at(child + 1), at(child))) ++child;
    if (!is_older(at(child), id)) break;
    put(place, at(child));
  }
  put(place, id);
}

void VersionHeap::insert(std::uint64_t row, double version) {
  const std::uint64_t n = size();
  intact(n < rows_, kHeap);
  versions_[row] = version;
  *size_ = n + 1;
  put(n, static_cast<Id>(row + 1));
  sift(n);
}

void VersionHeap::erase(std::uint64_t row) {
  const std::uint64_t n = size(), place = copied(places_[row]);
  intact(place > 0 && place <= n && copied(order_[place - 1]) == row + 1, kHeap);
  const Id last = at(n - 1);
  *size_ = n - 1;
  places_[row] = 0;
  if (last == row + 1) return;
  put(place - 1, last);
  sift(place - 1);
}

void VersionHeap::clear() {
  *size_ = 0;
  std::fill_n(places_, rows_, 0);
}

std::optional<std::uint64_t> VersionHeap::below(double floor) const {
  if (size() == 0) return std::nullopt;
  const Id oldest = at(0);
  return versions_[oldest - 1] < floor ? std::optional<std::uint64_t>(oldest - 1) : std::nullopt;
}

}  // namespace engram
