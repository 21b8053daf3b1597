// Counts of draws across deaths at every instruction of a draw and of a write.
#include <cstdint>
#include <cstdio>
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
  std::uint64_t deaths = 0;
  const std::uint64_t step = stress::pick<std::uint64_t>(13, 3, 1);
  const std::vector<std::function<void(Consumer&)>> operations{
      [](Consumer& it) { it.claim(3, 3); }, [](Consumer& it) { it.append(2); }, [](Consumer& it) { it.store.empty(false); },
      [](Consumer& it) {
        const std::int64_t rows[] = {0, 2, 5};
        it.store.remove(rows, 3, nullptr);
      }};
  for (std::size_t which = 0; which < operations.size(); ++which) {
    for (std::uint64_t instructions = 0;; instructions += step * (which == 0 ? 1 : which < 3 ? 3 : 9)) {
      const Counted shared(6, 2);
      std::vector<std::int32_t> before;
      {
        Consumer consumer(shared);
        consumer.store.limits().set({0, 0, 0, 20}, 0);
        consumer.append(6);
        consumer.claim(1, 4);
        consumer.claim(2, 3);
        before = consumer.drawn();
      }
      Consumer dying(shared);
      Stepped::End end;
      {
        Stepped child([&] { operations[which](dying); });
        if (child.end() == Stepped::End::refused) return;
        end = Stepped::End::running;
        for (std::uint64_t i = 0; i < instructions && end == Stepped::End::running; ++i) end = child.step();
      }  // dies here
      if (end == Stepped::End::refused) return;
      const bool alone = deaths++ % 2 == 0;
      if (alone) Consumption::reset_mutex(shared.counts());
      Consumer next(shared, 1);
      next.store.recover();
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
      if (end == Stepped::End::done) break;
    }
  }
  std::printf("    %llu deaths\n", llu(deaths));
  EXPECT(deaths > 50);
}

#endif
