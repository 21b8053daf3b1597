#include "control.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fence.h"
#include "meter.h"
#include "participants.h"
#include "row_limits.h"
#include "wait.h"

namespace engram {
namespace {

constexpr char kMagic[8] = {'e', 'n', 'g', 'r', 'a', 'm', '\0', '\1'};
constexpr std::uint32_t kByteOrder = 0x01020304;
constexpr std::uint64_t kMost = std::uint64_t{1} << 56;  // tickets and positions that a store comes to
constexpr int kLongestHolders = 12;  // waits of those that a claim is waited for
constexpr std::uint64_t kLockPageAt = kPage;
constexpr std::uint64_t kCurveAt = kLockPageAt + 1024, kCurveBytes = 3072;
constexpr std::uint64_t kCountersAt = 2 * kPage, kCountersBytes = 2048;
constexpr std::uint64_t kMeterAt = kCountersAt + sizeof(Counters);
// Zero: rows may come and go as they like, and nothing waits.
constexpr std::uint64_t kLimitsAt = kCountersAt + kCountersBytes, kLimitsBytes = 1024;
constexpr std::uint64_t kWaitsAt = kLimitsAt + kLimitsBytes, kWaitsBytes = 1024;
constexpr std::uint64_t kParticipantsAt = kWaitsAt + kWaitsBytes, kParticipantsBytes = kParticipants * sizeof(Participant);
constexpr std::uint64_t kLanesAt = kParticipantsAt + kParticipantsBytes;
static_assert(sizeof(LockPage) <= kCurveAt - kLockPageAt && kCurvePoints * sizeof(CurvePoint) <= kCurveBytes);
static_assert(sizeof(Counters) + sizeof(MeterPage) <= kCountersBytes && kMeterAt % 64 == 0);
static_assert(sizeof(LimitsPage) <= kLimitsBytes && sizeof(WaitsPage) <= kWaitsBytes);
static_assert(kLimitsAt % 64 == 0 && kWaitsAt % 64 == 0 && kParticipantsAt % 64 == 0 && kLanesAt % 64 == 0);

// The directory of a block with that many lanes: what it says of sizes follows from them alone.
void list_sections(std::uint64_t lanes, Section (&directory)[kSections]) {
  const Section sections[kSections] = {{"locks", kLockPageAt, kPage},
                                       {"counters", kCountersAt, kCountersBytes},
                                       {"limits", kLimitsAt, kLimitsBytes},
                                       {"waits", kWaitsAt, kWaitsBytes},
                                       {"participants", kParticipantsAt, kParticipantsBytes},
                                       {"lanes", kLanesAt, lanes * sizeof(Lane)}};
  std::memcpy(directory, sections, sizeof sections);
}

std::uint32_t header_crc(Header header) {
  header.crc = 0;
  return crc32c(std::as_bytes(std::span(&header, 1)));
}

// Without a product, which could overflow, and with a bound that keeps offsets of lanes from overflowing.
bool adds_up(const Geometry& g) {
  return g.lanes >= 1 && g.lanes <= std::uint64_t{1} << 40 && g.lane_length >= 1 &&
         g.capacity / g.lanes == g.lane_length && g.capacity % g.lanes == 0;
}

void require(bool ok, const std::string& what) {
  if (!ok) [[unlikely]] throw std::invalid_argument(what);
}

// To at least that. What it was before.
std::uint64_t raise(Word& word, std::uint64_t to) {
  std::uint64_t seen = word.load(std::memory_order_acquire);
  while (seen < to && !word.compare_exchange_weak(seen, to, std::memory_order_acq_rel)) {
  }
  return seen;
}

}  // namespace

std::uint64_t control_bytes(std::uint64_t lanes) { return kLanesAt + lanes * sizeof(Lane); }

std::uint64_t counted(const Word& counter) {
  const std::uint64_t n = counter.load(std::memory_order_acquire);
  intact(n >> 62 == 0, "control: expected counters below 2^62");
  return n;
}

std::uint64_t abi_fingerprint() {
  std::uint64_t libc = 0;
#if defined(__GLIBC__)
  libc = 1;
#elif defined(__APPLE__)
  libc = 2;
#endif
  std::uint64_t architecture = 0;
#if defined(__x86_64__)
  architecture = 1;
#elif defined(__aarch64__)
  architecture = 2;
#endif
  return libc | architecture << 8 | sizeof(pthread_mutex_t) << 16 | sizeof(void*) << 32;
}

std::uint32_t crc32c(std::span<const std::byte> bytes) {
  std::uint32_t crc = ~0u;
  for (const std::byte b : bytes) {
    crc ^= static_cast<std::uint32_t>(b);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0u);
  }
  return ~crc;
}

void Control::format(std::span<std::byte> control, Geometry g, std::uint64_t schema_sum) {
  check(adds_up(g), "a geometry that does not add up");
  check(control.size() == control_bytes(g.lanes), "a control block of another size than the geometry needs");
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.format_major = kFormatMajor;
  header.format_minor = kFormatMinor;
  header.byte_order = kByteOrder;
  header.abi = abi_fingerprint();
  header.capacity = g.capacity;
  header.lanes = g.lanes;
  header.lane_length = g.lane_length;
  header.participants = kParticipants;
  header.sections_at = offsetof(Header, directory);
  header.sections = kSections;
  header.control_bytes = control.size();
  header.schema_sum = schema_sum;
  list_sections(g.lanes, header.directory);
  header.crc = header_crc(header);
  std::memcpy(control.data(), &header, sizeof header);
  auto* counters = reinterpret_cast<Counters*>(control.data() + kCountersAt);
  counters->next_ticket.store(1, std::memory_order_relaxed);
  reinterpret_cast<LockPage*>(control.data() + kLockPageAt)->placing.format();
}

Control::Control(std::span<std::byte> control, std::span<std::byte> tickets) {
  require(control.size() >= kLanesAt, "control: the block is shorter than its fixed part");
  require(reinterpret_cast<std::uintptr_t>(control.data()) % 64 == 0, "control: the block is not aligned to 64 bytes");
  require(reinterpret_cast<std::uintptr_t>(tickets.data()) % 8 == 0, "tickets: the block is not aligned to 8 bytes");
  Header header;  // copied once, checked, then used: the block may be shared
  std::memcpy(&header, control.data(), sizeof header);
  std::atomic_signal_fence(std::memory_order_seq_cst);  // the compiler must not read it again there
  require(std::memcmp(header.magic, kMagic, sizeof kMagic) == 0, "control: not an engram control block");
  require(header.byte_order == kByteOrder, "control: written on a machine of the other byte order");
  require(header.format_major == kFormatMajor,
          "control: format " + std::to_string(header.format_major) + ", this engram reads format " +
              std::to_string(kFormatMajor));
  require(header.crc == header_crc(header), "control: the header's checksum does not match");
  require(header.abi == abi_fingerprint(), "control: written by a build for another platform");
  require(adds_up({header.capacity, header.lanes, header.lane_length}), "control: a geometry that does not add up");
  Section expected[kSections];
  list_sections(header.lanes, expected);
  require(header.participants == kParticipants && header.sections_at == offsetof(Header, directory) &&
              header.sections == kSections && std::memcmp(header.directory, expected, sizeof expected) == 0 &&
              header.control_bytes == control_bytes(header.lanes) && header.control_bytes == control.size(),
          "control: sections or size do not fit the geometry");
  const bool earlier = tickets.size() == earlier_tickets_bytes(header.capacity);
  require(header.capacity <= tickets.size() && (earlier || tickets.size() == tickets_bytes(header.capacity)),
          "tickets: the block does not hold a ticket, a lap and a number per row");
  geometry_ = {header.capacity, header.lanes, header.lane_length};
  schema_sum_ = header.schema_sum;
  participants_count_ = header.participants;
  lock_page_ = reinterpret_cast<LockPage*>(control.data() + kLockPageAt);
  counters_ = reinterpret_cast<Counters*>(control.data() + kCountersAt);
  limits_ = reinterpret_cast<LimitsPage*>(control.data() + kLimitsAt);
  waits_ = reinterpret_cast<WaitsPage*>(control.data() + kWaitsAt);
  meter_ = reinterpret_cast<MeterPage*>(control.data() + kMeterAt);
  curve_ = reinterpret_cast<CurvePoint*>(control.data() + kCurveAt);
  participants_ = reinterpret_cast<Participant*>(control.data() + kParticipantsAt);
  lanes_ = reinterpret_cast<Lane*>(control.data() + kLanesAt);
  tickets_ = reinterpret_cast<Word*>(tickets.data());
  laps_ = reinterpret_cast<Lap*>(tickets_ + header.capacity);
  if (!earlier) writes_ = reinterpret_cast<Word*>(tickets.data() + earlier_tickets_bytes(header.capacity));
}

// Whatever the word says by now, the mark of an edit comes behind the number: so a row that was edited already when it was read is found.
void Control::name_writes(const std::int64_t* rows, std::uint64_t n, std::int64_t* numbers) const {
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto row = static_cast<std::uint64_t>(copied(rows[i]));
    if (row >= capacity() || numbers[i] < 0) continue;
    const std::uint64_t word = tickets_[row].load(std::memory_order_acquire);
    if (!is_edited(word)) continue;
    numbers[i] = static_cast<std::int64_t>(std::min(write_of(row, word), static_cast<std::uint64_t>(numbers[i])));
  }
}

Participant& Control::participant(std::uint64_t i) const {
  check(i < participants_count_, "a participant outside the table");
  return participants_[i];
}

// An empty() moves the base, and that alone ends what the lane held: wherever it is stopped the lane is as it was or empty.
std::uint64_t Control::filled(std::uint64_t i) const {
  const Lane& l = lanes_[i];
  for (;;) {  // the three of one moment
    const std::uint64_t base = l.base.load(std::memory_order_acquire);
    const std::uint64_t end = std::max(l.cursor.load(std::memory_order_acquire), l.high.load(std::memory_order_acquire));
    if (l.base.load(std::memory_order_relaxed) == base) return end > base ? std::min(end - base, geometry_.lane_length) : 0;
  }
}

// The base is read before the cursor: an empty() moves it first.
std::uint64_t Control::end(std::uint64_t i) const {
  const std::uint64_t base = lanes_[i].base.load(std::memory_order_acquire);
  return std::max(lanes_[i].cursor.load(std::memory_order_acquire), base);
}

std::uint64_t Control::cursor_row(std::uint64_t i) const {
  return i * geometry_.lane_length + end(i) % geometry_.lane_length;
}

bool Control::among_oldest(std::uint64_t row, std::uint64_t n) const {
  const std::uint64_t lane = lane_of(row), length = lane_length();
  return filled(lane) == length && (row + length - cursor_row(lane)) % length < n;
}

std::uint64_t Control::size() const {
  std::uint64_t rows = 0;
  for (std::uint64_t i = 0; i < geometry_.lanes; ++i) rows += filled(i);
  return rows - std::min(rows, void_rows());
}

void Control::only_read(bool abandoned) {
  reading_ = std::make_shared<Reading>();
  if (lock_page_->clean.load(std::memory_order_acquire) == 1) abandoned = false;  // closed in order
  for (std::uint64_t row = 0; abandoned && row < geometry_.capacity; ++row) {
    const std::uint64_t word = tickets_[row].load(std::memory_order_acquire);
    if (!is_committed(word) && state_of(word) != State::voided && inside(row)) reading_->left.push_back({row, word});
  }
}

// By the word, too: another process may have recovered the row since, and written it.
bool Control::left_behind(std::uint64_t row, std::uint64_t word) const {
  if (reading_ == nullptr || reading_->left.empty()) [[likely]] return false;
  const auto& left = reading_->left;
  const auto at = std::lower_bound(left.begin(), left.end(), row, [](const auto& one, std::uint64_t r) { return one.row < r; });
  return at != left.end() && at->row == row && at->word == word;
}

std::uint64_t Control::void_rows() const {
  std::uint64_t n = counters_->void_rows.load(std::memory_order_relaxed);
  if (reading_ == nullptr) return n;
  for (const auto& [row, word] : reading_->left) n += tickets_[row].load(std::memory_order_acquire) == word && inside(row);
  return n;
}

// A writer that begins once the base has moved takes no position before it: what it writes counts, also if the process that
// moved the base was stopped before it moved the cursor.
std::uint64_t Control::reserve(std::uint64_t i, std::uint64_t n, const Participant* by) const {
  Lane& l = lanes_[i];
  raise(l.cursor, l.base.load(std::memory_order_acquire));
  const std::uint64_t position = l.cursor.fetch_add(n, std::memory_order_release);  // a reader that sees the cursor sees the writer's claim
  if (by != nullptr) note_writer(l, position, *by);
  return position;
}

// What is noted serves a warning: writers that come at the same moment may lose it. A process that has ended does not count, as the next
// one goes on in its place. As that is asked of the kernel, no more is noted than four positions in half a lap.
void Control::note_writer(Lane& lane, std::uint64_t position, const Participant& by) const {
  const std::uint64_t entry = static_cast<std::uint64_t>(&by - participants_) + 1;
  const std::uint64_t own = std::uint64_t{by.pid} << 16 | entry, last = lane.writer.load(std::memory_order_relaxed);
  if (last == own) return;
  lane.writer.store(own, std::memory_order_relaxed);
  const std::uint64_t other = (last & 0xffff) - 1;
  if (last == 0 || other >= participants_count_) return;
  Participant& before = participants_[other];
  if (before.state.load(std::memory_order_acquire) == 0) return;
  const std::uint32_t pid = std::atomic_ref(before.pid).load(std::memory_order_relaxed);
  const std::uint64_t oldest = lane.met[std::size(lane.met) - 1].load(std::memory_order_relaxed);
  if (pid != last >> 16 || (oldest != 0 && position - oldest < geometry_.lane_length / 2)) return;
  if (start_time_of(pid) == 0) return;
  for (std::size_t k = std::size(lane.met) - 1; k > 0; --k) {
    lane.met[k].store(lane.met[k - 1].load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
  lane.met[0].store(position, std::memory_order_relaxed);
}

// The base is read again behind the cursor that is taken: one that has moved meanwhile has moved the cursor, too.
Control::Reserved Control::reserve_at(std::uint64_t i, std::uint64_t position, std::uint64_t n) const {
  Lane& l = lanes_[i];
  for (;;) {
    const std::uint64_t base = l.base.load(std::memory_order_acquire);
    raise(l.cursor, base);
    std::uint64_t seen = l.cursor.load(std::memory_order_acquire);
    if (position < base || seen < position) return {seen, false};
    if (seen - position >= n) return {seen, true};
    if (l.cursor.compare_exchange_strong(seen, position + n, std::memory_order_acq_rel)) return {seen, true};
  }
}

std::uint64_t Control::raise_high(std::uint64_t i, std::uint64_t rows) const {
  Lane& l = lanes_[i];
  const std::uint64_t base = l.base.load(std::memory_order_acquire);
  const std::uint64_t end = std::max(raise(l.high, base + rows), l.cursor.load(std::memory_order_acquire));
  return end > base ? std::min(end - base, geometry_.lane_length) : 0;
}

void Control::fill() const {
  const std::uint64_t t0 = counters_->next_ticket.fetch_add(geometry_.capacity, std::memory_order_acq_rel);
  for (std::uint64_t row = 0; row < geometry_.capacity; ++row) {
    laps_[row].store(newest_lap(row, end(row / geometry_.lane_length)), std::memory_order_relaxed);
    tickets_[row].store(ticket(t0 + row, State::committed), std::memory_order_release);
  }
  for (std::uint64_t i = 0; i < geometry_.lanes; ++i) raise_high(i, geometry_.lane_length);
}

// Where a lane begins again: at a multiple of its length beyond which no position was reserved or written.
std::uint64_t Control::next_round(std::uint64_t i) const {
  const Lane& l = lanes_[i];
  const std::uint64_t length = geometry_.lane_length;
  const std::uint64_t end = std::max({l.base.load(std::memory_order_acquire), l.cursor.load(std::memory_order_acquire),
                                      l.high.load(std::memory_order_acquire)});
  return (end + length - 1) / length * length;
}

bool Control::holds_older(std::uint64_t i, std::uint64_t number) const {
  const std::uint64_t start = i * geometry_.lane_length, end = start + filled(i);
  for (std::uint64_t row = start; row < end; ++row) {
    const std::uint64_t word = tickets_[row].load(std::memory_order_acquire);
    if (state_of(word) != State::unused && number_of(word) < number) return true;
  }
  return false;
}

void Control::empty(bool keep_write_count) const {
  Claim claim{};
  claim.lane = kEmptying, claim.p0 = keep_write_count ? 1 : 0;
  empty(counters_->next_ticket.fetch_add(1, std::memory_order_acq_rel), claim, false);
}

// Every number of a position that is reserved after the number t was taken is larger than t. Each step is noted by the store of
// one word, so that a process that finishes it repeats nothing: a lane that began again has rows of others by then.
void Control::empty(std::uint64_t t, Claim& claim, bool begun) const {
  const auto step = [] { std::atomic_signal_fence(std::memory_order_seq_cst); };  // a killed process leaves them in this order
  const std::uint64_t n = claim.n.load(), steps = static_cast<std::uint64_t>(kEmptying) - static_cast<std::uint64_t>(claim.lane.load());
  const std::uint64_t first = std::min(steps / 2, geometry_.lanes);
  // Before a lane is empty: what is written to an empty store counts.
  if (steps == 0) Limits(*this).restart(0);
  if (claim.p0 == 0) Meter(*this).restart();
  step();
  claim.p0 = 1;
  // All lanes at one moment: what is written to one that is empty now stays, however long the others take.
  std::vector<std::uint64_t> begins(geometry_.lanes);
  for (std::uint64_t i = first; i < geometry_.lanes; ++i) {
    begins[i] = next_round(i);
    if (begun && !holds_older(i, t)) begins[i] = 0;  // he who died found it empty
  }
  if (steps % 2 != 0 && first < geometry_.lanes && n % geometry_.lane_length == 0) begins[first] = n;
  for (std::uint64_t i = first; i < geometry_.lanes; ++i) {
    const std::int64_t here = kEmptying - 2 * static_cast<std::int64_t>(i);
    claim.n = begins[i];
    step();
    claim.lane = here - 1;
    step();
    raise(lanes_[i].base, begins[i]);  // never back: another one may have emptied it meanwhile
    raise(lanes_[i].cursor, begins[i]);
    step();
    claim.lane = here - 2;
    step();
  }
  fence(std::memory_order_seq_cst);  // a writer that this finds no row of sees that the lane begins again
  for (std::uint64_t i = 0; i < geometry_.lanes; ++i) forget_rows(i, t);
}

// All of the lane, not only what was in its extent: a process may have died when it had emptied that alone.
void Control::forget_rows(std::uint64_t i, std::uint64_t t) const {
  const std::uint64_t start = i * geometry_.lane_length;
  for (std::uint64_t row = start; row < start + geometry_.lane_length; ++row) {
    std::uint64_t word = tickets_[row].load(std::memory_order_acquire);
    // A row that is being written keeps its writer, who looks afterwards whether it still counts. A newer write stays; but
    // not one that was reserved before the lane began again. So does a row that became void since: it must not be a gap.
    while (state_of(word) != State::unused && state_of(word) != State::writing) {
      const bool inside = row - start < filled(i), voided = state_of(word) == State::voided;
      if (inside && (voided || number_of(word) >= t)) break;
      const std::uint64_t forgotten = ticket(std::max(t, number_of(word)), State::unused);
      if (!tickets_[row].compare_exchange_weak(word, forgotten, std::memory_order_acq_rel)) continue;
      if (voided) one_void_less();  // by the process that forgets it: others count rows meanwhile that become void
      break;
    }
  }
}

void Control::copy_state(const Control& from) const {
  check(from.capacity() == capacity() && from.lanes() == lanes(), "words of a store of the same geometry");
  const auto take = [](auto& to, const auto& word) { to.store(word.load(std::memory_order_acquire), std::memory_order_release); };
  for (std::uint64_t row = 0; row < capacity(); ++row) {
    take(tickets_[row], from.tickets_[row]);
    take(laps_[row], from.laps_[row]);
    if (from.writes_ != nullptr) take(writes_[row], from.writes_[row]);
  }
  for (std::uint64_t i = 0; i < lanes(); ++i) {
    take(lanes_[i].cursor, from.lanes_[i].cursor);
    take(lanes_[i].base, from.lanes_[i].base);
    take(lanes_[i].high, from.lanes_[i].high);
  }
  take(counters_->next_ticket, from.counters_->next_ticket);
  take(counters_->write_count, from.counters_->write_count);
  take(counters_->void_rows, from.counters_->void_rows);
  became_void();
  take(counters_->lapped_rows, from.counters_->lapped_rows);
  take(counters_->redraws, from.counters_->redraws);
  take(counters_->patches, from.counters_->patches);
  take(counters_->patches_dropped, from.counters_->patches_dropped);
  for (std::uint64_t i = 0; i < kLimitSlots; ++i) {
    LimitSlot &to = limits_->slots[i], &slot = from.limits_->slots[i];
    take(to.ratio, slot.ratio), take(to.tolerance, slot.tolerance), take(to.min_size, slot.min_size);
    take(to.most_in_flight, slot.most_in_flight), take(to.level, slot.level), take(to.samples, slot.samples);
    take(to.in_flight, slot.in_flight), take(to.inserts, slot.inserts);
  }
  take(limits_->current, from.limits_->current);
  Meter(*this).go_on_from(Meter(from));
}

void Control::read_lanes(LaneState* lanes) const {
  for (std::uint64_t i = 0; i < geometry_.lanes; ++i) {
    const std::uint64_t base = lanes_[i].base.load(std::memory_order_acquire);
    const std::uint64_t position = std::max(lanes_[i].cursor.load(std::memory_order_acquire), base) - base;
    lanes[i] = {static_cast<std::int64_t>(position), static_cast<std::int64_t>(filled(i)), {0, 0}};
  }
}

void Control::read_numbers(std::uint64_t clock, const LaneState* lanes, std::int64_t* numbers, std::uint64_t rows,
                           std::int64_t* writes) const {
  fence(std::memory_order_acquire);  // rows that were copied before are compared with these tickets
  for (std::uint64_t i = 0; i < geometry_.lanes; ++i) {
    const std::uint64_t first = i * geometry_.lane_length, last = std::min(first + filled(i), rows);
    const std::uint64_t end = lanes_[i].base.load(std::memory_order_acquire) + static_cast<std::uint64_t>(lanes[i].position);
    for (std::uint64_t row = first; row < last; ++row) {
      const std::uint64_t word = tickets_[row].load(std::memory_order_acquire);
      const bool newest = laps_[row].load(std::memory_order_acquire) == newest_lap(row, end);
      const bool there = is_committed(word) && number_of(word) < clock && newest;
      numbers[row] = there ? static_cast<std::int64_t>(number_of(word)) : 0;
      if (writes != nullptr) writes[row] = there ? static_cast<std::int64_t>(write_of(row, word)) : 0;
    }
  }
}

void Control::check_state(const Geometry& geometry, std::uint64_t clock, const LaneState* lanes, const std::int64_t* numbers,
                          const std::int64_t* writes) {
  const std::uint64_t length = geometry.lane_length;
  check(clock >= 1 && clock < kMost, "a ticket counter below 1 or beyond 2^56");
  for (std::uint64_t i = 0; i < geometry.lanes; ++i) {
    const auto position = static_cast<std::uint64_t>(lanes[i].position), live = static_cast<std::uint64_t>(lanes[i].live);
    check(lanes[i].position >= 0 && position < kMost, "a lane's position that is negative or too large");
    check(lanes[i].live >= 0 && live <= length, "more live rows than a lane has");
    check(live >= std::min(position, length), "fewer live rows than a lane's position says");
    for (std::uint64_t k = 0; k < length; ++k) {
      const std::int64_t number = numbers[i * length + k];
      const std::int64_t write = writes == nullptr ? number : writes[i * length + k];
      check(number >= 0 && static_cast<std::uint64_t>(number) < clock, "a ticket number beyond the counter");
      check(number == 0 || k < live, "a ticket of a row that is not live");
      check(write >= 0 && static_cast<std::uint64_t>(write) < kMost && (write == 0) == (number == 0),
            "a number of a write that is negative, too large, or of a row without a ticket");
    }
  }
}

// A row is committed before it is inside the extent: until then it is not drawn.
std::uint64_t Control::put_state(std::uint64_t clock, const LaneState* lanes, const std::int64_t* numbers,
                                 const std::int64_t* writes) const {
  const std::vector<LaneState> own(lanes, lanes + geometry_.lanes);  // others may change the caller's
  lanes = own.data();
  check_state(geometry_, clock, lanes, numbers, writes);
  if (writes == nullptr) writes = numbers;
  const std::uint64_t length = geometry_.lane_length;
  std::int64_t ahead = 0;  // by how much a write has a larger number than its ticket was saved with: none has here
  for (std::uint64_t row = 0; row < geometry_.capacity; ++row) ahead = std::max(ahead, writes[row] - numbers[row]);
  raise(counters_->next_ticket, static_cast<std::uint64_t>(ahead) + 1);
  const std::uint64_t first = counters_->next_ticket.fetch_add(clock - 1, std::memory_order_acq_rel);
  std::uint64_t void_rows = 0;
  for (std::uint64_t i = 0; i < geometry_.lanes; ++i) {
    const std::uint64_t end = lanes_[i].base.load(std::memory_order_acquire) + static_cast<std::uint64_t>(lanes[i].position);
    for (std::uint64_t row = i * length; row < i * length + static_cast<std::uint64_t>(lanes[i].live); ++row) {
      const auto number = static_cast<std::uint64_t>(numbers[row]);
      const std::uint64_t kept = first - 1 + number, write = static_cast<std::uint64_t>(writes[row]);
      const std::uint64_t word = number != 0 ? ticket(kept, State::committed) | (write != kept ? kEdited : 0) : ticket(first, State::voided);
      void_rows += number == 0;
      if (is_edited(word)) writes_[row].store(write, std::memory_order_relaxed);
      laps_[row].store(newest_lap(row, end), std::memory_order_relaxed);
      tickets_[row].store(word, std::memory_order_release);
    }
  }
  counters_->void_rows.fetch_add(void_rows, std::memory_order_release);
  for (std::uint64_t i = 0; i < geometry_.lanes; ++i) {
    Lane& l = lanes_[i];
    const auto position = static_cast<std::uint64_t>(lanes[i].position), live = static_cast<std::uint64_t>(lanes[i].live);
    const std::uint64_t base = l.base.load(std::memory_order_acquire);
    raise(l.cursor, base + position);
    l.writer.store(0, std::memory_order_relaxed);
    if (live > position) raise(l.high, base + live);
  }
  became_void();
  counters_->scatters.fetch_add(1, std::memory_order_acq_rel);  // tables that know rows look at all of them again
  return first - 1;
}

bool Control::at_rest(std::uint64_t next) const {
  for (std::uint64_t i = 0; i < participants(); ++i) {
    const Participant& entry = participant(i);
    if (entry.prepaid.load(std::memory_order_seq_cst) != 0) return false;
    for (const Claim& claim : entry.claims) {
      if (claim.t0.load(std::memory_order_seq_cst) != 0) return false;
    }
  }
  return counters_->next_ticket.load(std::memory_order_seq_cst) == next;
}

void Control::one_void_less() const {
  Word& left = counters_->void_rows;
  std::uint64_t n = left.load(std::memory_order_relaxed);
  while (n > 0 && !left.compare_exchange_weak(n, n - 1, std::memory_order_relaxed)) {
  }
  counters_->void_changes.fetch_add(1, std::memory_order_acq_rel);
}

void Control::check_closed() const {
  std::uint64_t rows = 0;
  for (std::uint64_t i = 0; i < geometry_.lanes; ++i) {
    const Lane& l = lanes_[i];
    const std::uint64_t base = l.base.load(std::memory_order_acquire);
    intact(std::max({base, l.cursor.load(), l.high.load()}) < kMost && base % geometry_.lane_length == 0,
           "control: expected lanes at positions below 2^56, which begin again at multiples of their length");
    rows += filled(i);
  }
  const std::uint64_t next = counters_->next_ticket.load();
  intact(next >= 1 && next < kMost, "control: expected a ticket counter in [1, 2^56)");
  intact(counters_->void_rows.load() <= rows, "control: expected no more void rows than there are rows");
}

Control::Repair Control::recover() const {
  Repair repair;
  for (std::uint64_t i = 0; i < participants_count_; ++i) {
    for (Claim& claim : participants_[i].claims) {
      if (claim.t0.load(std::memory_order_acquire) == 0) continue;
      ++repair.claims;
      claim.t0.store(0, std::memory_order_release);
    }
    participants_[i].state.store(0, std::memory_order_release);
  }
  std::uint64_t void_rows = 0;
  for (std::uint64_t i = 0; i < geometry_.lanes; ++i) {
    const std::uint64_t start = i * geometry_.lane_length, rows = filled(i);
    for (std::uint64_t row = start; row < start + rows; ++row) {
      const std::uint64_t word = tickets_[row].load(std::memory_order_acquire);
      switch (state_of(word)) {
        case State::committed:
          continue;
        case State::writing:
          ++repair.voided;
          break;
        case State::unused:
          ++repair.gaps;
          break;
        case State::voided:
          break;
      }
      ++void_rows;
      tickets_[row].store(ticket(number_of(word), State::voided), std::memory_order_release);
    }
    // Outside: what an interrupted empty() did not reach, or a writer left that it overtook. Neither may come back when
    // the extent grows over it.
    for (std::uint64_t row = start + rows; row < start + geometry_.lane_length; ++row) {
      const std::uint64_t word = tickets_[row].load(std::memory_order_acquire);
      if (state_of(word) == State::unused) continue;
      tickets_[row].store(ticket(number_of(word), State::unused), std::memory_order_release);
    }
  }
  counters_->void_rows.store(void_rows, std::memory_order_release);
  lock_page_->pause.store(0, std::memory_order_release);
  Limits(*this).forget_waits();
  return repair;
}

ClaimGuard::ClaimGuard(Participant& participant) : participant_(&participant), claim_(free_claim()) {}

// In one order with the word that pauses the store: either this writer sees that, or the process that pauses it sees this claim.
Claim* ClaimGuard::free_claim() const {
  // Every other holder is a thread of this process, inside a bounded call. Several may wait for rows, one after the other.
  const auto until = std::chrono::steady_clock::now() + kLongestHolders * wait_limit.load();
  for (;;) {
    for (Claim& claim : participant_->claims) {
      std::uint64_t free = 0;
      if (claim.t0.compare_exchange_strong(free, kNoted, std::memory_order_seq_cst)) return &claim;
    }
    if (std::chrono::steady_clock::now() > until) {
      throw Stalled("as many threads of this process as can write at the same time have been writing for a minute");
    }
    let_go();
    std::this_thread::yield();
  }
}

void ClaimGuard::note([[maybe_unused]] std::uint64_t t0, std::uint64_t n, std::int64_t lane, std::uint64_t p0) {
  // Released: who reads one of these beside another's t0 sees what the claim that had the slot before has done.
  claim_->n.store(n, std::memory_order_release);
  claim_->lane.store(lane, std::memory_order_release);
  claim_->p0.store(p0, std::memory_order_release);
#ifndef ENGRAM_WITHOUT_CLAIM  // the tests of death must fail then: make negative-controls
  claim_->t0.store(t0, std::memory_order_release);
#endif
  fence(std::memory_order_release);
}

}  // namespace engram
