// Marks of changed rows across deaths, and looks, in every state of what changes rows.
#include <cstdint>
#include <cstdio>
#include <functional>
#include <vector>

#include "changing.h"
#include "crash.h"
#include "expect.h"
#include "stress.h"

#ifdef ENGRAM_CAN_STEP

namespace {

// Three of the 16 rows of one lowest mark, and one of another: with so many rows there are two levels.
constexpr std::uint64_t kRows = 1100;

const std::vector<std::function<void(Watching&)>> kOperations{
    [](Watching& it) { it.append(2); },
    [](Watching& it) { it.edit({5, 700}); },
    [](Watching& it) {
      const std::int64_t rows[] = {5, 6, 1090};
      it.store.remove(rows, 3, nullptr);
    },
};

// Stops each operation once what other processes see of it has changed k times, for every k, and some instructions later: there it
// knows what it will write next. Hands over a process that knows all rows as they were, and the child. Returns how often.
std::uint64_t at_each_stop(const std::function<void(Watching&, Stepped&)>& there) {
  const std::vector<std::uint64_t> further =
      stress::pick<std::vector<std::uint64_t>>({0, 6}, {0, 3, 6, 12, 24}, {0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40});
  std::uint64_t stops = 0;
  for (const auto& operation : kOperations) {
    bool over = false;
    for (std::uint64_t changes = 0; !over; ++changes) {
      for (const std::uint64_t more : further) {
        const Changing shared(kRows);
        Watching watching(shared, 1);
        Watching stopped(shared);
        stopped.append(kRows);
        watching.catch_up();
        EXPECT(watching.knows_all());
        const auto state = [&] {
          std::uint64_t h = hash_of(shared.index());
          for (std::uint64_t row = 0; row < kRows; ++row) h = (h ^ stopped.word(row)) * 0x9E3779B97F4A7C15ull;
          return h;
        };
        Stepped child([&] { operation(stopped); });
        std::uint64_t before = state();
        for (std::uint64_t seen = 0; seen < changes && child.end() == Stepped::End::running;) {
          child.step();
          const std::uint64_t now = state();
          seen += now != before;
          before = now;
        }
        for (std::uint64_t i = 0; i < more && child.end() == Stepped::End::running; ++i) child.step();
        if (child.end() == Stepped::End::refused) return stops;
        over = child.end() != Stepped::End::running;
        there(watching, child);
        ++stops;
      }
    }
  }
  return stops;
}

}  // namespace

// The next process recovers what the dead one left, and its look finds every row whose word is another one.
TEST(a_death_loses_no_change) {
  const std::uint64_t deaths = at_each_stop([](Watching& watching, Stepped& child) {
    child.kill();
    watching.store.recover();
    watching.catch_up();
    EXPECT(watching.knows_all());
  });
  std::printf("    %llu deaths\n", llu(deaths));
  EXPECT(deaths == 0 || deaths > 20);  // 0: nothing here may step
}

// As before, after a look between the death and the recovery.
TEST(a_look_before_the_recovery_loses_no_change) {
  if (stress::size() == stress::Size::small) return;
  at_each_stop([](Watching& watching, Stepped& child) {
    watching.catch_up();
    child.kill();
    watching.store.recover();
    watching.catch_up();
    EXPECT(watching.knows_all());
  });
}

// No process dies. One stops between a row and its mark, another one looks, and then the first one goes on.
TEST(a_look_in_the_middle_of_a_change_loses_no_change) {
  at_each_stop([](Watching& watching, Stepped& child) {
    watching.catch_up();
    if (child.end() == Stepped::End::running) {
      child.resume();
      EXPECT(child.finish());
    }
    watching.catch_up();
    EXPECT(watching.knows_all());
  });
}

#endif
