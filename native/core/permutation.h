// A random permutation of [0, n) that needs no memory: a keyed Feistel network over the next power of two, its halves of
// bits as equal as may be, walked along its cycle until it falls inside [0, n).
//
// Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002 (generalised Feistel, cycle walking).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include "check.h"
#include "random.h"

namespace engram {

class Permutation {
 public:
  Permutation(std::uint64_t key, std::uint64_t n) : key_(key), n_(n) {
    check(n > 0, "a permutation needs at least one element");
    // Small domains get equal halves: with unequal ones they show structure.
    auto bits = static_cast<unsigned>(n > 1 ? std::bit_width(n - 1) : 1);
    if (bits <= 10) bits += bits % 2;
    right_ = bits / 2;
    left_mask_ = (std::uint64_t{1} << (bits - right_)) - 1;
    right_mask_ = (std::uint64_t{1} << right_) - 1;
    rounds_ = bits <= 4 ? kMostRounds : kRounds;
    const Random random(key);
    for (std::uint64_t round = 0; round < rounds_; ++round) keys_[round] = random.bits(round);
  }

  bool is(std::uint64_t key, std::uint64_t n) const { return key_ == key && n_ == n; }

  /// Looks the rounds up from now on: O(sqrt(n)) work and at most 48 KiB, for many images. A permutation of more than 2^24 stays as it is.
  void tabulate() {
    const std::uint64_t lefts = left_mask_ + 1, rights = right_mask_ + 1;
    if (!tables_.empty() || rounds_ > kRounds || std::max(lefts, rights) > kMostTabled) return;
    for (std::uint64_t round = 0; round < rounds_; round += 2) {
      for (std::uint64_t x = 0; x < rights; ++x) tables_.push_back(static_cast<std::uint16_t>(mix(x + keys_[round]) & left_mask_));
      for (std::uint64_t x = 0; x < lefts; ++x) tables_.push_back(static_cast<std::uint16_t>(mix(x + keys_[round + 1]) & right_mask_));
    }
  }

  /// Image of i, i < n. The domain is smaller than 2 n (4 n up to 1,024), so few walks are expected.
  std::uint64_t operator()(std::uint64_t i) const {
    check(i < n_, "an element outside the permutation");
    return inside(encrypt(i));
  }

  /// Images of start, start + 1, …, start + n - 1, start + n <= the size. Several at a time: twice as fast as one by one.
  void operator()(std::uint64_t start, std::uint64_t n, std::int64_t* out) const {
    check(start <= n_ && n <= n_ - start, "elements outside the permutation");
    for (std::uint64_t done = 0; done < n; done += kChunk) {
      const std::uint64_t count = std::min(kChunk, n - done);
      tables_.empty() ? some<std::uint64_t>(start + done, count, out + done) : some<std::uint32_t>(start + done, count, out + done);
    }
  }

 private:
  static constexpr std::uint64_t kRounds = 6, kMostRounds = 12, kLanes = 4, kChunk = 256, kMostTabled = 1 << 12;

  // Images of at most a chunk, as numbers that hold an element. Those that fell outside walk on together.
  template <class Number>
  void some(std::uint64_t start, std::uint64_t n, std::int64_t* out) const {
    const std::uint64_t size = n_;
    Number walking[kChunk + 1];
    std::uint16_t places[kChunk + 1];
    std::uint64_t left = 0;
    // One step of `count` elements, kLanes at most; those that are outside then come behind the others that are.
    const auto step = [&](std::uint64_t count, auto&& element, auto&& place) {
      Number x[kLanes];
      std::uint16_t at[kLanes];
      for (std::uint64_t k = 0; k < kLanes; ++k) x[k] = k < count ? element(k) : Number{0}, at[k] = k < count ? place(k) : std::uint16_t{0};
      encrypt<kLanes>(x);
      for (std::uint64_t k = 0; k < count; ++k) {  // without a branch that would be guessed wrong
        out[at[k]] = static_cast<std::int64_t>(x[k]);
        walking[left] = x[k];
        places[left] = at[k];
        left += x[k] >= size;
      }
    };
    for (std::uint64_t i = 0; i < n; i += kLanes) {
      const auto element = [&](std::uint64_t k) { return static_cast<Number>(start + i + k); };
      const auto place = [&](std::uint64_t k) { return static_cast<std::uint16_t>(i + k); };
      i + kLanes <= n ? step(kLanes, element, place) : step(n - i, element, place);
    }
    while (left > 0) {
      const std::uint64_t count = std::exchange(left, 0);
      for (std::uint64_t i = 0; i < count; i += kLanes) {
        const auto element = [&](std::uint64_t k) { return walking[i + k]; };
        const auto place = [&](std::uint64_t k) { return places[i + k]; };
        i + kLanes <= count ? step(kLanes, element, place) : step(count - i, element, place);
      }
    }
  }

  std::uint64_t encrypt(std::uint64_t x) const {
    encrypt<1>(&x);
    return x;
  }

  template <std::uint64_t N>
  void encrypt(std::uint64_t* x) const {
    std::uint64_t left[N], right[N];
    for (std::uint64_t k = 0; k < N; ++k) left[k] = x[k] >> right_, right[k] = x[k] & right_mask_;
    for (std::uint64_t round = 0; round < rounds_; round += 2) {
      for (std::uint64_t k = 0; k < N; ++k) left[k] ^= mix(right[k] + keys_[round]) & left_mask_;
      for (std::uint64_t k = 0; k < N; ++k) right[k] ^= mix(left[k] + keys_[round + 1]) & right_mask_;
    }
    for (std::uint64_t k = 0; k < N; ++k) x[k] = left[k] << right_ | right[k];
  }

  // The same by the tables.
  template <std::uint64_t N>
  void encrypt(std::uint32_t* x) const {
    const std::uint16_t* table = tables_.data();
    const std::uint64_t lefts = left_mask_ + 1, rights = right_mask_ + 1;
    const unsigned shift = right_;
    std::uint32_t left[N], right[N];
    for (std::uint64_t k = 0; k < N; ++k) left[k] = x[k] >> shift, right[k] = x[k] & static_cast<std::uint32_t>(rights - 1);
    for (std::uint64_t round = 0; round < kRounds; round += 2) {
      for (std::uint64_t k = 0; k < N; ++k) left[k] ^= table[right[k]];
      table += rights;
      for (std::uint64_t k = 0; k < N; ++k) right[k] ^= table[left[k]];
      table += lefts;
    }
    for (std::uint64_t k = 0; k < N; ++k) x[k] = left[k] << shift | right[k];
  }

  std::uint64_t inside(std::uint64_t x) const {
    while (x >= n_) x = encrypt(x);
    return x;
  }

  std::uint64_t key_, n_;
  unsigned right_ = 1;  // bits of the right half
  std::uint64_t left_mask_ = 1, right_mask_ = 1;
  // Six: with three or four, small domains show visible structure. The smallest show it with six, too: of 5 elements the
  // last stayed where it was in 22 % of the permutations instead of 20 %.
  std::uint64_t rounds_ = kRounds;
  std::uint64_t keys_[kMostRounds];
  std::vector<std::uint16_t> tables_;  // of each round, what it makes of a half
};

}  // namespace engram
