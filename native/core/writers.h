// The table of writers that share lanes: of each the last requests that it made, and the positions where their rows are. So a request
// that is repeated, after a lost reply or a death, is found again, whichever process it comes to, and Store::append_once writes what is
// missing of it.
//
//   memory   one page: WritersPage · ids · entries · of a store with ragged fields the places of the items of each request
//
// Positions are reserved and noted under a mutex, before a row is written: a request that is not noted has written nothing. Those that
// a process reserved and did not note, as it died, become void as after any death.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "control.h"
#include "index.h"
#include "shared_mutex.h"
#include "store.h"

namespace engram {

struct WriterId {
  std::uint64_t high, low;
  bool operator==(const WriterId&) const = default;
};

struct WritersPage {
  char magic[8];  // "engwrit\1", as stored
  std::uint64_t writers;
  Word clock;  // one more with every request
  SharedMutex mutex;
  std::uint64_t groups;  // of ragged fields
};
static_assert(sizeof(WritersPage) <= kPage);

class Writers : public Index {
 public:
  /// Requests of a writer that are known: as many may be in doubt.
  static constexpr std::uint64_t kWindow = 8;

  /// `groups`: of ragged fields, that the store has.
  static std::uint64_t bytes(std::uint64_t writers, std::uint64_t groups = 0);
  /// Into zeroed memory of that size.
  static void format(std::span<std::byte> memory, std::uint64_t writers, std::uint64_t groups = 0);
  /// As Priorities::reset_mutex.
  static void reset_mutex(std::span<std::byte> memory);
  /// A view of formatted memory, which must outlive it. Throws std::invalid_argument: not such memory.
  explicit Writers(std::span<std::byte> memory);

  std::uint64_t writers() const { return writers_; }

  /// Appends n rows to a lane, as request `number` of a writer, counted from 1: once, however often it is asked for; a repeated one has
  /// the positions and the lane that it had first, also where the store was emptied since. A writer that is not known takes the entry
  /// of the one that asked for nothing the longest. Throws Store::OutOfOrder, and nothing has changed: the number is larger than the
  /// one that comes next, or kWindow or more smaller; std::invalid_argument: other rows than the first time, in number or in their
  /// items'; Limited. The limits of the store admit a request once.
  std::uint64_t append(Store& store, const WriterId& writer, std::uint64_t number, std::uint64_t lane, std::uint64_t n, Columns columns,
                       std::int64_t* rows_out, RaggedWrite* items = nullptr) const;

  /// Number of the writer's next request: 1 if it is not known.
  std::uint64_t next(const WriterId& writer) const;

  /// Where the rows of a request are, and how many it had. None: the table does not know it.
  struct Rows {
    std::uint64_t lane, first, n;
  };
  std::optional<Rows> rows_of(const WriterId& writer, std::uint64_t number) const;

  /// In the child of a fork, for private memory: a thread of the parent may have held it.
  void after_fork();

  // Positions stay what they are, whatever the rows hold.
  void written(const std::int64_t*, std::uint64_t, std::uint64_t) override {}
  void edited(const std::int64_t*, std::uint64_t, std::uint64_t, std::span<const std::uint64_t>, std::uint64_t) override {}
  void lost(const std::int64_t*, std::uint64_t) override {}
  void emptied() override {}

 private:
  struct Request {
    Word number;  // 0: none
    std::uint64_t lane, first, n;
  };
  struct Entry {
    Word used;  // when it asked for something last, by the clock; 0: free
    Request requests[kWindow];  // request i is at i % kWindow
    std::uint64_t reserved[7];
  };
  static_assert(sizeof(Entry) == 320);

  Entry* find(const WriterId& writer) const;
  Entry& take(const WriterId& writer) const;
  static std::uint64_t next_of(const Entry& entry);
  Store::Positions reserve(const Store& store, const WriterId& writer, std::uint64_t number, std::uint64_t lane, std::uint64_t n,
                           RaggedWrite* items) const;

  WritersPage* page_;
  std::uint64_t writers_, groups_;  // a copy of what never changes: the memory may be shared
  WriterId* ids_;
  Entry* entries_;
  RaggedWrite::Place* places_;  // of request i of writer w at (w * kWindow + i % kWindow) * groups
};

}  // namespace engram
