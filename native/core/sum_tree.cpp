#include "sum_tree.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>

#include "check.h"

namespace engram {
namespace {

constexpr std::uint64_t kFanout = SumTree::kFanout;
constexpr std::uint64_t kMostLeaves = std::uint64_t{1} << 40;
constexpr char kSums[] = "priorities: expected finite leaves, and sums that are theirs";
constexpr char kMinima[] = "priorities: expected minima that are those of the leaves";
constexpr std::uint64_t kBatch = 64;  // descents that advance together

std::uint64_t padded(std::uint64_t nodes) { return (nodes + kFanout - 1) / kFanout * kFanout; }

// Nodes per level, the leaves first, one node at the top.
std::vector<std::uint64_t> sizes_of(std::uint64_t leaves) {
  check(leaves >= 1 && leaves <= kMostLeaves, "a tree must have between 1 and 2^40 leaves");
  std::vector<std::uint64_t> sizes{leaves};
  do sizes.push_back((sizes.back() + kFanout - 1) / kFanout);
  while (sizes.back() > 1);
  return sizes;
}

// In pairs: three additions deep instead of seven. find() adds up its prefixes in the same way.
[[gnu::always_inline]] inline double sum_of(const double* c) { return ((c[0] + c[1]) + (c[2] + c[3])) + ((c[4] + c[5]) + (c[6] + c[7])); }

// Zero says that there is none. Positive doubles are in the order of their bits, and one less turns zero into the largest.
[[gnu::always_inline]] inline double min_of(const double* c) {
  const auto rank = [c](std::uint64_t i) { return std::bit_cast<std::uint64_t>(c[i]) - 1; };
  const std::uint64_t a = std::min(rank(0), rank(1)), b = std::min(rank(2), rank(3));
  const std::uint64_t d = std::min(rank(4), rank(5)), e = std::min(rank(6), rank(7));
  return std::bit_cast<double>(std::min(std::min(a, b), std::min(d, e)) + 1);
}

double max_of(const double* c) { return *std::max_element(c, c + kFanout); }

}  // namespace

std::uint64_t SumTree::bytes(std::uint64_t leaves, bool with_max) {
  const std::vector<std::uint64_t> sizes = sizes_of(leaves);
  std::uint64_t above = 0;
  for (std::uint64_t l = 1; l < sizes.size(); ++l) above += padded(sizes[l]);
  return (padded(leaves) + above * (with_max ? 3 : 2)) * sizeof(double);
}

SumTree::SumTree(std::span<std::byte> memory, std::uint64_t leaves, bool with_max)
    : leaves_(leaves), sizes_(sizes_of(leaves)), memory_(memory) {
  check(memory.size() == bytes(leaves, with_max), "a tree in memory of another size");
  check(reinterpret_cast<std::uintptr_t>(memory.data()) % 64 == 0, "a tree in memory that is not aligned to 64 bytes");
  auto* at = reinterpret_cast<double*>(memory.data());
  double* const first = at;
  at += padded(leaves);
  const auto take = [&](std::vector<double*>& levels) {
    levels.push_back(first);
    for (std::uint64_t l = 1; l < sizes_.size(); ++l) {
      levels.push_back(at);
      at += padded(sizes_[l]);
    }
  };
  take(sums_);
  take(minima_);
  if (with_max) take(maxima_);
}

void SumTree::compute(std::uint64_t level, std::uint64_t node) {
  sums_[level][node] = sum_of(sums_[level - 1] + node * kFanout);
  minima_[level][node] = min_of(minima_[level - 1] + node * kFanout);
  if (!maxima_.empty()) maxima_[level][node] = max_of(maxima_[level - 1] + node * kFanout);
}

void SumTree::set(const std::int64_t* rows, const double* values, std::uint64_t n) {
  check_rows(rows, n, leaves_);
  constexpr std::uint64_t kAhead = 16;
  std::vector<std::uint64_t>& parents = parents_;
  parents.clear();
  for (std::uint64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(sums_[0] + rows[i + kAhead], 1);
    const auto row = static_cast<std::uint64_t>(rows[i]);
    sums_[0][row] = values[i];
    if (parents.empty() || parents.back() != row / kFanout) parents.push_back(row / kFanout);
  }
  for (std::uint64_t level = 1; level < sizes_.size() && !parents.empty(); ++level) {
    unify(parents, sizes_[level]);
    for (std::uint64_t i = 0; i < parents.size(); ++i) {
      if (i + kAhead < parents.size()) {
        __builtin_prefetch(sums_[level - 1] + parents[i + kAhead] * kFanout);
        __builtin_prefetch(minima_[level - 1] + parents[i + kAhead] * kFanout);
        __builtin_prefetch(sums_[level] + parents[i + kAhead], 1);
        __builtin_prefetch(minima_[level] + parents[i + kAhead], 1);
      }
      compute(level, parents[i]);
    }
    std::uint64_t kept = 0;
    for (const std::uint64_t node : parents) {
      if (kept == 0 || parents[kept - 1] != node / kFanout) parents[kept++] = node / kFanout;
    }
    parents.resize(kept);
  }
}

// Each node once, where there are few enough to tick them off: with many, hardly any comes twice.
void SumTree::unify(std::vector<std::uint64_t>& nodes, std::uint64_t size) {
  if (size > 8 * nodes.size() || nodes.size() < 2) return;
  ticked_.assign((size + 63) / 64, 0);
  for (const std::uint64_t node : nodes) ticked_[node / 64] |= std::uint64_t{1} << node % 64;
  nodes.clear();
  for (std::uint64_t w = 0; w < ticked_.size(); ++w) {
    for (std::uint64_t bits = ticked_[w]; bits != 0; bits &= bits - 1) {
      nodes.push_back(w * 64 + static_cast<std::uint64_t>(std::countr_zero(bits)));
    }
  }
}

void SumTree::find(const double* u, std::uint64_t n, std::int64_t* rows) const {
  const double total = sum();
  check(total > 0, "a tree whose leaves are all zero");
  double left[kBatch];
  std::uint64_t node[kBatch];
  for (std::uint64_t begin = 0; begin < n; begin += kBatch) {
    const std::uint64_t count = std::min(kBatch, n - begin);
    for (std::uint64_t i = 0; i < count; ++i) {
      left[i] = u[begin + i] * total;
      node[i] = 0;
    }
    for (std::uint64_t level = sizes_.size() - 1; level-- > 0;) {
      std::uint64_t furthest = 0;
      for (std::uint64_t i = 0; i < count; ++i) {
        const double* x = sums_[level] + node[i] * kFanout;
        // Prefixes that never fall, because each adds to the same left part no less than the one before it, and of which
        // the last is the parent, bit for bit. The first that is above what is left is above the one before it, so its
        // child is not zero.
        const double two = x[0] + x[1], four = two + (x[2] + x[3]), six = x[4] + x[5];
        const double upto[kFanout + 1] = {
            0, x[0], two, two + x[2], four, four + x[4], four + six, four + (six + x[6]), four + (six + (x[6] + x[7]))};
        std::uint64_t c = 0;
        for (std::uint64_t k = 0; k < kFanout; ++k) c += upto[k + 1] <= left[i];
        if (c == kFanout) {  // rounding put it on the very end: it falls on the last child that is not zero
          while (c > 1 && !(x[c - 1] > 0)) --c;
          left[i] = upto[--c];
        }
        left[i] = std::max(0.0, left[i] - upto[c]);
        node[i] = node[i] * kFanout + c;
        furthest = std::max(furthest, node[i]);
        if (level > 0) __builtin_prefetch(sums_[level - 1] + node[i] * kFanout);
      }
      // The memory may be shared: whatever it says, no step leaves the tree.
      intact(furthest < sizes_[level], kSums);
    }
    bool sound = begin > 0 || agrees_above(node[0]);  // one of all: checking each would cost a fifth
    for (std::uint64_t i = 0; i < count; ++i) {
      rows[begin + i] = static_cast<std::int64_t>(node[i]);
      const double leaf = sums_[0][node[i]];
      sound &= leaf > 0 && leaf <= total;
    }
    intact(sound, kSums);
  }
}

// The nodes that are open wait in order of their minimum. Each one that is taken leads to a leaf in as many steps as there are levels.
std::uint64_t SumTree::smallest(std::uint64_t n, std::int64_t* rows) const {
  struct Open {
    double least;
    std::uint64_t first, level;  // the first leaf below it
    bool operator>(const Open& other) const { return least > other.least || (least == other.least && first > other.first); }
  };
  std::vector<Open> open;
  std::uint64_t found = 0;
  const auto push = [&](std::uint64_t level, std::uint64_t node) {
    const double least = minima_[level][node];
    if (!(least > 0)) return intact(!(sums_[level][node] > 0), kMinima);
    open.push_back({least, node << (3 * level), level});
    std::push_heap(open.begin(), open.end(), std::greater<>());
  };
  push(sizes_.size() - 1, 0);
  while (found < n && !open.empty()) {
    std::pop_heap(open.begin(), open.end(), std::greater<>());
    const Open next = open.back();
    open.pop_back();
    if (next.level == 0) {
      rows[found++] = static_cast<std::int64_t>(next.first);
      continue;
    }
    const std::uint64_t child = (next.first >> (3 * next.level)) * kFanout, level = next.level - 1;
    intact(min_of(minima_[level] + child) == next.least, kMinima);  // so one of the children leads on, and this ends
    for (std::uint64_t c = child; c < std::min(child + kFanout, sizes_[level]); ++c) push(level, c);
  }
  return found;
}

void SumTree::clear() { std::memset(memory_.data(), 0, memory_.size()); }

// Computes the parents of leaves [begin, end), and theirs.
void SumTree::rebuild(std::uint64_t begin, std::uint64_t end) {
  if (begin == end) return;
  std::uint64_t first = begin, last = end - 1;
  for (std::uint64_t level = 1; level < sizes_.size(); ++level) {
    first /= kFanout;
    last /= kFanout;
    for (std::uint64_t node = first; node <= last; ++node) {
      if (!agrees(level, node)) compute(level, node);
    }
  }
}

// Whether a parent is what its children say, bit for bit.
bool SumTree::agrees(std::uint64_t level, std::uint64_t node) const {
  const auto same = [](double a, double b) { return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b); };
  const std::uint64_t child = node * kFanout;
  return same(sums_[level][node], sum_of(sums_[level - 1] + child)) &&
         same(minima_[level][node], min_of(minima_[level - 1] + child)) &&
         (maxima_.empty() || same(maxima_[level][node], max_of(maxima_[level - 1] + child)));
}

bool SumTree::agrees_above(std::uint64_t leaf) const {
  for (std::uint64_t level = 1, node = leaf / kFanout; level < sizes_.size(); ++level, node /= kFanout) {
    if (!agrees(level, node)) return false;
  }
  return true;
}

bool SumTree::consistent() const {
  for (std::uint64_t level = 1; level < sizes_.size(); ++level) {
    for (std::uint64_t node = 0; node < sizes_[level]; ++node) {
      if (!agrees(level, node)) return false;
    }
  }
  return true;
}

}  // namespace engram
