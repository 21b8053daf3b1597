// Draws by version: each row that follows some rules has one (row_rules.h), rows of a version are equally likely, and what a version weighs
// the caller says.
//
// The rows by version are one process's own. It catches up with writers, who know nothing of it (content_index.h).
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

#include "content_index.h"
#include "control.h"
#include "index.h"
#include "random.h"
#include "redo_lock.h"
#include "row_rules.h"
#include "shared_mutex.h"
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

  /// As Consumption::follow: the version is that of others, or a newer one that was set here.
  void follow(std::span<std::byte> theirs, bool copied);
  std::int64_t version() const;
  /// Never lowers it.
  void raise_to(std::int64_t version);
  void set(std::int64_t version) { page_->version.store(version, std::memory_order_release); }
  void increment() { theirs_ != nullptr ? raise_to(version() + 1) : void(page_->version.fetch_add(1, std::memory_order_acq_rel)); }

  void written(const std::int64_t*, std::uint64_t, std::uint64_t) override {}
  void edited(const std::int64_t*, std::uint64_t, std::uint64_t, std::span<const std::uint64_t>, std::uint64_t) override {}
  void lost(const std::int64_t*, std::uint64_t) override {}
  void emptied() override { set(0); }

 private:
  ConsumerPage* page_;
  const ConsumerPage* theirs_ = nullptr;
};

/// The words that an index has in its memory, of one that has none.
struct OwnWords {
  OwnWords() { mutex.format(); }

  Word redo{0}, missed{0};
  SharedMutex mutex;
};

class Versions : private OwnWords, public ContentIndex {
 public:
  /// `fields`: those that the rules name, whose rows must outlive it. Throws std::invalid_argument: other fields, or rules without a version.
  Versions(const Control& tickets, const RowRules& rules, std::span<const Field> fields);

  /// Each version that rows have, ascending, and how many have it, as rows were when it caught up. Cost: O(versions).
  void versions(std::vector<double>& values, std::vector<std::int64_t>& counts);

  /// Draws n rows, with P(row) = weight of its version / sum over all rows: each once if as many rows have a weight above zero. Puts
  /// rows, ticket numbers and versions. False: no row has such a weight. `weights`: one of each of some
  /// versions, as versions() had them, finite and not negative, their sum over all rows finite; rows of others are not drawn. A pure
  /// function of the key and of which rows have which version.
  bool draw(std::uint64_t key, std::uint64_t n, std::span<const double> of, std::span<const double> weights, std::int64_t* rows, std::int64_t* numbers,
            double* versions);

  /// In a child that was forked off: what a thread of the parent left half done is forgotten, and looked at again.
  void after_fork();

 private:
  struct Known {
    std::uint64_t number;  // 0: the row holds nothing
    double version;        // NaN: it does not follow the rules
    std::uint64_t drawn;   // the draw that had it last
  };

  void look_at(std::uint64_t row) override;
  void look_at_each(Rows rows, std::uint64_t n) override;
  void forget_all() override;
  void forget(std::uint64_t row);
  void take(std::uint64_t row, std::uint64_t i, std::int64_t* rows, std::int64_t* numbers, double* versions);
  std::vector<double> weights_of(std::span<const double> of, std::span<const double> given) const;
  std::vector<std::uint64_t> least_first(const Random& random, std::uint64_t n, const std::vector<double>& weights) const;

  RuleReader reader_;
  std::map<double, SortedRows> buckets_;  // the rows of each version that rows have
  std::vector<Known> known_;              // of each row
  std::uint64_t draws_ = 0;
};

}  // namespace engram
