// What tests of death share: rows that tell who wrote them, what holds of a store after a recovery, what a writer promised,
// and a child that runs an instruction at a time.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
#include <sys/ptrace.h>
#include <sys/user.h>
#define ENGRAM_CAN_STEP 1
#endif

#include "blocks.h"
#include "core/control.h"
#include "core/store.h"
#include "expect.h"

using namespace engram;

using Indices = std::vector<std::int64_t>;

inline unsigned long long llu(std::uint64_t n) { return n; }

inline std::vector<std::uint64_t> all_fields(const Blocks& blocks) {
  std::vector<std::uint64_t> which(blocks.fields.size());
  std::iota(which.begin(), which.end(), std::uint64_t{0});
  return which;
}

/// The id that a row carries in every field of the store, whatever its ticket says; none if it is torn.
inline std::optional<std::uint64_t> id_in(const Blocks& blocks, std::uint64_t row) {
  std::optional<std::uint64_t> id;
  for (const Field& field : blocks.fields) {
    const auto found = id_of(field.data + row * field.row_bytes, field.row_bytes);
    if (!found || (id && *id != *found)) return std::nullopt;
    id = found;
  }
  return id;
}

inline void append_ids(Store& store, const Blocks& blocks, std::uint64_t lane, std::uint64_t n, std::uint64_t first_id) {
  Rows rows(blocks.fields, n);
  for (std::uint64_t i = 0; i < n; ++i) rows.describe(i, first_id + i);
  store.append(lane, n, rows.in, nullptr);
}

/// What holds of the rows of every store that nobody writes and no dead one was left in. `too_many`: so many void rows more
/// may be counted than there are, because somebody died between counting one and making it void, or the reverse.
inline void expect_sound_rows(const Blocks& blocks, std::uint64_t too_many = 0) {
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
  const std::uint64_t counted = control.counters().void_rows;
  EXPECT(counted >= voided && counted <= voided + too_many);
  EXPECT_EQ(control.size(), live + voided - std::min(live + voided, counted));
}

/// What holds of every store after a recovery, whatever happened to it before.
inline void expect_sound(const Blocks& blocks, std::uint64_t too_many = 0) {
  expect_sound_rows(blocks, too_many);
  const Control control = blocks.view();
  for (std::uint64_t p = 0; p < 4; ++p) {
    EXPECT_EQ(control.participant(p).state.load(), 0u);
    for (const Claim& claim : control.participant(p).claims) EXPECT_EQ(claim.t0.load(), 0u);
  }
}

/// Stands for a row that an edit passed over.
constexpr std::int64_t kPassedOver = -1;

/// What a writer promises to have written, in memory that survives it.
struct Log {
  static constexpr std::uint64_t kKept = 64, kMost = 8;
  struct Batch {
    std::uint64_t n, t0, first_id;
    std::int64_t rows[kMost];
    std::uint64_t from;  // of rows of a ring: their positions are not below; else kByNumber
    std::uint32_t laps[kMost];  // of rows by number: before they were written
    std::uint64_t lowest = kNoted;  // of an edit: number of another one that may come to its rows later, but not of an earlier one
  };
  static constexpr std::uint64_t kByNumber = ~std::uint64_t{0};
  Word begun, acknowledged;
  Batch batches[kKept];
};

inline std::uint64_t id_of_batch(std::uint64_t writer, std::uint64_t batch) { return writer << 56 | batch << 8; }

/// Whether a ring may have come round to a row again since it was written at a position not below `from`; by number, since its
/// lap was `lap`: then the position may have been reserved before.
inline bool lapped(const Blocks& blocks, std::uint64_t row, std::uint64_t from, std::uint32_t lap) {
  if (from == Log::kByNumber) return blocks.view().lap(row).load() > lap;
  const Control control = blocks.view();
  const std::uint64_t length = control.lane_length(), step = row % length;
  const std::uint64_t first = from + (step + length - from % length) % length;
  return control.lane(row / length).cursor.load() > first + length;
}

/// The smallest number of the writes that are under way, and of all that begin later. To be asked before the caller's own.
inline std::uint64_t lowest_under_way(const Control& control) {
  std::uint64_t lowest = control.counters().next_ticket.load();
  for (std::uint64_t p = 0; p < control.participants(); ++p) {
    for (const Claim& claim : control.participant(p).claims) {
      const std::uint64_t t0 = claim.t0.load();
      if (t0 != 0) lowest = std::min(lowest, t0 == kNoted ? 0 : t0);
    }
  }
  return lowest;
}

/// Acknowledged rows are there, whole, or were displaced: by one of a larger number, by one of a ring that is a lap ahead, whose
/// number may be smaller, or an edit by another edit that was under way with it.
inline void check_log(const Blocks& blocks, const Log& log) {
  const Control control = blocks.view();
  const std::uint64_t last = log.acknowledged, first = last < Log::kKept ? 0 : last - (Log::kKept - 1);
  for (std::uint64_t b = first; b < last; ++b) {
    const Log::Batch& done = log.batches[b % Log::kKept];
    for (std::uint64_t i = 0; i < done.n; ++i) {
      if (done.rows[i] == kPassedOver) continue;
      const auto row = static_cast<std::uint64_t>(done.rows[i]);
      const std::uint64_t word = control.word(row).load(), number = number_of(word);
      EXPECT(number >= std::min(done.t0 + i, done.lowest) || lapped(blocks, row, done.from, done.laps[i]));
      if (number != done.t0 + i) continue;
      EXPECT(is_committed(word));
      EXPECT_EQ(id_in(blocks, row).value_or(0), done.first_id + i);
    }
  }
}

/// Before the recovery: whoever is in the middle of a write has said so, and has written a prefix of it.
inline void check_claims(const Blocks& blocks, std::uint64_t* prefixes) {
  const Control control = blocks.view();
  for (std::uint64_t row = 0; row < control.capacity(); ++row) {
    const std::uint64_t word = control.word(row).load();
    if (state_of(word) != State::writing) continue;
    bool claimed = false;
    for (std::uint64_t p = 0; p < 4; ++p) {
      for (const Claim& claim : control.participant(p).claims) {
        const std::uint64_t t0 = claim.t0.load();
        claimed |= t0 != 0 && claim.lane > kEmptying && number_of(word) - t0 < claim.n;
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
    kill();
  }
  Stepped(const Stepped&) = delete;
  Stepped& operator=(const Stepped&) = delete;

  End end() const { return end_; }

  void kill() {
    if (WIFEXITED(status_) || WIFSIGNALED(status_)) return;
    ::kill(pid_, SIGKILL);
    wait();
  }

  /// One instruction.
  End step() {
    if (ptrace(PTRACE_SINGLESTEP, pid_, nullptr, nullptr) != 0 || !wait() || !WIFSTOPPED(status_)) {
      return end_ = End::refused;
    }
    if (WSTOPSIG(status_) == SIGSTOP) end_ = End::done;
    return end_;
  }

  /// The instruction that comes next; 0 where nobody here knows how to ask.
  std::uint64_t at() const {
#ifdef __x86_64__
    user_regs_struct registers{};
    ptrace(PTRACE_GETREGS, pid_, nullptr, &registers);
    return registers.rip;
#else
    return 0;
#endif
  }

  /// On to step `step` of a run whose instructions were noted. A single step takes long, so one stops where it wants to be.
  End go_to(const std::vector<std::uint64_t>& instructions, std::uint64_t step) {
#ifdef __x86_64__
    const std::uint64_t there = instructions[step];
    const auto begin = instructions.begin(), end = begin + static_cast<std::ptrdiff_t>(step) + 1;
    auto* const address = reinterpret_cast<void*>(there);
    const long code = ptrace(PTRACE_PEEKTEXT, pid_, address, nullptr);
    for (auto times = std::count(begin, end, there); step > 0 && times > 0; --times) {
      ptrace(PTRACE_POKETEXT, pid_, address, reinterpret_cast<void*>((code & ~0xFFL) | 0xCC));  // int3
      ptrace(PTRACE_CONT, pid_, nullptr, nullptr);
      if (!wait() || !WIFSTOPPED(status_) || WSTOPSIG(status_) != SIGTRAP) return end_ = End::refused;
      user_regs_struct registers{};
      ptrace(PTRACE_GETREGS, pid_, nullptr, &registers);
      registers.rip = there;
      ptrace(PTRACE_SETREGS, pid_, nullptr, &registers);
      ptrace(PTRACE_POKETEXT, pid_, address, reinterpret_cast<void*>(code));
      if (times > 1 && this->step() != End::running) return end_;
    }
#else
    (void)instructions;
    for (std::uint64_t i = 0; i < step && this->step() == End::running; ++i) {
    }
#endif
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

/// Where a process died: in which operation, whether behind its last instruction, and whether no other process was left.
struct Death {
  std::size_t operation;
  bool done, alone;
};

/// Each operation is done by a `Process`, a user of a store with an index, that is killed before an instruction: before the first, the
/// `step`-th one after that, and so on to the end. `make` makes the memory, `before` gets it ready, `after` looks at what the next process
/// finds that recovers the rows. Prints how many died, of which there must be more than 50. False: no process may be stepped here.
template <class Process, class Make, class Before, class After>
bool die_everywhere(const std::vector<std::function<void(Process&)>>& operations, const std::function<std::uint64_t(std::size_t)>& step,
                    Make&& make, Before&& before, After&& after) {
  std::uint64_t deaths = 0;
  for (std::size_t which = 0; which < operations.size(); ++which) {
    bool done = false;
    for (std::uint64_t instructions = 0; !done; instructions += step(which)) {
      const auto shared = make();
      {
        Process first(shared);
        before(first, which);
      }
      Process dying(shared);
      Stepped::End end;
      {
        Stepped child([&] { operations[which](dying); });
        if (child.end() == Stepped::End::refused) return false;
        end = Stepped::End::running;
        for (std::uint64_t i = 0; i < instructions && end == Stepped::End::running; ++i) end = child.step();
      }  // dies here
      if (end == Stepped::End::refused) return false;
      done = end == Stepped::End::done;
      const bool alone = deaths++ % 2 == 0;
      if (alone) decltype(dying.index)::reset_mutex(shared.index());
      Process next(shared, 1);
      next.store.recover();
      after(next, Death{which, done, alone});
    }
  }
  std::printf("    %llu deaths\n", llu(deaths));
  EXPECT(deaths > 50);
  return true;
}

#endif

/// The first and the last step in each of the states that begin at given steps.
inline std::vector<std::uint64_t> begins_and_ends(const std::vector<std::uint64_t>& begins) {
  std::vector<std::uint64_t> steps;
  for (std::size_t i = 0; i < begins.size(); ++i) {
    steps.push_back(begins[i]);
    if (i + 1 < begins.size() && begins[i + 1] > begins[i] + 1) steps.push_back(begins[i + 1] - 1);
  }
  return steps;
}

/// Of whole words, after `before`.
inline std::uint64_t hash_of(std::span<const std::byte> bytes, std::uint64_t before = 0) {
  std::uint64_t h = before;
  for (std::uint64_t at = 0; at + 8 <= bytes.size(); at += 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes.data() + at, 8);
    h = (h ^ word) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 32;
  }
  return h;
}
