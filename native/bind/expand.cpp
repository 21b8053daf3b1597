#include "expand.h"

#include "../core/expand.h"

#include <nanobind/stl/vector.h>

#include <cstring>
#include <deque>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "../core/check.h"
#include "column.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;
namespace engram {
namespace {

const RowSpec kNumberColumn{0, 64, {1}}, kFloatColumn{2, 32, {1}}, kByte{1, 8, {}};

// What is read, and the dtype and shape of each tensor that it makes.
struct BoundExpansion {
  BoundExpansion(std::vector<std::uint64_t> ends, std::vector<std::uint64_t> step_types, std::vector<std::uint64_t> whole)
      : what(std::move(ends), std::move(step_types), std::move(whole)) {}

  void add(Output output, RowSpec spec) {
    if (output.kind == Output::Kind::after) after = specs.size();
    specs.push_back(std::move(spec));
    what.add(std::move(output));
  }

  Expansion what;
  std::deque<RowSpec> specs;
  /// The output that says what comes after the rows, the last one added.
  std::optional<std::size_t> after;
};

nb::tuple read(const BoundExpansion& self, const Store& store, Trajectories& table, Numbers rows, Numbers expected,
               std::uint64_t oldest) {
  const std::uint64_t n = rows.size;
  check(n < std::uint64_t{1} << 48, "a batch of more rows than there is memory");
  const auto count = static_cast<std::int64_t>(n);
  OutputBuffers buffers;
  std::vector<std::int64_t> moved, old, last;
  {
    nb::gil_scoped_release release;
    for (const RowSpec& spec : self.specs) buffers.add(spec, count);
    buffers.add(kNumbers, count);
    const std::size_t outputs = self.specs.size();
    moved = expand(store, table, self.what, rows.data, n, expected.of_any(n), buffers.first(outputs),
                   buffers.at<std::int64_t>(outputs));
    for (std::int64_t i = 0; oldest > 0 && i < count; ++i) {
      if (store.control().among_oldest(static_cast<std::uint64_t>(rows.data[i]), oldest)) old.push_back(i);
    }
    for (std::int64_t i = 0; self.after && i < count; ++i) {
      if (buffers.at<std::uint8_t>(*self.after)[i] != 0) last.push_back(i);
    }
  }
  return nb::make_tuple(std::move(buffers).tensors(count), moved, old, last);
}

// An output that is no field.
void add_count(BoundExpansion& self, Output::Kind kind, const RowSpec& spec, std::uint64_t ahead, double gamma = 1) {
  Output o{kind};
  o.ahead = ahead;
  o.gamma = gamma;
  self.add(std::move(o), spec);
}

}  // namespace

void bind_expand(nb::module_& m) {
  using Kind = Output::Kind;
  nb::class_<BoundExpansion>(m, "Expansion", "What a batch holds of the steps around its rows: one tensor per call of a method.")
      .def(nb::init<std::vector<std::uint64_t>, std::vector<std::uint64_t>, std::vector<std::uint64_t>>(), "ends"_a, "step_types"_a,
           "whole"_a, "Fields that end a trajectory where they are not zero; of step types, bytes of an integer other than 0, where one "
           "is the last; of whole ones, bytes of a flag other than 0, where all are set.")
      .def(
          "row",
          [](BoundExpansion& self, std::uint64_t field, const nb::tuple& spec, std::uint64_t ahead) {
            Output o{Output::Kind::row};
            o.field = field;
            o.ahead = ahead;
            self.add(std::move(o), spec_of(spec));
          },
          "field"_a, "spec"_a, "ahead"_a, "The field of the step that much later, or of the last one: [n, *shape].")
      .def(
          "frames",
          [](BoundExpansion& self, std::uint64_t field, const nb::tuple& spec, std::uint64_t ahead, std::uint64_t frames,
             bool following, std::int64_t first, const nb::bytes& filling) {
            check(frames > 0 && frames < std::uint64_t{1} << 32, "at least one frame");
            Output o{Output::Kind::frames};
            o.field = field;
            o.ahead = ahead;
            o.frames = frames;
            o.following = following;
            o.first = first;
            const auto* bytes = static_cast<const std::byte*>(filling.data());
            o.filling.assign(bytes, bytes + filling.size());
            RowSpec made = spec_of(spec);
            made.shape.insert(made.shape.begin(), static_cast<std::int64_t>(frames));
            self.add(std::move(o), std::move(made));
          },
          "field"_a, "spec"_a, "ahead"_a, "frames"_a, "following"_a, "first"_a, "filling"_a,
          "The field of the last steps up to that one, or to the step after it if `following`: [n, frames, *shape]. Before the "
          "trajectory: the field `first` of its first step, `filling`, or the first frame. Where no step follows, the last frame "
          "is unspecified.")
      .def(
          "sum",
          [](BoundExpansion& self, std::uint64_t field, const nb::tuple& spec, std::uint64_t ahead, double gamma) {
            RowSpec made = spec_of(spec);
            Output o{Output::Kind::sum};
            o.field = field;
            o.ahead = ahead;
            o.gamma = gamma;
            std::tie(o.code, o.bits) = std::tie(made.code, made.bits);
            made = {2, static_cast<std::uint8_t>(8 * o.sum_bytes()), std::move(made.shape)};
            self.add(std::move(o), std::move(made));
          },
          "field"_a, "spec"_a, "ahead"_a, "gamma"_a, "Sum of gamma ** i times the field of step i: float32 [n, *shape], of float64 float64.")
      .def(
          "steps",
          [](BoundExpansion& self, std::uint64_t ahead) { add_count(self, Kind::steps, kNumberColumn, ahead); },
          "ahead"_a, "How many steps there are up to that one: int64 [n, 1].")
      .def(
          "discount",
          [](BoundExpansion& self, std::uint64_t ahead, double gamma) {
            add_count(self, Kind::discount, kFloatColumn, ahead, gamma);
          },
          "ahead"_a, "gamma"_a, "gamma to the power of that: float32 [n, 1].")
      .def(
          "over",
          [](BoundExpansion& self, std::uint64_t ahead) { add_count(self, Kind::over, kFlagColumn, ahead); },
          "ahead"_a, "Whether the trajectory ends there: bool [n, 1].")
      .def(
          "after",
          [](BoundExpansion& self, std::uint64_t ahead) { add_count(self, Kind::after, kByte, ahead); },
          "ahead"_a, "uint8 [n]. 0: a step comes after that one. 1: none so far. 2: none, as an end flag says. 3: another trajectory.")
      .def("read", &read, "store"_a, "table"_a, "rows"_a, "expected"_a.none(), "oldest"_a,
           "Of n rows: ([a tensor per output, int64 ticket numbers [n]], positions that moved, of the `oldest` of a full lane, `after` > 0).");
}

}  // namespace engram
