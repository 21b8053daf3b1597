// Death at any instruction of an operation on a store with priorities, and what is made of it by the two who may come:
// the first opener, who is alone, and a survivor, who is told by the mutex or finds the dead one's entry.
//
// Each operation runs instruction by instruction in a child. Each distinct state of the memory is copied and recovered in both
// ways; in some the child is really killed, so that the kernel and not this test says that the mutex's holder died.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "blocks.h"
#include "core/check.h"
#include "core/participants.h"
#include "core/priorities.h"
#include "core/store.h"
#include "crash.h"
#include "expect.h"
#include "stress.h"
#include "tree_stage.h"

using namespace engram;

#ifdef ENGRAM_CAN_STEP
namespace {

/// What must hold once somebody has put in order what a dead one left.
void check_recovered(const Stage& stage, const Memory& now) {
  const Copy before(stage.before), after(stage.after);
  const Control control = now.blocks.view(), was = before.memory.blocks.view();
  expect_sound(now.blocks, stage.operation.too_many);
  EXPECT(now.consistent());
  EXPECT_EQ(now.header().redo.load(), 0u);
  EXPECT_EQ(now.header().raising.load(), 0u);
  const double usual = std::sqrt(before.memory.header().highest);  // of a row without a priority of its own
  for (std::uint64_t row = 0; row < control.capacity(); ++row) {
    const std::uint64_t word = control.word(row).load();
    const double leaf = now.leaf(row), old_leaf = before.memory.leaf(row), new_leaf = after.memory.leaf(row);
    EXPECT_EQ(leaf > 0, is_committed(word));
    if (!is_committed(word)) continue;
    if (word == was.word(row).load()) {
      const bool of_a_row_named_twice = stage.operation.kind == Operation::updates && row == 3 &&
                                        (leaf == std::pow(1.5, 0.5) || leaf == std::pow(4.5, 0.5));
      EXPECT(leaf == old_leaf || leaf == new_leaf || of_a_row_named_twice ||
             (stage.operation.kind == Operation::forgets && leaf == 1));
    } else {  // an edit that ended by a death may count as a write
      EXPECT(leaf == new_leaf || leaf == usual);
    }
  }
  if (stage.operation.kind == Operation::all_or_nothing) {
    const Leaves leaves = now.leaves();
    const double alpha = now.header().alpha;
    EXPECT(leaves == (alpha == before.memory.header().alpha ? before : after).memory.leaves());
    EXPECT(alpha == before.memory.header().alpha || alpha == after.memory.header().alpha);
  }
}

// What the kernel does to a robust mutex whose holder dies, on a copy.
void let_holder_die(const Memory& memory) {
  std::uint32_t word;
  std::byte* at = reinterpret_cast<std::byte*>(&memory.header().mutex);
  std::memcpy(&word, at, sizeof word);
  if (word == 0) return;
  word = 0x40000000;  // FUTEX_OWNER_DIED
  std::memcpy(at, &word, sizeof word);
}

void check_first_opener(const Stage& stage, std::span<const std::byte> state) {
  const Copy copy(state);
  Priorities::reset_mutex(copy.memory.tree);
  Handle handle(copy.memory, 0);
  handle.store.recover();
  handle.priorities.put_in_order();
  check_recovered(stage, copy.memory);
  const std::vector<std::byte> once(copy.memory.all.begin(), copy.memory.all.end());
  const auto again = handle.store.recover();
  handle.priorities.put_in_order();
  EXPECT_EQ(again.claims + again.voided + again.gaps, 0u);
  EXPECT(std::equal(once.begin(), once.end(), copy.memory.all.begin()));
  check_usable(copy.memory, handle);
}

/// `alive`, without a name.
struct Alive {
  Alive() : file(std::tmpfile()) {}
  ~Alive() { std::fclose(file); }
  int descriptor() const { return fileno(file); }
  std::FILE* file;
};

void check_survivor(const Stage& stage, const Memory& memory, int alive) {
  Handle handle(memory, 1);
  auto participants = std::make_shared<Participants>(handle.control, alive);
  handle.store.join(participants);
  handle.store.reclaim();
  handle.priorities.total();  // the first to lock after a death outside a claim
  participants->leave();      // for what expects that nobody is there
  check_recovered(stage, memory);
  handle.store = memory.blocks.open(1);
  handle.store.attach(handle.priorities);
  check_usable(memory, handle);
}

struct Counts {
  std::uint64_t instructions = 0, states = 0, held = 0, killed = 0, killed_holding = 0;
};

/// False: nobody may step here.
bool step_through_all(Counts& counts, bool print) {
  const Alive alive;
  for (const Operation& operation : operations()) {
    const int failures = expect::failures;
    Stage stage(operation);
    std::uint64_t steps = 0, holding = 0;
    std::vector<std::uint64_t> states;
    const bool stepped = step_through(stage, [&] {
      check_first_opener(stage, stage.memory.all);
      if (operation.alone) return;
      const Copy copy(stage.memory.all);
      holding += is_held(copy.memory);
      let_holder_die(copy.memory);
      check_survivor(stage, copy.memory, alive.descriptor());
    }, &steps, &states);
    if (!stepped) {
      std::printf("      skipped: nobody may step through a child here, or no step ends\n");
      return false;
    }
    // Some of them once more, with a death that the kernel knows of.
    for (std::uint64_t i = 0; i < states.size() && !operation.alone; i += std::max<std::uint64_t>(1, states.size() / 6)) {
      stage.restore();
      Handle handle(stage.memory, 0);
      Outcome outcome{};
      auto child = std::make_unique<Stepped>([&] { stage.operation.run(handle, outcome); });
      for (std::uint64_t step = 0; step < states[i]; ++step) child->step();
      child.reset();
      counts.killed_holding += is_held(stage.memory);
      ++counts.killed;
      check_survivor(stage, stage.memory, alive.descriptor());
    }
    counts.instructions += steps;
    counts.states += states.size();
    counts.held += holding;
    if (print) {
      std::printf("      %-30s %5llu instructions, %3llu distinct states, %3llu holding the mutex\n", operation.name,
                  llu(steps), llu(states.size()), llu(holding));
    }
    if (expect::failures != failures) {
      std::fprintf(stderr, "  in: %s, lanes of %llu rows\n", operation.name, llu(sizes.length));
      return true;
    }
  }
  return true;
}

TEST(every_instruction_of_every_operation_with_priorities) {
  Counts counts;
  // Trees of two levels to four, by night.
  const auto most = stress::pick<std::uint64_t>(5, 70, 280);
  std::uint64_t geometries = 0;
  for (std::uint64_t length = 5; length <= most && expect::failures == 0; length += 1 + length / 8) {
    for (const auto& row_bytes : std::vector<std::vector<std::uint64_t>>{{56, 136}, {8}, {24, 1000, 16}}) {
      sizes = {length, row_bytes};
      if (!step_through_all(counts, geometries++ == 0)) return;
      if (stress::size() == stress::Size::small) break;
    }
  }
  sizes = {};
  std::printf("every instruction, with priorities: %s instructions, %s distinct states, %s holding the mutex, of %s geometries; "
              "%s children killed, %s holding it\n",
              stress::count(counts.instructions).c_str(), stress::count(counts.states).c_str(),
              stress::count(counts.held).c_str(), stress::count(geometries).c_str(), stress::count(counts.killed).c_str(),
              stress::count(counts.killed_holding).c_str());
  EXPECT(counts.states > 500);
  EXPECT(counts.held > 100);
  EXPECT(counts.killed_holding > 10);
}

}  // namespace
#endif
