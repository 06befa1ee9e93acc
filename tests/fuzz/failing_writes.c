/* Lets the n-th write to a file below a folder fail, as a disk does: loaded by LD_PRELOAD, told by fail_writes().
 *
 * Python, safetensors, PyTorch and SQLite all write through these functions of the C library. A failure lasts: the disk
 * stays full, and what is written after it fails as well.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long left = -1; /* writes until the failure; below zero: none is planned */
static int failing, error_number, is_short;
static long counted;

/* Fail with `error` at write number `at` (from 1 on) to a file below `below`; with `partial`, half of it is written. */
void fail_writes(const char *below, long at, int error, int partial) {
  strncpy(folder, below, sizeof folder - 1);
  left = at;
  error_number = error;
  is_short = partial;
  failing = 0;
  counted = 0;
}

/* How many writes there were since fail_writes(). */
long counted_writes(void) { return counted; }

static int is_below(int file) {
  if (!folder[0]) return 0;
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length <= 0) return 0;
  path[length] = 0;
  return strncmp(path, folder, strlen(folder)) == 0;
}

/* How many bytes may be written: -1 for none, with errno set. */
static ssize_t allowed(int file, size_t size) {
  if (!is_below(file)) return (ssize_t)size;
  counted++;
  if (!failing && left > 0 && --left == 0) {
    failing = 1;
    if (is_short && size > 1) return (ssize_t)(size / 2);
  }
  if (!failing) return (ssize_t)size;
  errno = error_number;
  return -1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int file, const void *bytes, size_t size) {
  ssize_t size_now = allowed(file, size);
  return size_now < 0 ? -1 : REAL(write)(file, bytes, (size_t)size_now);
}

ssize_t pwrite(int file, const void *bytes, size_t size, off_t at) {
  ssize_t size_now = allowed(file, size);
  return size_now < 0 ? -1 : REAL(pwrite)(file, bytes, (size_t)size_now, at);
}

ssize_t pwrite64(int file, const void *bytes, size_t size, off_t at) {
  ssize_t size_now = allowed(file, size);
  return size_now < 0 ? -1 : REAL(pwrite64)(file, bytes, (size_t)size_now, at);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
  size_t size = 0;
  for (int i = 0; i < count; i++) size += parts[i].iov_len;
  return allowed(file, size) < (ssize_t)size ? -1 : REAL(writev)(file, parts, count);
}
