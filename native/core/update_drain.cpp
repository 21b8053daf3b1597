#include "update_drain.h"

#include <algorithm>
#include <bit>

#include "check.h"
#include "wait.h"

namespace engram {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kHeader = 8, kTaken = 1;
constexpr std::uint64_t kSlotHeader = 4, kNumber = 0, kLength = 1;
// Without news the thread looks for a moment. Then it sleeps for an eighth of the time that nothing has come.
constexpr auto kSpin = 20us, kShortest = 20us, kLongest = 1000us;

}  // namespace

UpdateDrain::UpdateDrain(std::span<std::byte> memory, std::uint64_t slots, std::uint64_t entries, bool single_precision,
                         Priorities& priorities)
    : ring_(reinterpret_cast<Word*>(memory.data())),
      slots_(slots),
      entries_(entries),
      single_precision_(single_precision),
      priorities_(priorities) {
  const std::uint64_t words = memory.size() / sizeof(Word);
  check(reinterpret_cast<std::uintptr_t>(ring_) % sizeof(Word) == 0 && memory.size() % sizeof(Word) == 0, "a ring of words of 64 bits");
  check(slots > 0 && entries > 0 && entries < words && words > kHeader && (words - kHeader) % (kSlotHeader + 3 * entries) == 0 &&
            (words - kHeader) / (kSlotHeader + 3 * entries) == slots,
        "a ring in memory of another size");
  rows_.resize(entries);
  tickets_.resize(entries);
  floats_.resize(single_precision ? entries : 0);
  doubles_.resize(single_precision ? 0 : entries);
  batches_ = ring_[kTaken].load(std::memory_order_relaxed);  // an earlier thread may have taken some
  thread_ = std::thread([this] { run(); });
}

UpdateDrain::Counts UpdateDrain::counts() const { return {batches_.load(), applied_.load(), refused_.load()}; }

void UpdateDrain::check_thread() const {
  if (ended_.load(std::memory_order_acquire) && error_) std::rethrow_exception(error_);
}

bool UpdateDrain::flush(std::uint64_t sent, std::chrono::milliseconds wait) const {
  const auto taken = [&] { return batches_.load(std::memory_order_acquire) >= sent; };
  for (const Deadline deadline(wait); !taken(); std::this_thread::sleep_for(100us)) {
    const bool over = deadline.passed() || ended_.load(std::memory_order_acquire);
    check_thread();  // why it has ended, which it may just have done
    if (over) return taken();
  }
  return true;
}

void UpdateDrain::stop() {
  stop_.store(true, std::memory_order_release);
  const std::lock_guard<std::mutex> guard(joining_);
  if (thread_.joinable()) thread_.join();
}

void UpdateDrain::before_fork() {
  joining_.lock();
  applying_.lock();
}

void UpdateDrain::after_fork() {
  new std::thread(std::move(thread_));  // names a thread of the parent: neither joinable here nor destructible. It is leaked
  ended_.store(true, std::memory_order_release);
}

void UpdateDrain::forked() {
  applying_.unlock();
  joining_.unlock();
}

void UpdateDrain::run() {
  try {
    for (auto news = Clock::now();;) {
      const bool last = stop_.load(std::memory_order_acquire);
      std::uint64_t taken = 0;
      while (taken < slots_ && take()) ++taken;  // at the end no more than the ring holds: the device may go on
      if (last) break;
      const auto now = Clock::now();
      if (taken != 0) news = now;
      const auto idle = std::chrono::duration_cast<std::chrono::microseconds>(now - news);
      if (idle > kSpin) std::this_thread::sleep_for(std::clamp<std::chrono::microseconds>(idle / 8, kShortest, kLongest));
    }
  } catch (...) {  // the next call of the host throws it
    error_ = std::current_exception();
  }
  ended_.store(true, std::memory_order_release);
}

bool UpdateDrain::take() {
  const std::uint64_t batch = batches_.load(std::memory_order_relaxed);
  const Word* slot = ring_ + kHeader + batch % slots_ * (kSlotHeader + 3 * entries_);
  if (slot[kNumber].load(std::memory_order_acquire) != batch + 1) return false;
  const std::lock_guard<std::mutex> guard(applying_);
  const std::uint64_t n = slot[kLength].load(std::memory_order_relaxed);
  if (n > entries_) {
    refused_.fetch_add(1);
  } else if (single_precision_) {
    apply(slot + kSlotHeader, n, floats_);
  } else {
    apply(slot + kSlotHeader, n, doubles_);
  }
  ring_[kTaken].store(batch + 1, std::memory_order_release);
  batches_.store(batch + 1, std::memory_order_release);
  return true;
}

// Each word is read once: what was checked is what is used.
template <class Real>
void UpdateDrain::apply(const Word* words, std::uint64_t n, std::vector<Real>& priorities) {
  for (std::uint64_t i = 0; i < n; ++i) {
    rows_[i] = static_cast<std::int64_t>(words[i].load(std::memory_order_relaxed));
    tickets_[i] = static_cast<std::int64_t>(words[entries_ + i].load(std::memory_order_relaxed));
    priorities[i] = static_cast<Real>(std::bit_cast<double>(words[2 * entries_ + i].load(std::memory_order_relaxed)));
  }
  const std::uint64_t refused = priorities_.update_usable(rows_.data(), priorities.data(), n, tickets_.data());
  applied_.fetch_add(n - refused);
  refused_.fetch_add(refused);
}

}  // namespace engram
