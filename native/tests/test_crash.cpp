// Death at any instruction. SIGKILL leaves in shared memory exactly the bytes of some boundary between two instructions
// of whoever died; a recovery must make a sound store of each of them.
//
//   kill      writers are killed at random moments, again and again on one store
//   every     one operation runs instruction by instruction; each distinct state of the memory is recovered and checked
//   zombie    one operation is stopped at an instruction, another one runs, the first goes on
//
// Without sanitizers: they multiply the instructions, and one of them dislikes ptrace.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "blocks.h"
#include "core/check.h"
#include "core/store.h"
#include "crash.h"
#include "expect.h"
#include "stress.h"

using namespace engram;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

namespace {

/// The store goes on as if nothing had happened: draws find whole rows, and new rows displace the void ones.
void expect_usable(const Blocks& blocks) {
  Store store = blocks.open();
  Rows batch(blocks.fields, 32);
  if (store.control().size() > 0) {
    Indices rows(32), numbers(32);
    store.sample_uniform(3, 32, batch.out, rows.data(), numbers.data());
    for (std::uint64_t i = 0; i < 32; ++i) {
      EXPECT(batch.id(i).has_value());
      EXPECT(is_committed_as(store.control().word(static_cast<std::uint64_t>(rows[i])).load(), static_cast<std::uint64_t>(numbers[i])));
    }
  } else {
    EXPECT_THROWS(NothingLive, store.sample_uniform(3, 32, batch.out, nullptr, nullptr));
  }
  const std::uint64_t length = store.control().lane_length(), first = std::uint64_t{0xFF} << 56;
  for (std::uint64_t lane = 0; lane < store.control().lanes(); ++lane) {
    const std::uint64_t at = store.control().cursor_row(lane) % length;
    append_ids(store, blocks, lane, length, first + lane * length);
    for (std::uint64_t i = 0; i < length; ++i) {
      EXPECT_EQ(id_in(blocks, lane * length + (at + i) % length).value_or(0), first + lane * length + i);
    }
  }
  EXPECT_EQ(store.control().size(), store.control().capacity());
  EXPECT(store.holes().empty());
  expect_sound(blocks);
}

// ---- kill ----------------------------------------------------------------------------------------------------------

[[noreturn]] void write_for_ever(const Blocks& blocks, Log& log, std::uint64_t writer) {
  Store store = blocks.open(writer);
  Rows rows(blocks.fields, Log::kMost);
  Dice dice(writer << 32 | log.begun);
  const auto which = all_fields(blocks);
  for (;;) {
    const std::uint64_t b = log.begun.fetch_add(1), n = dice.in(1, Log::kMost), lane = dice.below(2);
    Log::Batch done{n, 0, id_of_batch(writer, b), {}, Log::kByNumber, {}};
    for (std::uint64_t i = 0; i < n; ++i) rows.describe(i, done.first_id + i);
    try {
      if (dice.below(4) != 0) {
        done.from = store.control().lane(lane).cursor.load();
        done.t0 = store.append(lane, n, rows.in, done.rows);
      } else {
        done.n = std::min<std::uint64_t>(n, 3);
        for (std::uint64_t i = 0; i < done.n; ++i) {
          done.rows[i] = static_cast<std::int64_t>(dice.below(store.control().capacity()));
          done.laps[i] = store.control().lap(static_cast<std::uint64_t>(done.rows[i]));
        }
        const bool grow = dice.below(2) == 0;
        if (!grow) done.lowest = lowest_under_way(store.control());
        done.t0 = store.scatter(done.rows, done.n, which, rows.in, grow);
      }
    } catch (const std::exception&) {
      done.n = 0;  // a row was not live, or the other writer died in it: nothing is promised
    }
    log.batches[b % Log::kKept] = done;
    log.acknowledged.store(b + 1);
  }
}

TEST(killed_writers_lose_nothing_that_was_acknowledged) {
  const Geometry g = geometry(2, 5);
  const std::vector<std::uint64_t> row_bytes{48, 24000};
  SharedPages pages(1 << 20), log_pages(sizeof(Log) * 4);
  const Layout blocks(pages.data(), g, row_bytes);
  auto* logs = reinterpret_cast<Log*>(log_pages.data());
  format_without_curve(blocks);
  Dice dice(42);
  std::uint64_t rounds = 0, prefixes = 0, read = 0, in_flight = 0, repaired = 0;
  const auto start = Clock::now();
  const auto enough = [&] { return rounds >= 50 && in_flight > 0 && repaired > 0; };
  while ((rounds < 200 || Clock::now() < start + 3s) && (Clock::now() < start + 20s || !enough()) && expect::failures == 0) {
    ++rounds;
    const std::uint64_t begun[] = {logs[1].begun, logs[2].begun};
    pid_t children[2];
    for (std::uint64_t w : {0, 1}) {
      children[w] = fork();
      if (children[w] == 0) write_for_ever(blocks, logs[w + 1], w + 1);
    }
    while (logs[1].begun == begun[0] || logs[2].begun == begun[1]) std::this_thread::yield();
    // Readers beside them go on, whoever dies.
    Store store = blocks.open(3);
    Rows batch(blocks.fields, 8);
    const auto read_for = [&](std::chrono::microseconds time) {
      for (const auto until = Clock::now() + time; Clock::now() < until;) {
        try {
          store.sample_uniform(dice.bits(), 8, batch.out, nullptr, nullptr);
        } catch (const NothingLive&) {
          continue;
        }
        for (std::uint64_t i = 0; i < 8; ++i) EXPECT(batch.id(i).has_value());
        read += 8;
      }
    };
    read_for(std::chrono::microseconds(dice.below(3000)));
    kill(children[0], SIGKILL);
    if (dice.below(2) == 0) read_for(std::chrono::microseconds(dice.below(1000)));
    kill(children[1], SIGKILL);
    for (const pid_t child : children) waitpid(child, nullptr, 0);
    check_claims(blocks, &prefixes);
    const auto repair = blocks.view().recover();
    repaired += repair.voided + repair.gaps;
    expect_sound(blocks);
    for (Log* log : {&logs[1], &logs[2]}) {
      check_log(blocks, *log);
      if (const std::uint64_t last = log->acknowledged; log->begun != last) {  // the batch in which it died promises nothing
        log->batches[last % Log::kKept].n = 0;
        log->acknowledged.store(log->begun);
        ++in_flight;
      }
    }
    if (rounds % 50 == 0) expect_usable(blocks);
  }
  std::printf("      %llu rounds: %llu batches acknowledged, %llu died in a batch, %llu of them in the rows of a ring, "
              "%llu rows repaired; %llu rows read meanwhile\n",
              llu(rounds), llu(logs[1].acknowledged + logs[2].acknowledged - in_flight), llu(in_flight), llu(prefixes),
              llu(repaired), llu(read));
  EXPECT(enough());
}

// ---- every instruction ---------------------------------------------------------------------------------------------

#ifdef ENGRAM_CAN_STEP

/// What the memory of a store is at this instruction. Participants that nobody here is are left out.
std::uint64_t hash(const Layout& blocks) {
  const std::uint64_t lanes = blocks.geometry.lanes * sizeof(Lane), participants = kParticipants * sizeof(Participant);
  const std::uint64_t lanes_at = blocks.control.size() - lanes;
  return hash_of(blocks.all.subspan(lanes_at), hash_of(blocks.all.first(lanes_at - participants + 4 * sizeof(Participant))));
}

/// What an operation wrote, in memory that its process shares.
struct Outcome {
  std::uint64_t t0, n, first_id;
  std::int64_t rows[32];
};

/// An operation on a store, its rows made before it begins.
struct Operation {
  const char* name;
  std::function<void(Store&, Outcome&)> run;
  bool ring = false;     // appends to lane 0: what is there of it is a prefix
  bool zeros = false;    // makes rows live as zeros
  bool forgets = false;  // makes rows unused
  bool picky = false;    // refuses rows that are not live
};

/// Of the rows of a stage, for as long as it is looked at.
std::vector<std::uint64_t> row_bytes{56, 520};

std::shared_ptr<Rows> rows_with_ids(std::uint64_t first_id, std::uint64_t n) {
  std::vector<Field> fields;
  for (const std::uint64_t bytes : row_bytes) fields.push_back({nullptr, bytes});
  auto rows = std::make_shared<Rows>(fields, n);
  for (std::uint64_t i = 0; i < n; ++i) rows->describe(i, first_id + i);
  return rows;
}

Operation append(const char* name, std::uint64_t n, std::uint64_t first_id) {
  return {name, [=, columns = rows_with_ids(first_id, n)](Store& store, Outcome& outcome) {
            outcome.n = n, outcome.first_id = first_id;
            outcome.t0 = store.append(0, n, columns->in, outcome.rows);
          }, true};
}

Operation append_by_lane(const char* name, const Indices& lanes, std::uint64_t first_id) {
  return {name, [=, columns = rows_with_ids(first_id, lanes.size())](Store& store, Outcome& outcome) {
            outcome.n = lanes.size(), outcome.first_id = first_id;
            outcome.t0 = store.append_by_lane(lanes.data(), lanes.size(), columns->in, outcome.rows);
          }};
}

Operation scatter(const char* name, const Indices& rows, bool grow, std::uint64_t first_id) {
  return {name, [=, columns = rows_with_ids(first_id, rows.size())](Store& store, Outcome& outcome) {
            outcome.n = rows.size(), outcome.first_id = first_id;
            for (std::uint64_t i = 0; i < rows.size(); ++i) outcome.rows[i] = rows[i];
            std::vector<std::uint64_t> which(row_bytes.size());
            std::iota(which.begin(), which.end(), std::uint64_t{0});
            outcome.t0 = store.scatter(rows.data(), rows.size(), which, columns->in, grow);
          }, false, grow, false, !grow};
}

/// The last entry names a row under a number that it never had.
Operation patch(const char* name, const Indices& rows, std::uint64_t first_id) {
  return {name, [=, columns = rows_with_ids(first_id, rows.size())](Store& store, Outcome& outcome) {
            Indices expected(rows.size()), numbers(rows.size());
            store.tickets_of(rows.data(), rows.size(), expected.data());
            expected.back() = 1 << 20;
            outcome.n = rows.size() - 1, outcome.first_id = first_id;
            for (std::uint64_t i = 0; i + 1 < rows.size(); ++i) outcome.rows[i] = rows[i];
            outcome.t0 = store.patch(rows.data(), rows.size(), store.all(), columns->in, expected.data(), numbers.data()).first;
          }, false, false, false, true};
}

/// A store in shared memory before an operation, and what it would be after it.
struct Stage {
  using Prepare = std::function<void(Store&, const Blocks&)>;

  Stage(Geometry g, const Prepare& prepare, Operation what)
      : operation(std::move(what)), pages(1 << 18), blocks(pages.data(), g, row_bytes) {
    format_without_curve(blocks);
    Store store = blocks.open();
    prepare(store, blocks);
    before.assign(blocks.all.begin(), blocks.all.end());
    Outcome outcome{};
    operation.run(store, outcome);  // also resolves every symbol, which would cost thousands of steps
    after.assign(blocks.all.begin(), blocks.all.end());
    restore();
  }
  void restore() { std::memcpy(blocks.all.data(), before.data(), before.size()); }

  Operation operation;
  SharedPages pages;
  Layout blocks;
  std::vector<std::byte> before, after;
};

/// A private copy of a state of a stage.
struct Copy {
  Copy(const Stage& stage, std::span<const std::byte> state)
      : memory(state.size() + 64), blocks(aligned(memory.data()), stage.blocks.geometry, row_bytes) {
    std::memcpy(blocks.all.data(), state.data(), state.size());
  }
  static std::byte* aligned(std::byte* p) { return p + (64 - reinterpret_cast<std::uintptr_t>(p) % 64) % 64; }
  std::vector<std::byte> memory;
  Layout blocks;
};

/// Recovers a state that somebody died in, and checks it against what was before and what would have been after.
void check_state(const Stage& stage, std::span<const std::byte> state, std::uint64_t* half_written) {
  const Copy crashed(stage, state), old_state(stage, stage.before), new_state(stage, stage.after);
  const Control control = crashed.blocks.view(), was = old_state.blocks.view(), will = new_state.blocks.view();
  bool half = false;
  std::uint64_t prefixes = 0;
  for (std::uint64_t row = 0; row < control.capacity(); ++row) {
    half |= state_of(control.word(row).load()) == State::writing && !id_in(crashed.blocks, row);
  }
  *half_written += half;
  if (!stage.operation.forgets) check_claims(crashed.blocks, &prefixes);
  control.recover();
  expect_sound(crashed.blocks);
  const std::vector<std::byte> once(crashed.blocks.all.begin(), crashed.blocks.all.end());
  const auto again = control.recover();
  EXPECT_EQ(again.claims + again.voided + again.gaps, 0u);
  EXPECT(std::equal(once.begin(), once.end(), crashed.blocks.all.begin()));

  const std::uint64_t numbers = was.counters().next_ticket.load();
  for (std::uint64_t row = 0; row < control.capacity(); ++row) {
    const std::uint64_t now = control.word(row).load();
    const std::uint64_t old_word = was.word(row).load(), new_word = will.word(row).load();
    EXPECT(number_of(now) >= number_of(old_word));  // numbers only grow
    if (is_committed(now)) {
      const auto id = id_in(crashed.blocks, row);
      if (now == old_word) {
        EXPECT(id == id_in(old_state.blocks, row));
      } else if (now == new_word) {
        EXPECT(id == id_in(new_state.blocks, row));
      } else {  // between the two: an earlier entry of a row named twice, or zeros where a row was still to come
        EXPECT(number_of(now) >= numbers && number_of(now) < number_of(new_word));
        EXPECT(id >= 0x200 || (stage.operation.zeros && id == 0));
      }
    }
    if (!is_committed(old_word)) continue;
    if (old_word == new_word) EXPECT_EQ(now, old_word);                            // not its row: as it was
    if (state_of(now) == State::voided) EXPECT(number_of(now) >= numbers);         // evicted by this very write
    if (state_of(now) == State::unused) EXPECT(stage.operation.forgets);
  }
  expect_usable(crashed.blocks);
}

/// Runs the operation an instruction at a time and calls check() at every distinct state. Returns the steps at which they
/// begin; none where nobody may step through a child.
template <class Check>
std::vector<std::uint64_t> step_through(const Stage& stage, std::uint64_t* steps, Check&& check,
                                        std::vector<std::uint64_t>* instructions = nullptr) {
  Store store = stage.blocks.open();
  Outcome outcome{};
  Stepped child([&] { stage.operation.run(store, outcome); });
  std::set<std::uint64_t> seen;
  std::vector<std::uint64_t> states;
  // The bound is for processors whose exclusive loads and stores never succeed in single steps.
  for (*steps = 0; child.end() == Stepped::End::running && *steps < 100000; ++*steps, child.step()) {
    if (instructions != nullptr) instructions->push_back(child.at());
    if (!seen.insert(hash(stage.blocks)).second) continue;
    states.push_back(*steps);
    check();
  }
  if (child.end() != Stepped::End::done) {
    std::printf("      skipped: nobody may step through a child here, or no step ends\n");
    return {};
  }
  EXPECT(std::ranges::equal(stage.blocks.all, stage.after));
  return states;
}

Stage::Prepare filled(std::uint64_t n) {
  return [n](Store& store, const Blocks& blocks) {
    if (n > 0) append_ids(store, blocks, 0, n, 0x100);
  };
}

void with_a_void_row(Store& store, const Blocks& blocks) {
  filled(5)(store, blocks);
  store.control().word(1).store(ticket(store.control().counters().next_ticket.fetch_add(1), State::writing));
  store.control().recover();
}

void with_two_lanes(Store& store, const Blocks& blocks) {
  filled(5)(store, blocks);
  append_ids(store, blocks, 1, 2, 0x110);
  store.control().raise_high(1, 2);
}

/// Left in every way that one can leave it.
void left_behind(Store& store, const Blocks& blocks) {
  filled(5)(store, blocks);
  const Control& control = store.control();
  control.word(1).store(ticket(control.counters().next_ticket.fetch_add(1), State::writing));
  control.word(7).store(ticket(2, State::committed));
  control.word(8).store(ticket(3, State::writing));
  control.lane(1).cursor.fetch_add(2);
  control.participant(0).state = 1;
  control.participant(2).claims[1].t0 = 6;
  control.counters().void_rows = 1;
}

TEST(every_instruction_of_every_operation) {
  const Geometry one = geometry(1, 4), two = geometry(2, 5);
  const Operation empty{"empty", [](Store& s, Outcome&) { s.control().empty(false); }, false, false, true};
  const Operation recover{"recover", [](Store& s, Outcome&) { s.control().recover(); }, false, false, true};
  std::vector<std::unique_ptr<Stage>> stages;
  const auto add = [&](Geometry g, const Stage::Prepare& prepare, const Operation& operation) {
    stages.push_back(std::make_unique<Stage>(g, prepare, operation));
  };
  add(one, filled(0), append("append the first row", 1, 0x200));
  add(one, filled(5), append("append 1 over an older one", 1, 0x200));
  add(two, filled(8), append("append 5 over the wrap", 5, 0x200));
  add(one, filled(5), append("append 9 to a lane of 4", 9, 0x200));
  add(one, with_a_void_row, append("append 2, one over a void row", 2, 0x200));
  add(two, filled(4), append_by_lane("append 5 by lane", {1, 0, 1, 0, 0}, 0x200));
  add(two, filled(5), scatter("write 3 in place, 1 twice", {3, 1, 3}, false, 0x200));
  add(two, filled(5), scatter("write rows 6 and 9, growing", {6, 9}, true, 0x200));
  add(two, filled(5), patch("patch 3, 1 twice, 1 too late", {3, 1, 3, 2}, 0x200));
  add(two, with_two_lanes, empty);
  add(two, left_behind, recover);
  std::uint64_t states = 0;
  for (const auto& stage : stages) {
    const int failures = expect::failures;
    std::uint64_t half_written = 0, steps = 0;
    const auto found = step_through(*stage, &steps, [&] { check_state(*stage, stage->blocks.all, &half_written); });
    if (found.empty()) return;
    states += found.size();
    if (stage->operation.ring) EXPECT(half_written > 0);
    std::printf("      %-30s %5llu instructions, %3llu distinct states, %3llu with a row half written\n",
                stage->operation.name, llu(steps), llu(found.size()), llu(half_written));
    if (expect::failures != failures) std::fprintf(stderr, "  in: %s\n", stage->operation.name);
  }
  std::printf("every instruction: %s distinct states of %s operations\n", stress::count(states).c_str(),
              stress::count(stages.size()).c_str());
  EXPECT(states > 150);
}

TEST(every_instruction_of_operations_on_stores_of_other_shapes) {
  Dice dice(static_cast<std::uint64_t>(Clock::now().time_since_epoch().count()));
  const auto shapes = stress::pick<std::uint64_t>(1, 50, 500);
  std::uint64_t states = 0, instructions = 0, operations = 0;
  for (std::uint64_t shape = 0; shape < shapes && expect::failures == 0; ++shape) {
    row_bytes.clear();
    for (std::uint64_t fields = dice.in(1, 3); fields > 0; --fields) row_bytes.push_back(8 * dice.in(1, 120));
    const Geometry g = geometry(dice.in(1, 3), dice.in(1, 9));
    const std::uint64_t n = dice.in(1, 9), before = dice.below(2 * g.lane_length + 1);
    Indices lanes, live, any;
    for (std::uint64_t i = 0; i < n; ++i) {
      lanes.push_back(static_cast<std::int64_t>(dice.below(g.lanes)));
      any.push_back(static_cast<std::int64_t>(dice.below(g.capacity)));
      live.push_back(static_cast<std::int64_t>(dice.below(std::max<std::uint64_t>(1, std::min(before, g.lane_length)))));
    }
    std::vector<Operation> all{append("append", 2 * n, 0x200), append_by_lane("append by lane", lanes, 0x200),
                               scatter("write, growing", any, true, 0x200),
                               {"empty", [](Store& s, Outcome&) { s.empty(true); }, false, false, true}};
    if (before > 0) all.push_back(scatter("write in place", live, false, 0x200));
    for (const Operation& operation : all) {
      const Stage stage(g, filled(before), operation);
      std::uint64_t half_written = 0, steps = 0;
      const auto found = step_through(stage, &steps, [&] { check_state(stage, stage.blocks.all, &half_written); });
      if (found.empty()) return;
      states += found.size(), instructions += steps, ++operations;
      if (expect::failures == 0) continue;
      std::fprintf(stderr, "  %s %llu, %llu before; %llu lanes of %llu rows of %s bytes\n", operation.name, llu(n), llu(before),
                   llu(g.lanes), llu(g.lane_length), expect::show(row_bytes).c_str());
      break;
    }
  }
  row_bytes = {56, 520};
  std::printf("every instruction, other shapes: %s instructions, %s distinct states of %s operations on %s shapes\n",
              stress::count(instructions).c_str(), stress::count(states).c_str(), stress::count(operations).c_str(),
              stress::count(shapes).c_str());
}

TEST(an_emptying_that_is_stopped_leaves_a_lane_as_it_was_or_empty) {
  const auto partly = [](Store& store, const Blocks& blocks) {
    append_ids(store, blocks, 0, 3, 0x100);
    append_ids(store, blocks, 1, 2, 0x110);
  };
  const Stage stage(geometry(2, 5), partly, {"empty", [](Store& s, Outcome&) { s.empty(true); }, false, false, true});
  std::uint64_t steps = 0;
  step_through(stage, &steps, [&] {
    const Control control = stage.blocks.view();
    for (const std::uint64_t lane : {0, 1}) EXPECT(control.filled(lane) == 0 || control.filled(lane) == 3 - lane);
  });
}

TEST(an_interrupted_recovery_is_recovered_to_the_same_bytes) {
  const Stage stage(geometry(2, 5), left_behind, {"", [](Store& s, Outcome&) { s.control().recover(); }});
  std::uint64_t steps = 0;
  step_through(stage, &steps, [&] {
    const Copy copy(stage, stage.blocks.all);
    copy.blocks.view().recover();
    EXPECT(std::ranges::equal(copy.blocks.all, stage.after));
  });
}

// ---- zombie --------------------------------------------------------------------------------------------------------

/// One operation is stopped in a state of its own; another begins, and ends if it can; then the first goes on.
void check_pair(const Stage& stage, const Operation& other, const std::vector<std::uint64_t>& instructions, std::uint64_t step,
                std::uint64_t* waited) {
  const Control control = stage.blocks.view();
  SharedPages pages(sizeof(Outcome) * 2);
  auto* outcomes = reinterpret_cast<Outcome*>(pages.data());
  Store a = stage.blocks.open(0), b = stage.blocks.open(1);
  const std::uint64_t cursor = control.lane(0).cursor;
  Stepped zombie([&] { stage.operation.run(a, outcomes[0]); });
  EXPECT(zombie.go_to(instructions, step) == Stepped::End::running);
  const bool reserved = control.lane(0).cursor != cursor;
  const std::uint64_t position_b = control.lane(0).cursor;
  const pid_t child = fork();
  if (child == 0) {
    try {
      other.run(b, outcomes[1]);
    } catch (const std::exception&) {
      _exit(1);
    }
    _exit(0);
  }
  int status = 0;
  bool ended = false;
  for (const auto start = Clock::now(); !ended && Clock::now() < start + 4ms;) {
    ended = waitpid(child, &status, WNOHANG) == child;
    if (!ended) std::this_thread::sleep_for(50us);
  }
  *waited += !ended;  // it needs a row that the stopped one is writing, and waits for it
  zombie.resume();
  EXPECT(zombie.finish());
  if (!ended) waitpid(child, &status, 0);
  EXPECT(WIFEXITED(status));
  if (WEXITSTATUS(status) != 0) {  // it met a row that was just being written
    EXPECT(other.picky);
    outcomes[1].n = 0;
  }

  // The winner of each row: of two rounds of a ring the later one, else the larger number. Of an edit and another operation it is the
  // one that came to the row last: an edit gives way to newer writes, and to no other edit.
  const bool rings = stage.operation.ring && other.ring;
  // On a busy machine the other one may not have come to its rows before the first went on, which took them then.
  const bool overtook = rings && !reserved && outcomes[0].rows[0] == static_cast<std::int64_t>(position_b % control.lane_length());
  const std::uint64_t position_a = reserved ? cursor : overtook ? position_b : position_b + outcomes[1].n;
  const std::uint64_t from_b = overtook ? position_b + outcomes[0].n : position_b;
  struct Entry {
    std::uint64_t order = 0, number = 0, id = 0;
  };
  std::map<std::int64_t, Entry> winners;
  for (const int o : {0, 1}) {
    const Outcome& outcome = outcomes[o];
    for (std::uint64_t i = 0; i < outcome.n; ++i) {
      const std::uint64_t number = outcome.t0 + i, position = (o == 0 ? position_a : from_b) + i;
      Entry& winner = winners[outcome.rows[i]];
      const std::uint64_t order = rings ? position + 1 : number;
      if (order > winner.order) winner = {order, number, outcome.first_id + i};
    }
  }
  const Copy before(stage, stage.before);
  for (std::uint64_t row = 0; row < control.capacity(); ++row) {
    const std::uint64_t word = control.word(row).load();
    const auto winner = winners.find(static_cast<std::int64_t>(row));
    if (winner != winners.end() && (stage.operation.picky || other.picky)) {
      bool found = false;
      for (const int o : {0, 1}) {
        const std::uint64_t i = number_of(word) - outcomes[o].t0;
        found |= i < outcomes[o].n && outcomes[o].rows[i] == static_cast<std::int64_t>(row) &&
                 id_in(stage.blocks, row) == outcomes[o].first_id + i;
      }
      EXPECT(is_committed(word) && found);
    } else if (winner != winners.end()) {
      EXPECT(is_committed_as(word, winner->second.number));
      EXPECT_EQ(id_in(stage.blocks, row).value_or(0), winner->second.id);
    } else if (word != before.blocks.view().word(row).load()) {
      EXPECT(is_committed(word) && id_in(stage.blocks, row) == 0);  // zeros below a row that grew the store
    }
  }
  expect_sound(stage.blocks);
  expect_usable(stage.blocks);
}

TEST(a_writer_that_was_stopped_tears_and_hides_nothing) {
  const Geometry two = geometry(2, 5);
  std::vector<std::unique_ptr<Stage>> stages;
  stages.push_back(std::make_unique<Stage>(two, filled(8), append("append 4 over the wrap", 4, 0x200)));
  stages.push_back(std::make_unique<Stage>(two, filled(5), scatter("write 2 in place", {3, 1}, false, 0x200)));
  stages.push_back(std::make_unique<Stage>(two, filled(2), scatter("write row 4, growing", {4}, true, 0x200)));
  const std::vector<Operation> others = {
      append("append 1", 1, 0x300),
      append("append 7, wrapping past it", 7, 0x300),
      scatter("write 3 in place", {0, 1, 0}, false, 0x300),
      scatter("write rows 3 and 0, growing", {3, 0}, true, 0x300),
  };
  struct Pair {
    Stage* stage;
    const Operation* other;
    const std::vector<std::uint64_t>* instructions;
    std::uint64_t step;
  };
  std::vector<Pair> pairs;
  std::deque<std::vector<std::uint64_t>> instructions;
  for (const auto& stage : stages) {
    std::uint64_t steps = 0;
    instructions.emplace_back();
    const auto states = step_through(*stage, &steps, [] {}, &instructions.back());
    if (states.empty()) return;
    for (const Operation& other : others) {
      // At the begin of each state, and at its end: what was read meanwhile is as old as can be when it is written by.
      for (const std::uint64_t step : begins_and_ends(states)) {
        pairs.push_back({stage.get(), &other, &instructions.back(), step});
      }
    }
  }
  // Where there is no time for all of them, other ones each run; but always those of two rings, of which few tell.
  Dice dice(static_cast<std::uint64_t>(Clock::now().time_since_epoch().count()));
  for (std::uint64_t i = pairs.size(); i > 1; --i) std::swap(pairs[i - 1], pairs[dice.below(i)]);
  const auto two_rings = [](const Pair& pair) { return pair.stage->operation.ring && pair.other->ring; };
  std::stable_partition(pairs.begin(), pairs.end(), two_rings);
  std::uint64_t checked = 0, waited = 0;
  const auto time = stress::pick<Clock::duration>(5s, 2h, 2h);
  for (const auto start = Clock::now(); checked < pairs.size() && (Clock::now() < start + time || waited == 0) && expect::failures < 20;
       ++checked) {
    const Pair& pair = pairs[checked];
    pair.stage->restore();
    const int failures = expect::failures;
    check_pair(*pair.stage, *pair.other, *pair.instructions, pair.step, &waited);
    if (expect::failures == failures) continue;
    std::fprintf(stderr, "  %s, stopped before step %llu; then: %s\n", pair.stage->operation.name, llu(pair.step),
                 pair.other->name);
  }
  std::printf("one preemption: %s of %s pairs; in %s the second waited for the first\n", stress::count(checked).c_str(),
              stress::count(pairs.size()).c_str(), stress::count(waited).c_str());
  EXPECT(waited > 0);
}
#endif

}  // namespace
