// Windows over rings whose writers are stopped: one process is stopped in each state of an append, that between reserving its
// rows and marking them included; others go round the ring up to three times; readers draw windows all the while. A row tells
// which position it was meant for, so a window that mixes two laps shows.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <vector>

#include "blocks.h"
#include "core/store.h"
#include "core/trajectories.h"
#include "crash.h"
#include "expect.h"
#include "stress.h"

using namespace engram;
using namespace std::chrono_literals;

#ifdef ENGRAM_CAN_STEP
namespace {

constexpr std::uint64_t kLanes = 2, kLength = 4;
const std::vector<std::uint64_t> kRowBytes = {8, 1};  // an id, and a flag that no row sets
constexpr std::uint64_t kStopped = std::uint64_t{1} << 40, kOther = std::uint64_t{1} << 41;

std::uint64_t id_of_row(std::uint64_t from, std::uint64_t lane, std::uint64_t k) { return from | lane << 32 | k; }

/// A table that no write is told to, as one in a process that only draws.
struct Reader {
  explicit Reader(const Blocks& blocks)
      : memory(Trajectories::bytes(kLanes, kLength, 1) / 8),
        table(blocks.view(), {false, {blocks.fields[1]}, {1}}, 1, 2,
              {reinterpret_cast<std::byte*>(memory.data()), memory.size() * 8}) {}
  std::vector<std::uint64_t> memory;
  Trajectories table;
};

struct Ring {
  Ring() : pages(1 << 20), blocks(pages.data(), geometry(kLanes, kLength), kRowBytes) {
    format_without_curve(blocks);
    store.emplace(blocks.open(0));
    for (const std::uint64_t lane : {0, 1}) {
      for (std::uint64_t k = 0; k < 6 - lane; ++k) append(lane, id_of_row(0, lane, k));
    }
  }

  /// One row, from this process; a row that a stopped writer holds is not waited for long.
  void append(std::uint64_t lane, std::uint64_t id) {
    position_of[id] = blocks.view().lane(lane).cursor.load();
    Rows rows(blocks.fields, 1);
    std::memcpy(rows.row(0, 0), &id, 8);
    try {
      store->append(lane, 1, rows.in, nullptr);
    } catch (const Stalled&) {
    }
  }

  std::uint64_t id_in(std::uint64_t row) const {
    std::uint64_t id = 0;
    std::memcpy(&id, blocks.fields[0].data + row * 8, 8);
    return id;
  }

  SharedPages pages;
  Layout blocks;
  std::optional<Store> store;
  std::map<std::uint64_t, std::uint64_t> position_of;  // of the row with that id, in its lane
};

struct Windows {
  std::uint64_t drawn = 0, whole = 0;
};

void check_rows(const Ring& ring, const std::vector<std::int64_t>& rows, const std::vector<std::int64_t>& numbers,
                std::uint64_t from, std::uint64_t steps, Windows& windows) {
  ++windows.drawn;
  std::vector<std::uint64_t> ids(steps);
  const std::vector<std::byte*> batch{reinterpret_cast<std::byte*>(ids.data())};
  const std::vector<std::uint64_t> which{0};
  if (!ring.store->gather(rows.data() + from, steps, which, batch, numbers.data() + from, nullptr).empty()) return;
  ++windows.whole;
  for (std::uint64_t i = 1; i < steps; ++i) {
    EXPECT_EQ(rows[from + i] / static_cast<std::int64_t>(kLength), rows[from] / static_cast<std::int64_t>(kLength));
    EXPECT_EQ(ring.position_of.at(ids[i]), ring.position_of.at(ids[0]) + i);
  }
}

void check_windows(const Ring& ring, Reader& reader, Windows& windows) {
  for (std::uint64_t key = 1; key <= 4; ++key) {
    for (const WindowSpec& shape : {WindowSpec{2}, WindowSpec{3, true, true}, WindowSpec{4, false}}) {
      const Drawn drawn = reader.table.draw(key, 4, shape);
      std::uint64_t from = 0;
      for (const Window& window : drawn.windows) {
        check_rows(ring, drawn.rows, drawn.numbers, from, window.length, windows);
        from += window.length;
      }
    }
  }
  Indices all(kLanes * kLength);
  std::iota(all.begin(), all.end(), std::int64_t{0});
  const Surroundings found = reader.table.around(all.data(), all.size(), 1, 2, 1000);
  for (const Around& around : found.around) {
    if (around.steps > 0) check_rows(ring, found.rows, found.numbers, around.from, around.steps, windows);
  }
}

using Runs = std::vector<Indices>;

/// The rows of each piece of a lane without gaps, by what they tell of themselves.
Runs pieces(const Ring& ring) {
  const Control control = ring.blocks.view();
  Runs runs;
  for (std::uint64_t lane = 0; lane < kLanes; ++lane) {
    const std::uint64_t end = control.lane(lane).cursor.load();
    bool open = false;
    for (std::uint64_t position = end - kLength; position < end; ++position) {
      const std::uint64_t row = lane * kLength + position % kLength;
      const bool there = is_committed(control.word(row).load()) && ring.position_of.at(ring.id_in(row)) == position;
      if (there && !open) runs.emplace_back();
      if (there) runs.back().push_back(static_cast<std::int64_t>(row));
      open = there;
    }
  }
  return runs;
}

Runs runs_of(Reader& reader) {
  Runs runs;
  for (const Window& run : reader.table.runs()) {
    runs.emplace_back();
    for (std::uint64_t i = 0; i < run.length; ++i) runs.back().push_back(reader.table.row(run.track, run.first + i));
  }
  return runs;
}

/// What is stopped: rows are appended to these lanes, in this order.
struct Write {
  const char* name;
  std::vector<std::int64_t> lanes;
  bool by_lane;

  void run(const Ring& ring) const {
    Store store = ring.blocks.open(1);
    Rows rows(ring.blocks.fields, lanes.size());
    for (std::uint64_t k = 0; k < lanes.size(); ++k) {
      const std::uint64_t id = id_of_row(kStopped, 0, k);
      std::memcpy(rows.row(0, k), &id, 8);
    }
    if (by_lane) {
      store.append_by_lane(lanes.data(), lanes.size(), rows.in, nullptr);
    } else {
      store.append(static_cast<std::uint64_t>(lanes[0]), lanes.size(), rows.in, nullptr);
    }
  }
};

/// The steps at which another state of the store begins, and the instructions that were run.
std::vector<std::uint64_t> states_of(const Write& write, std::vector<std::uint64_t>& instructions) {
  const Ring ring;
  Stepped child([&] { write.run(ring); });
  std::set<std::uint64_t> seen;
  std::vector<std::uint64_t> states;
  for (std::uint64_t step = 0; child.end() == Stepped::End::running && step < 100000; ++step, child.step()) {
    instructions.push_back(child.at());
    if (seen.insert(hash_of(ring.blocks.all)).second) states.push_back(step);
  }
  if (child.end() == Stepped::End::done) return states;
  std::printf("      skipped: a child cannot be stepped through here, or no step ends\n");
  return {};
}

void stop_and_lap(const Write& write, const std::vector<std::uint64_t>& instructions, std::uint64_t step, std::uint64_t rows,
                  bool dies, Windows& windows, std::uint64_t& unmarked) {
  Ring ring;
  const Control control = ring.blocks.view();
  Reader before(ring.blocks);
  before.table.catch_up(1000);
  const std::uint64_t cursors[] = {control.lane(0).cursor.load(), control.lane(1).cursor.load()};
  Stepped stopped([&] { write.run(ring); });
  EXPECT(stopped.go_to(instructions, step) == Stepped::End::running);
  std::uint64_t next[] = {cursors[0], cursors[1]};  // positions of its rows
  std::set<std::uint64_t> late;                      // lanes that it has not reserved in yet
  const auto place = [&](std::uint64_t lane) {
    for (std::uint64_t k = 0; k < write.lanes.size(); ++k) {
      if (static_cast<std::uint64_t>(write.lanes[k]) == lane) ring.position_of[id_of_row(kStopped, 0, k)] = next[lane]++;
    }
  };
  for (const std::uint64_t lane : {0, 1}) {
    if (control.lane(lane).cursor.load() == cursors[lane]) {
      late.insert(lane);
    } else {
      place(lane);
    }
  }
  for (const std::uint64_t lane : {0, 1}) {
    unmarked += control.lane(lane).cursor.load() != cursors[lane] && is_committed(control.word(lane * kLength + cursors[lane] % kLength).load());
  }
  const Impatient impatient(1ms);
  check_windows(ring, before, windows);
  for (std::uint64_t k = 0; k < rows; ++k) {
    for (const std::uint64_t lane : {0, 1}) ring.append(lane, id_of_row(kOther, lane, k));
    if ((k + 1) % kLength == 0 || k + 1 == rows) {
      Reader now(ring.blocks);
      check_windows(ring, now, windows);
      if (k % 2 == 0 || k + 1 == rows) check_windows(ring, before, windows);
    }
  }
  for (const std::uint64_t lane : late) {
    next[lane] = control.lane(lane).cursor.load();
    place(lane);
  }
  if (dies) {
    stopped.kill();
    ring.store->repair(control.participant(1));
  } else {
    stopped.resume();
    EXPECT(stopped.finish());
  }
  check_windows(ring, before, windows);
  Reader now(ring.blocks);
  check_windows(ring, now, windows);
  const Runs expected = pieces(ring);
  EXPECT(runs_of(now) == expected);
  EXPECT(runs_of(before) == expected);
}

TEST(windows_beside_a_writer_that_is_stopped_while_others_lap_it) {
  const std::vector<Write> writes = {{"append 1", {0}, false},
                                     {"append 3", {0, 0, 0}, false},
                                     {"append 6 to a lane of 4", {0, 0, 0, 0, 0, 0}, false},
                                     {"append 4 by lane", {0, 1, 0, 1}, true}};
  const bool small = stress::size() == stress::Size::small;
  Windows windows;
  std::uint64_t pairs = 0, unmarked = 0;
  for (const Write& write : writes) {
    std::vector<std::uint64_t> instructions;
    const auto states = states_of(write, instructions);
    if (states.empty()) return;
    for (const std::uint64_t step : begins_and_ends(states)) {
      for (const std::uint64_t rows : small ? std::vector<std::uint64_t>{1, 6, 13} : std::vector<std::uint64_t>{1, 3, 4, 6, 8, 13}) {
        for (const bool dies : {false, true}) {
          if (dies && small && rows == 1) continue;
          const int failures = expect::failures;
          stop_and_lap(write, instructions, step, rows, dies, windows, unmarked);
          ++pairs;
          if (expect::failures == failures) continue;
          std::fprintf(stderr, "  %s, stopped before step %llu; %llu rows of others; %s\n", write.name, llu(step), llu(rows),
                       dies ? "then killed" : "then goes on");
          if (expect::failures > 20) return;
        }
      }
    }
  }
  std::printf("windows beside stopped writers: %s pairs, %s windows drawn, %s of them whole\n", stress::count(pairs).c_str(),
              stress::count(windows.drawn).c_str(), stress::count(windows.whole).c_str());
  EXPECT(unmarked > 0);  // some were stopped between reserving a row and marking it
  EXPECT(windows.whole > 0);
}

}  // namespace
#endif
