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
#include "rules.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

constexpr std::uint64_t kBrief = 256;  // rows

std::vector<Field> fields_of(std::span<std::byte> memory, const Store& store) {
  const GroupsPolicy policy = Groups::policy_of(memory);
  std::vector<std::uint64_t> numbers{policy.field};
  for (const std::uint64_t number : policy.rules().fields()) numbers.push_back(number);
  if (policy.order == GroupsOrder::spread) numbers.push_back(policy.reward.number);
  return fields_numbered(numbers, store);
}

// As Python writes it: (field of the key, its bytes, fields that are to be ready, uses, field of the version or None, staleness, order, rows
// of each group that is in order, field of the reward or None).
GroupsPolicy policy_in(const nb::tuple& given) {
  GroupsPolicy policy{.field = nb::cast<std::uint64_t>(given[0]), .key_bytes = nb::cast<std::uint64_t>(given[1])};
  for (const nb::handle field : given[2]) policy.ready.push_back(rule_field_in(field));
  policy.most = nb::cast<std::uint64_t>(given[3]);
  policy.dated = !nb::handle(given[4]).is_none();
  if (policy.dated) policy.version = rule_field_in(given[4]);
  policy.staleness = nb::cast<std::uint64_t>(given[5]);
  policy.order = static_cast<GroupsOrder>(nb::cast<std::uint64_t>(given[6]));
  policy.least = nb::cast<std::uint64_t>(given[7]);
  if (policy.order == GroupsOrder::spread) policy.reward = rule_field_in(given[8]);
  return policy;
}

// The same, with the numbers of fields alone.
nb::tuple written(const GroupsPolicy& policy) {
  nb::list ready;
  for (const GroupsField& field : policy.ready) ready.append(field.number);
  nb::object version = nb::none(), reward = nb::none();
  if (policy.dated) version = nb::int_(policy.version.number);
  if (policy.order == GroupsOrder::spread) reward = nb::int_(policy.reward.number);
  return nb::make_tuple(policy.field, policy.key_bytes, nb::tuple(ready), policy.most, version, policy.staleness,
                        static_cast<std::uint64_t>(policy.order), policy.least, reward);
}

void check_batch(std::uint64_t n, std::uint64_t each) {
  check(n < std::uint64_t{1} << 31 && each < std::uint64_t{1} << 31 && n * each < std::uint64_t{1} << 48,
        "a batch of more rows than there is memory");
}

Groups::Which which_of(unsigned number) {
  check(number <= 2, "any groups, the first or the last ones");
  return static_cast<Groups::Which>(number);
}

nb::object draw(Groups& self, std::uint64_t key, std::uint64_t n, std::uint64_t each, bool newest, Numbers without, bool complete,
                double floor, unsigned which) {
  check_batch(n, each);
  const Groups::Asked asked{
      .n = n, .each = each, .complete = complete, .floor = floor, .which = which_of(which), .without = without.span()};
  Groups::Drawn drawn{};
  OutputBuffers buffers;
  {
    const WithoutInterpreter running(n * each <= kBrief);
    buffers.add(kNumbers, static_cast<std::int64_t>(n * each));
    buffers.add(kNumbers, static_cast<std::int64_t>(n * each));
    drawn = self.draw(key, asked, newest ? Groups::Order::newest : Groups::Order::any, buffers.at<std::int64_t>(0),
                      buffers.at<std::int64_t>(1));
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
                     std::uint64_t each, bool spread, Numbers without, bool complete, double floor, unsigned which) {
  check_batch(n, each);
  const Groups::Asked asked{
      .n = n, .each = each, .complete = complete, .floor = floor, .which = which_of(which), .without = without.span()};
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
    members = self.draw_members(key, asked);
    const Groups::Members counted = self.policy().most > 0 ? members : Groups::Members();
    const auto least = static_cast<std::int64_t>(complete ? each : 1);
    std::vector<double> rewards;
    try {
      rewards = rewards_of(store, field, kind, members, gone);
      whole = std::all_of(members.sizes.begin(), members.sizes.end(), [least](std::int64_t size) { return size >= least; });
    } catch (...) {
      self.take_back(counted.rows.data(), counted.numbers.data(), counted.rows.size());
      throw;
    }
    if (!whole) {
      self.take_back(counted.rows.data(), counted.numbers.data(), counted.rows.size());
    } else {
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
  m.def(
      "groups_bytes", [](std::uint64_t rows, const nb::tuple& policy) { return Groups::bytes(rows, policy_in(policy)); }, "rows"_a,
      "policy"_a, "Bytes of the groups of that many rows.");
  m.def(
      "format_groups",
      [](Address memory, std::uint64_t bytes, std::uint64_t rows, const nb::tuple& policy) {
        Groups::format(block(memory, bytes), rows, policy_in(policy));
      },
      "memory"_a, "bytes"_a, "rows"_a, "policy"_a,
      "Writes the header into zeroed memory. `policy`: (number of the key's field, its bytes, fields that are to be ready, most uses or 0, "
      "field of the version or None, staleness, order of groups: 0 none, 1 by age, 2 by the variance of rewards, rows of each such group, "
      "field of the reward or None); such a field is (its number, its spec).");
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
            new (self) Groups(inside, store.control(), fields_of(inside, store), store.led_by(Groups::policy_of(inside).field));
          },
          "memory"_a, "bytes"_a, "store"_a, "keep"_a, nb::keep_alive<1, 5>())
      .def_prop_ro("field", [](const Groups& self) { return self.field(); }, "Number of the key's field.")
      .def_prop_ro(
          "policy", [](const Groups& self) { return written(self.policy()); },
          "As for format_groups, with the numbers of fields alone.")
      .def_prop_ro("rows", &Groups::rows)
      .def_prop_ro(
          "counts",
          [](const Groups& self) {
            const Groups::Counts counts = self.counted();
            nb::dict said;
            said["groups"] = counts.groups, said["starved_draws"] = counts.starved;
            if (self.policy().most > 0) said["used_rows"] = counts.used, said["evicted_rows"] = counts.evicted, said["dropped_rows"] = counts.dropped;
            if (self.policy().dated) said["expired_rows"] = counts.expired;
            return said;
          },
          "Groups as of now and draws that found too few; where the rules are such, rows that were used up, became too old, or were "
          "overwritten before they were used up; by name.")
      .def(
          "groups",
          [](Groups& self, std::uint64_t least, double floor) {
            const WithoutInterpreter running(true);
            return self.groups(least, floor);
          },
          "least"_a = 1, "floor"_a = Groups::kSame, "How many groups have so many rows, or more. `floor`: as of a draw.")
      .def("draw", &draw, "key"_a, "n"_a, "each"_a, "newest"_a, "without"_a, "complete"_a = false, "floor"_a = Groups::kSame, "which"_a = 0,
           "(rows, ticket numbers, whether some come again) of n groups; no row comes again if `complete`. `floor`: the oldest version from "
           "now on; NaN: as it is. `which`: 0 any, 1 the first, 2 the last in order. None: there is no group, or not enough of them.")
      .def("draw_best", &draw_best, "store"_a, "reward"_a, "key"_a, "n"_a, "each"_a, "spread"_a, "without"_a, "complete"_a = false,
           "floor"_a = Groups::kSame, "which"_a = 0,
           "The same, chosen by rewards: those of a field, (its number, its spec). Those with the largest variance, or the highest. "
           "None: there is no group. A row: it moved, and with it so many rows of its group that it was not drawn. ValueError: rewards "
           "that are not finite.")
      .def(
          "take_back",
          [](Groups& self, Numbers rows, Numbers numbers) {
            const WithoutInterpreter running(true);
            self.take_back(rows.data, numbers.of(rows.size), rows.size);
          },
          "rows"_a, "numbers"_a, "Rows that were drawn with these tickets count as used once less.")
      .def(
          "uses",
          [](Groups& self, Column<std::int32_t> out) {
            const nb::gil_scoped_release running;
            self.copy_uses(out.data, out.size);
          },
          "out"_a, "How often the first rows were used.")
      .def(
          "restore_uses",
          [](Groups& self, Column<const std::int32_t> uses) {
            const nb::gil_scoped_release running;
            self.restore_uses(uses.data, uses.size);
          },
          "uses"_a, "The first rows were used so often, and others not yet.")
      .def("follow", &follow<Groups>, "memory"_a, "bytes"_a, "keep"_a, "copied"_a, nb::keep_alive<1, 4>(), kFollow)
      .def("catch_up", &Groups::catch_up, nb::call_guard<nb::gil_scoped_release>(), "For a store whose writers do not tell.")
      .def("scan", &Groups::scan, "begin"_a, "end"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("put_in_order", &Groups::put_in_order, nb::call_guard<nb::gil_scoped_release>())
      .def("after_fork", &Groups::after_fork);
}

}  // namespace engram
