// Death at any instruction of replacing all rows of a store: what is left is the old rows, none, or the new ones.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <vector>

#include "crash.h"
#include "expect.h"

#ifdef ENGRAM_CAN_STEP

namespace {

const std::vector<std::uint64_t> row_bytes{56, 520};
const Geometry g = geometry(2, 4);

constexpr Control::LaneState kLanes[] = {{6, 4, {}}, {1, 3, {}}};       // lane 1: two rows by number, one of them void
constexpr std::int64_t kNumbers[] = {5, 6, 3, 4, 7, 0, 9, 0};

void describe_row(const Blocks& blocks, std::uint64_t row, std::uint64_t id) {
  for (const Field& field : blocks.fields) describe(field.data + row * field.row_bytes, field.row_bytes, id);
}

void replace(Store& store, const Blocks& blocks) {
  store.pause();
  store.begin_replacing(false);
  for (std::uint64_t row = 0; row < 8; ++row) describe_row(blocks, row, 0x300 + row);
  store.replaced(11, kLanes, kNumbers);
  store.resume();
}

using Content = std::map<std::uint64_t, std::uint64_t>;

/// The ids of the rows that can be drawn.
Content content_of(const Blocks& blocks) {
  Content content;
  const Control control = blocks.view();
  for (std::uint64_t row = 0; row < control.capacity(); ++row) {
    if (is_committed(control.word(row).load()) && control.inside(row)) content[row] = id_in(blocks, row).value_or(~std::uint64_t{0});
  }
  return content;
}

struct Copy {
  explicit Copy(std::span<const std::byte> state) : pages(state.size()), blocks(pages.data(), g, row_bytes) {
    std::memcpy(blocks.all.data(), state.data(), state.size());
  }
  SharedPages pages;
  Layout blocks;
};

}  // namespace

TEST(a_death_leaves_the_old_rows_none_or_the_new_ones) {
  SharedPages pages(1 << 16);
  const Layout blocks(pages.data(), g, row_bytes);
  format_without_curve(blocks);
  Store store = blocks.open(1);
  append_ids(store, blocks, 0, 5, 0x100);
  append_ids(store, blocks, 1, 2, 0x110);
  const std::vector<std::byte> before(blocks.all.begin(), blocks.all.end());
  const Content old_rows = content_of(blocks);
  Copy whole(before);
  Store replacer = whole.blocks.open(1);
  replace(replacer, whole.blocks);
  const Content new_rows = content_of(whole.blocks);
  EXPECT_EQ(old_rows.size(), 6u);
  EXPECT_EQ(new_rows.size(), 6u);
  EXPECT(new_rows.at(6) == 0x306 && !new_rows.contains(5));

  std::uint64_t states = 0, kept = 0, empty = 0, done = 0;
  {
    std::uint64_t seen = 0;
    Stepped child([&] { replace(store, blocks); });
    for (; child.end() == Stepped::End::running; child.step()) {
      std::uint64_t sum = 0;
      for (std::uint64_t at = 0; at + 8 <= blocks.all.size(); at += 8) {
        std::uint64_t word = 0;
        std::memcpy(&word, blocks.all.data() + at, 8);
        sum = (sum ^ word) * 0x9E3779B97F4A7C15ull + at;
      }
      if (sum == seen) continue;
      seen = sum;
      ++states;
      for (const bool survivor : {false, true}) {
        const Copy crashed(blocks.all);
        Store next = crashed.blocks.open(2);
        if (survivor) {
          next.repair(crashed.blocks.view().participant(1));
          expect_sound_rows(crashed.blocks, 1);
        } else {
          next.recover();
          expect_sound(crashed.blocks);
        }
        const Content now = content_of(crashed.blocks);
        EXPECT(now == old_rows || now.empty() || now == new_rows);
        kept += now == old_rows;
        empty += now.empty();
        done += now == new_rows;
        EXPECT(!next.paused());
        append_ids(next, crashed.blocks, 0, 4, 0x400);  // and it goes on
        for (std::uint64_t row = 0; row < 4; ++row) EXPECT(content_of(crashed.blocks).at(row) >= 0x400);
      }
    }
    if (child.end() == Stepped::End::refused) return;
  }
  std::printf("    %llu states: the old rows %llu times, none %llu, the new ones %llu\n", llu(states), llu(kept), llu(empty), llu(done));
  EXPECT(kept > 0 && empty > 10 && done > 0);
}

#endif
