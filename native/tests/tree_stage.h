// A store with priorities before an operation, and what must hold of it after one, for tests that stop or kill whoever is at it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "blocks.h"
#include "core/priorities.h"
#include "core/store.h"
#include "crash.h"
#include "expect.h"

#ifdef ENGRAM_CAN_STEP
// Of each test program its own: they are small, and nothing else includes this.
namespace {

using Leaves = std::vector<double>;

/// Of all stages: two lanes, and what a row is.
struct Sizes {
  std::uint64_t length = 5;  // of a lane: no less
  std::vector<std::uint64_t> row_bytes{56, 136};

  Geometry geometry() const { return ::geometry(2, length); }
  std::uint64_t capacity() const { return 2 * length; }
  std::vector<Field> fields() const {
    std::vector<Field> fields;
    for (const std::uint64_t bytes : row_bytes) fields.push_back({nullptr, bytes});
    return fields;
  }
};
Sizes sizes;
constexpr Priorities::Config kConfig{0.5, 1.0, 0.0, false};

/// A store and its priorities, one behind the other in memory of somebody else.
struct Memory {
  explicit Memory(std::byte* base)
      : blocks(base, sizes.geometry(), sizes.row_bytes),
        tree(base + (blocks.all.size() + kPage - 1) / kPage * kPage, Priorities::bytes(sizes.capacity(), false)),
        all(base, static_cast<std::size_t>(tree.data() + tree.size() - base)) {}

  PriorityHeader& header() const { return *reinterpret_cast<PriorityHeader*>(tree.data()); }
  double leaf(std::uint64_t row) const { return reinterpret_cast<const double*>(tree.data() + kPage)[row]; }
  bool consistent() const { return SumTree(tree.subspan(kPage), sizes.capacity(), false).consistent(); }
  std::uint64_t hash() const {
    // Of the participants' table only what somebody here has.
    const std::uint64_t end = blocks.control.size() - 2 * sizeof(Lane);
    const auto rest = all.subspan(end);
    return hash_of(rest, hash_of(all.first(end - kParticipants * sizeof(Participant) + 4 * sizeof(Participant))));
  }
  Leaves leaves() const {
    Leaves out(sizes.capacity());
    for (std::uint64_t row = 0; row < out.size(); ++row) out[row] = leaf(row);
    return out;
  }

  Layout blocks;
  std::span<std::byte> tree, all;
};

constexpr std::uint64_t kBytes = 1 << 19;

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

/// What an operation wrote, in memory that its process shares.
struct Outcome {
  std::uint64_t t0, n, first_id;
  std::int64_t rows[600];
  std::uint64_t from;  // of rows of a ring: their positions are not below; else Log::kByNumber
};

struct Operation {
  enum Kind { writes, updates, sets, all_or_nothing, forgets };
  const char* name;
  Kind kind;
  std::function<void(Handle&, Outcome&)> run;
  std::function<void(Handle&, const Memory&)> prepare = [](Handle&, const Memory&) {};
  std::uint64_t too_many = 0;  // void rows may be counted that are not there
  bool alone = false;         // done by the first opener: nobody else is there when it dies
};

// The dead process has entry 0: nobody locks its byte, and no process has its number.
void take_entry(const Control& control) { control.participant(0).state = 1; }

struct Stage {
  explicit Stage(Operation what) : operation(std::move(what)), pages(kBytes), memory(pages.data()) {
    format_without_curve(memory.blocks);
    Priorities::format(memory.tree, sizes.capacity(), kConfig);
    Handle handle(memory, 0);
    append_ids(handle.store, memory.blocks, 0, sizes.length + 2, 0x1000);
    append_ids(handle.store, memory.blocks, 1, 2, 0x1800);
    Indices rows(sizes.length + 2);
    std::iota(rows.begin(), rows.end(), std::int64_t{0});
    std::vector<double> values;
    for (const std::int64_t row : rows) values.push_back(static_cast<double>(2 + 3 * row));
    handle.priorities.update(rows.data(), values.data(), rows.size(), nullptr);
    take_entry(handle.control);
    operation.prepare(handle, memory);
    before.assign(memory.all.begin(), memory.all.end());
    Outcome outcome{};
    operation.run(handle, outcome);  // also resolves every symbol, which would cost thousands of steps
    after.assign(memory.all.begin(), memory.all.end());
    restore();
  }
  void restore() { std::memcpy(memory.all.data(), before.data(), before.size()); }

  Operation operation;
  SharedPages pages;
  Memory memory;
  std::vector<std::byte> before, after;
};

/// Goes on as if nothing had happened.
void check_usable(const Memory& now, Handle& handle) {
  const auto draw = [&] {
    Rows batch(now.blocks.fields, 16);
    std::int64_t rows[16], numbers[16];
    double weights[16];
    handle.priorities.sample(handle.store, 5, 16, batch.out, rows, numbers, weights);
    for (std::uint64_t i = 0; i < 16; ++i) {
      EXPECT(batch.id(i).has_value());
      EXPECT(is_committed_as(now.blocks.view().word(static_cast<std::uint64_t>(rows[i])).load(), static_cast<std::uint64_t>(numbers[i])));
    }
    handle.control.name_writes(rows, 16, numbers);
    handle.priorities.update(rows, weights, 16, numbers);
  };
  if (handle.store.control().size() > 0) draw();
  for (const std::uint64_t lane : {0, 1}) append_ids(handle.store, now.blocks, lane, sizes.length, 0x9000);
  draw();
  EXPECT(now.consistent());
  for (std::uint64_t row = 0; row < sizes.capacity(); ++row) EXPECT(now.leaf(row) > 0);
}

bool is_held(const Memory& memory) {
  std::uint32_t word;
  std::memcpy(&word, reinterpret_cast<const std::byte*>(&memory.header().mutex), sizeof word);
  return word != 0;
}

/// Steps through the operation. False: nobody may step here.
bool step_through(Stage& stage, const std::function<void()>& check, std::uint64_t* steps,
                  std::vector<std::uint64_t>* states, std::vector<std::uint64_t>* instructions = nullptr) {
  Handle handle(stage.memory, 0);
  Outcome outcome{};
  Stepped child([&] { stage.operation.run(handle, outcome); });
  std::set<std::uint64_t> seen;
  for (*steps = 0; child.end() == Stepped::End::running && *steps < 2000000; ++*steps, child.step()) {
    if (instructions != nullptr) instructions->push_back(child.at());
    if (!seen.insert(stage.memory.hash()).second) continue;
    states->push_back(*steps);
    check();
  }
  return child.end() == Stepped::End::done;
}

std::shared_ptr<Rows> rows_with_ids(std::uint64_t first_id, std::uint64_t n) {
  auto rows = std::make_shared<Rows>(sizes.fields(), n);
  for (std::uint64_t i = 0; i < n; ++i) rows->describe(i, first_id + i);
  return rows;
}

Operation append(const char* name, std::uint64_t lane, std::uint64_t n, std::uint64_t first_id = 0x2000) {
  return {name, Operation::writes, [=, columns = rows_with_ids(first_id, n)](Handle& h, Outcome& outcome) {
            outcome.n = n, outcome.first_id = first_id;
            outcome.from = h.control.lane(lane).cursor;
            outcome.t0 = h.store.append(lane, n, columns->in, outcome.rows);
          }};
}

Operation append_by_lane(const char* name, const Indices& lanes, std::uint64_t first_id = 0x2000) {
  return {name, Operation::writes, [=, columns = rows_with_ids(first_id, lanes.size())](Handle& h, Outcome& outcome) {
            outcome.n = lanes.size(), outcome.first_id = first_id;
            outcome.from = std::min<std::uint64_t>(h.control.lane(0).cursor, h.control.lane(1).cursor);
            outcome.t0 = h.store.append_by_lane(lanes.data(), lanes.size(), columns->in, outcome.rows);
          }};
}

Operation scatter(const char* name, const Indices& rows, bool grow, std::uint64_t first_id = 0x2000) {
  return {name, Operation::writes, [=, columns = rows_with_ids(first_id, rows.size())](Handle& h, Outcome& outcome) {
            std::vector<std::uint64_t> which(sizes.row_bytes.size());
            std::iota(which.begin(), which.end(), std::uint64_t{0});
            outcome.n = rows.size(), outcome.first_id = first_id, outcome.from = Log::kByNumber;
            std::copy(rows.begin(), rows.end(), outcome.rows);
            outcome.t0 = h.store.scatter(rows.data(), rows.size(), which, columns->in, grow);
          }};
}

Operation change(const char* name, Operation::Kind kind, const std::function<void(Priorities&)>& run) {
  return {name, kind, [=](Handle& h, Outcome&) { run(h.priorities); }};
}

// Somebody died in an append over the wrap: one row is whole and not told to the index, two were being written, one was
// not begun; and between the reservation and the claim of another one.
void died_before(Handle& handle, const Memory& memory) {
  const Control& control = handle.control;
  const std::uint64_t t0 = control.counters().next_ticket.fetch_add(5);
  Claim& claim = control.participant(0).claims[1];
  claim.n = 4, claim.lane = 0, claim.p0 = control.lane(0).cursor.fetch_add(4), claim.t0 = t0;
  for (std::uint64_t i = 0; i < 3; ++i) {
    const std::uint64_t row = (claim.p0 + i) % sizes.length;
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
  const auto length = static_cast<std::int64_t>(sizes.length);
  const Indices rows{3, 0, length + 1, 3, length, 3};
  return {
      append("append 1", 1, 1),
      append("append 3 over older ones", 0, 3),
      append("append 2 more than a lane has", 0, sizes.length + 2),
      [] {
        Operation over = append("append 3, one over a void row", 0, 3);
        over.prepare = with_a_void_row;
        over.too_many = 1;
        return over;
      }(),
      append_by_lane("append 5 by lane", {1, 0, 1, 0, 0}),
      scatter("write 3 in place, 1 twice", {3, 1, 3}, false),
      scatter("write 2 rows, growing", {length + 1, length + 4}, true),
      {"remove 3 rows, 1 three times", Operation::writes,
       [=](Handle& h, Outcome&) { h.store.remove(rows.data(), rows.size(), nullptr); }},
      change("update 6, 1 three times", Operation::updates,
             [=](Priorities& p) {
               const double values[] = {1.5, 2.5, 3.5, 4.5, 5.5, 6.5};
               p.update(rows.data(), values, 6, nullptr);
             }),
      change("reset 6, 1 three times", Operation::sets, [=](Priorities& p) { p.reset(rows.data(), 6); }),
      change("raise alpha", Operation::all_or_nothing, [](Priorities& p) { p.set_alpha(0.75); }),
      change("alpha becomes 0", Operation::all_or_nothing, [](Priorities& p) { p.set_alpha(0); }),
      change("beta, and the highest", Operation::sets,
             [](Priorities& p) {
               p.set_beta(0.5);
               p.set_highest(p.highest());
             }),
      change("scan", Operation::sets, [](Priorities& p) { p.scan(0, sizes.capacity()); }),
      change("restore", Operation::sets,
             [](Priorities& p) {
               std::vector<double> leaves(sizes.capacity());
               for (std::size_t row = 0; row < leaves.size(); ++row) leaves[row] = static_cast<double>(leaves.size() - row);
               p.restore(leaves.data(), leaves.size(), 1.0);
             }),
      change("put the tree in order", Operation::sets, [](Priorities& p) { p.put_in_order(); }),
      change("clear the tree", Operation::forgets, [](Priorities& p) { p.emptied(); }),
      {"draw 4 and read them", Operation::sets,
       [batch = rows_with_ids(1, 4)](Handle& h, Outcome&) {
         std::int64_t at[4], numbers[4];
         double weights[4];
         h.priorities.sample(h.store, 5, 4, batch->out, at, numbers, weights);
       }},
      {"empty", Operation::forgets, [](Handle& h, Outcome&) { h.store.empty(true); }},
      {"recover a dead writer", Operation::writes,
       [](Handle& h, Outcome&) {
         h.store.repair(h.control.participant(0));
         h.control.participant(0).state = 0;
       },
       died_before, 1},
      {"recover, as the first opener", Operation::writes,
       [](Handle& h, Outcome&) {
         h.store.recover();
         h.priorities.put_in_order();
       },
       died_before, 1, true},
  };
}

}  // namespace
#endif
