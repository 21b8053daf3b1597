// One thread: the store against a model of plain vectors, its errors, and its draws.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "blocks.h"
#include "core/check.h"
#include "core/pool.h"
#include "core/store.h"
#include "expect.h"

using namespace engram;

namespace {

using Sizes = std::vector<std::uint64_t>;
using Indices = std::vector<std::int64_t>;
constexpr std::int64_t kMin64 = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kMax64 = std::numeric_limits<std::int64_t>::max();

Sizes iota(std::uint64_t n) {
  Sizes values(n);
  std::iota(values.begin(), values.end(), std::uint64_t{0});
  return values;
}

Indices rows_from(std::int64_t first, std::uint64_t n) {
  Indices rows(n);
  std::iota(rows.begin(), rows.end(), first);
  return rows;
}

std::vector<std::byte> copy(std::span<const std::byte> bytes) { return {bytes.begin(), bytes.end()}; }

/// What a store is, but for the remains of old claims: to see that nothing changed.
struct Snapshot {
  explicit Snapshot(const Blocks& blocks) {
    tickets = copy(blocks.tickets);
    fixed = copy(blocks.control.first(3 * kPage));
    lanes = copy(blocks.control.last(blocks.geometry.lanes * sizeof(Lane)));
    for (const Field& field : blocks.fields) {
      data.push_back(copy({field.data, field.row_bytes * blocks.geometry.capacity}));
    }
  }
  bool operator==(const Snapshot&) const = default;
  std::vector<std::byte> fixed, lanes, tickets;
  std::vector<std::vector<std::byte>> data;
};

// ---- the model -----------------------------------------------------------------------------------------------------

/// A store beside plain vectors that hold what it should hold. Every operation is done on both.
class Pair {
 public:
  Pair(Geometry g, const Sizes& row_bytes, Dice& dice)
      : heap_(g, row_bytes), store_(heap_.open()), dice_(dice), geometry_(g), rows_(g.capacity), lanes_(g.lanes) {
    for (const std::uint64_t bytes : row_bytes) data_.emplace_back(g.capacity * bytes);
  }

  void append() {
    const std::uint64_t lane = dice_.below(geometry_.lanes), n = batch();
    Rows columns(heap_.fields, n);
    randomise(columns);
    Indices rows(n, -7);
    const bool quiet = dice_.below(4) == 0;  // nobody asks for the rows
    EXPECT_EQ(store_.append(lane, n, columns.in, quiet ? nullptr : rows.data()), next_);
    for (std::uint64_t i = 0; i < n; ++i) {
      const std::uint64_t row = step(lane);
      if (!quiet) EXPECT_EQ(rows[i], row);
      write(row, next_ + i, columns, i, all());
    }
    next_ += n;
    written_ += n;
  }

  void append_by_lane() {
    const std::uint64_t n = batch();
    Rows columns(heap_.fields, n);
    randomise(columns);
    Indices lane_of(n), rows(n, -7);
    for (auto& lane : lane_of) lane = static_cast<std::int64_t>(dice_.below(geometry_.lanes));
    const bool quiet = dice_.below(4) == 0;
    EXPECT_EQ(store_.append_by_lane(lane_of.data(), n, columns.in, quiet ? nullptr : rows.data()), next_);
    for (std::uint64_t i = 0; i < n; ++i) {
      const std::uint64_t row = step(static_cast<std::uint64_t>(lane_of[i]));
      if (!quiet) EXPECT_EQ(rows[i], row);
      write(row, next_ + i, columns, i, all());
    }
    next_ += n;
    written_ += n;
  }

  void scatter(bool grow) {
    const std::uint64_t n = dice_.in(0, 6);
    Sizes which = iota(data_.size());
    for (std::uint64_t i = which.size(); i > 1; --i) std::swap(which[i - 1], which[dice_.below(i)]);
    if (!which.empty() && !grow) which.resize(dice_.in(1, which.size()));
    Rows all_columns(heap_.fields, n);
    randomise(all_columns);
    std::vector<const std::byte*> columns;
    for (const std::uint64_t f : which) columns.push_back(all_columns.in[f]);
    Indices rows(n);
    bool live = true;
    for (auto& row : rows) {
      row = static_cast<std::int64_t>(dice_.below(geometry_.capacity));  // often one twice
      live = live && rows_[static_cast<std::uint64_t>(row)].state == State::committed;
    }
    if (!grow && !live) {
      const Snapshot before(heap_);
      EXPECT_THROWS(std::out_of_range, store_.scatter(rows.data(), n, which, columns, false));
      EXPECT(Snapshot(heap_) == before);
      return;
    }
    // The zeros below rows that grow the store have one number of their own, before those of the rows.
    const std::uint64_t t0 = store_.scatter(rows.data(), n, which, columns, grow), zeros = next_;
    bool grown = false;
    for (std::uint64_t i = 0; i < n; ++i) {
      const auto row = static_cast<std::uint64_t>(rows[i]);
      Lane& lane = lanes_[row / geometry_.lane_length];
      const std::uint64_t start = row - row % geometry_.lane_length;
      for (std::uint64_t gap = start + filled(row / geometry_.lane_length); gap < row; ++gap) {
        grown = true;
        rows_[gap] = {State::committed, zeros};
        for (std::uint64_t f = 0; f < data_.size(); ++f) std::fill_n(at(f, gap), bytes(f), std::byte{0});
      }
      lane.high = std::max(lane.high, row - start + 1);
    }
    next_ += grown;
    EXPECT_EQ(t0, next_);
    for (std::uint64_t i = 0; i < n; ++i) write(static_cast<std::uint64_t>(rows[i]), next_ + i, all_columns, i, which);
    next_ += n;
    if (grow) written_ += n;
  }

  void empty() {
    const bool keep = dice_.below(2) == 0;
    store_.control().empty(keep);
    rows_.assign(rows_.size(), {});
    lanes_.assign(lanes_.size(), {});
    ++next_;
    if (!keep) written_ = 0;
  }

  /// What a writer leaves that dies: positions reserved but not begun, rows half written; then a recovery.
  void crash() {
    const std::uint64_t lane = dice_.below(geometry_.lanes), reserved = dice_.in(0, 3), begun = dice_.in(0, reserved);
    const Control& control = store_.control();
    control.lane(lane).cursor.fetch_add(reserved);
    control.counters().next_ticket.fetch_add(reserved);
    for (std::uint64_t i = 0; i < reserved; ++i) {
      const std::uint64_t row = step(lane);
      if (i >= begun) continue;
      control.word(row).store(ticket(next_ + i, State::writing));
      rows_[row] = {State::voided, next_ + i};
    }
    next_ += reserved;
    control.recover();
    for (std::uint64_t row = 0; row < rows_.size(); ++row) {
      if (inside(row) && rows_[row].state == State::unused) rows_[row].state = State::voided;
    }
  }

  void check() {
    const Control& control = store_.control();
    std::uint64_t live = 0;
    Indices holes, wanted_moved, numbers(geometry_.capacity), rows = rows_from(0, geometry_.capacity);
    store_.tickets_of(rows.data(), rows.size(), numbers.data());
    for (std::uint64_t row = 0; row < rows_.size(); ++row) {
      const bool committed = rows_[row].state == State::committed;
      live += committed;
      if (!committed && inside(row)) holes.push_back(static_cast<std::int64_t>(row));
      if (!committed) wanted_moved.push_back(static_cast<std::int64_t>(row));
      EXPECT_EQ(numbers[row], committed ? static_cast<std::int64_t>(rows_[row].number) : -1);
    }
    EXPECT_EQ(control.size(), live);
    EXPECT_EQ(store_.holes(), holes);
    EXPECT_EQ(control.counters().next_ticket.load(), next_);
    EXPECT_EQ(control.counters().write_count.load(), written_);
    EXPECT_EQ(control.counters().lapped_rows.load(), 0u);
    for (std::uint64_t lane = 0; lane < geometry_.lanes; ++lane) {
      EXPECT_EQ(control.filled(lane), filled(lane));
      EXPECT_EQ(control.cursor_row(lane), lane * geometry_.lane_length + lanes_[lane].steps % geometry_.lane_length);
    }
    for (std::uint64_t i = 0; i < kClaims; ++i) EXPECT_EQ(control.participant(0).claims[i].t0.load(), 0u);
    check_gather(rows, wanted_moved);
    check_sample(live);
    check_changes();
  }

 private:
  struct Row {
    State state = State::unused;
    std::uint64_t number = 0;
  };
  struct Lane {
    std::uint64_t steps = 0, high = 0;  // since the last empty()
  };

  std::uint64_t bytes(std::uint64_t f) const { return heap_.fields[f].row_bytes; }
  std::byte* at(std::uint64_t f, std::uint64_t row) { return data_[f].data() + row * bytes(f); }
  Sizes all() const { return iota(data_.size()); }
  std::uint64_t batch() { return dice_.below(8) == 0 ? dice_.in(0, 3 * geometry_.lane_length) : dice_.in(0, 4); }
  std::uint64_t filled(std::uint64_t lane) const {
    return std::min(std::max(lanes_[lane].steps, lanes_[lane].high), geometry_.lane_length);
  }
  bool inside(std::uint64_t row) const { return row % geometry_.lane_length < filled(row / geometry_.lane_length); }
  std::uint64_t step(std::uint64_t lane) {
    return lane * geometry_.lane_length + lanes_[lane].steps++ % geometry_.lane_length;
  }
  void randomise(Rows& rows) {
    for (auto& column : rows.data) {
      const std::uint64_t salt = dice_.bits();
      for (std::uint64_t b = 0; b < column.size(); ++b) {
        column[b] = static_cast<std::byte>(mix(salt + b / 8) >> b % 8 * 8);
      }
    }
  }
  void write(std::uint64_t row, std::uint64_t number, Rows& columns, std::uint64_t i, const Sizes& which) {
    rows_[row] = {State::committed, number};
    for (const std::uint64_t f : which) {
      if (bytes(f) > 0) std::memcpy(at(f, row), columns.row(f, i), bytes(f));
    }
  }
  bool same(Rows& batch, std::uint64_t i, std::uint64_t row) {
    for (std::uint64_t f = 0; f < data_.size(); ++f) {
      if (bytes(f) > 0 && std::memcmp(batch.row(f, i), at(f, row), bytes(f)) != 0) return false;
    }
    return true;
  }

  // Reads every row, in a random order: those that hold nothing are reported, all others are right.
  void check_changes() {
    const std::uint64_t since = dice_.below(next_ + 2);
    Indices rows, numbers, wanted(rows_.size());
    EXPECT_EQ(store_.changes(since, rows, numbers), next_);
    std::iota(wanted.begin(), wanted.end(), 0);
    const auto row = [this](std::int64_t r) { return rows_[static_cast<std::uint64_t>(r)]; };
    std::erase_if(wanted, [&](std::int64_t r) { return row(r).state != State::committed || row(r).number < since; });
    std::stable_sort(wanted.begin(), wanted.end(), [&](std::int64_t a, std::int64_t b) { return row(a).number < row(b).number; });
    EXPECT_EQ(rows, wanted);
    for (std::uint64_t i = 0; i < std::min(rows.size(), wanted.size()); ++i) EXPECT_EQ(numbers[i], row(wanted[i]).number);
  }

  void check_gather(Indices rows, const Indices& wanted_moved) {
    Rows batch(heap_.fields, rows.size());
    EXPECT_EQ(store_.gather(rows.data(), rows.size(), all(), batch.out, nullptr, nullptr), wanted_moved);
    for (std::uint64_t i = rows.size(); i > 1; --i) std::swap(rows[i - 1], rows[dice_.below(i)]);
    // Now with expectations, some of them wrong.
    Indices expected(rows.size()), numbers(rows.size()), wanted;
    for (std::uint64_t i = 0; i < rows.size(); ++i) {
      const Row& row = rows_[static_cast<std::uint64_t>(rows[i])];
      const bool right = dice_.below(4) != 0;
      expected[i] = static_cast<std::int64_t>(row.number + (right ? 0 : dice_.in(1, 3)));
      if (!right || row.state != State::committed) wanted.push_back(static_cast<std::int64_t>(i));
    }
    EXPECT_EQ(store_.gather(rows.data(), rows.size(), all(), batch.out, expected.data(), numbers.data()), wanted);
    for (std::uint64_t i = 0; i < rows.size(); ++i) {
      const auto row = static_cast<std::uint64_t>(rows[i]);
      if (rows_[row].state != State::committed) continue;
      EXPECT_EQ(numbers[i], rows_[row].number);
      EXPECT(same(batch, i, row));
    }
  }

  void check_sample(std::uint64_t live) {
    const std::uint64_t n = dice_.in(1, 130);
    Rows batch(heap_.fields, n);
    Indices rows(n, -7), numbers(n, -7);
    if (live == 0) {
      EXPECT_THROWS(NothingLive, store_.sample_uniform(dice_.bits(), n, batch.out, rows.data(), numbers.data()));
      return;
    }
    store_.sample_uniform(dice_.bits(), n, batch.out, rows.data(), numbers.data());
    for (std::uint64_t i = 0; i < n; ++i) {
      const auto row = static_cast<std::uint64_t>(rows[i]);
      EXPECT(row < geometry_.capacity);
      if (row >= geometry_.capacity) continue;
      EXPECT(inside(row));
      EXPECT_EQ(rows_[row].state, State::committed);
      EXPECT_EQ(numbers[i], rows_[row].number);
      EXPECT(same(batch, i, row));
    }
  }

  Heap heap_;
  Store store_;
  Dice& dice_;
  Geometry geometry_;
  std::vector<Row> rows_;
  std::vector<Lane> lanes_;
  std::vector<std::vector<std::byte>> data_;
  std::uint64_t next_ = 1, written_ = 0;
};

void against_the_model(Geometry g, const Sizes& row_bytes, int operations, Dice& dice) {
  Pair pair(g, row_bytes, dice);
  const int before = expect::failures;
  pair.check();
  for (int i = 0; i < operations && expect::failures == before; ++i) {
    const std::uint64_t what = dice.below(32);
    if (what < 14) pair.append();
    else if (what < 20) pair.append_by_lane();
    else if (what < 25) pair.scatter(false);
    else if (what < 28) pair.scatter(true);
    else if (what < 31) pair.crash();
    else pair.empty();
    pair.check();
  }
  if (expect::failures != before) {
    std::fprintf(stderr, "  lanes %llu, lane length %llu, row bytes %s\n", static_cast<unsigned long long>(g.lanes),
                 static_cast<unsigned long long>(g.lane_length), expect::show(row_bytes).c_str());
  }
}

TEST(random_operations_agree_with_a_model) {
  Dice dice(2024);
  const std::vector<Sizes> schemas = {{}, {0}, {8}, {1, 0, 12}, {4, 28, 1}, {64, 3}, {128, 96}};
  for (const std::uint64_t lanes : {1, 2, 4}) {
    for (const std::uint64_t length : {1, 2, 3, 7, 8, 9, 33}) {
      for (const Sizes& schema : schemas) against_the_model(geometry(lanes, length), schema, 60, dice);
    }
  }
}

TEST(random_operations_on_rows_of_a_chunk_and_more) {
  // A chunk is 256 KiB: three rows of it, one row in a chunk, and a row larger than one.
  Dice dice(2025);
  for (const std::uint64_t bytes : {80000, 200000, 300000}) {
    for (const std::uint64_t length : {1, 4}) against_the_model(geometry(2, length), {bytes, 8}, 25, dice);
  }
}

// ---- what the model cannot say -------------------------------------------------------------------------------------

/// A store whose rows say their own id: rows [0, n) of each lane hold id 1000 * lane + position + 1.
struct Filled {
  Filled(Geometry g, const Sizes& row_bytes, const Sizes& per_lane) : heap(g, row_bytes), store(heap.open()) {
    for (std::uint64_t lane = 0; lane < per_lane.size(); ++lane) append(lane, per_lane[lane], 1000 * lane + 1);
  }
  void append(std::uint64_t lane, std::uint64_t n, std::uint64_t first_id) {
    Rows rows(heap.fields, n);
    for (std::uint64_t i = 0; i < n; ++i) rows.describe(i, first_id + i);
    store.append(lane, n, rows.in, nullptr);
  }
  /// Leaves a row as a writer does that died in it; recovered.
  void make_void(std::initializer_list<std::uint64_t> rows) {
    for (const std::uint64_t row : rows) {
      store.control().word(row).store(ticket(store.control().counters().next_ticket.fetch_add(1), State::writing));
    }
    store.control().recover();
  }
  Heap heap;
  Store store;
};

TEST(rows_outside_the_store_are_refused_everywhere) {
  Filled filled(geometry(2, 5), {8}, {5, 5});
  Store& store = filled.store;
  Rows rows(filled.heap.fields, 3);
  const Sizes which{0};
  const Snapshot before(filled.heap);
  for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{10}, std::int64_t{11}, std::int64_t{1} << 31,
                                 std::int64_t{1} << 61, kMax64, kMin64}) {
    for (const std::uint64_t at : {0, 1, 2}) {
      Indices indices{3, 4, 5};
      indices[at] = bad;
      EXPECT_THROWS(std::out_of_range, store.gather(indices.data(), 3, which, rows.out, nullptr, nullptr));
      EXPECT_THROWS(std::out_of_range, store.scatter(indices.data(), 3, which, rows.in, false));
      EXPECT_THROWS(std::out_of_range, store.scatter(indices.data(), 3, which, rows.in, true));
    }
    std::int64_t number = 7;
    store.tickets_of(&bad, 1, &number);
    EXPECT_EQ(number, -1);
    EXPECT_THROWS(std::out_of_range, check_row(bad, 10));
  }
  EXPECT_THROWS(std::out_of_range, check_row(0, 0));
  check_row(9, 10);
  EXPECT(Snapshot(filled.heap) == before);
}

TEST(wrong_lanes_fields_and_columns_are_refused) {
  Filled filled(geometry(2, 5), {8, 8}, {5, 5});
  Store& store = filled.store;
  Rows rows(filled.heap.fields, 3);
  const Columns in(rows.in);
  const Batch out(rows.out);
  const Indices indices{3, 4, 5};
  const Snapshot before(filled.heap);
  for (const std::uint64_t lane : {std::uint64_t{2}, ~std::uint64_t{0}}) {
    EXPECT_THROWS(std::invalid_argument, store.append(lane, 1, in, nullptr));
  }
  for (const std::int64_t lane : {std::int64_t{-1}, std::int64_t{2}, kMax64, kMin64}) {
    const Indices lane_of{0, 1, lane};
    EXPECT_THROWS(std::invalid_argument, store.append_by_lane(lane_of.data(), 3, in, nullptr));
  }
  EXPECT_THROWS(std::invalid_argument, store.append(0, 1, in.first(1), nullptr));
  const Sizes one{0}, both{0, 1}, outside{0, 2}, far{~std::uint64_t{0}};
  const std::int64_t* r = indices.data();
  EXPECT_THROWS(std::invalid_argument, store.gather(r, 3, one, out, nullptr, nullptr));
  EXPECT_THROWS(std::invalid_argument, store.gather(r, 3, both, out.first(1), nullptr, nullptr));
  EXPECT_THROWS(std::invalid_argument, store.gather(r, 3, outside, out, nullptr, nullptr));
  EXPECT_THROWS(std::invalid_argument, store.gather(r, 3, far, out.first(1), nullptr, nullptr));
  EXPECT_THROWS(std::invalid_argument, store.scatter(r, 3, one, in, false));
  EXPECT_THROWS(std::invalid_argument, store.scatter(r, 3, outside, in, false));
  EXPECT_THROWS(std::invalid_argument, store.scatter(r, 3, far, in.first(1), true));
  EXPECT_THROWS(std::invalid_argument, store.sample_uniform(1, 3, out.first(1), nullptr, nullptr));
  EXPECT_THROWS(std::invalid_argument, filled.heap.open(kParticipants));
  EXPECT(Snapshot(filled.heap) == before);
}

TEST(nothing_is_read_or_written_for_no_rows) {
  Filled filled(geometry(1, 5), {8}, {5});
  const Snapshot before(filled.heap);
  const std::byte* in[] = {nullptr};
  std::byte* out[] = {nullptr};
  const Sizes which{0};
  filled.store.append(0, 0, in, nullptr);
  filled.store.append_by_lane(nullptr, 0, in, nullptr);
  filled.store.scatter(nullptr, 0, which, in, false);
  filled.store.scatter(nullptr, 0, which, in, true);
  EXPECT(filled.store.gather(nullptr, 0, which, out, nullptr, nullptr).empty());
  filled.store.sample_uniform(1, 0, out, nullptr, nullptr);
  filled.store.tickets_of(nullptr, 0, nullptr);
  EXPECT(Snapshot(filled.heap) == before);
}

TEST(rows_may_be_picked_from_the_columns) {
  Filled filled(geometry(1, 6), {16, 8}, {6}), plain(geometry(1, 6), {16, 8}, {6});
  Rows rows(filled.heap.fields, 5), picked(filled.heap.fields, 3);
  const Indices where{4, 1, 4}, pick{3, 0, 4};
  for (std::uint64_t i = 0; i < 5; ++i) rows.describe(i, 100 + i);
  for (std::uint64_t i = 0; i < 3; ++i) picked.describe(i, 100 + static_cast<std::uint64_t>(pick[i]));
  const Sizes which{0, 1};
  const Snapshot before(filled.heap);
  for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{5}, kMax64, kMin64}) {
    const Indices outside{0, bad, 1};
    for (const bool grow : {false, true}) {
      EXPECT_THROWS(std::out_of_range, filled.store.scatter(where.data(), 3, which, rows.in, grow, outside.data(), 5));
    }
  }
  EXPECT(Snapshot(filled.heap) == before);
  for (const bool grow : {false, true}) {
    EXPECT_EQ(filled.store.scatter(where.data(), 3, which, rows.in, grow, pick.data(), 5),
              plain.store.scatter(where.data(), 3, which, picked.in, grow));
    EXPECT(Snapshot(filled.heap) == Snapshot(plain.heap));
  }
}

TEST(of_a_row_named_twice_the_last_entry_wins) {
  Filled filled(geometry(1, 4), {16}, {4});
  Rows rows(filled.heap.fields, 5);
  for (std::uint64_t i = 0; i < 5; ++i) rows.describe(i, 100 + i);
  const Indices indices{2, 1, 2, 2, 1};
  const Sizes which{0};
  EXPECT_EQ(filled.store.scatter(indices.data(), 5, which, rows.in, false), 5u);
  Rows batch(filled.heap.fields, 4);
  Indices now(4);
  EXPECT(filled.store.gather(rows_from(0, 4).data(), 4, which, batch.out, nullptr, now.data()).empty());
  EXPECT_EQ(now, (Indices{1, 9, 8, 4}));
  EXPECT_EQ(*batch.id(1), 104u);
  EXPECT_EQ(*batch.id(2), 103u);
}

TEST(a_patch_leaves_alone_what_no_longer_holds_what_is_expected) {
  Filled filled(geometry(1, 8), {16, 8}, {6});  // under the numbers 1 ... 6
  const Control& control = filled.store.control();
  control.word(3).store(ticket(4, State::writing));  // and is not waited for
  control.word(4).store(ticket(5, State::voided));
  Rows rows(filled.heap.fields, 9);
  for (std::uint64_t i = 0; i < 9; ++i) rows.describe(i, 100 + i);
  //              there  no row  older  being written  void  outside  again  newer than all  again, but under another number
  const Indices where{1, -1, 2, 3, 4, 7, 1, 0, 1}, expected{2, 5, 2, 4, 5, 8, 2, 7, 8};
  const Sizes which{1};
  Indices numbers(9);
  const Columns second = Columns(rows.in).subspan(1);
  EXPECT_EQ(filled.store.patch(where.data(), 9, which, second, expected.data(), numbers.data()).first, 7u);
  EXPECT_EQ(numbers, (Indices{2, -1, -1, -1, -1, -1, 2, -1, -1}));
  EXPECT_EQ(control.counters().patches.load(), 2u);
  EXPECT_EQ(control.counters().patches_dropped.load(), 7u);
  EXPECT_EQ(id_of(filled.heap.fields[1].data + 8, 8).value_or(0), 106u);
  for (const std::uint64_t row : {0, 2, 3, 4, 5}) EXPECT_EQ(id_of(filled.heap.fields[1].data + row * 8, 8).value_or(99), row + 1);
  EXPECT_EQ(id_of(filled.heap.fields[0].data + 16, 16).value_or(99), 2u);  // the other field stays
  const Indices outside{1, 8};
  EXPECT_THROWS(std::out_of_range, filled.store.patch(outside.data(), 2, which, second, expected.data(), numbers.data()));
  EXPECT_THROWS(std::invalid_argument, filled.store.patch(where.data(), 9, which, rows.in, expected.data(), numbers.data()));
  EXPECT_EQ(filled.store.patch(nullptr, 0, which, second, nullptr, nullptr).first, 16u);
}

TEST(growing_makes_the_rows_below_live_as_zeros) {
  // What the rows held before they were emptied must not shine through.
  Filled filled(geometry(2, 8), {16, 4}, {});
  Store& store = filled.store;
  for (const Field& field : filled.heap.fields) std::memset(field.data, 0x5A, field.row_bytes * 16);
  Rows rows(filled.heap.fields, 1);
  rows.describe(0, 42);
  const Sizes both{0, 1};
  const std::int64_t row = 8 + 5;
  store.scatter(&row, 1, both, rows.in, true);
  EXPECT_EQ(store.control().filled(0), 0u);
  EXPECT_EQ(store.control().filled(1), 6u);
  EXPECT_EQ(store.control().cursor_row(1), 8u);  // appends still begin at the first row
  EXPECT_EQ(store.control().size(), 6u);
  EXPECT(store.holes().empty());
  Rows batch(filled.heap.fields, 6);
  EXPECT(store.gather(rows_from(8, 6).data(), 6, both, batch.out, nullptr, nullptr).empty());
  for (std::uint64_t i = 0; i < 6; ++i) EXPECT_EQ(*id_of(batch.row(0, i), 16), i == 5 ? 42u : 0u);
  for (std::uint64_t b = 0; b < 5 * 4; ++b) EXPECT(batch.data[1][b] == std::byte{0});
  // Rows of the other lane stay as they were, and so does what lies above.
  std::byte untouched[16];
  std::memset(untouched, 0x5A, sizeof untouched);
  for (const std::uint64_t other : {0, 7, 14, 15}) {
    EXPECT(std::memcmp(filled.heap.fields[0].data + other * 16, untouched, 16) == 0);
    EXPECT_EQ(store.control().word(other).load(), 0u);
  }
}

TEST(a_store_without_fields_keeps_the_words_alone) {
  const Heap heap(geometry(1, 3), {});
  Store store = heap.open();
  Indices rows(5);
  EXPECT_EQ(store.append(0, 5, {}, rows.data()), 1u);
  EXPECT_EQ(rows, (Indices{0, 1, 2, 0, 1}));
  Indices drawn(100), of(100);
  store.sample_uniform(9, 100, {}, drawn.data(), of.data());
  for (std::uint64_t i = 0; i < 100; ++i) EXPECT_EQ(of[i], (Indices{4, 5, 3})[static_cast<std::uint64_t>(drawn[i])]);
}

TEST(a_field_that_is_added_moves_with_the_others) {
  const Heap heap(geometry(1, 4), {8});
  Store store(heap.view(), {}, 0);
  store.append(0, 3, {}, nullptr);
  for (std::uint64_t row = 0; row < 3; ++row) describe(heap.fields[0].data + row * 8, 8, 70 + row);
  store.add_field(heap.fields[0]);
  EXPECT_EQ(store.fields(), 1u);
  EXPECT_EQ(store.all().size(), 1u);
  Rows written(heap.fields, 2);
  for (std::uint64_t i = 0; i < 2; ++i) written.describe(i, 80 + i);
  store.append(0, 2, written.in, nullptr);
  Rows read(heap.fields, 4);
  EXPECT(store.gather(rows_from(0, 4).data(), 4, store.all(), read.out, nullptr, nullptr).empty());
  for (std::uint64_t i = 0; i < 4; ++i) EXPECT_EQ(*read.id(i), (Sizes{81, 71, 72, 80})[i]);
  EXPECT_THROWS(std::invalid_argument, store.append(0, 1, {}, nullptr));
  const std::int64_t row = 2;
  store.scatter(&row, 1, {}, {}, false);  // an edit of fields that lie elsewhere
  EXPECT(store.gather(&row, 1, store.all(), read.out, nullptr, nullptr).empty());
  EXPECT_EQ(*read.id(0), 72u);
}

TEST(zeros_of_a_gap_reach_a_field_that_was_added) {
  const Heap heap(geometry(1, 4), {8});
  Store store(heap.view(), {}, 0);
  store.add_field(heap.fields[0]);
  std::memset(heap.fields[0].data, 0x5A, 4 * 8);
  Rows written(heap.fields, 1);
  written.describe(0, 9);
  const std::int64_t row = 2;
  store.scatter(&row, 1, store.all(), written.in, true);
  Rows read(heap.fields, 3);
  EXPECT(store.gather(rows_from(0, 3).data(), 3, store.all(), read.out, nullptr, nullptr).empty());
  for (std::uint64_t i = 0; i < 3; ++i) EXPECT_EQ(*read.id(i), i == 2 ? 9u : 0u);
}

std::vector<std::byte> eight_bytes(std::uint64_t value) {
  std::vector<std::byte> bytes(8);
  std::memcpy(bytes.data(), &value, 8);
  return bytes;
}

TEST(a_write_may_leave_out_a_field_that_was_added_and_fills_it) {
  const Heap heap(geometry(2, 4), {8, 8});
  Store store(heap.view(), {heap.fields[0]}, 0);
  Rows written(heap.fields, 8), read(heap.fields, 8);
  for (std::uint64_t i = 0; i < 8; ++i) written.describe(i, 80 + i);
  const Columns first = Columns(written.in).first(1);
  store.append(0, 2, first, nullptr);
  std::memset(heap.fields[1].data, 0x5A, 8 * 8);
  for (std::uint64_t row = 0; row < 2; ++row) std::memcpy(heap.fields[1].row(row), eight_bytes(7).data(), 8);
  store.add_field(heap.fields[1], eight_bytes(7));
  EXPECT_THROWS(std::invalid_argument, store.add_field(heap.fields[1], std::vector<std::byte>(7)));
  store.append(0, 1, first, nullptr);               // row 2
  const std::int64_t lanes[] = {1, 0};
  store.append_by_lane(lanes, 2, first, nullptr);   // rows 4 and 3
  const std::int64_t rows[] = {6};
  store.scatter(rows, 1, store.all().first(1), first, true);  // and row 5, of zeros
  store.append_at(1, 1, 3, first, nullptr);         // rows 5, 6 and 7
  EXPECT_THROWS(std::invalid_argument, store.append(0, 1, {}, nullptr));
  EXPECT(store.gather(rows_from(0, 8).data(), 8, store.all(), read.out, nullptr, nullptr).empty());
  for (std::uint64_t i = 0; i < 8; ++i) {
    std::uint64_t filled = 0;
    std::memcpy(&filled, read.data[1].data() + i * 8, 8);
    EXPECT_EQ(filled, 7u);
  }
  store.append(0, 1, written.in, nullptr);  // row 0, with the field
  // A reader that knows one field reads one.
  EXPECT(store.gather(rows_from(0, 8).data(), 8, store.all().first(1), Batch(read.out).first(1), nullptr, nullptr).empty());
  store.sample_uniform(3, 8, Batch(read.out).first(1), nullptr, nullptr);
  store.sample_uniform(3, 8, read.out, nullptr, nullptr);
}

TEST(fields_of_another_process_are_adopted_before_a_row_is_written) {
  const Heap heap(geometry(1, 4), {8, 8});
  Store store(heap.view(), {heap.fields[0]}, 0);
  std::uint64_t adopted = 0;
  store.on_new_fields([&] {
    ++adopted;
    const std::uint64_t epoch = heap.view().counters().fields_epoch.load();
    if (store.fields() == 1) store.add_field(heap.fields[1], eight_bytes(5));
    store.knows_fields(epoch);
  });
  Rows written(heap.fields, 1), read(heap.fields, 1);
  written.describe(0, 9);
  const Columns first = Columns(written.in).first(1);
  store.append(0, 1, first, nullptr);
  EXPECT_EQ(adopted, 0u);
  heap.view().counters().fields_epoch.fetch_add(1);
  store.append(0, 1, first, nullptr);
  EXPECT_EQ(adopted, 1u);
  store.find_fields();
  EXPECT_EQ(adopted, 1u);
  const std::int64_t row = 1;
  EXPECT(store.gather(&row, 1, store.all(), read.out, nullptr, nullptr).empty());
  std::uint64_t filled = 0;
  std::memcpy(&filled, read.data[1].data(), 8);
  EXPECT_EQ(filled, 5u);
}

TEST(a_write_waits_for_another_writer_of_its_row_but_not_for_ever) {
  // Row 1 is in the hands of a writer that never comes back: everything else of the batches is written, and the wait
  // ends. Beside it a writer that does come back.
  EXPECT(kUsualLimit == std::chrono::seconds(5));
  Filled stuck(geometry(1, 4), {8}, {4}), brief(geometry(1, 4), {8}, {4});
  for (Filled* filled : {&stuck, &brief}) filled->store.control().word(1).store(ticket(5, State::writing));
  for (Filled* filled : {&stuck, &brief}) filled->store.control().counters().next_ticket = 6;
  std::thread finisher([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    brief.store.control().word(1).store(ticket(5, State::committed));
  });
  try {
    brief.append(0, 4, 50);
  } catch (const Stalled& e) {
    expect::fail(__FILE__, __LINE__, e.what());
  }
  finisher.join();
  EXPECT_EQ(brief.store.control().size(), 4u);
  EXPECT(brief.store.holes().empty());
  const std::int64_t row = 1;
  const Sizes which{0};
  Rows rows(stuck.heap.fields, 1);
  const Impatient impatient(std::chrono::milliseconds(300));
  const auto start = std::chrono::steady_clock::now();
  std::thread scatterer(
      [&] { EXPECT_THROWS(Stalled, stuck.store.scatter(&row, 1, which, rows.in, true)); });
  EXPECT_THROWS(Stalled, stuck.append(0, 3, 60));
  scatterer.join();
  const auto waited = std::chrono::steady_clock::now() - start;
  EXPECT(waited > std::chrono::milliseconds(300));
  EXPECT(waited < std::chrono::seconds(100));
  Rows batch(stuck.heap.fields, 4);
  EXPECT_EQ(stuck.store.gather(rows_from(0, 4).data(), 4, which, batch.out, nullptr, nullptr), (Indices{1}));
  EXPECT_EQ(*batch.id(0), 60u);  // written before the wait
  EXPECT_EQ(stuck.store.control().word(1).load(), ticket(5, State::writing));
  for (const Claim& claim : stuck.store.control().participant(0).claims) EXPECT_EQ(claim.t0.load(), 0u);
}

TEST(what_a_write_that_waits_in_vain_has_reserved_and_not_begun_is_void) {
  Filled stuck(geometry(1, 6), {8}, {1});
  stuck.store.control().word(2).store(ticket(9, State::writing));
  stuck.store.control().counters().next_ticket = 10;
  const Impatient impatient(std::chrono::milliseconds(5));
  EXPECT_THROWS(Stalled, stuck.append(0, 4, 50));  // rows 1, 2, 3, 4
  EXPECT_EQ(stuck.store.control().size(), 3u);      // and row 2, which somebody has
  EXPECT_EQ(state_of(stuck.store.control().word(3).load()), State::voided);
  EXPECT_EQ(state_of(stuck.store.control().word(4).load()), State::voided);
  EXPECT_EQ(stuck.store.control().counters().void_rows.load(), 2u);
}

TEST(a_write_that_waits_in_vain_shows_nothing_of_a_store_that_was_emptied_meanwhile) {
  const Impatient impatient(std::chrono::seconds(2));
  Filled stuck(geometry(1, 8), {8}, {5});
  const Control& control = stuck.store.control();
  control.word(5).store(ticket(6, State::writing));  // two rows in the hands of others: one lets go of his
  control.word(7).store(ticket(7, State::writing));
  control.counters().next_ticket = 8;
  std::thread writer([&] { EXPECT_THROWS(Stalled, stuck.append(0, 3, 50)); });
  while (control.lane(0).cursor < 8) std::this_thread::yield();
  stuck.heap.open(1).empty(true);
  control.word(5).store(ticket(6, State::committed));
  writer.join();
  EXPECT_EQ(control.size(), 0u);
  for (const std::uint64_t row : {5, 6}) EXPECT_EQ(state_of(control.word(row).load()), State::unused);
}

// The append has its numbers and waits for another row of its batch while the row's earlier step is edited, by a process that may
// die in the middle.
void edit_a_row_before_its_append_comes(State edit) {
  Filled stuck(geometry(1, 4), {8, 16}, {4});
  const Control& control = stuck.store.control();
  control.word(0).store(ticket(1, State::writing));
  std::thread writer([&] { stuck.append(0, 2, 50); });
  while (control.counters().next_ticket < 7) std::this_thread::yield();
  Rows change(stuck.heap.fields, 1);
  change.describe(0, 90);
  const std::int64_t row[] = {1};
  const std::uint64_t which[] = {1};
  Store(stuck.heap.open(1)).scatter(row, 1, which, Columns(change.in).subspan(1), false);
  EXPECT(is_committed_as(control.word(1).load(), 7));
  if (edit == State::voided) {
    control.counters().void_rows.fetch_add(1);
    control.word(1).store(ticket(7, State::voided));
  }
  control.word(0).store(ticket(1, State::committed));
  writer.join();
  Rows batch(stuck.heap.fields, 2);
  const Sizes all{0, 1};
  EXPECT(stuck.store.gather(rows_from(0, 2).data(), 2, all, batch.out, nullptr, nullptr).empty());
  EXPECT_EQ(*batch.id(1), 51u);
  EXPECT_EQ(control.word(1).load(), ticket(6, State::committed));
  EXPECT_EQ(control.lap(1).load(), 2u);
  EXPECT_EQ(control.counters().lapped_rows.load(), 0u);
  EXPECT_EQ(control.size(), 4u);
}

TEST(an_edit_of_the_earlier_step_does_not_displace_an_append) { edit_a_row_before_its_append_comes(State::committed); }
TEST(nor_does_one_whose_process_died) { edit_a_row_before_its_append_comes(State::voided); }

TEST(an_append_from_before_the_store_was_emptied_takes_no_row_over) {
  Filled stuck(geometry(1, 4), {8}, {4});
  const Control& control = stuck.store.control();
  control.word(0).store(ticket(1, State::writing));
  std::thread writer([&] { stuck.append(0, 2, 50); });
  while (control.counters().next_ticket < 7) std::this_thread::yield();
  stuck.heap.open(1).empty(true);
  const std::uint64_t emptied = number_of(control.word(1).load());
  control.raise_high(0, 2);  // one that writes row 1 by number dies
  control.counters().void_rows.fetch_add(1);
  control.word(1).store(ticket(emptied, State::voided));
  control.word(0).store(ticket(1, State::committed));
  writer.join();
  EXPECT_EQ(control.word(1).load(), ticket(emptied, State::voided));
}

TEST(a_write_that_was_lapped_is_skipped_and_counted) {
  // Another writer is a lap ahead already (its number is larger), or will be (its cursor is further).
  Filled filled(geometry(1, 4), {8}, {4});
  const Control& control = filled.store.control();
  control.word(2).store(ticket(1000, State::committed));
  control.lap(2).store(3);
  filled.append(0, 4, 70);
  EXPECT_EQ(control.counters().lapped_rows.load(), 1u);
  EXPECT_EQ(control.word(2).load(), ticket(1000, State::committed));
  for (const std::uint64_t row : {0, 1, 3}) EXPECT_EQ(control.word(row).load(), ticket(5 + row, State::committed));
  Rows batch(filled.heap.fields, 4);
  const Sizes which{0};
  EXPECT(filled.store.gather(rows_from(0, 4).data(), 4, which, batch.out, nullptr, nullptr).empty());
  for (const std::uint64_t row : {0, 1, 2, 3}) EXPECT_EQ(*batch.id(row), row == 2 ? 3u : 70 + row);
}

// ---- draws ---------------------------------------------------------------------------------------------------------

std::vector<std::uint64_t> draw_counts(const Store& store, std::uint64_t capacity, std::uint64_t draws) {
  std::vector<std::uint64_t> counts(capacity);
  Indices rows(500);
  std::vector<Field> fields{{nullptr, 8}};
  Rows batch(fields, 500);
  for (std::uint64_t key = 0; key * 500 < draws; ++key) {
    store.sample_uniform(key, 500, batch.out, rows.data(), nullptr);
    for (const std::int64_t row : rows) ++counts[static_cast<std::uint64_t>(row)];
  }
  return counts;
}

void expect_uniform_over(const Store& store, std::uint64_t capacity, const Sizes& live, std::uint64_t draws = 200000) {
  std::vector<std::uint64_t> counts = draw_counts(store, capacity, draws), kept;
  for (const std::uint64_t row : live) {
    kept.push_back(counts[row]);
    counts[row] = 0;
  }
  EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), std::uint64_t{0}), 0u);  // nothing else was drawn
  if (kept.size() > 1) EXPECT_UNIFORM(kept);
}

TEST(draws_are_uniform_over_the_live_rows) {
  expect_uniform_over(Filled(geometry(1, 100), {8}, {100}).store, 100, iota(100));
  expect_uniform_over(Filled(geometry(1, 100), {8}, {37}).store, 100, iota(37));
  expect_uniform_over(Filled(geometry(1, 100), {8}, {250}).store, 100, iota(100));
  expect_uniform_over(Filled(geometry(4, 5), {8}, {5, 5, 5, 5}).store, 20, iota(20));
}

TEST(draws_are_uniform_over_partly_filled_lanes) {
  Filled filled(geometry(5, 10), {8}, {3, 0, 10, 1, 7});
  const Sizes live = {0, 1, 2, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 40, 41, 42, 43, 44, 45, 46};
  expect_uniform_over(filled.store, 50, live);
  EXPECT_EQ(filled.store.control().size(), live.size());
}

TEST(a_void_row_that_an_emptying_has_forgotten_is_not_counted_off) {
  const Heap heap(geometry(1, 3), {16});
  Store store = heap.open();
  const Control& control = store.control();
  control.counters().next_ticket = 9;
  control.word(0).store(ticket(8, State::voided));  // void_rows is 0: empty() has just been there
  Rows rows(heap.fields, 1);
  rows.describe(0, 1);
  store.append(0, 1, rows.in, nullptr);
  EXPECT_EQ(control.counters().void_rows.load(), 0u);
  EXPECT_EQ(control.size(), 1u);
}

// ---- indexes ---------------------------------------------------------------------------------------------------------

struct Listener : engram::Index {
  std::vector<std::string> heard;
  static std::string list(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0) {
    std::string text = " @" + std::to_string(t0);
    for (std::uint64_t i = 0; i < n; ++i) text += " " + std::to_string(rows[i]);
    return text;
  }
  void written(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0) override {
    heard.push_back("written" + list(rows, n, t0));
  }
  void edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0, std::span<const std::uint64_t> which,
              std::uint64_t) override {
    heard.push_back("edited" + list(rows, n, t0) + " field " + std::to_string(which[0]));
  }
  void lost(const std::int64_t*, std::uint64_t) override {}
  void emptied() override { heard.push_back("emptied"); }
};

TEST(indexes_hear_of_every_write) {
  const Heap heap(geometry(2, 3), {16, 24});
  Store store = heap.open();
  Rows rows(heap.fields, 4);
  for (std::uint64_t i = 0; i < 4; ++i) rows.describe(i, i + 1);
  store.append(0, 1, rows.in, nullptr);  // before anybody listens
  Listener a, b;
  store.attach(a);
  store.append(1, 2, rows.in, nullptr);
  store.attach(b);
  const std::int64_t lanes[] = {1, 0, 1};
  store.append_by_lane(lanes, 3, rows.in, nullptr);
  const std::int64_t edited[] = {4, 0};
  const std::uint64_t which[] = {1};
  store.scatter(edited, 2, which, Columns(rows.in).subspan(1), false);
  const std::uint64_t all[] = {0, 1};
  store.empty(false);
  const std::int64_t grown[] = {2};
  store.scatter(grown, 1, all, rows.in, true);  // rows 0 and 1 become live as zeros
  const std::vector<std::string> later = {"written @4 5 1 3", "edited @7 4 0 field 1", "emptied",
                                          "written @10 0",    "written @10 1",         "written @11 2"};
  EXPECT(b.heard == later);
  EXPECT_EQ(a.heard.size(), 7u);
  EXPECT_EQ(a.heard[0], "written @2 3 4");
}

TEST(draws_are_uniform_beside_void_rows) {
  Filled filled(geometry(2, 10), {8}, {10, 4});
  filled.make_void({0, 5, 6, 13});
  EXPECT_EQ(filled.store.control().size(), 10u);
  expect_uniform_over(filled.store, 20, {1, 2, 3, 4, 7, 8, 9, 10, 11, 12});
}

TEST(a_rank_that_is_being_written_is_waited_for_beside_void_rows) {
  Filled filled(geometry(2, 10), {8}, {10, 4});
  filled.make_void({0, 5, 6, 13});
  const Control& control = filled.store.control();
  Word& word = control.word(4);
  const std::uint64_t before = word.load();
  word.store(ticket(control.counters().next_ticket.fetch_add(1), State::writing));
  std::thread writer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    word.store(before);
  });
  Rows batch(filled.heap.fields, 10);
  Indices ranks(10);
  std::iota(ranks.begin(), ranks.end(), 0);
  EXPECT_EQ(control.size(), ranks.size());
  try {
    filled.store.read_ranked(ranks.data(), ranks.size(), batch.out, nullptr);
  } catch (...) {
    writer.join();
    throw;
  }
  writer.join();
  EXPECT((ranks == Indices{1, 2, 3, 4, 7, 8, 9, 10, 11, 12}));
}

TEST(a_rank_whose_writer_died_is_not_waited_for) {
  // Read when nothing is void; a recovery makes the row void while it is waited for.
  Filled filled(geometry(1, 10), {8}, {10});
  const Control& control = filled.store.control();
  const std::uint64_t number = control.counters().next_ticket.fetch_add(1);
  control.word(4).store(ticket(number, State::writing));
  std::thread recoverer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    control.counters().void_rows.fetch_add(1);
    control.word(4).store(ticket(number, State::voided));
  });
  Rows batch(filled.heap.fields, 3);
  Indices ranks{4, 5, 6}, all(10);
  const auto begin = std::chrono::steady_clock::now();
  try {
    filled.store.read_ranked(ranks.data(), 3, batch.out, nullptr);
  } catch (const std::exception& error) {
    expect::fail(__FILE__, __LINE__, error.what());
  }
  recoverer.join();
  EXPECT(std::chrono::steady_clock::now() - begin < std::chrono::seconds(30));
  std::sort(ranks.begin(), ranks.end());
  EXPECT(std::adjacent_find(ranks.begin(), ranks.end()) == ranks.end());
  EXPECT(std::find(ranks.begin(), ranks.end(), 4) == ranks.end());
  // Ten rows there are no more.
  control.word(4).store(ticket(number, State::writing));
  control.counters().void_rows = 0;
  std::iota(all.begin(), all.end(), 0);
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    control.word(4).store(ticket(number, State::voided));
  });
  Rows ten(filled.heap.fields, 10);
  EXPECT_THROWS(NothingLive, filled.store.read_ranked(all.data(), 10, ten.out, nullptr));
  other.join();
}

TEST(draws_are_uniform_where_nearly_everything_is_void) {
  Filled filled(geometry(2, 1500), {8}, {1500, 1500});
  const Sizes live = {0, 700, 2999};
  for (std::uint64_t row = 0; row < 3000; ++row) {
    if (std::find(live.begin(), live.end(), row) == live.end()) {
      filled.store.control().word(row).store(ticket(9000 + row, State::writing));
    }
  }
  filled.store.control().recover();
  EXPECT_EQ(filled.store.control().size(), 3u);
  expect_uniform_over(filled.store, 3000, live, 10000);
}

TEST(draws_find_the_few_rows_of_a_large_batch_that_is_still_being_written) {
  // A first batch of 3,000 rows has reserved its place; its first rows are there, the others are not begun. They are
  // not void, so no counter says how many there are.
  Filled filled(geometry(1, 3000), {8}, {2});
  filled.store.control().lane(0).cursor.fetch_add(2998);
  expect_uniform_over(filled.store, 3000, {0, 1}, 10000);
}

TEST(nothing_live_is_said_and_not_searched_for) {
  Filled filled(geometry(2, 4), {8}, {});
  Rows batch(filled.heap.fields, 10);
  const auto draw = [&] { filled.store.sample_uniform(3, 10, batch.out, nullptr, nullptr); };
  EXPECT_THROWS(NothingLive, draw());
  filled.append(1, 2, 1);
  draw();
  filled.make_void({4, 5});
  EXPECT_THROWS(NothingLive, draw());  // void
  filled.append(1, 1, 9);              // row 6
  draw();
  for (std::uint64_t i = 0; i < 10; ++i) EXPECT_EQ(*batch.id(i), 9u);
  filled.store.control().empty(false);
  EXPECT_THROWS(NothingLive, draw());
  filled.store.control().lane(0).cursor.fetch_add(3);
  EXPECT_THROWS(NothingLive, draw());  // reserved, not begun
}

TEST(draws_depend_on_the_key_and_on_nothing_else) {
  // Rows of 8 bytes and of 20 kB, batches on both sides of what is worth a second thread; void rows, so that there are
  // redraws too.
  for (const std::uint64_t bytes : {8, 20000}) {
    Filled filled(geometry(3, 40), {bytes, 16}, {40, 11, 25});
    filled.make_void({0, 3, 39, 41, 85});
    for (const std::uint64_t n : {1, 63, 64, 65, 300, 40000}) {
      if (bytes * n > 10000000) continue;
      Indices first_rows;
      for (const std::size_t threads : {1, 2, 4, 3, 1}) {
        set_num_threads(threads);
        Rows batch(filled.heap.fields, n);
        Indices rows(n), numbers(n), other(n);
        filled.store.sample_uniform(77, n, batch.out, rows.data(), numbers.data());
        if (first_rows.empty()) first_rows = rows;
        EXPECT(rows == first_rows);
        for (std::uint64_t i = 0; i < n; ++i) {
          const auto row = static_cast<std::uint64_t>(rows[i]);
          EXPECT(batch.id(i) == 1000 * (row / 40) + row % 40 + 1);
          EXPECT_EQ(ticket(static_cast<std::uint64_t>(numbers[i]), State::committed),
                    filled.store.control().word(row).load());
        }
        filled.store.sample_uniform(78, n, batch.out, other.data(), nullptr);
        if (n > 60) EXPECT(other != rows);
        // A shorter batch begins like a longer one.
        filled.store.sample_uniform(77, n / 2, batch.out, other.data(), nullptr);
        EXPECT(std::equal(other.begin(), other.begin() + static_cast<std::ptrdiff_t>(n / 2), rows.begin()));
      }
    }
  }
}

TEST(gathers_do_not_depend_on_threads) {
  Filled filled(geometry(2, 50), {20000, 8}, {50, 50});
  filled.make_void({7, 64});
  Dice dice(5);
  constexpr std::uint64_t n = 200;
  Indices rows(n), wanted;
  for (auto& row : rows) row = static_cast<std::int64_t>(dice.below(100));
  for (std::uint64_t i = 0; i < n; ++i) {
    if (rows[i] == 7 || rows[i] == 64) wanted.push_back(static_cast<std::int64_t>(i));
  }
  EXPECT(!wanted.empty());
  for (const std::size_t threads : {1, 2, 4}) {
    set_num_threads(threads);
    Rows batch(filled.heap.fields, n);
    const Sizes which{1, 0};  // in an order of its own
    std::byte* out[] = {batch.out[1], batch.out[0]};
    EXPECT_EQ(filled.store.gather(rows.data(), n, which, out, nullptr, nullptr), wanted);
    for (std::uint64_t i = 0; i < n; ++i) {
      if (rows[i] == 7 || rows[i] == 64) continue;
      const auto row = static_cast<std::uint64_t>(rows[i]);
      EXPECT(batch.id(i) == 1000 * (row / 50) + row % 50 + 1);
    }
  }
}

// ---- damage --------------------------------------------------------------------------------------------------------

TEST(changes_beside_unfinished_writes_come_again) {
  Heap heap({8, 1, 8}, {8});
  Store store(heap.open());
  Rows columns(heap.fields, 3);
  Indices rows, numbers;
  Participant& other = store.control().participant(3);
  std::optional<ClaimGuard> claim;
  claim.emplace(other);
  claim->note(store.control().counters().next_ticket.fetch_add(1), 1, -1, 0);  // of row 7, say
  store.control().raise_high(0, 8);
  store.append(0, 3, columns.in, nullptr);
  EXPECT_EQ(store.changes(1, rows, numbers), 1u);
  EXPECT_EQ(numbers, (Indices{2, 3, 4}));
  store.control().word(7).store(ticket(1, State::committed));
  claim.reset();
  rows.clear(), numbers.clear();
  EXPECT_EQ(store.changes(1, rows, numbers), 5u);
  EXPECT_EQ(rows, (Indices{7, 0, 1, 2}));
  // One that is about to note its numbers is waited for.
  claim.emplace(other);
  const std::uint64_t t0 = store.control().counters().next_ticket.fetch_add(1);
  std::thread writer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    claim->note(t0, 1, -1, 0);
  });
  EXPECT_EQ(store.changes(5, rows, numbers), t0);
  writer.join();
}

TEST(a_row_that_is_just_being_forgotten_is_no_change_and_no_row_to_edit) {
  Filled filled(geometry(1, 8), {8}, {2});
  filled.store.control().word(5).store(ticket(2, State::committed));  // outside the extent: an emptying is about to come to it
  Indices rows, numbers;
  const Sizes which{0};
  const std::int64_t row = 5;
  Rows columns(filled.heap.fields, 1);
  EXPECT_THROWS(std::out_of_range, filled.store.scatter(&row, 1, which, columns.in, false));
  filled.store.changes(1, rows, numbers);
  EXPECT_EQ(rows, (Indices{0, 1}));
}

TEST(random_bytes_in_the_shared_words_are_contained) {
  // Whatever another process scribbles over words and tickets: reads stay inside the memory (the sanitizer looks) and
  // end; a recovery makes the store writable again.
  Dice dice(99);
  const Impatient impatient(std::chrono::milliseconds(20));  // for rows that seem to be just being written
  for (int round = 0; round < 400; ++round) {
    Filled filled(geometry(3, 5), {24, 8}, {5, 2, 0});
    const std::uint64_t hits = dice.in(1, 60);
    for (std::uint64_t i = 0; i < hits; ++i) {
      const std::span<std::byte> control = filled.heap.control, tickets = filled.heap.tickets;
      if (dice.below(3) == 0) {
        tickets[dice.below(tickets.size())] = static_cast<std::byte>(dice.bits());
      } else {
        // Half of them on the lanes, which lie at the end.
        const std::uint64_t from = dice.below(2) == 0 ? control.size() - 3 * sizeof(Lane) : sizeof(Header);
        control[dice.in(from, control.size() - 1)] = static_cast<std::byte>(dice.bits());
      }
    }
    Store& store = filled.store;
    filled.heap.view();
    Rows batch(filled.heap.fields, 64);
    const Sizes which{0, 1};
    const auto read = [&] {
      EXPECT(store.control().size() <= 15);
      for (std::uint64_t lane = 0; lane < 3; ++lane) {
        EXPECT(store.control().filled(lane) <= 5);
        EXPECT(store.control().cursor_row(lane) / 5 == lane);
      }
      EXPECT(store.holes().size() <= 15);
      const Indices rows = rows_from(0, 15);
      Indices numbers(64), drawn(64);
      store.tickets_of(rows.data(), 15, numbers.data());
      store.gather(rows.data(), 15, which, batch.out, nullptr, numbers.data());
      try {
        store.sample_uniform(dice.bits(), 64, batch.out, drawn.data(), numbers.data());
        for (const std::int64_t row : drawn) EXPECT(static_cast<std::uint64_t>(row) < 15);
      } catch (const NothingLive&) {
      }
    };
    read();
    store.control().recover();
    read();
    for (std::uint64_t lane = 0; lane < 3; ++lane) filled.append(lane, 4, 500);
    const std::int64_t row = 3;
    store.scatter(&row, 1, which, batch.in, true);
    read();
    store.control().empty(false);
    read();
  }
}

}  // namespace
