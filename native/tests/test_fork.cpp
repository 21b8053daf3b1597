// Fork in a program with threads. Without sanitizers: the address sanitizer's own allocator can deadlock in the child.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "blocks.h"
#include "core/check.h"
#include "core/pool.h"
#include "core/store.h"
#include "expect.h"
#include "ring.h"

using engram::parallel;
using engram::set_num_threads;

namespace {

bool each_once(std::size_t chunks) {
  std::vector<int> counts(chunks);
  parallel(chunks, [&](std::size_t c) { ++counts[c]; });
  return counts == std::vector<int>(chunks, 1);
}

// What a child finds; 0: all is well. Its alarm ends it if it hangs.
template <class Body>
void expect_in_child(Body&& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(120);
    _exit(body());
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), 0);
}

int pool_works() {
  if (!each_once(64)) return 1;  // with the number of threads it inherited
  set_num_threads(3);
  if (!each_once(64)) return 2;
  // Each chunk waits for the others to begin, so the child has threads of its own.
  std::atomic<int> begun{0};
  parallel(3, [&](std::size_t) {
    for (++begun; begun < 3;) std::this_thread::yield();
  });
  set_num_threads(1);
  return each_once(64) ? 0 : 3;
}

TEST(a_forked_child_has_a_pool_of_its_own) {
  set_num_threads(4);
  EXPECT(each_once(64));  // the parent's threads exist, and wait
  for (int round = 0; round < 20; ++round) expect_in_child(pool_works);
  EXPECT(each_once(64));
}

TEST(a_childs_child_too) {
  set_num_threads(2);
  EXPECT(each_once(64));
  expect_in_child([] {
    if (!each_once(64)) return 1;
    const int before = expect::failures;
    expect_in_child(pool_works);
    return expect::failures == before && each_once(64) ? 0 : 2;
  });
}

TEST(fork_while_other_threads_use_the_pool) {
  set_num_threads(3);
  std::atomic<bool> stop{false};
  std::vector<std::thread> callers;
  for (int t = 0; t < 2; ++t) {
    callers.emplace_back([&] {
      while (!stop) EXPECT(each_once(9));
    });
  }
  for (int round = 0; round < 60; ++round) expect_in_child(pool_works);
  stop = true;
  for (auto& caller : callers) caller.join();
  EXPECT(each_once(64));
}

TEST(fork_while_other_threads_write_a_store) {
  // The child's copy of private memory holds the claims and half-written rows of threads that it does not have. It is
  // the only one attached to its copy: recover() makes it sound.
  const Heap heap(geometry(1, 4), {8 * 1024});
  engram::Store store = heap.open();
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  for (int t = 0; t < 3; ++t) {
    writers.emplace_back([&] {
      Rows rows(heap.fields, 2);
      for (std::uint64_t i = 1; !stop; ++i) {
        for (const std::uint64_t j : {0, 1}) rows.describe(j, i * 2 + j);
        store.append(0, 2, rows.in, nullptr);
      }
    });
  }
  while (store.control().size() < 4) std::this_thread::yield();
  std::uint64_t repaired = 0;
  for (int round = 0; round < 60; ++round) {
    int found[2];
    EXPECT_EQ(pipe(found), 0);
    expect_in_child([&] {
      const auto repair = store.control().recover();
      if (write(found[1], &repair, sizeof repair) != sizeof repair) return 1;
      Rows rows(heap.fields, 64);
      for (int i = 0; i < 2; ++i) {
        if (store.control().size() > 0) {
          store.sample_uniform(7, 64, rows.out, nullptr, nullptr);
          for (std::uint64_t j = 0; j < 64; ++j) {
            if (!rows.id(j)) return 2;
          }
        }
        for (std::uint64_t j = 0; j < 4; ++j) rows.describe(j, 1 + j);
        store.append(0, 4, rows.in, nullptr);
        if (store.control().size() != 4) return 3;
      }
      return 0;
    });
    engram::Control::Repair repair;
    if (read(found[0], &repair, sizeof repair) == sizeof repair) repaired += repair.claims;
    close(found[0]);
    close(found[1]);
  }
  stop = true;
  for (auto& writer : writers) writer.join();
  std::printf("    %llu claims of threads that were not there\n", static_cast<unsigned long long>(repaired));
  EXPECT(repaired > 0);
}

TEST(a_forked_child_takes_no_updates_and_its_parent_goes_on) {
  constexpr std::int64_t kRows = 512;  // of each batch, so that a fork comes upon one that is under way
  const FormattedPriorities here(kRows);
  Ring ring(4, kRows);
  const auto drain = ring.drain(*here.priorities);
  std::atomic<bool> over{false};
  std::atomic<std::uint64_t> sent{0};
  std::thread device([&] {
    std::vector<Entry> batch;
    for (std::int64_t row = 0; row < kRows; ++row) batch.push_back({row, 1.0 + static_cast<double>(row)});
    while (!over) {
      ring.send(batch);
      sent = ring.sent;
    }
  });
  for (int round = 0; round < 60; ++round) {
    EXPECT(drain->flush(sent + 1, std::chrono::seconds(60)));
    drain->before_fork();
    expect_in_child([&] {
      drain->after_fork();
      drain->forked();
      if (here.header().mutex.held() || here.header().redo != 0) return 1;  // a batch is applied, or is not begun
      const std::uint64_t taken = drain->counts().batches;
      if (drain->flush(taken + 1, std::chrono::seconds(60))) return 2;
      drain->stop();
      if (drain->counts().batches != taken || ring.words()[1] != taken) return 3;
      const std::int64_t row = 1;
      const double priority = 1;
      here.priorities->update(&row, &priority, 1, nullptr);
      return here.priorities->total() > 0 ? 0 : 4;
    });
    drain->forked();
  }
  over = true;
  device.join();
  EXPECT(drain->flush(ring.sent, std::chrono::seconds(60)));
  EXPECT_EQ(drain->counts().entries, ring.sent * kRows);
}

}  // namespace
