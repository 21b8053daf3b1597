// The bytes by which an index knows a row: a field of one size, or a text, whose bytes lie among the items of a ragged field.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>

#include "check.h"
#include "control.h"
#include "gather.h"
#include "ragged.h"

namespace engram {

class RowKey {
 public:
  RowKey() = default;
  /// `bytes`: of a key, of a text as many as it may have. `text`: the group of ragged fields that the field leads; null: it is not ragged.
  /// Throws std::invalid_argument: the field has no such keys.
  RowKey(const Field& field, std::uint64_t bytes, const RaggedGroup* text) : field_(field), bytes_(bytes) {
    check(field.data != nullptr && field.row_bytes == (text == nullptr ? bytes : Span::kBytes), "keys in a field of another size");
    if (text == nullptr) return;
    check(!text->fields.empty() && text->fields[0].field == text->leader && text->fields[0].item_bytes == 1, "keys in a field whose rows are bytes");
    text_ = *text;
  }

  std::uint64_t bytes() const { return bytes_; }
  void prefetch(std::int64_t row) const { prefetch_row(field_, row); }

  /// Copies the key of a row, a text filled up with zeros. What comes is a key if the row still has the ticket that it had before.
  void copy(const Control& tickets, std::uint64_t row, std::byte* to) const {
    if (!text_) return copy_from_shared(to, field_.row(row), bytes_);
    const Span span = Span::at(field_.row(row));
    const std::uint64_t length = Ragged::fits(*text_, span) ? std::min<std::uint64_t>(span.length, bytes_) : 0;
    copy_from_shared(to, Ragged::items_of(*text_, text_->fields[0], tickets.lane_of(row), span), length);
    std::fill(to + length, to + bytes_, std::byte{0});
  }

 private:
  Field field_{};
  std::uint64_t bytes_ = 0;
  std::optional<RaggedGroup> text_;
};

}  // namespace engram
