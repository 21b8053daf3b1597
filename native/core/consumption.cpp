#include "consumption.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>

#include "check.h"
#include "fence.h"
#include "random.h"
#include "row_limits.h"
#include "wait.h"

namespace engram {
namespace {

constexpr char kMagic[8] = {'e', 'n', 'g', 'c', 'o', 'n', 's', '\1'}, kRuled[8] = {'e', 'n', 'g', 'c', 'o', 'n', 's', '\2'};
constexpr std::uint64_t kMostRows = std::uint64_t{1} << 32;
constexpr auto kReading = std::chrono::seconds(1);  // that a draw may take longer than the look for a death
constexpr std::uint64_t kMostDraws = std::uint64_t{1} << 24;

std::uint64_t sets_at(std::uint64_t rows) { return kPage + (rows * sizeof(std::uint64_t) + 63) / 64 * 64; }

std::uint64_t heap_at(std::uint64_t rows) { return (sets_at(rows) + 2 * RowSet::bytes(rows) + rows * sizeof(std::uint32_t) + 7) / 8 * 8; }

bool is_ruled(const ConsumptionHeader& header) { return std::memcmp(header.magic, kRuled, sizeof kRuled) == 0; }

ConsumptionHeader* begin_of(std::span<std::byte> memory) {
  check(memory.size() >= kPage, "counts of draws in memory too small for their header");
  auto* header = reinterpret_cast<ConsumptionHeader*>(memory.data());
  check(std::memcmp(header->magic, kMagic, sizeof kMagic) == 0 || is_ruled(*header), "no counts of draws, or of another format");
  return header;
}

ConsumptionHeader* header_in(std::span<std::byte> memory) {
  ConsumptionHeader* header = begin_of(memory);
  check(memory.size() == Consumption::bytes(copied(header->rows), Consumption::rules_of(memory)), "counts of draws in memory of another size");
  return header;
}

void check_most(std::uint64_t most, const RowRules& rules) {
  check((most > 0 || rules.any()) && most < kMostDraws, "counts of draws: expected 1 to 2^24 - 1 draws of a row");
}

}  // namespace

class Consumption::Change {
 public:
  explicit Change(Consumption& self) : self_(self), before_(self.in_flight()), change_(self.redo_) {}
  /// `more`: rows that were to become ones that can be drawn.
  void done(std::uint64_t more = 0) {
    self_.note_sizes();
    change_.done();
    self_.tell_limits(before_ + more);
  }

 private:
  Consumption& self_;
  const std::uint64_t before_;
  RedoChange change_;
};

std::uint64_t Consumption::bytes(std::uint64_t rows, const RowRules& rules) {
  check(rows > 0 && rows < kMostRows, "counts of draws: expected a store of 1 to 2^32 - 1 rows");
  rules.check();
  return rules.any() ? heap_at(rows) + VersionHeap::bytes(rows) : sets_at(rows) + 2 * RowSet::bytes(rows) + rows * sizeof(std::uint32_t);
}

void Consumption::format(std::span<std::byte> memory, std::uint64_t rows, std::uint64_t most, const RowRules& rules) {
  check(memory.size() == bytes(rows, rules), "counts of draws in memory of another size");
  check_most(most, rules);
  auto* header = new (memory.data()) ConsumptionHeader{};
  header->rows = rows;
  header->most = most;
  header->ready_fields = rules.ready.size();
  std::copy(rules.ready.begin(), rules.ready.end(), header->ready);
  header->dated = rules.dated ? 1 : 0;
  header->version = rules.version;
  if (rules.any()) header->floor = -std::numeric_limits<double>::infinity();
  header->mutex.format();
  std::memcpy(header->magic, rules.any() ? kRuled : kMagic, sizeof kMagic);
}

RowRules Consumption::rules_of(std::span<std::byte> memory) {
  const ConsumptionHeader* header = begin_of(memory);
  RowRules rules;
  if (!is_ruled(*header)) return rules;
  const std::uint64_t ready = copied(header->ready_fields);
  check(ready <= RowRules::kReady, "rules of rows: expected at most 16 fields that are to be ready");
  rules.ready.assign(header->ready, header->ready + ready);
  rules.dated = copied(header->dated) != 0;
  if (rules.dated) rules.version = header->version;
  return rules;
}

void Consumption::reset_mutex(std::span<std::byte> memory) { header_in(memory)->mutex.format(); }

void Consumption::copy(std::span<std::byte> from, std::span<std::byte> to) {
  header_in(from);
  check(from.size() == to.size(), "counts of draws in memory of another size");
  std::memcpy(to.data(), from.data(), from.size());
  reset_mutex(to);
  header_in(to)->redo.store(1, std::memory_order_relaxed);
}

Consumption::Consumption(std::span<std::byte> memory, const Control* tickets, std::span<const Field> fields)
    : header_(header_in(memory)),
      redo_(RedoWords::of(*header_)),
      rows_(copied(header_->rows)),
      most_(copied(header_->most)),
      numbers_(reinterpret_cast<std::uint64_t*>(memory.data() + kPage)),
      counts_(reinterpret_cast<std::uint32_t*>(memory.data() + sets_at(rows_) + 2 * RowSet::bytes(rows_))),
      drawable_(memory.data() + sets_at(rows_), rows_),
      used_(memory.data() + sets_at(rows_) + RowSet::bytes(rows_), rows_),
      rules_(rules_of(memory)),
      reader_(rules_, fields),
      tickets_(tickets),
      totals_(header_),
      of_list_(tickets == nullptr ? std::vector<std::uint64_t>(numbers_, numbers_ + rows_) : std::vector<std::uint64_t>()) {
  check_most(most_, rules_);
  if (rules_.any()) {
    check(tickets != nullptr, "rules of rows that are no fields");
    following_ = VersionHeap(memory.data() + heap_at(rows_), rows_, header_->following);
  }
  check(tickets == nullptr || tickets->capacity() == rows_, "counts of draws of a store of another capacity");
  if (tickets != nullptr && tickets->only_reads()) new_rows_.emplace(*tickets);
}

void Consumption::follow(std::span<std::byte> theirs, bool copied) {
  const ConsumptionHeader* header = header_in(theirs);
  const RowRules rules = rules_of(theirs);
  if (engram::copied(header->rows) != rows_ || engram::copied(header->most) != most_) return;
  if (rules.fields() != rules_.fields() || rules.dated != rules_.dated) return;
  const auto* counts = reinterpret_cast<const std::uint32_t*>(theirs.data() + sets_at(rows_) + 2 * RowSet::bytes(rows_));
  const RedoLock guard = lock();
  others_.emplace(reinterpret_cast<const std::uint64_t*>(theirs.data() + kPage), counts, kCount, copied ? counts_ : nullptr, rows_);
  totals_ = header;
}

void Consumption::catch_up() {
  if (!new_rows_) return;
  const RedoLock guard = lock();
  Change change(*this);
  new_rows_->each([this](NewRows::Rows rows, std::uint64_t n) { scan_each(rows, n); });
  if (others_) {
    others_->each(numbers_, counts_, [this](std::uint64_t row, std::uint64_t uses) {
      no_longer_read(row);
      counts_[row] = (counts_[row] & ~kCount) | static_cast<std::uint32_t>(uses);
      place(row);
    });
  }
  change.done();
}

// A map or vector that is half changed is left where it is.
void Consumption::after_fork() {
  if (new_rows_ && redo_.mutex.held()) new_rows_->after_fork();
  redo_.after_fork();
}

// What the row's ticket says; of a list's row what was noted.
std::uint64_t Consumption::word_of(std::uint64_t row) const {
  if (tickets_ != nullptr) return tickets_->held_word(row);
  return ticket(of_list_[row], numbers_[row] == 0 ? State::unused : State::committed);
}

std::uint64_t Consumption::write_of(std::uint64_t row, std::uint64_t word) const {
  return tickets_ != nullptr ? tickets_->write_of(row, word) : numbers_[row];
}

// Whether the row holds the write that its count is of. It may be edited meanwhile.
bool Consumption::is_known(std::uint64_t row, std::uint64_t word) const {
  return Control::holds_write(word) && write_of(row, word) == numbers_[row];
}

// Whether a row that was drawn with this ticket still holds the same write: edits have given it others since, also smaller ones.
bool Consumption::is_of(std::uint64_t row, std::int64_t drawn) const {
  const auto number = static_cast<std::uint64_t>(drawn);
  return numbers_[row] != 0 && numbers_[row] <= number && (numbers_[row] == number || is_known(row, word_of(row)));
}

// Whether a live row is not used up, where rows are.
bool Consumption::is_waited_for(std::uint64_t row) const { return numbers_[row] != 0 && most_ > 0 && has_draws_left(row); }

// Before its number changes.
void Consumption::count_evicted(std::uint64_t row, std::uint64_t number) {
  if (number != 0 && numbers_[row] != number && is_waited_for(row)) {
    header_->evicted.fetch_add(1, std::memory_order_relaxed);
  }
}

// Before its number or count changes, or it is placed.
void Consumption::no_longer_read(std::uint64_t row) {
  if (is_being_read(row)) header_->reading.fetch_sub(1, std::memory_order_relaxed);
}

// Whether it follows the rules. One that is being written or edited does not: its writer tells of it when it is whole.
void Consumption::judge(std::uint64_t row) {
  if (!rules_.any()) return;
  double version = kSame;
  while (numbers_[row] != 0) {
    const std::uint64_t word = tickets_->word(row).load(std::memory_order_acquire);
    if (!is_committed(word)) break;
    const double read = reader_.read(row);
    fence(std::memory_order_acquire);
    if (tickets_->word(row).load(std::memory_order_relaxed) != word) continue;
    version = read;
    break;
  }
  const bool follows = version >= copied(header_->floor);  // NaN does not
  if (follows && following_.has(row, version)) return;
  if (following_.has(row)) following_.erase(row);
  if (follows) following_.insert(row, version);
}

// The row belongs into one set, or into none.
void Consumption::place(std::uint64_t row) {
  const bool live = numbers_[row] != 0, left = has_draws_left(row);
  live && left && (!rules_.any() || following_.has(row)) ? drawable_.insert(row) : drawable_.erase(row);
  live && !left ? used_.insert(row) : used_.erase(row);
}

// The count first: if the process dies behind it, the row is not known, and its news come again.
void Consumption::note(std::uint64_t row, std::uint64_t number, std::uint32_t count) {
  count_evicted(row, number);
  no_longer_read(row);
  counts_[row] = count;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  numbers_[row] = number;
  judge(row);
  place(row);
}

// A row that holds nothing loses its count; one of another number than is noted has been written.
void Consumption::look_at(std::uint64_t row) {
  const std::uint64_t word = word_of(row);
  const bool holds = Control::holds_write(word), gone = !holds && state_of(word) != State::writing;
  const std::uint64_t number = holds ? write_of(row, word) : 0;
  if (holds ? numbers_[row] == number : !gone || numbers_[row] == 0) return;
  count_evicted(row, number);
  no_longer_read(row);
  counts_[row] = 0;
  if (others_) others_->forget(row);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  numbers_[row] = number;
}

void Consumption::note_sizes() {
  header_->drawable.store(drawable_.size(), std::memory_order_release);
  header_->used.store(used_.size(), std::memory_order_release);
}

void Consumption::make_sets() {
  RedoChange change(redo_);
  for (std::uint64_t row = 0; row < rows_; ++row) {
    if ((counts_[row] & kReaders) != 0) counts_[row] &= ~kReaders;
  }
  if (rules_.any()) following_.clear();
  for (std::uint64_t row = 0; rules_.any() && row < rows_; ++row) judge(row);
  drawable_.assign([this](std::uint64_t row) {
    return numbers_[row] != 0 && has_draws_left(row) && (!rules_.any() || following_.has(row));
  });
  used_.assign([this](std::uint64_t row) { return numbers_[row] != 0 && !has_draws_left(row); });
  const std::uint64_t left = header_->reading.exchange(0, std::memory_order_relaxed);  // by readers that died
  note_sizes();
  change.done();
  tell_limits(in_flight() + left);
}

void Consumption::look_at_all() {
  RedoChange change(redo_);
  header_->missed.store(0, std::memory_order_relaxed);
  for (std::uint64_t row = 0; row < rows_; ++row) look_at(row);
  make_sets();
}

void Consumption::put_in_order() {
  const RedoLock guard = lock();
  look_at_all();
  if (tickets_ != nullptr) Limits(*tickets_).count_again([this] { return in_flight(); });
}

std::uint64_t Consumption::claim(std::uint64_t key, std::uint64_t n, std::int64_t* rows, std::int64_t* numbers) {
  const Random random(key);
  const RedoLock guard = lock();
  Change change(*this);
  looked_at_.clear();
  std::uint64_t taken = 0;
  for (std::uint64_t i = 0, left = drawable_.size(); taken < n && left > 0; ++i, --left) {
    const std::uint64_t row = drawable_.at(random.below(left, i));
    drawable_.erase(row);
    looked_at_.push_back(row);
    const std::uint64_t word = word_of(row);
    if (!is_known(row, word)) continue;
    rows[taken] = static_cast<std::int64_t>(row);
    numbers[taken++] = static_cast<std::int64_t>(number_of(word));
    count(row);
  }
  for (const std::uint64_t row : looked_at_) {
    if (is_being_read(row) && is_known(row, word_of(row))) {
      header_->reading.fetch_add(1, std::memory_order_relaxed);
    } else {
      place(row);
    }
  }
  change.done();
  return taken;
}

// It is drawn once more.
void Consumption::count(std::uint64_t row) {
  if (most_ == 0) return;
  ++counts_[row];
  if ((counts_[row] & kReaders) != kReaders) counts_[row] += kReader;
  if (count_of(row) >= most_) header_->used_up.fetch_add(1, std::memory_order_relaxed);
}

std::uint64_t Consumption::admit(const std::int64_t* rows, const std::int64_t* numbers, std::uint64_t n, std::uint64_t most,
                                 std::int64_t* places) {
  const OwnRows own(rows, n, rows_);
  const RedoLock guard = lock();
  Change change(*this);
  std::uint64_t taken = 0;
  for (std::uint64_t i = 0; i < n && taken < most; ++i) {
    const auto row = static_cast<std::uint64_t>(rows[i]);
    const std::uint64_t word = word_of(row);
    if (!drawable_.has(row) || !is_known(row, word) || static_cast<std::int64_t>(number_of(word)) != copied(numbers[i])) continue;
    places[taken++] = static_cast<std::int64_t>(i);
    count(row);
    if (has_draws_left(row)) continue;
    drawable_.erase(row);
    header_->reading.fetch_add(1, std::memory_order_relaxed);
  }
  change.done();
  return taken;
}

std::vector<std::int64_t> Consumption::drawable_rows() {
  const RedoLock guard = lock();
  std::vector<std::int64_t> rows;
  rows.reserve(drawable_.size());
  drawable_.each([&](std::uint64_t row) { rows.push_back(static_cast<std::int64_t>(row)); });
  return rows;
}

void Consumption::set_floor(double floor) {
  const RedoLock guard = lock();
  const double before = copied(header_->floor);
  if (!rules_.dated || std::isnan(floor) || floor == before) return;
  Change change(*this);
  header_->floor = floor;
  const auto moved = [this](std::uint64_t row) {
    if (!is_being_read(row)) place(row);
  };
  for (std::uint64_t row = 0; floor < before && row < rows_; ++row) judge(row), moved(row);
  while (const auto oldest = following_.below(floor)) {
    following_.erase(*oldest);
    if (drawable_.has(*oldest)) header_->expired.fetch_add(1, std::memory_order_relaxed);
    moved(*oldest);
  }
  change.done();
}

Consumption::Totals Consumption::totals() const {
  const auto of = [](const Word& word) { return word.load(std::memory_order_relaxed); };
  return {of(totals_->used_up), of(totals_->expired), of(totals_->evicted), of(totals_->dropped), of(totals_->starved)};
}

void Consumption::were_read(const std::int64_t* rows, const std::int64_t* numbers, std::uint64_t n) {
  const OwnRows own(rows, n, rows_);
  const RedoLock guard = lock();
  Change change(*this);
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto row = static_cast<std::uint64_t>(rows[i]);
    if (!is_of(row, copied(numbers[i]))) continue;
    if ((counts_[row] & kReaders) != 0) counts_[row] -= kReader;
    if ((counts_[row] & kReaders) != 0) continue;
    no_longer_read(row);
    place(row);
  }
  change.done();
}

void Consumption::take_back(const std::int64_t* rows, const std::int64_t* numbers, std::uint64_t n) {
  const OwnRows own(rows, n, rows_);
  const RedoLock guard = lock();
  Change change(*this);
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto row = static_cast<std::uint64_t>(rows[i]);
    if (!is_of(row, copied(numbers[i])) || count_of(row) == 0) continue;
    no_longer_read(row);
    if (!has_draws_left(row)) header_->used_up.fetch_sub(1, std::memory_order_relaxed);
    --counts_[row];
    if ((counts_[row] & kReaders) != 0) counts_[row] -= kReader;
    place(row);
  }
  change.done();
}

std::uint64_t Consumption::used_rows(std::uint64_t n, std::int64_t* rows) {
  const RedoLock guard = lock();
  std::uint64_t found = 0;
  for (std::uint64_t i = 0, size = used_.size(); i < size && found < n; ++i) {
    const std::uint64_t row = used_.at(i);
    if (is_known(row, word_of(row))) rows[found++] = static_cast<std::int64_t>(row);
  }
  return found;
}

void Consumption::copy_counts(std::int32_t* out, std::uint64_t n) {
  check(n <= rows_, "more counts than there are rows");
  const RedoLock guard = lock();
  for (std::uint64_t row = 0; row < n; ++row) out[row] = is_known(row, word_of(row)) ? static_cast<std::int32_t>(count_of(row)) : 0;
}

void Consumption::restore(const std::int32_t* counts, std::uint64_t n) {
  check(n <= rows_, "more counts than there are rows");
  const RedoLock guard = lock();
  RedoChange change(redo_);
  for (std::uint64_t row = 0; row < rows_; ++row) {
    look_at(row);
    if (numbers_[row] != 0) counts_[row] = row < n ? static_cast<std::uint32_t>(counts[row]) & kCount : 0;
  }
  make_sets();
  tell_limits(drawable_.size() + used_.size());  // all counted as drawable until now
}

void Consumption::reset(const std::int64_t* rows, std::uint64_t n) {
  const OwnRowsOrNone own(rows, n, rows_);
  const RedoLock guard = lock();
  Change change(*this);
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto row = static_cast<std::uint64_t>(rows[i]);
    if (rows[i] != -1 && is_known(row, word_of(row))) note(row, numbers_[row], 0);
  }
  change.done();
}

void Consumption::scan(std::uint64_t begin, std::uint64_t end) {
  if (begin > end || end > rows_) throw std::out_of_range("a scan of rows that there are not");
  const RedoLock guard = lock();
  RedoChange change(redo_);
  scan_each({.first = begin}, end - begin);
  note_sizes();
  change.done();
}

void Consumption::scan_each(NewRows::Rows rows, std::uint64_t n) {
  for (std::uint64_t i = 0; i < n; ++i) {
    const std::uint64_t row = rows[i];
    look_at(row);
    judge(row);
    if (!is_being_read(row)) place(row);
  }
}

// A row that holds another write already, or is in the hands of another writer: that one tells of it, too, before this call or after it.
void Consumption::written(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0) {
  const OwnRows own(rows, n, rows_);
  const RedoLock guard = lock(1);
  Change change(*this);
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto row = static_cast<std::uint64_t>(rows[i]);
    const std::uint64_t number = t0 + i;
    if (tickets_ == nullptr) {
      of_list_[row] = number;
      note(row, number, 0);
      continue;
    }
    const std::uint64_t word = word_of(row);
    const bool held = Control::holds_write(word);
    if (held ? !is_known(row, word) : state_of(word) != State::writing) note(row, held ? write_of(row, word) : 0, 0);
  }
  change.done(n);  // each was to become one that can be drawn; those that it replaced could be
}

// Rows are used up, or gone: as many more may be inserted, where the store limits them. Or they may be drawn again.
void Consumption::tell_limits(std::uint64_t before) const {
  const std::uint64_t now = in_flight();
  if (tickets_ == nullptr || tickets_->only_reads() || now == before) return;
  before > now ? Limits(*tickets_).consumed(before - now) : Limits(*tickets_).revived(now - before);
}

// Under the mutex: what changes under it has reached the limits when it is free. Where it is held for too long, another call comes.
void Consumption::count_again(bool died) try {
  if (tickets_ == nullptr) return;
  if (died) header_->deaths.fetch_add(1, std::memory_order_relaxed);
  const RedoLock guard = lock();
  if (header_->deaths.load(std::memory_order_relaxed) != ended_) end_reading();
  Limits(*tickets_).count_again([this] { return in_flight(); });
} catch (const Stalled&) {
}

// Rows that were being read when a process had died, and still are a while later: nothing more will be heard of them.
void Consumption::end_reading() {
  const std::uint64_t deaths = header_->deaths.load(std::memory_order_relaxed);
  const auto now = std::chrono::steady_clock::now();
  if (deaths_ != deaths) {
    deaths_ = deaths, read_at_ = now;
    read_.clear();
    for (std::uint64_t row = 0; row < rows_; ++row) {
      if (is_being_read(row)) read_.push_back({row, numbers_[row]});
    }
  }
  if (!read_.empty() && now - read_at_ < kReading) return;
  Change change(*this);
  for (const auto [row, number] : read_) {
    if (numbers_[row] != number || !is_being_read(row)) continue;
    counts_[row] &= ~kReaders;
    no_longer_read(row);
    place(row);
  }
  change.done();
  ended_ = deaths;
}

// The writer of a row that is edited may tell of it only now, or have found it in the hands of the one who edits it.
void Consumption::edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0, std::span<const std::uint64_t>, std::uint64_t) {
  const OwnRows own(rows, n, rows_);
  const RedoLock guard = lock(1);
  Change change(*this);
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto row = static_cast<std::uint64_t>(rows[i]);
    if (tickets_ == nullptr && numbers_[row] != 0) of_list_[row] = t0 + i;
    look_at(row);
    judge(row);
    if (!is_being_read(row)) place(row);
  }
  change.done();
}

void Consumption::lost(const std::int64_t* rows, std::uint64_t n) { forget(rows, n, header_->dropped); }
void Consumption::evicted(const std::int64_t* rows, std::uint64_t n) { forget(rows, n, header_->evicted); }

void Consumption::forget(const std::int64_t* rows, std::uint64_t n, Word& counter) {
  const OwnRows own(rows, n, rows_);
  const RedoLock guard = lock(1);
  Change change(*this);
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto row = static_cast<std::uint64_t>(rows[i]);
    const std::uint64_t word = word_of(row);
    if (tickets_ != nullptr && (is_committed(word) || state_of(word) == State::writing)) continue;
    if (is_waited_for(row)) counter.fetch_add(1, std::memory_order_relaxed);
    note(row, 0, 0);
  }
  change.done();
}

// But for rows that others have written since: their call may have come before.
void Consumption::emptied() {
  const RedoLock guard = lock(1);
  if (tickets_ == nullptr) std::fill_n(numbers_, rows_, 0);
  look_at_all();
}

}  // namespace engram
