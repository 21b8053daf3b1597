// Rows by version in children that are forked off while a thread of the parent changes what it knows of them.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "versioned.h"

TEST(a_child_finds_what_a_thread_of_its_parent_had_half_noted) {
  const Versioned shared(3'000);
  Writing writing(shared);
  Drawing drawing(shared);
  std::atomic<bool> over{false};
  std::thread looks([&] {
    while (!over) {
      drawing.index.put_in_order();
      drawing.index.catch_up();
    }
  });
  for (int i = 0; i < 40; ++i) {
    std::vector<double> versions(100 + static_cast<std::size_t>(i));
    for (std::size_t k = 0; k < versions.size(); ++k) versions[k] = static_cast<double>(k % 17 + static_cast<std::size_t>(i));
    writing.append(versions);
    const pid_t child = fork();
    if (child == 0) {
      drawing.index.after_fork();
      _exit(drawing.agrees(static_cast<std::uint64_t>(i)) ? 0 : 1);
    }
    int status = -1;
    EXPECT(child > 0 && waitpid(child, &status, 0) == child);
    EXPECT_EQ(status, 0);
  }
  over = true;
  looks.join();
  EXPECT(drawing.agrees());
}
