#include "disk.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

namespace engram {
namespace {

constexpr std::uint64_t kGap = 16 * 1024;         // bytes between two rows that are read as one piece: less than what a request costs
constexpr std::uint64_t kDirty = 4 << 20;         // bytes of a file written before the kernel is to write them out
constexpr std::uint64_t kAnnounced = 128 * 1024;  // bytes: of a longer piece the kernel may take the beginning only
constexpr std::size_t kPieces = 64;               // rows of one system call

std::uint64_t page() {
  static const auto bytes = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace

DiskError::DiskError(int error, std::string file, const std::string& doing)
    : std::runtime_error(doing + ": " +
                         (error == 0 ? "expected more rows, the file ends there" : std::generic_category().message(error))),
      number(error == 0 ? EIO : error),
      path(std::move(file)) {}

void Residency::look(const Field& field, std::int64_t row) {
  const auto first = reinterpret_cast<std::uintptr_t>(field.row(static_cast<std::uint64_t>(row)));
  unsigned char state = 1;  // where the kernel does not say: in memory
  if (mincore(reinterpret_cast<void*>(first / page() * page()), 1, &state) == 0 && (state & 1) == 0) {
    warm_looks_.store(0, std::memory_order_relaxed);
    cold_.store(true, std::memory_order_relaxed);
  } else if (is_cold() && warm_looks_.fetch_add(1, std::memory_order_relaxed) + 1 >= kWarmLooks) {
    cold_.store(false, std::memory_order_relaxed);
  }
}

Disk::Disk(const std::vector<std::string>& paths, bool larger) : larger_(larger) {
  if (larger) reads.expect_cold(), writes.expect_cold();
  for (const std::string& path : paths) {
    File& file = files_.emplace_back();
    struct statfs where {};
    struct stat found {};
    if (path.empty() || statfs(path.c_str(), &where) != 0 || stat(path.c_str(), &found) != 0) continue;
    if (where.f_type == TMPFS_MAGIC || where.f_type == RAMFS_MAGIC) continue;
    file.path = path;
    file.device = found.st_dev;
    file.inode = found.st_ino;
  }
}

Disk::~Disk() {
  for (const File& file : files_) {
    if (file.descriptor >= 0) close(file.descriptor);
  }
}

// 0, or errno.
int Disk::open_file(const File& file) {
  int opened = ::open(file.path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0) opened = ::open(file.path.c_str(), O_RDONLY | O_CLOEXEC);
  if (opened < 0) return errno;
  struct stat found {};
  if (fstat(opened, &found) != 0 || found.st_dev != file.device || found.st_ino != file.inode) {
    close(opened);
    return ESTALE;
  }
  posix_fadvise(opened, 0, 0, POSIX_FADV_RANDOM);  // a read brings what it asks for, and nothing around it
  int none = -1;
  if (!file.descriptor.compare_exchange_strong(none, opened, std::memory_order_acq_rel)) close(opened);  // another thread was first
  return 0;
}

void Disk::open(std::span<const std::uint64_t> which, bool must) const {
  for (const std::uint64_t f : which) {
    if (!has(f) || is_open(f)) continue;
    const int error = open_file(files_[f]);
    if (error != 0 && must) throw DiskError(error, files_[f].path, "open");
  }
}

void Disk::expect(const Field& field, std::uint64_t number, std::uint64_t capacity) const {
  const auto first = reinterpret_cast<std::uintptr_t>(field.data), begin = first / page() * page();
  if (larger_ && has(number)) madvise(reinterpret_cast<void*>(begin), first - begin + capacity * field.row_bytes, MADV_RANDOM);
}

void Disk::announce(const Field& field, std::uint64_t number, std::span<const std::int64_t> rows) const {
  const std::uint64_t bytes = field.row_bytes;
  for (std::uint64_t i = 0, next = 0; i < rows.size(); i = next) {
    std::uint64_t begin = static_cast<std::uint64_t>(rows[i]) * bytes, end = begin + bytes;
    for (next = i + 1; next < rows.size() && static_cast<std::uint64_t>(rows[next]) * bytes <= end + kGap; ++next) {
      end = (static_cast<std::uint64_t>(rows[next]) + 1) * bytes;
    }
    // Advice only: what cannot be announced is read anyway, and the read says what is wrong.
    for (; begin < end; begin += kAnnounced) {
      posix_fadvise(files_[number].descriptor, static_cast<off_t>(begin), static_cast<off_t>(std::min(kAnnounced, end - begin)),
                    POSIX_FADV_WILLNEED);
    }
  }
}

std::vector<unsigned char> Disk::in_memory(const Field& field, std::uint64_t number, std::uint64_t first, std::uint64_t n) const {
  if (!larger_ || !has(number) || n == 0) return {};
  const std::uint64_t begin = first * field.row_bytes / page() * page(), end = (first + n) * field.row_bytes;
  std::vector<unsigned char> pages((end - begin + page() - 1) / page());
  if (mincore(field.data + begin, end - begin, pages.data()) != 0) return {};
  return pages;
}

void Disk::forget(const Field& field, std::uint64_t number, std::uint64_t first, std::span<const unsigned char> before) const {
  const std::uint64_t begin = first * field.row_bytes / page() * page();
  for (std::uint64_t i = 0, next = 0; i < before.size(); i = next) {
    for (next = i + 1; next < before.size() && (before[next] & 1) == (before[i] & 1);) ++next;
    if ((before[i] & 1) != 0) continue;
    posix_fadvise(files_[number].descriptor, static_cast<off_t>(begin + i * page()), static_cast<off_t>((next - i) * page()),
                  POSIX_FADV_DONTNEED);
  }
}

// Moves all bytes of the pieces to or from a file, whatever each call moves.
template <class Call>
std::optional<DiskError> Disk::move_pieces(Call&& call, const char* name, const File& file, std::uint64_t offset,
                                           std::span<iovec> pieces) {
  for (;;) {
    while (!pieces.empty() && pieces[0].iov_len == 0) pieces = pieces.subspan(1);
    if (pieces.empty()) return std::nullopt;
    const ssize_t moved = call(file.descriptor, pieces.data(), static_cast<int>(pieces.size()), static_cast<off_t>(offset));
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return DiskError(moved < 0 ? errno : 0, file.path, name + (" at byte " + std::to_string(offset)));
    offset += static_cast<std::uint64_t>(moved);
    for (auto left = static_cast<std::uint64_t>(moved); left > 0;) {
      const std::uint64_t part = std::min<std::uint64_t>(left, pieces[0].iov_len);
      pieces[0] = {static_cast<std::byte*>(pieces[0].iov_base) + part, pieces[0].iov_len - part};
      left -= part;
      if (pieces[0].iov_len == 0) pieces = pieces.subspan(1);
    }
  }
}

std::optional<DiskError> Disk::read(const Field& field, std::uint64_t number, std::span<const std::int64_t> rows,
                                    const std::uint32_t* at, std::byte* out) const {
  const std::uint64_t bytes = field.row_bytes;
  std::array<iovec, kPieces> pieces;
  for (std::uint64_t i = 0, next = 0; i < rows.size(); i = next) {
    std::size_t count = 0;
    for (next = i; next < rows.size() && (next == i || rows[next] == rows[next - 1] + 1); ++next) {
      if (next > i && at[next] == at[next - 1] + 1) {
        pieces[count - 1].iov_len += bytes;
      } else if (count < kPieces) {
        pieces[count++] = {out + at[next] * bytes, bytes};
      } else {
        break;
      }
    }
    if (auto error = move_pieces(preadv, "read", files_[number], static_cast<std::uint64_t>(rows[i]) * bytes, {pieces.data(), count})) {
      return error;
    }
  }
  return std::nullopt;
}

void Disk::write(const Field& field, std::uint64_t number, std::uint64_t first, std::uint64_t n, const std::byte* from,
                 const std::int64_t* pick) const {
  const std::uint64_t bytes = field.row_bytes;
  const File& file = files_[number];
  struct stat found {};  // a call would write past the end of a file that was truncated
  if (fstat(file.descriptor, &found) != 0 || static_cast<std::uint64_t>(found.st_size) < (first + n) * bytes) {
    throw DiskError(0, file.path, "write at byte " + std::to_string(first * bytes));
  }
  std::array<iovec, kPieces> pieces;
  for (std::uint64_t i = 0; i < n;) {
    const std::uint64_t offset = (first + i) * bytes;
    std::size_t count = 0;
    if (pick == nullptr) {
      pieces[count++] = {const_cast<std::byte*>(from), n * bytes};
      i = n;
    }
    for (; i < n && count < kPieces; ++i) {
      pieces[count++] = {const_cast<std::byte*>(from) + static_cast<std::uint64_t>(pick[i]) * bytes, bytes};
    }
    if (auto error = move_pieces(pwritev, "write", file, offset, {pieces.data(), count})) throw *error;
  }
  counters_.writes.fetch_add(1, std::memory_order_relaxed);
  counters_.bytes_written.fetch_add(n * bytes, std::memory_order_relaxed);
  if (file.dirty.fetch_add(n * bytes, std::memory_order_relaxed) + n * bytes < kDirty) return;
  file.dirty.store(0, std::memory_order_relaxed);
  // Of a larger store it waits for what the call before has begun, so that no write waits for much; the others fit into memory. What a
  // disk could not take is lost once the kernel forgets it, and this alone says so.
  const unsigned wait = larger_ ? SYNC_FILE_RANGE_WAIT_BEFORE : 0;
  if (sync_file_range(file.descriptor, 0, 0, wait | SYNC_FILE_RANGE_WRITE) == 0) return;
  if (errno == EIO || errno == ENOSPC) throw DiskError(errno, file.path, "write out rows of earlier calls, before byte " + std::to_string(first * bytes));
}

}  // namespace engram
