// Counts of draws across deaths at every instruction of a draw and of a write.
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

#endif
