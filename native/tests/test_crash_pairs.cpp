// One preemption, on a store with priorities: one process is stopped at the begin or the end of some state of its operation,
// another one runs an operation of its own, then the first goes on, or dies and is recovered. The second meets rows and a mutex
// that the first holds: it then gets its error in time. Whatever happened, the store is sound and nothing acknowledged is lost.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <numeric>
#include <vector>

#include "blocks.h"
#include "changing.h"
#include "core/check.h"
#include "core/priorities.h"
#include "core/store.h"
#include "crash.h"
#include "expect.h"
#include "stress.h"
#include "tree_stage.h"

using namespace engram;
using namespace std::chrono_literals;

#ifdef ENGRAM_CAN_STEP
namespace {

using Clock = std::chrono::steady_clock;

// Priorities by which a late update is known, and the largest there is then.
constexpr double kLate = 1e6, kHighest = 4e6;

enum class End : std::uint64_t { none, done, stalled, refused, wrong };

struct Report {
  Outcome outcome;
  End end;
};

void run(const Operation& operation, Handle& handle, Report& report) {
  try {
    operation.run(handle, report.outcome);
    report.end = End::done;
  } catch (const Stalled&) {
    report.end = End::stalled;
  } catch (const std::out_of_range&) {  // a row that is not live any more
    report.end = End::refused;
  } catch (const NothingLive&) {
    report.end = End::refused;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "  %s: %s\n", operation.name, error.what());
    report.end = End::wrong;
  }
}

/// What comes between. The numbers that a late update expects are those before the first operation.
std::vector<Operation> others() {
  const auto length = static_cast<std::int64_t>(sizes.length);
  return {
      append("append 1 to lane 0", 0, 1, 0x4000),
      append("append 1 to lane 1", 1, 1, 0x4000),
      append("append 2 more than a lane has", 0, sizes.length + 2, 0x4000),
      append_by_lane("append 4 by lane", {0, 1, 0, 1}, 0x4000),
      scatter("write 4 in place, 1 twice", {0, 3, 0, length}, false, 0x4000),
      scatter("write 2 rows, growing", {3, length + 4}, true, 0x4000),
      change("update late", Operation::updates,
             [length](Priorities& p) {
               const std::int64_t rows[] = {3, 0, 1, 2}, expected[] = {4, length + 1, length + 2, 3};
               const double values[] = {kLate, kLate, kLate, kLate};
               p.set_highest(kHighest);  // of new rows: no other row has that of a late one
               p.update(rows, values, 4, expected);
             }),
      change("raise alpha", Operation::all_or_nothing, [](Priorities& p) { p.set_alpha(0.75); }),
      {"draw 8 and read them", Operation::sets,
       [](Handle& h, Outcome&) {
         Rows batch(sizes.fields(), 8);
         std::int64_t at[8], numbers[8];
         double weights[8];
         h.priorities.sample(h.store, 5, 8, batch.out, at, numbers, weights);
         for (std::uint64_t i = 0; i < 8; ++i) {
           if (!batch.id(i) || numbers[i] < 1 || !(weights[i] > 0 && weights[i] <= 1)) throw std::runtime_error("a torn row");
         }
       }},
      {"empty", Operation::forgets, [](Handle& h, Outcome&) { h.store.empty(true); }},
      {"append 1, empty and append 2", Operation::forgets,
       [first = append("", 0, 1, 0x4000), second = append("", 0, 2, 0x4100)](Handle& h, Outcome& outcome) {
         first.run(h, outcome);
         h.store.empty(true);
         outcome.n = 0;
         second.run(h, outcome);
       }},
  };
}

bool holds_nothing(const Memory& memory) {
  const Control control = memory.blocks.view();
  return control.filled(0) + control.filled(1) == 0;
}

/// What was acknowledged is there, or something newer is.
void check_written(const Memory& memory, const Report& report, bool emptied) {
  const Outcome& outcome = report.outcome;
  if (report.end != End::done) return;
  for (std::uint64_t i = 0; i < outcome.n; ++i) {
    const auto row = static_cast<std::uint64_t>(outcome.rows[i]);
    const std::uint64_t word = memory.blocks.view().word(row), number = outcome.t0 + i;
    if (outcome.from == Log::kByNumber && number_of(word) < number) {  // not live any more, or its place was reserved before
      EXPECT(emptied || outcome.first_id != 0);
      continue;
    }
    EXPECT(number_of(word) >= number || lapped(memory.blocks, row, outcome.from, 0));
    EXPECT(state_of(word) != State::unused);  // forgotten, under whatever number
    if (number_of(word) != number) continue;
    EXPECT(is_committed(word));
    EXPECT_EQ(id_in(memory.blocks, row).value_or(0), outcome.first_id + i);
  }
}

struct Counts {
  std::uint64_t pairs = 0, stalled = 0, died = 0, late = 0, emptied = 0;
};

void check_pair(Stage& stage, const Operation& other, const std::vector<std::uint64_t>& instructions, std::uint64_t step,
                bool dies, Counts& counts) {
  SharedPages pages(sizeof(Report) * 2);
  auto* reports = reinterpret_cast<Report*>(pages.data());
  const Memory& memory = stage.memory;
  Handle a(memory, 0), b(memory, 1);
  Stepped first([&] { run(stage.operation, a, reports[0]); });
  if (first.go_to(instructions, step) != Stepped::End::running) {
    EXPECT(first.end() == Stepped::End::running);
    return;
  }
  bool holds = is_held(memory) || stage.operation.kind == Operation::forgets;  // of rows that are just being forgotten none is whole
  for (std::uint64_t row = 0; row < sizes.capacity(); ++row) holds |= state_of(memory.blocks.view().word(row)) == State::writing;
  const bool nothing = holds_nothing(memory);  // what is written from now on is not for the first one to forget
  const pid_t child = fork();
  if (child == 0) {
    wait_limit = 2ms;
    run(other, b, reports[1]);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT(reports[1].end != End::wrong && reports[1].end != End::none);
  EXPECT(reports[1].end != End::stalled || holds);
  if (dies) {
    first.kill();
  } else {
    first.resume();
    EXPECT(first.finish());
    EXPECT(reports[0].end == End::done || reports[0].end == End::refused);
  }
  if (dies) {
    b.store.repair(b.control.participant(0));
  }
  b.control.participant(0).state = 0;
  b.priorities.total();  // puts in order what is not

  expect_sound_rows(memory.blocks, 8);
  EXPECT(memory.consistent());
  EXPECT_EQ(memory.header().redo.load(), 0u);
  EXPECT_EQ(memory.header().raising.load(), 0u);
  const Copy before(stage.before);
  const bool edits = stage.operation.kind == Operation::writes && reports[0].outcome.from == Log::kByNumber;
  const double late = std::pow(kLate, memory.header().alpha);
  const bool known = other.kind == Operation::updates && !edits && memory.header().highest > kLate;
  for (std::uint64_t row = 0; row < sizes.capacity(); ++row) {
    const std::uint64_t word = memory.blocks.view().word(row);
    const double leaf = memory.leaf(row);
    EXPECT_EQ(leaf > 0, is_committed(word));
    if (known && std::abs(leaf - late) < 1e-6 * late) {  // it hit the row that was drawn
      EXPECT_EQ(number_of(word), number_of(before.memory.blocks.view().word(row)));
      ++counts.late;
    }
  }
  const bool emptied = stage.operation.kind == Operation::forgets || other.kind == Operation::forgets;
  if (!emptied) check_written(memory, reports[0], false);
  if (stage.operation.kind != Operation::forgets || nothing) {
    check_written(memory, reports[1], emptied);
    counts.emptied += nothing;
  }
  check_usable(memory, b);
  ++counts.pairs;
  counts.stalled += reports[1].end == End::stalled;
  counts.died += dies;
}

TEST(one_preemption_of_every_operation_with_priorities) {
  struct Plan {
    std::unique_ptr<Stage> stage;
    std::vector<std::uint64_t> instructions;
  };
  struct Pair {
    Plan* plan;
    const Operation* other;
    std::uint64_t step;
    bool dies;
  };
  const auto beside = others();
  std::vector<std::unique_ptr<Plan>> plans;
  std::vector<Pair> pairs;
  for (const Operation& operation : operations()) {
    if (operation.alone) continue;
    // While a writer looks after the dead nobody buries him; and a void row of before has no number that an update expects.
    if (operation.prepare.target_type() != std::function<void(Handle&, const Memory&)>(Operation{}.prepare).target_type()) continue;
    auto plan = std::make_unique<Plan>();
    plan->stage = std::make_unique<Stage>(operation);
    std::uint64_t steps = 0;
    std::vector<std::uint64_t> states;
    if (!step_through(*plan->stage, [] {}, &steps, &states, &plan->instructions)) {
      std::printf("      skipped: nobody may step through a child here, or no step ends\n");
      return;
    }
    for (const std::uint64_t step : begins_and_ends(states)) {
      for (const Operation& other : beside) {
        for (const bool dies : {false, true}) pairs.push_back({plan.get(), &other, step, dies});
      }
    }
    plans.push_back(std::move(plan));
  }
  Dice dice(static_cast<std::uint64_t>(Clock::now().time_since_epoch().count()));
  for (std::uint64_t i = pairs.size(); i > 1; --i) std::swap(pairs[i - 1], pairs[dice.below(i)]);
  const auto most = stress::pick<std::uint64_t>(1200, pairs.size(), pairs.size());
  Counts counts;
  const auto enough = [&] { return counts.stalled > 0 && counts.late > 0 && counts.emptied > 0; };
  for (std::uint64_t i = 0; i < pairs.size() && (i < most || !enough()) && expect::failures < 20; ++i) {
    const Pair& pair = pairs[i];
    const int failures = expect::failures;
    pair.plan->stage->restore();
    check_pair(*pair.plan->stage, *pair.other, pair.plan->instructions, pair.step, pair.dies, counts);
    if (expect::failures == failures) continue;
    std::fprintf(stderr, "  %s, stopped before step %llu%s; meanwhile: %s\n", pair.plan->stage->operation.name,
                 llu(pair.step), pair.dies ? " and killed" : "", pair.other->name);
  }
  std::printf("one preemption, with priorities: %s of %s pairs; in %s the second was told that it waits in vain, in %s the first "
              "died\n",
              stress::count(counts.pairs).c_str(), stress::count(pairs.size()).c_str(), stress::count(counts.stalled).c_str(),
              stress::count(counts.died).c_str());
  EXPECT(enough());
}

/// Dies as soon as the rows are forgotten.
struct Dies : Index {
  void written(const std::int64_t*, std::uint64_t, std::uint64_t) override {}
  void edited(const std::int64_t*, std::uint64_t, std::uint64_t, std::span<const std::uint64_t>, std::uint64_t) override {}
  void lost(const std::int64_t*, std::uint64_t) override {}
  void emptied() override { ::kill(getpid(), SIGKILL); }
};

TEST(what_others_write_after_a_killed_emptying_stays_when_he_is_buried) {
  Stage stage({"", Operation::forgets, [](Handle&, Outcome&) {}});
  const Memory& memory = stage.memory;
  const pid_t child = fork();
  if (child == 0) {
    Handle handle(memory, 0);
    Dies dies;
    handle.store.attach(dies);
    handle.store.empty(true);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT(WIFSIGNALED(status));
  Handle other(memory, 1);
  EXPECT_EQ(other.control.size(), 0u);
  append_ids(other.store, memory.blocks, 0, 3, 0x5000);
  EXPECT_EQ(other.control.size(), 3u);
  other.store.repair(other.control.participant(0));
  EXPECT_EQ(other.control.size(), 3u);
  for (std::uint64_t row = 0; row < 3; ++row) {
    EXPECT_EQ(id_in(memory.blocks, row).value_or(0), 0x5000 + row);
    EXPECT(memory.leaf(row) > 0);
  }
  expect_sound_rows(memory.blocks);
}

// Two processes died, and two repair them: each finds rows that were reserved and never begun. One is stopped at each state of the
// rows and of their count, while the other one repairs and counts.
TEST(void_rows_are_counted_once_by_two_that_repair) {
  std::uint64_t stops = 0;
  for (bool over = false; !over; ++stops) {
    const Changing shared(4);
    const Control control = shared.blocks().view();
    Store store = shared.blocks().open(0), other = shared.blocks().open(1);
    control.lane(0).cursor.store(2);
    const auto state = [&] {
      return control.counters().void_rows.load() * 31 + control.word(0).load() * 17 + control.word(1).load() * 7;
    };
    Stepped child([&] { store.repair(control.participant(2)); });
    std::uint64_t before = state();
    for (std::uint64_t seen = 0; seen < stops && child.end() == Stepped::End::running;) {
      child.step();
      seen += state() != before;
      before = state();
    }
    if (child.end() == Stepped::End::refused) return;  // nothing here may step
    over = child.end() != Stepped::End::running;
    other.repair(control.participant(3));
    if (!over) {
      const ClaimGuard writes(control.participant(1));  // so that the first one cannot count again at its end
      child.resume();
      EXPECT(child.finish());
    }
    expect_sound_rows(shared.blocks());
    EXPECT_EQ(control.counters().void_rows.load(), 2u);
  }
  EXPECT(stops > 3);
}

}  // namespace
#endif
