#include "windows.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

#include "check.h"
#include "random.h"

namespace engram {
namespace {

constexpr std::uint64_t kRedraws = 8;  // before a reader begins to yield
constexpr std::uint64_t kTries = 8;    // draws of anchors before those that will do are listed
constexpr auto kWait = std::chrono::seconds(5);

// The windows of a choice that are there, one by one.
class Chosen {
 public:
  explicit Chosen(Drawn drawn) : drawn_(std::move(drawn)) {}

  /// The length of the next one, whose rows and tickets are put into `length` places, the last repeated; 0: no more.
  std::uint64_t next(std::uint64_t length, std::int64_t* rows, std::int64_t* numbers) {
    while (window_ < drawn_.windows.size() && drawn_.windows[window_].length == 0) ++window_;
    if (window_ == drawn_.windows.size()) return 0;
    const std::uint64_t steps = drawn_.windows[window_++].length, last = row_ + steps - 1;
    check(steps <= length && last < drawn_.rows.size(), "windows of at most the length asked for");
    std::fill_n(std::copy_n(&drawn_.rows[row_], steps, rows), length - steps, drawn_.rows[last]);
    std::fill_n(std::copy_n(&drawn_.numbers[row_], steps, numbers), length - steps, drawn_.numbers[last]);
    row_ += steps;
    return steps;
  }

 private:
  Drawn drawn_;
  std::size_t window_ = 0, row_ = 0;
};

// Windows that were read into places of equal size, moved together.
void close_gaps(const Store& store, const std::vector<std::uint64_t>& lengths, std::uint64_t length, bool padded,
                const WindowRoom& room) {
  std::uint64_t to = 0;
  for (std::uint64_t slot = 0; slot < lengths.size(); ++slot) {
    const std::uint64_t from = slot * length, n = lengths[slot] == 0 ? 0 : padded ? length : lengths[slot];
    if (from != to && n > 0) {
      for (std::uint64_t f = 0; f < store.fields(); ++f) {
        const std::uint64_t bytes = store.row_bytes(f);
        if (bytes > 0) std::memmove(room.fields[f] + to * bytes, room.fields[f] + from * bytes, n * bytes);
      }
      std::copy_n(room.rows + from, n, room.rows + to);
      std::copy_n(room.numbers + from, n, room.numbers + to);
    }
    to += n;
  }
}

}  // namespace

std::vector<std::uint64_t> read_windows(const Store& store, const ChooseWindows& choose, std::uint64_t n,
                                        std::uint64_t length, bool padded, const WindowRoom& room) {
  std::vector<std::uint64_t> lengths;
  lengths.reserve(n);
  std::uint64_t shortest = length;
  {
    Chosen chosen(choose(n, 0));
    while (lengths.size() < n) {
      const std::uint64_t at = lengths.size() * length;
      const std::uint64_t steps = chosen.next(length, room.rows + at, room.numbers + at);
      if (steps == 0) break;
      shortest = std::min(shortest, steps);
      lengths.push_back(steps);
    }
  }
  std::vector<std::int64_t> moved =
      store.gather(room.rows, lengths.size() * length, store.all(), room.fields, room.numbers, nullptr);
  const auto deadline = std::chrono::steady_clock::now() + kWait;
  std::vector<std::byte*> fields(room.fields.size());
  for (std::uint64_t attempt = 1; !moved.empty(); ++attempt) {
    if (attempt > kRedraws) {
      if (std::chrono::steady_clock::now() > deadline) throw Stalled("windows moved at every try for 5 s");
      std::this_thread::yield();
    }
    std::vector<std::uint64_t> slots;
    for (const std::int64_t place : moved) {
      const std::uint64_t slot = static_cast<std::uint64_t>(place) / length;
      if (slots.empty() || slots.back() != slot) slots.push_back(slot);
    }
    moved.clear();
    Chosen chosen(choose(slots.size(), attempt));
    for (const std::uint64_t slot : slots) {
      const std::uint64_t at = slot * length;
      lengths[slot] = chosen.next(length, room.rows + at, room.numbers + at);
      shortest = std::min(shortest, lengths[slot]);
      if (lengths[slot] == 0) continue;
      for (std::uint64_t f = 0; f < fields.size(); ++f) fields[f] = room.fields[f] + at * store.row_bytes(f);
      const bool stood = store.gather(room.rows + at, length, store.all(), fields, room.numbers + at, nullptr).empty();
      if (!stood) moved.push_back(static_cast<std::int64_t>(at));
    }
    store.control().counters().redraws.fetch_add(slots.size(), std::memory_order_relaxed);
  }
  if (shortest < length) {
    close_gaps(store, lengths, length, padded, room);
    std::erase(lengths, std::uint64_t{0});
  }
  return lengths;
}

namespace {

void append(Drawn& to, const Drawn& from) {
  to.windows.insert(to.windows.end(), from.windows.begin(), from.windows.end());
  to.rows.insert(to.rows.end(), from.rows.begin(), from.rows.end());
  to.numbers.insert(to.numbers.end(), from.numbers.begin(), from.numbers.end());
}

// Rows of positive priority where a window may begin, n of them drawn exactly in proportion.
std::vector<std::int64_t> listed_anchors(const Priorities& priorities, Trajectories& table, const Random& random,
                                         std::uint64_t n, const Shape& shape) {
  std::vector<double> upto(priorities.rows());
  priorities.copy_leaves(upto.data(), upto.size());
  std::vector<std::int64_t> rows;
  for (std::uint64_t row = 0; row < upto.size(); ++row) {
    if (upto[row] > 0) rows.push_back(static_cast<std::int64_t>(row));
  }
  const Drawn there = table.windows_at(rows.data(), rows.size(), shape);
  std::uint64_t kept = 0;
  double sum = 0;
  for (std::uint64_t i = 0; i < rows.size(); ++i) {
    if (there.windows[i].length == 0) continue;
    sum += upto[static_cast<std::uint64_t>(rows[i])];
    rows[kept] = rows[i];
    upto[kept++] = sum;  // behind the leaf that was just read: kept <= i <= rows[i]
  }
  std::vector<std::int64_t> drawn;
  for (std::uint64_t i = 0; kept > 0 && i < n; ++i) {
    const double target = static_cast<double>(random.bits(i, kTries) >> 11) * 0x1p-53 * sum;
    const auto at = std::upper_bound(upto.begin(), upto.begin() + static_cast<std::ptrdiff_t>(kept), target) - upto.begin();
    drawn.push_back(rows[std::min<std::uint64_t>(static_cast<std::uint64_t>(at), kept - 1)]);
  }
  return drawn;
}

}  // namespace

Drawn draw_anchored(const Priorities& priorities, Trajectories& table, std::uint64_t key, std::uint64_t n,
                    const Shape& shape) {
  Drawn drawn;
  std::vector<std::int64_t> rows;
  for (std::uint64_t attempt = 0; attempt < kTries && drawn.windows.size() < n; ++attempt) {
    // More than are missing, as some will not do; never fewer than a few.
    const std::uint64_t missing = n - drawn.windows.size();
    rows.resize(2 * missing + 8);
    priorities.draw(key, attempt, rows.size(), rows.data(), nullptr, nullptr);
    append(drawn, table.windows_at(rows.data(), rows.size(), shape, missing));
  }
  if (drawn.windows.size() < n) {
    rows = listed_anchors(priorities, table, Random(key), n - drawn.windows.size(), shape);
    append(drawn, table.windows_at(rows.data(), rows.size(), shape, rows.size()));
  }
  return drawn;
}

}  // namespace engram
