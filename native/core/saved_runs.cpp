#include "saved_runs.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>

#include "check.h"
#include "fence.h"

namespace engram {
namespace {

constexpr std::uint64_t kNone = ~std::uint64_t{0};  // of offsets

// One lane, or one of its columns, from the oldest step to the newest.
class Track {
 public:
  Track(const std::int64_t* numbers, const RowMarks& marks, std::vector<SavedRun>& found) : numbers_(numbers), marks_(marks), found_(found) {}

  void walk(std::int64_t lane, std::uint64_t first_row, std::int64_t position, std::uint64_t live, std::uint64_t lane_length, std::uint64_t columns,
            std::uint64_t column) {
    const std::uint64_t steps = live / columns, seam = static_cast<std::uint64_t>(position) % lane_length / columns, tail = steps - std::min(seam, steps);
    const std::int64_t place = position - static_cast<std::int64_t>(live) + static_cast<std::int64_t>(column);
    const bool from_the_beginning = position == static_cast<std::int64_t>(live);
    const std::size_t mine = found_.size();
    const auto row_of = [&](std::uint64_t i) { return first_row + column + (i < tail ? seam + i : i - tail) * columns; };
    std::optional<Open> open;
    for (std::uint64_t i = 0, before = 0; i < steps; ++i) {
      if (open) i = unmarked(i, i < tail ? tail : steps, row_of(i), columns, &before);
      if (i == steps) break;
      const std::uint64_t row = row_of(i);
      const bool there = numbers_[row] != 0, follows = i > 0 && numbers_[before] != 0;
      const bool over = i > 0 && (is(marks_.ends, before) || is_other(row, before)), starts = is(marks_.starts, row);
      if (!there || !follows || over || starts) {
        // Where no field marks ends, a row that holds nothing does as well as another's step: it was left there, or its writer died.
        const bool ended = marks_.ends != nullptr ? over && there : (over && there) || !there;
        if (open) close(*open, lane, place, columns, i, before, ended, false);
        open.reset();
        if (there) open = Open{i, marks_.starts != nullptr ? starts : i == 0 ? from_the_beginning : follows};
      }
      before = row;
    }
    if (open) close(*open, lane, place, columns, steps, row_of(steps - 1), false, true);
    for (std::size_t k = found_.size(); k-- > mine + 1;) found_[k - 1].time = std::min(found_[k - 1].time, found_[k].time);
  }

 private:
  struct Open {
    std::uint64_t first;
    bool has_first;
  };

  /// Where no field says more, the first of steps [i, end) whose row holds nothing; row is that of step i. The row before it is noted.
  std::uint64_t unmarked(std::uint64_t i, std::uint64_t end, std::uint64_t row, std::uint64_t columns, std::uint64_t* before) const {
    if (marks_.ids != nullptr || marks_.ends != nullptr || marks_.starts != nullptr) return i;
    const std::uint64_t first = i;
    for (; i < end && numbers_[row] != 0; row += columns) ++i;
    if (i > first) *before = row - columns;
    return i;
  }

  static bool is(const std::uint8_t* flags, std::uint64_t row) { return flags != nullptr && flags[row] != 0; }
  bool is_other(std::uint64_t row, std::uint64_t before) const {
    return marks_.ids != nullptr && std::memcmp(marks_.ids + row * marks_.id_bytes, marks_.ids + before * marks_.id_bytes, marks_.id_bytes) != 0;
  }

  void close(const Open& run, std::int64_t lane, std::int64_t place, std::uint64_t columns, std::uint64_t end, std::uint64_t last, bool ended, bool newest) {
    const bool marked = is(marks_.ends, last), has_last = marked || ended;
    std::int64_t flags = run.has_first ? SavedRun::kHasFirst : 0;
    if (has_last) flags |= SavedRun::kHasLast;
    if (marked && is(marks_.cut, last)) flags |= SavedRun::kTruncated;
    if (!has_last && newest) flags |= SavedRun::kOpen;
    found_.push_back({lane, place + static_cast<std::int64_t>(run.first * columns), place + static_cast<std::int64_t>(end * columns), numbers_[last], flags});
  }

  const std::int64_t* numbers_;
  const RowMarks& marks_;
  std::vector<SavedRun>& found_;
};

}  // namespace

std::vector<SavedRun> runs_of(std::span<const std::int64_t> lanes, std::uint64_t lane_length, std::uint64_t columns, const std::int64_t* numbers,
                              std::uint64_t n, const RowMarks& marks) {
  check(lane_length > 0 && columns > 0 && lanes.size() % 2 == 0, "lanes of at least one row, and at least one column");
  std::vector<SavedRun> found;
  Track track(numbers, marks, found);
  for (std::uint64_t lane = 0; lane < lanes.size() / 2; ++lane) {
    const std::int64_t position = lanes[2 * lane];
    const auto live = static_cast<std::uint64_t>(lanes[2 * lane + 1]);
    if (live == 0) continue;
    const std::uint64_t first_row = lane * lane_length;
    check(position >= 0 && live <= lane_length && first_row <= n && live <= n - first_row, "live rows of a lane, within the rows that there are");
    for (std::uint64_t column = 0; column < columns; ++column) {
      track.walk(static_cast<std::int64_t>(lane), first_row, position, live, lane_length, columns, column);
    }
  }
  return found;
}

std::vector<std::int64_t> ranks_of(std::uint64_t n, const std::function<std::optional<std::uint64_t>(std::uint64_t)>& offset_of,
                                   std::span<const std::int64_t> offsets) {
  std::map<std::uint64_t, std::uint64_t> gaps;  // from which place to which none has an offset, as far as they were looked at
  std::uint64_t offset = kNone;
  // The first place in [at, high) that has an offset, which is noted, or one at high or behind it. Gaps on the way become one.
  const auto next = [&](std::uint64_t at, std::uint64_t high) {
    auto gap = gaps.upper_bound(at);
    if (gap != gaps.begin() && std::prev(gap)->second >= at) --gap;
    const std::uint64_t begin = gap == gaps.end() ? at : std::min(at, gap->first);
    for (offset = kNone;;) {
      if (gap != gaps.end() && gap->first <= at) {
        at = gap->second;
        gap = gaps.erase(gap);
      } else if (at < high && (offset = offset_of(at).value_or(kNone)) == kNone) {
        ++at;
      } else {
        break;
      }
    }
    if (begin < at) gaps.emplace(begin, at);
    return at;
  };
  std::vector<std::int64_t> found;
  for (std::uint64_t k = 0, low = 0; k < offsets.size(); ++k) {
    if (k > 0 && offsets[k] < offsets[k - 1]) low = 0;
    std::uint64_t high = n, answer = n;
    while (low < high) {
      const std::uint64_t middle = low + (high - low) / 2, at = next(middle, high);
      if (offset != kNone && offset < static_cast<std::uint64_t>(offsets[k])) {
        low = at + 1;
      } else {
        high = middle;
        if (offset != kNone) answer = at;
      }
    }
    found.push_back(static_cast<std::int64_t>(answer));
  }
  return found;
}

std::vector<std::int64_t> rows_from(const Store& store, std::uint64_t group, const RowsByAge& rows, std::span<const std::int64_t> offsets) {
  const Ragged* ragged = store.ragged();
  check(ragged != nullptr && group < ragged->groups().size() && !ragged->slots(), "a group of ragged fields whose items lie in rings");
  check(rows.lane < store.control().lanes() && rows.live <= store.control().lane_length(), "live rows of a lane of the store");
  check(rows.oldest < std::max<std::uint64_t>(rows.live, 1), "the oldest of the live rows");
  const Control& control = store.control();
  const Field& leader = store.field(ragged->groups()[group].leader);
  const std::uint64_t first = rows.lane * control.lane_length();
  // The offset of the items of the row that lies behind i others, if it holds what it is said to.
  const auto offset_of = [&](std::uint64_t i) -> std::optional<std::uint64_t> {
    const std::uint64_t at = i + rows.oldest < rows.live ? i + rows.oldest : i + rows.oldest - rows.live;
    const auto number = static_cast<std::uint64_t>(rows.numbers[at]);
    const Word& word = control.word(first + at);
    if (number == 0 || !is_committed_as(word.load(std::memory_order_acquire), number)) return std::nullopt;
    const Span span = Span::at(leader.row(first + at));
#ifndef ENGRAM_WITHOUT_TICKET_CHECK  // the tests must fail then: make negative-controls
    fence(std::memory_order_acquire);
    if (!is_committed_as(word.load(std::memory_order_relaxed), number)) return std::nullopt;
#endif
    return span.length > 0 ? std::optional(span.offset) : std::nullopt;
  };
  return ranks_of(rows.live, offset_of, offsets);
}

}  // namespace engram
