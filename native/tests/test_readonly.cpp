// A store in memory that is mapped without the right to write: whatever wrote to it there would end the process.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <new>
#include <set>
#include <thread>
#include <vector>

#include "blocks.h"
#include "core/check.h"
#include "core/priorities.h"
#include "core/store.h"
#include "core/trajectories.h"
#include "expect.h"

using namespace engram;

namespace {

constexpr std::uint64_t kPages = 1 << 20;

/// The same memory twice: for those that write, and for one that may not.
class Twice {
 public:
  Twice() : file_(memfd_create("readonly", 0)) {
    if (file_ < 0 || ftruncate(file_, kPages) != 0) throw std::bad_alloc();
    written = map(PROT_READ | PROT_WRITE);
    read = map(PROT_READ);
  }
  ~Twice() {
    munmap(written, kPages);
    munmap(read, kPages);
    close(file_);
  }
  Twice(const Twice&) = delete;
  Twice& operator=(const Twice&) = delete;
  std::byte *written, *read;

 private:
  std::byte* map(int protection) const {
    void* p = mmap(nullptr, kPages, protection, MAP_SHARED, file_, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    return static_cast<std::byte*>(p);
  }
  int file_;
};

struct World {
  World(Geometry g, const std::vector<std::uint64_t>& row_bytes)
      : theirs(pages.written, g, row_bytes), ours(pages.read, g, row_bytes) {
    format_without_curve(theirs);
  }
  Store reader(bool abandoned = false) const {
    Control control = ours.view();
    control.only_read(abandoned);
    return Store(control, ours.fields, 0);
  }
  Twice pages;
  Layout theirs, ours;
};

void append(Store& store, const Blocks& blocks, std::uint64_t lane, std::uint64_t first_id, std::uint64_t n) {
  Rows rows(blocks.fields, n);
  for (std::uint64_t i = 0; i < n; ++i) rows.describe(i, first_id + i);
  store.append(lane, n, rows.in, nullptr);
}

std::set<std::int64_t> drawn(const Store& store, const Blocks& blocks) {
  constexpr std::uint64_t n = 400;
  Rows rows(blocks.fields, n);
  std::vector<std::int64_t> found(n);
  store.sample_uniform(7, n, rows.out, found.data(), nullptr);
  for (std::uint64_t i = 0; i < n; ++i) EXPECT(rows.id(i).has_value());
  return {found.begin(), found.end()};
}

/// What a process leaves that is killed: row 2 is being edited, row 5 was reserved and never begun.
void leave_behind(Store& store, const Blocks& blocks) {
  append(store, blocks, 0, 1, 5);
  const Control& control = store.control();
  control.reserve(0, 1);
  control.word(2).store(ticket(control.counters().next_ticket.fetch_add(1), State::writing));
  ClaimGuard(control.participant(0)).note(control.counters().next_ticket.load() - 1, 1, -1, 0);
}

}  // namespace

TEST(every_write_is_refused_and_changes_nothing) {
  World world(geometry(2, 8), {64});
  Store store = world.theirs.open(0);
  append(store, world.theirs, 0, 1, 3);
  Store reader = world.reader();
  const std::vector<std::byte> before(world.pages.written, world.pages.written + kPages);
  Rows rows(world.ours.fields, 1);
  rows.describe(0, 9);
  const std::int64_t row = 0, lane = 1;
  const std::uint64_t which[] = {0};
  EXPECT_THROWS(ReadOnly, reader.append(0, 1, rows.in, nullptr));
  EXPECT_THROWS(ReadOnly, reader.append_by_lane(&lane, 1, rows.in, nullptr));
  EXPECT_THROWS(ReadOnly, reader.scatter(&row, 1, which, rows.in, true));
  EXPECT_THROWS(ReadOnly, reader.scatter(&row, 1, which, rows.in, false));
  EXPECT_THROWS(ReadOnly, reader.scatter(&row, 0, which, rows.in, true));
  EXPECT_THROWS(ReadOnly, reader.empty(false));
  EXPECT_THROWS(ReadOnly, reader.pause());
  EXPECT_THROWS(ReadOnly, reader.begin_pause());
  EXPECT_THROWS(ReadOnly, reader.begin_placing());
  EXPECT_THROWS(ReadOnly, reader.begin_replacing(false));
  EXPECT_THROWS(ReadOnly, reader.replaced(1, nullptr, nullptr));
  EXPECT_THROWS(ReadOnly, reader.recover());
  EXPECT_THROWS(ReadOnly, reader.join(nullptr));
  EXPECT_THROWS(ReadOnly, reader.control().writable());
  EXPECT_EQ(reader.reclaim(), 0u);
  EXPECT((before == std::vector<std::byte>(world.pages.written, world.pages.written + kPages)));
}

TEST(rows_of_a_writer_appear_and_none_is_torn) {
  World world(geometry(1, 64), {1024, 64});
  Store store = world.theirs.open(0);
  const Store reader = world.reader();
  EXPECT_EQ(reader.control().size(), 0u);
  append(store, world.theirs, 0, 1, 3);
  EXPECT_EQ(reader.control().size(), 3u);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (std::uint64_t id = 100; !stop; id += 7) append(store, world.theirs, 0, id, 7);
  });
  for (int round = 0; round < 50; ++round) drawn(reader, world.ours);
  stop = true;
  writer.join();
  EXPECT_EQ(store.control().redraws(), 0u);  // the reader counts its own
}

TEST(what_the_dead_left_behind_holds_nothing) {
  World world(geometry(1, 8), {64});
  Store store = world.theirs.open(0);
  leave_behind(store, world.theirs);
  const Store reader = world.reader(true);
  const std::set<std::int64_t> whole{0, 1, 3, 4};
  EXPECT_EQ(reader.control().size(), 4u);
  EXPECT_EQ(reader.control().void_rows(), 2u);
  EXPECT((drawn(reader, world.ours) == whole));
  Rows rows(world.ours.fields, 4);
  std::vector<std::int64_t> ranks{0, 1, 2, 3};
  reader.read_ranked(ranks.data(), 4, rows.out, nullptr);
  EXPECT((std::set<std::int64_t>(ranks.begin(), ranks.end()) == whole));
  EXPECT(reader.control().left_behind(2, reader.control().word(2).load()));
  EXPECT(!reader.control().left_behind(3, reader.control().word(3).load()));
  // The next one to open the store recovers it, and writes on: the reader sees what that one does.
  store.recover();
  EXPECT_EQ(reader.control().size(), 4u);
  append(store, world.theirs, 0, 50, 8);
  EXPECT_EQ(reader.control().size(), 8u);
  EXPECT_EQ(drawn(reader, world.ours).size(), 8u);
}

TEST(rows_that_are_being_written_are_waited_for_beside_the_living) {
  World world(geometry(1, 8), {64});
  Store store = world.theirs.open(0);
  leave_behind(store, world.theirs);
  const Store reader = world.reader(false);
  EXPECT_EQ(reader.control().size(), 6u);
  EXPECT(!reader.control().left_behind(2, reader.control().word(2).load()));
}

TEST(nothing_is_left_behind_by_a_store_that_was_closed) {
  World world(geometry(1, 8), {64});
  Store store = world.theirs.open(0);
  append(store, world.theirs, 0, 1, 5);
  store.control().reserve(0, 1);
  store.control().lock_page().clean.store(1);
  EXPECT_EQ(world.reader(true).control().size(), 6u);
}

TEST(a_lone_torn_row_does_not_make_draws_wait) {
  World world(geometry(1, 8), {64});
  Store store = world.theirs.open(0);
  append(store, world.theirs, 0, 1, 1);
  store.control().word(0).store(ticket(1, State::writing));
  const Store reader = world.reader(true);
  Rows rows(world.ours.fields, 1);
  const auto begun = std::chrono::steady_clock::now();
  EXPECT_THROWS(NothingLive, reader.sample_uniform(7, 1, rows.out, nullptr, nullptr));
  EXPECT(std::chrono::steady_clock::now() - begun < wait_limit.load());
}

TEST(trajectories_end_where_the_dead_left_a_row) {
  World world(geometry(1, 8), {8, 1});
  Store store = world.theirs.open(0);
  std::vector<std::uint64_t> ids(5, 3);
  std::vector<std::byte> done(5);
  const std::byte* columns[] = {reinterpret_cast<const std::byte*>(ids.data()), done.data()};
  store.append(0, 5, columns, nullptr);
  store.control().word(2).store(ticket(9, State::writing));
  store.control().reserve(0, 1);
  const auto longest = [&](const Store& from) {
    std::vector<std::uint64_t> memory(Trajectories::bytes(1, 8, 1) / 8);
    Trajectories table(from.control(), {true, {world.ours.fields[0]}, {0}}, 1, 1,
                       {reinterpret_cast<std::byte*>(memory.data()), memory.size() * 8});
    const std::int64_t rows[] = {0, 1, 2, 3, 4, 5};
    return table.window_lengths(rows, 6, {5, 0, 0, false});
  };
  EXPECT((longest(world.reader(true)) == std::vector<std::uint64_t>{2, 0, 0, 2, 0, 0}));
  EXPECT((longest(world.reader(false)) == std::vector<std::uint64_t>{2, 0, 0, 0, 0, 0}));  // its writer comes
}

TEST(priorities_are_copied_from_memory_that_may_not_be_written_to) {
  World world(geometry(1, 8), {8});
  const std::uint64_t bytes = Priorities::bytes(8, false), at = (kPages - bytes) / 4096 * 4096;
  Priorities::format({world.pages.written + at, bytes}, 8, {1, 1, 0, false});
  Store store = world.theirs.open(0);
  const Control control = store.control();
  Priorities theirs({world.pages.written + at, bytes}, &control);
  store.attach(theirs);
  append(store, world.theirs, 0, 1, 4);
  const std::int64_t rows[] = {1};
  const double priority[] = {5};
  theirs.update(rows, priority, 1, nullptr);
  const Store reader = world.reader();
  const Twice memory;
  const std::span<std::byte> copy(memory.written, bytes);
  Priorities::copy({world.pages.read + at, bytes}, copy);
  Priorities ours(copy, &reader.control());
  EXPECT_EQ(ours.total(), 8.0);
  EXPECT_EQ(ours.leaf(1), 5.0);
  const double less[] = {2};
  ours.update(rows, less, 1, nullptr);
  EXPECT_EQ(theirs.leaf(1), 5.0);
  EXPECT_EQ(ours.leaf(1), 2.0);
  // The store is emptied: the copy does not hear of it.
  store.empty(false);
  Rows out(world.ours.fields, 1);
  std::int64_t row = 0, number = 0;
  double weight = 0;
  EXPECT_THROWS(NothingLive, ours.sample(reader, 3, 1, out.out, &row, &number, &weight));
}

TEST(priorities_whose_alpha_is_being_changed_are_copied_once_that_is_over) {
  const Twice memory, copied;
  const std::uint64_t bytes = Priorities::bytes(64, false);
  Priorities::format({memory.written, bytes}, 64, {1, 1, 0, false});
  Priorities theirs({memory.written, bytes}, nullptr);
  std::vector<std::int64_t> rows(64);
  std::vector<double> priorities(64, 4.0);
  for (std::int64_t i = 0; i < 64; ++i) rows[static_cast<std::size_t>(i)] = i;
  theirs.update(rows.data(), priorities.data(), 64, nullptr);
  std::atomic<bool> stop{false};
  std::thread annealing([&] {
    for (double alpha = 0.999; !stop; alpha *= 0.999) theirs.set_alpha(alpha);  // never one that there was before
  });
  for (int round = 0; round < 200; ++round) {
    Priorities::copy({memory.read, bytes}, {copied.written, bytes});
    Priorities ours({copied.written, bytes}, nullptr);
    std::vector<double> leaves(64);
    ours.copy_leaves(leaves.data(), 64, false);
    for (const double leaf : leaves) EXPECT_EQ(leaf, leaves[0]);
  }
  stop = true;
  annealing.join();
}
