#include "participants.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>

#include "check.h"

namespace engram {
namespace {

#ifdef ENGRAM_WITHOUT_PROOF_OF_DEATH  // the tests of death must fail then: make negative-controls
constexpr bool kProof = false;
#else
constexpr bool kProof = true;
#endif

struct flock byte_of(std::uint64_t entry, short kind) {
  struct flock range{};
  range.l_type = kind;
  range.l_whence = SEEK_SET;
  range.l_start = static_cast<off_t>(entry);
  range.l_len = 1;
  return range;
}

}  // namespace

std::uint64_t start_time_of(std::uint32_t pid) {
  const int file = open(("/proc/" + std::to_string(pid) + "/stat").c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  char text[1024];
  const ssize_t n = read(file, text, sizeof text - 1);
  close(file);
  if (n <= 0) return 0;
  text[n] = '\0';
  // "pid (name) state …": the name may hold anything, so what follows is counted from the last parenthesis.
  const char* at = std::strrchr(text, ')');
  if (at == nullptr || at[1] == '\0') return 0;
  const char state = at[2];
  if (state == 'Z' || state == 'X') return 0;
  constexpr int kStartTime = 22, kState = 3;  // as proc(5) counts
  for (int field = kState - 1; at != nullptr && field < kStartTime; ++field) at = std::strchr(at + 1, ' ');
  return at == nullptr ? 0 : std::strtoull(at + 1, nullptr, 10);
}

std::uint64_t pid_namespace() {
  struct stat status{};
  return stat("/proc/self/ns/pid", &status) == 0 ? static_cast<std::uint64_t>(status.st_ino) : 0;
}

bool Participants::lock(std::uint64_t entry) const {
  struct flock range = byte_of(entry, F_WRLCK);
  int result;
  do result = fcntl(file_, F_SETLK, &range);
  while (result != 0 && errno == EINTR);
  return result == 0;
}

void Participants::unlock(std::uint64_t entry) const {
  struct flock range = byte_of(entry, F_UNLCK);
  while (fcntl(file_, F_SETLK, &range) != 0 && errno == EINTR) {
  }
}

bool Participants::held_by_another(std::uint64_t entry) const {
  struct flock range = byte_of(entry, F_WRLCK);
  int result;
  do result = fcntl(file_, F_GETLK, &range);
  while (result != 0 && errno == EINTR);
  return result != 0 || range.l_type != F_UNLCK;  // what cannot be told is alive
}

// Whether the process that an entry names is there. In another namespace its number means nothing: the lock alone counts.
bool Participants::runs(const Participant& entry) const {
  if (control_.lock_page().pid_namespace != pid_namespace()) return false;
  return entry.pid != 0 && entry.start_time != 0 && start_time_of(entry.pid) == entry.start_time;
}

bool Participants::in_memory() const {
  constexpr decltype(statfs::f_type) kTmpfs = 0x01021994;
  struct statfs system {};
  return fstatfs(file_, &system) == 0 && system.f_type == kTmpfs;
}

std::uint64_t Participants::join() {
  check(own_ == kNoEntry, "a process that joins once");
  for (std::uint64_t i = 0; i < control_.participants(); ++i) {
    Participant& entry = control_.participant(i);
    if (entry.state.load(std::memory_order_acquire) != 0 || !lock(i)) continue;
    if (entry.state.load(std::memory_order_acquire) != 0) {  // a process joined and died between the two looks
      unlock(i);
      continue;
    }
    std::atomic_ref(entry.pid).store(static_cast<std::uint32_t>(getpid()), std::memory_order_relaxed);  // note_writer() reads it
    entry.start_time = start_time_of(entry.pid);
    entry.uid = static_cast<std::uint32_t>(getuid());
    entry.prepaid.store(0, std::memory_order_relaxed);
    entry.state.store(1, std::memory_order_release);
    own_ = i;
    return i;
  }
  return kNoEntry;
}

void Participants::leave() {
  if (own_ == kNoEntry) return;
  Participant& entry = control_.participant(own_);
  const bool writing = std::any_of(std::begin(entry.claims), std::end(entry.claims),
                                   [](const Claim& claim) { return claim.t0.load(std::memory_order_acquire) != 0; });
  for (std::uint64_t i = 0; i < control_.lanes(); ++i) {  // what ends is not followed by another one
    Word& writer = control_.lane(i).writer;
    if ((writer.load(std::memory_order_relaxed) & 0xffff) == own_ + 1) writer.store(0, std::memory_order_relaxed);
  }
  if (!writing) entry.state.store(0, std::memory_order_release);
  unlock(std::exchange(own_, kNoEntry));
}

bool Participants::others() const {
  for (std::uint64_t i = 0; i < control_.participants(); ++i) {
    if (i == own_) continue;
    const Participant& entry = control_.participant(i);
    if (entry.state.load(std::memory_order_acquire) != 0 && (held_by_another(i) || runs(entry))) return true;
  }
  return false;
}

std::uint64_t Participants::recover_dead(const std::function<void(Participant&)>& recover) {
  // Locks on bytes know processes only: two threads of this one would both get them.
  const std::unique_lock<std::mutex> guard(recovering_, std::try_to_lock);
  if (!guard) return 0;
  std::uint64_t recovered = 0;
  for (std::uint64_t i = 0; i < control_.participants(); ++i) {
    Participant& entry = control_.participant(i);
    if (i == own_ || entry.state.load(std::memory_order_acquire) == 0) continue;
    if (kProof && (held_by_another(i) || runs(entry))) continue;
    if (!lock(i) && kProof) continue;  // another process was faster
    const struct Unlock {
      const Participants& self;
      std::uint64_t entry;
      ~Unlock() { self.unlock(entry); }
    } unlocked{*this, i};
    // Again: another process may have taken the entry meanwhile, and released the byte in the middle of a write.
    if (entry.state.load(std::memory_order_acquire) == 0 || (kProof && runs(entry))) continue;
    recover(entry);
    entry.state.store(0, std::memory_order_release);
    ++recovered;
  }
  return recovered;
}

}  // namespace engram
