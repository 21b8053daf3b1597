// Counts of draws against a model, and in threads; and the set of rows that they are drawn from.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <map>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "blocks.h"
#include "counts.h"
#include "core/row_set.h"
#include "expect.h"

using namespace engram;

TEST(a_set_says_how_many_it_has_and_which_is_the_rth) {
  Dice dice(1);
  for (const std::uint64_t rows : {1, 2, 63, 64, 65, 4095, 4097, 270'000}) {
    std::vector<std::uint64_t> memory(RowSet::bytes(rows) / 8);
    auto* at = reinterpret_cast<std::byte*>(memory.data());
    RowSet set(at, rows);
    std::set<std::uint64_t> model;
    for (int i = 0; i < 2000; ++i) {
      const std::uint64_t row = dice.below(rows);
      if (dice.below(3) > 0) set.insert(row), model.insert(row);
      else set.erase(row), model.erase(row);
      EXPECT_EQ(set.has(row), model.contains(row));
      EXPECT_EQ(set.size(), model.size());
    }
    std::uint64_t r = 0;
    for (const std::uint64_t row : model) EXPECT_EQ(set.at(r++), row);
    std::vector<std::uint64_t> again(memory.size(), ~std::uint64_t{0});
    RowSet other(reinterpret_cast<std::byte*>(again.data()), rows);
    other.assign([&](std::uint64_t row) { return model.contains(row); });
    EXPECT_EQ(other.size(), model.size());
    for (r = 0; r < model.size(); ++r) EXPECT_EQ(other.at(r), set.at(r));
    std::fill(memory.begin(), memory.end(), ~std::uint64_t{0});
    EXPECT_THROWS(Damaged, set.size());
    if (rows > 64) EXPECT_THROWS(Damaged, set.at(~std::uint64_t{0} >> 1));
  }
}

TEST(each_row_is_drawn_so_often_until_it_is_written_again) {
  Dice dice(2);
  for (int round = 0; round < 200; ++round) {
    const std::uint64_t rows = 1 + dice.below(100), most = 1 + dice.below(3);
    const Counted shared(rows, most);
    Consumer one(shared), other(shared, 1);
    std::map<std::int64_t, std::uint64_t> counts;  // of live rows
    std::uint64_t cursor = 0;
    const auto left = [&] {
      return static_cast<std::uint64_t>(std::count_if(counts.begin(), counts.end(), [&](const auto& it) { return it.second < most; }));
    };
    for (std::uint64_t i = 0; i < 60; ++i) {
      Consumer& who = dice.below(2) == 0 ? one : other;
      const std::uint64_t n = 1 + dice.below(rows);
      switch (dice.below(6)) {
        case 0:
          who.append(n);
          // The other process's index is this one's memory: it need not be told.
          for (std::uint64_t k = 0; k < n; ++k) counts[static_cast<std::int64_t>(cursor++ % rows)] = 0;
          break;
        case 1: {  // an edit
          if (counts.empty()) break;
          const std::int64_t row = std::next(counts.begin(), static_cast<std::ptrdiff_t>(dice.below(counts.size())))->first;
          const std::uint64_t word = 7, which = 0;
          const auto* column = reinterpret_cast<const std::byte*>(&word);
          who.store.scatter(&row, 1, {&which, 1}, {&column, 1}, false);
          break;
        }
        case 2: {  // by number
          const auto row = static_cast<std::int64_t>(dice.below(counts.size() + 1) % rows);
          const std::uint64_t word = 7, which = 0;
          const auto* column = reinterpret_cast<const std::byte*>(&word);
          if (row == static_cast<std::int64_t>(counts.size())) break;
          who.store.scatter(&row, 1, {&which, 1}, {&column, 1}, true);
          counts[row] = 0;
          break;
        }
        case 3:
          if (dice.below(8) > 0) break;
          who.store.empty(false);
          counts.clear();
          cursor = 0;
          break;
        default: {
          const std::uint64_t there = left();
          const std::vector<std::int64_t> drawn = who.claim(i, n);
          EXPECT_EQ(drawn.size(), std::min(n, there));
          EXPECT_EQ(std::set<std::int64_t>(drawn.begin(), drawn.end()).size(), drawn.size());
          for (const std::int64_t row : drawn) EXPECT(counts.contains(row) && ++counts[row] <= most);
        }
      }
      EXPECT_EQ(one.index.drawable(), left());
      EXPECT_EQ(one.index.used(), counts.size() - left());
      std::vector<std::int64_t> used(rows);
      used.resize(other.index.used_rows(rows, used.data()));
      for (const std::int64_t row : used) EXPECT_EQ(counts[row], most);
      EXPECT_EQ(used.size(), counts.size() - left());
      const std::vector<std::int32_t> said = one.drawn();
      for (const auto& [row, count] : counts) EXPECT_EQ(static_cast<std::uint64_t>(said[static_cast<std::size_t>(row)]), count);
      if (dice.below(10) == 0) {
        other.index.restore(said.data(), said.size());
        EXPECT_EQ(one.index.drawable(), left());
      }
      if (dice.below(10) == 0) one.index.put_in_order(), EXPECT_EQ(other.index.drawable(), left());
    }
  }
}

/// A process that only reads, whose counts begin as a copy, and that knows what others do by looking alone.
struct Reader {
  explicit Reader(const Counted& shared, bool copied)
      : control(shared.blocks().view()), memory(shared.index().size()), index((begin(shared, copied), std::span(memory)), &reading()) {
    index.follow(shared.index(), copied);
  }
  void begin(const Counted& shared, bool copied) {
    if (copied) Consumption::copy(shared.index(), memory);
    else Consumption::format(memory, shared.blocks().view().capacity(), most_of(shared));
  }
  static std::uint64_t most_of(const Counted& shared) { return Consumer(shared, 2).index.most(); }
  const Control& reading() { return control.only_read(false), control; }

  Control control;
  std::vector<std::byte> memory;
  Consumption index;
};

TEST(a_reader_that_is_told_nothing_counts_what_others_draw) {
  Dice dice(21);
  for (int round = 0; round < 60; ++round) {
    const std::uint64_t rows = 1 + dice.below(90), most = 1 + dice.below(3);
    const Counted shared(rows, most);
    Consumer writer(shared);
    writer.append(dice.below(rows + 1));
    writer.claim(99, dice.below(rows + 1));
    Reader reader(shared, dice.below(2) == 0);
    std::map<std::int64_t, std::uint64_t> own;  // draws of the reader
    std::uint64_t cursor = writer.control.end(0);
    for (std::uint64_t i = 0; i < 80; ++i) {
      const std::uint64_t n = 1 + dice.below(rows);
      const auto row = static_cast<std::int64_t>(dice.below(rows));
      const std::uint64_t word = 7, which = 0;
      const auto* column = reinterpret_cast<const std::byte*>(&word);
      const bool live = writer.control.inside(static_cast<std::uint64_t>(row));
      switch (dice.below(8)) {
        case 0:
          writer.append(n);
          for (std::uint64_t k = 0; k < n; ++k) own.erase(static_cast<std::int64_t>(cursor++ % rows));
          break;
        case 1:  // an edit keeps counts, a write by number does not
          if (const bool by_number = dice.below(2) == 0; live && is_committed(writer.control.word(static_cast<std::uint64_t>(row)).load())) {
            writer.store.scatter(&row, 1, {&which, 1}, {&column, 1}, by_number);
            if (by_number) own.erase(row);
          }
          break;
        case 2:
          if (live) writer.store.remove(&row, 1, nullptr), own.erase(row);
          break;
        case 3:
          if (live) writer.index.reset(&row, 1);
          break;
        case 4:
          if (dice.below(6) == 0) writer.store.empty(false), own.clear(), cursor = writer.control.end(0);
          break;
        case 5: {
          reader.index.catch_up();
          std::vector<std::int64_t> drawn(n), numbers(n);
          drawn.resize(reader.index.claim(i, n, drawn.data(), numbers.data()));
          for (const std::int64_t one : drawn) ++own[one];
          reader.index.were_read(drawn.data(), numbers.data(), drawn.size());
          break;
        }
        default: writer.claim(i, n);
      }
      reader.index.catch_up();
      const std::vector<std::int32_t> theirs = writer.drawn();
      std::vector<std::int32_t> seen(rows);
      reader.index.copy_counts(seen.data(), rows);
      std::uint64_t left = 0, used = 0;
      for (std::uint64_t k = 0; k < rows; ++k) {
        if (!is_committed(writer.control.word(k).load()) || !writer.control.inside(k)) continue;
        const auto mine = own.find(static_cast<std::int64_t>(k));
        const std::uint64_t sum = static_cast<std::uint64_t>(theirs[k]) + (mine == own.end() ? 0 : mine->second);
        EXPECT_EQ(static_cast<std::uint64_t>(seen[k]), sum);
        (sum < most ? left : used) += 1;
      }
      EXPECT_EQ(reader.index.drawable(), left);
      EXPECT_EQ(reader.index.used(), used);
      EXPECT_EQ(reader.index.totals().used, writer.index.totals().used);
    }
  }
}

// Whatever happens to rows, those in flight are the ones that can be drawn. Who counts again finds nothing else.
TEST(rows_in_flight_are_those_that_can_be_drawn) {
  Dice dice(3);
  for (int round = 0; round < 100; ++round) {
    const std::uint64_t rows = 2 + dice.below(40), most = 1 + dice.below(2);
    const Counted shared(rows, most);
    Consumer consumer(shared);
    const Limits limits = consumer.store.limits();
    limits.set({0, 0, 0, 1'000'000}, 0);
    for (std::uint64_t i = 0; i < 60; ++i) {
      std::vector<std::int64_t> some(1 + dice.below(5));
      for (std::int64_t& row : some) row = static_cast<std::int64_t>(dice.below(rows));
      switch (dice.below(6)) {
        case 0:
          consumer.append(1 + dice.below(2 * rows));
          break;
        case 1:
          consumer.store.remove(some.data(), some.size(), nullptr);
          break;
        case 2:
          consumer.index.reset(some.data(), some.size());
          break;
        case 3: {  // by number
          const std::uint64_t word = 7, which = 0;
          const auto* column = reinterpret_cast<const std::byte*>(&word);
          consumer.store.scatter(some.data(), 1, {&which, 1}, {&column, 1}, true);
          break;
        }
        case 4:
          if (dice.below(8) == 0) consumer.store.empty(false);
          break;
        default:
          consumer.claim(i, 1 + dice.below(rows));
      }
      EXPECT_EQ(limits.counts().in_flight, consumer.index.drawable());
      consumer.store.waits_in_vain();
      EXPECT_EQ(limits.counts().in_flight, consumer.index.drawable());
    }
    limits.consumed(1), consumer.append(1);
    consumer.store.waits_in_vain();
    EXPECT_EQ(limits.counts().in_flight, consumer.index.drawable());
  }
}

// A writer that was killed had rows admitted that no claim names.
TEST(rows_that_were_admitted_before_a_death_are_given_back) {
  const Counted shared(8, 1);
  Consumer dead(shared), other(shared, 1);
  const Limits limits = other.store.limits();
  limits.set({0, 0, 0, 8}, 0);
  dead.store.prepay(6);
  EXPECT_EQ(limits.counts().in_flight, 6u);
  other.store.waits_in_vain();  // it may be alive
  EXPECT_EQ(limits.counts().in_flight, 6u);
  dead.append(2);
  EXPECT_EQ(limits.counts().in_flight, 6u);
  limits.return_prepaid_of(dead.control.participant(0));
  EXPECT_EQ(limits.counts().in_flight, 2u);
  limits.return_prepaid_of(dead.control.participant(0));
  EXPECT_EQ(limits.counts().in_flight, 2u);
}

// What decides an address is copied before it is checked: another thread, or a free, may change a caller's memory at any time.
TEST(rows_of_a_caller_are_looked_at_once) {
  std::vector<std::int64_t> rows{3, 1, 2};
  const std::int64_t* given = rows.data();
  const OwnRows own(given, rows.size(), 4);
  EXPECT(given != rows.data());
  rows.assign(3, std::int64_t{1} << 60);
  EXPECT_EQ(given[0] + 10 * given[1] + 100 * given[2], 213);
  given = rows.data();
  EXPECT_THROWS(std::out_of_range, OwnRows(given, 3, 4));
  const std::int64_t none = -1;
  given = &none;
  EXPECT_THROWS(std::out_of_range, OwnRows(given, 1, 4));
  given = &none;
  const OwnRowsOrNone passed(given, 1, 4);
  EXPECT_EQ(*given, -1);
  given = nullptr;
  const OwnRows nothing(given, 7, 4);
  EXPECT(given == nullptr);
  std::vector<std::int64_t> many(100'000, 2);
  given = many.data();
  const OwnRows all(given, many.size(), 3);
  many.assign(many.size(), 9);
  EXPECT(std::all_of(given, given + many.size(), [](std::int64_t row) { return row == 2; }));
}

// An edit that is told before the write that it edits, and after it, in all orders with a draw in between.
TEST(no_row_is_lost_or_drawn_too_often_whatever_is_told_first) {
  std::vector<int> order{0, 1, 2};
  do {
    for (const bool used : {false, true}) {
      const Counted shared(1, 1);
      Consumer consumer(shared);
      consumer.append(1);
      if (used) EXPECT_EQ(consumer.claim(1, 1).size(), 1u);
      // Rows are written, and then edited, by others who have not told it yet.
      const std::int64_t row = 0;
      consumer.control.begin_edit(0, ticket(5, State::committed), 6);
      consumer.control.word(0).store(ticket(6, State::committed) | kEdited);
      consumer.control.counters().next_ticket.store(7);
      std::uint64_t drawn = 0;
      for (const int what : order) {
        if (what == 0) consumer.index.written(&row, 1, 5);
        if (what == 1) consumer.index.edited(&row, 1, 6, {}, 0);
        if (what == 2) drawn += consumer.claim(2, 1).size();
      }
      drawn += consumer.claim(3, 1).size();
      EXPECT_EQ(drawn, 1u);
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

// A row that is drawn, and edited before it was read, or before that was told.
TEST(an_edit_of_a_row_that_is_being_read_takes_no_part_in_its_count) {
  for (const int round : {0, 1, 2, 3}) {
    const bool failed = round % 2 == 0, lower = round < 2;  // of two edits, the one of the smaller number may come last
    const Counted shared(2, 1);
    Consumer reader(shared), editor(shared, 1);
    reader.append(1);
    const std::uint64_t value = 7;
    const auto* column = reinterpret_cast<const std::byte*>(&value);
    const std::uint64_t field = 0;
    std::int64_t row = 0, number = 0, again = 0;
    const auto edit = [&] { editor.store.scatter(&row, 1, {&field, 1}, {&column, 1}, false); };
    edit();
    edit();
    EXPECT_EQ(reader.index.claim(1, 1, &row, &number), 1u);
    EXPECT_EQ(static_cast<std::uint64_t>(number), number_of(reader.control.word(0).load()));
    lower ? reader.control.word(0).store(ticket(static_cast<std::uint64_t>(number) - 1, State::committed) | kEdited) : edit();
    EXPECT_EQ(editor.index.claim(2, 1, &row, &again), 0u);
    EXPECT_EQ(reader.index.used(), 0u);
    failed ? reader.index.take_back(&row, &number, 1) : reader.index.were_read(&row, &number, 1);
    EXPECT_EQ(reader.index.used(), failed ? 0u : 1u);
    EXPECT_EQ(editor.claim(3, 2).size(), failed ? 1u : 0u);
    EXPECT_EQ(reader.index.used(), 1u);
    reader.append(2);  // what the old ticket was of is gone
    reader.index.were_read(&row, &number, 1);
    EXPECT_EQ(reader.index.drawable(), 2u);
  }
}

// Rows that follow rules: what can be drawn is what the rows, their uses and the floor say, whatever was done and by which process.
TEST(rows_that_can_be_drawn_are_live_ready_fresh_and_not_used_up) {
  Dice dice(7);
  std::uint64_t admitted = 0, refused = 0, expired = 0;
  for (int round = 0; round < 300; ++round) {
    const std::uint64_t rows = 1 + dice.below(40), most = dice.below(4);
    const Ruled shared(rows, most);
    Consumer one(shared), other(shared, 1);
    std::map<std::int64_t, std::pair<std::uint64_t, std::uint64_t>> uses;  // of each row: its write, and how often that was drawn
    double floor = -1e9;
    const auto value = [&] { return dice.below(3) == 0 ? NAN : static_cast<double>(dice.below(6)); };
    const auto used = [&](std::int64_t row) -> std::uint64_t& {
      const auto at = static_cast<std::uint64_t>(row), write = one.control.write_of(at, one.control.word(at).load());
      auto& known = uses[row];
      if (known.first != write) known = {write, 0};
      return known.second;
    };
    const auto can = [&](std::int64_t row) {
      if (!is_committed(one.control.word(static_cast<std::uint64_t>(row)).load())) return false;
      return !std::isnan(one.value(row, 0)) && one.value(row, 1) >= floor && (most == 0 || used(row) < most);
    };
    const auto expected = [&] {
      std::vector<std::int64_t> found;
      for (std::uint64_t row = 0; row < rows; ++row) {
        if (can(static_cast<std::int64_t>(row))) found.push_back(static_cast<std::int64_t>(row));
      }
      return found;
    };
    const auto live = [&] {
      std::vector<std::int64_t> found;
      for (std::uint64_t row = 0; row < rows; ++row) {
        if (is_committed(one.control.word(row).load()) && dice.below(2) == 0) found.push_back(static_cast<std::int64_t>(row));
      }
      return found;
    };
    for (int i = 0; i < 60; ++i) {
      Consumer& who = dice.below(2) == 0 ? one : other;
      const std::uint64_t n = 1 + dice.below(rows);
      std::vector<double> values(n), versions(n);
      for (double& it : values) it = value();
      for (double& it : versions) it = value();
      switch (dice.below(8)) {
        case 0: who.append(values, versions); break;
        case 1:
        case 2:
          if (std::vector<std::int64_t> chosen = live(); !chosen.empty()) {
            values.resize(chosen.size(), NAN);
            who.edit(chosen, values, dice.below(2));
          }
          break;
        case 3:
          expired += who.index.totals().expired;
          floor = static_cast<double>(dice.below(5)) - (dice.below(3) == 0 ? 1 : 0);
          who.index.set_floor(floor);
          break;
        case 4:
          for (const std::int64_t row : who.claim(dice.below(1 << 30), n)) EXPECT(can(row)), ++used(row);
          break;
        case 5:
          if (who.control.size() > 0) {
            std::vector<std::int64_t> offered(n);
            for (std::int64_t& row : offered) row = static_cast<std::int64_t>(dice.below(rows));
            std::vector<std::int64_t> taken;
            for (const std::int64_t row : offered) {
              if (taken.size() < n / 2 && can(row)) taken.push_back(row), ++used(row);
            }
            const std::vector<std::int64_t> found = who.admit(offered, n / 2);
            EXPECT(found == taken);
            admitted += found.size(), refused += n - found.size();
            std::vector<std::int64_t> numbers;
            for (const std::int64_t row : found) {
              numbers.push_back(static_cast<std::int64_t>(number_of(one.control.word(static_cast<std::uint64_t>(row)).load())));
            }
            if (dice.below(4) == 0) {
              who.index.take_back(found.data(), numbers.data(), found.size());
              for (const std::int64_t row : found) used(row) -= most > 0 ? 1 : 0;
            } else if (most > 0) {
              who.index.were_read(found.data(), numbers.data(), found.size());
            }
          }
          break;
        case 6:
          if (const std::vector<std::int64_t> chosen = live(); !chosen.empty()) who.store.remove(chosen.data(), chosen.size(), nullptr);
          break;
        default:
          if (dice.below(8) == 0) who.index.put_in_order();
          if (dice.below(20) == 0) who.store.empty(false), uses.clear();
      }
      EXPECT(other.index.drawable_rows() == expected());
      EXPECT_EQ(one.index.drawable(), expected().size());
    }
  }
  EXPECT(admitted > 1000 && refused > 1000 && expired > 1000);
}

TEST(rules_that_no_rows_can_follow_are_refused) {
  RowRules rules = rewarded_and_dated();
  EXPECT_THROWS(std::invalid_argument, Consumption::bytes(10, {.ready = std::vector<RuleField>(17, rules.version)}));
  EXPECT_THROWS(std::invalid_argument, Consumption::bytes(10, {.ready = {{0, 0, 64, 0}}}));
  EXPECT_THROWS(std::invalid_argument, Consumption::bytes(10, {.dated = true, .version = {0, 5, 64, 0}}));
  const Ruled shared(10, 0);
  const Consumer one(shared);
  EXPECT_THROWS(std::invalid_argument, Consumption(shared.index(), &one.control));
  EXPECT_THROWS(std::invalid_argument, Consumption(shared.index(), nullptr));
  EXPECT_THROWS(std::invalid_argument, Counted(10, 0));
}

// Threads that offer rows as often as they like share their uses out exactly, beside one that makes rows ready, and one that expires them.
TEST(threads_that_offer_rows_use_none_too_often_and_lose_none) {
  constexpr std::uint64_t kRows = 256, kMost = 3;
  const Ruled shared(kRows, kMost);
  {
    Consumer first(shared);
    first.append(std::vector<double>(kRows, NAN), std::vector<double>(kRows, 1));
  }
  std::vector<std::atomic<std::uint64_t>> uses(kRows);
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      Consumer consumer(shared, t);
      Dice dice(t);
      while (consumer.index.used() < kRows) {
        std::vector<std::int64_t> offered(16), numbers(16);
        for (std::int64_t& row : offered) row = static_cast<std::int64_t>(dice.below(kRows));
        const std::vector<std::int64_t> taken = consumer.admit(offered);
        for (const std::int64_t row : taken) uses[static_cast<std::size_t>(row)].fetch_add(1);
        numbers.clear();
        for (const std::int64_t row : taken) {
          numbers.push_back(static_cast<std::int64_t>(number_of(consumer.control.word(static_cast<std::uint64_t>(row)).load())));
        }
        consumer.index.were_read(taken.data(), numbers.data(), taken.size());
      }
    });
  }
  threads.emplace_back([&] {
    Consumer editor(shared, 3);
    for (std::int64_t row = 0; row < static_cast<std::int64_t>(kRows); ++row) {
      editor.edit({row}, {static_cast<double>(row)});
      editor.index.set_floor(row % 7 == 0 ? 2 : 1);  // nothing is fresh enough for a moment
    }
    editor.index.set_floor(0);
  });
  for (std::thread& thread : threads) thread.join();
  for (const auto& of_row : uses) EXPECT_EQ(of_row.load(), kMost);
}

TEST(threads_share_rows_out_while_others_write) {
  constexpr std::uint64_t kRows = 512, kBatches = 300, kMost = 2;
  const Counted shared(kRows, kMost);
  std::vector<std::vector<std::int64_t>> numbers(3);
  std::atomic<bool> over = false;
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < numbers.size(); ++t) {
    threads.emplace_back([&, t] {
      Consumer consumer(shared, t + 1);
      std::vector<std::int64_t> rows(16), tickets(16);
      for (std::uint64_t key = t << 32;; ++key) {
        const bool last = over;
        const std::uint64_t n = consumer.index.claim(key, 16, rows.data(), tickets.data());
        numbers[t].insert(numbers[t].end(), tickets.begin(), tickets.begin() + static_cast<std::ptrdiff_t>(n));
        if (n == 0 && last) return;
      }
    });
  }
  {
    Consumer writer(shared);
    for (std::uint64_t i = 0; i < kBatches; ++i) writer.append(1 + i % 40);
  }
  over = true;
  for (std::thread& thread : threads) thread.join();
  std::map<std::int64_t, std::uint64_t> counts;
  for (const auto& some : numbers) {
    for (const std::int64_t number : some) ++counts[number];
  }
  for (const auto& [number, count] : counts) EXPECT(count <= kMost);
  const Consumer last(shared, 5);
  for (std::uint64_t row = 0; row < kRows; ++row) {  // what is there now was drawn as often as it may be
    EXPECT_EQ(counts[static_cast<std::int64_t>(number_of(last.control.word(row).load()))], kMost);
  }
}

TEST(memory_that_is_no_counts_is_refused) {
  std::vector<std::byte> memory(Consumption::bytes(10));
  EXPECT_THROWS(std::invalid_argument, Consumption(memory, nullptr));
  EXPECT_THROWS(std::invalid_argument, Consumption::format(memory, 11, 1));
  EXPECT_THROWS(std::invalid_argument, Consumption::format(memory, 10, 0));
  EXPECT_THROWS(std::invalid_argument, Consumption::bytes(std::uint64_t{1} << 32));
  Consumption::format(memory, 10, 1);
  EXPECT_THROWS(std::invalid_argument, Consumption(std::span(memory).first(memory.size() - 1), nullptr));
  reinterpret_cast<ConsumptionHeader*>(memory.data())->rows = 1 << 20;
  EXPECT_THROWS(std::invalid_argument, Consumption(memory, nullptr));
}
