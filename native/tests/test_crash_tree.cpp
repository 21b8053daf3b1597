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

using namespace engram;

#ifdef ENGRAM_CAN_STEP
namespace {

using Leaves = std::vector<double>;

const std::vector<std::uint64_t> kRowBytes{56, 136};
const std::vector<Field> kFields{{nullptr, 56}, {nullptr, 136}};
const std::uint64_t kWhich[] = {0, 1};
const Geometry kGeometry = geometry(2, 5);
constexpr Priorities::Config kConfig{0.5, 1.0, 0.0, false};

/// A store and its priorities, one behind the other in memory of somebody else.
struct Memory {
  explicit Memory(std::byte* base)
      : blocks(base, kGeometry, kRowBytes),
        tree(base + (blocks.all.size() + kPage - 1) / kPage * kPage, Priorities::bytes(kGeometry.capacity, false)),
        all(base, static_cast<std::size_t>(tree.data() + tree.size() - base)) {}

  PriorityHeader& header() const { return *reinterpret_cast<PriorityHeader*>(tree.data()); }
  double leaf(std::uint64_t row) const { return reinterpret_cast<const double*>(tree.data() + kPage)[row]; }
  bool consistent() const { return SumTree(tree.subspan(kPage), kGeometry.capacity, false).consistent(); }
  std::uint64_t hash() const {
    // Of the participants' table only what somebody here has.
    const std::uint64_t end = blocks.control.size() - kGeometry.lanes * sizeof(Lane);
    const auto rest = all.subspan(end);
    return hash_of(rest, hash_of(all.first(end - kParticipants * sizeof(Participant) + 4 * sizeof(Participant))));
  }
  Leaves leaves() const {
    Leaves out(kGeometry.capacity);
    for (std::uint64_t row = 0; row < out.size(); ++row) out[row] = leaf(row);
    return out;
  }

  Layout blocks;
  std::span<std::byte> tree, all;
};

constexpr std::uint64_t kBytes = 1 << 18;

/// A private copy of some state of it.
struct Copy {
  explicit Copy(std::span<const std::byte> state)
      : bytes(static_cast<std::byte*>(::operator new[](kBytes, std::align_val_t(kPage)))), memory(bytes.get()) {
    std::memcpy(memory.all.data(), state.data(), state.size());
  }
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t(kPage)); }
  };
  std::unique_ptr<std::byte[], Free> bytes;
  Memory memory;
};

/// A process's view of it: the store with its index.
struct Handle {
  Handle(const Memory& memory, std::uint64_t participant)
      : control(memory.blocks.view()), priorities(memory.tree, &control), store(memory.blocks.open(participant)) {
    store.attach(priorities);
  }
  Control control;
  Priorities priorities;
  Store store;
};

struct Operation {
  enum Kind { writes, updates, sets, all_or_nothing, forgets };
  const char* name;
  Kind kind;
  std::function<void(Handle&)> run;
  std::function<void(Handle&, const Memory&)> prepare = [](Handle&, const Memory&) {};
  std::uint64_t too_many = 0;  // void rows may be counted that are not there
};

// The dead process has entry 0: nobody locks its byte, and no process has its number.
void take_entry(const Control& control) { control.participant(0).state = 1; }

struct Stage {
  explicit Stage(Operation what) : operation(std::move(what)), pages(kBytes), memory(pages.data()) {
    Control::format(memory.blocks.control, kGeometry, 0);
    Priorities::format(memory.tree, kGeometry.capacity, kConfig);
    Handle handle(memory, 0);
    append_ids(handle.store, memory.blocks, 0, 7, 0x100);
    append_ids(handle.store, memory.blocks, 1, 2, 0x110);
    const std::int64_t rows[] = {0, 1, 2, 3, 4, 5, 6};
    const double values[] = {2, 3, 5, 7, 11, 13, 17};
    handle.priorities.update(rows, values, 7, nullptr);
    take_entry(handle.control);
    operation.prepare(handle, memory);
    before.assign(memory.all.begin(), memory.all.end());
    operation.run(handle);  // also resolves every symbol, which would cost thousands of steps
    after.assign(memory.all.begin(), memory.all.end());
    restore();
  }
  void restore() { std::memcpy(memory.all.data(), before.data(), before.size()); }

  Operation operation;
  SharedPages pages;
  Memory memory;
  std::vector<std::byte> before, after;
};

/// What must hold once somebody has put in order what a dead one left.
void check_mended(const Stage& stage, const Memory& now) {
  const Copy before(stage.before), after(stage.after);
  const Control control = now.blocks.view(), was = before.memory.blocks.view();
  expect_sound(now.blocks, stage.operation.too_many);
  EXPECT(now.consistent());
  EXPECT_EQ(now.header().redo.load(), 0u);
  EXPECT_EQ(now.header().raising.load(), 0u);
  const double usual = std::sqrt(17.0);  // of a row without a priority of its own
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

/// Goes on as if nothing had happened.
void check_usable(const Memory& now, Handle& handle) {
  const auto draw = [&] {
    Rows batch(now.blocks.fields, 16);
    std::int64_t rows[16], numbers[16];
    double weights[16];
    handle.priorities.sample(handle.store, 5, 16, batch.out, rows, numbers, weights);
    for (std::uint64_t i = 0; i < 16; ++i) {
      EXPECT(batch.id(i).has_value());
      EXPECT_EQ(now.blocks.view().word(static_cast<std::uint64_t>(rows[i])).load(),
                ticket(static_cast<std::uint64_t>(numbers[i]), State::committed));
    }
    handle.priorities.update(rows, weights, 16, numbers);
  };
  if (handle.store.control().size() > 0) draw();
  for (const std::uint64_t lane : {0, 1}) append_ids(handle.store, now.blocks, lane, 5, 0x900);
  draw();
  EXPECT(now.consistent());
  for (std::uint64_t row = 0; row < kGeometry.capacity; ++row) EXPECT(now.leaf(row) > 0);
}

void check_first_opener(const Stage& stage, std::span<const std::byte> state) {
  const Copy copy(state);
  Priorities::reset_mutex(copy.memory.tree);
  Handle handle(copy.memory, 0);
  handle.store.recover();
  handle.priorities.put_in_order();
  check_mended(stage, copy.memory);
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
  handle.store.mend();
  handle.priorities.total();  // the first to lock after a death outside a claim
  participants->leave();      // for what expects that nobody is there
  check_mended(stage, memory);
  handle.store = memory.blocks.open(1);
  handle.store.attach(handle.priorities);
  check_usable(memory, handle);
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

bool is_held(const Memory& memory) {
  std::uint32_t word;
  std::memcpy(&word, reinterpret_cast<const std::byte*>(&memory.header().mutex), sizeof word);
  return word != 0;
}

/// Steps through the operation. False: nobody may step here.
bool step_through(Stage& stage, const std::function<void()>& check, std::uint64_t* steps,
                  std::vector<std::uint64_t>* states) {
  Handle handle(stage.memory, 0);
  Stepped child([&] { stage.operation.run(handle); });
  std::set<std::uint64_t> seen;
  for (*steps = 0; child.end() == Stepped::End::running && *steps < 200000; ++*steps, child.step()) {
    if (!seen.insert(stage.memory.hash()).second) continue;
    states->push_back(*steps);
    check();
  }
  return child.end() == Stepped::End::done;
}

std::shared_ptr<Rows> rows_with_ids(std::uint64_t first_id, std::uint64_t n) {
  auto rows = std::make_shared<Rows>(kFields, n);
  for (std::uint64_t i = 0; i < n; ++i) rows->describe(i, first_id + i);
  return rows;
}

Operation append(const char* name, std::uint64_t lane, std::uint64_t n) {
  return {name, Operation::writes, [=, columns = rows_with_ids(0x200, n)](Handle& h) {
            std::int64_t rows[16];
            h.store.append(lane, n, columns->in, rows);
          }};
}

Operation scatter(const char* name, const Indices& rows, bool grow) {
  return {name, Operation::writes, [=, columns = rows_with_ids(0x200, rows.size())](Handle& h) {
            h.store.scatter(rows.data(), rows.size(), kWhich, columns->in, grow);
          }};
}

Operation change(const char* name, Operation::Kind kind, const std::function<void(Priorities&)>& run) {
  return {name, kind, [=](Handle& h) { run(h.priorities); }};
}

// Somebody died in an append over the wrap: one row is whole and not told to the index, two were being written, one was
// not begun; and between the reservation and the claim of another one.
void died_before(Handle& handle, const Memory& memory) {
  const Control& control = handle.control;
  const std::uint64_t t0 = control.counters().next_ticket.fetch_add(5);
  Claim& claim = control.participant(0).claims[1];
  claim.n = 4, claim.lane = 0, claim.p0 = control.lane(0).cursor.fetch_add(4), claim.t0 = t0;
  for (std::uint64_t i = 0; i < 3; ++i) {
    const std::uint64_t row = (claim.p0 + i) % 5;
    for (const Field& field : memory.blocks.fields) {
      ::describe(field.data + row * field.row_bytes, field.row_bytes, 0x300 + i);
    }
    control.word(row).store(ticket(t0 + i, i == 0 ? State::committed : State::writing));
  }
  control.lane(1).cursor.fetch_add(1);
}

void with_a_void_row(Handle& handle, const Memory&) {
  const std::int64_t row = 3;
  handle.control.word(3) = ticket(handle.control.counters().next_ticket.fetch_add(1), State::voided);
  handle.control.counters().void_rows = 1;
  handle.priorities.lost(&row, 1);
}

std::vector<Operation> operations() {
  const std::int64_t some[] = {3, 0, 6, 3, 5, 3};
  const Indices rows(std::begin(some), std::end(some));
  return {
      append("append 1", 1, 1),
      append("append 3 over older ones", 0, 3),
      append("append 7 to a lane of 5", 0, 7),
      [] {
        Operation over = append("append 3, one over a void row", 0, 3);
        over.prepare = with_a_void_row;
        over.too_many = 1;
        return over;
      }(),
      {"append 5 by lane", Operation::writes,
       [columns = rows_with_ids(0x200, 5)](Handle& h) {
         const std::int64_t lanes[] = {1, 0, 1, 0, 0};
         std::int64_t at[5];
         h.store.append_by_lane(lanes, 5, columns->in, at);
       }},
      scatter("write 3 in place, 1 twice", {3, 1, 3}, false),
      scatter("write rows 6 and 9, growing", {6, 9}, true),
      change("update 6, 1 three times", Operation::updates,
             [=](Priorities& p) {
               const double values[] = {1.5, 2.5, 3.5, 4.5, 5.5, 6.5};
               p.update(rows.data(), values, 6, nullptr);
             }),
      change("reset 6, 1 three times", Operation::sets, [=](Priorities& p) { p.reset(rows.data(), 6); }),
      change("raise alpha", Operation::all_or_nothing, [](Priorities& p) { p.set_alpha(0.75); }),
      change("alpha becomes 0", Operation::all_or_nothing, [](Priorities& p) { p.set_alpha(0); }),
      change("scan", Operation::sets, [](Priorities& p) { p.scan(0, 10); }),
      change("restore", Operation::sets,
             [](Priorities& p) {
               const double leaves[] = {9, 8, 7, 6, 5, 4, 3, 2, 1, 1};
               p.restore(leaves, 10, 1.0);
             }),
      change("clear the tree", Operation::forgets, [](Priorities& p) { p.emptied(); }),
      {"empty", Operation::forgets, [](Handle& h) { h.store.empty(true); }},
      {"bury a dead writer", Operation::writes,
       [](Handle& h) {
         h.store.repair(h.control.participant(0));
         h.control.participant(0).state = 0;
       },
       died_before, 1},
  };
}

TEST(every_instruction_of_every_operation_with_priorities) {
  std::uint64_t total = 0, held = 0, killed = 0, killed_holding = 0;
  const Alive alive;
  for (const Operation& operation : operations()) {
    const int failures = expect::failures;
    Stage stage(operation);
    std::uint64_t steps = 0, holding = 0;
    std::vector<std::uint64_t> states;
    const bool stepped = step_through(stage, [&] {
      check_first_opener(stage, stage.memory.all);
      const Copy copy(stage.memory.all);
      holding += is_held(copy.memory);
      let_holder_die(copy.memory);
      check_survivor(stage, copy.memory, alive.descriptor());
    }, &steps, &states);
    if (!stepped) {
      std::printf("      skipped: nobody may step through a child here, or no step ends\n");
      return;
    }
    // Some of them once more, with a death that the kernel knows of.
    for (std::uint64_t i = 0; i < states.size(); i += std::max<std::uint64_t>(1, states.size() / 6)) {
      stage.restore();
      Handle handle(stage.memory, 0);
      auto child = std::make_unique<Stepped>([&] { stage.operation.run(handle); });
      for (std::uint64_t step = 0; step < states[i]; ++step) child->step();
      child.reset();
      killed_holding += is_held(stage.memory);
      ++killed;
      check_survivor(stage, stage.memory, alive.descriptor());
    }
    total += states.size();
    held += holding;
    std::printf("      %-30s %5llu instructions, %3llu distinct states, %3llu holding the mutex\n", operation.name, llu(steps),
                llu(states.size()), llu(holding));
    if (expect::failures != failures) std::fprintf(stderr, "  in: %s\n", operation.name);
  }
  std::printf("      %llu distinct states, %llu holding the mutex; %llu children killed, %llu holding it\n", llu(total),
              llu(held), llu(killed), llu(killed_holding));
  EXPECT(total > 500);
  EXPECT(held > 100);
  EXPECT(killed_holding > 10);
}

}  // namespace
#endif
