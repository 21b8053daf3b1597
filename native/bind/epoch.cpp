// An epoch, for Python. Its memory is kept alive by the object handed over with the address.

#include "../core/epoch.h"

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "../core/check.h"
#include "../core/permutation.h"
#include "../core/store.h"
#include "block.h"
#include "epoch.h"
#include "interpreter.h"
#include "memory.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

// Ranks [start, start + n) of `rows` ones in the order of a key. The order is that of this thread's batch before, most often.
void order_ranks(std::uint64_t key, std::uint64_t rows, std::uint64_t start, std::uint64_t n, std::int64_t* ranks) {
  thread_local std::optional<Permutation> order;
  if (!order || !order->is(key, rows)) {
    order.emplace(key, rows);
  } else {
    order->tabulate();
  }
  (*order)(start, n, ranks);
}

// Takes the next batch of an epoch over the live rows, and reads it.
nb::object draw(RowEpoch& self, const Store& store, const Layout& layout, Address key_at, std::uint64_t n, bool whole, bool shuffle,
                bool with_rows, bool with_numbers) {
  constexpr std::uint64_t kKeyBits = ~std::uint64_t{0} >> 1;
  const std::uint64_t key = *at<const std::uint64_t>(key_at) & kKeyBits;  // read before the GIL is released
  check(n < std::uint64_t{1} << 48, "a batch of more rows than there is memory");
  std::optional<RowEpoch::Stretch> taken;
  OutputBuffers buffers;
  {
    const WithoutInterpreter running(store.reads_briefly(n));
    if (const std::uint64_t size = store.control().size(); size >= (whole ? n : 1)) taken = self.next(key, size, n, whole);
    if (taken) {
      if (Masses* masses = masses_of_block(); masses != nullptr) {
        *masses = {static_cast<double>(taken->rows - taken->start - taken->count), 1.0, taken->rows};
      }
      const auto count = static_cast<std::int64_t>(taken->count);
      store.find_fields();
      const std::size_t fields = buffers.add(layout, count);
      std::unique_ptr<std::int64_t[]> unseen;
      if (with_rows) {
        buffers.add(kNumbers, count);
      } else {
        unseen.reset(new std::int64_t[taken->count]);
      }
      std::int64_t* const ranks = with_rows ? buffers.at<std::int64_t>(fields) : unseen.get();
      if (with_numbers) buffers.add(kNumbers, count);
      if (shuffle) {
        order_ranks(taken->key, taken->rows, taken->start, taken->count, ranks);
      } else {
        std::iota(ranks, ranks + taken->count, static_cast<std::int64_t>(taken->start));
      }
      store.read_ranked(ranks, taken->count, buffers.first(fields),
                        with_numbers ? buffers.at<std::int64_t>(buffers.size() - 1) : nullptr);
      if (with_numbers) store.control().name_writes(ranks, taken->count, buffers.at<std::int64_t>(buffers.size() - 1));
      store.count_sampled(ranks, taken->count);
    }
  }
  if (!taken) return nb::none();
  return nb::make_tuple(std::move(buffers).tensors(static_cast<std::int64_t>(taken->count)), taken->key, taken->last);
}

}  // namespace

void bind_epoch(nb::module_& m) {
  m.attr("epoch_bytes") = RowEpoch::kBytes;
  m.def(
      "format_epoch", [](Address memory, std::uint64_t bytes) { RowEpoch::format(block(memory, bytes)); }, "memory"_a, "bytes"_a,
      "Into zeroed memory of epoch_bytes.");
  m.def(
      "reset_epoch_mutex", [](Address memory, std::uint64_t bytes) { RowEpoch::reset_mutex(block(memory, bytes)); }, "memory"_a,
      "bytes"_a, "Before anything else, by the only process that uses this memory now.");
  nb::class_<RowEpoch, Index>(m, "Epoch", nb::is_weak_referenceable(), "An epoch over the live rows, in memory that `keep` keeps alive.")
      .def(
          "__init__",
          [](RowEpoch* self, Address memory, std::uint64_t bytes, nb::handle) { new (self) RowEpoch(block(memory, bytes)); },
          "memory"_a, "bytes"_a, "keep"_a, nb::keep_alive<1, 4>())
      .def(
          "next",
          [](RowEpoch& self, std::uint64_t key, std::uint64_t rows, std::uint64_t n, bool whole) {
            RowEpoch::Stretch taken;
            {
              const WithoutInterpreter running(true);
              taken = self.next(key, rows, n, whole);
            }
            return nb::make_tuple(taken.key, taken.start, taken.count, taken.last);
          },
          "key"_a, "rows"_a, "n"_a, "whole"_a,
          "The next n ranks of the epoch, or fewer at its end; `whole`: a rest smaller than n is skipped. (key of the order, "
          "first rank, number of ranks, whether the epoch is over). Waits for other processes, bounded.")
      .def("draw", &draw, "store"_a, "layout"_a, "key_at"_a, "n"_a, "whole"_a, "shuffle"_a, "with_rows"_a, "with_numbers"_a,
           "As next, of the live rows, with the key at an address; and reads them: (tensors, key of the order, whether the epoch is over). "
           "The tensors: one per field, then the rows and their ticket numbers, where wanted. `shuffle`: in the order of the key, else of "
           "rows. None: there is no row, or with `whole` fewer than n.")
      .def_prop_rw(
          "state",
          [](const RowEpoch& self) {
            const EpochState state = [&self] {
              const WithoutInterpreter running(true);
              return self.state();
            }();
            return nb::make_tuple(state.key, state.rows, state.visited);
          },
          [](RowEpoch& self, const nb::tuple& state) {
            const EpochState next{nb::cast<std::uint64_t>(state[0]), nb::cast<std::uint64_t>(state[1]), nb::cast<std::uint64_t>(state[2])};
            const WithoutInterpreter running(true);
            self.set(next);
          },
          "(key of the order, rows, rows visited).")
      .def("scan", [](const RowEpoch&, std::uint64_t, std::uint64_t) {}, "begin"_a, "end"_a, "An epoch does not depend on what rows hold.")
      .def("after_fork", &RowEpoch::after_fork);
}

}  // namespace engram
