// The hunt for torn rows: processes write tiny rings over and over, others read them, and every row that a read accepts is
// checked word by word. Each write has an id of its own, on which every word of its rows depends; so a row is whole if its words
// agree, and it is the write that its ticket names if that ticket never comes with another id.
//
// Without sanitizers: how often rows are torn is a matter of speed.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "blocks.h"
#include "core/check.h"
#include "core/store.h"
#include "expect.h"
#include "stress.h"

using namespace engram;
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::uint64_t kBatch = 16, kMost = 8;

/// What the processes tell the test.
struct Tally {
  Word stop, written, read, torn, mistaken, moved, failed;
};

struct Ring {
  std::uint64_t lanes, length;
  std::vector<std::uint64_t> row_bytes;
  std::uint64_t share;  // of all reads, in thousandths: long rows take long
};

const std::vector<Ring> kRings = {
    {1, 1, {8}, 200},       {1, 2, {8}, 200},          {2, 2, {8, 56}, 280},   {1, 8, {520}, 200},
    {1, 3, {64, 4000}, 80}, {2, 4, {8, 4096, 8}, 36}, {1, 4, {32 * 1024}, 4},
};

/// Appends to a lane, more than it holds at times; or by number, the same row twice at times.
void write_on(const Blocks& blocks, Tally& tally, std::uint64_t writer) {
  Store store = blocks.open(writer);
  Rows rows(blocks.fields, kMost);
  Dice dice(writer);
  std::vector<std::uint64_t> which(blocks.fields.size());
  std::iota(which.begin(), which.end(), std::uint64_t{0});
  std::uint64_t id = (writer + 1) << 48;
  while (tally.stop == 0) {
    const std::uint64_t n = dice.in(1, kMost);
    for (std::uint64_t i = 0; i < n; ++i) rows.describe(i, ++id);
    if (dice.below(3) != 0) {
      store.append(dice.below(store.control().lanes()), n, rows.in, nullptr);
    } else {
      std::int64_t at[kMost];
      for (std::uint64_t i = 0; i < n; ++i) at[i] = static_cast<std::int64_t>(dice.below(store.control().capacity()));
      store.scatter(at, n, which, rows.in, true);
    }
    tally.written += n;
  }
}

void read_on(const Blocks& blocks, Tally& tally, std::uint64_t reader) {
  Store store = blocks.open(reader);
  Rows rows(blocks.fields, kBatch);
  Dice dice(reader + 1000);
  struct Seen {
    std::uint64_t number = 0, id = 0;
  };
  std::vector<Seen> last(store.control().capacity());
  std::int64_t at[kBatch], numbers[kBatch];
  while (tally.stop == 0) {
    std::uint64_t accepted = 0, torn = 0, mistaken = 0, moved = 0;
    for (int round = 0; round < 64 && tally.stop == 0; ++round) {
      std::uint64_t bad = 0;
      if (dice.below(2) == 0) {
        store.sample_uniform(dice.bits(), kBatch, rows.out, at, numbers);
      } else {
        for (auto& row : at) row = static_cast<std::int64_t>(dice.below(store.control().capacity()));
        for (const std::int64_t i : store.gather(at, kBatch, store.all(), rows.out, nullptr, numbers)) bad |= 1u << i;
      }
      for (std::uint64_t i = 0; i < kBatch; ++i) {
        if ((bad >> i & 1) != 0) {
          ++moved;
          continue;
        }
        ++accepted;
        const auto id = rows.id(i);
        torn += !id;
        if (!id) continue;
        Seen& seen = last[static_cast<std::uint64_t>(at[i])];
        const auto number = static_cast<std::uint64_t>(numbers[i]);
        mistaken += (number == seen.number) != (*id == seen.id);
        seen = {number, *id};
      }
    }
    tally.read += accepted, tally.torn += torn, tally.mistaken += mistaken, tally.moved += moved;
  }
}

TEST(no_read_that_is_accepted_is_torn) {
  const auto reads = stress::pick<std::uint64_t>(20'000'000, 10'000'000'000, 100'000'000'000);
  std::uint64_t read = 0, torn = 0, mistaken = 0, written = 0, moved = 0;
  for (const Ring& ring : kRings) {
    constexpr std::uint64_t kWriters = 3, kReaders = 2;
    SharedPages pages(1 << 20), tally_pages(sizeof(Tally));
    const Layout blocks(pages.data(), geometry(ring.lanes, ring.length), ring.row_bytes);
    format_without_curve(blocks);
    auto& tally = *new (tally_pages.data()) Tally;
    {
      Store store = blocks.open();
      Rows rows(blocks.fields, ring.length);
      for (std::uint64_t lane = 0; lane < ring.lanes; ++lane) {
        for (std::uint64_t i = 0; i < ring.length; ++i) rows.describe(i, 1 + lane * ring.length + i);
        store.append(lane, ring.length, rows.in, nullptr);
      }
    }
    std::vector<pid_t> children;
    for (std::uint64_t i = 0; i < kWriters + kReaders; ++i) {
      const pid_t child = fork();
      if (child == 0) {
        try {
          i < kWriters ? write_on(blocks, tally, i) : read_on(blocks, tally, i);
        } catch (const std::exception& error) {
          std::fprintf(stderr, "a process ended with: %s\n", error.what());
          ++tally.failed;
        }
        _exit(0);
      }
      children.push_back(child);
    }
    const std::uint64_t enough = reads / 1000 * ring.share;
    const auto most = stress::pick<Clock::duration>(10s, 2h, 12h);
    for (const auto start = Clock::now(); tally.read < enough && tally.torn + tally.mistaken + tally.failed == 0;) {
      std::this_thread::sleep_for(2ms);
      if (Clock::now() > start + most && tally.read > 0) break;
    }
    tally.stop = 1;
    for (const pid_t child : children) {
      int status = 0;
      waitpid(child, &status, 0);
      EXPECT_EQ(status, 0);
    }
    std::string sizes;
    for (const std::uint64_t bytes : ring.row_bytes) sizes += (sizes.empty() ? "" : "+") + std::to_string(bytes);
    std::printf("      %llu x %llu rows of %-12s %15s rows written, %15s read, %13s moved\n",
                static_cast<unsigned long long>(ring.lanes), static_cast<unsigned long long>(ring.length),
                (sizes + " B").c_str(), stress::count(tally.written).c_str(), stress::count(tally.read).c_str(),
                stress::count(tally.moved).c_str());
    EXPECT(tally.read > 0);
    EXPECT_EQ(tally.torn.load(), 0u);
    EXPECT_EQ(tally.mistaken.load(), 0u);
    EXPECT_EQ(tally.failed.load(), 0u);
    for (std::uint64_t row = 0; row < blocks.geometry.capacity; ++row) {  // at rest every row is whole
      EXPECT(is_committed(blocks.view().word(row)));
      for (const Field& field : blocks.fields) EXPECT(id_of(field.data + row * field.row_bytes, field.row_bytes).has_value());
    }
    read += tally.read, torn += tally.torn, mistaken += tally.mistaken, written += tally.written, moved += tally.moved;
    if (expect::failures > 0) break;
  }
  std::printf("torn-read hunt: %s reads, %s torn, %s of another write; %s rows written, %s reads repeated\n",
              stress::count(read).c_str(), stress::count(torn).c_str(), stress::count(mistaken).c_str(),
              stress::count(written).c_str(), stress::count(moved).c_str());
}

}  // namespace
