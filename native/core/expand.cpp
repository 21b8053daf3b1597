#include "expand.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "check.h"
#include "reals.h"

namespace engram {
namespace {

constexpr std::uint64_t kMostSteps = std::uint64_t{1} << 18;  // that are listed at once, but for a longer trajectory

// The steps of each row's trajectory, as places among all that were found.
struct Span {
  std::uint64_t first, row, last;
  bool over, flagged;  // the trajectory ends with the last step; a flag says so
};

class Reader {
 public:
  Reader(const Store& store, Surroundings found, const std::int64_t* expected)
      : store_(store), found_(std::move(found)), moved_(found_.around.size()) {
    spans_.reserve(found_.around.size());
    for (std::size_t i = 0; i < found_.around.size(); ++i) {
      const Around& a = found_.around[i];
      const std::uint64_t row = a.from + a.before;
      spans_.push_back({a.from, row, a.steps == 0 ? row : a.from + a.steps - 1, a.over, false});
      moved_[i] = a.steps == 0 || found_.numbers[row] < 0 || (expected != nullptr && expected[i] != found_.numbers[row]);
    }
  }

  const std::vector<Span>& spans() const { return spans_; }
  std::int64_t number(std::size_t i) const { return found_.numbers[spans_[i].row]; }

  /// Reads some fields of all steps.
  void look(std::span<const std::uint64_t> which) {
    const std::uint64_t n = found_.rows.size();
    std::vector<std::byte*> to;
    for (const std::uint64_t field : which) {
      seen_.emplace_back(n * store_.row_bytes(field));
      to.push_back(seen_.back().data());
    }
    if (which.empty()) return;
    for (const std::int64_t place : store_.gather(found_.rows.data(), n, which, to, found_.numbers.data(), nullptr)) {
      const auto next = std::upper_bound(found_.around.begin(), found_.around.end(), static_cast<std::uint64_t>(place),
                                         [](std::uint64_t at, const Around& a) { return at < a.from; });
      moved_[static_cast<std::size_t>(next - found_.around.begin()) - 1] = 1;
    }
  }

  /// A field that was read, of all steps.
  const std::byte* seen(std::size_t which) const { return seen_[which].data(); }

  /// Cuts each span where one of the first fields that were read, flags or step types, says that the trajectory ends.
  void cut(std::span<const std::uint64_t> step_types, std::span<const std::uint64_t> whole) {
    const std::uint64_t n = found_.rows.size();
    if (step_types.empty() || n == 0) return;
    std::vector<std::uint8_t> flags(n);
    for (std::size_t f = 0; f < step_types.size(); ++f) {
      const std::uint64_t width = seen_[f].size() / n;
      for (std::uint64_t k = 0; k < n; ++k) {
        if (step_types[f] != 0) {
          flags[k] |= any_is(seen_[f].data() + k * width, width, step_types[f], StepType::last);
          continue;
        }
        if (whole[f] != 0) {
          flags[k] |= all_set(seen_[f].data() + k * width, width, whole[f]);
          continue;
        }
        for (std::uint64_t b = 0; b < width; ++b) flags[k] |= seen_[f][k * width + b] != std::byte{0};
      }
    }
    for (Span& span : spans_) {
      for (std::uint64_t k = span.row; k-- > span.first;) {
        if (flags[k] != 0) span.first = k + 1;
      }
      for (std::uint64_t k = span.row; k <= span.last; ++k) {
        if (flags[k] == 0) continue;
        span.last = k;
        span.over = span.flagged = true;
      }
    }
  }

  /// The last step of row i that is at most `ahead` later.
  std::uint64_t step(std::size_t i, std::uint64_t ahead) const {
    return spans_[i].row + std::min(ahead, spans_[i].last - spans_[i].row);
  }

  /// What comes after that step.
  Output::After after(std::size_t i, std::uint64_t ahead) const {
    const Span& span = spans_[i];
    if (step(i, ahead) < span.last) return Output::After::step;
    if (!span.over) return Output::After::nothing;
    return span.flagged ? Output::After::end : Output::After::another;
  }

  /// Fields of one step of each row, of which there are `per` of row i.
  template <class Place>
  void read(std::span<const std::uint64_t> which, Batch out, std::uint64_t per, Place&& place) {
    rows_.resize(spans_.size() * per);
    numbers_.resize(rows_.size());
    for (std::size_t i = 0; i < spans_.size(); ++i) {
      for (std::uint64_t k = 0; k < per; ++k) {
        const std::uint64_t at = place(i, k);
        rows_[i * per + k] = found_.rows[at];
        numbers_[i * per + k] = found_.numbers[at];
      }
    }
    for (const std::int64_t at : store_.gather(rows_.data(), rows_.size(), which, out, numbers_.data(), nullptr)) {
      moved_[static_cast<std::uint64_t>(at) / per] = 1;
    }
  }

  std::vector<std::int64_t> moved() const {
    std::vector<std::int64_t> positions;
    for (std::size_t i = 0; i < moved_.size(); ++i) {
      if (moved_[i] != 0) positions.push_back(static_cast<std::int64_t>(i));
    }
    return positions;
  }

 private:
  const Store& store_;
  Surroundings found_;
  std::vector<Span> spans_;
  std::vector<std::uint8_t> moved_;
  std::vector<std::vector<std::byte>> seen_;
  std::vector<std::int64_t> rows_, numbers_;
};

// Sums in double precision, from the last step to the first (Horner): of n terms the error is that of n roundings.
template <class T>
void add_up(const Reader& reader, const Output& o, const std::byte* values, std::uint64_t row_bytes, std::byte* out) {
  using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const std::uint64_t width = row_bytes / sizeof(T);
  for (std::size_t i = 0; i < reader.spans().size(); ++i) {
    const std::uint64_t row = reader.spans()[i].row, last = reader.step(i, o.ahead);
    for (std::uint64_t c = 0; c < width; ++c) {
      double sum = 0;
      for (std::uint64_t k = last + 1; k-- > row;) {
        T value;
        std::memcpy(&value, values + k * row_bytes + c * sizeof(T), sizeof(T));
        sum = static_cast<double>(value) + o.gamma * sum;
      }
      const auto result = static_cast<Sum>(sum);
      std::memcpy(out + (i * width + c) * sizeof(Sum), &result, sizeof(Sum));
    }
  }
}

// Null: no real numbers.
using AddUp = void (*)(const Reader&, const Output&, const std::byte*, std::uint64_t, std::byte*);
AddUp add_up_of(const Output& o) {
  return of_reals<AddUp>(o.code, o.bits, []<class T>() -> AddUp { return add_up<T>; }, nullptr);
}

void read_frames(const Store& store, Reader& reader, const Output& o, std::byte* out) {
  const std::uint64_t bytes = store.row_bytes(o.field);
  const auto newest = [&](std::size_t i) { return reader.step(i, o.ahead) + (o.following ? 1 : 0); };
  // Steps that are missing before the first one.
  const auto missing = [&](std::size_t i) {
    const std::uint64_t there = newest(i) - reader.spans()[i].first + 1;
    return o.frames > there ? o.frames - there : 0;
  };
  reader.read({&o.field, 1}, {&out, 1}, o.frames, [&](std::size_t i, std::uint64_t k) {
    const Span& span = reader.spans()[i];
    return k < missing(i) ? span.first : std::min(newest(i) - (o.frames - 1 - k), span.last);
  });
  std::vector<std::byte> starts;
  if (o.first >= 0) {
    const auto field = static_cast<std::uint64_t>(o.first);
    starts.resize(reader.spans().size() * bytes);
    std::byte* to = starts.data();
    reader.read({&field, 1}, {&to, 1}, 1, [&](std::size_t i, std::uint64_t) { return reader.spans()[i].first; });
  }
  for (std::size_t i = 0; i < reader.spans().size(); ++i) {
    const std::uint64_t gone = missing(i);
    for (std::uint64_t k = 0; k < gone && bytes > 0; ++k) {
      std::byte* frame = out + (i * o.frames + k) * bytes;
      const bool start = o.first >= 0 && (o.filling.empty() || k + 1 == gone);
      if (start) {
        std::memcpy(frame, starts.data() + i * bytes, bytes);
      } else if (!o.filling.empty()) {
        std::memcpy(frame, o.filling.data(), bytes);
      }
    }
  }
}

// How many bytes an output has of each row.
std::uint64_t bytes_of(const Store& store, const Output& o) {
  switch (o.kind) {
    case Output::Kind::row:
      return store.row_bytes(o.field);
    case Output::Kind::sum:
      return store.row_bytes(o.field) / (o.bits / 8) * o.sum_bytes();
    case Output::Kind::frames:
      return o.frames * store.row_bytes(o.field);
    case Output::Kind::steps:
      return sizeof(std::int64_t);
    case Output::Kind::discount:
      return sizeof(float);
    case Output::Kind::over:
    case Output::Kind::after:
      break;
  }
  return 1;
}

std::vector<std::int64_t> expand_some(const Store& store, const Expansion& expansion, Surroundings found,
                                      const std::int64_t* expected, Batch out, std::int64_t* numbers_out) {
  const std::vector<Output>& outputs = expansion.outputs();
  Reader reader(store, std::move(found), expected);
  const std::size_t n = reader.spans().size();
  std::vector<std::uint64_t> looked = expansion.ends();
  for (const Output& o : outputs) {
    if (o.kind == Output::Kind::sum) looked.push_back(o.field);
  }
  reader.look(looked);
  reader.cut(expansion.step_types(), expansion.whole());
  std::size_t sums = expansion.ends().size();  // where the next sum's field is among these
  for (std::size_t i = 0; i < n; ++i) numbers_out[i] = reader.number(i);
  std::vector<bool> done(outputs.size());
  for (std::size_t f = 0; f < outputs.size(); ++f) {
    const Output& o = outputs[f];
    if (done[f]) continue;
    switch (o.kind) {
      case Output::Kind::row: {  // with all others of the same step
        std::vector<std::uint64_t> which;
        std::vector<std::byte*> to;
        for (std::size_t g = f; g < outputs.size(); ++g) {
          if (outputs[g].kind != Output::Kind::row || outputs[g].ahead != o.ahead) continue;
          which.push_back(outputs[g].field);
          to.push_back(out[g]);
          done[g] = true;
        }
        reader.read(which, to, 1, [&](std::size_t i, std::uint64_t) { return reader.step(i, o.ahead); });
        break;
      }
      case Output::Kind::frames:
        read_frames(store, reader, o, out[f]);
        break;
      case Output::Kind::sum: {
        add_up_of(o)(reader, o, reader.seen(sums++), store.row_bytes(o.field), out[f]);
        break;
      }
      case Output::Kind::steps:
      case Output::Kind::discount:
      case Output::Kind::over:
        for (std::size_t i = 0; i < n; ++i) {
          const std::uint64_t last = reader.step(i, o.ahead), steps = last - reader.spans()[i].row + 1;
          if (o.kind == Output::Kind::steps) {
            reinterpret_cast<std::int64_t*>(out[f])[i] = static_cast<std::int64_t>(steps);
          } else if (o.kind == Output::Kind::discount) {
            reinterpret_cast<float*>(out[f])[i] = static_cast<float>(std::pow(o.gamma, static_cast<double>(steps)));
          } else {
            out[f][i] = static_cast<std::byte>(reader.spans()[i].over && last == reader.spans()[i].last);
          }
        }
        break;
      case Output::Kind::after:
        for (std::size_t i = 0; i < n; ++i) out[f][i] = static_cast<std::byte>(reader.after(i, o.ahead));
        break;
    }
  }
  return reader.moved();
}

}  // namespace

bool Expansion::plain() const {
  return std::all_of(outputs_.begin(), outputs_.end(), [](const Output& o) { return o.kind == Output::Kind::row && o.ahead == 0; });
}

std::uint64_t Expansion::before() const {
  std::uint64_t steps = 0;
  for (const Output& o : outputs_) {
    if (o.kind == Output::Kind::frames) steps = std::max(steps, o.frames - 1);
  }
  return steps;
}

std::uint64_t Expansion::after() const {
  std::uint64_t steps = 0;
  for (const Output& o : outputs_) {
    steps = std::max(steps, o.following || o.kind == Output::Kind::after ? o.ahead + 1 : o.ahead);
  }
  return steps;
}

std::vector<std::int64_t> expand(const Store& store, Trajectories& table, const Expansion& expansion,
                                 const std::int64_t* rows, std::uint64_t n, const std::int64_t* expected,
                                 std::span<std::byte* const> out, std::int64_t* numbers_out) {
  const std::vector<Output>& outputs = expansion.outputs();
  check(out.size() == outputs.size(), "another number of outputs than there is memory for");
  for (const std::uint64_t field : expansion.ends()) check(field < store.fields(), "a flag of the store");
  for (const std::uint64_t size : expansion.step_types()) check(size <= sizeof(std::uint64_t), "step types that are integers");
  for (const Output& o : outputs) {
    check(o.field < store.fields() && o.first < static_cast<std::int64_t>(store.fields()), "a field of the store");
    check(o.frames > 0, "at least one frame");
    const std::uint64_t bytes = store.row_bytes(o.field);
    check(o.first < 0 || store.row_bytes(static_cast<std::uint64_t>(o.first)) == bytes, "frames of one size");
    check(o.filling.empty() || o.filling.size() == bytes, "a filling of a row's size");
    check(o.kind != Output::Kind::sum || (add_up_of(o) != nullptr && bytes % (o.bits / 8) == 0), "rows of real numbers");
  }
  std::vector<std::int64_t> moved;
  if (expansion.plain()) {  // no step around a row is looked at
    std::vector<std::uint64_t> which;
    for (const Output& o : outputs) which.push_back(o.field);
    moved = store.gather(rows, n, which, out, expected, numbers_out);
    if (!moved.empty()) store.control().count_redraws(moved.size());
    return moved;
  }
  std::vector<std::byte*> to(out.begin(), out.end());
  for (std::uint64_t at = 0; at < n;) {  // as long trajectories need much memory, and the table is locked while they are listed
    Surroundings found = table.around(rows + at, n - at, expansion.before(), expansion.after(), kMostSteps);
    const std::uint64_t count = found.around.size();
    for (const std::int64_t place : expand_some(store, expansion, std::move(found),
                                                expected == nullptr ? nullptr : expected + at, to, numbers_out + at)) {
      moved.push_back(static_cast<std::int64_t>(at) + place);
    }
    for (std::size_t f = 0; f < to.size(); ++f) {
      const std::uint64_t bytes = bytes_of(store, outputs[f]);
      if (bytes > 0) to[f] += count * bytes;
    }
    at += count;
  }
  if (!moved.empty()) store.control().count_redraws(moved.size());
  return moved;
}

}  // namespace engram
