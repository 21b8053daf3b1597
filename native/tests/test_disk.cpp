// Rows in files: what calls read and write is what the mapping has, a row that a read accepts is whole, and a disk that fails leaves
// a store that works.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "blocks.h"
#include "core/check.h"
#include "core/disk.h"
#include "core/store.h"
#include "expect.h"
#include "stress.h"

using namespace engram;

namespace {

/// The fields in files of the working directory, mapped; nothing else has a file. Fields of at most `small` bytes lie in that of the
/// first of them, the last of them first in each row, and some bytes behind them.
class Files : public Blocks {
 public:
  Files(Geometry g, const std::vector<std::uint64_t>& row_bytes, std::uint64_t small = 0)
      : heap_(g, std::vector<std::uint64_t>(row_bytes.size(), 0)) {
    geometry = g;
    control = heap_.control;
    tickets = heap_.tickets;
    std::uint64_t stride = 3;
    for (const std::uint64_t bytes : row_bytes) stride += bytes <= small ? bytes : 0;
    std::byte* together = nullptr;
    std::uint64_t end = stride - 3;
    for (const std::uint64_t bytes : row_bytes) {
      if (bytes > small) {
        fields.push_back({mapped(bytes * g.capacity), bytes});
        continue;
      }
      if (together == nullptr) {
        together = mapped(stride * g.capacity);
      } else {
        paths.emplace_back();
      }
      fields.push_back({together + (end -= bytes), bytes, stride});
    }
  }
  ~Files() {
    for (const std::span<std::byte> memory : memories_) munmap(memory.data(), memory.size());
    for (const std::string& path : paths) unlink(path.c_str());
  }
  Files(const Files&) = delete;
  Files& operator=(const Files&) = delete;

  std::unique_ptr<Store> store(Residency::Way reads, Residency::Way writes, std::uint64_t participant = 0) const {
    auto store = std::make_unique<Store>(view(), fields, participant);
    store->use(std::make_unique<Disk>(paths, false));
    store->disk()->reads.set(reads);
    store->disk()->writes.set(writes);
    return store;
  }
  std::uint64_t id(std::uint64_t row) const { return id_of(fields[0].row(row), fields[0].row_bytes).value_or(~0ull); }

  std::vector<std::string> paths;

 private:
  std::byte* mapped(std::uint64_t size) {
    std::string& path = paths.emplace_back("disk-XXXXXX");
    const int file = mkstemp(path.data());
    EXPECT(file >= 0 && ftruncate(file, static_cast<off_t>(size)) == 0);
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    EXPECT(memory != MAP_FAILED);
    close(file);
    memories_.emplace_back(static_cast<std::byte*>(memory), size);
    return memories_.back().data();
  }

  Heap heap_;
  std::vector<std::span<std::byte>> memories_;
};

// The thread sanitizer copies rows byte by byte.
#ifdef ENGRAM_TSAN
constexpr int kRounds = 3;
constexpr std::uint64_t kReads = 2'000;
#else
constexpr int kRounds = 25;
constexpr std::uint64_t kReads = 20'000;
#endif
constexpr auto kMapped = Residency::Way::mapped, kDirect = Residency::Way::direct;

/// What an index hears.
struct Heard : Index {
  void written(const std::int64_t* rows, std::uint64_t n, std::uint64_t) override { live.insert(live.end(), rows, rows + n); }
  void edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t, std::span<const std::uint64_t>, std::uint64_t) override {
    live.insert(live.end(), rows, rows + n);
  }
  void lost(const std::int64_t* rows, std::uint64_t n) override { gone.insert(gone.end(), rows, rows + n); }
  void emptied() override {}
  std::vector<std::int64_t> live, gone;
};

std::vector<std::uint64_t> all_fields(const Blocks& blocks) {
  std::vector<std::uint64_t> which(blocks.fields.size());
  std::iota(which.begin(), which.end(), std::uint64_t{0});
  return which;
}

/// Writes of every kind by one way, read by another one. The oracle is a table of what each row was last given.
TEST(both_ways_read_what_both_ways_write) {
  for (const std::vector<std::uint64_t>& row_bytes :
       {std::vector<std::uint64_t>{8}, {56, 8}, {4096, 8, 128}, {4104, 24}, {28224, 8}}) {
    for (const auto& [lanes, small] : {std::pair{1u, 0u}, {3u, 0u}, {1u, 200u}, {3u, 100'000u}}) {
      const Files files(geometry(lanes, 300 / lanes), row_bytes, small);
      Dice dice(row_bytes[0] + lanes + small);
      std::map<std::int64_t, std::uint64_t> wanted;
      std::uint64_t id = 0;
      const auto stores = std::array{files.store(kMapped, kMapped, 0), files.store(kDirect, kDirect, 1)};
      for (int round = 0; round < kRounds; ++round) {
        Store& writer = *stores[static_cast<std::size_t>(round % 2)];
        const std::uint64_t n = dice.in(1, 40);
        Rows rows(files.fields, n);
        for (std::uint64_t i = 0; i < n; ++i) rows.describe(i, id + 1 + i);
        std::vector<std::int64_t> at(n);
        switch (dice.below(3)) {
          case 0: writer.append(dice.below(lanes), n, rows.in, at.data()); break;
          case 1: {
            std::vector<std::int64_t> lane_of(n);
            for (auto& lane : lane_of) lane = static_cast<std::int64_t>(dice.below(lanes));
            writer.append_by_lane(lane_of.data(), n, rows.in, at.data());
            break;
          }
          default:
            for (auto& row : at) row = static_cast<std::int64_t>(dice.below(files.geometry.capacity));
            writer.scatter(at.data(), n, all_fields(files), rows.in, true);
        }
        for (std::uint64_t i = 0; i < n; ++i) wanted[at[i]] = id + 1 + i;
        id += n;

        for (const auto& reader : stores) {
          const std::uint64_t m = dice.in(1, 200);
          Rows batch(files.fields, m);
          std::vector<std::int64_t> read(m), numbers(m);
          if (dice.below(2) == 0) {
            reader->sample_uniform(dice.bits(), m, batch.out, read.data(), numbers.data());
          } else {
            for (auto& row : read) row = std::next(wanted.begin(), static_cast<std::ptrdiff_t>(dice.below(wanted.size())))->first;
            EXPECT(reader->gather(read.data(), m, reader->all(), batch.out, nullptr, numbers.data()).empty());
          }
          std::vector<std::int64_t> tickets(m);
          reader->tickets_of(read.data(), m, tickets.data());
          EXPECT(tickets == numbers);
          for (std::uint64_t i = 0; i < m; ++i) {
            const auto found = wanted.find(read[i]);  // rows below a scattered one became zeros
            EXPECT_EQ(batch.id(i).value_or(~0ull), found == wanted.end() ? 0 : found->second);
          }
        }
      }
      EXPECT(stores[1]->disk()->counters().bytes_read > 0);
      EXPECT(stores[1]->disk()->counters().bytes_written > 0);
      EXPECT_EQ(stores[0]->disk()->counters().reads.load() + stores[0]->disk()->counters().writes.load(), 0u);
    }
  }
}

TEST(both_ways_draw_the_same) {
  for (const std::uint64_t small : {0, 100, 5000}) {
    const Files files(geometry(2, 64), {4096, 8}, small);
    const auto mapped = files.store(kMapped, kMapped), direct = files.store(kDirect, kDirect, 1);
    Rows rows(files.fields, 50);
    for (std::uint64_t i = 0; i < 50; ++i) rows.describe(i, i + 1);
    mapped->append(0, 50, rows.in, nullptr);
    mapped->append(1, 20, rows.in, nullptr);
    for (std::uint64_t key = 0; key < 20; ++key) {
      Rows a(files.fields, 100), b(files.fields, 100);
      std::int64_t of_a[100], of_b[100];
      mapped->sample_uniform(key, 100, a.out, of_a, nullptr);
      direct->sample_uniform(key, 100, b.out, of_b, nullptr);
      EXPECT(std::equal(of_a, of_a + 100, of_b));
      EXPECT(a.data == b.data);
    }
  }
}

/// One field of rows that lie among others' is replaced in pieces; the others keep their bytes.
TEST(a_field_among_others_is_refilled_alone) {
  constexpr std::uint64_t n = 20'000;
  const Files files(geometry(1, n), {40, 8, 120}, 200);
  const auto store = files.store(kDirect, kDirect);
  Rows rows(files.fields, n), others(files.fields, n), batch(files.fields, n);
  for (std::uint64_t i = 0; i < n; ++i) rows.describe(i, i + 1), others.describe(i, i + 1 + n);
  store->append(0, n, rows.in, nullptr);
  EXPECT(store->refill(1, 100, n - 200, others.in[1] + 100 * 8));
  std::vector<std::int64_t> at(n);
  std::iota(at.begin(), at.end(), 0);
  EXPECT(store->gather(at.data(), n, store->all(), batch.out, nullptr, nullptr).empty());
  EXPECT(batch.data[0] == rows.data[0]);
  EXPECT(batch.data[2] == rows.data[2]);
  std::copy_n(others.in[1] + 100 * 8, (n - 200) * 8, rows.data[1].data() + 100 * 8);
  EXPECT(batch.data[1] == rows.data[1]);
  EXPECT(!files.store(kMapped, kMapped)->refill(1, 0, n, rows.in[1]));
}

TEST(a_batch_larger_than_what_is_announced_at_a_time_and_a_field_without_a_file) {
  const Files files(geometry(1, 1500), {28224, 8});
  std::vector<Field> fields = files.fields;
  std::vector<std::byte> memory(1500 * 16);
  fields.push_back({memory.data(), 16});
  const auto store = std::make_unique<Store>(files.view(), files.fields, 0);
  store->use(std::make_unique<Disk>(files.paths, true));
  store->add_field(fields[2]);
  store->disk()->reads.set(kDirect);
  store->disk()->writes.set(kDirect);
  Rows rows(fields, 1500);
  for (std::uint64_t i = 0; i < 1500; ++i) rows.describe(i, i + 1);
  store->append(0, 1500, rows.in, nullptr);
  Rows batch(fields, 1500);
  std::vector<std::int64_t> at(1500), expected(1500);
  for (std::uint64_t i = 0; i < 1500; ++i) at[i] = static_cast<std::int64_t>(i * 7 % 1500), expected[i] = at[i] + 1;
  expected[3] += 1;
  const auto moved = store->gather(at.data(), 1500, store->all(), batch.out, expected.data(), nullptr);
  EXPECT_EQ(moved.size(), 1u);
  EXPECT_EQ(moved.at(0), 3);
  for (std::uint64_t i = 0; i < 1500; ++i) EXPECT_EQ(batch.id(i).value_or(0), i * 7 % 1500 + 1);
}

TEST(a_file_that_ends_early_is_an_error_that_says_where_and_passes) {
  const Files files(geometry(1, 100), {8, 4096});
  const auto store = files.store(kDirect, kDirect);
  Rows rows(files.fields, 100), batch(files.fields, 100);
  for (std::uint64_t i = 0; i < 100; ++i) rows.describe(i, i + 1);
  store->append(0, 100, rows.in, nullptr);
  EXPECT_EQ(truncate(files.paths[1].c_str(), 50 * 4096 + 100), 0);
  const std::int64_t at[] = {10, 50};
  try {
    store->gather(at, 2, store->all(), batch.out, nullptr, nullptr);
    EXPECT(false);
  } catch (const DiskError& error) {
    EXPECT_EQ(error.path, files.paths[1]);
    EXPECT_EQ(std::string(error.what()), "read at byte " + std::to_string(50 * 4096 + 100) + ": expected more rows, the file ends there");
  }
  EXPECT_THROWS(DiskError, store->sample_uniform(1, 100, batch.out, nullptr, nullptr));
  EXPECT(store->gather(at, 1, store->all(), batch.out, nullptr, nullptr).empty());
  try {
    store->append(0, 100, rows.in, nullptr);
    EXPECT(false);
  } catch (const DiskError& error) {
    EXPECT_EQ(error.path, files.paths[1]);
    EXPECT_EQ(std::string(error.what()), "write at byte 0: expected more rows, the file ends there");
  }
  struct stat found {};
  EXPECT_EQ(stat(files.paths[1].c_str(), &found), 0);
  EXPECT_EQ(found.st_size, 50 * 4096 + 100);
  EXPECT_EQ(truncate(files.paths[1].c_str(), 100 * 4096), 0);
  store->append(0, 100, rows.in, nullptr);
  EXPECT(store->gather(at, 2, store->all(), batch.out, nullptr, nullptr).empty());
  EXPECT_EQ(batch.id(1).value_or(0), 51u);
}

/// Writes to a file fail from a byte on, for as long as this lives.
class FailsFrom {
 public:
  explicit FailsFrom(std::uint64_t byte) {
    before_handler_ = std::signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{byte, before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  }
  ~FailsFrom() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, before_handler_);
  }
  FailsFrom(const FailsFrom&) = delete;
  FailsFrom& operator=(const FailsFrom&) = delete;

 private:
  rlimit before_{};
  void (*before_handler_)(int);
};

/// No row is half written, no claim is left, and what can be read is whole.
void expect_at_rest(const Files& files, const Store& store, const Heard& heard) {
  for (std::uint64_t row = 0; row < files.geometry.capacity; ++row) {
    const std::uint64_t word = files.view().word(row).load();
    EXPECT(state_of(word) != State::writing);
    if (!is_committed(word)) continue;
    for (const Field& field : files.fields) EXPECT(id_of(field.row(row), field.row_bytes).has_value());
  }
  for (const Claim& claim : files.view().participant(0).claims) EXPECT_EQ(claim.t0.load(), 0u);
  const auto holes = store.holes();
  for (const std::int64_t row : heard.gone) EXPECT(!is_committed(files.view().word(static_cast<std::uint64_t>(row)).load()));
  EXPECT_EQ(store.control().size() + holes.size(), store.control().filled(0) + (files.geometry.lanes > 1 ? store.control().filled(1) : 0));
}

TEST(a_write_that_fails_midway_leaves_whole_rows_and_a_store_that_works) {
  constexpr std::uint64_t kLong = 28224;  // a piece between two looks at the tickets is some hundred rows
  enum class Kind { append, by_lane, scatter, edit };
  for (const Kind kind : {Kind::append, Kind::by_lane, Kind::scatter, Kind::edit}) {
    const std::uint64_t lanes = kind == Kind::by_lane ? 2 : 1;
    const Files files(geometry(lanes, 600 / lanes), {8, kLong});
    const auto store = files.store(kDirect, kDirect);
    Heard heard;
    store->attach(heard);
    Rows rows(files.fields, 400);
    for (std::uint64_t i = 0; i < 400; ++i) rows.describe(i, i + 1);
    if (kind == Kind::edit) store->append(0, 400, rows.in, nullptr);
    std::vector<std::int64_t> at(400), lane_of(400);
    for (std::uint64_t i = 0; i < 400; ++i) at[i] = static_cast<std::int64_t>(i * 3 % 400), lane_of[i] = static_cast<std::int64_t>(i % 2);
    {
      const FailsFrom limit(kind == Kind::by_lane ? 400 * kLong : 350 * kLong);
      switch (kind) {
        case Kind::append: EXPECT_THROWS(DiskError, store->append(0, 400, rows.in, nullptr)); break;
        case Kind::by_lane: EXPECT_THROWS(DiskError, store->append_by_lane(lane_of.data(), 400, rows.in, nullptr)); break;
        case Kind::scatter: EXPECT_THROWS(DiskError, store->scatter(at.data(), 400, all_fields(files), rows.in, true)); break;
        case Kind::edit: {
          const std::uint64_t which[] = {1};
          const std::byte* columns[] = {rows.in[1]};
          EXPECT_THROWS(DiskError, store->scatter(at.data(), 400, which, columns, false));
        }
      }
    }
    expect_at_rest(files, *store, heard);
    EXPECT(store->control().size() > 0);
    EXPECT(store->control().size() < 400);
    EXPECT(!heard.gone.empty());
    Rows batch(files.fields, 64);
    std::int64_t drawn[64];
    store->sample_uniform(1, 64, batch.out, drawn, nullptr);
    for (std::uint64_t i = 0; i < 64; ++i) EXPECT(kind == Kind::edit || batch.id(i).has_value());
    const std::uint64_t t0 = store->append(0, 300, rows.in, nullptr);
    EXPECT(t0 > 400);
    expect_at_rest(files, *store, Heard{});
  }
}

TEST(what_can_not_be_opened_stays_with_its_mapping) {
  enum class Lacks { path, file, identity };
  for (const Lacks lacks : {Lacks::path, Lacks::file, Lacks::identity}) {
    Files files(geometry(1, 10), {8});
    Store store(files.view(), files.fields, 0);
    store.use(std::make_unique<Disk>(std::vector<std::string>{lacks == Lacks::path ? "no/such/file" : files.paths[0]}, true));
    if (lacks != Lacks::path) EXPECT_EQ(unlink(files.paths[0].c_str()), 0);
    if (lacks == Lacks::identity) EXPECT(std::ofstream(files.paths[0]) << "of another store");
    store.disk()->reads.set(kDirect);
    store.disk()->writes.set(kDirect);
    EXPECT_EQ(store.disk()->has(0), lacks != Lacks::path);
    Rows rows(files.fields, 10), batch(files.fields, 10);
    for (std::uint64_t i = 0; i < 10; ++i) rows.describe(i, i + 1);
    store.append(0, 10, rows.in, nullptr);
    store.sample_uniform(1, 10, batch.out, nullptr, nullptr);
    for (std::uint64_t i = 0; i < 10; ++i) EXPECT(batch.id(i).has_value());
    EXPECT_EQ(files.id(9), 10u);
    EXPECT(!store.disk()->is_open(0));
    if (lacks != Lacks::path) EXPECT_THROWS(DiskError, store.disk()->open(store.all(), true));
  }
}

/// Pages of a file that no process maps can be dropped; a look at the mapping then misses them.
TEST(a_look_finds_what_is_not_in_memory_and_hysteresis_keeps_the_answer) {
  const std::uint64_t rows_of_it = 512;
  std::string path = "disk-XXXXXX";
  const int file = mkstemp(path.data());
  const std::vector<std::byte> page(4096, std::byte{1});
  for (std::uint64_t i = 0; i < rows_of_it; ++i) EXPECT_EQ(write(file, page.data(), 4096), 4096);
  EXPECT_EQ(fsync(file), 0);
  posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
  void* memory = mmap(nullptr, rows_of_it * 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  const Field field{static_cast<std::byte*>(memory), 4096};
  const auto row = [](std::uint64_t i) { return static_cast<std::int64_t>(i); };
  unsigned char resident = 1;
  EXPECT_EQ(mincore(memory, 1, &resident), 0);
  if ((resident & 1) != 0) {
    std::printf("      skipped: this file system keeps what it is told to drop\n");
  } else {
    Residency residency;
    EXPECT(residency.is_cold(field, rows_of_it, row));
    std::vector<std::byte> copy(rows_of_it * 4096);
    EXPECT_EQ(pread(file, copy.data(), copy.size(), 0), static_cast<ssize_t>(copy.size()));
    int calls = 0;
    while (residency.is_cold(field, rows_of_it, row) && calls < 10'000) ++calls;
    EXPECT(calls > 50 && calls < 1'000);
    for (const auto way : {kMapped, kDirect}) {
      residency.set(way);
      EXPECT_EQ(residency.is_cold(field, rows_of_it, row), way == kDirect);
    }
  }
  munmap(memory, rows_of_it * 4096);
  close(file);
  unlink(path.c_str());
}

/// Threads write a tiny ring by both ways while threads read it by both.
TEST(no_read_that_is_accepted_is_torn) {
  const auto enough = stress::pick<std::uint64_t>(kReads, 50'000'000, 500'000'000);
  for (const auto& [row_bytes, small] : {std::pair{std::vector<std::uint64_t>{24576, 8}, 0}, {{8, 4104}, 0}, {{24, 8, 160}, 200}}) {
    const Files files(geometry(1, 3), row_bytes, static_cast<std::uint64_t>(small));
    {
      const auto store = files.store(kMapped, kMapped);
      Rows rows(files.fields, 3);
      for (std::uint64_t i = 0; i < 3; ++i) rows.describe(i, i + 1);
      store->append(0, 3, rows.in, nullptr);
    }
    std::atomic<bool> stop{false};
    std::atomic<std::uint64_t> read{0}, torn{0};
    std::vector<std::thread> threads;
    for (const auto way : {kMapped, kDirect}) {
      threads.emplace_back([&, way] {
        const auto store = files.store(way, way, way == kDirect ? 1 : 0);
        Rows rows(files.fields, 2);
        for (std::uint64_t id = static_cast<std::uint64_t>(way) << 48; !stop; id += 2) {
          rows.describe(0, id + 4);
          rows.describe(1, id + 5);
          store->append(0, 2, rows.in, nullptr);
        }
      });
      threads.emplace_back([&, way] {
        const auto store = files.store(way, way, way == kDirect ? 3 : 2);
        Rows batch(files.fields, 8);
        for (std::uint64_t key = 0; read < enough && torn == 0; ++key) {
          store->sample_uniform(key, 8, batch.out, nullptr, nullptr);
          for (std::uint64_t i = 0; i < 8; ++i) torn += !batch.id(i).has_value();
          read += way == kDirect ? 8 : 0;
        }
        stop = true;
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(torn.load(), 0u);
    std::printf("      %s reads of %llu bytes\n", stress::count(read).c_str(), static_cast<unsigned long long>(row_bytes[0]));
  }
}

}  // namespace
