// Steps by time: those of a row's trajectory that are nearest to given times.

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstring>
#include <type_traits>

#include "check.h"
#include "fence.h"
#include "reals.h"
#include "trajectories.h"

namespace engram {
namespace {

template <class T>
T time_at(const Field& field, std::int64_t row) {
  T time;
  std::byte raw[sizeof time];
  copy_from_shared(raw, field.row(static_cast<std::uint64_t>(row)), sizeof raw);
  std::memcpy(&time, raw, sizeof time);
  return time;
}

template <class T>
bool is_finite(T time) {
  if constexpr (std::integral<T>) return true;
  return std::isfinite(static_cast<double>(time));
}

// Of integers exact, as a double holds differences of nanoseconds but not the numbers themselves.
template <class T>
double difference(T a, T b) {
  if constexpr (std::integral<T>) {
    return static_cast<double>(static_cast<std::int64_t>(static_cast<std::uint64_t>(a) - static_cast<std::uint64_t>(b)));
  }
  return static_cast<double>(a) - static_cast<double>(b);
}

}  // namespace

// Tickets are taken before times are read: who reads the rows under them afterwards finds out which were written over meanwhile. A row
// that only showed the search its way is not among these: each is looked at behind its time, whether it still was the step that it stands
// for.
template <class T>
std::int64_t Trajectories::nearest_of(const Field& times, const std::int64_t* rows, std::uint64_t n, std::span<const double> deltas,
                                      const Moments& found) const {
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto r = static_cast<std::uint64_t>(rows[i]);
    const View v = view(track_of(r));
    const std::uint64_t here = place_of(r, cursor(r / control_.lane_length())), out = i * deltas.size();
    const bool known = v.count > 0 && here >= v.low && here < v.next;
    const std::uint64_t run = known ? v.find(here) : 0;
    const auto stood = [&](std::uint64_t place) {
      fence(std::memory_order_acquire);
      return look(v.track / width_, v.track % width_, place) == Look::whole;
    };
    const T origin = time_at<T>(times, rows[i]);
    if (!known || v.dead(run) || !stood(here)) {
      std::fill_n(found.rows + out, deltas.size(), rows[i]);
      std::fill_n(found.numbers + out, deltas.size(), -1);
      std::fill_n(found.after + out, deltas.size(), 0.0);
      std::fill_n(found.is_last + out, deltas.size(), false);
      continue;
    }
    const std::uint64_t first = v.first(run), last = v.end(run) - 1;
    if (!is_finite(origin)) return rows[i];
    for (std::uint64_t k = 0; k < deltas.size(); ++k) {
      std::int64_t wrong = -1;
      bool stand = true;
      const auto after = [&](std::uint64_t place) {
        const std::int64_t at = row(v.track, place);
        const T time = time_at<T>(times, at);
        stand = stand && stood(place);
        if (!is_finite(time)) wrong = at;
        return difference(time, origin);
      };
      std::uint64_t low = first, high = last;
      while (high - low > 1) {
        const std::uint64_t middle = low + (high - low) / 2;
        (after(middle) <= deltas[k] ? low : high) = middle;
      }
      const std::int64_t numbers[] = {number_at(row(v.track, low)), number_at(row(v.track, high)), number_at(rows[i])};
      const double early = after(low), late = after(high);
      if (wrong != -1 && stand) return wrong;
      const bool later = std::abs(late - deltas[k]) < std::abs(early - deltas[k]);
      const bool itself = deltas[k] == 0;  // of equal times the row
      const std::uint64_t place = itself ? here : later ? high : low;
      found.rows[out + k] = row(v.track, place);
      found.numbers[out + k] = stand ? numbers[itself ? 2 : later ? 1 : 0] : -1;
      found.after[out + k] = itself ? 0.0 : later ? late : early;
      found.is_last[out + k] = place == (deltas[k] < found.after[out + k] ? first : last);
    }
  }
  return -1;
}

std::int64_t Trajectories::nearest(const Field& times, std::uint8_t code, std::uint8_t bits, const std::int64_t* rows, std::uint64_t n,
                                   std::span<const double> deltas, const Moments& found) {
  const OwnRows own(rows, n, control_.capacity());
  const auto guard = locked();
  settle();
  constexpr std::int64_t kNoReals = -2;
  const std::int64_t wrong = of_reals(
      code, bits,
      [&]<class T>() {
        check(times.row_bytes == sizeof(T), "one number per row");
        return nearest_of<T>(times, rows, n, deltas, found);
      },
      kNoReals);
  check(wrong != kNoReals, "a column of real numbers");
  return wrong;
}

}  // namespace engram
