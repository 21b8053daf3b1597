// Rows of any length, for Python: memory crosses as plain addresses, as for the store.

#include "ragged.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "../core/check.h"
#include "../core/ragged.h"
#include "../core/saved_runs.h"
#include "../core/store.h"
#include "interpreter.h"
#include "memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

std::vector<RaggedGroup> groups_in(const nb::tuple& groups) {
  std::vector<RaggedGroup> found;
  for (nb::handle group : groups) {
    RaggedGroup& one = found.emplace_back(RaggedGroup{nb::cast<std::uint64_t>(group[0]), nb::cast<std::uint64_t>(group[1]), {}, nb::cast<std::uint64_t>(group[3])});
    for (nb::handle field : nb::borrow<nb::tuple>(group[2])) {
      one.fields.push_back({nb::cast<std::uint64_t>(field[0]), at<std::byte>(nb::cast<Address>(field[1])), nb::cast<std::uint64_t>(field[2])});
    }
  }
  return found;
}

RaggedSource source_in(nb::handle source) {
  return {at<const std::uint32_t>(nb::cast<Address>(source[0])), at<const std::int64_t>(nb::cast<Address>(source[1])),
          nb::cast<std::uint64_t>(source[2]), addresses_in<const std::byte>(source[3])};
}

const RowSpec kLengths{0, 32, {}};

// Of `groups` ((field, spec of an item), …) each.
ItemLayout item_layout_in(const nb::tuple& groups) {
  ItemLayout layout;
  for (nb::handle group : groups) {
    ItemLayout::Group& one = layout.groups.emplace_back();
    for (nb::handle field : nb::borrow<nb::tuple>(group)) {
      one.fields.push_back(nb::cast<std::uint64_t>(field[0]));
      one.specs.push_back(spec_of(field[1]));
    }
  }
  return layout;
}

// Rows of one length, with zeros where they were shorter: of each field's values [n, length, *shape], and `masked` which items are of rows.
nb::object pad(const nb::list& tensors, nb::handle lengths, std::int64_t length, bool left, bool masked) {
  Values sizes;
  if (!look_at_tensor(lengths.ptr(), sizes) || sizes.ndim != 1 || sizes.code != 0 || sizes.bits != 32 || !sizes.contiguous()) return nb::none();
  const std::int64_t n = sizes.shape[0];
  const auto* of = reinterpret_cast<const std::int32_t*>(sizes.data);
  std::int64_t total = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    check(of[i] >= 0 && of[i] <= length, "rows that are no longer than what they are padded to");
    total += of[i];
  }
  check(length > 0 && n < (std::int64_t{1} << 47) / length, "rows of at least one item, and fewer than there is memory for");
  std::vector<Values> from;
  std::vector<RowSpec> specs;
  for (nb::handle tensor : tensors) {
    Values values;
    if (!look_at_tensor(tensor.ptr(), values) || !values.contiguous() || values.ndim < 1 || values.shape[0] != total) return nb::none();
    from.push_back(values);
    specs.push_back({values.code, values.bits, {values.shape + 1, values.shape + values.ndim}});
  }
  if (masked) specs.push_back(kFlag);
  OutputBuffers padded;
  padded.add(specs, n * length);
  {
    const WithoutInterpreter running(false);
    for (std::size_t f = 0; f < specs.size(); ++f) {
      std::byte* to = padded.at<std::byte>(f);
      const std::byte* next = f < from.size() ? from[f].data : nullptr;
      const std::size_t item = bytes_of_rows(specs[f], 1), row = item * static_cast<std::size_t>(length);
      for (std::int64_t i = 0; i < n; ++i, to += row) {
        const std::size_t bytes = item * static_cast<std::size_t>(of[i]), zeros = row - bytes;
        std::byte* items = left ? to + zeros : to;
        std::memset(left ? to : to + bytes, 0, zeros);
        if (next == nullptr) {
          std::memset(items, 1, bytes);
        } else if (bytes > 0) {
          std::memcpy(items, next, bytes);
          next += bytes;
        }
      }
    }
  }
  return std::move(padded).tensors(n * length, length);
}

// What lies between offsets, int64 [n + 1] with n >= 0: where rows begin, int64 [n], a view of them; their lengths, int32 [n]; the items of
// the longest; the first offset and the last one; and the row behind which they fall first, or -1: then the lengths are of no use.
nb::tuple rows_between(nb::handle offsets) {
  Values values;
  check(look_at_tensor(offsets.ptr(), values) && values.ndim == 1 && values.shape[0] > 0 && values.code == kNumbers.code &&
            values.bits == kNumbers.bits && values.contiguous(),
        "offsets as a tensor int64 [n + 1], contiguous and on the CPU");
  const std::int64_t n = values.shape[0] - 1;
  const auto* at = reinterpret_cast<const std::int64_t*>(values.data);
  OutputBuffer made(kLengths, n);
  auto* lengths = reinterpret_cast<std::int32_t*>(made.data());
  std::int64_t longest = 0, falls = -1;
  {
    constexpr std::int64_t kBriefly = 1 << 14;
    const WithoutInterpreter running(n < kBriefly);
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t begin = at[i], end = at[i + 1];
      if (end < begin && falls < 0) falls = i;
      const auto length = static_cast<std::int64_t>(static_cast<std::uint64_t>(end) - static_cast<std::uint64_t>(begin));
      lengths[i] = static_cast<std::int32_t>(length);
      longest = std::max(longest, length);
    }
  }
  const nb::object starts = view_of(kNumbers, const_cast<std::byte*>(values.data), n, 0, offsets);
  return nb::make_tuple(starts, std::move(made).tensor(n), longest, at[0], at[n], falls);
}

void bind_writes(nb::class_<Store>& type) {
  type
      .def(
          "append_ragged",
          [](Store& self, std::uint64_t lane, std::uint64_t n, const nb::tuple& columns, Address rows, const nb::tuple& items) {
            const auto inputs = addresses_in<const std::byte>(columns);
            RaggedWrite write = write_in(self, n, items);
            nb::gil_scoped_release release;
            return self.append(lane, n, inputs, at<std::int64_t>(rows), &write);
          },
          "lane"_a, "n"_a, "columns"_a, "rows"_a, "items"_a,
          "As append, of a store with ragged fields, whose columns are ignored. `items`: for each group (address of lengths, uint32 [n]; of "
          "starts, int64 [n]; items of the values; addresses of the values of its fields, 0: zeros).")
      .def(
          "append_ragged_by_lane",
          [](Store& self, Address lane_of, std::uint64_t n, const nb::tuple& columns, Address rows, const nb::tuple& items) {
            const auto inputs = addresses_in<const std::byte>(columns);
            RaggedWrite write = write_in(self, n, items);
            nb::gil_scoped_release release;
            return self.append_by_lane(at<std::int64_t>(lane_of), n, inputs, at<std::int64_t>(rows), &write);
          },
          "lane_of"_a, "n"_a, "columns"_a, "rows"_a, "items"_a, "As append_by_lane, with items as for append_ragged.")
      .def(
          "patch_items",
          [](Store& self, std::uint64_t group, Address rows, std::uint64_t n, const nb::tuple& items, Address expected, Address numbers,
             bool unedited) {
            const RaggedSource source = source_in(items);
            nb::gil_scoped_release release;
            const Patched made = self.patch_items(group, at<std::int64_t>(rows), n, source, at<std::int64_t>(expected),
                                                  at<std::int64_t>(numbers), unedited ? Store::Same::ticket : Store::Same::write);
            return std::pair(made.first, made.entries);
          },
          "group"_a, "rows"_a, "n"_a, "items"_a, "expected"_a, "numbers"_a, "unedited"_a,
          "As patch, of the items of a group's fields whose address is not 0: as many as each row has, else ValueError.");
}

void bind_runs(nb::module_& m) {
  m.def(
      "find_runs",
      [](Address lanes, std::uint64_t count, std::uint64_t lane_length, std::uint64_t columns, Address numbers, std::uint64_t n, Address ids,
         std::uint64_t id_bytes, const std::array<Address, 3>& flags) {
        static_assert(sizeof(SavedRun) == 5 * sizeof(std::int64_t));
        std::vector<std::int64_t> table;
        {
          const WithoutInterpreter running(false);
          const RowMarks marks{at<const std::byte>(ids), id_bytes, at<const std::uint8_t>(flags[0]), at<const std::uint8_t>(flags[1]),
                               at<const std::uint8_t>(flags[2])};
          for (const SavedRun& it : runs_of({at<const std::int64_t>(lanes), 2 * count}, lane_length, columns, at<const std::int64_t>(numbers), n, marks)) {
            table.insert(table.end(), {it.lane, it.begin, it.end, it.time, it.flags});
          }
        }
        return array_of(std::move(table));
      },
      "lanes"_a, "count"_a, "lane_length"_a, "columns"_a, "numbers"_a, "n"_a, "ids"_a, "id_bytes"_a, "flags"_a,
      "Live steps that belong together: lane, first position, position behind the last one, time and flags of each run, int64 [5 · runs]. "
      "`lanes`: int64 [count, 2], position and live rows. Of n rows: tickets int64, ids of so many bytes, and flags: ends, cut, starts; 0: none.");
}

void bind_reads(nb::class_<Store>& type) {
  type
      .def(
          "gather_items",
          [](const Store& self, std::uint64_t group, Address rows, std::uint64_t n, Address expected, Address spans, const nb::tuple& outputs,
             Address places) {
            const auto found = addresses_in<std::byte>(outputs);
            std::vector<std::int64_t> moved;
            {
              const WithoutInterpreter running(false);
              moved = self.gather_items(group, at<const std::int64_t>(rows), n, at<const std::int64_t>(expected), at<const std::byte>(spans),
                                        found, at<const std::int64_t>(places));
            }
            return moved;
          },
          "group"_a, "rows"_a, "n"_a, "expected"_a, "spans"_a, "outputs"_a, "places"_a,
          "Copies the items of rows with these tickets (int64 [n]) and spans (12 bytes each): of each field to an output, or 0, from item "
          "places[i] on. The positions of rows that have them no more.")
      .def(
          "rows_from",
          [](const Store& self, std::uint64_t group, std::uint64_t lane, std::uint64_t oldest, std::uint64_t live, Address numbers, Address offsets,
             std::uint64_t n) {
            std::vector<std::int64_t> found;
            {
              const WithoutInterpreter running(false);
              found = rows_from(self, group, {lane, oldest, live, at<const std::int64_t>(numbers)}, {at<const std::int64_t>(offsets), n});
            }
            return array_of(std::move(found));
          },
          "group"_a, "lane"_a, "oldest"_a, "live"_a, "numbers"_a, "offsets"_a, "n"_a,
          "For each of n offsets, int64: how many of a lane's live rows, which have these tickets (int64 [live]; 0: none), lie before "
          "the oldest whose items begin there or behind it.")
      .def(
          "read_items",
          [](const Store& self, const ItemLayout& layout, const std::vector<std::uint64_t>& which, Address rows, std::uint64_t n,
             Address tickets, const nb::tuple& spans, std::vector<std::int64_t> moved) {
            const auto found = addresses_in<std::byte>(spans);
            ItemsRead items(layout);
            {
              const WithoutInterpreter running(false);
              moved = items.read(self, &which, at<const std::int64_t>(rows), n, at<const std::int64_t>(tickets), found, std::move(moved));
            }
            return nb::make_tuple(std::move(items).groups(), moved);
          },
          "layout"_a, "which"_a, "rows"_a, "n"_a, "tickets"_a, "spans"_a, "moved"_a,
          "Some fields' items of rows with these tickets (int64 [n]) and spans (12 bytes each, of each group with such "
          "fields), row after row: of each of these groups (fields, items of the longest row, lengths int32 [n], where rows begin int64 [n], the "
          "same with the end of the last int64 [n + 1], and as int32, [values, …]); and the positions of rows that have them no more, beside those that `moved` before.");
}

}  // namespace

std::vector<std::int64_t> ItemsRead::read(const Store& store, const std::vector<std::uint64_t>* which, const std::int64_t* rows,
                                          std::uint64_t n, const std::int64_t* tickets, std::span<std::byte* const> spans,
                                          std::vector<std::int64_t> moved) {
  check(store.ragged() != nullptr && layout_.groups.size() == store.ragged()->groups().size() && spans.size() == layout_.groups.size(),
        "the layout and the spans of each group of ragged fields");
  n_ = static_cast<std::int64_t>(n);
  groups_.clear();
  groups_.reserve(layout_.groups.size());
  for (std::uint64_t g = 0; g < layout_.groups.size(); ++g) {
    const RaggedGroup& from = store.ragged()->groups()[g];
    const std::vector<std::uint64_t>& all = layout_.groups[g].fields;
    const auto wanted = [&](std::uint64_t field) { return which == nullptr || std::find(which->begin(), which->end(), field) != which->end(); };
    if (std::none_of(all.begin(), all.end(), wanted)) continue;
    check(from.fields.size() == all.size(), "the fields of each group");
    const auto forget = [&](std::uint64_t i) { std::memset(spans[g] + i * Span::kBytes, 0, Span::kBytes); };
    for (const std::int64_t i : moved) forget(static_cast<std::uint64_t>(i));
    Group& made = groups_.emplace_back(Group{0, 0, OutputBuffer(kLengths, n_), OutputBuffer(kNumbers, n_ + 1), OutputBuffer(kLengths, n_ + 1), {}, {}});
    auto* lengths = reinterpret_cast<std::int32_t*>(made.lengths.data());
    auto* offsets = reinterpret_cast<std::int64_t*>(made.offsets.data());
    auto* ends = reinterpret_cast<std::int32_t*>(made.ends.data());
    for (std::uint64_t i = 0; i <= n; ++i) {
      offsets[i] = made.total;
      ends[i] = static_cast<std::int32_t>(made.total);
      if (i == n) break;
      Span span = Span::at(spans[g] + i * Span::kBytes);
      if (!Ragged::fits(from, span)) {  // its file was changed: no writer makes such a row
        moved.push_back(static_cast<std::int64_t>(i));
        forget(i);
        span = {};
      }
      lengths[i] = static_cast<std::int32_t>(span.length);
      made.total += lengths[i];
      made.longest = std::max<std::int64_t>(made.longest, lengths[i]);
    }
    std::vector<std::byte*> outputs(from.fields.size());
    for (std::size_t f = 0; f < outputs.size(); ++f) {
      const std::uint64_t field = all[f];
      const RowSpec& spec = layout_.groups[g].specs[f];
      check(field == from.fields[f].field && bytes_of_rows(spec, 1) == from.fields[f].item_bytes, "items as the store has them");
      if (!wanted(field)) continue;
      made.fields.push_back(field);
      made.values.add(spec, made.total);
      outputs[f] = made.values.at<std::byte>(made.values.size() - 1);
    }
    const std::vector<std::int64_t> lost = store.gather_items(g, rows, n, tickets, spans[g], outputs, offsets);
    moved.insert(moved.end(), lost.begin(), lost.end());
  }
  std::sort(moved.begin(), moved.end());
  moved.erase(std::unique(moved.begin(), moved.end()), moved.end());
  return moved;
}

nb::list ItemsRead::groups() && {
  nb::list groups;
  for (Group& group : groups_) {
    std::byte* const begins = group.offsets.data();
    const nb::object offsets = std::move(group.offsets).tensor(n_ + 1);
    groups.append(nb::make_tuple(group.fields, group.longest, std::move(group.lengths).tensor(n_), view_of(kNumbers, begins, n_, 0, offsets), offsets,
                                 std::move(group.ends).tensor(n_ + 1), std::move(group.values).tensors(group.total)));
  }
  return groups;
}

RaggedWrite write_in(const Store& store, std::uint64_t n, const nb::tuple& sources) {
  check(store.ragged() != nullptr, "a store with ragged fields");
  std::vector<RaggedSource> found;
  for (nb::handle source : sources) found.push_back(source_in(source));
  return {*store.ragged(), n, found};
}

void bind_ragged(nb::module_& m, nb::class_<Store>& type) {
  nb::class_<ItemLayout>(m, "ItemLayout", "What the items of ragged fields are: ((field, spec of an item), …) of each group.")
      .def("__init__", [](ItemLayout* self, const nb::tuple& groups) { new (self) ItemLayout(item_layout_in(groups)); }, "groups"_a);
  m.def("pad", &pad, "values"_a, "lengths"_a, "length"_a, "left"_a, "masked"_a,
        "Rows of these lengths, int32 [n], that lie one after the other in each of the values, [items, *shape], padded with zeros: a tensor "
        "[n, length, *shape] of each, and `masked` bool [n, length], which items are of rows. None: tensors of another kind.");
  m.def("rows_between", &rows_between, "offsets"_a,
        "Rows that lie between offsets, int64 [n + 1]: where they begin, int64 [n], the same memory; their lengths, int32 [n]; the items of "
        "the longest; the first offset and the last one; the row behind whose offset they fall first, or -1.");
  m.def("ragged_bytes", &Ragged::bytes, "lanes"_a, "groups"_a, "Bytes of the memory that says where the items of ragged fields are.");
  m.def(
      "format_ragged",
      [](Address memory, std::uint64_t bytes, std::uint64_t capacity, std::uint64_t lanes, const nb::tuple& groups) {
        std::vector<RaggedPage::Group> found;
        for (nb::handle group : groups) found.push_back({nb::cast<std::uint64_t>(group[0]), nb::cast<std::uint64_t>(group[1])});
        check(lanes > 0, "at least one lane");
        Ragged::format(block(memory, bytes), {capacity, lanes, capacity / lanes}, found);
      },
      "memory"_a, "nbytes"_a, "capacity"_a, "lanes"_a, "groups"_a, "Of zeroed memory. `groups`: (field of the spans, items of a lane's ring) each.");
  bind_runs(m);
  type.def(
          "use_ragged",
          [](Store& self, Address memory, std::uint64_t bytes, const nb::tuple& groups, bool alone) {
            self.use(std::make_unique<Ragged>(block(memory, bytes), self.control().geometry(), groups_in(groups), alone));
          },
          "memory"_a, "nbytes"_a, "groups"_a, "alone"_a,
          "The items of ragged fields: (field of the spans, items of a lane's ring, ((field, address, bytes of an item), …), items of the slot "
          "that each row has, or 0) each. `alone`: no other process has the store open.")
      .def_prop_ro(
          "evicted", [](const Store& self) { return self.ragged() == nullptr ? 0 : self.ragged()->page().evicted.load(); },
          "Rows that lost their items to newer ones, since the store was made.")
      .def(
          "ragged_lane",
          [](const Store& self, std::uint64_t lane) {
            check(self.ragged() != nullptr && lane < self.control().lanes(), "a lane of a store with ragged fields");
            std::vector<std::uint64_t> words{self.ragged()->tail(lane).load()};
            for (std::uint64_t g = 0; g < self.ragged()->groups().size(); ++g) words.push_back(self.ragged()->head(lane, g).load());
            return words;
          },
          "lane"_a, "The position of the oldest row that may have items, then the offset of the next item of each group.")
      .def(
          "set_ragged_lane",
          [](Store& self, std::uint64_t lane, const nb::tuple& heads) {
            const Ragged* ragged = self.ragged();
            check(ragged != nullptr && lane < self.control().lanes() && heads.size() == ragged->groups().size(), "a head for each group of a lane");
            check(self.paused(), "a store that this process has paused");
            for (std::uint64_t g = 0; g < heads.size(); ++g) {
              ragged->head(lane, g).store(nb::cast<std::uint64_t>(heads[g]), std::memory_order_seq_cst);
            }
            const std::uint64_t end = self.control().end(lane);
            ragged->tail(lane).store(end - std::min(self.control().filled(lane), end), std::memory_order_seq_cst);
          },
          "lane"_a, "heads"_a, "The offset of the next item of each group, of a paused store whose rows were replaced.");
  bind_writes(type);
  bind_reads(type);
}

}  // namespace engram
