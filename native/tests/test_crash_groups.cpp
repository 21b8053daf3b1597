// Groups of rows across deaths at every instruction of a write, an edit and of what forgets all rows.
#include <cstdint>
#include <cstdio>
#include <functional>
#include <vector>

#include "crash.h"
#include "expect.h"
#include "grouped.h"
#include "stress.h"

#ifdef ENGRAM_CAN_STEP

// Killed before an instruction: the next process, beside the dead or as the first one to open the memory, finds every live row in the
// group of its key, and no other row.
TEST(a_death_leaves_groups_that_are_what_the_rows_say) {
  std::uint64_t deaths = 0;
  const std::uint64_t step = stress::pick<std::uint64_t>(211, 17, 3);
  const std::vector<std::function<void(Grouping&)>> operations{
      [](Grouping& it) { it.append({4, 2, 2}); }, [](Grouping& it) { it.edit({1, 3, 0}, {1, 1, 9}); }, [](Grouping& it) { it.store.empty(false); },
      [](Grouping& it) { it.index.put_in_order(); }};
  for (std::size_t which = 0; which < operations.size(); ++which) {
    for (std::uint64_t instructions = 0;; instructions += step) {
      const Grouped shared(6);
      {
        Grouping before(shared);
        before.append({1, 2, 1, 3, 1, 2, 3});
      }
      Grouping dying(shared);
      Stepped::End end;
      {
        Stepped child([&] { operations[which](dying); });
        if (child.end() == Stepped::End::refused) return;
        end = Stepped::End::running;
        for (std::uint64_t i = 0; i < instructions && end == Stepped::End::running; ++i) end = child.step();
      }  // dies here
      if (end == Stepped::End::refused) return;
      const bool alone = deaths++ % 2 == 0;
      if (alone) Groups::reset_mutex(shared.groups());
      Grouping next(shared, 1);
      next.store.recover();
      EXPECT(next.noted() == next.stored());
      next.append({8, 8});
      EXPECT(next.noted() == next.stored());
      if (end == Stepped::End::done) break;
    }
  }
  std::printf("    %llu deaths\n", llu(deaths));
  EXPECT(deaths > 50);
}

#endif
