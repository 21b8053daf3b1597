#include "windows.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>

#include "check.h"
#include "random.h"
#include "wait.h"

namespace engram {
namespace {

constexpr std::uint64_t kRedraws = 8;  // before a reader begins to yield
constexpr std::uint64_t kTries = 8;    // draws of anchors before those that will do are listed

// A window of a batch: where its rows begin among all that were chosen for it, and how many they are; 0: none.
struct Slot {
  std::uint64_t from, rows;
  Steps steps;
  Window window;
};

// The rows and tickets of all windows that were chosen for a batch, one behind the other.
class Chosen {
 public:
  Chosen(const ChooseWindows& choose, const WindowSpec& spec) : choose_(choose), spec_(spec) {}

  /// The windows of one more choice that are there, n at most.
  std::vector<Slot> more(std::uint64_t n, std::uint64_t attempt) {
    Drawn drawn = choose_(n, attempt);
    std::vector<Slot> slots;
    slots.reserve(n);
    std::uint64_t from = rows_.size();
    if (from == 0) {
      rows_ = std::move(drawn.rows);
      numbers_ = std::move(drawn.numbers);
    } else {
      rows_.insert(rows_.end(), drawn.rows.begin(), drawn.rows.end());
      numbers_.insert(numbers_.end(), drawn.numbers.begin(), drawn.numbers.end());
    }
    for (const Window& window : drawn.windows) {
      if (window.length == 0 || slots.size() == n) continue;
      const std::uint64_t rows = spec_.rows(window);
      check(rows <= spec_.length && rows <= rows_.size() - from, "windows of at most the length asked for");
      slots.push_back({from, rows, spec_.steps(window), window});
      from += rows;
    }
    return slots;
  }

  /// Whether the window is there still: then its rows and tickets are those of now.
  bool stays(const Slot& slot, const ChooseAgain& again) {
    Drawn drawn;
    if (slot.rows == 0 || !again(slot.window, drawn)) return false;
    check(drawn.rows.size() == slot.rows, "the same window");
    std::copy(drawn.rows.begin(), drawn.rows.end(), rows_.begin() + static_cast<std::ptrdiff_t>(slot.from));
    std::copy(drawn.numbers.begin(), drawn.numbers.end(), numbers_.begin() + static_cast<std::ptrdiff_t>(slot.from));
    return true;
  }

  /// A window's rows and tickets, put into `places` places, the last repeated.
  void put(const Slot& slot, std::uint64_t places, std::int64_t* rows, std::int64_t* numbers) const {
    const std::uint64_t last = slot.from + slot.rows - 1;
    std::fill_n(std::copy_n(&rows_[slot.from], slot.rows, rows), places - slot.rows, rows_[last]);
    std::fill_n(std::copy_n(&numbers_[slot.from], slot.rows, numbers), places - slot.rows, numbers_[last]);
  }

 private:
  const ChooseWindows& choose_;
  const WindowSpec& spec_;
  std::vector<std::int64_t> rows_, numbers_;
};

// Windows that were read into places of equal size, moved together.
void close_gaps(const Store& store, std::span<const std::uint64_t> which, const std::vector<Slot>& slots,
                std::uint64_t stride, bool padded, const WindowMemory& memory) {
  std::uint64_t to = 0;
  for (std::uint64_t i = 0; i < slots.size(); ++i) {
    const std::uint64_t from = i * stride, n = slots[i].rows == 0 ? 0 : padded ? stride : slots[i].rows;
    if (from != to && n > 0) {
      for (std::uint64_t f = 0; f < which.size(); ++f) {
        const std::uint64_t bytes = store.row_bytes(which[f]);
        if (bytes > 0) std::memmove(memory.fields[f] + to * bytes, memory.fields[f] + from * bytes, n * bytes);
      }
      std::copy_n(memory.rows + from, n, memory.rows + to);
      std::copy_n(memory.numbers + from, n, memory.numbers + to);
    }
    to += n;
  }
}

}  // namespace

std::vector<Steps> read_windows(const Store& store, std::span<const std::uint64_t> which, const ChooseWindows& choose,
                                std::uint64_t n, const WindowSpec& spec, bool padded, const Allocate& allocate,
                                const ChooseAgain& again) {
  Chosen chosen(choose, spec);
  std::vector<Slot> slots = chosen.more(n, 0);
  std::uint64_t stride = 0;  // places of each window, while they are read
  WindowMemory memory{};
  const auto read_all = [&] {
    stride = padded ? spec.length : 1;
    for (const Slot& slot : slots) stride = std::max(stride, slot.rows);
    memory = allocate(slots.size() * stride);
    for (std::uint64_t i = 0; i < slots.size(); ++i) {
      chosen.put(slots[i], stride, memory.rows + i * stride, memory.numbers + i * stride);
    }
    std::vector<std::uint64_t> moved;
    for (const std::int64_t place :
         store.gather(memory.rows, slots.size() * stride, which, memory.fields, memory.numbers, nullptr)) {
      const std::uint64_t i = static_cast<std::uint64_t>(place) / stride;
      if (moved.empty() || moved.back() != i) moved.push_back(i);
    }
    return moved;
  };
  const auto stands = [&](std::uint64_t i) {  // what came for a window that moved
    const std::uint64_t at = i * stride;
    chosen.put(slots[i], stride, memory.rows + at, memory.numbers + at);
    std::vector<std::byte*> fields(memory.fields.size());
    for (std::uint64_t f = 0; f < fields.size(); ++f) fields[f] = memory.fields[f] + at * store.row_bytes(which[f]);
    return store.gather(memory.rows + at, stride, which, fields, memory.numbers + at, nullptr).empty();
  };
  std::vector<std::uint64_t> moved = read_all();
  const Deadline deadline, turn(wait_limit.load() / 2);
  for (std::uint64_t attempt = 1; !moved.empty(); ++attempt) {
    if (attempt > kRedraws) {
      if (deadline.passed()) throw in_vain("windows moved at every try");
      let_go();
      std::this_thread::yield();
    }
    std::vector<std::uint64_t> lost;  // whose places others take
    for (const std::uint64_t i : moved) {
      if (!again || turn.passed() || !chosen.stays(slots[i], again)) lost.push_back(i);
    }
    store.control().count_redraws(lost.size());
    std::vector<Slot> others = lost.empty() ? std::vector<Slot>{} : chosen.more(lost.size(), attempt);
    others.resize(lost.size(), Slot{});
    bool longer = false;
    for (std::uint64_t k = 0; k < lost.size(); ++k) {
      slots[lost[k]] = others[k];
      longer |= others[k].rows > stride;
    }
    if (longer) {  // than what there is memory for
      std::erase_if(slots, [](const Slot& slot) { return slot.rows == 0; });
      moved = read_all();
    } else {
      std::erase_if(moved, [&](std::uint64_t i) { return slots[i].rows == 0 || stands(i); });
    }
  }
  close_gaps(store, which, slots, stride, padded, memory);
  std::vector<Steps> steps;
  steps.reserve(slots.size());
  for (const Slot& slot : slots) {
    if (slot.rows > 0) steps.push_back(slot.steps);
  }
  return steps;
}

namespace {

void append(Drawn& to, const Drawn& from) {
  to.windows.insert(to.windows.end(), from.windows.begin(), from.windows.end());
  to.rows.insert(to.rows.end(), from.rows.begin(), from.rows.end());
  to.numbers.insert(to.numbers.end(), from.numbers.begin(), from.numbers.end());
}

// Rows of positive priority where a window may begin, n of them drawn exactly in proportion.
std::vector<std::int64_t> listed_anchors(const Priorities& priorities, Trajectories& table, const Random& random,
                                         std::uint64_t n, const WindowSpec& spec) {
  let_go();
  std::vector<double> upto(priorities.rows());
  priorities.copy_leaves(upto.data(), upto.size(), false);
  std::vector<std::int64_t> rows;
  for (std::uint64_t row = 0; row < upto.size(); ++row) {
    if (upto[row] > 0) rows.push_back(static_cast<std::int64_t>(row));
  }
  const std::vector<std::uint64_t> there = table.window_lengths(rows.data(), rows.size(), spec);
  std::uint64_t kept = 0;
  double sum = 0;
  for (std::uint64_t i = 0; i < rows.size(); ++i) {
    if (there[i] == 0) continue;
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
                    const WindowSpec& spec) {
  Drawn drawn;
  std::vector<std::int64_t> rows;
  for (std::uint64_t attempt = 0; attempt < kTries && drawn.windows.size() < n; ++attempt) {
    // More than are missing, as some will not do; never fewer than a few.
    const std::uint64_t missing = n - drawn.windows.size();
    rows.resize(2 * missing + 8);
    priorities.draw(key, attempt, rows.size(), rows.data(), nullptr, nullptr);
    append(drawn, table.windows_at(rows.data(), rows.size(), spec, missing));
  }
  if (drawn.windows.size() < n) {
    rows = listed_anchors(priorities, table, Random(key), n - drawn.windows.size(), spec);
    append(drawn, table.windows_at(rows.data(), rows.size(), spec, rows.size()));
  }
  return drawn;
}

Drawn propose_anchored(const Priorities& priorities, Trajectories& table, std::uint64_t key, std::uint64_t n,
                       const WindowSpec& spec) {
  std::vector<std::int64_t> rows(n);
  priorities.draw(key, 0, n, rows.data(), nullptr, nullptr);
  return table.windows_at(rows.data(), n, spec, n);
}

Drawn newest_first(Trajectories& table, std::span<std::int64_t> taken, std::uint64_t n, const WindowSpec& spec,
                   const std::function<Drawn(std::uint64_t n)>& choose) {
  Drawn drawn = table.newest(taken, n, spec);
  if (drawn.windows.size() < n) append(drawn, choose(n - drawn.windows.size()));
  return drawn;
}

Drawn completed_first(Trajectories& table, std::span<std::int64_t> next, std::uint64_t n, const WindowSpec& spec,
                      const std::function<Drawn(std::uint64_t n)>& choose) {
  WindowSpec whole{spec.length};
  whole.unfinished = spec.unfinished;
  whole.final = spec.final;
  Drawn drawn = table.completed(next, n, whole);
  if (drawn.windows.size() < n) append(drawn, choose(n - drawn.windows.size()));
  return drawn;
}

}  // namespace engram
