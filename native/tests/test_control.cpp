#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "blocks.h"
#include "core/check.h"
#include "core/control.h"
#include "expect.h"

using namespace engram;

namespace {

// The header of a block as words to tamper with, its checksum made right again.
void tamper(const Heap& heap, const std::function<void(Header&)>& change) {
  auto* header = reinterpret_cast<Header*>(heap.control.data());
  change(*header);
  header->crc = 0;
  header->crc = crc32c(std::as_bytes(std::span(header, 1)));
}

std::string refusal(const Blocks& blocks) {
  try {
    blocks.view();
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "accepted";
}

std::vector<std::byte> copy(std::span<const std::byte> bytes) { return {bytes.begin(), bytes.end()}; }

void store_word(const Control& control, std::uint64_t row, std::uint64_t number, State state) {
  control.word(row).store(ticket(number, state));
}

TEST(checksum_is_crc32c) {
  // RFC 3720, B.4, and the usual check value.
  const auto crc = [](const std::string& text) { return crc32c(std::as_bytes(std::span(text.data(), text.size()))); };
  EXPECT_EQ(crc("123456789"), 0xE3069283u);
  EXPECT_EQ(crc(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(crc(std::string(32, '\xff')), 0x62A8AB43u);
  EXPECT_EQ(crc(""), 0u);
}

TEST(tickets_hold_number_and_state) {
  for (const std::uint64_t number : {std::uint64_t{0}, std::uint64_t{1}, (std::uint64_t{1} << 61) - 1}) {
    for (const State state : {State::unused, State::writing, State::committed, State::voided}) {
      const std::uint64_t word = ticket(number, state);
      EXPECT_EQ(number_of(word), number);
      EXPECT_EQ(state_of(word), state);
      EXPECT_EQ(is_committed(word), state == State::committed);
      EXPECT(!is_edited(word) && is_edited(word | kEdited));
      EXPECT_EQ(number_of(word | kEdited), number);
      EXPECT_EQ(state_of(word | kEdited), state);
    }
  }
  EXPECT(!is_committed(0));
}

// ---- format and attach ---------------------------------------------------------------------------------------------

TEST(attach_sees_what_was_formatted) {
  for (const std::uint64_t lanes : {1, 2, 7, 300}) {
    for (const std::uint64_t length : {1, 5, 64}) {
      Heap heap(geometry(lanes, length), {});
      std::memset(heap.control.data(), 0, heap.control.size());
      Control::format(heap.control, heap.geometry, 0xFEEDFACECAFEBEEF);
      const Control control = heap.view();
      EXPECT_EQ(control.capacity(), lanes * length);
      EXPECT_EQ(control.lanes(), lanes);
      EXPECT_EQ(control.lane_length(), length);
      EXPECT_EQ(control.schema_sum(), 0xFEEDFACECAFEBEEF);
      EXPECT_EQ(control.participants(), kParticipants);
      EXPECT_EQ(control.size(), 0u);
      EXPECT_EQ(control.counters().next_ticket.load(), 1u);
      EXPECT_EQ(control.counters().write_count.load(), 0u);
      for (std::uint64_t lane = 0; lane < lanes; ++lane) {
        EXPECT_EQ(control.filled(lane), 0u);
        EXPECT_EQ(control.cursor_row(lane), lane * length);
      }
    }
  }
}

TEST(regions_do_not_overlap) {
  // Every word of every region written through the accessors; the header survives, and all read back.
  Heap heap(geometry(3, 4), {});
  const Control control = heap.view();
  std::vector<Word*> words{&control.lock_page().generation, &control.lock_page().clean, &control.lock_page().pause,
                           &control.counters().next_ticket, &control.counters().write_count,
                           &control.counters().index_epoch, &control.counters().void_rows,
                           &control.counters().lapped_rows, &control.counters().redraws,
                           &control.counters().fields_epoch};
  for (std::uint64_t i = 0; i < kParticipants; ++i) {
    for (Claim& claim : control.participant(i).claims) words.push_back(&claim.t0);
  }
  for (std::uint64_t i = 0; i < 3; ++i) {
    for (Word* word : {&control.lane(i).cursor, &control.lane(i).base, &control.lane(i).high}) words.push_back(word);
  }
  for (std::uint64_t row = 0; row < 12; ++row) words.push_back(&control.word(row));
  for (std::uint64_t i = 0; i < words.size(); ++i) words[i]->store(i + 1);
  for (std::uint64_t i = 0; i < words.size(); ++i) EXPECT_EQ(words[i]->load(), i + 1);
  heap.view();
  EXPECT_THROWS(std::invalid_argument, control.participant(kParticipants));
  EXPECT_THROWS(std::invalid_argument, control.participant(~std::uint64_t{0}));
}

// Every part of the block but the header's page is in one section, each on cache lines of its own.
TEST(sections_tile_the_block) {
  for (const std::uint64_t lanes : {1, 3, 300}) {
    const Heap heap(geometry(lanes, 2), {});
    const auto* header = reinterpret_cast<const Header*>(heap.control.data());
    std::uint64_t end = kPage;
    std::string names;
    for (const Section& section : header->directory) {
      EXPECT_EQ(section.at, end);
      EXPECT(section.at % 64 == 0 && section.bytes > 0 && section.bytes % 64 == 0);
      end = section.at + section.bytes;
      names += std::string(section.name) + " ";
    }
    EXPECT_EQ(end, heap.control.size());
    EXPECT_EQ(names, "locks counters limits waits participants lanes ");
    const auto reserved = heap.control.subspan(header->directory[2].at, header->directory[2].bytes + header->directory[3].bytes);
    EXPECT(std::all_of(reserved.begin(), reserved.end(), [](std::byte b) { return b == std::byte{0}; }));
  }
}

TEST(every_byte_of_the_header_counts) {
  Heap heap(geometry(2, 8), {});
  EXPECT_EQ(refusal(heap), "accepted");
  for (std::uint64_t at = 0; at < sizeof(Header); ++at) {
    for (unsigned bit = 0; bit < 8; ++bit) {
      heap.control[at] ^= static_cast<std::byte>(1u << bit);
      if (refusal(heap) == "accepted") {
        expect::fail(__FILE__, __LINE__, "no effect: bit " + std::to_string(bit) + " of byte " + std::to_string(at));
      }
      heap.control[at] ^= static_cast<std::byte>(1u << bit);
    }
  }
  EXPECT_EQ(refusal(heap), "accepted");
}

TEST(a_header_that_lies_is_refused_though_its_checksum_is_right) {
  struct Lie {
    const char* part;  // of the message
    std::function<void(Header&)> change;
  };
  const std::uint64_t huge = std::uint64_t{1} << 62;
  std::vector<Lie> lies = {
      {"not an engram control block", [](Header& h) { h.magic[0] = 'E'; }},
      {"byte order", [](Header& h) { h.byte_order = 0x04030201; }},
      {"format 3, this engram reads format 2", [](Header& h) { h.format_major = 3; }},
      {"format 1, this engram reads format 2", [](Header& h) { h.format_major = 1; }},
      {"format 0", [](Header& h) { h.format_major = 0; }},
      {"another platform", [](Header& h) { h.abi ^= 1; }},
      {"does not add up", [](Header& h) { h.capacity = 0, h.lanes = 0, h.lane_length = 0; }},
      {"does not add up", [](Header& h) { h.lanes = 0; }},
      {"does not add up", [](Header& h) { h.capacity = 0, h.lane_length = 0; }},
      {"does not add up", [](Header& h) { h.capacity += 1; }},
      {"does not add up", [](Header& h) { h.lane_length += 1; }},
      {"does not add up", [](Header& h) { h.lanes = 3; }},
      // 2^33 lanes of 2^31 rows are 2^64 rows, which is 0 in 64 bits
      {"does not add up", [](Header& h) { h.capacity = 0, h.lanes = 1ull << 33, h.lane_length = 1ull << 31; }},
      // enough lanes for their bytes to overflow
      {"does not add up", [=](Header& h) { h.capacity = huge, h.lanes = huge, h.lane_length = 1; }},
      {"does not add up", [](Header& h) { h.lanes = h.capacity = (1ull << 58) + 2, h.lane_length = 1; }},
      {"sections or size", [](Header& h) { h.participants = 0; }},
      {"sections or size", [](Header& h) { h.participants = 1 << 20; }},
      {"sections or size", [](Header& h) { h.sections_at += 32; }},
      {"sections or size", [](Header& h) { h.sections_at = ~0ull - 31; }},
      {"sections or size", [](Header& h) { h.sections = 5; }},
      {"sections or size", [](Header& h) { h.sections = ~0ull; }},
      {"sections or size", [](Header& h) { h.control_bytes += 64; }},
      // another geometry that adds up, but not with these blocks
      {"sections or size", [](Header& h) { h.lanes = 4, h.lane_length = 4; }},
      {"a ticket, a lap and a number per row", [](Header& h) { h.capacity = 18, h.lane_length = 9; }},
      {"a ticket, a lap and a number per row", [](Header& h) { h.capacity = 14, h.lane_length = 7; }},
  };
  for (std::uint64_t i = 0; i < kSections; ++i) {
    lies.push_back({"sections or size", [i](Header& h) { h.directory[i].at += 64; }});
    lies.push_back({"sections or size", [i](Header& h) { h.directory[i].at = ~0ull - 63; }});
    lies.push_back({"sections or size", [i](Header& h) { h.directory[i].bytes -= 64; }});
    lies.push_back({"sections or size", [=](Header& h) { h.directory[i].bytes = huge; }});
    lies.push_back({"sections or size", [i](Header& h) { h.directory[i].name[0] ^= 1; }});
    lies.push_back({"sections or size", [i](Header& h) { std::swap(h.directory[i], h.directory[(i + 1) % kSections]); }});
  }
  for (const Lie& lie : lies) {
    Heap heap(geometry(2, 8), {});
    tamper(heap, lie.change);
    const std::string said = refusal(heap);
    if (said.find(lie.part) == std::string::npos) {
      expect::fail(__FILE__, __LINE__, std::string("expected \"") + lie.part + "\", got \"" + said + "\"");
    }
  }
}

TEST(a_newer_minor_format_is_read) {
  Heap heap(geometry(2, 8), {});
  tamper(heap, [](Header& h) { h.format_minor = 99; });
  EXPECT_EQ(refusal(heap), "accepted");
}

TEST(blocks_of_another_size_or_alignment_are_refused) {
  Heap heap(geometry(2, 8), {});
  const auto with = [&](std::span<std::byte> control, std::span<std::byte> tickets) {
    Blocks blocks = heap;
    blocks.control = control;
    blocks.tickets = tickets;
    return refusal(blocks);
  };
  const std::span<std::byte> control = heap.control, tickets = heap.tickets;
  EXPECT_EQ(with(control, tickets), "accepted");
  for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{1}, sizeof(Header), kPage, control.size() - 64,
                                    control.size() - 1}) {
    EXPECT(with(control.first(bytes), tickets) != "accepted");
  }
  for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{1}, tickets.size() - 8, tickets.size() - 1}) {
    EXPECT(with(control, tickets.first(bytes)) != "accepted");
  }
  // Larger than needed, and shifted.
  std::vector<std::byte> memory(control.size() + 256);
  const auto base = reinterpret_cast<std::uintptr_t>(memory.data());
  std::byte* aligned = memory.data() + (64 - base % 64) % 64;
  for (const std::uint64_t shift : {0, 1, 8, 32, 63}) {
    std::memcpy(aligned + shift, control.data(), control.size());
    const bool fine = shift == 0;
    EXPECT_EQ(with({aligned + shift, control.size()}, tickets) == "accepted", fine);
    EXPECT(with({aligned + shift, control.size() + 64}, tickets) != "accepted");
    EXPECT(with({aligned + shift, control.size() + 1}, tickets) != "accepted");
  }
  std::vector<std::uint64_t> words(42);
  for (const std::uint64_t shift : {0, 1, 4}) {
    const bool fine = shift == 0;
    EXPECT_EQ(with(control, std::as_writable_bytes(std::span(words)).subspan(shift, tickets.size())) == "accepted", fine);
  }
  EXPECT(with(control, std::as_writable_bytes(std::span(words)).first(tickets.size() + 8)) != "accepted");
}

TEST(format_refuses_geometries_that_do_not_add_up) {
  std::vector<std::byte> memory(control_bytes(4) + 64);
  const auto base = reinterpret_cast<std::uintptr_t>(memory.data());
  std::byte* at = memory.data() + (64 - base % 64) % 64;
  const auto format = [&](std::uint64_t capacity, std::uint64_t lanes, std::uint64_t length, std::uint64_t bytes) {
    Control::format({at, bytes}, {capacity, lanes, length}, 0);
  };
  EXPECT_THROWS(std::invalid_argument, format(0, 0, 0, control_bytes(0)));
  EXPECT_THROWS(std::invalid_argument, format(0, 4, 0, control_bytes(4)));
  EXPECT_THROWS(std::invalid_argument, format(7, 4, 2, control_bytes(4)));
  EXPECT_THROWS(std::invalid_argument, format(8, 4, 2, control_bytes(4) - 64));
  EXPECT_THROWS(std::invalid_argument, format(8, 4, 2, control_bytes(3)));
  // 2^64 rows. A block of the right size for that many lanes cannot be had; the check must come first.
  EXPECT_THROWS(std::invalid_argument, format(0, 1ull << 33, 1ull << 31, control_bytes(1ull << 33)));
  EXPECT(std::all_of(memory.begin(), memory.end(), [](std::byte b) { return b == std::byte{0}; }));
}

// ---- extents -------------------------------------------------------------------------------------------------------

TEST(extents_follow_a_model) {
  struct Lane {
    std::uint64_t steps = 0, high = 0;  // since the last empty()
  };
  Dice dice(7);
  for (int round = 0; round < 60; ++round) {
    const std::uint64_t lanes = dice.in(1, 5), length = dice.in(1, 12);
    const Heap heap(geometry(lanes, length), {});
    const Control control = heap.view();
    std::vector<Lane> model(lanes);
    for (int step = 0; step < 100; ++step) {
      const std::uint64_t lane = dice.below(lanes), what = dice.below(20);
      if (what < 12) {
        const std::uint64_t n = dice.in(1, what == 0 ? 3 * length : 2);
        control.lane(lane).cursor.fetch_add(n);
        model[lane].steps += n;
      } else if (what < 18) {
        const std::uint64_t rows = dice.in(0, length);
        control.raise_high(lane, rows);
        model[lane].high = std::max(model[lane].high, rows);
      } else if (what == 18) {
        control.empty(dice.below(2) == 0);
        model.assign(lanes, {});
      } else {
        control.fill();
        for (Lane& l : model) l.high = length;
      }
      std::uint64_t size = 0;
      for (std::uint64_t i = 0; i < lanes; ++i) {
        const std::uint64_t filled = std::min(std::max(model[i].steps, model[i].high), length);
        size += filled;
        EXPECT_EQ(control.filled(i), filled);
        EXPECT_EQ(control.cursor_row(i), i * length + model[i].steps % length);
        const std::uint64_t oldest = dice.in(0, length + 1);
        for (std::uint64_t age = 0; age < length; ++age) {  // from the row that the next step will take
          const std::uint64_t row = i * length + (model[i].steps + age) % length;
          EXPECT_EQ(control.among_oldest(row, oldest), filled == length && age < oldest);
        }
      }
      EXPECT_EQ(control.size(), size);
    }
  }
}

TEST(fill_commits_every_row_under_a_number_of_its_own) {
  const Heap heap(geometry(2, 3), {});
  const Control control = heap.view();
  control.fill();
  EXPECT_EQ(control.size(), 6u);
  EXPECT_EQ(control.cursor_row(0), 0u);
  for (std::uint64_t row = 0; row < 6; ++row) EXPECT_EQ(control.word(row).load(), ticket(1 + row, State::committed));
  EXPECT_EQ(control.counters().next_ticket.load(), 7u);
}

TEST(empty_forgets_rows_and_the_numbers_they_had) {
  const Heap heap(geometry(2, 4), {});
  const Control control = heap.view();
  control.lane(0).cursor = 6;  // wrapped
  control.lane(1).cursor = 2;
  for (const std::uint64_t row : {0, 1, 2, 3, 4, 5}) store_word(control, row, row + 1, State::committed);
  store_word(control, 3, 4, State::voided);
  store_word(control, 2, 3, State::writing);
  store_word(control, 5, 900, State::committed);  // newer than the emptying, but reserved before it
  control.counters().next_ticket = 100;
  control.counters().void_rows = 1;
  control.counters().write_count = 8;
  control.empty(true);
  EXPECT_EQ(control.counters().write_count.load(), 8u);
  EXPECT_EQ(control.counters().next_ticket.load(), 101u);
  for (const std::uint64_t row : {0, 1, 3, 4}) EXPECT_EQ(control.word(row).load(), ticket(100, State::unused));
  EXPECT_EQ(control.word(2).load(), ticket(3, State::writing));  // keeps its writer
  EXPECT_EQ(control.word(5).load(), ticket(900, State::unused));  // numbers never fall
  EXPECT_EQ(control.word(6).load(), 0u);
  EXPECT_EQ(control.counters().void_rows.load(), 0u);
  EXPECT_EQ(control.size(), 0u);
  EXPECT_EQ(control.cursor_row(0), 0u);
  EXPECT_EQ(control.cursor_row(1), 4u);
  EXPECT(control.lane(0).cursor.load() >= 6);  // never goes back
  control.empty(false);
  EXPECT_EQ(control.counters().write_count.load(), 0u);
}

TEST(an_emptying_that_was_begun_is_finished_and_not_repeated) {
  // By somebody who died when lane 0 had begun again, lane 1 was about to, lane 2 was not yet looked at and lane 3 was empty.
  // Others have written to lanes 0 and 3 since, and somebody who died in lane 0 left a void row.
  const Heap heap(geometry(4, 4), {});
  const Control control = heap.view();
  control.counters().next_ticket = 100;
  control.counters().void_rows = 2;
  control.counters().write_count = 7;
  control.lane(0).base = 4, control.lane(0).cursor = 6;
  store_word(control, 0, 60, State::committed);
  store_word(control, 1, 61, State::voided);
  store_word(control, 2, 12, State::committed);
  store_word(control, 3, 13, State::voided);
  control.lane(1).cursor = 2;
  control.lane(2).cursor = 1;
  for (const std::uint64_t row : {4, 5, 8}) store_word(control, row, row, State::committed);
  control.lane(3).cursor = 1;
  store_word(control, 12, 70, State::committed);
  Claim claim{};
  claim.n = 4, claim.lane = kEmptying - 3, claim.p0 = 1;
  control.empty(50, claim, true);
  EXPECT_EQ(control.filled(0), 2u);
  EXPECT_EQ(control.filled(1), 0u);
  EXPECT_EQ(control.filled(2), 0u);
  EXPECT_EQ(control.filled(3), 1u);
  EXPECT_EQ(control.word(0).load(), ticket(60, State::committed));
  EXPECT_EQ(control.word(1).load(), ticket(61, State::voided));
  EXPECT_EQ(control.word(12).load(), ticket(70, State::committed));
  for (const std::uint64_t row : {2, 3, 4, 5, 8}) EXPECT_EQ(control.word(row).load(), ticket(50, State::unused));
  EXPECT_EQ(control.counters().void_rows.load(), 1u);
  EXPECT_EQ(control.counters().write_count.load(), 7u);
  EXPECT_EQ(control.size(), 2u);
  EXPECT_EQ(control.lane(0).base.load(), 4u);  // and once more there is nothing to do
  control.empty(50, claim, true);
  EXPECT_EQ(control.size(), 2u);
}

TEST(a_lane_whose_base_has_moved_is_empty_and_takes_rows_from_there) {
  const Heap heap(geometry(2, 4), {});  // whoever empties it is stopped before he moves the cursor
  const Control control = heap.view();
  control.lane(0).cursor = 3, control.lane(0).high = 4;
  control.lane(0).base = 4;
  EXPECT_EQ(control.filled(0), 0u);
  EXPECT_EQ(control.cursor_row(0), 0u);
  EXPECT_EQ(control.reserve(0, 2), 4u);
  EXPECT_EQ(control.filled(0), 2u);
  EXPECT_EQ(control.raise_high(0, 3), 2u);
  EXPECT_EQ(control.filled(0), 3u);
  EXPECT_EQ(control.lane(0).high.load(), 7u);
}

// ---- recovery ------------------------------------------------------------------------------------------------------

// Recovers twice: the second time there is nothing to do, and nothing changes.
Control::Repair recover(const Blocks& blocks) {
  const Control control = blocks.view();
  const Control::Repair repair = control.recover();
  const auto words = copy(blocks.control), tickets = copy(blocks.tickets);
  const Control::Repair again = control.recover();
  EXPECT_EQ(again.claims + again.voided + again.gaps, 0u);
  EXPECT(copy(blocks.control) == words);
  EXPECT(copy(blocks.tickets) == tickets);
  return repair;
}

TEST(recovery_of_a_sound_store_changes_nothing_in_it) {
  const Heap heap(geometry(2, 4), {});
  const Control control = heap.view();
  control.fill();
  const auto words = copy(heap.control), tickets = copy(heap.tickets);
  const auto repair = recover(heap);
  EXPECT_EQ(repair.claims + repair.voided + repair.gaps, 0u);
  EXPECT(copy(heap.control) == words);
  EXPECT(copy(heap.tickets) == tickets);
}

TEST(recovery_voids_what_was_half_written_or_never_begun) {
  const Heap heap(geometry(2, 4), {});
  const Control control = heap.view();
  control.counters().next_ticket = 50;
  control.lane(0).cursor = 9;  // all four rows, the second lap begun
  for (std::uint64_t row = 0; row < 4; ++row) store_word(control, row, 10 + row, State::committed);
  store_word(control, 0, 20, State::writing);
  store_word(control, 2, 12, State::voided);  // from an earlier crash
  control.lane(1).cursor = 3;
  store_word(control, 4, 30, State::committed);  // rows 5, 6 reserved, never begun; row 7 not even reserved
  control.counters().void_rows = 77;             // whatever it says
  const auto repair = recover(heap);
  EXPECT_EQ(repair.voided, 1u);
  EXPECT_EQ(repair.gaps, 2u);
  EXPECT_EQ(control.word(0).load(), ticket(20, State::voided));
  EXPECT_EQ(control.word(1).load(), ticket(11, State::committed));
  EXPECT_EQ(control.word(2).load(), ticket(12, State::voided));
  EXPECT_EQ(control.word(3).load(), ticket(13, State::committed));
  EXPECT_EQ(control.word(4).load(), ticket(30, State::committed));
  EXPECT_EQ(state_of(control.word(5).load()), State::voided);
  EXPECT_EQ(state_of(control.word(6).load()), State::voided);
  EXPECT_EQ(control.word(7).load(), 0u);
  EXPECT_EQ(control.counters().void_rows.load(), 4u);
  EXPECT_EQ(control.size(), 3u);
  EXPECT_EQ(control.counters().next_ticket.load(), 50u);
}

TEST(recovery_clears_every_claim_and_participant) {
  const Heap heap(geometry(1, 4), {});
  const Control control = heap.view();
  for (const std::uint64_t i : {std::uint64_t{0}, std::uint64_t{100}, kParticipants - 1}) {
    control.participant(i).state = 1;
    control.participant(i).claims[i % kClaims].t0 = 5;
  }
  control.participant(3).claims[1].t0 = ~std::uint64_t{0};  // died between taking the slot and noting the number
  EXPECT_EQ(recover(heap).claims, 4u);
  for (std::uint64_t i = 0; i < kParticipants; ++i) {
    EXPECT_EQ(control.participant(i).state.load(), 0u);
    for (const Claim& claim : control.participant(i).claims) EXPECT_EQ(claim.t0.load(), 0u);
  }
}

TEST(recovery_leaves_nothing_behind_outside_the_extent) {
  // A writer and somebody who emptied the store died together. What they leave outside the extent must neither come
  // back to life when the extent grows over it, nor keep its row "being written" for ever.
  const Heap heap(geometry(1, 6), {});
  const Control control = heap.view();
  control.counters().next_ticket = 100;
  control.lane(0).cursor = 8;
  control.lane(0).base = 6;  // two rows since the store was emptied
  store_word(control, 0, 90, State::committed);
  store_word(control, 1, 91, State::committed);
  store_word(control, 2, 12, State::committed);  // not reached by the emptying
  store_word(control, 3, 13, State::writing);
  store_word(control, 4, 14, State::voided);
  store_word(control, 5, 15, State::unused);
  recover(heap);
  EXPECT_EQ(control.size(), 2u);
  EXPECT(is_committed(control.word(0).load()));
  EXPECT(is_committed(control.word(1).load()));
  for (const std::uint64_t row : {2, 3, 4, 5}) EXPECT_EQ(state_of(control.word(row).load()), State::unused);
  for (const std::uint64_t row : {2, 3, 4, 5}) EXPECT_EQ(number_of(control.word(row).load()), row + 10);  // not reused
}

// ---- claims --------------------------------------------------------------------------------------------------------

TEST(a_claim_lives_as_long_as_its_guard) {
  const Heap heap(geometry(1, 4), {});
  Participant& participant = heap.view().participant(7);
  {
    const ClaimGuard one(participant, 11, 3, 0, 40);
    const ClaimGuard two(participant, 12, 1, -1, 0);
    EXPECT_EQ(participant.claims[0].t0.load(), 11u);
    EXPECT_EQ(participant.claims[0].n, 3u);
    EXPECT_EQ(participant.claims[0].lane, 0);
    EXPECT_EQ(participant.claims[0].p0, 40u);
    EXPECT_EQ(participant.claims[1].t0.load(), 12u);
    EXPECT_EQ(participant.claims[1].lane, -1);
  }
  for (const Claim& claim : participant.claims) EXPECT_EQ(claim.t0.load(), 0u);
}

TEST(more_threads_than_claims_take_turns) {
  const Heap heap(geometry(1, 4), {});
  Participant& participant = heap.view().participant(0);
  std::atomic<int> inside{0};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t i = 0; i < 300; ++i) {
        const ClaimGuard guard(participant, 1 + t, i, 0, i);
        EXPECT(++inside <= static_cast<int>(kClaims));
        std::this_thread::yield();
        --inside;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const Claim& claim : participant.claims) EXPECT_EQ(claim.t0.load(), 0u);
}

TEST(a_thread_without_a_claim_waits_for_one) {
  const Heap heap(geometry(1, 4), {});
  Participant& participant = heap.view().participant(0);
  const ClaimGuard one(participant, 1, 1, 0, 0), two(participant, 2, 1, 0, 0);
  std::optional<ClaimGuard> three;
  three.emplace(participant, 3, 1, 0, 0);
  std::atomic<bool> has{false};
  std::thread fourth([&] {
    const ClaimGuard guard(participant, 4, 1, 0, 0);
    has = true;
    EXPECT_EQ(participant.claims[2].t0.load(), 4u);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT(!has);
  three.reset();
  fourth.join();
  EXPECT(has);
}

TEST(raise_high_keeps_the_highest_of_all_threads) {
  const Heap heap(geometry(1, 100000), {});
  const Control control = heap.view();
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t i = t; i < 50000; i += 4) {
        control.raise_high(0, i);
        EXPECT(control.filled(0) >= i);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(control.filled(0), 49999u);
}

}  // namespace
