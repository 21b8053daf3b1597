// Draws by version: each row has one, rows of a version are equally likely, and what a version weighs the caller says.
//
// A table is one process's own. It learns of writes by looking: rows that were appended since the last look are found through the
// cursors, all others by a look at every ticket, after any write by number. Writers know nothing of it.
//
// The version up to which the rows' consumer has come belongs to the store: an index of one page that all processes share.
//
//   memory   one page: ConsumerPage
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "control.h"
#include "index.h"
#include "random.h"
#include "sorted_rows.h"

namespace engram {

struct ConsumerPage {
  char magic[8];  // "engvers\1"
  std::atomic<std::int64_t> version;
};
static_assert(sizeof(ConsumerPage) <= kPage);

class ConsumerVersion : public Index {
 public:
  static constexpr std::uint64_t kBytes = kPage;

  /// Into zeroed memory of kBytes.
  static void format(std::span<std::byte> memory);

  /// A view of formatted memory, which must outlive it. Throws std::invalid_argument: not such memory.
  explicit ConsumerVersion(std::span<std::byte> memory);

  std::int64_t version() const { return page_->version.load(std::memory_order_acquire); }
  /// Never lowers it.
  void raise_to(std::int64_t version);
  void set(std::int64_t version) { page_->version.store(version, std::memory_order_release); }
  void increment() { page_->version.fetch_add(1, std::memory_order_acq_rel); }

  void written(const std::int64_t*, std::uint64_t, std::uint64_t) override {}
  void edited(const std::int64_t*, std::uint64_t, std::uint64_t, std::span<const std::uint64_t>, std::uint64_t) override {}
  void lost(const std::int64_t*, std::uint64_t) override {}
  void emptied() override { set(0); }

 private:
  ConsumerPage* page_;
};

class VersionTable {
 public:
  explicit VersionTable(Control control);

  struct Changed {
    std::vector<std::int64_t> rows, numbers;
  };
  /// Rows whose content is not in the table, with their ticket numbers: set() is to follow. If it does not, the next call names them
  /// again. Cost: O(rows written) after appends, else a word per row of the store.
  Changed catch_up();
  /// The rows that catch_up() named held these versions under these numbers. NaN: the row is never drawn. `moved`: positions of those
  /// that could not be read under their numbers, which the next catch_up() names again. Throws, and nothing changed.
  void set(const std::int64_t* rows, const std::int64_t* numbers, const double* versions, std::uint64_t n,
           std::span<const std::int64_t> moved = {});

  /// Each version that rows have, ascending, and how many have it. Cost: O(versions).
  void versions(std::vector<double>& values, std::vector<std::int64_t>& counts) const;

  /// Draws n rows, with P(row) = weight of its version / sum over all rows: each once if as many rows have a weight above zero. Puts
  /// rows, ticket numbers and versions. False: no row has such a weight. `weights`: one of each of some
  /// versions, as versions() had them, finite and not negative, their sum over all rows finite; rows of others are not drawn. A pure
  /// function of the key and of which rows have which version.
  bool draw(std::uint64_t key, std::uint64_t n, std::span<const double> of, std::span<const double> weights, std::int64_t* rows, std::int64_t* numbers,
            double* versions);

 private:
  struct Known {
    std::uint64_t number;  // 0: in no version
    double version;
    std::uint64_t drawn;  // the draw that had it last
  };
  struct Pending {
    std::uint64_t row;
    std::uint32_t lap;  // of the step that is to come
  };

  void forget(std::uint64_t row);
  void look_at(std::uint64_t row, std::uint32_t lap, Changed& changed);
  void take(std::uint64_t row, std::uint64_t i, std::int64_t* rows, std::int64_t* numbers, double* versions);
  std::vector<double> weights_of(std::span<const double> of, std::span<const double> given) const;
  std::vector<std::uint64_t> least_first(const Random& random, std::uint64_t n, const std::vector<double>& weights) const;

  Control control_;
  std::map<double, SortedRows> buckets_;    // the rows of each version that rows have
  std::vector<Known> known_;                // of each row
  std::vector<std::uint64_t> next_, base_;  // of each lane: what was looked at, and where it began
  std::vector<Pending> pending_;
  std::vector<std::int64_t> named_;  // by catch_up(), until set() follows
  std::uint64_t scatters_ = ~std::uint64_t{0}, draws_ = 0;
};

}  // namespace engram
