/* Makes one system call on files below a folder fail, for io_faults.py: preloaded, armed through ctypes.

   Calls are counted from fault_arm(). The n-th fails in the chosen way; with `sticky`, so do all after it. Only
   descriptors opened below the folder count, so Python's own files are left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>

enum kind { NONE, FAIL_EIO, FAIL_ENOSPC, SHORT, ENDED };
enum { DESCRIPTORS = 4096 };

static char folder[4096];
static unsigned char watched[DESCRIPTORS];
static long calls, at;
static int chosen, sticks;

void fault_watch(const char *path) { strncpy(folder, path, sizeof folder - 1); }
void fault_arm(long n, int kind, int sticky) { calls = 0; at = n; chosen = kind; sticks = sticky; }
long fault_calls(void) { return calls; }

static enum kind next_fault(void) {
  long now = calls++;
  return chosen && (now == at || (sticks && now > at)) ? (enum kind)chosen : NONE;
}
static int below(const char *path) { return folder[0] && path && !strncmp(path, folder, strlen(folder)); }
static int is_watched(int fd) { return fd >= 0 && fd < DESCRIPTORS && watched[fd]; }
static int failed(enum kind kind) { errno = kind == FAIL_ENOSPC ? ENOSPC : EIO; return -1; }

#define REAL(result, name, ...) \
  static result (*real)(__VA_ARGS__); \
  if (!real) real = (result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define OPEN(symbol) \
  int symbol(const char *path, int flags, ...) { \
    REAL(int, #symbol, const char *, int, ...); \
    va_list list; va_start(list, flags); mode_t mode = va_arg(list, mode_t); va_end(list); \
    int ours = below(path); \
    enum kind kind = ours ? next_fault() : NONE; \
    if (kind == FAIL_EIO || kind == FAIL_ENOSPC) return failed(kind); \
    int fd = real(path, flags, mode); \
    if (fd >= 0 && fd < DESCRIPTORS) watched[fd] = ours; \
    return fd; \
  }
OPEN(open)
OPEN(open64)

#define TRANSFER(symbol) \
  ssize_t symbol(int fd, const void *data, size_t size) { \
    REAL(ssize_t, #symbol, int, const void *, size_t); \
    enum kind kind = is_watched(fd) ? next_fault() : NONE; \
    if (kind == FAIL_EIO || kind == FAIL_ENOSPC) return failed(kind); \
    if (kind == ENDED && reads(#symbol)) return 0; \
    return real(fd, data, kind == SHORT && size > 1 ? size / 2 : size); \
  }
#define VECTOR(symbol) \
  ssize_t symbol(int fd, const struct iovec *parts, int count, off_t offset) { \
    REAL(ssize_t, #symbol, int, const struct iovec *, int, off_t); \
    enum kind kind = is_watched(fd) ? next_fault() : NONE; \
    if (kind == FAIL_EIO || kind == FAIL_ENOSPC) return failed(kind); \
    if (kind == ENDED && reads(#symbol)) return 0; \
    struct iovec half = parts[0]; \
    half.iov_len = half.iov_len > 1 ? half.iov_len / 2 : half.iov_len; \
    return kind == SHORT ? real(fd, &half, 1, offset) : real(fd, parts, count, offset); \
  }
static int reads(const char *symbol) { return strstr(symbol, "read") != 0; }
TRANSFER(read)
TRANSFER(write)
VECTOR(preadv)
VECTOR(preadv64)
VECTOR(pwritev)
VECTOR(pwritev64)

#define ON_DESCRIPTOR(symbol) \
  int symbol(int fd) { \
    REAL(int, #symbol, int); \
    enum kind kind = is_watched(fd) ? next_fault() : NONE; \
    return kind == FAIL_EIO || kind == FAIL_ENOSPC ? failed(kind) : real(fd); \
  }
ON_DESCRIPTOR(fsync)

#define RESIZE(symbol) \
  int symbol(int fd, off_t size) { \
    REAL(int, #symbol, int, off_t); \
    enum kind kind = is_watched(fd) ? next_fault() : NONE; \
    return kind == FAIL_EIO || kind == FAIL_ENOSPC ? failed(kind) : real(fd, size); \
  }
RESIZE(ftruncate)
RESIZE(ftruncate64)

int mkdir(const char *path, mode_t mode) {
  REAL(int, "mkdir", const char *, mode_t);
  enum kind kind = below(path) ? next_fault() : NONE;
  return kind == FAIL_EIO || kind == FAIL_ENOSPC ? failed(kind) : real(path, mode);
}
int rename(const char *from, const char *to) {
  REAL(int, "rename", const char *, const char *);
  enum kind kind = below(from) ? next_fault() : NONE;
  return kind == FAIL_EIO || kind == FAIL_ENOSPC ? failed(kind) : real(from, to);
}
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
  REAL(int, "renameat2", int, const char *, int, const char *, unsigned);
  enum kind kind = below(from) ? next_fault() : NONE;
  return kind == FAIL_EIO || kind == FAIL_ENOSPC ? failed(kind) : real(a, from, b, to, flags);
}
