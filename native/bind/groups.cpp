// Groups of rows by key, for Python. Memory, tickets and rows are kept alive by the object handed over with their addresses.

#include "groups.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../core/best_rows.h"
#include "../core/groups.h"
#include "../core/store.h"
#include "column.h"
#include "interpreter.h"
#include "memory.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

constexpr std::uint64_t kBrief = 256;  // rows

const Field& key_of(std::span<std::byte> memory, const Store& store) {
  const std::uint64_t field = Groups::field_of(memory);
  check(field < store.fields(), "groups by a field that the store does not have");
  return store.field(field);
}

void check_batch(std::uint64_t n, std::uint64_t each) {
  check(n < std::uint64_t{1} << 31 && each < std::uint64_t{1} << 31 && n * each < std::uint64_t{1} << 48,
        "a batch of more rows than there is memory");
}

nb::object draw(Groups& self, std::uint64_t key, std::uint64_t n, std::uint64_t each, bool newest, Numbers without) {
  check_batch(n, each);
  Groups::Drawn drawn{};
  OutputBuffers buffers;
  {
    const WithoutInterpreter running(n * each <= kBrief);
    buffers.add(kNumbers, static_cast<std::int64_t>(n * each));
    buffers.add(kNumbers, static_cast<std::int64_t>(n * each));
    drawn = self.draw(key, n, each, newest ? Groups::Order::newest : Groups::Order::any, without.span(),
                      buffers.at<std::int64_t>(0), buffers.at<std::int64_t>(1));
  }
  if (!drawn.any) return nb::none();
  nb::list made = std::move(buffers).tensors(static_cast<std::int64_t>(n * each));
  return nb::make_tuple(made[0], made[1], drawn.repeated);
}

// A value of a message, as Python writes it.
std::string written(double value) { return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf"; }

// Rewards of rows, where these did not move: of the others nothing is left in `members`. `gone`: one that moved.
std::vector<double> rewards_of(const Store& store, std::uint64_t field, const Rewards& kind, Groups::Members& members,
                               std::int64_t& gone) {
  std::vector<std::byte> values(members.rows.size() * kind.row_bytes());
  std::byte* const column = values.data();
  const std::vector<std::int64_t> moved =
      store.gather(members.rows.data(), members.rows.size(), {&field, 1}, {&column, 1}, members.numbers.data(), nullptr);
  if (!moved.empty()) gone = members.rows[static_cast<std::size_t>(moved.front())];
  std::vector<double> rewards = kind.means(values.data(), members.rows.size());
  std::size_t kept = 0, at = 0;
  auto next = moved.begin();
  for (std::int64_t& size : members.sizes) {
    const std::size_t end = at + static_cast<std::size_t>(size), before = kept;
    for (; at < end; ++at) {
      if (next != moved.end() && static_cast<std::size_t>(*next) == at) {
        ++next;
        continue;
      }
      if (!std::isfinite(rewards[at])) {
        throw std::invalid_argument("expected finite rewards, got " + written(rewards[at]) + " in row " +
                                    std::to_string(members.rows[at]));
      }
      rewards[kept] = rewards[at];
      members.rows[kept] = members.rows[at];
      members.numbers[kept++] = members.numbers[at];
    }
    size = static_cast<std::int64_t>(kept - before);
  }
  rewards.resize(kept);
  return rewards;
}

nb::object draw_best(Groups& self, const Store& store, const nb::tuple& reward, std::uint64_t key, std::uint64_t n,
                     std::uint64_t each, bool spread, Numbers without) {
  check_batch(n, each);
  const auto field = nb::cast<std::uint64_t>(reward[0]);
  const RowSpec spec = spec_of(reward[1]);
  check(field < store.fields(), "rewards in a field that the store does not have");
  const Rewards kind(spec.code, spec.bits, store.row_bytes(field));
  Groups::Members members;
  BestRows best;
  OutputBuffers buffers;
  std::int64_t gone = -1;
  bool whole = false;
  {
    const WithoutInterpreter running(n * each <= kBrief && store.reads_briefly(n * each));
    members = self.draw_members(key, n, without.span());
    const std::vector<double> rewards = rewards_of(store, field, kind, members, gone);
    whole = std::find(members.sizes.begin(), members.sizes.end(), 0) == members.sizes.end();
    if (whole) {
      best = best_rows(rewards, members.sizes, each, spread ? Wanted::spread : Wanted::highest, key);
      buffers.add(kNumbers, static_cast<std::int64_t>(best.places.size()));
      buffers.add(kNumbers, static_cast<std::int64_t>(best.places.size()));
      for (std::size_t i = 0; i < best.places.size(); ++i) {
        buffers.at<std::int64_t>(0)[i] = members.rows[best.places[i]];
        buffers.at<std::int64_t>(1)[i] = members.numbers[best.places[i]];
      }
    }
  }
  if (members.sizes.empty()) return nb::none();
  if (!whole) return nb::int_(gone);
  const nb::list made = std::move(buffers).tensors(static_cast<std::int64_t>(best.places.size()));
  return nb::make_tuple(made[0], made[1], best.repeated || members.repeated);
}

void bind_memory(nb::module_& m) {
  m.def("groups_bytes", &Groups::bytes, "rows"_a, "key_bytes"_a, "Bytes of the groups of that many rows.");
  m.def(
      "format_groups",
      [](Address memory, std::uint64_t bytes, std::uint64_t rows, std::uint64_t field, std::uint64_t key_bytes) {
        Groups::format(block(memory, bytes), rows, field, key_bytes);
      },
      "memory"_a, "bytes"_a, "rows"_a, "field"_a, "key_bytes"_a, "Writes the header into zeroed memory.");
  m.def(
      "copy_groups", [](Address from, Address to, std::uint64_t bytes) { Groups::copy(block(from, bytes), block(to, bytes)); },
      "source"_a, "to"_a, "nbytes"_a, "Into zeroed memory, with no row in a group: the copy is to scan.");
  m.def(
      "reset_groups_mutex", [](Address memory, std::uint64_t bytes) { Groups::reset_mutex(block(memory, bytes)); }, "memory"_a, "bytes"_a,
      "Before anything else, by the only process that uses this memory now.");
}

}  // namespace

void bind_groups(nb::module_& m) {
  bind_memory(m);
  nb::class_<Groups, Index>(m, "Groups", nb::is_weak_referenceable(), "Rows by key, in memory that `keep` keeps alive.")
      .def(
          "__init__",
          [](Groups* self, Address memory, std::uint64_t bytes, const Store& store, nb::handle) {
            const std::span<std::byte> inside = block(memory, bytes);
            new (self) Groups(inside, store.control(), key_of(inside, store));
          },
          "memory"_a, "bytes"_a, "store"_a, "keep"_a, nb::keep_alive<1, 5>())
      .def_prop_ro("field", [](const Groups& self) { return self.field(); }, "Number of the key's field.")
      .def_prop_ro(
          "groups",
          [](Groups& self) {
            const WithoutInterpreter running(true);
            return self.groups();
          },
          "How many groups there are.")
      .def("draw", &draw, "key"_a, "n"_a, "each"_a, "newest"_a, "without"_a,
           "(rows, ticket numbers, whether some come again) of n groups. None: there is none.")
      .def("draw_best", &draw_best, "store"_a, "reward"_a, "key"_a, "n"_a, "each"_a, "spread"_a, "without"_a,
           "The same, chosen by rewards: those of a field, (its number, its spec). Those with the largest variance, or the highest. "
           "None: there is no group. A row: it moved, as did all rows of its group. ValueError: rewards that are not finite.")
      .def("catch_up", &Groups::catch_up, nb::call_guard<nb::gil_scoped_release>(), "For a store whose writers do not tell.")
      .def("scan", &Groups::scan, "begin"_a, "end"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("put_in_order", &Groups::put_in_order, nb::call_guard<nb::gil_scoped_release>())
      .def("after_fork", &Groups::after_fork);
}

}  // namespace engram
