// An epoch across deaths at every instruction of a draw.
#include <cstdint>
#include <cstdio>

#include "crash.h"
#include "expect.h"
#include "epochs.h"

#ifdef ENGRAM_CAN_STEP

// Killed before each instruction: whoever comes next, beside the dead or as the first one to open the memory, finds the state
// as it was or as it should be, and goes on.
TEST(a_death_leaves_the_walk_before_or_after) {
  std::uint64_t deaths = 0, before = 0, after = 0;
  for (const bool fresh : {false, true}) {
    for (std::uint64_t instructions = 0;; ++instructions) {
      SharedEpoch shared;
      RowEpoch epoch(shared.bytes());
      epoch.next(1, 10, fresh ? 10 : 4, false);
      const EpochState was = epoch.state(), will_be = fresh ? EpochState{2, 10, 3} : EpochState{1, 10, 7};
      Stepped::End end;
      {
        Stepped child([&] { epoch.next(2, 10, 3, false); });
        if (child.end() == Stepped::End::refused) return;
        end = Stepped::End::running;
        for (std::uint64_t i = 0; i < instructions && end == Stepped::End::running; ++i) end = child.step();
      }  // dies here
      if (end == Stepped::End::refused) return;
      if (deaths % 2 == 0) RowEpoch::reset_mutex(shared.bytes());  // nobody was left
      RowEpoch next(shared.bytes());
      const EpochState now = next.state();
      EXPECT(same(now, was) || same(now, will_be));
      EXPECT_EQ(next.next(3, 10, 1, false).start, now.visited == 10 ? 0 : now.visited);
      before += same(now, was);
      after += same(now, will_be);
      ++deaths;
      if (end == Stepped::End::done) break;
    }
  }
  std::printf("    %llu deaths, %llu before the change\n", llu(deaths), llu(before));
  EXPECT(before > 10 && after > 2);
}

#endif
