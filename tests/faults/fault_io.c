// Makes a process fail in the middle of its file operations. Loaded by LD_PRELOAD, for tests alone.
//
// It counts the calls on paths below a directory, and acts at the n-th. Configured by environment:
//   SLUICE_FAULT_DIRECTORY  absolute path; calls on it and on what lies below it count
//   SLUICE_FAULT_CALL       open (to write), write, sync, rename, remove, mkdir, touch; any of these
//                           (the default); list: open a directory to read its names; read: pread
//   SLUICE_FAULT_RANK       acts where OMPI_COMM_WORLD_RANK is this number; absent: on every rank
//   SLUICE_FAULT_NTH        from 1 (the default)
//   SLUICE_FAULT_TIMES      how many calls it acts on, from the n-th; 0: all; 1 is the default
//   SLUICE_FAULT_ACTION     kill: SIGKILL to this process, half of a write is done before
//                           launcher: SIGKILL to the parent process, and the call goes on
//                           sleep:<seconds>: then the call goes on
//                           ENOSPC, EIO, EROFS, EDQUOT: the call fails so
//                           log: nothing but the line in the log
//   SLUICE_FAULT_GATE       counts only while this file exists; absent: always
//   SLUICE_FAULT_LOG        file that gets a line "<rank> <call> <n> <path>" before each action
// A process without OMPI_COMM_WORLD_RANK is rank 0. Calls inside libc (stdio) and mapped memory are
// not seen.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static atomic_long calls_seen;

static const char* setting(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value != NULL && value[0] != '\0' ? value : otherwise;
}

static const char* rank_text(void) { return setting("OMPI_COMM_WORLD_RANK", "0"); }

// Absolute path of `path` relative to the directory `at`; lexical. Returns whether there is one.
static int absolute(int at, const char* path, char* into) {
  char base[PATH_MAX] = "";
  if (path[0] == '/') return snprintf(into, PATH_MAX, "%s", path) < PATH_MAX;
  if (at == AT_FDCWD) {
    if (getcwd(base, sizeof base) == NULL) return 0;
  } else {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", at);
    const ssize_t length = readlink(link, base, sizeof base - 1);
    if (length < 0) return 0;
    base[length] = '\0';
  }
  if (path[0] == '\0') return snprintf(into, PATH_MAX, "%s", base) < PATH_MAX;
  return snprintf(into, PATH_MAX, "%s/%s", base, path) < PATH_MAX;
}

static int below_directory(const char* path) {
  const char* directory = getenv("SLUICE_FAULT_DIRECTORY");
  if (directory == NULL) return 0;
  const size_t length = strlen(directory);
  return strncmp(path, directory, length) == 0 && (path[length] == '/' || path[length] == '\0');
}

// By system calls: it must not count itself.
static void log_call(const char* call, long number, const char* path) {
  const char* file = getenv("SLUICE_FAULT_LOG");
  if (file == NULL) return;
  char line[PATH_MAX + 100];
  const int length = snprintf(line, sizeof line, "%s %s %ld %s\n", rank_text(), call, number, path);
  const long fd = syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_APPEND, 0644);
  if (fd < 0) return;
  syscall(SYS_write, fd, line, (size_t)length);
  syscall(SYS_close, fd);
}

static void sleep_for(double seconds) {
  struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
  while (nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
}

enum { GO_ON = 0, DIE = -1 };

// What becomes of a call: GO_ON, DIE, or an errno to fail with.
static int verdict(const char* call, int at, const char* path) {
  char full[PATH_MAX];
  if (path == NULL || !absolute(at, path, full) || !below_directory(full)) return GO_ON;
  const char* only = setting("SLUICE_FAULT_CALL", "any");
  if (strcmp(only, "any") != 0 && strcmp(only, call) != 0) return GO_ON;
  const char* rank = getenv("SLUICE_FAULT_RANK");
  if (rank != NULL && rank[0] != '\0' && strcmp(rank, rank_text()) != 0) return GO_ON;
  const char* gate = getenv("SLUICE_FAULT_GATE");
  if (gate != NULL && access(gate, F_OK) != 0) return GO_ON;
  const long number = atomic_fetch_add(&calls_seen, 1) + 1;
  const long nth = atol(setting("SLUICE_FAULT_NTH", "1"));
  const long times = atol(setting("SLUICE_FAULT_TIMES", "1"));
  if (number < nth || (times > 0 && number >= nth + times)) return GO_ON;

  const char* action = setting("SLUICE_FAULT_ACTION", "log");
  log_call(call, number, full);
  if (strcmp(action, "kill") == 0) return DIE;
  if (strcmp(action, "launcher") == 0) kill(getppid(), SIGKILL);
  if (strncmp(action, "sleep:", 6) == 0) sleep_for(atof(action + 6));
  if (strcmp(action, "ENOSPC") == 0) return ENOSPC;
  if (strcmp(action, "EIO") == 0) return EIO;
  if (strcmp(action, "EROFS") == 0) return EROFS;
  if (strcmp(action, "EDQUOT") == 0) return EDQUOT;
  return GO_ON;
}

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

// Whether the call shall fail, with errno set.
static int fails(const char* call, int at, const char* path) {
  const int what = verdict(call, at, path);
  if (what == DIE) die();
  if (what == GO_ON) return 0;
  errno = what;
  return 1;
}

#define REAL(type, name, ...)       \
  static type (*real)(__VA_ARGS__); \
  if (real == NULL) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static mode_t mode_of(int flags, va_list arguments) {
  return (flags & (O_CREAT | __O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
}

static int writes(int flags) { return (flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)) != 0; }

static int open_fails(int flags, int at, const char* path) {
  const int lists = strcmp(setting("SLUICE_FAULT_CALL", "any"), "list") == 0;
  if (lists) return (flags & O_DIRECTORY) != 0 && fails("list", at, path);
  return writes(flags) && fails("open", at, path);
}

#define DEFINE_OPEN(name)                             \
  int name(const char* path, int flags, ...) {        \
    va_list arguments;                                \
    va_start(arguments, flags);                       \
    const mode_t mode = mode_of(flags, arguments);    \
    va_end(arguments);                                \
    if (open_fails(flags, AT_FDCWD, path)) return -1; \
    REAL(int, #name, const char*, int, ...);          \
    return real(path, flags, mode);                   \
  }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)

#define DEFINE_OPENAT(name)                            \
  int name(int at, const char* path, int flags, ...) { \
    va_list arguments;                                 \
    va_start(arguments, flags);                        \
    const mode_t mode = mode_of(flags, arguments);     \
    va_end(arguments);                                 \
    if (open_fails(flags, at, path)) return -1;        \
    REAL(int, #name, int, const char*, int, ...);      \
    return real(at, path, flags, mode);                \
  }
DEFINE_OPENAT(openat)
DEFINE_OPENAT(openat64)

#define DEFINE_FOPEN(name)                                                          \
  FILE* name(const char* path, const char* mode) {                                  \
    if (strpbrk(mode, "wa+") != NULL && fails("open", AT_FDCWD, path)) return NULL; \
    REAL(FILE*, #name, const char*, const char*);                                   \
    return real(path, mode);                                                        \
  }
DEFINE_FOPEN(fopen)
DEFINE_FOPEN(fopen64)

ssize_t write(int fd, const void* bytes, size_t count) {
  REAL(ssize_t, "write", int, const void*, size_t);
  const int what = verdict("write", fd, "");
  if (what == DIE) {
    real(fd, bytes, count / 2);
    die();
  }
  if (what == GO_ON) return real(fd, bytes, count);
  errno = what;
  return -1;
}

ssize_t writev(int fd, const struct iovec* parts, int count) {
  if (fails("write", fd, "")) return -1;
  REAL(ssize_t, "writev", int, const struct iovec*, int);
  return real(fd, parts, count);
}

#define DEFINE_PWRITE(name, offset_type)                                      \
  ssize_t name(int fd, const void* bytes, size_t count, offset_type offset) { \
    REAL(ssize_t, #name, int, const void*, size_t, offset_type);              \
    const int what = verdict("write", fd, "");                                \
    if (what == DIE) {                                                        \
      real(fd, bytes, count / 2, offset);                                     \
      die();                                                                  \
    }                                                                         \
    if (what == GO_ON) return real(fd, bytes, count, offset);                 \
    errno = what;                                                             \
    return -1;                                                                \
  }
DEFINE_PWRITE(pwrite, off_t)
DEFINE_PWRITE(pwrite64, off64_t)

#define DEFINE_PREAD(name, offset_type)                                               \
  ssize_t name(int fd, void* bytes, size_t count, offset_type offset) {               \
    const int counts = strcmp(setting("SLUICE_FAULT_CALL", "any"), "read") == 0;      \
    if (counts && fails("read", fd, "")) return -1;                                   \
    REAL(ssize_t, #name, int, void*, size_t, offset_type);                            \
    return real(fd, bytes, count, offset);                                            \
  }
DEFINE_PREAD(pread, off_t)
DEFINE_PREAD(pread64, off64_t)

#define DEFINE_ON_FILE(name, call)      \
  int name(int fd) {                    \
    if (fails(call, fd, "")) return -1; \
    REAL(int, #name, int);              \
    return real(fd);                    \
  }
DEFINE_ON_FILE(fsync, "sync")
DEFINE_ON_FILE(fdatasync, "sync")

#define DEFINE_RESIZE(name, offset_type)   \
  int name(int fd, offset_type size) {     \
    if (fails("write", fd, "")) return -1; \
    REAL(int, #name, int, offset_type);    \
    return real(fd, size);                 \
  }
DEFINE_RESIZE(ftruncate, off_t)
DEFINE_RESIZE(ftruncate64, off64_t)

int rename(const char* from, const char* to) {
  if (fails("rename", AT_FDCWD, to)) return -1;
  REAL(int, "rename", const char*, const char*);
  return real(from, to);
}

int renameat(int from_at, const char* from, int to_at, const char* to) {
  if (fails("rename", to_at, to)) return -1;
  REAL(int, "renameat", int, const char*, int, const char*);
  return real(from_at, from, to_at, to);
}

int renameat2(int from_at, const char* from, int to_at, const char* to, unsigned int flags) {
  if (fails("rename", to_at, to)) return -1;
  REAL(int, "renameat2", int, const char*, int, const char*, unsigned int);
  return real(from_at, from, to_at, to, flags);
}

#define DEFINE_ON_PATH(name, call)              \
  int name(const char* path) {                  \
    if (fails(call, AT_FDCWD, path)) return -1; \
    REAL(int, #name, const char*);              \
    return real(path);                          \
  }
DEFINE_ON_PATH(unlink, "remove")
DEFINE_ON_PATH(remove, "remove")
DEFINE_ON_PATH(rmdir, "remove")

int unlinkat(int at, const char* path, int flags) {
  if (fails("remove", at, path)) return -1;
  REAL(int, "unlinkat", int, const char*, int);
  return real(at, path, flags);
}

int mkdir(const char* path, mode_t mode) {
  if (fails("mkdir", AT_FDCWD, path)) return -1;
  REAL(int, "mkdir", const char*, mode_t);
  return real(path, mode);
}

int mkdirat(int at, const char* path, mode_t mode) {
  if (fails("mkdir", at, path)) return -1;
  REAL(int, "mkdirat", int, const char*, mode_t);
  return real(at, path, mode);
}

int futimens(int fd, const struct timespec times[2]) {
  if (fails("touch", fd, "")) return -1;
  REAL(int, "futimens", int, const struct timespec*);
  return real(fd, times);
}

int utimensat(int at, const char* path, const struct timespec times[2], int flags) {
  if (fails("touch", at, path)) return -1;
  REAL(int, "utimensat", int, const char*, const struct timespec*, int);
  return real(at, path, times, flags);
}
