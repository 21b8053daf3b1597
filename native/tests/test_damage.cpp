// Words of live memory that something else has written to: whatever they say, no call reads or writes outside its memory (each
// block is an allocation of its own, whose ends the address sanitizer guards), hangs, or ends with an error that callers do not
// know.
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "blocks.h"
#include "core/check.h"
#include "core/expand.h"
#include "core/epoch.h"
#include "core/priorities.h"
#include "core/trajectories.h"
#include "core/windows.h"
#include "expect.h"
#include "stress.h"

using namespace engram;
using namespace std::chrono_literals;

namespace {

using Shared = std::span<std::byte>;

struct Memory {
  explicit Memory(std::uint64_t bytes)
      : bytes_(static_cast<std::byte*>(::operator new[](bytes, std::align_val_t(64)))), all(bytes_.get(), bytes) {
    std::memset(all.data(), 0, bytes);
  }
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  std::unique_ptr<std::byte[], Free> bytes_;
  Shared all;
};

enum Fields : std::uint64_t { kId, kEpisode, kDone, kFields };

// A store with every index beside it, which has been written to, drawn from and emptied before.
struct World {
  World(Geometry g, bool within_buffer)
      : heap(g, {8, 8, 1}),
        tree(Priorities::bytes(g.capacity, within_buffer)),
        state(RowEpoch::kBytes),
        file(std::tmpfile()),
        table_memory(Trajectories::bytes(g.lanes, g.lane_length, 1)) {
    Priorities::format(tree.all, g.capacity, {0.6, 0.4, 1e-6, within_buffer});
    RowEpoch::format(state.all);
    open();
    write(g.lane_length / 2 + 1);
    std::vector<std::int64_t> rows{0, 1};
    const double priorities_of_two[] = {2, 3};
    priorities->update(rows.data(), priorities_of_two, 2, nullptr);
    store->empty(true);
    write(g.lane_length + 2);
    std::int64_t first = 0;
    const double five = 5;
    priorities->update(&first, &five, 1, nullptr);
    epoch->next(7, 3, 1, false);
    good = {copy(heap.control), copy(heap.tickets), copy(tree.all), copy(state.all)};
  }
  ~World() { std::fclose(file); }

  static std::vector<std::byte> copy(Shared bytes) { return {bytes.begin(), bytes.end()}; }

  std::array<Shared, 4> shared() const { return {heap.control, heap.tickets, tree.all, state.all}; }

  // The memory as it was, and new handles on it: what others know of a store is not part of this test.
  void again() {
    priorities.reset(), epoch.reset(), table.reset(), store.reset();
    for (std::uint64_t i = 0; i < good.size(); ++i) std::memcpy(shared()[i].data(), good[i].data(), good[i].size());
    open();
  }

  void open() {
    store = std::make_unique<Store>(heap.view(), heap.fields, 0);
    const auto participants = std::make_shared<Participants>(heap.view(), fileno(file));
    store->join(participants);
    std::memset(table_memory.all.data(), 0, table_memory.all.size());
    priorities = std::make_unique<Priorities>(tree.all, &store->control());
    epoch = std::make_unique<RowEpoch>(state.all);
    table = std::make_unique<Trajectories>(heap.view(), Boundaries{true, {heap.fields[kEpisode]}, {kEpisode}}, 1, 3, table_memory.all);
    for (Index* index : std::initializer_list<Index*>{priorities.get(), epoch.get(), table.get()}) store->attach(*index);
    table->catch_up(~std::uint64_t{0});
    leave = [participants] { participants->leave(); };
  }

  // Rows of three per episode, to all lanes.
  void write(std::uint64_t n) {
    std::vector<std::uint64_t> ids(n), episodes(n);
    std::vector<std::byte> done(n);
    for (std::uint64_t lane = 0; lane < heap.geometry.lanes; ++lane) {
      for (std::uint64_t i = 0; i < n; ++i) ids[i] = ++id, episodes[i] = id / 3 + 1;
      const std::array<const std::byte*, kFields> columns{reinterpret_cast<std::byte*>(ids.data()), reinterpret_cast<std::byte*>(episodes.data()), done.data()};
      store->append(lane, n, columns, nullptr);
    }
  }

  Heap heap;
  Memory tree, state;
  std::FILE* file;
  Memory table_memory;
  std::vector<std::vector<std::byte>> good;
  std::unique_ptr<Store> store;
  std::unique_ptr<Priorities> priorities;
  std::unique_ptr<RowEpoch> epoch;
  std::unique_ptr<Trajectories> table;
  std::function<void()> leave;
  std::uint64_t id = 0;
};

struct Batches {
  explicit Batches(std::uint64_t n) : ids(n), episodes(n), done(n), rows(n), numbers(n), weights(n) {}
  std::array<std::byte*, kFields> out() {
    return {reinterpret_cast<std::byte*>(ids.data()), reinterpret_cast<std::byte*>(episodes.data()), done.data()};
  }
  std::vector<std::uint64_t> ids, episodes;
  std::vector<std::byte> done;
  std::vector<std::int64_t> rows, numbers;
  std::vector<double> weights;
};

// Everything that a process does with a store, by what it calls.
struct Use {
  const char* name;
  std::function<void(World&, Dice&)> run;
};

std::vector<std::int64_t> some_rows(const World& w, Dice& dice, std::uint64_t n) {
  std::vector<std::int64_t> rows(n);
  for (auto& row : rows) row = static_cast<std::int64_t>(dice.below(w.heap.geometry.capacity));
  return rows;
}

void expect_rows(World& w, const Batches& b, std::uint64_t n) {
  for (std::uint64_t i = 0; i < n; ++i) {
    EXPECT(b.ids[i] <= w.id && (b.ids[i] == 0 ? b.episodes[i] == 0 : b.episodes[i] == b.ids[i] / 3 + 1));
    EXPECT(static_cast<std::uint64_t>(b.rows[i]) < w.heap.geometry.capacity);
  }
}

const WindowSpec kShapes[] = {{3}, {3, false}, {3, true, true}, {4, false, true}, {3, true, false, 1, 1}};

const std::vector<Use> kUses = {
    {"append", [](World& w, Dice& dice) { w.write(dice.in(1, w.heap.geometry.lane_length + 1)); }},
    {"append_by_lane",
     [](World& w, Dice& dice) {
       std::vector<std::int64_t> lanes(4), rows(4);
       for (auto& lane : lanes) lane = static_cast<std::int64_t>(dice.below(w.heap.geometry.lanes));
       const std::uint64_t ids[] = {1, 2, 1, 2}, episodes[] = {1, 1, 1, 1};
       const std::byte done[4] = {};
       const std::array<const std::byte*, kFields> columns{reinterpret_cast<const std::byte*>(ids), reinterpret_cast<const std::byte*>(episodes), done};
       w.store->append_by_lane(lanes.data(), 4, columns, rows.data());
     }},
    {"scatter",
     [](World& w, Dice& dice) {
       const auto rows = some_rows(w, dice, 3);
       const std::uint64_t ids[] = {1, 2, 1}, episodes[] = {1, 1, 1};
       const std::byte done[3] = {};
       const std::array<const std::byte*, kFields> columns{reinterpret_cast<const std::byte*>(ids), reinterpret_cast<const std::byte*>(episodes), done};
       w.store->scatter(rows.data(), 3, w.store->all(), columns, true);
     }},
    {"edit",
     [](World& w, Dice& dice) {
       const auto rows = some_rows(w, dice, 1);
       const std::byte done[1] = {};
       const std::uint64_t which[] = {kDone};
       const std::array<const std::byte*, 1> columns{done};
       try {
         w.store->scatter(rows.data(), 1, which, columns, false);
       } catch (const std::out_of_range&) {  // a row that is not live
       }
     }},
    {"sample",
     [](World& w, Dice& dice) {
       Batches b(20);
       w.store->sample_uniform(dice.bits(), 20, b.out(), b.rows.data(), b.numbers.data());
       expect_rows(w, b, 20);
     }},
    {"ranked",
     [](World& w, Dice& dice) {
       Batches b(4);
       for (auto& rank : b.rows) rank = static_cast<std::int64_t>(dice.below(w.heap.geometry.capacity));
       w.store->read_ranked(b.rows.data(), 4, b.out(), b.numbers.data());
       expect_rows(w, b, 4);
     }},
    {"gather",
     [](World& w, Dice& dice) {
       Batches b(6);
       b.rows = some_rows(w, dice, 6);
       w.store->gather(b.rows.data(), 6, w.store->all(), b.out(), nullptr, b.numbers.data());
     }},
    {"prioritized",
     [](World& w, Dice& dice) {
       Batches b(20);
       w.priorities->sample(*w.store, dice.bits(), 20, b.out(), b.rows.data(), b.numbers.data(), b.weights.data());
       expect_rows(w, b, 20);
       for (const double weight : b.weights) EXPECT(weight >= 0 && weight <= 1);
     }},
    {"update",
     [](World& w, Dice& dice) {
       const auto rows = some_rows(w, dice, 5);
       const float wide[] = {1, 2, 0, 3, 4};
       const double narrow[] = {1, 2, 0, 3, 4};
       try {
         w.priorities->update(rows.data(), wide, 5, nullptr);
         w.priorities->update(rows.data(), narrow, 5, rows.data());
       } catch (const BadPriority&) {  // too large for an alpha that is not what it was
       }
     }},
    {"parameters",
     [](World& w, Dice& dice) {
       w.priorities->default_priority();
       w.priorities->leaf(dice.below(w.heap.geometry.capacity));
       w.priorities->total();
       w.priorities->set_beta(0.5);
       w.priorities->reset(some_rows(w, dice, 2).data(), 2);
       try {
         w.priorities->set_alpha(dice.below(2) == 0 ? 0.6 : 0.7);
       } catch (const std::invalid_argument&) {  // a priority is too large for it
       }
       w.priorities->set_highest(3);
     }},
    {"state",
     [](World& w, Dice&) {
       const std::uint64_t capacity = w.heap.geometry.capacity;
       std::vector<double> leaves(capacity);
       w.priorities->copy_leaves(leaves.data(), capacity, true);
       w.priorities->restore(leaves.data(), capacity, w.priorities->alpha());
       std::vector<std::int64_t> numbers(capacity);
       std::vector<Control::LaneState> lanes(w.heap.geometry.lanes);
       w.store->control().read_lanes(lanes.data());
       w.store->control().read_numbers(~std::uint64_t{0}, lanes.data(), numbers.data(), capacity);
       for (const auto& lane : lanes) EXPECT(lane.live >= 0 && static_cast<std::uint64_t>(lane.live) <= w.heap.geometry.lane_length);
     }},
    {"order", [](World& w, Dice&) { w.priorities->put_in_order(); }},
    {"epoch",
     [](World& w, Dice& dice) {
       const std::uint64_t rows = dice.in(1, 9);
       const RowEpoch::Stretch taken = w.epoch->next(dice.bits(), rows, dice.in(1, 3), false);
       EXPECT(taken.count >= 1 && taken.start < taken.rows && taken.count <= taken.rows - taken.start);
       const EpochState state = w.epoch->state();
       EXPECT(state.visited <= state.rows);
     }},
    {"windows",
     [](World& w, Dice& dice) {
       const WindowSpec& shape = kShapes[dice.below(std::size(kShapes))];
       const std::uint64_t key = dice.bits(), places = 4 * 8;
       Batches b(places);
       const auto choose = [&](std::uint64_t n, std::uint64_t attempt) { return w.table->draw(key + attempt, n, shape); };
       const auto out = b.out();
       read_windows(*w.store, w.store->all(), choose, 4, shape, false, [&](std::uint64_t rows) -> WindowMemory {
         if (rows > places) throw std::length_error("memory for more windows than were asked for");
         return {Batch(const_cast<std::byte* const*>(out.data()), out.size()), b.rows.data(), b.numbers.data()};
       });
     }},
    {"anchored",
     [](World& w, Dice& dice) {
       const WindowSpec& shape = kShapes[dice.below(std::size(kShapes))];
       const Drawn drawn = draw_anchored(*w.priorities, *w.table, dice.bits(), 4, shape);
       for (const std::int64_t row : drawn.rows) EXPECT(static_cast<std::uint64_t>(row) < w.heap.geometry.capacity);
     }},
    {"trajectories",
     [](World& w, Dice& dice) {
       const WindowSpec& shape = kShapes[dice.below(std::size(kShapes))];
              const auto rows = some_rows(w, dice, 4);
       w.table->windows_at(rows.data(), 4, shape, 3);
       w.table->window_lengths(rows.data(), 4, shape);
       w.table->census();
       w.table->windows({2});
       if (dice.below(4) == 0) w.table->forget();
     }},
    {"expand",
     [](World& w, Dice& dice) {
       Expansion expansion({kDone});
       expansion.add({Output::Kind::row, kId, 2});
       expansion.add({Output::Kind::frames, kEpisode, 0, 3});
       expansion.add({Output::Kind::steps, kId, dice.below(2) == 0 ? 2 : kToTheEnd});
       const auto rows = some_rows(w, dice, 4);
       std::vector<std::uint64_t> id(4), frames(12), steps(4);
       std::vector<std::int64_t> numbers(4);
       const std::array<std::byte*, 3> out{reinterpret_cast<std::byte*>(id.data()), reinterpret_cast<std::byte*>(frames.data()), reinterpret_cast<std::byte*>(steps.data())};
       expand(*w.store, *w.table, expansion, rows.data(), 4, nullptr, out, numbers.data());
     }},
    {"looks",
     [](World& w, Dice& dice) {
       const Control& control = w.store->control();
       EXPECT(control.size() <= control.capacity());
       for (std::uint64_t lane = 0; lane < control.lanes(); ++lane) {
         EXPECT(control.filled(lane) <= control.lane_length() && control.cursor_row(lane) / control.lane_length() == lane);
       }
       w.store->holes();
       std::vector<std::int64_t> rows, numbers;
       w.store->changes(dice.below(30), rows, numbers);
     }},
    {"pause",
     [](World& w, Dice&) {
       w.store->pause();
       w.store->resume();
     }},
    {"empty", [](World& w, Dice& dice) { w.store->empty(dice.below(2) == 0); }},
    {"reclaim", [](World& w, Dice&) { w.store->reclaim(); }},
};

const double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinite = std::numeric_limits<double>::infinity();

std::uint64_t bad_value(Dice& dice, std::uint64_t was, std::uint64_t capacity) {
  switch (dice.below(9)) {
    case 0: return dice.below(4);
    case 1: return was ^ std::uint64_t{1} << dice.below(64);
    case 2: return was + dice.in(1, 2 * capacity);
    case 3: return was - dice.in(1, 2 * capacity);
    case 4: return ~std::uint64_t{0} >> dice.below(64);
    case 5: return std::uint64_t{1} << dice.below(64);
    case 6: return std::bit_cast<std::uint64_t>(std::array{kNan, kInfinite, -kInfinite, -1.0, 1e308, 5e-324}[dice.below(6)]);
    case 7: return dice.bits() >> dice.below(64);
    default: return dice.below(2 * capacity) << 2 | dice.below(4);
  }
}

// Where a word is damaged: which of the shared blocks, and what part of it.
struct Kind {
  const char* name;
  std::uint64_t block, at, bytes;  // 0 bytes: to its end
  std::uint64_t lock_at = 0;       // of a mutex among them
};

const Kind kKinds[] = {
    {"locks", 0, kPage, sizeof(LockPage), offsetof(LockPage, placing)},
    {"counters", 0, 2 * kPage, sizeof(Counters)},
    {"participants", 0, 3 * kPage, 3 * sizeof(Participant)},
    {"lanes", 0, 3 * kPage + kParticipants * sizeof(Participant), 0},
    {"tickets", 1, 0, 0},
    {"priorities", 2, 0, sizeof(PriorityHeader), offsetof(PriorityHeader, mutex)},
    {"tree", 2, kPage, 0},
    {"epoch", 3, 0, sizeof(EpochPage), offsetof(EpochPage, mutex)},
};

std::uint64_t& word_of(const World& w, const Kind& kind, Dice& dice, bool locks) {
  const Shared block = w.shared()[kind.block].subspan(kind.at);
  const std::uint64_t words = (kind.bytes == 0 ? block.size() : kind.bytes) / 8;
  for (;;) {
    const std::uint64_t at = dice.below(words) * 8;
    if (locks || kind.lock_at == 0 || at - kind.lock_at >= sizeof(SharedMutex)) return reinterpret_cast<std::uint64_t&>(block[at]);
  }
}

// Runs a use; whether it went through. Errors that no caller is told of fail the test.
void run(const Use& use, World& w, Dice& dice, const std::string& where) {
  try {
    use.run(w, dice);
  } catch (const Stalled&) {
  } catch (const NothingLive&) {
  } catch (const Damaged&) {
  } catch (const std::exception& e) {
    expect::fail(__FILE__, __LINE__, where + ": " + use.name + " ended with " + e.what());
  }
}

// A node that is not what its children say comes out within a batch or two, wherever it is on the way to what is drawn.
TEST(a_damaged_node_of_the_priorities_comes_out) {
  const Geometry g = geometry(1, 600);  // 600 leaves, 75, 10 and 2 nodes, and the root
  const double bad_values[] = {kNan, kInfinite, -kInfinite, -1.0};
  for (const std::uint64_t at : {7u, 300u, 599u, 600u, 610u, 676u, 680u, 690u, 691u, 696u}) {
    for (const double bad : bad_values) {
      World world(g, false);
      double& node = reinterpret_cast<double*>(world.tree.all.data() + kPage)[at];
      const bool drawn = node > 0;
      node = bad;
      bool damaged = false;
      Batches b(256);
      for (std::uint64_t key = 0; key < 40 && !damaged; ++key) {
        try {
          world.priorities->draw(key, 0, 256, b.rows.data(), b.numbers.data(), b.weights.data());
          for (const double weight : b.weights) EXPECT(weight > 0 && weight <= 1);
        } catch (const Damaged&) {
          damaged = true;
        }
      }
      if (drawn && !damaged) expect::fail(__FILE__, __LINE__, "not noticed: " + std::to_string(bad) + " at " + std::to_string(at));
    }
  }
}

const Geometry kGeometries[] = {geometry(1, 9), geometry(3, 5), geometry(2, 64), geometry(1, 600)};

constexpr std::uint64_t kUsesPerCase = 12;

TEST(a_damaged_word_is_a_known_error_or_harmless) {
  const Impatient impatient(1ms);
  const std::uint64_t cases = stress::pick<std::uint64_t>(150, 2'000, 20'000);
  std::uint64_t total = 0;
  for (const Kind& kind : kKinds) {
    for (const Geometry& g : kGeometries) {
      World world(g, g.lanes % 2 == 1);
      Dice dice(g.capacity * 31 + kind.block * 7 + kind.at);
      for (std::uint64_t i = 0; i < cases; ++i, ++total) {
        world.again();
        for (std::uint64_t words = dice.below(4) == 0 ? 3 : 1; words > 0; --words) {
          std::uint64_t& word = word_of(world, kind, dice, true);
          word = bad_value(dice, word, g.capacity);
        }
        const std::string where = std::string(kind.name) + ", case " + std::to_string(i);
        for (std::uint64_t k = 0; k < kUsesPerCase; ++k) run(kUses[dice.below(kUses.size())], world, dice, where);
        world.leave();
      }
    }
  }
  std::printf("           %s cases\n", stress::count(total).c_str());
}

// Between a look at a word and the next one it is another: what was checked must be what is used. But for locks that are held:
// the C library keeps addresses in them for that time.
TEST(a_word_that_changes_all_the_time_is_a_known_error_or_harmless) {
  const Impatient impatient(1ms);
  const std::uint64_t cases = stress::pick<std::uint64_t>(12, 300, 2'000);
  std::uint64_t total = 0;
  for (const Kind& kind : kKinds) {
    for (const Geometry& g : kGeometries) {
      World world(g, g.lanes % 2 == 1);
      Dice dice(g.capacity * 37 + kind.block * 11 + kind.at);
      for (std::uint64_t i = 0; i < cases; ++i, ++total) {
        world.again();
        std::uint64_t& word = word_of(world, kind, dice, false);
        const std::uint64_t was = word, bad = bad_value(dice, word, g.capacity);
        std::atomic<bool> done{false};
        std::thread changing([&] {
          const std::atomic_ref<std::uint64_t> shared(word);
          for (std::uint64_t k = 0; !done.load(std::memory_order_relaxed); ++k) shared.store(k % 2 == 0 ? bad : was, std::memory_order_relaxed);
        });
        const std::string where = std::string(kind.name) + ", case " + std::to_string(i);
        for (std::uint64_t k = 0; k < kUsesPerCase; ++k) run(kUses[dice.below(kUses.size())], world, dice, where);
        done = true;
        changing.join();
        world.leave();
      }
    }
  }
  std::printf("           %s cases\n", stress::count(total).c_str());
}

}  // namespace
