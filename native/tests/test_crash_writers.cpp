// Requests of writers that share a lane, repeated after a death at any instruction of the first one, or beside a first one that was
// only stopped. Each row is there once; a repeated request has the rows of the first one. And the table of writers by itself.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "blocks.h"
#include "core/store.h"
#include "core/writers.h"
#include "crash.h"
#include "expect.h"
#include "stress.h"

using namespace engram;
using namespace std::chrono_literals;

namespace {

constexpr std::uint64_t kLanes = 2, kLength = 6, kWriters = 3;
const std::vector<std::uint64_t> kRowBytes{16, 24};

struct Request {
  std::uint64_t writer, number, n;
  std::uint64_t life = 0;  // of a writer that was forgotten and begins again

  std::uint64_t id(std::uint64_t i) const { return life << 40 | writer << 32 | number << 8 | (i + 1); }
};

struct World {
  World() : pages(1 << 18), blocks(pages.data(), geometry(kLanes, kLength), kRowBytes) {
    const std::uint64_t at = (blocks.all.size() + 63) / 64 * 64, bytes = Writers::bytes(kWriters);
    all = {pages.data(), at + bytes};
    table = {pages.data() + at, bytes};
    format_without_curve(blocks);
    Writers::format(table, kWriters);
  }
  void keep() { state.assign(all.begin(), all.end()); }
  void restore() { std::memcpy(all.data(), state.data(), state.size()); }

  SharedPages pages;
  Layout blocks;
  std::span<std::byte> table, all;
  std::vector<std::byte> state;
};

/// What one process has of it.
struct Process {
  Process(const World& world, std::uint64_t participant) : world(world), store(world.blocks.open(participant)), writers(world.table) {}

  /// The rows that were returned, and how many were new.
  std::pair<Indices, std::uint64_t> ask(const Request& request, std::uint64_t lane = 0) {
    Rows columns(world.blocks.fields, request.n);
    for (std::uint64_t i = 0; i < request.n; ++i) columns.describe(i, request.id(i));
    Indices rows(request.n);
    const std::uint64_t written = writers.append(store, {7, request.writer}, request.number, lane, request.n, columns.in, rows.data());
    return {rows, written};
  }
  const World& world;
  Store store;
  Writers writers;
};

/// The rows of a request are there, where they were said to be, and nowhere else.
void expect_once(const World& world, const Request& request, const Indices& rows) {
  const Control control = world.blocks.view();
  for (std::uint64_t i = 0; i < request.n; ++i) {
    std::uint64_t found = 0;
    for (std::uint64_t row = 0; row < control.capacity(); ++row) {
      found += is_committed(control.word(row).load()) && id_in(world.blocks, row) == request.id(i);
    }
    EXPECT_EQ(found, 1u);
    EXPECT_EQ(id_in(world.blocks, static_cast<std::uint64_t>(rows[i])).value_or(0), request.id(i));
    if (i > 0) EXPECT_EQ(rows[i] % static_cast<std::int64_t>(kLength), (rows[i - 1] + 1) % static_cast<std::int64_t>(kLength));
  }
}

TEST(the_table_is_what_a_list_of_all_requests_says) {
  // Against a plain list of requests, with other writers that come and go.
  World world;
  Process a(world, 0), b(world, 1);
  struct Known {
    std::uint64_t used = 0, life = 0;
    std::map<std::uint64_t, std::pair<std::uint64_t, Indices>> requests;
  };
  std::map<std::uint64_t, Known> known;
  std::uint64_t clock = 0, repeated = 0, refused = 0, evicted = 0;
  Dice dice(3);
  for (int step = 0; step < 3000; ++step) {
    const std::uint64_t writer = dice.below(5) + 1, lane = dice.below(2);
    const auto entry = known.find(writer);
    const std::uint64_t next = entry == known.end() ? 1 : entry->second.requests.rbegin()->first + 1;
    const std::uint64_t number = dice.below(3) == 0 ? dice.below(next + 3) : next;
    Process& process = dice.below(2) == 0 ? a : b;
    EXPECT_EQ(process.writers.next({7, writer}), next);
    EXPECT_EQ(process.writers.next({8, writer}), 1u);
    const bool old = entry != known.end() && entry->second.requests.contains(number);
    const std::uint64_t n = old ? entry->second.requests.at(number).first : dice.in(1, 3);
    if (!old && number != next) {
      try {
        process.ask({writer, number, n}, lane);
        EXPECT(false);
      } catch (const Store::OutOfOrder& error) {
        EXPECT_EQ(error.next, next);
      }
      ++refused;
      continue;
    }
    if (old) EXPECT_THROWS(std::invalid_argument, process.ask({writer, number, n + 1}, lane));
    const std::uint64_t life = entry == known.end() ? clock + 1 : entry->second.life;
    const auto [rows, written] = process.ask({writer, number, n, life}, lane);
    EXPECT_EQ(written, old ? 0 : n);
    if (old) EXPECT(rows == entry->second.requests.at(number).second);
    repeated += old;
    if (entry == known.end() && known.size() == kWriters) {
      ++evicted;
      known.erase(std::min_element(known.begin(), known.end(), [](const auto& x, const auto& y) { return x.second.used < y.second.used; }));
    }
    Known& mine = known[writer];
    mine.used = ++clock, mine.life = life;
    mine.requests[number] = {n, rows};
    while (mine.requests.size() > Writers::kWindow) mine.requests.erase(mine.requests.begin());
    if (!old) expect_once(world, {writer, number, n, life}, rows);
    for (const auto& [known_number, request] : mine.requests) {
      const auto place = process.writers.rows_of({7, writer}, known_number);
      EXPECT(place && place->n == request.first);
      for (std::uint64_t i = 0; place && i < place->n; ++i) {
        EXPECT_EQ(request.second[i], static_cast<std::int64_t>(place->lane * kLength + (place->first + i) % kLength));
      }
    }
    for (const std::uint64_t unknown : {std::uint64_t{0}, mine.requests.begin()->first - 1, mine.requests.rbegin()->first + 1}) {
      EXPECT(!process.writers.rows_of({7, writer}, unknown));
    }
    EXPECT(!process.writers.rows_of({8, writer}, number));
  }
  EXPECT(repeated > 100 && refused > 100 && evicted > 100);
  a.store.empty(false);
  const std::uint64_t writer = known.begin()->first, number = known.begin()->second.requests.rbegin()->first;
  EXPECT_EQ(a.ask({writer, number, known.begin()->second.requests.at(number).first}).second, 0u);  // it was written, and forgotten
  EXPECT_EQ(a.store.control().size(), 0u);
}

TEST(memory_of_a_table_is_checked) {
  World world;
  EXPECT_THROWS(std::invalid_argument, Writers(world.table.first(kPage)));
  EXPECT_THROWS(std::invalid_argument, Writers(world.table.subspan(64)));
  EXPECT_THROWS(std::invalid_argument, Writers::bytes(0));
  EXPECT_THROWS(std::invalid_argument, Writers::bytes(std::uint64_t{1} << 40));
  Process a(world, 0);
  EXPECT_THROWS(std::invalid_argument, a.ask({1, 1, 1}, kLanes));
  EXPECT_EQ(a.writers.next({7, 1}), 1u);
}

#ifdef ENGRAM_CAN_STEP

/// What the memory is at this instruction, without participants that do not exist.
std::uint64_t hash(const World& world) {
  const std::uint64_t lanes = kLanes * sizeof(Lane), participants = kParticipants * sizeof(Participant);
  const Blocks& blocks = world.blocks;
  const std::uint64_t lanes_at = blocks.control.size() - lanes;
  return hash_of(world.all.subspan(lanes_at), hash_of(blocks.control.subspan(lanes_at - participants, sizeof(Participant))));
}

/// What came before the request that is stopped, and that request.
struct Case {
  std::vector<Request> before;
  Request request;
};

const std::vector<Case> kCases = {
    {{}, {1, 1, 2}},
    {{{1, 1, 2}, {2, 1, 1}}, {1, 2, 3}},
    {{{1, 1, 1}, {2, 1, 1}, {3, 1, 3}, {2, 2, 3}}, {4, 1, 3}},  // it takes the place of the first, and laps rows
};

std::vector<std::uint64_t> states_of(World& world, const Case& of, std::vector<std::uint64_t>& instructions) {
  Process first(world, 3), process(world, 0);
  for (const Request& request : of.before) first.ask(request);
  world.keep();
  process.ask(of.request);  // resolves every symbol
  world.restore();
  Stepped child([&] { process.ask(of.request); });
  std::set<std::uint64_t> seen;
  std::vector<std::uint64_t> states;
  for (std::uint64_t step = 0; child.end() == Stepped::End::running && step < 200000; ++step, child.step()) {
    instructions.push_back(child.at());
    if (seen.insert(hash(world)).second) states.push_back(step);
  }
  if (child.end() == Stepped::End::done) return states;
  std::printf("      skipped: a child cannot be stepped through here, or no step ends\n");
  return {};
}

TEST(a_request_is_repeated_after_a_death_at_every_instruction) {
  std::uint64_t deaths = 0, noted = 0, fresh = 0;
  for (const Case& of : kCases) {
    World world;
    std::vector<std::uint64_t> instructions;
    const auto states = states_of(world, of, instructions);
    if (states.empty()) return;
    for (const std::uint64_t step : begins_and_ends(states)) {
      const int failures = expect::failures;
      world.restore();
      Process process(world, 0), other(world, 1);
      {
        Stepped child([&] { process.ask(of.request); });
        if (step > 0) EXPECT(child.go_to(instructions, step) == Stepped::End::running);
      }
      other.store.repair(other.store.control().participant(0));
      const bool known = other.writers.next({7, of.request.writer}) == of.request.number + 1;
      const auto [rows, written] = other.ask(of.request);
      expect_once(world, of.request, rows);
      EXPECT(known || written == of.request.n);
      const auto [again, nothing] = other.ask(of.request);
      EXPECT(again == rows && nothing == 0);
      // The others are known as before, but for one whose entry was needed; and the next request comes behind.
      for (const Request& request : of.before) {
        const std::uint64_t next = other.writers.next({7, request.writer});
        EXPECT(next > request.number || (next == 1 && request.writer == of.before.front().writer));
      }
      const Request following{of.request.writer, of.request.number + 1, 1};
      expect_once(world, following, other.ask(following).first);
      expect_sound_rows(world.blocks);
      noted += known, fresh += !known, ++deaths;
      if (expect::failures == failures) continue;
      std::fprintf(stderr, "  request %llu of writer %llu, killed before step %llu\n", llu(of.request.number), llu(of.request.writer), llu(step));
      if (expect::failures > 20) return;
    }
  }
  std::printf("requests of writers: repeated after %s deaths, %s of them noted before\n", stress::count(deaths).c_str(),
              stress::count(noted).c_str());
  EXPECT(noted > 20 && fresh > 5);
}

TEST(a_request_is_repeated_beside_one_that_is_only_stopped) {
  std::uint64_t pairs = 0, waited = 0;
  for (const Case& of : kCases) {
    World world;
    SharedPages answer_pages(4096);
    auto* answers = reinterpret_cast<std::int64_t*>(answer_pages.data());
    std::vector<std::uint64_t> instructions;
    const auto states = states_of(world, of, instructions);
    if (states.empty()) return;
    const auto answer = [&](Process& process, std::int64_t* to) {
      const auto [rows, written] = process.ask(of.request);
      std::copy(rows.begin(), rows.end(), to);
      to[8] = static_cast<std::int64_t>(written);
    };
    for (const std::uint64_t step : states) {
      const int failures = expect::failures;
      world.restore();
      Process one(world, 0), two(world, 1);
      Stepped stopped([&] { answer(one, answers); });
      EXPECT(step == 0 || stopped.go_to(instructions, step) == Stepped::End::running);
      const pid_t child = fork();
      if (child == 0) {
        answer(two, answers + 16);
        _exit(0);
      }
      int status = 0;
      bool ended = false;
      for (const auto start = std::chrono::steady_clock::now(); !ended && std::chrono::steady_clock::now() < start + 4ms;) {
        ended = waitpid(child, &status, WNOHANG) == child;
        if (!ended) std::this_thread::sleep_for(50us);
      }
      waited += !ended;
      stopped.resume();
      EXPECT(stopped.finish());
      if (!ended) waitpid(child, &status, 0);
      EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
      EXPECT(std::equal(answers, answers + of.request.n, answers + 16));
      EXPECT_EQ(answers[8] + answers[24], static_cast<std::int64_t>(of.request.n));
      expect_once(world, of.request, Indices(answers, answers + of.request.n));
      expect_sound_rows(world.blocks);
      ++pairs;
      if (expect::failures == failures) continue;
      std::fprintf(stderr, "  request %llu of writer %llu, stopped before step %llu\n", llu(of.request.number), llu(of.request.writer), llu(step));
      if (expect::failures > 20) return;
    }
  }
  std::printf("requests of writers: repeated beside %s that were stopped; %s waited\n", stress::count(pairs).c_str(),
              stress::count(waited).c_str());
  EXPECT(waited > 0);
}

#endif

}  // namespace
