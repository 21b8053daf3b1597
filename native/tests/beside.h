// A store of one lane and an index beside it, in memory that children share; and deaths at every instruction of what is done with both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "blocks.h"

class Beside {
 public:
  Beside(std::uint64_t rows, const std::vector<std::uint64_t>& row_bytes, std::uint64_t index_bytes)
      : pages_((8 << 20) + 24 * rows + index_bytes), layout_(pages_.data(), geometry(1, rows), row_bytes) {
    format_without_curve(layout_);
    index_ = {pages_.data() + (layout_.all.size() + 4095) / 4096 * 4096, index_bytes};
  }
  const Blocks& blocks() const { return layout_; }
  std::span<std::byte> index() const { return index_; }

 private:
  SharedPages pages_;
  Layout layout_;
  std::span<std::byte> index_;
};
