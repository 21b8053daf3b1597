// Many threads on one store. Every row says by itself whether it is whole, and every write is noted by who made it, so
// that a row that was read can be compared with the write that its ticket number names.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "blocks.h"
#include "core/check.h"
#include "core/pool.h"
#include "core/store.h"
#include "expect.h"

using namespace engram;
using namespace std::chrono_literals;

namespace {

using Indices = std::vector<std::int64_t>;

struct Write {
  std::uint64_t number, id;
  std::int64_t row;
  bool appended = false;
};

/// Threads that run until told to stop. What they throw is a failure of the test.
class Crew {
 public:
  void add(std::function<void()> step, std::function<void()> finish = {}) {
    threads_.emplace_back([this, step = std::move(step), finish = std::move(finish)] {
      try {
        while (!stop_.load(std::memory_order_relaxed)) step();
        if (finish) finish();
      } catch (const std::exception& e) {
        expect::fail(__FILE__, __LINE__, std::string("a thread ended with: ") + e.what());
      }
    });
  }
  /// At least this long, and until there is enough: how much a second brings is for the machine to say.
  void work_for(std::chrono::milliseconds time, const std::function<bool()>& enough) {
    const auto start = std::chrono::steady_clock::now();
    std::this_thread::sleep_for(time);
    while (!enough() && std::chrono::steady_clock::now() < start + 60s) std::this_thread::sleep_for(10ms);
    stop();
    EXPECT(enough());
  }
  void stop() {
    stop_ = true;
    for (auto& thread : threads_) thread.join();
    threads_.clear();
  }
  ~Crew() { stop(); }

 private:
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

/// Writes rows of its own ids, each once, and notes them.
struct Writer {
  Writer(const Heap& heap, Store& store, std::uint64_t name)
      : fields(heap.fields), store(store), rows(heap.fields, 8), numbers(8), dice(name), next_id(name << 48) {}

  std::uint64_t prepare(std::uint64_t n) {
    for (std::uint64_t i = 0; i < n; ++i) rows.describe(i, ++next_id);
    return next_id - n;
  }
  void note(std::uint64_t t0, std::uint64_t n, std::uint64_t before, const std::int64_t* at, bool appended) {
    for (std::uint64_t i = 0; i < n; ++i) writes.push_back({t0 + i, before + 1 + i, at[i], appended});
  }
  void append(std::uint64_t lane, std::uint64_t n) {
    const std::uint64_t before = prepare(n);
    std::int64_t at[8];
    note(store.append(lane, n, rows.in, at), n, before, at, true);
  }
  void append_by_lane(std::uint64_t n) {
    const std::uint64_t before = prepare(n);
    std::int64_t lanes[8], at[8];
    for (std::uint64_t i = 0; i < n; ++i) lanes[i] = static_cast<std::int64_t>(dice.below(store.control().lanes()));
    note(store.append_by_lane(lanes, n, rows.in, at), n, before, at, true);
  }
  /// Random rows of the first `among`, some of them perhaps twice.
  void scatter(std::uint64_t n, std::uint64_t among, bool grow) {
    const std::uint64_t before = prepare(n);
    std::int64_t at[8];
    for (std::uint64_t i = 0; i < n; ++i) at[i] = static_cast<std::int64_t>(dice.below(among));
    std::vector<std::uint64_t> which(fields.size());
    std::iota(which.begin(), which.end(), std::uint64_t{0});
    note(store.scatter(at, n, which, rows.in, grow), n, before, at, false);
  }

  const std::vector<Field>& fields;
  Store& store;
  Rows rows;
  Indices numbers;
  Dice dice;
  std::uint64_t next_id;
  std::vector<Write> writes;
};

/// Draws and gathers rows, counts torn ones and notes the others.
struct Reader {
  static constexpr std::uint64_t kBatch = 16;
  static constexpr std::size_t kNoted = 400000;

  Reader(const Heap& heap, const Store& store, std::uint64_t name)
      : store(store), rows(heap.fields, kBatch), numbers(kBatch), drawn(kBatch), dice(name) {
    which.resize(heap.fields.size());
    std::iota(which.begin(), which.end(), std::uint64_t{0});
  }

  void take(std::uint64_t i) {
    const auto id = rows.id(i);
    ++read;
    if (!id) {
      ++torn;
    } else if (seen.size() < kNoted) {
      seen.push_back({static_cast<std::uint64_t>(numbers[i]), *id, drawn[i], false});
    }
  }
  void sample() {
    store.sample_uniform(dice.bits(), kBatch, rows.out, drawn.data(), numbers.data());
    for (std::uint64_t i = 0; i < kBatch; ++i) take(i);
  }
  /// `expected`: of the rows and numbers of the last sample, else of random rows.
  void gather(bool expected) {
    if (!expected) {
      for (auto& row : drawn) row = static_cast<std::int64_t>(dice.below(store.control().capacity()));
    }
    const Indices wanted = numbers;
    const Indices moved = store.gather(drawn.data(), kBatch, which, rows.out, expected ? wanted.data() : nullptr,
                                       numbers.data());
    std::uint64_t m = 0;
    for (std::uint64_t i = 0; i < kBatch; ++i) {
      if (m < moved.size() && moved[m] == static_cast<std::int64_t>(i)) {
        ++m;
        continue;
      }
      if (expected) EXPECT_EQ(numbers[i], wanted[i]);
      take(i);
    }
  }
  void read_some() {
    sample();
    gather(true);
    gather(false);
  }

  const Store& store;
  Rows rows;
  Indices numbers, drawn;
  Dice dice;
  std::vector<std::uint64_t> which;
  std::vector<Write> seen;
  std::atomic<std::uint64_t> read{0};
  std::uint64_t torn = 0;
};

/// After all have stopped: what was read is what was written under that number, and each row holds its newest write.
/// Only a writer that was lapped before it had its number may have a larger one than the row that it left alone, and one by
/// number than the append that came to the row's next lap.
void check_history(const Heap& heap, const Store& store, const std::vector<Writer*>& writers,
                   const std::vector<Reader*>& readers) {
  const Control& control = store.control();
  const std::uint64_t numbers = control.counters().next_ticket.load();
  std::vector<Write> by_number(numbers, Write{0, 0, -1});
  std::vector<std::uint64_t> newest(control.capacity());
  for (const Writer* writer : writers) {
    for (const Write& write : writer->writes) {
      EXPECT(write.number < numbers);
      EXPECT_EQ(by_number[write.number].number, 0u);  // no number twice
      by_number[write.number] = write;
      auto& of_row = newest[static_cast<std::uint64_t>(write.row)];
      of_row = std::max(of_row, write.number);
    }
  }
  std::uint64_t read = 0, torn = 0, other = 0, older = 0;
  for (const Reader* reader : readers) {
    read += reader->read;
    torn += reader->torn;
    for (const Write& seen : reader->seen) {
      const Write& write = by_number[seen.number];
      other += write.id != seen.id || write.row != seen.row;
    }
  }
  EXPECT_EQ(torn, 0u);
  EXPECT_EQ(other, 0u);
  Rows row(heap.fields, 1);
  std::vector<std::uint64_t> which(heap.fields.size());
  std::iota(which.begin(), which.end(), std::uint64_t{0});
  for (std::uint64_t r = 0; r < control.capacity(); ++r) {
    if (newest[r] == 0) continue;
    const auto at = static_cast<std::int64_t>(r);
    std::int64_t number = 0;
    EXPECT(store.gather(&at, 1, which, row.out, nullptr, &number).empty());
    const bool next_lap = by_number[static_cast<std::uint64_t>(number)].appended && !by_number[newest[r]].appended;
    older += static_cast<std::uint64_t>(number) != newest[r] && !next_lap;
    EXPECT_EQ(by_number[static_cast<std::uint64_t>(number)].row, at);
    EXPECT_EQ(row.id(0).value_or(1), by_number[static_cast<std::uint64_t>(number)].id);
  }
  EXPECT(older <= control.counters().lapped_rows.load() && older <= writers.size());
  for (std::uint64_t p = 0; p < 2; ++p) {
    for (const Claim& claim : control.participant(p).claims) EXPECT_EQ(claim.t0.load(), 0u);
  }
  std::printf("      %llu rows written, %llu lapped, %llu read, %llu drawn again, %llu torn\n",
              static_cast<unsigned long long>(numbers - 1),
              static_cast<unsigned long long>(control.counters().lapped_rows.load()),
              static_cast<unsigned long long>(read),
              static_cast<unsigned long long>(control.counters().redraws.load()),
              static_cast<unsigned long long>(torn));
}

// ---- torn rows -----------------------------------------------------------------------------------------------------

TEST(appends_to_tiny_rings_never_show_a_torn_row) {
  for (const auto& [lanes, length] : {std::pair{1, 2}, std::pair{2, 3}, std::pair{1, 1}}) {
    const Heap heap(geometry(static_cast<std::uint64_t>(lanes), static_cast<std::uint64_t>(length)), {64, 136});
    Store store = heap.open(0), other = heap.open(1);  // as two processes have: one table, two entries
    Writer a(heap, store, 1), b(heap, store, 2), c(heap, other, 3), d(heap, store, 4);
    Reader r(heap, store, 5), s(heap, other, 6);
    for (std::uint64_t lane = 0; lane < store.control().lanes(); ++lane) a.append(lane, 8);
    Crew crew;
    const std::uint64_t last = store.control().lanes() - 1;
    crew.add([&] { a.append(0, 1); });
    crew.add([&] { b.append(last, b.dice.in(1, 5)); });  // several rows, more than the ring has
    crew.add([&] { c.append(last, c.dice.in(1, 2)); });
    crew.add([&] { d.append_by_lane(d.dice.in(1, 6)); });
    crew.add([&] { r.read_some(); });
    crew.add([&] { s.read_some(); });
    crew.add([&] { store.control().meter_page().interval.store(0); });  // and points of the curve are noted all the time
    crew.work_for(700ms, [&] { return r.read + s.read > 1000; });
    EXPECT(store.control().meter_page().points.load() > 0);
    check_history(heap, store, {&a, &b, &c, &d}, {&r, &s});
    EXPECT_EQ(store.control().size(), store.control().capacity());
    EXPECT(store.holes().empty());
    EXPECT_EQ(store.control().counters().write_count.load(), store.control().counters().next_ticket.load() - 1);
  }
}

TEST(writes_in_place_never_show_a_torn_row) {
  const Heap heap(geometry(2, 3), {64, 136});
  Store store = heap.open(0);
  Writer a(heap, store, 1), b(heap, store, 2), c(heap, store, 3);
  Reader r(heap, store, 5), s(heap, store, 6);
  for (std::uint64_t lane = 0; lane < 2; ++lane) a.append(lane, 3);
  Crew crew;
  crew.add([&] { a.append(0, 2); });
  crew.add([&] { b.scatter(b.dice.in(1, 4), 6, true); });
  crew.add([&] {
    try {
      c.scatter(c.dice.in(1, 4), 6, false);
    } catch (const std::out_of_range&) {  // just being written by another: nothing was changed
    }
  });
  crew.add([&] { r.read_some(); });
  crew.add([&] { s.read_some(); });
  crew.work_for(1000ms, [&] { return r.read + s.read > 1000; });
  check_history(heap, store, {&a, &b, &c}, {&r, &s});
  EXPECT_EQ(store.control().size(), 6u);
}

TEST(large_batches_are_whole_with_every_number_of_threads) {
  const Heap heap(geometry(1, 64), {4096, 64});
  Store store = heap.open(0);
  Writer a(heap, store, 1);
  for (int i = 0; i < 8; ++i) a.append(0, 8);
  constexpr std::uint64_t n = 256;  // 1 MiB: worth several threads
  std::atomic<std::uint64_t> read{0}, torn{0};
  Crew crew;
  crew.add([&] { a.append(0, 2); });
  for (std::uint64_t t = 0; t < 2; ++t) {
    crew.add([&, t, dice = Dice(50 + t), rows = std::make_shared<Rows>(heap.fields, n)]() mutable {
      store.sample_uniform(dice.bits(), n, rows->out, nullptr, nullptr);
      for (std::uint64_t i = 0; i < n; ++i) torn += !rows->id(i);
      read += n;
    });
  }
  crew.add([dice = Dice(60)]() mutable {
    set_num_threads(dice.in(1, 4));
    std::this_thread::sleep_for(5ms);
  });
  crew.work_for(800ms, [&] { return read > 0; });
  EXPECT_EQ(torn.load(), 0u);
}

#ifndef ENGRAM_TSAN
TEST(rows_of_32_kib_tear_without_the_tickets_and_never_with_them) {
  // The negative control: the same ring, the same writer, the same rows. Whoever does not look at the tickets sees torn
  // rows; if he does not, this test proves nothing.
  constexpr std::uint64_t bytes = 32 * 1024;
  const Heap heap(geometry(1, 4), {bytes});
  Store store = heap.open(0);
  Writer a(heap, store, 1);
  a.append(0, 4);
  Reader with(heap, store, 5);
  std::uint64_t unchecked = 0;
  std::atomic<std::uint64_t> unchecked_torn{0};
  std::vector<std::byte> row(bytes);
  Dice dice(7);
  Crew crew;
  crew.add([&] { a.append(0, 1); });
  crew.add([&] { with.sample(); });
  crew.add([&] {
    std::memcpy(row.data(), heap.fields[0].data + dice.below(4) * bytes, bytes);
    ++unchecked;
    if (!id_of(row.data(), bytes)) ++unchecked_torn;
  });
  crew.work_for(1s, [&] { return unchecked_torn > 0; });
  std::printf("      without the tickets %llu of %llu rows were torn\n",
              static_cast<unsigned long long>(unchecked_torn.load()), static_cast<unsigned long long>(unchecked));
  check_history(heap, store, {&a}, {&with});
}
#endif

// ---- other things at the same time ---------------------------------------------------------------------------------

TEST(growing_never_hides_a_row_behind_zeros) {
  // Whoever makes the rows below his own live as zeros meets others who are about to write those very rows.
  std::uint64_t zeros = 0, rounds = 0;
  for (const auto start = std::chrono::steady_clock::now(); std::chrono::steady_clock::now() < start + 1s; ++rounds) {
    constexpr std::uint64_t length = 3000;
    const Heap heap(geometry(1, length), {64, 136});
    Store store = heap.open(0);
    Writer a(heap, store, 1), b(heap, store, 2), c(heap, store, 3);
    Reader r(heap, store, 5);
    for (Writer* writer : {&a, &b, &c}) writer->dice = Dice(rounds * 3 + writer->next_id);
    std::atomic<int> ready{0};
    std::vector<std::thread> threads;
    const auto with_others = [&](auto body) {
      threads.emplace_back([&, body] {
        for (++ready; ready < 4;) std::this_thread::yield();
        body();
      });
    };
    with_others([&] { a.scatter(4, length, true); });
    with_others([&] { b.scatter(4, length, true); });
    with_others([&] { for (int i = 0; i < 30; ++i) c.append(0, 1); });
    with_others([&] { for (int i = 0; i < 30; ++i) r.gather(false); });
    for (auto& thread : threads) thread.join();
    std::vector<std::uint64_t> which{0, 1};
    EXPECT(store.holes().empty());
    EXPECT_EQ(store.control().size(), store.control().filled(0));
    Rows row(heap.fields, 1);
    for (const Writer* writer : {&a, &b, &c}) {
      for (const Write& write : writer->writes) {
        EXPECT(store.gather(&write.row, 1, which, row.out, nullptr, nullptr).empty());
        EXPECT(row.id(0).has_value());
        zeros += row.id(0) == 0;
      }
    }
    EXPECT_EQ(r.torn, 0u);
  }
  std::printf("      %llu rounds\n", static_cast<unsigned long long>(rounds));
  EXPECT_EQ(zeros, 0u);
}

TEST(emptying_beside_writers_and_readers) {
  const Heap heap(geometry(2, 4), {64, 136});
  Store store = heap.open(0);
  Writer a(heap, store, 1), b(heap, store, 2);
  Reader r(heap, store, 5);
  Crew crew;
  crew.add([&] { a.append(0, a.dice.in(1, 3)); });
  crew.add([&] { b.append_by_lane(b.dice.in(1, 6)); });
  crew.add([&] {
    try {
      r.read_some();
    } catch (const NothingLive&) {  // just emptied
    }
  });
  crew.add([&] {
    store.control().empty(true);
    std::this_thread::sleep_for(1ms);
  });
  crew.work_for(800ms, [&] { return r.read > 1000; });
  EXPECT_EQ(r.torn, 0u);
  const auto holes = store.holes();
  EXPECT_EQ(store.control().size(), store.control().filled(0) + store.control().filled(1));
  EXPECT_EQ(holes, Indices{});
  // All is well again after a last emptying in peace.
  store.control().empty(false);
  EXPECT_EQ(store.control().size(), 0u);
  a.append(0, 4);
  b.append(1, 4);
  EXPECT_EQ(store.control().size(), 8u);
  r.torn = 0;
  r.sample();
  EXPECT_EQ(r.torn, 0u);
}

TEST(draws_beside_the_first_large_batch) {
  // A first batch of more rows than are written in a moment: whoever draws meanwhile finds the rows that are there.
  const Heap heap(geometry(1, 20000), {64});
  Store store = heap.open(0);
  Rows rows(heap.fields, 20000);
  for (std::uint64_t i = 0; i < 20000; ++i) rows.describe(i, i + 1);
  for (int round = 0; round < 5; ++round) {
    store.control().empty(false);
    std::thread writer([&] { store.append(0, 20000, rows.in, nullptr); });
    Reader r(heap, store, static_cast<std::uint64_t>(round));
    bool found = false;
    while (!found || r.read < 3000) {
      try {
        r.sample();
        found = true;
      } catch (const NothingLive&) {
        EXPECT(!found);  // once there are rows they do not go away
      }
    }
    writer.join();
    EXPECT_EQ(r.torn, 0u);
    for (const Write& seen : r.seen) EXPECT_EQ(seen.id, static_cast<std::uint64_t>(seen.row) + 1);
  }
}

}  // namespace
