#include "control.h"

#include <pthread.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "check.h"

namespace engram {
namespace {

constexpr char kMagic[8] = {'e', 'n', 'g', 'r', 'a', 'm', '\0', '\1'};
constexpr std::uint32_t kByteOrder = 0x01020304;
constexpr std::uint64_t kLockPageAt = kPage;
constexpr std::uint64_t kCountersAt = 2 * kPage;
constexpr std::uint64_t kParticipantsAt = 3 * kPage;
constexpr std::uint64_t kLanesAt = kParticipantsAt + kParticipants * sizeof(Participant);

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

}  // namespace

std::uint64_t control_bytes(std::uint64_t lanes) { return kLanesAt + lanes * sizeof(Lane); }

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
  header.participants_at = kParticipantsAt;
  header.lanes_at = kLanesAt;
  header.control_bytes = control.size();
  header.schema_sum = schema_sum;
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
  require(std::memcmp(header.magic, kMagic, sizeof kMagic) == 0, "control: not an engram control block");
  require(header.byte_order == kByteOrder, "control: written on a machine of the other byte order");
  require(header.format_major == kFormatMajor,
          "control: format " + std::to_string(header.format_major) + ", this engram reads format " +
              std::to_string(kFormatMajor));
  require(header.crc == header_crc(header), "control: the header's checksum does not match");
  require(header.abi == abi_fingerprint(), "control: written by a build for another platform");
  require(adds_up({header.capacity, header.lanes, header.lane_length}), "control: a geometry that does not add up");
  require(header.participants == kParticipants && header.participants_at == kParticipantsAt &&
              header.lanes_at == kLanesAt && header.control_bytes == control_bytes(header.lanes) &&
              header.control_bytes == control.size(),
          "control: offsets or size do not fit the geometry");
  require(tickets.size() / sizeof(Word) == header.capacity && tickets.size() % sizeof(Word) == 0,
          "tickets: the block does not hold one word per row");
  geometry_ = {header.capacity, header.lanes, header.lane_length};
  schema_sum_ = header.schema_sum;
  participants_count_ = header.participants;
  lock_page_ = reinterpret_cast<LockPage*>(control.data() + kLockPageAt);
  counters_ = reinterpret_cast<Counters*>(control.data() + kCountersAt);
  participants_ = reinterpret_cast<Participant*>(control.data() + kParticipantsAt);
  lanes_ = reinterpret_cast<Lane*>(control.data() + kLanesAt);
  tickets_ = reinterpret_cast<Word*>(tickets.data());
}

Participant& Control::participant(std::uint64_t i) const {
  check(i < participants_count_, "a participant outside the table");
  return participants_[i];
}

// Steps that were reserved through the cursor since the last empty().
std::uint64_t Control::written(std::uint64_t i) const {
  const Lane& l = lanes_[i];
  for (;;) {  // the two of one moment: an empty() moves both
    const std::uint64_t base = l.base.load(std::memory_order_acquire), cursor = l.cursor.load(std::memory_order_acquire);
    if (l.base.load(std::memory_order_relaxed) == base) return cursor - base;
  }
}

std::uint64_t Control::filled(std::uint64_t i) const {
  return std::min(std::max(written(i), lanes_[i].high.load(std::memory_order_relaxed)), geometry_.lane_length);
}

std::uint64_t Control::cursor_row(std::uint64_t i) const {
  return i * geometry_.lane_length + lanes_[i].cursor.load(std::memory_order_relaxed) % geometry_.lane_length;
}

std::uint64_t Control::size() const {
  std::uint64_t rows = 0;
  for (std::uint64_t i = 0; i < geometry_.lanes; ++i) rows += filled(i);
  return rows - std::min(rows, counters_->void_rows.load(std::memory_order_relaxed));
}

std::uint64_t Control::raise_high(std::uint64_t i, std::uint64_t rows) const {
  Word& high = lanes_[i].high;
  std::uint64_t seen = high.load(std::memory_order_relaxed);
  while (seen < rows && !high.compare_exchange_weak(seen, rows, std::memory_order_acq_rel)) {
  }
  return std::min(std::max(written(i), seen), geometry_.lane_length);
}

void Control::fill() const {
  const std::uint64_t t0 = counters_->next_ticket.fetch_add(geometry_.capacity, std::memory_order_acq_rel);
  for (std::uint64_t row = 0; row < geometry_.capacity; ++row) {
    tickets_[row].store(ticket(t0 + row, State::committed), std::memory_order_release);
  }
  for (std::uint64_t i = 0; i < geometry_.lanes; ++i) raise_high(i, geometry_.lane_length);
}

void Control::empty(bool keep_write_count) const {
  const std::uint64_t t = counters_->next_ticket.fetch_add(1, std::memory_order_acq_rel);
  for (std::uint64_t i = 0; i < geometry_.lanes; ++i) {
    const std::uint64_t length = geometry_.lane_length, start = i * length;
    Lane& l = lanes_[i];
    std::uint64_t seen = l.cursor.load(std::memory_order_relaxed), next;
    do next = (seen + length - 1) / length * length;
    while (!l.cursor.compare_exchange_weak(seen, next, std::memory_order_acq_rel));
    l.base.store(next, std::memory_order_release);
    l.high.store(0, std::memory_order_release);  // last: whoever raises it before has what he writes forgotten with the rest
#ifndef ENGRAM_TSAN  // whose build has no fences
    std::atomic_thread_fence(std::memory_order_seq_cst);  // a writer that this finds no row of sees that the lane begins again
#endif
    // All of the lane, not only what was in its extent: somebody may have died when he had emptied that alone.
    for (std::uint64_t row = start; row < start + length; ++row) {
      std::uint64_t word = tickets_[row].load(std::memory_order_acquire);
      // A row that is being written keeps its writer, who looks afterwards whether it still counts. A newer write stays; but
      // not one that was reserved before the lane began again.
      while (state_of(word) != State::unused && state_of(word) != State::writing &&
             (number_of(word) < t || row - start >= filled(i)) &&
             !tickets_[row].compare_exchange_weak(word, ticket(std::max(t, number_of(word)), State::unused),
                                                  std::memory_order_acq_rel)) {
      }
    }
  }
  counters_->void_rows.store(0, std::memory_order_relaxed);
  if (!keep_write_count) counters_->write_count.store(0, std::memory_order_relaxed);
}

void Control::take_words(const Control& from) const {
  check(from.capacity() == capacity() && from.lanes() == lanes(), "words of a store of the same geometry");
  const auto take = [](Word& to, const Word& word) { to.store(word.load(std::memory_order_acquire), std::memory_order_release); };
  for (std::uint64_t row = 0; row < capacity(); ++row) take(tickets_[row], from.tickets_[row]);
  for (std::uint64_t i = 0; i < lanes(); ++i) {
    take(lanes_[i].cursor, from.lanes_[i].cursor);
    take(lanes_[i].base, from.lanes_[i].base);
    take(lanes_[i].high, from.lanes_[i].high);
  }
  take(counters_->next_ticket, from.counters_->next_ticket);
  take(counters_->write_count, from.counters_->write_count);
  take(counters_->void_rows, from.counters_->void_rows);
  take(counters_->lapped_rows, from.counters_->lapped_rows);
  take(counters_->redraws, from.counters_->redraws);
}

void Control::one_void_less() const {
  Word& left = counters_->void_rows;
  std::uint64_t n = left.load(std::memory_order_relaxed);
  while (n > 0 && !left.compare_exchange_weak(n, n - 1, std::memory_order_relaxed)) {
  }
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
  return repair;
}

ClaimGuard::ClaimGuard(Participant& participant) {
  for (;;) {
    for (Claim& claim : participant.claims) {
      std::uint64_t free = 0;
      if (!claim.t0.compare_exchange_strong(free, kNoted, std::memory_order_acq_rel)) continue;
      claim_ = &claim;
      return;
    }
    std::this_thread::yield();  // every other holder is a thread of this process, inside a bounded call
  }
}

void ClaimGuard::note([[maybe_unused]] std::uint64_t t0, std::uint64_t n, std::int64_t lane, std::uint64_t p0) {
  claim_->n = n;
  claim_->lane = lane;
  claim_->p0 = p0;
#ifndef ENGRAM_WITHOUT_CLAIM  // the tests of death must fail then: make negative-controls
  claim_->t0.store(t0, std::memory_order_release);
#endif
#ifndef ENGRAM_TSAN  // whose build has no fences
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

}  // namespace engram
