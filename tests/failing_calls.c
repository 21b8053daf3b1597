// Makes the n-th call of one function of libc fail, in the process that asks for it. Loaded with LD_PRELOAD by
// tests/store/test_failing_calls.py; calls that libc makes of itself are not seen.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char wanted[32];
static int countdown, code;

// From the n-th call of `name` on, once, errno is `error`.
void failing_calls_arm(const char* name, int n, int error) {
  strncpy(wanted, name, sizeof wanted - 1);
  countdown = n;
  code = error;
}

// 0 if the call has failed.
int failing_calls_left(void) { return countdown; }

static int fails(const char* name) {
  if (countdown <= 0 || strcmp(name, wanted) != 0 || --countdown > 0) return 0;
  errno = code;
  return 1;
}

#define REAL(name) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define WRAP(group, failure, result, name, parameters, ...) \
  result name parameters { \
    REAL(name); \
    return fails(group) ? failure : real(__VA_ARGS__); \
  }

#define WRAP_OPEN(name) \
  int name(const char* path, int flags, ...) { \
    REAL(name); \
    va_list rest; \
    va_start(rest, flags); \
    const mode_t mode = (flags & O_CREAT) ? va_arg(rest, mode_t) : 0; \
    va_end(rest); \
    return fails("open") ? -1 : real(path, flags, mode); \
  }

#define WRAP_FCNTL(name) \
  int name(int fd, int command, ...) { \
    REAL(name); \
    va_list rest; \
    va_start(rest, command); \
    void* argument = va_arg(rest, void*); \
    va_end(rest); \
    return fails("fcntl") ? -1 : real(fd, command, argument); \
  }

WRAP_OPEN(open)
WRAP_OPEN(open64)
WRAP_FCNTL(fcntl)
WRAP_FCNTL(fcntl64)
WRAP("ftruncate", -1, int, ftruncate, (int fd, off_t size), fd, size)
WRAP("ftruncate", -1, int, ftruncate64, (int fd, off64_t size), fd, size)
WRAP("fallocate", -1, int, fallocate, (int fd, int mode, off_t at, off_t size), fd, mode, at, size)
WRAP("write", -1, ssize_t, write, (int fd, const void* data, size_t size), fd, data, size)
WRAP("pwrite", -1, ssize_t, pwrite, (int fd, const void* data, size_t size, off_t at), fd, data, size, at)
WRAP("pwrite", -1, ssize_t, pwrite64, (int fd, const void* data, size_t size, off64_t at), fd, data, size, at)
WRAP("preadv", -1, ssize_t, preadv, (int fd, const struct iovec* pieces, int n, off_t at), fd, pieces, n, at)
WRAP("preadv", -1, ssize_t, preadv64, (int fd, const struct iovec* pieces, int n, off64_t at), fd, pieces, n, at)
WRAP("pwritev", -1, ssize_t, pwritev, (int fd, const struct iovec* pieces, int n, off_t at), fd, pieces, n, at)
WRAP("pwritev", -1, ssize_t, pwritev64, (int fd, const struct iovec* pieces, int n, off64_t at), fd, pieces, n, at)
WRAP("sync_file_range", -1, int, sync_file_range, (int fd, off64_t at, off64_t size, unsigned how), fd, at, size, how)
WRAP("read", -1, ssize_t, read, (int fd, void* data, size_t size), fd, data, size)
WRAP("fsync", -1, int, fsync, (int fd), fd)
WRAP("fdatasync", -1, int, fdatasync, (int fd), fd)
int flock(int fd, int operation);
WRAP("flock", -1, int, flock, (int fd, int operation), fd, operation)
WRAP("rename", -1, int, rename, (const char* from, const char* to), from, to)
int renameat(int a, const char* from, int b, const char* to);
WRAP("rename", -1, int, renameat, (int a, const char* from, int b, const char* to), a, from, b, to)
WRAP("link", -1, int, link, (const char* from, const char* to), from, to)
WRAP("mkdir", -1, int, mkdir, (const char* path, mode_t mode), path, mode)
WRAP("mkdir", -1, int, mkdirat, (int fd, const char* path, mode_t mode), fd, path, mode)
WRAP("unlink", -1, int, unlink, (const char* path), path)
WRAP("unlink", -1, int, unlinkat, (int fd, const char* path, int flags), fd, path, flags)
WRAP("unlink", -1, int, rmdir, (const char* path), path)
WRAP("mmap", MAP_FAILED, void*, mmap, (void* at, size_t size, int prot, int flags, int fd, off_t from), at, size, prot, flags, fd, from)
WRAP("mmap", MAP_FAILED, void*, mmap64, (void* at, size_t size, int prot, int flags, int fd, off64_t from), at, size, prot, flags, fd, from)
