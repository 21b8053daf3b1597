// Death of one process beside others that go on: writers and a sampler share a store and its priorities; one after the other
// is killed at a random moment, and comes again. The others must hardly notice.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "blocks.h"
#include "core/check.h"
#include "core/participants.h"
#include "core/priorities.h"
#include "core/store.h"
#include "crash.h"
#include "expect.h"

using namespace engram;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

namespace {

// The promise is a second. A machine that is busy with something else may not run a process for as long: a wait that never
// ends is found all the same, and how long it took is printed.
constexpr auto kSoon = 60s;

const Geometry kGeometry = geometry(2, 8);
const std::vector<std::uint64_t> kRowBytes{48, 24000};

/// What the processes tell each other, beside the store.
struct Board {
  Word park;  // whoever sees another number than 0 notes it and waits
  struct Seat {
    Word entry, parked, done;  // its entry of the participants' table + 1; calls that ended
  } seats[4];
  Word torn, drawn, stalled;
  Log logs[4];
};

struct World {
  World()
      : pages(2 << 20),
        board_pages(sizeof(Board)),
        blocks(pages.data(), kGeometry, kRowBytes),
        tree(pages.data() + (1 << 20), Priorities::bytes(kGeometry.capacity, false)),
        alive(std::tmpfile()),
        board(*new (board_pages.data()) Board) {
    format_without_curve(blocks);
    blocks.view().lock_page().pid_namespace = pid_namespace();
    Priorities::format(tree, kGeometry.capacity, {0.5, 1.0, 1e-6, false});
  }
  ~World() { std::fclose(alive); }
  PriorityHeader& header() const { return *reinterpret_cast<PriorityHeader*>(tree.data()); }
  SumTree sums() const { return SumTree(tree.subspan(kPage), kGeometry.capacity, false); }
  /// The thread that holds the tree's mutex, or 0.
  std::uint32_t holder() const {
    std::uint32_t word;
    std::memcpy(&word, reinterpret_cast<const std::byte*>(&header().mutex), sizeof word);
    return word & 0x3FFFFFFF;
  }

  SharedPages pages, board_pages;
  Layout blocks;
  std::span<std::byte> tree;
  std::FILE* alive;
  Board& board;
};

/// What one process has of it. Made after the fork: locks and entries are a process's own.
struct Handle {
  explicit Handle(const World& world)
      : control(world.blocks.view()),
        priorities(world.tree, &control),
        participants(std::make_shared<Participants>(control, fileno(world.alive))),
        store(world.blocks.open()) {
    store.attach(priorities);
    store.join(participants);
  }
  std::uint64_t entry() const {
    for (std::uint64_t i = 0; i < control.participants(); ++i) {
      if (control.participant(i).state != 0 && control.participant(i).pid == static_cast<std::uint32_t>(getpid())) return i;
    }
    return Participants::kNoEntry;
  }
  Control control;
  Priorities priorities;
  std::shared_ptr<Participants> participants;
  Store store;
};

// Between two calls: one more ended, and whoever must waits.
void pause_here(World& world, std::uint64_t seat) {
  Board::Seat& own = world.board.seats[seat];
  ++own.done;
  while (const std::uint64_t park = world.board.park) {
    own.parked = park;
    std::this_thread::yield();
  }
}

[[noreturn]] void write_for_ever(World& world, std::uint64_t seat) {
  Handle handle(world);
  Board& board = world.board;
  Log& log = board.logs[seat];
  board.seats[seat].entry = handle.entry() + 1;
  Rows rows(world.blocks.fields, Log::kMost);
  Dice dice((seat + 1) << 32 | log.begun);
  const auto which = all_fields(world.blocks);
  for (;; pause_here(world, seat)) {
    const std::uint64_t b = log.begun.fetch_add(1), n = dice.in(1, Log::kMost), lane = dice.below(2);
    Log::Batch done{n, 0, id_of_batch(seat + 1, b), {}, Log::kByNumber, {}};
    for (std::uint64_t i = 0; i < n; ++i) rows.describe(i, done.first_id + i);
    try {
      if (dice.below(4) != 0) {
        done.from = handle.control.lane(lane).cursor.load();
        done.t0 = handle.store.append(lane, n, rows.in, done.rows);
      } else {
        done.n = std::min<std::uint64_t>(n, 3);
        for (std::uint64_t i = 0; i < done.n; ++i) {
          done.rows[i] = static_cast<std::int64_t>(dice.below(handle.control.capacity()));
          done.laps[i] = handle.control.lap(static_cast<std::uint64_t>(done.rows[i]));
        }
        const bool grow = dice.below(2) == 0;
        if (!grow) done.lowest = lowest_under_way(handle.control);
        done.t0 = handle.store.scatter(done.rows, done.n, which, rows.in, grow);
        for (std::uint64_t i = 0; !grow && i < done.n; ++i) {  // a row that a death made void meanwhile was passed over
          const std::uint64_t word = handle.control.word(static_cast<std::uint64_t>(done.rows[i]));
          if (number_of(word) < done.t0 + i) done.rows[i] = kPassedOver;
        }
      }
    } catch (const std::out_of_range&) {
      done.n = 0;  // a row was not live
    } catch (const std::exception& error) {
      done.n = 0;
      ++board.stalled;
      std::fprintf(stderr, "a writer: %s\n", error.what());
    }
    log.batches[b % Log::kKept] = done;
    log.acknowledged.store(b + 1);
  }
}

[[noreturn]] void draw_for_ever(World& world, std::uint64_t seat) {
  Handle handle(world);
  Board& board = world.board;
  board.seats[seat].entry = handle.entry() + 1;
  Rows batch(world.blocks.fields, 8);
  Dice dice(board.drawn + 77);
  for (;; pause_here(world, seat)) {
    std::int64_t rows[8], numbers[8];
    double weights[8], values[8];
    try {
      handle.priorities.sample(handle.store, dice.bits(), 8, batch.out, rows, numbers, weights);
      for (std::uint64_t i = 0; i < 8; ++i) {
        board.torn += !batch.id(i) || *batch.id(i) == 0 || numbers[i] < 1 || !(weights[i] > 0 && weights[i] <= 1);
        values[i] = static_cast<double>(dice.in(1, 9));
      }
      board.drawn += 8;
      handle.priorities.update(rows, values, 8, numbers);
      for (std::uint64_t i = dice.below(32); i > 0; --i) handle.priorities.set_alpha(i % 2 == 0 ? 0.5 : 0.75);
    } catch (const NothingLive&) {
    } catch (const std::exception& error) {
      ++board.stalled;
      std::fprintf(stderr, "a sampler: %s\n", error.what());
    }
  }
}

struct Child {
  Child() = default;
  explicit Child(const std::function<void()>& body) {
    pid = fork();
    if (pid != 0) return;
    alarm(280);
    body();
    _exit(0);
  }
  Child(Child&& other) noexcept : pid(std::exchange(other.pid, -1)) {}
  Child& operator=(Child&& other) noexcept {
    std::swap(pid, other.pid);
    return *this;
  }
  ~Child() { die(); }
  void die() {
    if (pid <= 0) return;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    pid = -1;
  }
  void stop() const {
    kill(pid, SIGSTOP);
    waitpid(pid, nullptr, WUNTRACED);
  }
  pid_t pid = -1;
};

template <class Condition>
bool within(Clock::duration time, Condition&& condition) {
  for (const auto until = Clock::now() + time; !condition();) {
    if (Clock::now() > until) return false;
    std::this_thread::sleep_for(50us);
  }
  return true;
}

void check_tree(const World& world) {
  const SumTree sums = world.sums();
  const Control control = world.blocks.view();
  EXPECT(sums.consistent());
  EXPECT_EQ(world.header().redo.load(), 0u);
  for (std::uint64_t row = 0; row < control.capacity(); ++row) {
    EXPECT_EQ(sums.leaf(row) > 0, is_committed(control.word(row).load()));
  }
}

std::uint64_t claims_in(const Participant& entry) {
  return static_cast<std::uint64_t>(
      std::count_if(std::begin(entry.claims), std::end(entry.claims), [](const Claim& claim) { return claim.t0 != 0; }));
}

/// Rows that a participant was writing when it was stopped.
std::uint64_t rows_half_written(const Control& control, const Participant& by) {
  std::uint64_t found = 0;
  for (const Claim& claim : by.claims) {
    const std::uint64_t t0 = claim.t0;
    if (t0 == 0 || t0 == kNoted) continue;
    for (std::uint64_t row = 0; row < kGeometry.capacity; ++row) {
      const std::uint64_t word = control.word(row);
      found += state_of(word) == State::writing && number_of(word) - t0 < claim.n;
    }
  }
  return found;
}

/// What must hold of all that participants share, once a dead one was recovered.
void check_recovered(const World& world, const Handle& here, std::uint64_t deaths) {
  for (std::uint64_t i = 0; i < 16; ++i) EXPECT_EQ(claims_in(here.control.participant(i)), 0u);
  expect_sound_rows(world.blocks, deaths);
  check_tree(world);
  for (const Log& one : world.board.logs) check_log(world.blocks, one);
}

TEST(others_go_on_when_one_is_killed) {
  World world;
  Board& board = world.board;
  Handle here(world);
  constexpr std::uint64_t kSeats = 4, kSampler = 3;
  Child children[kSeats];
  const auto seat = [&](std::uint64_t s) {
    board.seats[s].entry = 0;
    const std::uint64_t before = board.seats[s].done;
    children[s] = Child([&] { s == kSampler ? draw_for_ever(world, s) : write_for_ever(world, s); });
    EXPECT(within(kSoon, [&] { return board.seats[s].done > before; }));
  };
  for (std::uint64_t s = 0; s < kSeats; ++s) seat(s);
  Dice dice(static_cast<std::uint64_t>(getpid()));
  std::uint64_t rounds = 0, claiming = 0, writing = 0, holding = 0, samplers = 0, left_to_others = 0;
  Clock::duration longest{};
  const auto start = Clock::now();
  // At least for a while, and until each way to die was met: on a busy machine that may take longer.
  const auto enough = [&] { return rounds >= 100 && claiming > 0 && writing > 0 && holding > 0 && Clock::now() >= start + 4s; };
  while (!enough() && Clock::now() < start + 120s && expect::failures == 0) {
    ++rounds;
    std::this_thread::sleep_for(std::chrono::microseconds(dice.below(1500)));
    const std::uint64_t victim = dice.below(3) == 0 ? kSampler : dice.below(kSampler);
    const std::uint64_t entry = board.seats[victim].entry - 1;
    // Stopped, looked at, killed: it dies where it was stopped.
    children[victim].stop();
    const Participant& its = here.control.participant(entry);
    claiming += claims_in(its) > 0;
    holding += world.holder() == static_cast<std::uint32_t>(children[victim].pid);
    samplers += victim == kSampler;
    writing += rows_half_written(here.control, its);
    std::uint64_t before[kSeats];
    for (std::uint64_t s = 0; s < kSeats; ++s) before[s] = board.seats[s].done;
    children[victim].die();
    const auto died = Clock::now();
    // Two more calls each: the first may have been about to end.
    EXPECT(within(kSoon, [&] {
      for (std::uint64_t s = 0; s < kSeats; ++s) {
        if (s != victim && board.seats[s].done < before[s] + 2) return false;
      }
      return true;
    }));
    longest = std::max(longest, Clock::now() - died);
    if (rounds % 16 == 0) {  // others find the entry, too
      EXPECT(within(kSoon, [&] { return its.state == 0; }));
      ++left_to_others;
    }
    board.park = rounds;
    EXPECT(within(kSoon, [&] {
      for (std::uint64_t s = 0; s < kSeats; ++s) {
        if (s != victim && board.seats[s].parked != rounds) return false;
      }
      return true;
    }));
    here.store.reclaim();
    here.priorities.total();
    EXPECT_EQ(its.state.load(), 0u);
    check_recovered(world, here, rounds);
    Log& log = board.logs[victim];
    if (victim != kSampler && log.begun != log.acknowledged) {  // the batch in which it died promises nothing
      log.batches[log.acknowledged % Log::kKept].n = 0;
      log.acknowledged.store(log.begun);
    }
    EXPECT_EQ(board.torn.load(), 0u);
    EXPECT_EQ(board.stalled.load(), 0u);
    board.park = 0;
    seat(victim);
  }
  std::uint64_t voided = 0;
  for (std::uint64_t row = 0; row < kGeometry.capacity; ++row) {
    voided += state_of(here.control.word(row)) == State::voided;
  }
  std::printf("      %llu deaths, %llu of samplers, %llu inside a claim, with %llu rows half written, %llu holding the mutex; "
              "%llu left to the others\n",
              llu(rounds), llu(samplers), llu(claiming), llu(writing), llu(holding), llu(left_to_others));
  std::printf("      the others went on within %.1f ms; %llu rows drawn; %llu void rows too many\n",
              std::chrono::duration<double, std::milli>(longest).count(), llu(board.drawn),
              llu(here.control.counters().void_rows - voided));
  EXPECT(rounds >= 50);
  EXPECT(claiming > 0);
  EXPECT(writing > 0);
  EXPECT(holding > 0);
}

void fill(Handle& handle, const World& world) {
  for (const std::uint64_t lane : {0, 1}) append_ids(handle.store, world.blocks, lane, 8, 0x100 + lane * 16);
}

// A change of a leaf that ends nowhere.
void begin_a_change(const World& world) {
  (void)world.header().mutex.lock();
  world.header().redo = 1;
  world.sums().put(3, 1e6);
}

// Marks a row, and copies half of it.
void begin_a_write(const World& world, Handle& handle, std::uint64_t row) {
  const std::uint64_t t0 = handle.control.counters().next_ticket.fetch_add(1);
  Claim& claim = handle.control.participant(handle.entry()).claims[1];
  claim.n = 1, claim.lane = -1, claim.p0 = 0, claim.t0 = t0;
  handle.control.word(row) = ticket(t0, State::writing);
  std::memset(world.blocks.fields[1].data + row * world.blocks.fields[1].row_bytes, 0xAB, 100);
}

TEST(who_dies_holding_the_mutex_or_a_row_is_replaced_at_once) {
  World world;
  Handle here(world);
  fill(here, world);
  for (std::uint64_t round = 0; round < 20; ++round) {
    const bool holds = round % 2 == 0, writes = round % 4 != 0;
    Child child([&] {
      Handle handle(world);
      if (writes) begin_a_write(world, handle, 5);
      if (holds) begin_a_change(world);
      kill(getpid(), SIGKILL);
    });
    waitpid(child.pid, nullptr, 0);
    child.pid = -1;
    const auto start = Clock::now();
    if (holds) {
      EXPECT(here.priorities.total() > 1e6);  // the leaf was set; what is above it follows
      EXPECT(world.sums().consistent());
    }
    if (writes) {
      Rows rows(world.blocks.fields, 1);
      rows.describe(0, 0x500 + round);
      const std::int64_t row = 5;
      if (round % 8 > 4) {
        // A part of it: nothing may come of that, the rest of the row is torn.
        const std::uint64_t first[] = {0};
        try {
          here.store.scatter(&row, 1, first, Columns(rows.in).first(1), false);
        } catch (const std::out_of_range&) {  // a look after dead processes has made it void
        }
        EXPECT(state_of(here.control.word(5)) == State::voided);
      }
      EXPECT(Clock::now() < start + 30s);
      here.store.scatter(&row, 1, all_fields(world.blocks), rows.in, true);
      EXPECT_EQ(id_in(world.blocks, 5).value_or(0), 0x500 + round);
    }
    EXPECT(Clock::now() < start + 30s);
    here.store.reclaim();
    expect_sound_rows(world.blocks);
    check_tree(world);
    const std::int64_t three = 3;
    const double two = 2;
    here.priorities.update(&three, &two, 1, nullptr);
  }
}

TEST(who_waits_for_the_mutex_and_is_not_woken_wakes_up) {
  const World world;
  SharedMutex& mutex = world.header().mutex;
  Child holder([&] {
    (void)mutex.lock();
    for (;;) pause();
  });
  EXPECT(within(kSoon, [&] { return world.holder() != 0; }));
  std::atomic<bool> got{false};
  std::thread waiter([&] {
    EXPECT(!mutex.lock());
    mutex.unlock();
    got = true;
  });
  std::this_thread::sleep_for(20ms);
  EXPECT(!got);
  const std::uint32_t free = 0;  // as if it had been let go, and whoever was woken first had died
  std::memcpy(reinterpret_cast<std::byte*>(&mutex), &free, sizeof free);
  EXPECT(within(kSoon, [&] { return got.load(); }));
  waiter.join();
}

TEST(who_is_stopped_costs_the_others_an_error_and_tears_nothing_later) {
  World world;
  Handle here(world);
  fill(here, world);
  Word& ready = world.board.torn;
  Child child([&] {
    Handle handle(world);
    begin_a_write(world, handle, 5);
    begin_a_change(world);
    ready = 1;
    raise(SIGSTOP);
    world.sums().put(3, 4);
    world.header().redo = 1;  // whoever comes next computes what is above
    world.header().mutex.unlock();
    for (const Field& field : world.blocks.fields) describe(field.data + 5 * field.row_bytes, field.row_bytes, 0x777);
    handle.control.word(5) = ticket(number_of(handle.control.word(5)), State::committed);
    handle.control.participant(handle.entry()).claims[1].t0 = 0;
    ready = 2;
    for (;;) pause();
  });
  waitpid(child.pid, nullptr, WUNTRACED);
  EXPECT_EQ(ready.load(), 1u);
  EXPECT_EQ(here.store.reclaim(), 0u);
  const Impatient impatient(600ms);
  const auto start = Clock::now();
  std::thread drawer([&] { EXPECT_THROWS(Stalled, here.priorities.total()); });
  Rows rows(world.blocks.fields, 1);
  rows.describe(0, 0x500);
  const std::int64_t row = 5;
  EXPECT_THROWS(Stalled, here.store.scatter(&row, 1, all_fields(world.blocks), rows.in, false));
  drawer.join();
  EXPECT(Clock::now() > start + 600ms && Clock::now() < start + 30s);
  Rows other(world.blocks.fields, 1);
  const std::int64_t beside = 6;
  EXPECT(here.store.gather(&beside, 1, here.store.all(), other.out, nullptr, nullptr).empty());  // other rows are read
  EXPECT_EQ(here.store.reclaim(), 0u);
  kill(child.pid, SIGCONT);
  EXPECT(within(kSoon, [&] { return ready == 2; }));
  here.priorities.total();
  EXPECT_EQ(id_in(world.blocks, 5).value_or(0), 0x777u);
  expect_sound_rows(world.blocks);
  check_tree(world);
  child.die();
  EXPECT_EQ(here.store.reclaim(), 1u);
}

}  // namespace
