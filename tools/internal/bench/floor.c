#include "floor.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

// Returns the number of bytes read, less than n only at the end of the stream, or -1.
static ssize_t read_all(int fd, char *buf, size_t n) {
  size_t got = 0;
  while (got < n) {
    ssize_t k = recv(fd, buf + got, n - got, 0);
    if (k < 0 && errno == EINTR) continue;
    if (k < 0) return -1;
    if (k == 0) break;
    got += (size_t)k;
  }
  return (ssize_t)got;
}

static int write_all(int fd, const char *buf, size_t n) {
  size_t done = 0;
  while (done < n) {
    ssize_t k = send(fd, buf + done, n - done, MSG_NOSIGNAL);
    if (k < 0 && errno == EINTR) continue;
    if (k < 0) return -1;
    done += (size_t)k;
  }
  return 0;
}

void floor_read(const char *buf, size_t n) {
  unsigned sum = 0;
  for (size_t i = 0; i < n; i++) sum += (unsigned char)buf[i];
  __asm__ volatile("" : : "r"(sum)); // keeps the compiler from removing the sum
}

void floor_write(char *buf, size_t n) {
  static __thread char turn;
  memset(buf, ++turn, n);
  __asm__ volatile("" : : "r"(buf) : "memory");
}

int floor_serve(int fd, char *in_buf, size_t in, char *out_buf, size_t out, int touch) {
  for (;;) {
    ssize_t got = read_all(fd, in_buf, in);
    if (got < 0) return errno;
    if ((size_t)got < in) return got == 0 ? 0 : EPIPE;
    if (write_all(fd, out_buf, out) != 0) return errno;
    if (touch) {
      floor_read(in_buf, in);
      floor_write(out_buf, out);
    }
  }
}

int64_t floor_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int floor_measure(int fd, char *out_buf, size_t out, char *in_buf, size_t in, int n, int touch, int64_t *ns) {
  for (int i = 0; i < n; i++) {
    if (touch) floor_write(out_buf, out);
    int64_t start = floor_now();
    if (write_all(fd, out_buf, out) != 0) return errno;
    ssize_t got = read_all(fd, in_buf, in);
    if (got < 0) return errno;
    if ((size_t)got < in) return EPIPE;
    ns[i] = floor_now() - start;
    if (touch) floor_read(in_buf, in);
  }
  return 0;
}
