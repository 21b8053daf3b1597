// Fields in files of a disk: rows that are not in memory are announced to the kernel all at once, then read by the call.
//
// A mapping would fault for one page after the other, each fault waits for the disk, and reads far ahead of what is wanted; an error
// of the disk is a signal there. Nothing here knows about tickets.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "gather.h"

namespace engram {

/// A system call on the file of a field failed, or the file ended before the row. what() says where in the file.
struct DiskError : std::runtime_error {
  /// number: errno; 0: the file ended. doing: "read at byte 4096".
  DiskError(int number, std::string path, const std::string& doing);
  int number;
  std::string path;
};

/// Whether the rows that calls ask for are in memory: looks at one of them now and then. May be used by many threads.
class Residency {
 public:
  enum class Way { measured, mapped, direct };

  void set(Way way) { way_.store(way, std::memory_order_relaxed); }
  Way way() const { return way_.load(std::memory_order_relaxed); }

  /// Whether to go to the disk for rows row(0) … row(n - 1) of a field.
  template <class RowOf>
  bool is_cold(const Field& field, std::uint64_t n, RowOf&& row) {
    if (way() != Way::measured || n == 0) return is_cold();
    const std::uint32_t call = calls_.load(std::memory_order_relaxed);  // a count of another thread may get lost: a look comes later
    calls_.store(call + 1, std::memory_order_relaxed);
    if ((call & ((is_cold() ? kColdCalls : kWarmCalls) - 1)) == 0) {
      look(field, row(call / kColdCalls % n));
    }
    return is_cold();
  }
  /// What is to be taken for granted until a look says something else.
  void expect_cold() { cold_.store(true, std::memory_order_relaxed); }
  /// What was decided last.
  bool is_cold() const {
    const Way chosen = way();
    return chosen == Way::measured ? cold_.load(std::memory_order_relaxed) : chosen == Way::direct;
  }

 private:
  static constexpr std::uint32_t kWarmCalls = 32;   // calls between two looks, while rows are found in memory: a power of 2
  static constexpr std::uint32_t kColdCalls = 8;    // and while they are not: there a call costs more than a look
  static constexpr std::uint32_t kWarmLooks = 16;   // in a row that miss nothing, before rows are taken to be in memory again

  void look(const Field& field, std::int64_t row);

  std::atomic<Way> way_{Way::measured};
  std::atomic<bool> cold_{false};
  std::atomic<std::uint32_t> calls_{0}, warm_looks_{0};
};

/// The files of a store's fields. Each is opened when its rows are first not in memory. Where several fields lie in one file, that is
/// known by the number of the first of them, and its `field` is the rows of them all.
class Disk {
 public:
  /// Paths, one per field, of files that are mapped now; "": the field lies in memory only. So does one whose file system is memory.
  /// `larger`: all rows together are larger than the memory that they can have.
  Disk(const std::vector<std::string>& paths, bool larger);
  ~Disk();
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;

  /// Fields that are added later lie in memory only.
  bool has(std::uint64_t field) const { return field < files_.size() && !files_[field].path.empty(); }
  bool is_open(std::uint64_t field) const { return field < files_.size() && files_[field].descriptor.load(std::memory_order_acquire) >= 0; }

  /// Opens the files of fields that have one. Where that fails, the field stays with its mapping; or, if `must`, throws DiskError.
  void open(std::span<const std::uint64_t> which, bool must = false) const;

  bool larger() const { return larger_; }

  /// Says how the mapping of a field will be used. Of a larger store's, a fault is to read its page and none around it.
  void expect(const Field& field, std::uint64_t number, std::uint64_t capacity) const;

  /// Starts to read rows, which ascend.
  void announce(const Field& field, std::uint64_t number, std::span<const std::int64_t> rows) const;

  /// Row rows[i] goes to out + at[i] * row_bytes. Rows ascend. The first error, if there is one; no exception.
  std::optional<DiskError> read(const Field& field, std::uint64_t number, std::span<const std::int64_t> rows,
                                const std::uint32_t* at, std::byte* out) const;

  /// Writes n rows to the rows first … of a field: those at `from`, or, of rows that begin there, the ones that `pick` names. Lets the
  /// kernel write them out, and waits for that where the store is larger and much was written before. Throws DiskError, also if the
  /// file ends before these rows do.
  void write(const Field& field, std::uint64_t number, std::uint64_t first, std::uint64_t n, const std::byte* from,
             const std::int64_t* pick) const;

  /// Of the pages of n rows of a field: whether each is in memory. Nothing, where that is not known, or does not matter as the store is
  /// not larger than memory.
  std::vector<unsigned char> in_memory(const Field& field, std::uint64_t number, std::uint64_t first, std::uint64_t n) const;

  /// Lets the kernel forget what in_memory() said was not there, of the same rows. Their file is open.
  void forget(const Field& field, std::uint64_t number, std::uint64_t first, std::span<const unsigned char> before) const;

  Residency reads, writes;
  /// Held from reading bytes to writing them back.
  std::mutex changing;

  struct Counters {
    std::atomic<std::uint64_t> reads{0}, bytes_read{0}, writes{0}, bytes_written{0};
  };
  Counters& counters() const { return counters_; }

 private:
  struct File {
    std::string path;
    dev_t device = 0;
    ino_t inode = 0;  // of the file that is mapped: at its path another one may lie by now
    mutable std::atomic<int> descriptor{-1};
    mutable std::atomic<std::uint64_t> dirty{0};  // bytes that the kernel was not yet told to write out
  };
  static int open_file(const File& file);
  template <class Call>
  static std::optional<DiskError> move_pieces(Call&& call, const char* name, const File& file, std::uint64_t offset,
                                              std::span<iovec> pieces);

  bool larger_;
  std::deque<File> files_;
  mutable Counters counters_;
};

}  // namespace engram
