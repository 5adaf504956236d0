#include "shim.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

sa_sock *sa_sock_new(void *soc, int fd, int sleeps) {
  sa_sock *s = calloc(1, sizeof *s);
  if (s == NULL) return NULL;
  s->soc = soc;
  s->fd = fd;
  s->wake = sleeps ? eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : -1;
  if (sleeps && s->wake < 0) {
    int why = errno;
    free(s);
    errno = why;
    return NULL;
  }
  pthread_mutex_init(&s->mu, NULL);
  return s;
}

void sa_sock_free(sa_sock *s) {
  pthread_mutex_destroy(&s->mu);
  if (s->wake >= 0) close(s->wake);
  free(s);
}

sa_msg *sa_msg_new(void) { return calloc(1, sizeof(sa_msg)); }

void sa_msg_close(sa_msg *m) {
  for (int i = 0; i < m->n; i++) zmq_msg_close(&m->part[i]);
  m->n = 0;
  m->extra = 0;
}

void sa_msg_free(sa_msg *m) {
  sa_msg_close(m);
  free(m);
}

int sa_msg_fd(sa_msg *m) { return m->n > 0 ? zmq_msg_get(&m->part[m->n - 1], ZMQ_SRCFD) : -1; }

const char *sa_msg_host(sa_msg *m) { return m->n > 0 ? zmq_msg_gets(&m->part[m->n - 1], "Peer-Address") : NULL; }

// libzmq hands up a multipart message only when it is complete. After its first part, no receive can fail
// for lack of data. The caller holds s->mu.
static int recv_parts(sa_sock *s, sa_msg *m) {
  int more = 1;
  m->n = 0;
  m->extra = 0;
  m->surplus = 0;
  while (more) {
    zmq_msg_t surplus, *p = m->n < SA_MAX_PARTS ? &m->part[m->n] : &surplus;
    zmq_msg_init(p);
    int n;
    do n = zmq_msg_recv(p, s->soc, ZMQ_DONTWAIT);
    while (n < 0 && zmq_errno() == EINTR);
    if (n < 0) {
      int err = zmq_errno();
      zmq_msg_close(p);
      if (err == EAGAIN && m->n == 0) return 0;
      sa_msg_close(m);
      return -err;
    }
    more = zmq_msg_more(p);
    if (p == &surplus) {
      m->extra++;
      m->surplus += (size_t)n + 9;
      zmq_msg_close(p);
      continue;
    }
    m->data[m->n] = zmq_msg_data(p);
    m->size[m->n] = (size_t)n;
    m->n++;
  }
  return 1;
}

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int sa_recv(sa_sock *s, sa_msg *m, int64_t spin_ns, int park) {
  int64_t end = spin_ns > 0 ? now() + spin_ns : 0;
  for (;;) {
    int last = spin_ns <= 0 || now() >= end;
    pthread_mutex_lock(&s->mu);
    int rc = recv_parts(s, m);
    if (rc != 0 || last) s->waiting = rc == 0 && park;
    pthread_mutex_unlock(&s->mu);
    if (rc != 0 || last) return rc;
    sched_yield();
  }
}

void sa_wait(sa_sock *s) {
  struct pollfd p[2] = {{s->fd, POLLIN, 0}, {s->wake, POLLIN, 0}};
  while (poll(p, 2, -1) < 0 && errno == EINTR) {
  }
  if (p[1].revents) {
    uint64_t n;
    if (read(s->wake, &n, sizeof n) < 0) return; // another thread has read it
  }
}

void sa_wake(sa_sock *s) {
  uint64_t one = 1;
  if (write(s->wake, &one, sizeof one) < 0) return; // it is awake already
}

// A frame whose release takes bytes from an account.
typedef struct {
  sa_acct *acct;
  int64_t own;
  size_t mapped; // 0: from malloc
  char bytes[];
} counted;

// Length from which a frame is mapped, so that its release returns the memory to the system. malloc would keep the memory: each free of
// a mapping raises the length from which malloc maps. For shorter frames the pages of a new mapping cost more than the copy.
#define SA_MAP_FROM (2 << 20)

static counted *counted_new(size_t n) {
  size_t size = sizeof(counted) + n;
  counted *c;
  if (n < SA_MAP_FROM) {
    c = malloc(size);
    if (c != NULL) c->mapped = 0;
    return c;
  }
  c = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (c == MAP_FAILED) return NULL;
  c->mapped = size;
  return c;
}

static void counted_free(counted *c) {
  if (c->mapped > 0) munmap(c, c->mapped);
  else free(c);
}

void sa_settle(sa_acct *acct, int64_t bytes) {
  if (__atomic_sub_fetch(&acct->unsent, bytes, __ATOMIC_ACQ_REL) == 0) free(acct);
}

// Runs on a thread of libzmq.
static void release(void *data, void *hint) {
  (void)data;
  counted *c = hint;
  if (c->own > 0) sa_settle(c->acct, c->own); // the account may be freed before the other parts are released
  counted_free(c);
}

static int counted_part(zmq_msg_t *p, const void *data, size_t n, sa_acct *acct, int64_t own) {
  counted *c = counted_new(n);
  if (c == NULL) return -1;
  c->acct = acct;
  c->own = own;
  if (n > 0) memcpy(c->bytes, data, n);
  if (zmq_msg_init_data(p, c->bytes, n, release, c) == 0) return 0;
  counted_free(c);
  return -1;
}

static int copy_part(zmq_msg_t *p, const void *data, size_t n) {
  if (zmq_msg_init_size(p, n) != 0) return -1;
  if (n > 0) memcpy(zmq_msg_data(p), data, n);
  return 0;
}

// Sends the n parts of one message and closes them. Only the first part can be refused: the queue accepts or
// refuses whole messages. Returns 0 or -errno.
static int send_parts(sa_sock *s, zmq_msg_t *part, int n) {
  for (int i = 0; i < n; i++) {
    int sent, flags = ZMQ_DONTWAIT | (i < n - 1 ? ZMQ_SNDMORE : 0);
    do sent = zmq_msg_send(&part[i], s->soc, flags);
    while (sent < 0 && zmq_errno() == EINTR);
    if (sent < 0) {
      int err = zmq_errno();
      for (; i < n; i++) zmq_msg_close(&part[i]);
      return -err;
    }
  }
  return 0;
}

// Reports whether the receiver sleeps although there is a message: a send may have consumed the signal that would have woken it.
static int must_wake(sa_sock *s) {
  int events = 0;
  size_t len = sizeof events;
  if (!s->waiting || zmq_getsockopt(s->soc, ZMQ_EVENTS, &events, &len) != 0 || !(events & ZMQ_POLLIN)) return 0;
  s->waiting = 0;
  return 1;
}

void sa_discard(sa_sock *s) {
  zmq_msg_t m;
  zmq_msg_init(&m);
  for (int i = 0; i < 1000 && zmq_msg_recv(&m, s->soc, ZMQ_DONTWAIT) >= 0; i++) {
  }
  zmq_msg_close(&m);
}

int sa_probe(sa_sock *s, sa_acct *acct) {
  zmq_msg_t m;
  if (counted_part(&m, "", 0, acct, 1) != 0) return -ENOMEM;
  __atomic_add_fetch(&acct->unsent, 1, __ATOMIC_RELAXED);
  return send_parts(s, &m, 1);
}

int sa_send(sa_sock *s, const char *dest, int destlen, const char *self, int selflen, const void *meta, size_t metalen,
            int nframes, uintptr_t p0, size_t n0, uintptr_t p1, size_t n1, uintptr_t p2, size_t n2, sa_acct *acct,
            int64_t bytes) {
  const void *data[1 + SA_MAX_DATA] = {meta, (void *)p0, (void *)p1, (void *)p2};
  size_t len[1 + SA_MAX_DATA] = {metalen, n0, n1, n2};
  zmq_msg_t part[SA_MAX_SEND];
  int n = 0, rc;

  if (destlen > 0) {
    if (copy_part(&part[n], dest, (size_t)destlen) != 0) goto nomem;
    n++;
    if (copy_part(&part[n], self, (size_t)selflen) != 0) goto nomem;
    n++;
  }
  for (int i = 0; i <= nframes; i++, n++) {
    int last = i == nframes; // the last part counts the bytes of all parts
    if (!last && len[i] < SA_MAP_FROM) {
      if (copy_part(&part[n], data[i], len[i]) != 0) goto nomem;
      continue;
    }
    int64_t own = last ? bytes : 0;
    if (counted_part(&part[n], data[i], len[i], acct, own) != 0) goto nomem;
    bytes -= own;
  }

  pthread_mutex_lock(&s->mu);
  rc = send_parts(s, part, n);
  if (rc == 0) rc = must_wake(s);
  pthread_mutex_unlock(&s->mu);
  return rc;

nomem:
  sa_settle(acct, bytes);
  for (int i = 0; i < n; i++) zmq_msg_close(&part[i]);
  return -ENOMEM;
}

#ifdef __GLIBC__
#include <malloc.h>
#include <stdio.h>
#include <sys/resource.h>
// The address space that Go's runtime and libzmq need before a node can check its limits.
#define SA_SPACE (1300ull << 20)

// If the address space is limited, this constructor makes all threads use one arena of the C library. Each further arena would reserve
// 64 MiB, even if no space is left for thread stacks; Go and libzmq then abort. The constructor runs before Go
// starts threads. If Go cannot start, it prints the reason before Go aborts.
__attribute__((constructor)) static void save_space(void) {
  struct rlimit l;
  if (getrlimit(RLIMIT_AS, &l) != 0 || l.rlim_cur == RLIM_INFINITY) return;
  mallopt(M_ARENA_MAX, 1);
  unsigned long pages = 0;
  FILE *f = fopen("/proc/self/statm", "re");
  if (f == NULL) return;
  int n = fscanf(f, "%lu", &pages);
  fclose(f);
  unsigned long long used = pages * (unsigned long long)sysconf(_SC_PAGESIZE);
  if (n == 1 && l.rlim_cur < used + SA_SPACE)
    fprintf(stderr, "stepaf: too few bytes of address space: RLIMIT_AS is %llu bytes, Go and libzmq need %llu (%llu in use already), and abort "
            "without them: ulimit -v unlimited (limits.conf: as; systemd: LimitAS=infinity)\n", (unsigned long long)l.rlim_cur, used + SA_SPACE, used);
}
#endif
