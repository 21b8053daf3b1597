// Requests for positions of a lane that are repeated: by another process, after a death at any instruction of the first one or of the
// one that repeats it, or beside a first one that was only stopped. The rows are there once, in order, and indexes know them.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "blocks.h"
#include "core/store.h"
#include "core/trajectories.h"
#include "crash.h"
#include "expect.h"
#include "stress.h"

using namespace engram;
using namespace std::chrono_literals;

namespace {

constexpr std::uint64_t kLanes = 2, kLength = 5, kRows = kLanes * kLength;
const std::vector<std::uint64_t> kRowBytes{16, 40};

/// The id of the row at a position of lane 0.
std::uint64_t id_at(std::uint64_t position) { return 0x100 + position; }

struct Request {
  std::uint64_t position, n;

  std::uint64_t run(Store& store, const Rows& rows, std::int64_t* rows_out = nullptr) const {
    return store.append_at(0, position, n, rows.in, rows_out);
  }
  std::unique_ptr<Rows> rows(const Blocks& blocks) const {
    auto made = std::make_unique<Rows>(blocks.fields, n);
    for (std::uint64_t i = 0; i < n; ++i) made->describe(i, id_at(position + i));
    return made;
  }
};

/// Counts, for all processes, how often it is told of a row that is what it was told.
struct Told : Index {
  struct Counts {
    Word of[kRows];
  };
  Told(Control control, Counts& counts) : control(control), counts(counts) {}
  void written(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0) override {
    for (std::uint64_t i = 0; i < n; ++i) {
      const auto row = static_cast<std::uint64_t>(rows[i]);
      if (control.word(row).load() == ticket(t0 + i, State::committed)) ++counts.of[row];
    }
  }
  void edited(const std::int64_t*, std::uint64_t, std::uint64_t, std::span<const std::uint64_t>, std::uint64_t) override {}
  void lost(const std::int64_t*, std::uint64_t) override {}
  void emptied() override {}
  Control control;
  Counts& counts;
};

/// A store with rows at the first positions of lane 0, and what its indexes were told.
struct World {
  explicit World(std::uint64_t before)
      : pages(1 << 18), told_pages(sizeof(Told::Counts)), blocks(pages.data(), geometry(kLanes, kLength), kRowBytes),
        told(*reinterpret_cast<Told::Counts*>(told_pages.data())) {
    format_without_curve(blocks);
    Process first(*this, 3);
    for (std::uint64_t position = 0; position < before; position += 3) {
      const Request request{position, std::min<std::uint64_t>(3, before - position)};
      request.run(first.store, *request.rows(blocks));
    }
    state.assign(pages.data(), pages.data() + (1 << 18));
    told_state.assign(told_pages.data(), told_pages.data() + sizeof(Told::Counts));
  }
  void restore() {
    std::memcpy(pages.data(), state.data(), state.size());
    std::memcpy(told_pages.data(), told_state.data(), told_state.size());
  }

  /// What one process has of it.
  struct Process {
    Process(const World& world, std::uint64_t participant)
        : told(world.blocks.view(), world.told), store(world.blocks.open(participant)) {
      store.attach(told);
    }
    Told told;
    Store store;
  };

  SharedPages pages, told_pages;
  Layout blocks;
  Told::Counts& told;
  std::vector<std::byte> state, told_state;
};

/// A table of trajectories that no write is told to, as one in a process that only draws. No row ends a trajectory.
struct Reader {
  explicit Reader(const Blocks& blocks)
      : flags(kRows), memory(Trajectories::bytes(kLanes, kLength, 1) / 8),
        table(blocks.view(), {false, {{reinterpret_cast<std::byte*>(flags.data()), 1}}, {0}}, 1, 2,
              {reinterpret_cast<std::byte*>(memory.data()), memory.size() * 8}) {}
  /// Rows of the only trajectory of lane 0, in order; none if there are gaps.
  Indices run() {
    Indices rows;
    const auto runs = table.runs();
    if (runs.size() != 1 || runs[0].track != 0) return rows;
    for (std::uint64_t i = 0; i < runs[0].length; ++i) rows.push_back(table.row(0, runs[0].first + i));
    return rows;
  }
  std::vector<std::uint8_t> flags;
  std::vector<std::uint64_t> memory;
  Trajectories table;
};

/// Lane 0 holds exactly the positions before `end` that fit. `too_many`: as for expect_sound_rows().
void expect_lane(const World& world, std::uint64_t end, Reader* reader, std::uint64_t too_many = 0) {
  const Control control = world.blocks.view();
  EXPECT_EQ(control.end(0), end);
  EXPECT_EQ(control.filled(0), std::min(end, kLength));
  Indices expected;
  for (std::uint64_t position = end - std::min(end, kLength); position < end; ++position) {
    const std::uint64_t row = position % kLength;
    expected.push_back(static_cast<std::int64_t>(row));
    EXPECT(is_committed(control.word(row).load()));
    EXPECT_EQ(id_in(world.blocks, row).value_or(0), id_at(position));
    EXPECT_EQ(control.lap(row).load(), control.lap_of(position));
    EXPECT(world.told.of[row] > 0);
  }
  EXPECT(control.void_rows() <= too_many);
  Reader now(world.blocks);
  EXPECT(now.run() == expected);
  if (reader != nullptr) EXPECT(reader->run() == expected);
}

TEST(a_request_is_written_once_and_repeats_change_nothing) {
  World world(0);
  World::Process a(world, 0), b(world, 1);
  std::uint64_t end = 0;
  Dice dice(5);
  for (int step = 0; step < 400; ++step) {
    const std::uint64_t n = dice.in(0, 2 * kLength), back = dice.below(std::min<std::uint64_t>(end, 12) + 1);
    const Request request{end - back, n};
    const std::vector<std::byte> before(world.blocks.all.begin(), world.blocks.all.end());
    Indices rows(n);
    const std::uint64_t written = request.run((dice.below(2) == 0 ? a : b).store, *request.rows(world.blocks), rows.data());
    for (std::uint64_t i = 0; i < n; ++i) EXPECT_EQ(rows[i], static_cast<std::int64_t>((request.position + i) % kLength));
    const std::uint64_t added = n > back ? n - back : 0;
    end += added;
    EXPECT_EQ(written, std::min(added, kLength));
    if (added == 0) {  // the counter of tickets is all that has moved
      const Control control = world.blocks.view();
      const Layout old(const_cast<std::byte*>(before.data()), world.blocks.geometry, kRowBytes);
      EXPECT(std::equal(old.tickets.begin(), old.tickets.end(), world.blocks.tickets.begin()));
      for (std::size_t f = 0; f < old.fields.size(); ++f) {
        EXPECT(std::memcmp(old.fields[f].data, world.blocks.fields[f].data, kRows * kRowBytes[f]) == 0);
      }
    }
    if (end > 0) expect_lane(world, end, nullptr);
  }
  const Request ahead{end + 1, 2};
  try {
    ahead.run(a.store, *ahead.rows(world.blocks));
    EXPECT(false);
  } catch (const Store::OutOfOrder& refused) {
    EXPECT_EQ(refused.next, end);
  }
  expect_lane(world, end, nullptr);
  a.store.empty(false);
  const Request late{end - 1, 2};
  EXPECT_THROWS(Store::OutOfOrder, late.run(a.store, *late.rows(world.blocks)));  // it may have been written before, or not
  const std::uint64_t base = a.store.control().end(0);
  EXPECT_EQ(base % kLength, 0u);
  const Request next{base, 2};
  EXPECT_EQ(next.run(b.store, *next.rows(world.blocks)), 2u);
  EXPECT_EQ(a.store.control().size(), 2u);
}

TEST(edits_and_voids_between_a_request_and_its_repeat) {
  World world(4);
  World::Process a(world, 0), b(world, 1);
  const Request request{4, 4};
  const auto made = request.rows(world.blocks);
  const Rows& rows = *made;
  request.run(a.store, rows);
  const Control control = a.store.control();
  const std::int64_t edited[] = {0};
  Rows other(world.blocks.fields, 1);
  other.describe(0, 0x999);
  a.store.scatter(edited, 1, a.store.all(), other.in, false);
  const std::uint64_t word = control.word(0).load();
  EXPECT_EQ(request.run(b.store, rows), 0u);
  EXPECT_EQ(control.word(0).load(), word);  // what was edited since stays
  EXPECT_EQ(id_in(world.blocks, 0).value_or(0), 0x999u);
  control.word(1).store(ticket(number_of(control.word(1).load()), State::voided));
  ++control.counters().void_rows;
  EXPECT_EQ(request.run(b.store, rows), 1u);
  EXPECT_EQ(id_in(world.blocks, 1).value_or(0), id_at(6));
  EXPECT_EQ(control.void_rows(), 0u);
}

#ifdef ENGRAM_CAN_STEP

struct Case {
  std::uint64_t before;
  Request first, repeat;
};

const std::vector<Case> kCases = {
    {0, {0, 1}, {0, 1}},      // of an empty store
    {4, {4, 3}, {4, 3}},      // over the wrap
    {8, {8, 2}, {8, 4}},      // repeated with more rows behind
    {6, {6, 4}, {5, 5}},      // with some before
    {7, {7, 7}, {7, 7}},      // more than the lane is long
};

/// What the memory is at this instruction, without participants that do not exist.
std::uint64_t hash(const World& world) {
  const std::uint64_t lanes = kLanes * sizeof(Lane), participants = kParticipants * sizeof(Participant);
  const Blocks& blocks = world.blocks;
  const std::uint64_t lanes_at = blocks.control.size() - lanes, there = lanes_at - participants;
  return hash_of(world.blocks.all.subspan(lanes_at), hash_of(blocks.control.subspan(there, sizeof(Participant)),
                                                             hash_of(blocks.control.subspan(2 * kPage, sizeof(Counters)))));
}

/// The steps at which another state of the memory begins, and the instructions that were run.
std::vector<std::uint64_t> states_of(World& world, const Case& of, std::vector<std::uint64_t>& instructions,
                                     const std::function<void()>& at_each = [] {}) {
  const auto made = of.first.rows(world.blocks);
  const Rows& rows = *made;
  World::Process process(world, 0);
  of.first.run(process.store, rows);  // resolves every symbol
  world.restore();
  Stepped child([&] { of.first.run(process.store, rows); });
  std::set<std::uint64_t> seen;
  std::vector<std::uint64_t> states;
  for (std::uint64_t step = 0; child.end() == Stepped::End::running && step < 200000; ++step, child.step()) {
    instructions.push_back(child.at());
    if (!seen.insert(hash(world)).second) continue;
    states.push_back(step);
    at_each();
  }
  if (child.end() == Stepped::End::done) return states;
  std::printf("      skipped: a child cannot be stepped through here, or no step ends\n");
  return {};
}

/// Repeats a request of a process that died: after it was repaired beside others, or all died.
void repeat_after_death(World& world, const Case& of, bool all_died) {
  Reader reader(world.blocks);
  World::Process b(world, 1);
  if (all_died) {
    b.store.recover();
  } else {
    b.store.repair(b.store.control().participant(0));
  }
  reader.table.catch_up(1000);  // it finds that rows are lost
  const auto made = of.repeat.rows(world.blocks);
  const Rows& rows = *made;
  of.repeat.run(b.store, rows);
  expect_lane(world, of.repeat.position + of.repeat.n, &reader);
  expect_sound_rows(world.blocks);
  const std::uint64_t written = b.store.control().counters().write_count;
  EXPECT_EQ(of.repeat.run(b.store, rows), 0u);
  EXPECT_EQ(b.store.control().counters().write_count.load(), written);
}

TEST(a_request_is_repeated_after_a_death_at_every_instruction) {
  std::uint64_t deaths = 0;
  for (const Case& of : kCases) {
    World world(of.before);
    std::vector<std::uint64_t> instructions;
    std::vector<std::vector<std::byte>> states, tolds;
    const auto found = states_of(world, of, instructions, [&] {
      states.emplace_back(world.pages.data(), world.pages.data() + (1 << 18));
      tolds.emplace_back(world.told_pages.data(), world.told_pages.data() + sizeof(Told::Counts));
    });
    if (found.empty()) return;
    for (std::size_t i = 0; i < states.size() && expect::failures < 20; ++i) {
      for (const bool all_died : {false, true}) {
        const int failures = expect::failures;
        std::memcpy(world.pages.data(), states[i].data(), states[i].size());
        std::memcpy(world.told_pages.data(), tolds[i].data(), tolds[i].size());
        repeat_after_death(world, of, all_died);
        ++deaths;
        if (expect::failures == failures) continue;
        std::fprintf(stderr, "  %llu rows at %llu, killed before step %llu; %s\n", llu(of.first.n), llu(of.first.position), llu(found[i]),
                     all_died ? "all died" : "repaired beside others");
      }
    }
  }
  std::printf("requests repeated: after %s deaths\n", stress::count(deaths).c_str());
  EXPECT(deaths > 100);
}

// The first one is killed in a state, the second one, which repeats its request, in a state of its own; a third repeats it.
TEST(a_request_is_repeated_after_two_deaths) {
  std::uint64_t deaths = 0, amid = 0;
  const auto most_deaths = stress::pick<std::uint64_t>(24, 20000, 100000);
  Dice dice(17);
  for (std::size_t c = 0; deaths < most_deaths && expect::failures < 20; ++c) {
    const Case& of = kCases[c % kCases.size()];
    World world(of.before);
    std::vector<std::uint64_t> instructions;
    const auto states = states_of(world, of, instructions);
    if (states.empty()) return;
    for (int k = 0; k < 3; ++k) {
      world.restore();
      Reader reader(world.blocks);
      const auto firsts = of.first.rows(world.blocks), repeats = of.repeat.rows(world.blocks);
      const Rows &first = *firsts, &repeat = *repeats;
      const std::uint64_t step = states[dice.below(states.size())];
      World::Process one(world, 0), two(world, 1), three(world, 2);
      {
        Stepped a([&] { of.first.run(one.store, first); });
        if (step > 0) EXPECT(a.go_to(instructions, step) == Stepped::End::running);
      }
      three.store.repair(three.store.control().participant(0));
      reader.table.catch_up(1000);
      std::uint64_t steps = 0;
      const std::uint64_t most = dice.below(2000);
      {
        Stepped b([&] { of.repeat.run(two.store, repeat); });
        while (b.end() == Stepped::End::running && steps < most) ++steps, b.step();
      }
      amid += steps == most;
      three.store.repair(three.store.control().participant(1));
      reader.table.catch_up(1000);
      of.repeat.run(three.store, repeat);
      const int failures = expect::failures;
      expect_lane(world, of.repeat.position + of.repeat.n, &reader, 1);
      expect_sound_rows(world.blocks, 1);
      ++deaths;
      if (expect::failures != failures) {
        std::fprintf(stderr, "  %llu rows at %llu, killed before step %llu; the repeat after %llu steps\n", llu(of.first.n),
                     llu(of.first.position), llu(step), llu(steps));
      }
    }
  }
  std::printf("requests repeated: %s times after two deaths, %s of them amid the repeat\n", stress::count(deaths).c_str(),
              stress::count(amid).c_str());
}

/// The words of lane 0 of rows that are whole at their position.
std::vector<std::uint64_t> whole_words(const World& world, const Request& request) {
  const Control control = world.blocks.view();
  std::vector<std::uint64_t> words;
  for (std::uint64_t position = request.position; position < request.position + request.n; ++position) {
    const std::uint64_t row = position % kLength, word = control.word(row).load();
    const bool there = is_committed(word) && control.lap(row).load() == control.lap_of(position);
    words.push_back(there ? word : 0);
  }
  return words;
}

void expect_kept(const std::vector<std::uint64_t>& words, const std::vector<std::uint64_t>& after) {
  for (std::size_t i = 0; i < words.size() && i < after.size(); ++i) {
    if (words[i] != 0) EXPECT_EQ(after[i], words[i]);
  }
}

TEST(a_request_is_repeated_beside_one_that_is_only_stopped) {
  std::uint64_t pairs = 0, waited = 0, both = 0;
  for (const Case& of : kCases) {
    World world(of.before);
    std::vector<std::uint64_t> instructions;
    const auto states = states_of(world, of, instructions);
    if (states.empty()) return;
    for (const std::uint64_t step : stress::size() == stress::Size::small ? states : begins_and_ends(states)) {
      world.restore();
      const auto firsts = of.first.rows(world.blocks), repeats = of.repeat.rows(world.blocks);
      const Rows &first = *firsts, &repeat = *repeats;
      const std::vector<std::byte> told_before(world.told_state);
      World::Process one(world, 0), two(world, 1);
      Stepped a([&] { of.first.run(one.store, first); });
      EXPECT(step == 0 || a.go_to(instructions, step) == Stepped::End::running);
      const auto at_stop = whole_words(world, of.first);
      const pid_t child = fork();
      if (child == 0) {
        of.repeat.run(two.store, repeat);
        _exit(0);
      }
      int status = 0;
      bool ended = false;
      for (const auto start = std::chrono::steady_clock::now(); !ended && std::chrono::steady_clock::now() < start + 4ms;) {
        ended = waitpid(child, &status, WNOHANG) == child;
        if (!ended) std::this_thread::sleep_for(50us);
      }
      waited += !ended;  // for a row that the stopped one is writing
      const auto at_end = ended ? whole_words(world, of.repeat) : std::vector<std::uint64_t>{};
      a.resume();
      EXPECT(a.finish());
      if (!ended) waitpid(child, &status, 0);
      EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
      const int failures = expect::failures;
      const std::uint64_t end = std::max(of.repeat.position + of.repeat.n, of.first.position + of.first.n);
      expect_lane(world, end, nullptr);
      if (of.first.n <= kLength) expect_kept(at_stop, whole_words(world, of.first));
      if (of.repeat.n <= kLength) expect_kept(at_end, whole_words(world, of.repeat));
      // Each row of the request was told once, of both processes together.
      Told::Counts before;
      std::memcpy(static_cast<void*>(&before), told_before.data(), sizeof before);
      for (std::uint64_t position = std::max(of.before, end - std::min(end, kLength)); position < end; ++position) {
        const std::uint64_t row = position % kLength;
        EXPECT_EQ(world.told.of[row].load() - before.of[row].load(), 1u);
      }
      EXPECT_EQ(world.blocks.view().counters().write_count.load(), of.before + std::min(end - of.before, kLength));
      both += of.first.n > 1 && std::count(at_stop.begin(), at_stop.end(), 0u) != 0 && std::count(at_stop.begin(), at_stop.end(), 0u) != static_cast<std::ptrdiff_t>(at_stop.size());
      ++pairs;
      if (expect::failures == failures) continue;
      std::fprintf(stderr, "  %llu rows at %llu, stopped before step %llu\n", llu(of.first.n), llu(of.first.position), llu(step));
      if (expect::failures > 20) return;
    }
  }
  std::printf("requests repeated: beside %s that were stopped, %s of them half done; %s waited\n", stress::count(pairs).c_str(),
              stress::count(both).c_str(), stress::count(waited).c_str());
  EXPECT(waited > 0);
}

#endif

}  // namespace
