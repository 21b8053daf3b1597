// Counts of draws across deaths at every instruction of a draw and of a write.
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "counts.h"
#include "crash.h"
#include "expect.h"
#include "stress.h"

#ifdef ENGRAM_CAN_STEP

// Killed before an instruction: the next process, beside the dead or as the first one to open the memory, finds counts that are
// none too small, of rows that are not lost, and can go on.
TEST(a_death_leaves_no_row_that_is_drawn_too_often_and_loses_none) {
  const std::uint64_t step = stress::pick<std::uint64_t>(13, 3, 1);
  const std::vector<std::function<void(Consumer&)>> operations{
      [](Consumer& it) { it.claim(3, 3); }, [](Consumer& it) { it.append(2); }, [](Consumer& it) { it.store.empty(false); },
      [](Consumer& it) {
        const std::int64_t rows[] = {0, 2, 5};
        it.store.remove(rows, 3, nullptr);
      }};
  std::vector<std::int32_t> before;
  const auto prepare = [&](Consumer& consumer, std::size_t) {
    consumer.store.limits().set({0, 0, 0, 20}, 0);
    consumer.append(6);
    consumer.claim(1, 4);
    consumer.claim(2, 3);
    before = consumer.drawn();
  };
  const auto check = [&](Consumer& next, const Death& death) {
    const auto [which, done, alone] = death;
    if (alone) next.index.put_in_order();
    const std::vector<std::int32_t> counts = next.drawn();
    std::uint64_t left = 0, live = 0;
    for (std::uint64_t row = 0; row < 6; ++row) {
      if (!is_committed(next.control.word(row).load())) continue;
      ++live;
      EXPECT(counts[row] <= 2);
      if (which == 0) EXPECT(counts[row] == before[row] || counts[row] == before[row] + 1);
      if (which == 1) EXPECT(counts[row] == before[row] || (row < 2 && counts[row] == 0));
      left += counts[row] < 2;
    }
    next.store.waits_in_vain();
    const std::uint64_t in_flight = next.store.limits().counts().in_flight;
    EXPECT(in_flight >= left && in_flight <= left + (alone ? 0 : 3));  // three rows may count as being read by the dead
    EXPECT_EQ(next.claim(9, 6).size(), left);
    EXPECT(next.index.used() <= live);
  };
  die_everywhere<Consumer>(operations, [&](std::size_t which) { return step * (which == 0 ? 1 : which < 3 ? 3 : 9); },
                           [] { return Counted(6, 2); }, prepare, check);
}

// The same of rows that follow rules: of a draw, of rows that are offered, of an edit that makes rows ready, of a floor that rises or falls,
// and of a write. What can be drawn afterwards is what rows, counts and floor say.
TEST(a_death_leaves_rows_that_can_be_drawn_as_they_say) {
  constexpr std::uint64_t kRows = 8, kMost = 2;
  const std::uint64_t step = stress::pick<std::uint64_t>(83, 7, 1);
  std::vector<std::int32_t> before;
  const std::vector<std::function<void(Consumer&)>> operations{
      [](Consumer& it) { it.claim(3, 3); },
      [](Consumer& it) { it.admit({0, 1, 0, 3, 0, 5}); },
      [](Consumer& it) { it.edit({1, 2, 0}, {1, 1, NAN}); },
      [](Consumer& it) { it.index.set_floor(3); },
      [](Consumer& it) { it.index.set_floor(0); },
      [](Consumer& it) { it.append({1, NAN, 1}, {5, 5, 0}); }};
  const auto prepare = [&](Consumer& it, std::size_t) {
    it.append({1, NAN, NAN, 1, 1, 1, 1, NAN}, {1, 1, 2, 2, 3, 3, 4, 4});
    it.index.set_floor(2);
    it.index.set_floor(1);
    it.claim(1, 4);
    before = it.drawn();
  };
  const auto check = [&](Consumer& next, const Death& death) {
    const std::vector<std::int32_t> counts = next.drawn();
    for (std::uint64_t row = 0; row < kRows; ++row) {
      if (death.operation == 0) EXPECT(counts[row] == before[row] || counts[row] == before[row] + 1);
      if (death.operation == 1) EXPECT(counts[row] >= before[row] && counts[row] <= static_cast<std::int32_t>(kMost));
      if (death.operation > 1 && death.operation < 5) EXPECT_EQ(counts[row], before[row]);
    }
    if (death.alone) next.index.put_in_order();
    next.index.set_floor(2);  // whatever it is by now
    std::vector<std::int64_t> expected;
    for (std::uint64_t row = 0; row < kRows; ++row) {
      const auto at = static_cast<std::int64_t>(row);
      if (!is_committed(next.control.word(row).load()) || std::isnan(next.value(at, 0))) continue;
      if (next.value(at, 1) >= 2 && counts[row] < static_cast<std::int32_t>(kMost)) expected.push_back(at);
    }
    EXPECT(next.index.drawable_rows() == expected);
    EXPECT_EQ(next.index.drawable(), expected.size());
    next.index.set_floor(-1);
    for (std::uint64_t draw = 0; next.index.drawable() > 0; ++draw) EXPECT(!next.claim(draw, kRows).empty());
    for (std::uint64_t row = 0; row < kRows; ++row) {
      if (is_committed(next.control.word(row).load()) && !std::isnan(next.value(static_cast<std::int64_t>(row), 0))) EXPECT_EQ(next.drawn()[row], static_cast<std::int32_t>(kMost));
    }
  };
  die_everywhere<Consumer>(operations, [&](std::size_t) { return step; }, [] { return Ruled(kRows, kMost); }, prepare, check);
}

#endif
