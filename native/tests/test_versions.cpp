// Rows by version against a model, beside writers in threads, and what a draw draws.
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <set>
#include <thread>
#include <vector>

#include "blocks.h"
#include "versioned.h"

using namespace engram;

namespace {

std::vector<double> some_versions(Dice& dice, std::uint64_t n, std::uint64_t kinds) {
  std::vector<double> versions(n);
  for (auto& version : versions) version = dice.below(12) == 0 ? kNotReady : static_cast<double>(dice.below(kinds)) - 2;
  return versions;
}

std::vector<std::int64_t> some_of(Dice& dice, const Drawing& drawing) {
  std::vector<std::int64_t> rows;
  for (std::uint64_t row = 0; row < drawing.control.capacity(); ++row) {
    if (is_committed(drawing.control.word(row).load()) && dice.below(3) == 0) rows.push_back(static_cast<std::int64_t>(row));
  }
  return rows;
}

}  // namespace

TEST(versions_are_what_the_rows_say_after_any_writes) {
  Dice dice(5);
  for (int round = 0; round < 120; ++round) {
    const std::uint64_t rows = 1 + dice.below(70), kinds = 1 + dice.below(9);
    const Versioned shared(rows);
    Writing one(shared), other(shared, 1);
    Drawing drawing(shared);
    for (std::uint64_t i = 0; i < 50; ++i) {
      Writing& who = dice.below(2) == 0 ? one : other;
      const std::vector<std::int64_t> named = some_of(dice, drawing);
      switch (dice.below(9)) {
        case 0:
          if (!named.empty()) who.edit(named, some_versions(dice, named.size(), kinds), 1);
          break;
        case 1:  // some are not ready, or are now
          if (!named.empty()) who.edit(named, some_versions(dice, named.size(), kinds), 0);
          break;
        case 2:
          if (dice.below(4) == 0) who.store.empty(false);
          break;
        case 3: {
          std::vector<std::int64_t> placed(1 + dice.below(rows));
          for (auto& row : placed) row = static_cast<std::int64_t>(dice.below(rows));
          who.place(placed, some_versions(dice, placed.size(), kinds));
          break;
        }
        case 4:
          who.remove(named);
          break;
        default:
          who.append(some_versions(dice, 1 + dice.below(rows + 3), kinds));
      }
      if (dice.below(3) != 0) EXPECT(drawing.agrees(i));
      if (dice.below(9) == 0) drawing.index.put_in_order();
    }
    EXPECT(drawing.agrees());
  }
}

TEST(rows_of_a_version_that_has_no_weight_are_not_drawn) {
  const Versioned shared(8);
  Writing writing(shared);
  Drawing drawing(shared);
  EXPECT(!drawing.draw(1, 3, {}, {}).any);
  writing.append({1, 2, 2, 3});
  drawing.index.catch_up();
  EXPECT(!drawing.draw(1, 3, {1, 2, 3}, {0, 0, 0}).any);
  EXPECT(!drawing.draw(1, 3, {7}, {1}).any);
  for (std::uint64_t key = 0; key < 50; ++key) {
    const Drawing::Drawn drawn = drawing.draw(key, 2, {2, 3}, {1, 0});
    EXPECT((drawn.any && std::set<std::int64_t>(drawn.rows.begin(), drawn.rows.end()) == std::set<std::int64_t>{1, 2}));
    const Drawing::Drawn more = drawing.draw(key, 5, {2, 3}, {1, 0});  // than there are
    EXPECT(more.any);
    for (const double version : more.versions) EXPECT_EQ(version, 2.0);
  }
  EXPECT_THROWS(std::invalid_argument, drawing.draw(1, 3, {1, 2}, {1}));
  EXPECT_THROWS(std::invalid_argument, drawing.draw(1, 3, {1}, {std::numeric_limits<double>::infinity()}));
  EXPECT(drawing.agrees());
}

TEST(rules_without_a_version_are_refused) {
  const Versioned shared(4);
  const Control control = shared.blocks().view();
  const std::vector<Field> fields = shared.blocks().fields, one{fields[0]};
  RowRules rules = Drawing::rules();
  rules.dated = false;
  EXPECT_THROWS(std::invalid_argument, Versions(control, rules, one));
  EXPECT_THROWS(std::invalid_argument, Versions(control, Drawing::rules(), one));
  rules = Drawing::rules();
  rules.version.bits = 32;  // of a field of eight bytes
  EXPECT_THROWS(std::invalid_argument, Versions(control, rules, fields));
}

// What is drawn while rows are written, edited and removed was stored under the number that comes with it: version 3 * k goes with an odd k.
TEST(what_is_drawn_beside_writers_was_written) {
  constexpr std::uint64_t kRows = 64;
  const Versioned shared(kRows);
  Drawing drawing(shared);
  std::atomic<bool> over{false};
  const auto version = [](std::uint64_t i) { return 3.0 * static_cast<double>(2 * (i % 5) + 1); };
  {
    Writing writing(shared);
    writing.append(std::vector<double>(kRows, 3));
  }
  std::thread appends([&] {
    Writing writing(shared, 1);
    for (std::uint64_t i = 0; !over; ++i) writing.append(std::vector<double>(1 + i % 7, version(i)));
  });
  std::thread edits([&] {
    Writing writing(shared, 2);
    for (std::uint64_t i = 0; !over; ++i) {
      const std::vector<std::int64_t> row{static_cast<std::int64_t>(i % kRows)};
      std::vector<std::int64_t> number{static_cast<std::int64_t>(number_of(drawing.control.word(i % kRows).load()))};
      const std::vector<double> value{version(i)};
      const std::uint64_t field = 1;
      const auto* column = reinterpret_cast<const std::byte*>(value.data());
      std::int64_t written = 0;
      writing.store.patch(row.data(), 1, {&field, 1}, {&column, 1}, number.data(), &written);
    }
  });
  std::uint64_t drawn = 0;
  for (std::uint64_t key = 0; key < 400; ++key) {
    drawing.index.catch_up();
    std::vector<double> versions;
    std::vector<std::int64_t> counts;
    drawing.index.versions(versions, counts);
    for (const double seen : versions) EXPECT(seen == 3 || seen == 9 || seen == 15 || seen == 21 || seen == 27);
    const Drawing::Drawn got = drawing.draw(key, 16, versions, std::vector<double>(versions.size(), 1));
    if (!got.any) continue;  // all were being written
    EXPECT_EQ((std::set<std::int64_t>(got.rows.begin(), got.rows.end()).size()), std::size_t{16});
    for (std::size_t i = 0; i < 16; ++i) EXPECT(got.versions[i] >= 3 && got.versions[i] <= 27 && got.numbers[i] > 0);
    drawn += 16;
  }
  over = true;
  appends.join();
  edits.join();
  EXPECT(drawn > 0);
  EXPECT(drawing.agrees());
}

// A thread of the parent may have been amid a change when the child was forked off: it begins anew.
TEST(a_child_draws_what_its_parent_had_begun_to_note) {
  const Versioned shared(6);
  Writing writing(shared);
  Drawing drawing(shared);
  writing.append({1, 2, 2});
  EXPECT(drawing.agrees());
  writing.append({2, 5});
  drawing.index.after_fork();
  EXPECT(drawing.agrees());
}
