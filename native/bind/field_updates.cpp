// Fields of rows that still hold what was drawn, for Python: update_if_present.

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "../core/newest.h"
#include "../core/store.h"
#include "cast.h"
#include "intake.h"
#include "interpreter.h"
#include "memory.h"
#include "store.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

// The ints of a tensor [n]: int64, one behind the other. None: it is another one.
std::optional<std::span<const std::int64_t>> ints_of(nb::handle tensor) {
  Values values;
  const bool are_ints = look_at_tensor(tensor.ptr(), values) && values.code == kNumbers.code && values.bits == kNumbers.bits &&
                        values.ndim == 1 && values.contiguous();
  if (!are_ints) return std::nullopt;
  return std::span(reinterpret_cast<const std::int64_t*>(values.data), static_cast<std::size_t>(values.shape[0]));
}

// Versions to compare with those of a field, one behind the other; null: they must be converted first.
const std::byte* versions_of(nb::handle tensor, const RowSpec& spec, std::size_t n) {
  Values values;
  if (!look_at_tensor(tensor.ptr(), values) || values.code != spec.code || values.bits != spec.bits || !values.contiguous()) return nullptr;
  std::uint64_t count = 1;
  for (std::int32_t d = 0; d < values.ndim; ++d) count *= static_cast<std::uint64_t>(values.shape[d]);
  return count == n ? values.data : nullptr;
}

// Which entries bring a version to be written. False: the versions cannot be compared as T.
template <class T>
bool pick_as(std::span<const std::int64_t> rows, const std::byte* stored, const std::byte* given, const RowSpec& spec, bool newer,
             const bool* live, bool* wins) {
  const Dtype dtype{spec.code, spec.bits}, wanted{std::is_floating_point_v<T> ? kDouble.code : kNumbers.code, 64};
  const std::size_t n = rows.size();
  std::vector<T> before(n), after(n);
  for (auto [from, to] : {std::pair(stored, before.data()), std::pair(given, after.data())}) {
    if (!cast(from, dtype, reinterpret_cast<std::byte*>(to), wanted, n)) return false;
  }
  pick_newest(rows.data(), n, before.data(), after.data(), newer, live, wins);
  return true;
}

// A patch with versions: those of the rows that hold the writes expected decide, and are written with the rest.
class Versions {
 public:
  Versions(const Store& store, const Intake& intake, std::int64_t field, nb::handle given, bool newer, std::span<const std::int64_t> rows)
      : store_(store), field_(static_cast<std::uint64_t>(field)), spec_(intake.specs().at(field_)), newer_(newer), rows_(rows) {
    given_ = versions_of(given, spec_, rows.size());
  }

  bool can_be_compared() const { return given_ != nullptr && spec_.bits / 8 == store_.row_bytes(field_); }
  std::uint64_t field() const { return field_; }
  const std::byte* given() const { return given_; }

  /// Puts the tickets under which the entries are to be written in the place of the writes expected; -1: not to be written, with 1 where
  /// the version is why. False: nothing can be said.
  bool decide(std::vector<std::int64_t>& expected, bool* rejected) const {
    const std::size_t n = rows_.size();
    std::vector<std::int64_t> at(n);
    std::vector<std::byte> stored(n * store_.row_bytes(field_));
    std::unique_ptr<bool[]> live(new bool[n]);
    store_.tickets_of_writes(rows_.data(), n, expected.data(), expected.data());
    for (std::size_t i = 0; i < n; ++i) at[i] = std::max<std::int64_t>(rows_[i], 0), live[i] = expected[i] >= 0;
    const std::uint64_t which[] = {field_};
    std::byte* const out[] = {stored.data()};
    for (const std::int64_t moved : store_.gather(at.data(), n, which, out, expected.data(), nullptr)) live[static_cast<std::size_t>(moved)] = false;
    const auto pick = spec_.code == kDouble.code ? pick_as<double> : pick_as<std::int64_t>;
    if (!pick(rows_, stored.data(), given_, spec_, newer_, live.get(), rejected)) return false;
    for (std::size_t i = 0; i < n; ++i) {
      if (!rejected[i]) expected[i] = -1;
      rejected[i] = live[i] && !rejected[i];
    }
    return true;
  }

 private:
  const Store& store_;
  std::uint64_t field_;
  const RowSpec& spec_;
  bool newer_;
  std::span<const std::int64_t> rows_;
  const std::byte* given_ = nullptr;
};

nb::object patch_of(Store& self, const Intake& intake, nb::handle index, nb::handle generation, nb::handle patch, std::int64_t version_field,
                    nb::handle version, bool newer) {
  const auto rows = ints_of(index), tickets = ints_of(generation);
  if (!rows || !tickets || rows->size() != tickets->size() || rows->empty()) return nb::none();
  const auto n = static_cast<std::int64_t>(rows->size());
  Taken taken;
  std::vector<std::uint64_t> which;
  if (!intake.take_some(patch, n, taken, which)) return nb::none();
  std::vector<const std::byte*> columns;
  for (const std::uint64_t field : which) columns.push_back(taken.columns()[field]);
  std::optional<Versions> versions;
  if (version_field >= 0) {
    versions.emplace(self, intake, version_field, version, newer, *rows);
    if (!versions->can_be_compared() || std::find(which.begin(), which.end(), versions->field()) != which.end()) return nb::none();
    which.push_back(versions->field());
    columns.push_back(versions->given());
  }
  OutputBuffer numbers(kNumbers, n), updated(kFlag, n), rejected(kFlag, versions ? n : 0);
  auto* const number = reinterpret_cast<std::int64_t*>(numbers.data());
  std::optional<Patched> made;
  {
    const WithoutInterpreter running(self.writes_briefly(rows->size()));
    std::vector<std::int64_t> allowed;
    if (versions) allowed.assign(tickets->begin(), tickets->end());
    if (!versions || versions->decide(allowed, reinterpret_cast<bool*>(rejected.data()))) {
      const auto same = versions ? Store::Same::ticket : Store::Same::write;
      made = self.patch(rows->data(), rows->size(), which, columns, versions ? allowed.data() : tickets->data(), number, same);
      std::transform(number, number + n, reinterpret_cast<bool*>(updated.data()), [](std::int64_t value) { return value >= 0; });
    }
  }
  if (!made) return nb::none();
  nb::object why = versions ? std::move(rejected).tensor(n) : nb::none();
  return nb::make_tuple(made->first, made->entries, std::move(numbers).tensor(n), std::move(updated).tensor(n), std::move(why));
}

}  // namespace

void bind_field_updates(nb::module_& m, nb::class_<Store>& type) {
  type.def(
      "patch_of", &patch_of, "intake"_a, "index"_a, "generation"_a, "patch"_a, "version_field"_a, "version"_a.none(), "newer"_a,
      "Writes fields of the rows of an index that still have the tickets of a generation, from data as users hand it over; with a version "
      "field (-1: none) only where versions allow, and the versions: (first ticket number, how many entries were written, new tickets or "
      "-1, which were written, which versions were rejected or None). None: it must be looked at in Python; nothing was written.");
  m.def(
      "pick_newest",
      [](Address rows, std::uint64_t n, Address stored, Address given, bool floating, bool newer, Address live, Address wins) {
        const auto pick = [&](auto value) {
          using T = decltype(value);
          pick_newest(at<const std::int64_t>(rows), n, at<const T>(stored), at<const T>(given), newer, at<const bool>(live), at<bool>(wins));
        };
        floating ? pick(double{}) : pick(std::int64_t{});
      },
      "rows"_a, "n"_a, "stored"_a, "given"_a, "floating"_a, "newer"_a, "live"_a, "wins"_a,
      "Which of n entries bring a version to be written, of doubles or int64: bools.");
}

}  // namespace engram
