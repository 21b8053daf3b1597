// Who is attached, and who died: with real processes, over memory that they share and a file that they lock bytes of. Without
// sanitizers: it forks.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "blocks.h"
#include "core/participants.h"
#include "crash.h"
#include "expect.h"

using namespace engram;
using namespace std::chrono_literals;

namespace {

/// What the processes of a test share.
struct Place {
  Place() : pages(1 << 18), blocks(pages.data(), geometry(1, 4), {8}), file(std::tmpfile()) {
    format_without_curve(blocks);
    control().lock_page().pid_namespace = pid_namespace();
    words = reinterpret_cast<Word*>(pages.data() + (1 << 17));
  }
  ~Place() { std::fclose(file); }
  Control control() const { return blocks.view(); }
  std::unique_ptr<Participants> attach() const { return std::make_unique<Participants>(control(), fileno(file)); }
  std::uint64_t used() const {
    std::uint64_t n = 0;
    for (std::uint64_t i = 0; i < kParticipants; ++i) n += control().participant(i).state != 0;
    return n;
  }

  SharedPages pages;
  Layout blocks;
  std::FILE* file;
  Word* words;  // zero, for the tests' own use
};

constexpr std::uint64_t kNotYet = ~std::uint64_t{1};

/// A child that joins, and then waits to be killed.
struct Member {
  Member(const Place& place, const std::function<void(Participants&)>& then = [](Participants&) {}) {
    Word& said = place.words[0];
    said = kNotYet;
    pid = fork();
    if (pid == 0) {
      alarm(280);
      const auto participants = place.attach();
      const std::uint64_t mine = participants->join();
      then(*participants);
      said = mine;
      for (;;) pause();
    }
    while (said == kNotYet) std::this_thread::yield();
    entry = said;
  }
  ~Member() { end(); }
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  /// Killed, but still a zombie.
  void kill_only() const {
    kill(pid, SIGKILL);
    siginfo_t info{};
    waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT);
  }
  void end() {
    if (pid <= 0) return;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    pid = -1;
  }

  pid_t pid = -1;
  std::uint64_t entry = Participants::kNoEntry;
};

void in_child(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(280);
    body();
    std::fflush(stderr);
    _exit(expect::failures == 0 ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

std::uint64_t recover(Participants& recoverer) {
  return recoverer.recover_dead([](Participant&) {});
}

TEST(entries_are_distinct_and_given_back) {
  const Place place;
  const auto here = place.attach();
  EXPECT(!here->others());
  std::set<std::uint64_t> entries{here->join()};
  EXPECT(!here->others());
  {
    std::vector<std::unique_ptr<Member>> members;
    for (int i = 0; i < 5; ++i) {
      members.push_back(std::make_unique<Member>(place));
      EXPECT(entries.insert(members.back()->entry).second);
      const Participant& entry = place.control().participant(members.back()->entry);
      EXPECT_EQ(entry.pid, static_cast<std::uint32_t>(members.back()->pid));
      EXPECT_EQ(entry.start_time, start_time_of(entry.pid));
      EXPECT_EQ(entry.uid, getuid());
    }
    EXPECT(here->others());
    EXPECT_EQ(recover(*here), 0u);
    EXPECT_EQ(place.used(), 6u);
  }
  EXPECT(!here->others());  // the dead are nobody
  EXPECT_EQ(recover(*here), 5u);
  EXPECT_EQ(recover(*here), 0u);
  EXPECT_EQ(place.used(), 1u);
  here->leave();
  EXPECT_EQ(place.used(), 0u);
  here->leave();  // once more does nothing
  EXPECT(here->join() != Participants::kNoEntry);
  Member left(place, [](Participants& self) { self.leave(); });
  EXPECT(!here->others());
  EXPECT_EQ(place.used(), 1u);
  left.end();
  EXPECT_EQ(recover(*here), 0u);
}

TEST(who_leaves_in_the_middle_of_a_write_is_mourned_once_he_is_gone) {
  const Place place;
  const auto here = place.attach();
  here->join();
  Member member(place, [&](Participants& self) {
    for (std::uint64_t i = 0; i < kParticipants; ++i) {
      Participant& entry = place.control().participant(i);
      if (entry.state != 0 && entry.pid == static_cast<std::uint32_t>(getpid())) entry.claims[2].t0 = 7;
    }
    self.leave();
  });
  // Its byte is free, but its process runs, and may have a thread that still writes.
  EXPECT(here->others());
  EXPECT_EQ(recover(*here), 0u);
  EXPECT_EQ(place.used(), 2u);
  member.end();
  std::uint64_t claim = 0;
  EXPECT_EQ(here->recover_dead([&](Participant& dead) { claim = dead.claims[2].t0.exchange(0); }), 1u);
  EXPECT_EQ(claim, 7u);
}

TEST(a_dead_participant_is_recovered_once_by_one_of_many_processes) {
  const Place place;
  const auto here = place.attach();
  here->join();
  Word &go = place.words[1], &recovered = place.words[2], &ready = place.words[3], &overlap = place.words[4];
  std::uint64_t rounds = 0, late = 0;
  constexpr std::uint64_t kRecoverers = 3;
  for (const auto until = std::chrono::steady_clock::now() + 1500ms; std::chrono::steady_clock::now() < until || rounds < 20;
       ++rounds) {
    go = 0, recovered = 0, ready = 0, overlap = 0;
    Member member(place);
    pid_t recoverers[kRecoverers];
    for (pid_t& recoverer : recoverers) {
      recoverer = fork();
      if (recoverer != 0) continue;
      alarm(280);
      const auto self = place.attach();
      ++ready;
      while (go == 0) std::this_thread::yield();
      for (int i = 0; i < 50; ++i) {
        self->recover_dead([&](Participant&) {
          overlap += go.fetch_add(1) != 1;  // nobody else is at it, or was
          ++recovered;
        });
      }
      _exit(0);
    }
    while (ready < kRecoverers) std::this_thread::yield();
    member.kill_only();
    go = 1;
    for (const pid_t recoverer : recoverers) waitpid(recoverer, nullptr, 0);
    if (recovered == 0) {  // a process that is just ending may look alive for a moment
      ++late;
      EXPECT_EQ(recover(*here), 1u);
      continue;
    }
    EXPECT_EQ(recovered.load(), 1u);
    EXPECT_EQ(overlap.load(), 0u);
    EXPECT_EQ(place.used(), 1u);
  }
  std::printf("      %llu rounds of %llu recoverers, %llu late\n", llu(rounds), llu(kRecoverers), llu(late));
  EXPECT(late < rounds);
}

TEST(a_mourner_that_dies_leaves_the_rest_to_the_next) {
  const Place place;
  const auto here = place.attach();
  here->join();
  Member member(place);
  member.end();
  const pid_t recoverer = fork();
  if (recoverer == 0) {
    place.attach()->recover_dead([](Participant&) { kill(getpid(), SIGKILL); });
    _exit(1);
  }
  int status = 0;
  waitpid(recoverer, &status, 0);
  EXPECT(WIFSIGNALED(status));
  EXPECT_EQ(place.used(), 2u);
  EXPECT_EQ(recover(*here), 1u);
  EXPECT_EQ(place.used(), 1u);
}

TEST(who_is_stopped_is_alive) {
  const Place place;
  const auto here = place.attach();
  here->join();
  Member member(place);
  kill(member.pid, SIGSTOP);
  waitpid(member.pid, nullptr, WUNTRACED);
  for (const auto until = std::chrono::steady_clock::now() + 200ms; std::chrono::steady_clock::now() < until;) {
    EXPECT_EQ(recover(*here), 0u);
    EXPECT(here->others());
  }
  EXPECT_EQ(place.used(), 2u);
  kill(member.pid, SIGCONT);
  EXPECT_EQ(recover(*here), 0u);
  member.kill_only();
  EXPECT_EQ(recover(*here), 1u);  // though nobody has asked for its status yet
}

TEST(in_another_namespace_the_lock_alone_counts) {
  const Place place;
  place.control().lock_page().pid_namespace = pid_namespace() + 1;
  const auto here = place.attach();
  here->join();
  const Member member(place);
  EXPECT_EQ(recover(*here), 0u);
  const Member gone(place, [&](Participants& self) {
    for (std::uint64_t i = 0; i < kParticipants; ++i) place.control().participant(i).claims[0].t0 = 7;
    self.leave();  // its entry stays, its lock does not
    for (std::uint64_t i = 0; i < kParticipants; ++i) place.control().participant(i).claims[0].t0 = 0;
  });
  EXPECT_EQ(recover(*here), 1u);
  EXPECT_EQ(place.used(), 2u);
}

TEST(a_forked_child_has_not_the_locks_of_its_parent) {
  const Place place;
  // A parent with a child that lives on: the descriptor is open there, the lock is not.
  Word& grandchild = place.words[1];
  Member parent(place, [&](Participants&) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(280);
      for (;;) pause();
    }
    grandchild = static_cast<std::uint64_t>(child);
  });
  const auto here = place.attach();
  here->join();
  EXPECT_EQ(recover(*here), 0u);
  parent.end();
  EXPECT_EQ(recover(*here), 1u);
  EXPECT_EQ(kill(static_cast<pid_t>(grandchild.load()), SIGKILL), 0);

  // A child takes an entry of its own, and its end takes nothing from the parent.
  in_child([&] {
    const auto own = place.attach();
    EXPECT_EQ(own->join(), 0u);  // the parent of these two has entry 1
    EXPECT(own->others());
    EXPECT_EQ(recover(*own), 0u);
    own->leave();
  });
  in_child([&] {
    EXPECT(place.attach()->others());
    EXPECT_EQ(recover(*place.attach()), 0u);
  });
}

TEST(a_full_table_has_no_entry_for_another_one) {
  const Place place;
  const auto here = place.attach();
  for (std::uint64_t i = 0; i + 1 < kParticipants; ++i) place.control().participant(i).state = 1;
  EXPECT_EQ(here->join(), kParticipants - 1);
  Member member(place);
  EXPECT_EQ(member.entry, Participants::kNoEntry);
  EXPECT_EQ(recover(*here), kParticipants - 1);  // nobody has those
  EXPECT_EQ(place.used(), 1u);
  EXPECT(Member(place).entry != Participants::kNoEntry);
}

TEST(entries_of_dead_ones_alone_keep_nobody_out) {
  const Place place;
  for (std::uint64_t i = 0; i < kParticipants; ++i) place.control().participant(i).state = 1;
  Store store(place.control(), {}, 0);
  store.join(place.attach());
  EXPECT_EQ(place.used(), 1u);
}

TEST(a_number_that_was_given_to_another_process_proves_nothing) {
  const Place place;
  const auto here = place.attach();
  here->join();
  Participant& entry = place.control().participant(9);
  entry.pid = static_cast<std::uint32_t>(getppid());
  entry.start_time = start_time_of(entry.pid);
  entry.state = 1;
  EXPECT_EQ(recover(*here), 0u);  // it runs
  ++entry.start_time;
  EXPECT_EQ(recover(*here), 1u);
}

#ifdef ENGRAM_CAN_STEP
// Somebody died in the middle of writing row 2.
void with_a_dead_writer(const Place& place) {
  const Control control = place.control();
  Participant& dead = control.participant(1);
  dead.pid = 0x7FFFFFFF, dead.start_time = 1, dead.state = 1;
  control.lane(0).cursor = 3, control.counters().next_ticket = 4;
  for (const std::uint64_t row : {0, 1}) control.word(row) = ticket(row + 1, State::committed);
  control.word(2) = ticket(3, State::writing);
  Claim& claim = dead.claims[0];
  claim.n = 1, claim.lane = 0, claim.p0 = 2, claim.t0 = 3;
}

TEST(death_at_every_instruction_of_joining_leaving_and_burying) {
  struct Life {
    const char* name;
    std::function<void(Participants&, const Store&)> run;
    std::function<void(const Place&)> prepare;
  };
  const auto recover_all = [](Participants& self, const Store& store) {
    return self.recover_dead([&](Participant& dead) { store.repair(dead); });
  };
  const std::vector<Life> lives = {
      {"join, leave", [](Participants& self, const Store&) { self.join(), self.leave(); }, [](const Place&) {}},
      {"recover another one", [&](Participants& self, const Store& store) { recover_all(self, store); }, with_a_dead_writer},
      {"join, recover another one, leave",
       [&](Participants& self, const Store& store) { self.join(), recover_all(self, store), self.leave(); }, with_a_dead_writer},
  };
  std::uint64_t deaths = 0, instructions_in_all = 0;
  for (const Life& life : lives) {
    Place place;
    const std::span<std::byte> memory(place.pages.data(), 1 << 17);
    life.prepare(place);
    const std::vector<std::byte> before(memory.begin(), memory.end());
    const Store store = place.blocks.open(9);
    const auto operation = [&, self = std::shared_ptr(place.attach())] { life.run(*self, store); };
    std::vector<std::uint64_t> instructions, states;
    {
      Stepped child(operation);
      std::set<std::uint64_t> seen;
      for (std::uint64_t step = 0; child.end() == Stepped::End::running && step < 200000; ++step, child.step()) {
        instructions.push_back(child.at());
        if (seen.insert(hash_of(memory)).second) states.push_back(step);
      }
      if (child.end() != Stepped::End::done) {
        std::printf("      skipped: nobody may step through a child here, or no step ends\n");
        return;
      }
    }
    instructions_in_all += instructions.size();
    for (const std::uint64_t step : begins_and_ends(states)) {
      const int failures = expect::failures;
      std::copy(before.begin(), before.end(), memory.begin());
      {
        Stepped child(operation);
        EXPECT(child.go_to(instructions, step) == Stepped::End::running);
      }
      const auto here = place.attach();
      EXPECT(!here->others());
      const std::uint64_t left = place.used();
      EXPECT(here->join() != Participants::kNoEntry);
      EXPECT_EQ(recover_all(*here, store), left);
      EXPECT_EQ(recover_all(*here, store), 0u);
      EXPECT_EQ(place.used(), 1u);
      here->leave();
      EXPECT_EQ(place.used(), 0u);
      expect_sound(place.blocks, 1);
      // Two whole rows; or one less, while a void row is counted twice.
      const std::uint64_t size = place.control().size();
      EXPECT(size == 0 ? place.control().filled(0) == 0 : size <= 2);
      ++deaths;
      if (expect::failures != failures) std::fprintf(stderr, "  %s: killed before step %llu\n", life.name, llu(step));
    }
  }
  std::printf("every instruction of joining, leaving, recovering: %llu instructions, %llu deaths\n", llu(instructions_in_all),
              llu(deaths));
}
#endif

TEST(when_a_process_began) {
  EXPECT(start_time_of(static_cast<std::uint32_t>(getpid())) > 0);
  EXPECT_EQ(start_time_of(static_cast<std::uint32_t>(getpid())), start_time_of(static_cast<std::uint32_t>(getpid())));
  EXPECT_EQ(start_time_of(0), 0u);
  EXPECT_EQ(start_time_of(0xFFFFFFFF), 0u);
  const Place place;
  Member member(place);
  const auto pid = static_cast<std::uint32_t>(member.pid);
  EXPECT(start_time_of(pid) >= start_time_of(static_cast<std::uint32_t>(getpid())));
  member.kill_only();
  EXPECT_EQ(start_time_of(pid), 0u);  // a zombie
  member.end();
  EXPECT_EQ(start_time_of(pid), 0u);
}

}  // namespace
