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

#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
#include <sys/ptrace.h>
#define ENGRAM_CAN_STEP 1
#endif

#include "blocks.h"
#include "core/check.h"
#include "core/store.h"
#include "expect.h"

using namespace engram;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

namespace {

using Indices = std::vector<std::int64_t>;

unsigned long long llu(std::uint64_t n) { return n; }

std::vector<std::uint64_t> all_fields(const Blocks& blocks) {
  std::vector<std::uint64_t> which(blocks.fields.size());
  std::iota(which.begin(), which.end(), std::uint64_t{0});
  return which;
}

/// The id that a row carries in every field of the store, whatever its ticket says; none if it is torn.
std::optional<std::uint64_t> id_in(const Blocks& blocks, std::uint64_t row) {
  std::optional<std::uint64_t> id;
  for (const Field& field : blocks.fields) {
    const auto found = id_of(field.data + row * field.row_bytes, field.row_bytes);
    if (!found || (id && *id != *found)) return std::nullopt;
    id = found;
  }
  return id;
}

void append_ids(Store& store, const Blocks& blocks, std::uint64_t lane, std::uint64_t n, std::uint64_t first_id) {
  Rows rows(blocks.fields, n);
  for (std::uint64_t i = 0; i < n; ++i) rows.describe(i, first_id + i);
  store.append(lane, n, rows.in, nullptr);
}

/// What holds of every store after a recovery, whatever happened to it before.
void expect_sound(const Blocks& blocks) {
  const Control control = blocks.view();
  std::uint64_t live = 0, voided = 0;
  for (std::uint64_t row = 0; row < control.capacity(); ++row) {
    const std::uint64_t word = control.word(row).load();
    const bool inside = row % control.lane_length() < control.filled(row / control.lane_length());
    EXPECT_EQ(state_of(word) == State::unused, !inside);
    EXPECT(state_of(word) != State::writing);
    EXPECT(number_of(word) < control.counters().next_ticket.load());
    if (is_committed(word)) EXPECT(id_in(blocks, row).has_value());
    live += is_committed(word);
    voided += state_of(word) == State::voided;
  }
  EXPECT_EQ(control.size(), live);
  EXPECT_EQ(control.counters().void_rows.load(), voided);
  for (std::uint64_t p = 0; p < 4; ++p) {
    EXPECT_EQ(control.participant(p).state.load(), 0u);
    for (const Claim& claim : control.participant(p).claims) EXPECT_EQ(claim.t0.load(), 0u);
  }
}

/// The store goes on as if nothing had happened: draws find whole rows, and new rows displace the void ones.
void expect_usable(const Blocks& blocks) {
  Store store = blocks.open();
  Rows batch(blocks.fields, 32);
  if (store.control().size() > 0) {
    Indices rows(32), numbers(32);
    store.sample_uniform(3, 32, batch.out, rows.data(), numbers.data());
    for (std::uint64_t i = 0; i < 32; ++i) {
      EXPECT(batch.id(i).has_value());
      EXPECT_EQ(store.control().word(static_cast<std::uint64_t>(rows[i])).load(),
                ticket(static_cast<std::uint64_t>(numbers[i]), State::committed));
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

/// What a writer promises to have written, in memory that survives it.
struct Log {
  static constexpr std::uint64_t kKept = 64, kMost = 8;
  struct Batch {
    std::uint64_t n, t0, first_id;
    std::int64_t rows[kMost];
  };
  Word begun, acknowledged;
  Batch batches[kKept];
};

std::uint64_t id_of_batch(std::uint64_t writer, std::uint64_t batch) { return writer << 56 | batch << 8; }

[[noreturn]] void write_for_ever(const Blocks& blocks, Log& log, std::uint64_t writer) {
  Store store = blocks.open(writer);
  Rows rows(blocks.fields, Log::kMost);
  Dice dice(writer << 32 | log.begun);
  const auto which = all_fields(blocks);
  for (;;) {
    const std::uint64_t b = log.begun.fetch_add(1), n = dice.in(1, Log::kMost), lane = dice.below(2);
    Log::Batch done{n, 0, id_of_batch(writer, b), {}};
    for (std::uint64_t i = 0; i < n; ++i) rows.describe(i, done.first_id + i);
    try {
      if (dice.below(4) != 0) {
        done.t0 = store.append(lane, n, rows.in, done.rows);
      } else {
        done.n = std::min<std::uint64_t>(n, 3);
        for (std::uint64_t i = 0; i < done.n; ++i) {
          done.rows[i] = static_cast<std::int64_t>(dice.below(store.control().capacity()));
        }
        done.t0 = store.scatter(done.rows, done.n, which, rows.in, dice.below(2) == 0);
      }
    } catch (const std::exception&) {
      done.n = 0;  // a row was not live, or the other writer died in it: nothing is promised
    }
    log.batches[b % Log::kKept] = done;
    log.acknowledged.store(b + 1);
  }
}

/// Before the recovery: whoever is in the middle of a write has said so, and has written a prefix of it.
void check_claims(const Blocks& blocks, std::uint64_t* prefixes) {
  const Control control = blocks.view();
  for (std::uint64_t row = 0; row < control.capacity(); ++row) {
    const std::uint64_t word = control.word(row).load();
    if (state_of(word) != State::writing) continue;
    bool claimed = false;
    for (std::uint64_t p = 0; p < 4; ++p) {
      for (const Claim& claim : control.participant(p).claims) {
        const std::uint64_t t0 = claim.t0.load();
        claimed |= t0 != 0 && number_of(word) - t0 < claim.n;
      }
    }
    EXPECT(claimed);
  }
  for (std::uint64_t p = 0; p < 4; ++p) {
    for (const Claim& claim : control.participant(p).claims) {
      const std::uint64_t t0 = claim.t0.load(), length = control.lane_length();
      if (t0 == 0 || t0 == ~std::uint64_t{0} || claim.lane < 0) continue;
      int phase = 0;  // committed, then being written, then not begun
      for (std::uint64_t i = claim.n > length ? claim.n - length : 0; i < claim.n; ++i) {
        const std::uint64_t row = static_cast<std::uint64_t>(claim.lane) * length + (claim.p0 + i) % length;
        const std::uint64_t word = control.word(row).load();
        if (number_of(word) > t0 + i) continue;  // overwritten by a newer one
        const int now = number_of(word) < t0 + i ? 2 : is_committed(word) ? 0 : 1;
        EXPECT(now >= phase);
        phase = std::max(phase, now);
      }
      ++*prefixes;
    }
  }
}

TEST(killed_writers_lose_nothing_that_was_acknowledged) {
  const Geometry g = geometry(2, 5);
  const std::vector<std::uint64_t> row_bytes{48, 6000};
  SharedPages pages(1 << 20), log_pages(sizeof(Log) * 4);
  const Layout blocks(pages.data(), g, row_bytes);
  auto* logs = reinterpret_cast<Log*>(log_pages.data());
  Control::format(blocks.control, g, 0);
  Dice dice(42);
  std::uint64_t rounds = 0, prefixes = 0, read = 0, in_flight = 0, acknowledged = 0, repaired = 0;
  const auto start = Clock::now();
  while ((rounds < 200 || Clock::now() < start + 3s) && Clock::now() < start + 20s && expect::failures == 0) {
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
    for (std::uint64_t w : {1, 2}) {
      const Log& log = logs[w];
      in_flight += log.begun != log.acknowledged;
      acknowledged = logs[1].acknowledged + logs[2].acknowledged;
      const std::uint64_t last = log.acknowledged, first = last < Log::kKept ? 0 : last - (Log::kKept - 1);
      for (std::uint64_t b = first; b < last; ++b) {
        const Log::Batch& done = log.batches[b % Log::kKept];
        for (std::uint64_t i = 0; i < done.n; ++i) {
          const std::uint64_t row = static_cast<std::uint64_t>(done.rows[i]), word = store.control().word(row).load();
          EXPECT(number_of(word) >= done.t0 + i);  // there, or evicted by a newer one
          if (number_of(word) != done.t0 + i) continue;
          EXPECT(is_committed(word));
          EXPECT_EQ(id_in(blocks, row).value_or(0), done.first_id + i);
        }
      }
      log.begun.load() != last ? logs[w].acknowledged.store(log.begun) : void();  // the batch that died is forgotten
      if (last % Log::kKept != log.begun % Log::kKept) logs[w].batches[last % Log::kKept].n = 0;
    }
    if (rounds % 50 == 0) expect_usable(blocks);
  }
  std::printf("      %llu rounds: %llu batches acknowledged, %llu died in a batch, %llu of them in the rows of a ring, "
              "%llu rows repaired; %llu rows read meanwhile\n",
              llu(rounds), llu(acknowledged), llu(in_flight), llu(prefixes), llu(repaired), llu(read));
  EXPECT(rounds >= 50);
  EXPECT(in_flight > 0);
  EXPECT(repaired > 0);
}

// ---- every instruction ---------------------------------------------------------------------------------------------

#ifdef ENGRAM_CAN_STEP

/// A child that runs one operation, an instruction at a time.
class Stepped {
 public:
  enum class End { running, done, refused };

  explicit Stepped(const std::function<void()>& operation) {
    pid_ = fork();
    if (pid_ == 0) {
      if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(77);
      raise(SIGSTOP);
      operation();
      raise(SIGSTOP);
      _exit(0);
    }
    end_ = wait() && WIFSTOPPED(status_) && WSTOPSIG(status_) == SIGSTOP ? End::running : End::refused;
  }
  ~Stepped() {
    if (WIFEXITED(status_) || WIFSIGNALED(status_)) return;
    kill(pid_, SIGKILL);
    wait();
  }
  Stepped(const Stepped&) = delete;
  Stepped& operator=(const Stepped&) = delete;

  End end() const { return end_; }

  /// One instruction.
  End step() {
    if (ptrace(PTRACE_SINGLESTEP, pid_, nullptr, nullptr) != 0 || !wait() || !WIFSTOPPED(status_)) {
      return end_ = End::refused;
    }
    if (WSTOPSIG(status_) == SIGSTOP) end_ = End::done;
    return end_;
  }

  /// All the others at once; returns at once.
  void resume() { ptrace(PTRACE_CONT, pid_, nullptr, nullptr); }
  bool finish() { return wait() && WIFSTOPPED(status_) && WSTOPSIG(status_) == SIGSTOP; }

 private:
  bool wait() { return waitpid(pid_, &status_, 0) == pid_; }
  pid_t pid_ = -1;
  int status_ = 0;
  End end_ = End::refused;
};

std::uint64_t hash(std::span<const std::byte> bytes) {
  std::uint64_t h = bytes.size();
  for (std::uint64_t at = 0; at + 8 <= bytes.size(); at += 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes.data() + at, 8);
    h = (h ^ word) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 32;
  }
  return h;
}

/// An operation on a store, and the rows that it writes.
struct Scenario {
  const char* name;
  Geometry geometry;
  std::vector<std::uint64_t> row_bytes;
  std::function<void(Store&, const Blocks&)> prepare;
  std::function<void(Store&, const Blocks&)> act;
  bool prefix = false;   // it appends to one lane: what is there of it is a prefix
  bool zeros = false;    // it makes rows live as zeros
  bool empties = false;  // it forgets rows
};

/// A scenario prepared in shared memory, and what the store is before and after it.
struct Stage {
  explicit Stage(const Scenario& scenario)
      : scenario(scenario), pages(1 << 18), blocks(pages.data(), scenario.geometry, scenario.row_bytes) {
    Control::format(blocks.control, scenario.geometry, 0);
    Store store = blocks.open();
    scenario.prepare(store, blocks);
    before.assign(blocks.all.begin(), blocks.all.end());
    scenario.act(store, blocks);  // also resolves every symbol, which would cost thousands of steps
    after.assign(blocks.all.begin(), blocks.all.end());
    restore();
  }
  void restore() { std::memcpy(blocks.all.data(), before.data(), before.size()); }
  Layout over(std::vector<std::byte>& memory) const {
    // Blocks want an alignment that a vector does not give.
    const auto base = reinterpret_cast<std::uintptr_t>(memory.data());
    return Layout(memory.data() + (64 - base % 64) % 64, scenario.geometry, scenario.row_bytes);
  }
  Layout copy_of(std::span<const std::byte> state, std::vector<std::byte>& memory) const {
    memory.resize(state.size() + 64);
    Layout layout = over(memory);
    std::memcpy(layout.all.data(), state.data(), state.size());
    return layout;
  }

  const Scenario& scenario;
  SharedPages pages;
  Layout blocks;
  std::vector<std::byte> before, after;
};

/// Recovers a state somebody died in and checks it against what was before and what would have been after. The row
/// contents that may be found are known by their numbers.
void check_state(const Stage& stage, std::span<const std::byte> state, std::uint64_t* half_written) {
  std::vector<std::byte> memory, old_memory, new_memory;
  const Layout crashed = stage.copy_of(state, memory);
  const Layout old_blocks = stage.copy_of(stage.before, old_memory), new_blocks = stage.copy_of(stage.after, new_memory);
  const Control control = crashed.view(), old_control = old_blocks.view(), new_control = new_blocks.view();
  bool half = false;
  std::uint64_t prefixes = 0;
  for (std::uint64_t row = 0; row < control.capacity(); ++row) {
    half |= state_of(control.word(row).load()) == State::writing && !id_in(crashed, row);
  }
  *half_written += half;
  check_claims(crashed, &prefixes);
  control.recover();
  expect_sound(crashed);
  const std::vector<std::byte> once(crashed.all.begin(), crashed.all.end());
  const auto again = control.recover();
  EXPECT_EQ(again.claims + again.voided + again.gaps, 0u);
  EXPECT(std::equal(once.begin(), once.end(), crashed.all.begin()));

  const std::uint64_t numbers = old_control.counters().next_ticket.load();
  for (std::uint64_t row = 0; row < control.capacity(); ++row) {
    const std::uint64_t was = old_control.word(row).load(), will = new_control.word(row).load();
    const std::uint64_t is = control.word(row).load();
    EXPECT(number_of(is) >= number_of(was));  // numbers only grow
    if (is == was && is_committed(is)) {
      EXPECT(id_in(crashed, row) == id_in(old_blocks, row));
    } else if (is == will && is_committed(is)) {
      EXPECT(id_in(crashed, row) == id_in(new_blocks, row));
    } else if (is_committed(is)) {
      // Between the two: an earlier entry of a row named twice, or zeros below a row not yet written.
      EXPECT(number_of(is) >= numbers && number_of(is) < number_of(will));
      const std::uint64_t id = id_in(crashed, row).value_or(~std::uint64_t{0});
      EXPECT((stage.scenario.zeros && id == 0) || (id >= 0x200 && id < 0x300));
    }
    // A row that the operation does not write is as it was, and no other is lost.
    if (was == will && is_committed(was)) EXPECT_EQ(is, was);
    if (state_of(is) == State::voided && is_committed(was)) EXPECT(number_of(is) >= numbers);
    if (state_of(is) == State::unused && is_committed(was)) EXPECT(stage.scenario.empties);
  }
  expect_usable(crashed);
}

/// Runs an operation an instruction at a time and checks every distinct state. Returns the step at which each began.
std::optional<std::vector<std::uint64_t>> step_through(const Stage& stage) {
  Store store = stage.blocks.open();
  Stepped child([&] { stage.scenario.act(store, stage.blocks); });
  std::set<std::uint64_t> seen;
  std::vector<std::uint64_t> first_steps;
  std::uint64_t steps = 0, half_written = 0;
  const std::span<const std::byte> memory = stage.blocks.all;
  while (child.end() == Stepped::End::running) {
    if (seen.insert(hash(memory)).second) {
      first_steps.push_back(steps);
      check_state(stage, memory, &half_written);
    }
    child.step();
    if (++steps > 200000) break;  // exclusive loads and stores never succeed in single steps
  }
  if (child.end() != Stepped::End::done) return std::nullopt;
  EXPECT(std::equal(memory.begin(), memory.end(), stage.after.begin()));
  std::printf("      %-34s %6llu instructions, %4llu distinct states, %3llu with a row half written\n",
              stage.scenario.name, llu(steps), llu(first_steps.size()), llu(half_written));
  if (stage.scenario.prefix) EXPECT(half_written > 0);
  return first_steps;
}

void fill_lane(Store& store, const Blocks& blocks) { append_ids(store, blocks, 0, 5, 0x100); }

void scatter_ids(Store& store, const Blocks& blocks, const Indices& rows, bool grow) {
  Rows columns(blocks.fields, rows.size());
  for (std::uint64_t i = 0; i < rows.size(); ++i) columns.describe(i, 0x200 + i);
  store.scatter(rows.data(), rows.size(), all_fields(blocks), columns.in, grow);
}

/// A store that somebody left in every way one can leave it.
void leave(Store& store, const Blocks& blocks) {
  fill_lane(store, blocks);
  const Control& control = store.control();
  control.word(1).store(ticket(control.counters().next_ticket.fetch_add(1), State::writing));
  control.word(7).store(ticket(2, State::committed));
  control.word(8).store(ticket(3, State::writing));
  control.lane(1).cursor.fetch_add(2);
  control.participant(0).state = 1;
  control.participant(2).claims[1].t0 = 6;
  control.counters().void_rows = 1;
}

std::vector<Scenario> scenarios() {
  const Geometry one = geometry(1, 4), two = geometry(2, 5);
  const std::vector<std::uint64_t> small{48, 136};
  const auto nothing = [](Store&, const Blocks&) {};
  const auto append = [](std::uint64_t n) {
    return [n](Store& store, const Blocks& blocks) { append_ids(store, blocks, 0, n, 0x200); };
  };
  return {
      {"append the first row", one, small, nothing, append(1), true},
      {"append 1, overwriting", one, small, fill_lane, append(1), true},
      {"append 5 over the wrap", two, small, [](Store& s, const Blocks& b) { append_ids(s, b, 0, 8, 0x100); },
       append(5), true},
      {"append 9 to a lane of 4", one, small, fill_lane, append(9), true},
      {"append 2 over a void row", one, small,
       [](Store& s, const Blocks& b) {
         fill_lane(s, b);
         s.control().word(1).store(ticket(s.control().counters().next_ticket.fetch_add(1), State::writing));
         s.control().recover();
       },
       append(2), true},
      {"append 5 by lane", two, small, [](Store& s, const Blocks& b) { append_ids(s, b, 0, 4, 0x100); },
       [](Store& s, const Blocks& b) {
         Rows rows(b.fields, 5);
         for (std::uint64_t i = 0; i < 5; ++i) rows.describe(i, 0x200 + i);
         const std::int64_t lanes[] = {1, 0, 1, 0, 0};
         s.append_by_lane(lanes, 5, rows.in, nullptr);
       }},
      {"write 3 in place, one twice", two, small, fill_lane,
       [](Store& s, const Blocks& b) { scatter_ids(s, b, {3, 1, 3}, false); }},
      {"write rows 6 and 9, growing", two, small, fill_lane,
       [](Store& s, const Blocks& b) { scatter_ids(s, b, {6, 9}, true); }, false, true},
      {"empty", two, small, [](Store& s, const Blocks& b) { fill_lane(s, b), scatter_ids(s, b, {7}, true); },
       [](Store& s, const Blocks&) { s.control().empty(false); }, false, false, true},
      {"recover", two, small, leave, [](Store& s, const Blocks&) { s.control().recover(); }},
  };
}

TEST(every_instruction_of_every_operation) {
  const auto start = Clock::now();
  std::uint64_t states = 0;
  for (const Scenario& scenario : scenarios()) {
    const Stage stage(scenario);
    const int before = expect::failures;
    const auto steps = step_through(stage);
    if (!steps) {
      std::printf("      skipped: this kernel or processor lets nobody step through a child\n");
      return;
    }
    if (expect::failures != before) std::fprintf(stderr, "  in: %s\n", scenario.name);
    states += steps->size();
  }
  std::printf("      %llu distinct states in all, %.1f s\n", llu(states),
              std::chrono::duration<double>(Clock::now() - start).count());
  EXPECT(states > 100);
}
#endif

}  // namespace
