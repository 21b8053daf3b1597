// A store with ragged fields under test: a row has an id, a fixed field that carries it, and items that do, in two groups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "blocks.h"
#include "core/ragged.h"
#include "core/store.h"

namespace ragged {

using namespace engram;

/// Fields: 0 the id, 16 bytes; 1 spans of tokens and, 2, of what has their lengths; 3 spans of text.
inline const std::vector<std::uint64_t> kRowBytes{16, Span::kBytes, 0, Span::kBytes};
constexpr std::uint64_t kTokenBytes = 8, kOtherBytes = 4, kTextBytes = 1;

/// Rings of so many items in each lane.
struct Rings {
  std::uint64_t tokens, text;
};

/// All memory of a store, one block behind the other, in memory that somebody else owns.
struct Memory : Layout {
  /// `in_slots`: an equal share of the items belongs to each row.
  Memory(std::byte* base, Geometry g, Rings rings, bool in_slots = false)
      : Layout(base, g, kRowBytes), rings(rings), slot(in_slots ? Rings{rings.tokens / g.lane_length, rings.text / g.lane_length} : Rings{0, 0}) {
    std::uint64_t at = all.size();
    const auto take = [&](std::uint64_t bytes) {
      const std::span<std::byte> taken(base + at, bytes);
      at = (at + bytes + 63) / 64 * 64;
      return taken;
    };
    page = take(Ragged::bytes(g.lanes, 2));
    tokens = take(g.lanes * rings.tokens * kTokenBytes), others = take(g.lanes * rings.tokens * kOtherBytes);
    text = take(g.lanes * rings.text * kTextBytes);
    open_rows = take(OpenRows::bytes(kSlots, slots().nbytes()));
    all = {base, at};
  }
  void format() const {
    format_without_curve(*this);
    const RaggedPage::Group groups[] = {{1, rings.tokens}, {3, rings.text}};
    Ragged::format(page, geometry, groups);
    OpenRows::format(open_rows, kSlots, slots().nbytes());
  }
  /// Slots of rows that grow, of 16 tokens and 8 characters at most.
  static const SlotLayout& slots() {
    static const SlotLayout layout({16, kTokenBytes, kOtherBytes, kTextBytes}, {{16, {1, 2}}, {8, {3}}});
    return layout;
  }
  std::unique_ptr<Store> open(std::uint64_t participant = 0, bool alone = false) const {
    auto store = std::make_unique<Store>(view(), fields, participant);
    std::vector<RaggedGroup> groups{{1, rings.tokens, {{1, tokens.data(), kTokenBytes}, {2, others.data(), kOtherBytes}}, slot.tokens},
                                    {3, rings.text, {{3, text.data(), kTextBytes}}, slot.text}};
    store->use(std::make_unique<Ragged>(page, geometry, std::move(groups), alone));
    return store;
  }

  Rings rings, slot;
  static constexpr std::uint64_t kSlots = 2;
  std::span<std::byte> page, tokens, others, text, open_rows;
};

/// How many items a row of an id has, of each group: fewer than `most`.
inline std::uint32_t length_of(std::uint64_t id, std::uint64_t group, std::uint64_t most) {
  return static_cast<std::uint32_t>(Random(id * 2 + group).below(most, 0));
}
inline std::uint64_t token_of(std::uint64_t id, std::uint64_t k) { return word_of(id, k + 1); }
inline std::uint8_t char_of(std::uint64_t id, std::uint64_t k) { return static_cast<std::uint8_t>(word_of(id, k + 1) >> 20); }

/// Rows to write, of given ids.
class Written {
 public:
  /// `most`: rows have fewer items than that, of tokens and of text.
  Written(const std::vector<std::uint64_t>& ids, Rings most) : n_(ids.size()), column_(ids.size() * 16) {
    for (std::uint64_t i = 0; i < n_; ++i) {
      describe(column_.data() + i * 16, 16, ids[i]);
      for (std::uint64_t g = 0; g < 2; ++g) {
        lengths_[g].push_back(length_of(ids[i], g, g == 0 ? most.tokens : most.text));
        starts_[g].push_back(static_cast<std::int64_t>(g == 0 ? tokens_.size() : text_.size()));
      }
      for (std::uint64_t k = 0; k < lengths_[0][i]; ++k) tokens_.push_back(token_of(ids[i], k)), others_.push_back(static_cast<std::uint32_t>(token_of(ids[i], k)));
      for (std::uint64_t k = 0; k < lengths_[1][i]; ++k) text_.push_back(char_of(ids[i], k));
    }
  }
  std::vector<const std::byte*> columns() const { return {column_.data(), nullptr, nullptr, nullptr}; }
  std::vector<RaggedSource> sources() const {
    return {{lengths_[0].data(), starts_[0].data(), tokens_.size(), {as_bytes(tokens_), as_bytes(others_)}},
            {lengths_[1].data(), starts_[1].data(), text_.size(), {as_bytes(text_)}}};
  }
  std::uint64_t append(Store& store, std::uint64_t lane, std::int64_t* rows = nullptr) const {
    RaggedWrite write(*store.ragged(), n_, sources());
    return store.append(lane, n_, columns(), rows, &write);
  }
  /// To rows anywhere, in slots. `pick`: which of them, or null.
  std::uint64_t scatter(Store& store, const std::vector<std::int64_t>& rows, const std::int64_t* pick = nullptr) const {
    const RaggedWrite write(*store.ragged(), n_, sources());
    return store.scatter(rows.data(), rows.size(), store.all(), columns(), true, pick, n_, &write);
  }
  /// The only row as a slot takes it: its id, and the items of each group from `from` to `to`.
  std::vector<SlotValue> slot_values() const { return {{0, column_.data()}}; }
  std::vector<SlotItems> slot_items(Rings from, Rings to) const {
    return {{0, to.tokens - from.tokens, {as_bytes(tokens_) + from.tokens * kTokenBytes, as_bytes(others_) + from.tokens * kOtherBytes}},
            {1, to.text - from.text, {as_bytes(text_) + from.text}}};
  }
  Rings lengths() const { return {lengths_[0][0], lengths_[1][0]}; }
  std::uint64_t append_by_lane(Store& store, const std::int64_t* lanes, std::int64_t* rows = nullptr) const {
    RaggedWrite write(*store.ragged(), n_, sources());
    return store.append_by_lane(lanes, n_, columns(), rows, &write);
  }

 private:
  template <class T>
  static const std::byte* as_bytes(const std::vector<T>& values) {
    static const std::byte none{};  // an empty vector has no memory, and zeros are not meant
    return values.empty() ? &none : reinterpret_cast<const std::byte*>(values.data());
  }

  std::uint64_t n_;
  std::vector<std::byte> column_;
  std::vector<std::uint32_t> lengths_[2];
  std::vector<std::int64_t> starts_[2];
  std::vector<std::uint64_t> tokens_;
  std::vector<std::uint32_t> others_;
  std::vector<std::uint8_t> text_;
};

/// What was read of some rows.
class Read {
 public:
  /// Reads rows; `expected`: tickets, or null.
  Read(const Store& store, std::vector<std::int64_t> rows, Rings most, const std::int64_t* expected = nullptr)
      : rows_(std::move(rows)), most_(most), moved_(rows_.size()), numbers_(rows_.size()), ids_(rows_.size() * 16),
        spans_{std::vector<std::byte>(rows_.size() * Span::kBytes), std::vector<std::byte>(rows_.size() * Span::kBytes)} {
    const std::uint64_t which[] = {0, 1, 3};
    std::byte* const out[] = {ids_.data(), spans_[0].data(), spans_[1].data()};
    note(store.gather(rows_.data(), rows_.size(), which, out, expected, numbers_.data()));
    for (std::uint64_t g = 0; g < 2; ++g) {
      std::vector<std::int64_t> places;
      std::uint64_t items = 0;
      for (std::uint64_t i = 0; i < rows_.size(); ++i) {
        if (moved_[i]) Span{}.put(spans_[g].data() + i * Span::kBytes);  // unspecified
        places.push_back(static_cast<std::int64_t>(items));
        items += span(g, i).length;
      }
      if (g == 0) tokens_.resize(items), others_.resize(items);
      if (g == 1) text_.resize(items);
      std::byte* const outputs[] = {reinterpret_cast<std::byte*>(g == 0 ? static_cast<void*>(tokens_.data()) : static_cast<void*>(text_.data())),
                                    reinterpret_cast<std::byte*>(others_.data())};
      note(store.gather_items(g, rows_.data(), rows_.size(), numbers_.data(), spans_[g].data(), std::span(outputs, g == 0 ? 2 : 1), places.data()));
      places_[g] = std::move(places);
    }
  }
  bool moved(std::uint64_t i) const { return moved_[i]; }
  std::int64_t number(std::uint64_t i) const { return numbers_[i]; }
  /// The id that row i carries in all fields; none if it is torn.
  std::optional<std::uint64_t> id(std::uint64_t i) const {
    const auto id = id_of(ids_.data() + i * 16, 16);
    if (!id || span(0, i).length != length_of(*id, 0, most_.tokens) || span(1, i).length != length_of(*id, 1, most_.text)) return std::nullopt;
    for (std::uint64_t k = 0; k < span(0, i).length; ++k) {
      const std::uint64_t at = static_cast<std::uint64_t>(places_[0][i]) + k, token = token_of(*id, k);
      if (tokens_[at] != token || others_[at] != static_cast<std::uint32_t>(token)) return std::nullopt;
    }
    for (std::uint64_t k = 0; k < span(1, i).length; ++k) {
      if (text_[static_cast<std::uint64_t>(places_[1][i]) + k] != char_of(*id, k)) return std::nullopt;
    }
    return id;
  }

 private:
  Span span(std::uint64_t group, std::uint64_t i) const { return Span::at(spans_[group].data() + i * Span::kBytes); }
  void note(const std::vector<std::int64_t>& positions) {
    for (const std::int64_t i : positions) moved_[static_cast<std::uint64_t>(i)] = true;
  }

  std::vector<std::int64_t> rows_;
  Rings most_;
  std::vector<bool> moved_;
  std::vector<std::int64_t> numbers_;
  std::vector<std::byte> ids_;
  std::vector<std::byte> spans_[2];
  std::vector<std::int64_t> places_[2];
  std::vector<std::uint64_t> tokens_;
  std::vector<std::uint32_t> others_;
  std::vector<std::uint8_t> text_;
};

/// The live rows of a store, by ticket: (id, row).
inline std::vector<std::pair<std::uint64_t, std::int64_t>> live_rows(const Store& store, Rings most, bool* torn) {
  std::vector<std::int64_t> rows(store.control().capacity());
  for (std::uint64_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<std::int64_t>(i);
  const Read read(store, rows, most);
  std::vector<std::pair<std::int64_t, std::uint64_t>> order;
  for (std::uint64_t i = 0; i < rows.size(); ++i) {
    if (!read.moved(i) && store.control().inside(i)) order.emplace_back(read.number(i), i);
  }
  std::sort(order.begin(), order.end());
  std::vector<std::pair<std::uint64_t, std::int64_t>> live;
  for (const auto& [number, i] : order) {
    const auto id = read.id(i);
    *torn |= !id;
    live.emplace_back(id.value_or(~std::uint64_t{0}), static_cast<std::int64_t>(i));
  }
  return live;
}

/// A store in private memory.
struct OwnStore {
  OwnStore(Geometry g, Rings rings, bool in_slots = false) : pages(1 << 20), memory(pages.data(), g, rings, in_slots) {
    memory.format();
    store = memory.open(0, true);
  }
  SharedPages pages;
  Memory memory;
  std::unique_ptr<Store> store;
};

}  // namespace ragged
