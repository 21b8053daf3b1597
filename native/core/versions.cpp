#include "versions.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <new>
#include <utility>

#include "check.h"
#include "fence.h"

namespace engram {
namespace {

constexpr char kMagic[8] = {'e', 'n', 'g', 'v', 'e', 'r', 's', '\1'};

// 53 random bits as a number in (0, 1].
double fraction(std::uint64_t bits) { return static_cast<double>((bits >> 11) + 1) * 0x1p-53; }

ConsumerPage* page_in(std::span<std::byte> memory) {
  check(memory.size() == ConsumerVersion::kBytes, "a consumer's version in memory of another size");
  check(std::memcmp(memory.data(), kMagic, sizeof kMagic) == 0, "no consumer's version, or of another format");
  return reinterpret_cast<ConsumerPage*>(memory.data());
}

}  // namespace

void ConsumerVersion::format(std::span<std::byte> memory) {
  check(memory.size() == kBytes, "a consumer's version in memory of another size");
  auto* page = new (memory.data()) ConsumerPage{};
  std::memcpy(page->magic, kMagic, sizeof kMagic);
}

ConsumerVersion::ConsumerVersion(std::span<std::byte> memory) : page_(page_in(memory)) {}

// What was copied is there, too: an emptying lowers it.
void ConsumerVersion::follow(std::span<std::byte> theirs, bool copied) {
  theirs_ = page_in(theirs);
  if (copied) set(std::numeric_limits<std::int64_t>::min());
}

std::int64_t ConsumerVersion::version() const {
  const std::int64_t own = page_->version.load(std::memory_order_acquire);
  return theirs_ == nullptr ? own : std::max(own, theirs_->version.load(std::memory_order_acquire));
}

void ConsumerVersion::raise_to(std::int64_t version) {
  std::int64_t now = page_->version.load(std::memory_order_acquire);
  while (now < version && !page_->version.compare_exchange_weak(now, version, std::memory_order_acq_rel)) {
  }
}

Versions::Versions(const Control& tickets, const RowRules& rules, std::span<const Field> fields)
    : ContentIndex(RedoWords::of(static_cast<OwnWords&>(*this)), tickets, tickets.capacity()), reader_(rules, fields), known_(rows()) {
  rules.check();
  check(rules.dated, "rows by version: expected rules that name one");
}

void Versions::forget(std::uint64_t row) {
  Known& known = known_[row];
  if (std::exchange(known.number, 0) == 0 || std::isnan(known.version)) return;
  const auto found = buckets_.find(known.version);
  found->second.erase(row);
  if (found->second.size() == 0) buckets_.erase(found);
}

void Versions::forget_all() {
  buckets_.clear();
  for (Known& known : known_) known.number = 0;
}

void Versions::look_at(std::uint64_t row) {
  Known& known = known_[row];
  for (;;) {
    const std::uint64_t word = tickets_.word(row).load(std::memory_order_acquire);
    if (!is_committed(word)) return forget(row);
    if (known.number == number_of(word)) return;
    const double version = reader_.read(row);
    fence(std::memory_order_acquire);
    if (tickets_.word(row).load(std::memory_order_relaxed) != word) continue;
    if (known.number == 0 || known.version != version) {
      forget(row);
      known.version = version;
      if (!std::isnan(version)) buckets_[version].insert(row);
    }
    known.number = number_of(word);
    return;
  }
}

void Versions::look_at_each(Rows rows, std::uint64_t n) {
  for (std::uint64_t i = 0; i < n; ++i) Versions::look_at(rows[i]);
}

// A map that is half changed is left where it is.
void Versions::after_fork() {
  if (mutex.held()) {
    new (&buckets_) std::map<double, SortedRows>;
    redo.store(1, std::memory_order_relaxed);
  }
  ContentIndex::after_fork();
}

void Versions::versions(std::vector<double>& values, std::vector<std::int64_t>& counts) {
  const RedoLock guard = lock();
  for (const auto& [version, rows] : buckets_) {
    values.push_back(version);
    counts.push_back(static_cast<std::int64_t>(rows.size()));
  }
}

void Versions::take(std::uint64_t row, std::uint64_t i, std::int64_t* rows, std::int64_t* numbers, double* versions) {
  rows[i] = static_cast<std::int64_t>(row);
  numbers[i] = static_cast<std::int64_t>(known_[row].number);
  versions[i] = known_[row].version;
  known_[row].drawn = draws_;
}

// The n rows that come first of those that this draw does not have yet, where each arrives after an exponential time of rate `weight`:
// as if they were drawn one after another (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006).
std::vector<std::uint64_t> Versions::least_first(const Random& random, std::uint64_t n, const std::vector<double>& weights) const {
  std::vector<std::pair<double, std::uint64_t>> arrivals;
  for (auto next = weights.begin(); const auto& [version, of_version] : buckets_) {
    const double weight = *next++;
    if (!(weight > 0)) continue;
    of_version.each([&](std::uint64_t row) {
      if (known_[row].drawn != draws_) arrivals.emplace_back(-std::log(fraction(random.bits(row, 1))) / weight, row);
    });
  }
  std::partial_sort(arrivals.begin(), arrivals.begin() + static_cast<std::ptrdiff_t>(n), arrivals.end());
  std::vector<std::uint64_t> rows;
  for (std::uint64_t i = 0; i < n; ++i) rows.push_back(arrivals[i].second);
  return rows;
}

// Of each version that rows have now. Who was asked for the weights may have looked at the rows again.
std::vector<double> Versions::weights_of(std::span<const double> of, std::span<const double> given) const {
  check(of.size() == given.size(), "a weight of each version");
  std::map<double, double> weight;
  for (std::size_t i = 0; i < of.size(); ++i) {
    if (const double version = copied(of[i]); !std::isnan(version)) weight[version] = copied(given[i]);
  }
  std::vector<double> weights;
  for (const auto& [version, of_version] : buckets_) {
    const auto found = weight.find(version);
    weights.push_back(found == weight.end() ? 0 : found->second);
  }
  return weights;
}

// One after another, where a row that came before is drawn again: that is the same as drawing among the others. If it takes too many
// tries, as most rows that are likely have been drawn, the rest is drawn at once.
bool Versions::draw(std::uint64_t key, std::uint64_t n, std::span<const double> of, std::span<const double> given,
                    std::int64_t* rows, std::int64_t* numbers, double* versions) {
  const RedoLock guard = lock();
  const std::vector<double> weights = weights_of(of, given);
  const Random random(key);
  std::vector<const SortedRows*> buckets;
  std::vector<double> masses;  // summed up
  std::uint64_t admissible = 0;
  double total = 0;
  for (auto weight = weights.begin(); const auto& [version, of_version] : buckets_) {
    if (*weight > 0) {
      admissible += of_version.size();
      total += *weight * static_cast<double>(of_version.size());
      masses.push_back(total);
      buckets.push_back(&of_version);
    }
    ++weight;
  }
  if (admissible == 0) return false;
  check(std::isfinite(total), "weights of versions: expected a sum that is finite");
  ++draws_;
  const bool once = n <= admissible;
  std::uint64_t taken = 0;
  for (std::uint64_t i = 0; taken < n && (!once || i < 4 * n + 64); ++i) {
    const double at = (1 - fraction(random.bits(2 * i))) * total;
    const auto found = std::min(std::upper_bound(masses.begin(), masses.end(), at), std::prev(masses.end()));
    const SortedRows& among = *buckets[static_cast<std::size_t>(found - masses.begin())];
    const std::uint64_t row = among.at(random.below(among.size(), 2 * i + 1));
    if (!once || known_[row].drawn != draws_) take(row, taken++, rows, numbers, versions);
  }
  if (taken < n) {
    for (const std::uint64_t row : least_first(random, n - taken, weights)) take(row, taken++, rows, numbers, versions);
  }
  return true;
}

}  // namespace engram
