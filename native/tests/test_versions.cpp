// Rows by version against a model, beside writers in threads, and what a draw draws.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstring>
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

namespace {

/// Edits a row when its version is read for the first time: until then that memory may not be read.
struct EditedAtALook {
  explicit EditedAtALook(Word& word) : word(word) {
    memory = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT(memory != MAP_FAILED);
    put(1);
    EXPECT_EQ(mprotect(memory, kPage, PROT_NONE), 0);
    now = this;
    struct sigaction action {};
    action.sa_handler = [](int) { now->edit(); };
    EXPECT_EQ(sigaction(SIGSEGV, &action, &before), 0);
  }
  ~EditedAtALook() {
    sigaction(SIGSEGV, &before, nullptr);
    munmap(memory, kPage);
  }

  void edit() {
    if (edits++ > 0 || mprotect(memory, kPage, PROT_READ | PROT_WRITE) != 0) _exit(1);
    put(2);
    word.store(ticket(number_of(word.load()) + 1, State::committed));
  }
  void put(double version) const { std::memcpy(memory, &version, sizeof version); }

  static inline EditedAtALook* now = nullptr;
  Word& word;
  void* memory;
  int edits = 0;
  struct sigaction before {};
};

}  // namespace

// Else the version of the edit would stand beside the number that the row had before.
TEST(a_row_that_is_edited_between_its_ticket_and_its_version_is_looked_at_again) {
  const Versioned shared(4);
  Writing(shared).append({1});
  const Control control = shared.blocks().view();
  EditedAtALook row(control.word(0));
  std::vector<Field> fields = shared.blocks().fields;
  fields[1].data = static_cast<std::byte*>(row.memory);
  Versions index(control, Drawing::rules(), fields);
  index.scan(0, 1);
  EXPECT_EQ(row.edits, 1);
  std::int64_t rows = -1, numbers = -1;
  double versions = 0;
  const double of[] = {1, 2}, weights[] = {1, 1};
  EXPECT(index.draw(1, 1, of, weights, &rows, &numbers, &versions));
  EXPECT_EQ(versions, 2.0);
  EXPECT_EQ(static_cast<std::uint64_t>(numbers), number_of(control.word(0).load()));
}

// What is drawn while rows are written and edited was stored under the number that comes with it.
TEST(what_is_drawn_beside_writers_was_written) {
  constexpr std::uint64_t kRows = 64;
  using Stored = std::map<std::int64_t, double>;  // by ticket number
  const Versioned shared(kRows);
  Drawing drawing(shared);
  Stored appended, edited, drawn;
  std::atomic<bool> over{false};
  const auto append = [](Writing& writing, Stored& to, const std::vector<double>& versions) {
    const auto first = static_cast<std::int64_t>(writing.append(versions));
    for (std::size_t i = 0; i < versions.size(); ++i) to[first + static_cast<std::int64_t>(i)] = versions[i];
  };
  {
    Writing writing(shared);
    append(writing, appended, std::vector<double>(kRows, 3));
  }
  std::thread appends([&] {
    Writing writing(shared, 1);
    for (std::uint64_t i = 0; !over; ++i) append(writing, appended, std::vector<double>(1 + i % 7, static_cast<double>(i)));
  });
  std::thread edits([&] {
    Writing writing(shared, 2);
    const std::uint64_t field = 1;
    for (std::uint64_t i = 0; !over; ++i) {
      const auto row = static_cast<std::int64_t>(i % kRows);
      const std::uint64_t word = writing.store.control().word(i % kRows).load();
      const auto write = static_cast<std::int64_t>(writing.store.control().write_of(i % kRows, word));
      const double value = -static_cast<double>(i);
      const auto* column = reinterpret_cast<const std::byte*>(&value);
      std::int64_t written = -1;
      const Patched patched = writing.store.patch(&row, 1, {&field, 1}, {&column, 1}, &write, &written);
      if (written >= 0) edited[static_cast<std::int64_t>(patched.first)] = value;
    }
  });
  for (std::uint64_t key = 0; key < 400; ++key) {
    drawing.index.catch_up();
    std::vector<double> versions;
    std::vector<std::int64_t> counts;
    drawing.index.versions(versions, counts);
    const Drawing::Drawn got = drawing.draw(key, 8, versions, std::vector<double>(versions.size(), 1));
    if (!got.any) continue;  // all were being written
    for (std::size_t i = 0; i < 8; ++i) drawn[got.numbers[i]] = got.versions[i];
  }
  over = true;
  appends.join();
  edits.join();
  appended.merge(edited);
  EXPECT(drawn.size() > 8);
  for (const auto& [number, version] : drawn) EXPECT(appended.count(number) == 1 && appended[number] == version);
  EXPECT(drawing.agrees());
}
