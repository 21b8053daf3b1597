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

// The numbers of instructions after which an operation is stopped: the first and the last one of each state of the marks and of the
// words of rows, and at night every seventh or every one. They depend on nothing that differs between two runs.
std::vector<std::uint64_t> stops_of(const std::function<void(Watching&)>& operation) {
  for (int warm = 0; warm < 2; ++warm) {  // functions of libraries are looked up when they are first called: that takes instructions
    const Changing shared(kRows);
    Watching watching(shared, 1);
    watching.append(kRows);
    operation(watching);
    watching.store.recover();
    watching.catch_up();
  }
  const Changing shared(kRows);
  Watching watching(shared, 1);
  Watching stopped(shared);
  stopped.append(kRows);
  watching.catch_up();
  const auto state = [&] {
    std::uint64_t h = hash_of(shared.changes());
    for (std::uint64_t row = 0; row < kRows; ++row) h = (h ^ stopped.word(row)) * 0x9E3779B97F4A7C15ull;
    return h;
  };
  std::vector<std::uint64_t> begins{0}, all;
  std::uint64_t before = state(), steps = 0;
  Stepped child([&] { operation(stopped); });
  const std::uint64_t every = stress::pick<std::uint64_t>(0, 7, 1);
  for (; child.end() == Stepped::End::running; ++steps, child.step()) {
    if (const std::uint64_t now = state(); now != before) {
      begins.push_back(steps);
      before = now;
    }
    if (every > 0 && steps % every == 0) all.push_back(steps);
  }
  if (child.end() == Stepped::End::refused) return {};
  begins.push_back(steps);
  if (every == 0) all = begins_and_ends(begins);
  all.push_back(steps);
  return all;
}

// Stops each operation there, and hands over a process that knows all rows as they were, and the child. Returns how often.
std::uint64_t at_each_stop(const std::function<void(Watching&, Stepped&)>& there) {
  std::uint64_t stops = 0;
  for (const auto& operation : kOperations) {
    for (const std::uint64_t instructions : stops_of(operation)) {
      const Changing shared(kRows);
      Watching watching(shared, 1);
      Watching stopped(shared);
      stopped.append(kRows);
      watching.catch_up();
      EXPECT(watching.knows_all());
      Stepped child([&] { operation(stopped); });
      for (std::uint64_t i = 0; i < instructions && child.end() == Stepped::End::running; ++i) child.step();
      if (child.end() == Stepped::End::refused) return stops;
      there(watching, child);
      ++stops;
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
  EXPECT(deaths == 0 || deaths > 50);  // 0: nothing here may step
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

// Nobody dies: a look begins while another process is between a row and its mark, which it then makes.
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
