#include "meter.h"

#include <algorithm>
#include <bit>
#include <ctime>

#include "fence.h"

namespace engram {
namespace {

constexpr std::uint64_t kIntervalMs = 10'000, kMinuteMs = 60'000;
constexpr int kTimeBits = 48;
constexpr std::uint64_t kTimeMask = (std::uint64_t{1} << kTimeBits) - 1;
constexpr int kLeastBits = 9;  // the first bucket takes what is below 256 ns
constexpr std::uint64_t kMedian = 50, kP99 = 99;

// A few milliseconds late, and a tenth of the cost.
std::uint64_t now_ms() {
#ifdef CLOCK_REALTIME_COARSE
  constexpr clockid_t kClock = CLOCK_REALTIME_COARSE;
#else
  constexpr clockid_t kClock = CLOCK_REALTIME;
#endif
  timespec now{};
  clock_gettime(kClock, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1000 + static_cast<std::uint64_t>(now.tv_nsec) / 1'000'000;
}

// Two buckets for each power of two: of [2^k, 1.5 * 2^k) and [1.5 * 2^k, 2^(k + 1)) ns.
std::uint64_t bucket_of(std::uint64_t ns) {
  const int bits = std::bit_width(ns);
  if (bits < kLeastBits) return 0;
  const auto upper = static_cast<std::uint64_t>(ns >> (bits - 2) & 1);
  return std::min<std::uint64_t>(2 * static_cast<std::uint64_t>(bits - kLeastBits) + upper, MeterPage::kBuckets - 1);
}

// About the middle of a bucket.
double ms_of(std::uint64_t bucket) {
  const auto power = static_cast<double>(std::uint64_t{1} << (bucket / 2 + kLeastBits - 1));
  return power * (bucket % 2 == 0 ? 1.25 : 1.75) * 1e-6;
}

struct Waits {
  std::uint64_t counts[MeterPage::kBuckets] = {};
  std::uint64_t n = 0;

  explicit Waits(const MeterPage& page) {
    for (std::uint64_t i = 0; i < MeterPage::kBuckets; ++i) {
      counts[i] = page.waits[0][i].load(std::memory_order_relaxed) + std::uint64_t{page.waits[1][i].load(std::memory_order_relaxed)};
      n += counts[i];
    }
  }
  // The bucket below whose end so many of a hundred waits are.
  std::uint64_t quantile(std::uint64_t percent) const {
    std::uint64_t left = (n * percent + 99) / 100, i = 0;
    while (i + 1 < MeterPage::kBuckets && counts[i] < left) left -= counts[i++];
    return i;
  }
};

double rate(std::uint64_t now, std::uint64_t before, double seconds) {
  return static_cast<double>(std::max<std::int64_t>(static_cast<std::int64_t>(now - before), 0)) / seconds;
}

}  // namespace

std::uint64_t Meter::inserted() const {
  return control_.counters().write_count.load(std::memory_order_acquire) + page_.inserted_before.load(std::memory_order_relaxed);
}

std::uint64_t Meter::sampled() const {
  std::uint64_t n = 0;
  for (std::uint64_t i = 0; i < control_.participants(); ++i) n += control_.participant(i).sampled.load(std::memory_order_relaxed);
  return n;
}

// One process notes the point, that which changes the interval. If it dies meanwhile, a point is missing.
void Meter::tick() const {
  const std::uint64_t ms = now_ms(), interval = ms / kIntervalMs;
  std::uint64_t seen = page_.interval.load(std::memory_order_relaxed);
  if (seen == interval || seen == MeterPage::kNoCurve) [[likely]] return;
  if (!page_.interval.compare_exchange_strong(seen, interval, std::memory_order_acq_rel)) return;
  const Waits waits(page_);
  CurvePoint& point = control_.curve()[page_.points.fetch_add(1, std::memory_order_acq_rel) % kCurvePoints];
  point.when.store(0, std::memory_order_relaxed);
  fence(std::memory_order_release);
  point.inserted.store(inserted(), std::memory_order_relaxed);
  point.sampled.store(sampled(), std::memory_order_relaxed);
  const std::uint64_t buckets = waits.n == 0 ? 0xFFFF : waits.quantile(kMedian) | waits.quantile(kP99) << 8;
  point.when.store((ms & kTimeMask) | buckets << kTimeBits, std::memory_order_release);
}

// What is counted while another process begins a minute may be lost: quantiles do not depend on a few.
std::uint64_t Meter::waited(std::uint64_t ns, std::uint32_t calls) const {
  const std::uint64_t minute = now_ms() / kMinuteMs;
  std::uint64_t seen = page_.minute.load(std::memory_order_relaxed);
  if (seen != minute && page_.minute.compare_exchange_strong(seen, minute, std::memory_order_acq_rel)) {
    for (std::uint64_t i = 0; i < 2; ++i) {
      if (i != minute % 2 && minute - seen == 1) continue;
      for (auto& count : page_.waits[i]) count.store(0, std::memory_order_relaxed);
    }
  }
  page_.waits[minute % 2][bucket_of(ns)].fetch_add(calls, std::memory_order_relaxed);
  return minute;
}

void Meter::saved() const { page_.saved_ms.store(now_ms(), std::memory_order_relaxed); }

void Meter::restart() const {
  set_write_count(0);
  page_.inserted_mark.store(inserted(), std::memory_order_relaxed);
  page_.sampled_mark.store(sampled(), std::memory_order_relaxed);
}

void Meter::set_write_count(std::uint64_t n) const {
  const std::uint64_t before = control_.counters().write_count.exchange(n, std::memory_order_acq_rel);
  page_.inserted_before.fetch_add(before - n, std::memory_order_relaxed);
}

void Meter::go_on_from(const Meter& other) const {
  const std::uint64_t there = other.sampled() - other.page_.sampled_mark.load(std::memory_order_relaxed);
  page_.inserted_before.store(other.page_.inserted_before.load(std::memory_order_relaxed), std::memory_order_relaxed);
  page_.inserted_mark.store(other.page_.inserted_mark.load(std::memory_order_relaxed), std::memory_order_relaxed);
  page_.sampled_mark.store(sampled() - there, std::memory_order_relaxed);
  page_.saved_ms.store(other.page_.saved_ms.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

// False: it is being noted, or was replaced meanwhile.
bool Meter::read_point(std::uint64_t number, Point* point) const {
  const CurvePoint& at = control_.curve()[number % kCurvePoints];
  const std::uint64_t when = at.when.load(std::memory_order_acquire);
  if (when == 0) return false;
  const std::uint64_t inserted = at.inserted.load(std::memory_order_relaxed), sampled = at.sampled.load(std::memory_order_relaxed);
  fence(std::memory_order_acquire);
  if (at.when.load(std::memory_order_relaxed) != when) return false;
  const std::uint64_t buckets = when >> kTimeBits, median = buckets & 0xFF, p99 = buckets >> 8;
  const bool there = median < MeterPage::kBuckets && p99 < MeterPage::kBuckets;
  *point = {static_cast<double>(when & kTimeMask) / 1000, inserted, sampled, there ? ms_of(median) : -1, there ? ms_of(p99) : -1};
  return true;
}

std::vector<Meter::Point> Meter::curve() const {
  const std::uint64_t points = page_.points.load(std::memory_order_acquire);
  std::vector<Point> found;
  for (std::uint64_t i = points - std::min(points, kCurvePoints); i < points; ++i) {
    Point point{};
    if (read_point(i, &point)) found.push_back(point);
  }
  return found;
}

Meter::Counts Meter::counts() const {
  const std::uint64_t in = inserted(), out = sampled(), ms = now_ms(), saved = page_.saved_ms.load(std::memory_order_relaxed);
  const double now = static_cast<double>(ms) / 1000, interval = static_cast<double>(kIntervalMs) / 1000;
  Counts counts{in - page_.inserted_mark.load(std::memory_order_relaxed), out - page_.sampled_mark.load(std::memory_order_relaxed),
                0, 0, -1, -1, saved == 0 ? -1.0 : static_cast<double>(ms - std::min(ms, saved)) / 1000};
  const std::vector<Point> points = curve();
  // The newest point that is an interval old, so that a rate is of a while; the oldest, where none is.
  auto from = std::find_if(points.rbegin(), points.rend(), [&](const Point& point) { return now - point.seconds >= interval; });
  if (from == points.rend() && !points.empty()) from = std::prev(points.rend());
  if (from != points.rend() && now > from->seconds) {
    counts.inserts_per_s = rate(in, from->inserted, now - from->seconds);
    counts.samples_per_s = rate(out, from->sampled, now - from->seconds);
  }
  if (const Waits waits(page_); waits.n > 0) {
    counts.wait_median_ms = ms_of(waits.quantile(kMedian));
    counts.wait_p99_ms = ms_of(waits.quantile(kP99));
  }
  return counts;
}

}  // namespace engram
