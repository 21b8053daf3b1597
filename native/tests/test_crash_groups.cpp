// Groups of rows across deaths at every instruction of a write, an edit and of what forgets all rows.
#include <cmath>
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
  const std::uint64_t step = stress::pick<std::uint64_t>(211, 17, 3);
  const std::vector<std::function<void(Grouping&)>> operations{
      [](Grouping& it) { it.append({4, 2, 2}); }, [](Grouping& it) { it.edit({1, 3, 0}, {1, 1, 9}); }, [](Grouping& it) { it.store.empty(false); },
      [](Grouping& it) { it.index.put_in_order(); }};
  die_everywhere<Grouping>(operations, [&](std::size_t) { return step; }, [] { return Grouped(6); },
                           [](Grouping& it, std::size_t) { it.append({1, 2, 1, 3, 1, 2, 3}); },
                           [](Grouping& next, const Death&) {
                             EXPECT(next.noted() == next.stored());
                             next.append({8, 8});
                             EXPECT(next.noted() == next.stored());
                           });
}

// Killed before an instruction of a draw that counts, of what takes it back, of a consumer that goes on, or of an edit by which rows
// become ready: all groups of a draw are used or none is, and groups are what rows, uses and versions say.
TEST(a_death_counts_a_draw_as_a_whole_or_not_at_all) {
  constexpr GroupsField kWord{0, 2, 64, 0};
  const GroupsPolicy policy{.field = 1, .key_bytes = 8, .ready = {kWord}, .most = 1, .dated = true, .version = kWord, .order = GroupsOrder::spread, .least = 3, .reward = kWord};
  constexpr std::uint64_t kRows = 12, kEach = 3;
  std::uint64_t counted = 0;
  const std::uint64_t step = stress::pick<std::uint64_t>(331, 31, 5);
  std::vector<std::int64_t> rows(2 * kEach), numbers(2 * kEach), all(kRows), all_numbers(kRows);
  const auto draw = [&](Grouping& it, double floor) {
    return it.index.draw(5, {.n = 2, .each = kEach, .complete = true, .floor = floor}, Groups::Order::any, rows.data(), numbers.data()).any;
  };
  const std::vector<std::function<void(Grouping&)>> operations{
      [&](Grouping& it) { draw(it, 0); },
      [&](Grouping& it) { it.index.groups(2, 2); },
      [&](Grouping& it) { it.edit_words({2, 5, 8}, {NAN, 1, NAN}); },
      [&](Grouping& it) { it.index.groups(1, -1); },
      [&](Grouping& it) { it.index.take_back(rows.data(), numbers.data(), rows.size()); }};
  const auto before = [&](Grouping& it, std::size_t which) {
    it.append({1, 1, 1, 2, 2, NAN, 3, 3, 3, 1, 2, 3}, {1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4});
    it.edit_words({5}, {2});
    EXPECT_EQ(it.index.groups(kEach, 0), std::uint64_t{4});
    if (which == 4) EXPECT(draw(it, 0));
  };
  const auto after = [&](Grouping& next, const Death& death) {
    const auto [which, done, alone] = death;
    std::vector<std::int32_t> uses(kRows);
    next.index.copy_uses(uses.data(), kRows);
    // Of the four groups of three rows.
    std::uint64_t used = 0;
    for (std::uint64_t group = 0; group < 4; ++group) {
      if (which != 4) EXPECT(uses[3 * group] == uses[3 * group + 1] && uses[3 * group] == uses[3 * group + 2]);
      used += uses[3 * group] != 0 ? 1 : 0;
    }
    if (which == 0) EXPECT(used == 0 || used == 2), counted += used / 2;
    if (which == 0 && done) EXPECT_EQ(used, std::uint64_t{2});
    if (which != 0 && which != 4) EXPECT_EQ(used, std::uint64_t{0});
    // Whatever the floor is by now, it becomes 1.
    next.index.groups(1, 1);
    Parts expected;
    for (std::uint64_t row = 0; row < kRows; ++row) {
      if (!engram::is_committed(next.control.word(row).load())) continue;
      const double word = next.word(static_cast<std::int64_t>(row));
      if (uses[row] == 0 && word >= 1) expected[row / 3 + 1].insert(static_cast<std::int64_t>(row));
    }
    EXPECT_EQ(next.index.groups(), expected.size());
    std::uint64_t complete = 0;
    for (const auto& [key, in] : expected) complete += in.size() >= kEach ? 1 : 0;
    EXPECT_EQ(next.index.groups(kEach), complete);
    if (complete > 0) EXPECT(next.index.draw(1, {.n = complete, .each = kEach, .complete = true, .which = Groups::Which::last}, Groups::Order::any,
                                             all.data(), all_numbers.data()).any);
    for (std::uint64_t i = 0; i < complete * kEach; ++i) EXPECT(expected[all[i] / 3 + 1].erase(all[i]) == 1);
    std::erase_if(expected, [](const auto& group) { return group.second.empty(); });
    if (!expected.empty()) EXPECT(next.noted() == expected);  // which uses them all up
    EXPECT_EQ(next.index.groups(), std::uint64_t{0});
  };
  if (!die_everywhere<Grouping>(operations, [&](std::size_t) { return step; }, [&] { return Grouped(kRows, policy); }, before, after)) return;
  std::printf("    %llu draws counted\n", llu(counted));
  EXPECT(counted > 1);
}

#endif
