// What a batch says of the steps around its rows: sums of what follows, frames of what came before.
//
// The caller has drawn the rows. Of each the table of trajectories tells the steps around it, with their tickets; what is
// needed of them is copied, and a row of whose steps one moved meanwhile is named as moved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "store.h"
#include "trajectories.h"

namespace engram {

/// As many steps as there are.
constexpr std::uint64_t kToTheEnd = ~std::uint64_t{0};

/// One tensor of a batch. Steps count from the drawn row, which is step 0; `ahead` names the step that many later, or the last
/// one of the trajectory if that comes first.
struct Output {
  enum class Kind {
    row,       // the field of step `ahead`
    frames,    // the field of the `frames` steps up to step `ahead`, oldest first
    sum,       // of gamma^i times the field of step i, up to step `ahead`
    steps,     // int64: how many steps that sum has
    discount,  // f32: gamma to the power of that
    over,      // bool: the trajectory ends with step `ahead`
    after,     // u8: what comes after step `ahead`, an After
  };
  /// The step after; nothing, so far; nothing any more, as an end flag says; the first step of another trajectory, without one.
  enum class After : std::uint8_t { step, nothing, end, another };

  Kind kind = Kind::row;
  std::uint64_t field = 0, ahead = 0, frames = 1;
  /// Frames are those up to the step after `ahead`; where none comes after it, the last frame is left to the caller.
  bool following = false;
  /// Frames that lie before the trajectory: the field `first` of its first step (>= 0: the frame before that one), `filling`
  /// (bytes of a row), or the first frame again.
  std::int64_t first = -1;
  std::vector<std::byte> filling{};
  double gamma = 1;
  std::uint8_t code = 2, bits = 32;  // of a sum: the field's dtype, as DLPack names it
  /// Bytes of a number of that sum: it is float64 of a field that is, else float32.
  std::uint64_t sum_bytes() const { return code == 2 && bits == 64 ? 8 : 4; }
};

class Expansion {
 public:
  /// `ends`: fields of which a byte other than zero ends the trajectory, whatever the table says. `step_types`: as in Boundaries;
  /// of those fields the last step type does. `whole`: as there.
  explicit Expansion(std::vector<std::uint64_t> ends, std::vector<std::uint64_t> step_types = {}, std::vector<std::uint64_t> whole = {})
      : ends_(std::move(ends)), step_types_(std::move(step_types)), whole_(std::move(whole)) {
    step_types_.resize(ends_.size());
    whole_.resize(ends_.size());
  }

  void add(Output output) { outputs_.push_back(std::move(output)); }

  const std::vector<Output>& outputs() const { return outputs_; }
  const std::vector<std::uint64_t>& ends() const { return ends_; }
  const std::vector<std::uint64_t>& step_types() const { return step_types_; }
  const std::vector<std::uint64_t>& whole() const { return whole_; }
  /// Whether all outputs are fields of the rows themselves.
  bool plain() const;
  /// Steps that are looked at before a row, and after it.
  std::uint64_t before() const;
  std::uint64_t after() const;

 private:
  std::vector<std::uint64_t> ends_, step_types_, whole_;
  std::vector<Output> outputs_;
};

/// Fills one piece of memory per output with what n rows give, and their ticket numbers. Returns the positions whose row, or a
/// step around it that was looked at, moved, is being written, or whose row does not hold `expected` (may be null); what was
/// filled in there is unspecified.
std::vector<std::int64_t> expand(const Store& store, Trajectories& table, const Expansion& expansion,
                                 const std::int64_t* rows, std::uint64_t n, const std::int64_t* expected,
                                 std::span<std::byte* const> out, std::int64_t* numbers_out);

}  // namespace engram
