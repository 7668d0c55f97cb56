/* Preloaded before a program: system calls fail, or answer, as the environment says.
 *
 * FAULT_FOLDER=PATH FAULT_AT=N FAULT_ERROR=E   from the Nth call on that would change something under PATH, such calls
 *                                              fail with error number E; FAULT_ONCE=1: the Nth alone;
 *                                              FAULT_SPARES_RENAMES=1: none of these
 * FAULT_REPLACED=PATH FAULT_REPLACEMENT=PATH   before a link is made, the one becomes the other
 * FAULT_LOCKS=E                                every lock fails with error number E
 * FAULT_CLOCK=SECONDS                          the clock of the day stands there */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static long setting(const char* name) {
  const char* text = getenv(name);
  return text == NULL ? 0 : atol(text);
}

static int under(const char* path) {
  const char* folder = getenv("FAULT_FOLDER");
  return folder != NULL && strncmp(path, folder, strlen(folder)) == 0;
}

/* A path as the program gave it: relative ones are seen from where it runs. */
static int names_ours(const char* path) {
  char whole[2 * PATH_MAX], here[PATH_MAX];
  if (path[0] == '/' || getcwd(here, sizeof here) == NULL) return under(path);
  snprintf(whole, sizeof whole, "%s/%s", here, path);
  return under(whole);
}

static int is_ours(int descriptor) {
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = '\0';
  return under(path);
}

/* Whether this call fails; errno is set then. */
static int fails(void) {
  static long calls = 0;
  const long first = setting("FAULT_AT"), call = __sync_add_and_fetch(&calls, 1);
  if (first == 0 || call < first || (call > first && setting("FAULT_ONCE"))) return 0;
  errno = (int)setting("FAULT_ERROR");
  return 1;
}

#define CHANGES(type, name, parameters, arguments, ours) \
  type name parameters { return (ours) && fails() ? -1 : NEXT(name) arguments; }

CHANGES(ssize_t, write, (int fd, const void* bytes, size_t n), (fd, bytes, n), is_ours(fd))
CHANGES(ssize_t, writev, (int fd, const struct iovec* pieces, int n), (fd, pieces, n), is_ours(fd))
CHANGES(ssize_t, pwrite, (int fd, const void* bytes, size_t n, off_t at), (fd, bytes, n, at), is_ours(fd))
CHANGES(ssize_t, pwrite64, (int fd, const void* bytes, size_t n, off64_t at), (fd, bytes, n, at), is_ours(fd))
CHANGES(int, ftruncate, (int fd, off_t length), (fd, length), is_ours(fd))
CHANGES(int, ftruncate64, (int fd, off64_t length), (fd, length), is_ours(fd))
CHANGES(int, fsync, (int fd), (fd), is_ours(fd))
CHANGES(int, rename, (const char* from, const char* to), (from, to),
        names_ours(to) && !setting("FAULT_SPARES_RENAMES"))
CHANGES(int, mkdir, (const char* path, mode_t mode), (path, mode), names_ours(path))

int link(const char* from, const char* to) {
  const char *replaced = getenv("FAULT_REPLACED"), *replacement = getenv("FAULT_REPLACEMENT");
  if (replaced != NULL && replacement != NULL) NEXT(rename)(replacement, replaced);
  return names_ours(to) && fails() ? -1 : NEXT(link)(from, to);
}

/* These two return the error number. */
int posix_fallocate(int fd, off_t at, off_t length) {
  return is_ours(fd) && fails() ? errno : NEXT(posix_fallocate)(fd, at, length);
}
int posix_fallocate64(int fd, off64_t at, off64_t length) {
  return is_ours(fd) && fails() ? errno : NEXT(posix_fallocate64)(fd, at, length);
}

static mode_t mode_of(int flags, va_list rest) { return flags & O_CREAT ? va_arg(rest, mode_t) : 0; }

int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = mode_of(flags, rest);
  va_end(rest);
  return flags & O_CREAT && names_ours(path) && fails() ? -1 : NEXT(open)(path, flags, mode);
}
int open64(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = mode_of(flags, rest);
  va_end(rest);
  return flags & O_CREAT && names_ours(path) && fails() ? -1 : NEXT(open64)(path, flags, mode);
}
FILE* fopen(const char* path, const char* mode) {
  return mode[0] == 'w' && names_ours(path) && fails() ? NULL : NEXT(fopen)(path, mode);
}
FILE* fopen64(const char* path, const char* mode) {
  return mode[0] == 'w' && names_ours(path) && fails() ? NULL : NEXT(fopen64)(path, mode);
}

/* Whether locks fail; errno is set then. */
static int no_locks(void) {
  if (!setting("FAULT_LOCKS")) return 0;
  errno = (int)setting("FAULT_LOCKS");
  return 1;
}

int flock(int fd, int operation) { return no_locks() ? -1 : NEXT(flock)(fd, operation); }

static int locks(int command) {
  return command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW;
}
int fcntl(int fd, int command, ...) {
  va_list rest;
  va_start(rest, command);
  void* argument = va_arg(rest, void*);
  va_end(rest);
  return locks(command) && no_locks() ? -1 : NEXT(fcntl)(fd, command, argument);
}
int fcntl64(int fd, int command, ...) {
  va_list rest;
  va_start(rest, command);
  void* argument = va_arg(rest, void*);
  va_end(rest);
  return locks(command) && no_locks() ? -1 : NEXT(fcntl64)(fd, command, argument);
}

static int stands(time_t* now) {
  const char* text = getenv("FAULT_CLOCK");
  if (text != NULL) *now = atol(text);
  return text != NULL;
}

time_t time(time_t* result) {
  time_t now;
  if (!stands(&now)) return NEXT(time)(result);
  if (result != NULL) *result = now;
  return now;
}
int clock_gettime(clockid_t clock, struct timespec* result) {
  const int failed = NEXT(clock_gettime)(clock, result);
  if (clock == CLOCK_REALTIME && failed == 0) stands(&result->tv_sec);
  return failed;
}
int gettimeofday(struct timeval* restrict result, void* restrict zone) {
  const int failed = NEXT(gettimeofday)(result, zone);
  if (failed == 0) stands(&result->tv_sec);
  return failed;
}
