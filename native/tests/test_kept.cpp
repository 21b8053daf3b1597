// What a short call keeps, and others may need, is let go before the call waits: here what is waited for ends only then.
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "blocks.h"
#include "core/control.h"
#include "core/priorities.h"
#include "core/wait.h"
#include "expect.h"

using namespace engram;

namespace {

/// Keeps something for its life, and does something when it is let go.
class Keeping final : Kept {
 public:
  explicit Keeping(std::function<void()> end) : end_(std::move(end)) { kept = this; }
  ~Keeping() { kept = nullptr; }
  Keeping(const Keeping&) = delete;
  Keeping& operator=(const Keeping&) = delete;
  int times = 0;

 private:
  void let_go() override {
    kept = nullptr;
    ++times;
    end_();
  }
  std::function<void()> end_;
};

template <class Call>
void expect_let_go(std::function<void()> end, Call&& call) {
  const Keeping keeping(std::move(end));
  call();
  EXPECT_EQ(keeping.times, 1);
}

template <class Call>
void expect_kept(Call&& call) {
  const Keeping keeping([] {});
  call();
  EXPECT_EQ(keeping.times, 0);
}

}  // namespace

TEST(writers_let_go_before_they_wait) {
  const Heap heap(geometry(1, 4), {64});
  Store store = heap.open();
  Rows rows(heap.fields, 1);
  rows.describe(0, 1);
  const auto append = [&] { store.append(0, 1, rows.in, nullptr); };
  expect_kept(append);
  store.pause();
  expect_let_go([&] { store.resume(); }, append);
  std::vector<std::unique_ptr<ClaimGuard>> others;
  for (std::uint64_t i = 0; i < kClaims; ++i) others.push_back(std::make_unique<ClaimGuard>(store.control().participant(0)));
  expect_let_go([&] { others.clear(); }, append);
  Word& word = store.control().word(3);  // the next row
  word.store(ticket(1, State::writing));
  expect_let_go([&] { word.store(ticket(1, State::committed)); }, append);
  EXPECT_EQ(store.control().size(), 4u);
}

TEST(indexes_are_waited_for_without_what_is_kept) {
  constexpr std::uint64_t kRows = 8;
  const std::uint64_t bytes = Priorities::bytes(kRows, false);
  const SharedPages memory(bytes);
  const std::span<std::byte> at(memory.data(), bytes);
  Priorities::format(at, kRows, {1, 1, 0, false});
  Priorities priorities(at, nullptr);
  auto* const header = reinterpret_cast<PriorityHeader*>(at.data());
  const std::int64_t rows[] = {1, 2};
  const double two[] = {2, 2};
  std::int64_t drawn[3];
  const auto update = [&] { priorities.update(rows, two, 2, nullptr); };
  const auto draw = [&] { priorities.draw(5, 0, 3, drawn, nullptr, nullptr); };
  expect_kept(update);
  expect_kept(draw);
  for (const std::function<void()>& call : {std::function<void()>(update), std::function<void()>(draw)}) {
    EXPECT(!header->mutex.lock());
    expect_let_go([&] { header->mutex.unlock(); }, call);
    header->missed.store(1);  // the next holder looks at all rows
    expect_let_go([] {}, call);
    EXPECT_EQ(header->missed.load(), 0u);
  }
}
