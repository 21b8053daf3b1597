// Reading and drawing: look at the ticket, copy, look again.

#include "store.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <string>
#include <thread>

#include "check.h"
#include "fence.h"
#include "pool.h"
#include "random.h"
#include "wait.h"

namespace engram {
namespace {

constexpr std::uint64_t kChunkBytes = 256 * 1024;  // copied between two looks at the tickets
constexpr std::uint64_t kRedraws = 8;              // before a reader begins to yield
constexpr std::uint64_t kPatience = 64;            // attempts before the live rows are listed
constexpr std::uint64_t kMostTries = 8;            // per row, until void rows are left out before they are drawn

// Why `n` live rows are too few.
std::string too_few(std::uint64_t n) { return n == 0 ? kEmptyStore : "sample: rows were forgotten meanwhile"; }

// The rows inside the lanes' extents, in order: all of them, or those that are not among the given void ones.
class Spans {
 public:
  explicit Spans(const Control& control, std::shared_ptr<const std::vector<std::int64_t>> voids = nullptr)
      : length_(control.lane_length()), voids_(std::move(voids)) {
    if (control.lanes() == 1) {
      inside_ = control.filled(0);
      return;
    }
    ends_.reserve(control.lanes());
    for (std::uint64_t lane = 0; lane < control.lanes(); ++lane) ends_.push_back(inside_ += control.filled(lane));
    if (inside_ == control.capacity()) ends_.clear();  // all full: the k-th row is row k
  }

  /// Where fields are ragged: the rows from each lane's tail on, in order. Most others inside the extents have lost their items.
  Spans(const Control& control, const Ragged& ragged) : length_(control.lane_length()) {
    for (std::uint64_t lane = 0; lane < control.lanes(); ++lane) {
      const std::uint64_t end = control.end(lane), filled = std::min(control.filled(lane), end);
      const std::uint64_t first = std::clamp(ragged.tail(lane).load(std::memory_order_acquire), end - filled, end);
      starts_.push_back(first % length_);
      ends_.push_back(inside_ += end - first);
    }
  }

  std::uint64_t total() const { return inside_ - std::min(inside_, left_out()); }
  /// Whether the k-th row is row k.
  bool ranks_are_rows() const { return ends_.empty() && left_out() == 0; }

  std::int64_t row(std::uint64_t k) const {
    k += voids_before(k);
    if (ends_.empty()) return static_cast<std::int64_t>(k);
    const auto end = std::upper_bound(ends_.begin(), ends_.end(), k);
    const auto lane = static_cast<std::uint64_t>(end - ends_.begin());
    const std::uint64_t step = k - (lane == 0 ? 0 : ends_[lane - 1]);
    return static_cast<std::int64_t>(lane * length_ + (starts_.empty() ? step : (starts_[lane] + step) % length_));
  }

 private:
  std::uint64_t left_out() const { return voids_ == nullptr ? 0 : voids_->size(); }

  // How many void rows lie before the k-th other one: as many as have fewer than k + 1 others before them.
  std::uint64_t voids_before(std::uint64_t k) const {
    std::uint64_t low = 0;
    for (std::uint64_t high = left_out(); low < high;) {
      const std::uint64_t middle = low + (high - low) / 2;
      if (place((*voids_)[middle]) - middle <= k) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // How many rows inside the extents lie before a row.
  std::uint64_t place(std::int64_t row) const {
    const auto at = static_cast<std::uint64_t>(row);
    if (ends_.empty()) return at;
    const std::uint64_t lane = at / length_;
    return (lane == 0 ? 0 : ends_[lane - 1]) + at % length_;
  }

  std::uint64_t length_, inside_ = 0;
  std::vector<std::uint64_t> ends_, starts_;
  std::shared_ptr<const std::vector<std::int64_t>> voids_;
};

}  // namespace

std::uint64_t Store::block_rows(std::span<const std::uint64_t> which) const {
  std::uint64_t bytes = 0;
  for (const std::uint64_t f : which) bytes += row_bytes(f);
  return std::clamp<std::uint64_t>(kChunkBytes / std::max<std::uint64_t>(1, bytes), 1, kMostBlockRows);
}

// Asks for the tickets of rows that will be read soon: one block ahead, so that no read waits for them.
void Store::prefetch_tickets(const std::int64_t* rows, std::uint64_t n) const {
  for (std::uint64_t i = 0; i < n; ++i) __builtin_prefetch(&control_.word(static_cast<std::uint64_t>(rows[i])));
}

// Reads rows[0, n), n <= 64, into places at … of the batch; bit i of *moved says that rows[i] was not whole throughout.
bool Store::read_block(const std::int64_t* rows, std::uint64_t n, std::span<const std::uint64_t> which, Batch batch,
                       std::uint64_t at, const std::int64_t* expected, std::int64_t* numbers_out,
                       std::uint64_t* moved) const {
  static_assert(kMostBlockRows <= 64);
  std::uint64_t words[kMostBlockRows];
  std::uint64_t ends[kMostBlockRows];
  const std::uint64_t runs = mostly_runs(rows, n) ? runs_of(rows, n, ends) : 0;
  const std::vector<Field>& fields = table().fields;
  const Field* first = which.empty() ? nullptr : &fields[which[0]];
  for (std::uint64_t i = 0, row = 0; first != nullptr && i < runs; row = ends[i++]) prefetch_run(*first, rows[row], ends[i] - row);
  std::uint64_t bad = 0;
  for (std::uint64_t i = 0; i < n; ++i) {
    if (first != nullptr && runs == 0) prefetch_row(*first, rows[i]);
    words[i] = control_.word(static_cast<std::uint64_t>(rows[i])).load(std::memory_order_acquire);
    const bool ok = is_committed(words[i]) &&
                    (expected == nullptr || number_of(words[i]) == static_cast<std::uint64_t>(expected[i]));
    bad |= static_cast<std::uint64_t>(!ok) << i;
    if (numbers_out != nullptr) numbers_out[i] = static_cast<std::int64_t>(number_of(words[i]));
  }
  for (std::uint64_t f = 0; f < which.size(); ++f) {
    const Field& field = fields[which[f]];
    std::byte* out = batch[f] + at * field.row_bytes;
    const Field* next = f + 1 < which.size() ? &fields[which[f + 1]] : nullptr;
    if (runs > 0) {
      gather_runs(field, rows, ends, runs, out, next);
    } else {
      gather_rows(field, rows, n, out, next);
    }
  }
#ifndef ENGRAM_WITHOUT_TICKET_CHECK  // the tests must fail then: make negative-controls
  fence(std::memory_order_acquire);
  for (std::uint64_t i = 0; i < n; ++i) {
    const std::uint64_t now = control_.word(static_cast<std::uint64_t>(rows[i])).load(std::memory_order_relaxed);
    bad |= static_cast<std::uint64_t>(now != words[i]) << i;
  }
#endif
  *moved = bad;
  return bad == 0;
}

// Reads one row into its place of the batch. False: it was not whole throughout.
bool Store::read_row(std::int64_t row, Batch batch, std::uint64_t at, std::int64_t* numbers_out) const {
  std::int64_t* number = numbers_out == nullptr ? nullptr : numbers_out + at;
  std::uint64_t moved = 0;
  if (disk_ == nullptr || !disk_->reads.is_cold()) return read_block(&row, 1, all().first(batch.size()), batch, at, nullptr, number, &moved);
  std::vector<std::byte*> fields(batch.size());
  for (std::uint64_t f = 0; f < fields.size(); ++f) fields[f] = batch[f] + at * row_bytes(f);
  return gather_from_disk(&row, 1, all().first(batch.size()), fields, nullptr, number).empty();
}

namespace {

// Splits n rows of `bytes` each into chunks for the pool: several per thread, so that a late thread costs little.
template <class Body>
void for_each_chunk(std::uint64_t n, std::uint64_t bytes, std::uint64_t block, Body&& body) {
  const std::uint64_t threads = n * bytes < kParallelBytes ? 1 : num_threads();
  if (threads == 1) {
    body(std::uint64_t{0}, n);
    return;
  }
  const std::uint64_t blocks = (n + block - 1) / block;
  const std::uint64_t chunks = std::min<std::uint64_t>(blocks, threads * 8);
  parallel(chunks, [&](std::size_t c) {
    const std::uint64_t begin = blocks * c / chunks * block, end = std::min(blocks * (c + 1) / chunks * block, n);
    body(begin, end);
  });
}

}  // namespace

std::vector<std::int64_t> Store::gather(const std::int64_t* rows, std::uint64_t n,
                                        std::span<const std::uint64_t> which, Batch batch,
                                        const std::int64_t* expected, std::int64_t* numbers_out) const {
  check(batch.size() == which.size(), "another number of outputs than fields named");
  std::uint64_t bytes = 0;
  for (const std::uint64_t f : which) {
    check(f < fields(), "a field outside the store");
    bytes += row_bytes(f);
  }
  const OwnRows own(rows, n, control_.capacity());
  if (const Field* field = longest_in_file(which);
      field != nullptr && disk_->reads.is_cold(*field, n, [rows](std::uint64_t i) { return rows[i]; })) {
    return gather_from_disk(rows, n, which, batch, expected, numbers_out);
  }
  const std::uint64_t block = block_rows(which);
  std::vector<std::uint64_t> moved((n + block - 1) / block);
  for_each_chunk(n, bytes, block, [&](std::uint64_t begin, std::uint64_t end) {
    prefetch_tickets(rows + begin, std::min(block, end - begin));
    for (std::uint64_t i = begin; i < end; i += block) {
      if (i + block < end) prefetch_tickets(rows + i + block, std::min(block, end - i - block));
      read_block(rows + i, std::min(block, end - i), which, batch, i, expected == nullptr ? nullptr : expected + i,
                 numbers_out == nullptr ? nullptr : numbers_out + i, &moved[i / block]);
    }
  });
  std::vector<std::int64_t> positions;
  look_after_others(std::any_of(moved.begin(), moved.end(), [](auto bits) { return bits != 0; }) ? Need::waiting : Need::none);
  for (std::uint64_t b = 0; b < moved.size(); ++b) {
    for (std::uint64_t bits = moved[b]; bits != 0; bits &= bits - 1) {
      positions.push_back(static_cast<std::int64_t>(b * block + static_cast<std::uint64_t>(std::countr_zero(bits))));
    }
  }
  return positions;
}

void Store::sample_uniform(std::uint64_t key, std::uint64_t n, Batch batch, std::int64_t* rows_out,
                           std::int64_t* numbers_out, Masses* masses) const {
  check_columns(batch.size());
  look_after_others();
  const std::span<const std::uint64_t> which = all().first(batch.size());
  const std::uint64_t live = control_.size(), gaps = control_.void_rows();
  const bool in_rings = ragged_ != nullptr && !ragged_->slots();
  const Spans spans = in_rings ? Spans(control_, *ragged_) : Spans(control_, gaps > live * (kMostTries - 1) ? voids() : nullptr);
  if (spans.total() == 0) throw NothingLive(kEmptyStore);
  if (masses != nullptr) *masses = {static_cast<double>(live), 1.0, live};
  const Random random(key);
  const std::uint64_t block = block_rows(which);
  std::atomic<bool> impatient{false};

  // Draws position i again until its row is whole. Rejection keeps the draw uniform over the live rows.
  const auto redraw = [&](std::uint64_t i, std::int64_t* row) {
    for (std::uint64_t attempt = 1; attempt <= kPatience; ++attempt) {
      if (attempt > kRedraws) let_go(), std::this_thread::yield();
      *row = spans.row(random.below(spans.total(), i, attempt));
      control_.count_redraws(1);
      if (read_row(*row, batch, i, numbers_out)) return;
    }
    impatient.store(true, std::memory_order_relaxed);
  };

  const auto draw = [&](std::uint64_t i) { return spans.row(random.below(spans.total(), i)); };
  if (const Field* field = longest_in_file(which); field != nullptr && disk_->reads.is_cold(*field, n, draw)) {
    std::vector<std::int64_t> rows(n);
    for (std::uint64_t i = 0; i < n; ++i) rows[i] = draw(i);
    for (const std::int64_t i : gather_from_disk(rows.data(), n, which, batch, nullptr, numbers_out)) {
      redraw(static_cast<std::uint64_t>(i), &rows[static_cast<std::uint64_t>(i)]);
    }
    if (rows_out != nullptr) std::copy(rows.begin(), rows.end(), rows_out);
    if (impatient.load(std::memory_order_relaxed)) sample_listed(random, n, batch, rows_out, numbers_out);
    return;
  }
  for_each_chunk(n, row_bytes(), block, [&](std::uint64_t begin, std::uint64_t end) {
    std::int64_t drawn[2][kMostBlockRows];
    std::int64_t *chosen = drawn[0], *upcoming = drawn[1];
    const auto choose = [&](std::uint64_t i, std::int64_t* rows) {
      const std::uint64_t count = std::min(block, end - i);
      for (std::uint64_t j = 0; j < count; ++j) rows[j] = draw(i + j);
      prefetch_tickets(rows, count);
    };
    choose(begin, chosen);
    for (std::uint64_t i = begin; i < end && !impatient.load(std::memory_order_relaxed); i += block) {
      if (i + block < end) choose(i + block, upcoming);
      const std::uint64_t count = std::min(block, end - i);
      std::uint64_t moved = 0;
      read_block(chosen, count, which, batch, i, nullptr, numbers_out == nullptr ? nullptr : numbers_out + i, &moved);
      for (; moved != 0; moved &= moved - 1) {
        const auto j = static_cast<std::uint64_t>(std::countr_zero(moved));
        redraw(i + j, &chosen[j]);
      }
      if (rows_out != nullptr) std::memcpy(rows_out + i, chosen, count * sizeof(std::int64_t));
      std::swap(chosen, upcoming);
    }
  });
  if (impatient.load(std::memory_order_relaxed)) sample_listed(random, n, batch, rows_out, numbers_out);
}

// Draws from a list of the live rows: where nearly everything inside the extent is part of a large batch that is still being
// written.
void Store::sample_listed(const Random& random, std::uint64_t n, Batch batch, std::int64_t* rows_out,
                          std::int64_t* numbers_out) const {
  let_go();
  std::vector<std::int64_t> live = live_rows();
  for (std::uint64_t i = 0; i < n; ++i) {
    for (std::uint64_t attempt = kPatience + 1;; ++attempt) {
      if (live.empty()) throw NothingLive(kEmptyStore);
      const std::int64_t row = live[random.below(live.size(), i, attempt)];
      if (rows_out != nullptr) rows_out[i] = row;
      control_.count_redraws(1);
      if (read_row(row, batch, i, numbers_out)) break;
      live = live_rows();
    }
  }
}

void Store::read_ranked(std::int64_t* ranks, std::uint64_t n, Batch batch, std::int64_t* numbers_out) const {
  const Spans spans(control_, control_.void_rows() == 0 ? nullptr : voids());
  const bool as_they_are = spans.ranks_are_rows();
  const std::uint64_t total = spans.total();
  std::vector<std::int64_t> rows(ranks, ranks + n);
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto rank = static_cast<std::uint64_t>(rows[i]);
    if (rank >= total) throw NothingLive(too_few(total));
    if (!as_they_are) rows[i] = spans.row(rank);
  }
  const std::span<const std::uint64_t> which = all().first(batch.size());
  std::vector<std::int64_t> moved = gather(rows.data(), n, which, batch, nullptr, numbers_out);
  std::copy(rows.begin(), rows.end(), ranks);
  if (moved.empty()) return;
  let_go();
  const Deadline deadline;
  std::vector<std::byte*> fields(batch.size());
  while (!moved.empty()) {
    const auto i = static_cast<std::uint64_t>(moved.back());
    for (std::uint64_t f = 0; f < fields.size(); ++f) fields[f] = batch[f] + i * row_bytes(f);
    if (gather(&rows[i], 1, which, fields, nullptr, numbers_out == nullptr ? nullptr : numbers_out + i).empty()) {
      moved.pop_back();
      continue;
    }
    if (control_.size() == 0) throw NothingLive(kEmptyStore);
    const auto row = static_cast<std::uint64_t>(rows[i]);
    if (!control_.inside(row) || state_of(control_.word(row).load(std::memory_order_acquire)) == State::voided) {
      ranks[i] = rows[i] = another_live(rows[i], rows.data(), n);  // no writer is at work on it: waiting is of no use
    }
    if (deadline.passed()) throw in_vain("row " + std::to_string(rows[i]) + " moved at every try");
    std::this_thread::yield();
  }
}

// The next live row behind a given one, round and round, that is not among rows[0, n).
std::int64_t Store::another_live(std::int64_t gone, const std::int64_t* rows, std::uint64_t n) const {
  const std::vector<std::int64_t> live = live_rows();
  const auto start = static_cast<std::uint64_t>(std::lower_bound(live.begin(), live.end(), gone) - live.begin());
  for (std::uint64_t i = 0; i < live.size(); ++i) {
    const std::int64_t row = live[(start + i) % live.size()];
    if (std::find(rows, rows + n, row) == rows + n) return row;
  }
  throw NothingLive(too_few(live.size()));
}

void Store::tickets_of(const std::int64_t* rows, std::uint64_t n, std::int64_t* numbers_out) const {
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto row = static_cast<std::uint64_t>(copied(rows[i]));
    numbers_out[i] = -1;
    if (row >= control_.capacity()) continue;
    const std::uint64_t word = control_.word(row).load(std::memory_order_acquire);
    if (is_committed(word)) numbers_out[i] = static_cast<std::int64_t>(number_of(word));
  }
}

// Of every number below the counter its claim is there to be seen, if the write is not done.
std::uint64_t Store::first_unfinished() const {
  std::uint64_t first = control_.counters().next_ticket.load(std::memory_order_acquire);
  const Deadline deadline;
  for (std::uint64_t i = 0; i < control_.participants(); ++i) {
    for (const Claim& claim : control_.participant(i).claims) {
      std::uint64_t t0;
      while ((t0 = claim.t0.load(std::memory_order_acquire)) == kNoted) {  // for some instructions, or its owner is stopped
        if (deadline.passed()) throw in_vain("another writer has been about to write");
        look_after_others(Need::waiting);
        std::this_thread::yield();
      }
      if (t0 != 0) first = std::min(first, t0);
    }
  }
  return first;
}

std::uint64_t Store::changes(std::uint64_t since, std::vector<std::int64_t>& rows, std::vector<std::int64_t>& numbers) const {
  const std::uint64_t next = first_unfinished();
  std::vector<std::pair<std::int64_t, std::int64_t>> found;  // numbers and rows
  for (std::uint64_t row = 0; row < control_.capacity(); ++row) {
    const std::uint64_t word = control_.word(row).load(std::memory_order_acquire);
    if (!is_committed(word) || number_of(word) < since) continue;
    if (!control_.inside(row)) continue;  // just being forgotten
    found.emplace_back(static_cast<std::int64_t>(number_of(word)), static_cast<std::int64_t>(row));
  }
  std::sort(found.begin(), found.end());
  for (const auto& [number, row] : found) {
    numbers.push_back(number);
    rows.push_back(row);
  }
  return next;
}

// The live rows, in row order. If there are none because all are just being overwritten, waits for them, bounded.
std::vector<std::int64_t> Store::live_rows() const {
  const Deadline deadline;
  for (;;) {
    std::vector<std::int64_t> live;
    bool writing = false;
    for (std::uint64_t lane = 0; lane < control_.lanes(); ++lane) {
      const std::uint64_t start = lane * control_.lane_length(), end = start + control_.filled(lane);
      for (std::uint64_t row = start; row < end; ++row) {
        const std::uint64_t word = control_.word(row).load(std::memory_order_acquire);
        if (is_committed(word)) live.push_back(static_cast<std::int64_t>(row));
        writing |= state_of(word) == State::writing && !control_.left_behind(row, word);
      }
    }
    if (!live.empty() || !writing || deadline.passed()) return live;
    look_after_others(Need::waiting);
    std::this_thread::yield();
  }
}

std::vector<std::int64_t> Store::holes() const { return *voids(); }

// All rows are looked at where some became void since, or are not any more; or where as many as are counted were not found, as a
// process is at it, or died at it. A row that is being written is not void: it counts in size().
std::shared_ptr<const Store::Rows> Store::voids() const {
  KnownVoids& known = *known_voids_;
  const std::uint64_t changes = control_.counters().void_changes.load(std::memory_order_acquire);
  if (const std::unique_lock lock(known.mutex, std::try_to_lock); lock && known.rows != nullptr) {
#ifdef ENGRAM_WITHOUT_VOID_CHANGES  // the tests must fail then: make negative-controls
    if (known.rows->size() == control_.void_rows()) return known.rows;
#else
    if (known.changes == changes && known.rows->size() == control_.void_rows()) return known.rows;
#endif
  }
  let_go();
  Rows found;
  for (std::uint64_t lane = 0; lane < control_.lanes(); ++lane) {
    const std::uint64_t start = lane * control_.lane_length(), end = start + control_.filled(lane);
    for (std::uint64_t row = start; row < end; ++row) {
      const std::uint64_t word = control_.word(row).load(std::memory_order_acquire);
      if (state_of(word) == State::voided || control_.left_behind(row, word)) found.push_back(static_cast<std::int64_t>(row));
    }
  }
  auto rows = std::make_shared<const Rows>(std::move(found));
  if (const std::unique_lock lock(known.mutex, std::try_to_lock); lock) known.rows = rows, known.changes = changes;
  return rows;
}

}  // namespace engram
