// Rows by version beside a writer that pauses, or dies, at every instruction: what is not whole is looked at again.
#include <cstdint>
#include <functional>
#include <vector>

#include "crash.h"
#include "expect.h"
#include "stress.h"
#include "versioned.h"

#ifdef ENGRAM_CAN_STEP

TEST(what_a_writer_ends_or_leaves_behind_is_found_by_who_looked_amid_it) {
  const std::uint64_t every = stress::pick<std::uint64_t>(601, 151, 11);
  const std::vector<std::function<void(Writing&)>> operations{
      [](Writing& it) { it.append({4, 2, 2}); }, [](Writing& it) { it.edit({1, 3, 0}, {1, 1, 9}, 1); },
      [](Writing& it) { it.edit({1, 3}, {kNotReady, 1}, 0); }, [](Writing& it) { it.place({2, 5, 0}, {8, 9, 8}); },
      [](Writing& it) { it.remove({0, 4, 5}); }, [](Writing& it) { it.store.empty(false); }};
  std::uint64_t pauses = 0;
  for (const auto& operation : operations) {
    bool done = false;
    for (std::uint64_t instructions = 1; !done; instructions += every) {
      for (const bool dies : {false, true}) {
        const Versioned shared(6);
        Writing writing(shared), other(shared, 1);
        writing.append({1, 2, 1, 3});
        Drawing early(shared), late(shared);
        EXPECT(early.agrees());
        {
          Stepped child([&] { operation(writing); });
          if (child.end() == Stepped::End::refused) return;
          for (std::uint64_t i = 0; i < instructions && child.end() == Stepped::End::running; ++i) child.step();
          done = child.end() == Stepped::End::done;
          early.index.catch_up();
          late.index.catch_up();
          while (!dies && child.end() == Stepped::End::running) child.step();
        }
        if (dies) other.store.recover();
        const int failures = expect::failures;
        EXPECT(early.agrees());
        EXPECT(late.agrees());
        if (expect::failures != failures) {
          std::fprintf(stderr, "  operation %zu, paused before step %llu; %s\n", static_cast<std::size_t>(&operation - operations.data()), llu(instructions),
                       dies ? "it died" : "it went on");
        }
        other.append({7, 7});
        EXPECT(early.agrees());
        EXPECT(late.agrees());
        ++pauses;
      }
    }
  }
  std::printf("    %llu pauses\n", llu(pauses));
  EXPECT(pauses > 50);
}

#endif
