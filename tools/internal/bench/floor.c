#include "floor.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

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

// Stores a value and wakes the threads that wait for it.
static void post(struct floor_word *w, uint32_t value) {
  __atomic_store_n(&w->value, value, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&w->asleep, __ATOMIC_SEQ_CST) == 0) return;
  __atomic_store_n(&w->asleep, 0, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, &w->value, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

// Waits until the value is not seen, and returns it.
static uint32_t await(struct floor_word *w, uint32_t seen, int64_t poll) {
  uint32_t value;
  for (int64_t end = 0;;) {
    if ((value = __atomic_load_n(&w->value, __ATOMIC_ACQUIRE)) != seen) return value;
    int64_t now = floor_now();
    if (end == 0) end = now + poll;
    if (now >= end) break;
    sched_yield();
  }
  for (;;) {
    __atomic_store_n(&w->asleep, 1, __ATOMIC_SEQ_CST);
    if ((value = __atomic_load_n(&w->value, __ATOMIC_SEQ_CST)) != seen) return value;
    syscall(SYS_futex, &w->value, FUTEX_WAIT, seen, NULL, NULL, 0);
  }
}

// Waits until all threads of the gate wait. Returns 0, or ECANCELED if the gate is broken.
static int pass(struct floor_gate *g) {
  if (g->peers > 1) {
    uint32_t turn = __atomic_load_n(&g->turn.value, __ATOMIC_SEQ_CST);
    if (__atomic_add_fetch(&g->waiting, 1, __ATOMIC_SEQ_CST) == g->peers) {
      __atomic_store_n(&g->waiting, 0, __ATOMIC_SEQ_CST);
      post(&g->turn, turn + 1);
    } else if (__atomic_load_n(&g->broken, __ATOMIC_SEQ_CST) == 0) {
      await(&g->turn, turn, g->poll);
    }
  }
  return __atomic_load_n(&g->broken, __ATOMIC_SEQ_CST) ? ECANCELED : 0;
}

void floor_gate_break(struct floor_gate *g) {
  __atomic_store_n(&g->broken, 1, __ATOMIC_SEQ_CST);
  post(&g->turn, __atomic_load_n(&g->turn.value, __ATOMIC_SEQ_CST) + 1);
}

int floor_measure(int fd, char *out_buf, size_t out, char *in_buf, size_t in, int n, int touch, struct floor_gate *gate,
                  int64_t *start, int64_t *end) {
  for (int i = 0; i < n; i++) {
    if (touch) floor_write(out_buf, out);
    int e = pass(gate);
    if (e != 0) return e;
    start[i] = floor_now();
    if (write_all(fd, out_buf, out) != 0) return errno;
    ssize_t got = read_all(fd, in_buf, in);
    if (got < 0) return errno;
    if ((size_t)got < in) return EPIPE;
    end[i] = floor_now();
    if (touch) floor_read(in_buf, in);
  }
  return 0;
}

void floor_shared_serve(char *mem, size_t at, const char *out_buf, size_t out, int64_t poll) {
  struct floor_shared *s = (struct floor_shared *)mem;
  for (uint32_t seen = 0; (seen = await(&s->there, seen, poll)) != FLOOR_ENDED;) {
    memcpy(mem + at, out_buf, out);
    post(&s->back, seen);
  }
}

int floor_shared_measure(char *mem, size_t at, const char *out_buf, size_t out, int64_t poll, int n,
                         struct floor_gate *gate, int64_t *start, int64_t *end) {
  struct floor_shared *s = (struct floor_shared *)mem;
  uint32_t seen = __atomic_load_n(&s->back.value, __ATOMIC_ACQUIRE);
  for (int i = 0; i < n && seen != FLOOR_ENDED; i++) {
    int e = pass(gate);
    if (e != 0) return e;
    start[i] = floor_now();
    memcpy(mem + at, out_buf, out);
    post(&s->there, seen + 1);
    seen = await(&s->back, seen, poll);
    end[i] = floor_now();
  }
  return seen == FLOOR_ENDED ? EPIPE : 0;
}

void floor_shared_end(char *mem) {
  struct floor_shared *s = (struct floor_shared *)mem;
  post(&s->there, FLOOR_ENDED);
  post(&s->back, FLOOR_ENDED);
}
