// Rows by key across deaths at every instruction of a write, of edits, of a removal and of what forgets all rows.
#include <cstdint>
#include <functional>
#include <vector>

#include "crash.h"
#include "expect.h"
#include "keyed.h"
#include "stress.h"

#ifdef ENGRAM_CAN_STEP

// Killed before an instruction: the next process, beside the dead or as the first one to open the memory, finds the newest live row of
// every key, and no other row.
TEST(a_death_leaves_keys_that_are_what_the_rows_say) {
  const std::uint64_t step = stress::pick<std::uint64_t>(401, 17, 3);
  const std::vector<std::function<void(Keying&)>> operations{
      [](Keying& it) { it.append({4, 2, 2}); }, [](Keying& it) { it.edit({1, 3, 0}, {1, 1, 9}); },
      [](Keying& it) { it.edit({1, 3, 0}, {1, 1, 9}, 0); }, [](Keying& it) { it.remove({0, 4, 5}); },
      [](Keying& it) { it.store.empty(false); }, [](Keying& it) { it.index.put_in_order(); }};
  die_everywhere<Keying>(operations, [&](std::size_t) { return step; }, [] { return Keyed(6); },
                         [](Keying& it, std::size_t) { it.append({1, 2, 1, 3, 1, 2, 3}); },
                         [](Keying& next, const Death&) {
                           EXPECT(next.agrees({1, 2, 3, 4, 9, 8}));
                           next.append({8, 8});
                           EXPECT(next.agrees({1, 2, 3, 4, 9, 8}));
                         });
}

#endif
