// Goals of hindsight: for a drawn row, a field of another step, most often one of the same trajectory. (Andrychowicz et al.,
// "Hindsight experience replay", NeurIPS 2017.)
#pragma once

#include <cstdint>
#include <vector>

#include "store.h"
#include "trajectories.h"

namespace engram {

/// Reads `field` of the step that is the goal of each of n rows, and returns the positions where there is none now: the row does
/// not hold `expected`, or one of both rows moved. What is filled in there is unspecified. A pure function of `draw`, table and
/// tickets: the i-th row takes the random numbers of position `places[i]` (null: i).
std::vector<std::int64_t> read_goals(const Store& store, Trajectories& table, const GoalDraw& draw, std::uint64_t field,
                                     const std::int64_t* rows, const std::int64_t* expected, const std::int64_t* places,
                                     std::uint64_t n, std::byte* out);

}  // namespace engram
