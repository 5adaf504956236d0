#include "shim.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

sa_sock *sa_sock_new(void *soc, int fd) {
  sa_sock *s = calloc(1, sizeof *s);
  if (s == NULL) return NULL;
  s->soc = soc;
  s->fd = fd;
  s->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (s->wake < 0) {
    int why = errno;
    free(s);
    errno = why;
    return NULL;
  }
  pthread_mutex_init(&s->mu, NULL);
  return s;
}

// Runs on a thread of libzmq, like release.
static void release_head(void *data, void *hint) {
  (void)data;
  sa_head *h = hint;
  __atomic_sub_fetch(&h->acct->unsent, h->own, __ATOMIC_RELAXED);
  free(h);
}

// Makes the first frame of a complete bundle. Returns 0, or -ENOMEM after it has closed all parts.
static int seal(sa_held *h) {
  if (h->head == NULL) return 0;
  sa_head *head = h->head;
  h->head = NULL;
  memcpy(head->bytes, &h->count, sizeof h->count);
  if (zmq_msg_init_data(&h->part[h->names], head->bytes, h->len, release_head, head) == 0) return 0;
  release_head(NULL, head);
  for (int i = 0; i < h->n; i++)
    if (i != h->names) zmq_msg_close(&h->part[i]);
  return -ENOMEM;
}

static void close_held(sa_held *h) {
  if (seal(h) != 0) return;
  for (int i = 0; i < h->n; i++) zmq_msg_close(&h->part[i]);
}

void sa_sock_free(sa_sock *s) {
  for (int i = 0; i < s->nheld; i++) close_held(&s->held[i]);
  for (sa_held *h = s->first, *next; h != NULL; h = next) {
    next = h->next;
    close_held(h);
    free(h);
  }
  pthread_mutex_destroy(&s->mu);
  close(s->wake);
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

static void know(sa_msg *m, int i) {
  m->data[i] = zmq_msg_data(&m->part[i]);
  m->size[i] = zmq_msg_size(&m->part[i]);
}

void sa_msg_share(sa_msg *to, sa_msg *from, int first, int n) {
  zmq_msg_init(&to->part[0]);
  zmq_msg_copy(&to->part[0], &from->part[1]);
  know(to, 0);
  for (to->n = 1; to->n <= n; to->n++) {
    zmq_msg_init(&to->part[to->n]);
    zmq_msg_move(&to->part[to->n], &from->part[first + to->n - 1]);
    know(to, to->n);
  }
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

// Runs on a thread of libzmq when it no longer needs a lent frame.
static void release(void *data, void *hint) {
  (void)data;
  sa_slot *slot = hint;
  if (__atomic_sub_fetch(&slot->refs, 1, __ATOMIC_ACQ_REL) > 0) return;
  __atomic_sub_fetch(&slot->acct->unsent, slot->bytes, __ATOMIC_RELAXED);
  sa_list *l = slot->list;
  slot->next = __atomic_load_n(&l->head, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(&l->head, &slot->next, slot, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
  }
}

static int head_part(zmq_msg_t *p, const void *meta, size_t n, sa_acct *acct, int64_t own) {
  sa_head *h = malloc(sizeof *h + n);
  if (h == NULL) return -1;
  h->acct = acct;
  h->own = own;
  memcpy(h->bytes, meta, n);
  if (zmq_msg_init_data(p, h->bytes, n, release_head, h) == 0) return 0;
  free(h);
  return -1;
}

static int copy_part(zmq_msg_t *p, const void *data, size_t n) {
  if (zmq_msg_init_size(p, n) != 0) return -1;
  if (n > 0) memcpy(zmq_msg_data(p), data, n);
  return 0;
}

// Sends the n parts of one message and closes them. Only the first part can be refused: the queue accepts or
// refuses whole messages. Returns 0 or -errno. If the message is refused, slot is recorded as failed; slot is
// NULL for a message whose acceptance sa_send has already reported.
static int send_parts(sa_sock *s, zmq_msg_t *part, int n, sa_slot *slot) {
  for (int i = 0; i < n; i++) {
    int sent, flags = ZMQ_DONTWAIT | (i < n - 1 ? ZMQ_SNDMORE : 0);
    do sent = zmq_msg_send(&part[i], s->soc, flags);
    while (sent < 0 && zmq_errno() == EINTR);
    if (sent < 0) {
      int err = zmq_errno();
      if (slot != NULL) slot->failed = 1;
      for (; i < n; i++) zmq_msg_close(&part[i]);
      return -err;
    }
  }
  return 0;
}

static int64_t unsent(sa_sock *s) { return s->acct == NULL ? 0 : __atomic_load_n(&s->acct->unsent, __ATOMIC_RELAXED); }

// Reports whether a message must wait. Its bytes are counted already.
static int must_wait(sa_sock *s, int64_t bytes) {
  return s->first != NULL || s->hold || (s->window > 0 && unsent(s) - s->queued - bytes >= s->window);
}

static void move_parts(sa_held *h, zmq_msg_t *part, int n, int64_t bytes) {
  for (h->n = 0; h->n < n; h->n++) {
    zmq_msg_init(&h->part[h->n]);
    zmq_msg_move(&h->part[h->n], &part[h->n]);
  }
  h->bytes = bytes;
  h->next = NULL;
  h->head = NULL;
}

// Sends or queues a message. Returns like send_parts.
static int pass(sa_sock *s, zmq_msg_t *part, int n, sa_slot *slot, int64_t bytes) {
  if (!must_wait(s, bytes)) return send_parts(s, part, n, slot);
  sa_held *h = malloc(sizeof *h);
  if (h == NULL) {
    if (slot != NULL) slot->failed = 1;
    for (int i = 0; i < n; i++) zmq_msg_close(&part[i]);
    return -ENOMEM;
  }
  move_parts(h, part, n, bytes);
  if (s->last != NULL) s->last->next = h;
  else s->first = h;
  s->last = h;
  s->queued += bytes;
  return 0;
}

// Sends the queued messages that may be sent now, or all of them with force.
static void pump(sa_sock *s, int force) {
  while (s->first != NULL) {
    sa_held *h = s->first;
    if (!force && (s->hold || (s->window > 0 && unsent(s) - s->queued >= s->window))) return;
    s->first = h->next;
    if (s->first == NULL) s->last = NULL;
    s->queued -= h->bytes;
    send_parts(s, h->part, h->n, NULL);
    free(h);
  }
}

// Sends the held messages. A refused message is lost, as if it had been sent just before its peer
// ended, and its memory is released as after a send. For the held message mine, which may be NULL, it returns
// like send_parts, and records slot as failed if the message is refused.
static int send_held(sa_sock *s, sa_held *mine, sa_slot *slot) {
  int result = 0;
  for (int i = 0; i < s->nheld; i++) {
    sa_held *h = &s->held[i];
    sa_slot *told = h == mine ? slot : NULL;
    s->queued -= h->bytes;
    if (told != NULL) told->failed = 1; // before seal can release it
    int rc = seal(h);
    if (rc == 0) {
      if (told != NULL) told->failed = 0;
      rc = pass(s, h->part, h->n, told, h->bytes);
    }
    if (h == mine) result = rc;
  }
  s->nheld = 0;
  return result;
}

// Returns the result bits. A send may have consumed the signal that would have woken the receiver.
static int bits(sa_sock *s) {
  int rc = s->first != NULL ? SA_QUEUED : 0, events = 0;
  size_t len = sizeof events;
  if (!s->waiting || zmq_getsockopt(s->soc, ZMQ_EVENTS, &events, &len) != 0 || !(events & ZMQ_POLLIN)) return rc;
  s->waiting = 0;
  return rc | SA_WAKE;
}

int sa_flush(sa_sock *s) {
  int rc = 0;
  pthread_mutex_lock(&s->mu);
  if (s->nheld > 0) {
    send_held(s, NULL, NULL);
    rc = bits(s);
  }
  pthread_mutex_unlock(&s->mu);
  return rc;
}

int sa_pump(sa_sock *s, int force) {
  int rc = 0;
  pthread_mutex_lock(&s->mu);
  if (force) send_held(s, NULL, NULL);
  if (s->first != NULL) {
    pump(s, force);
    rc = bits(s);
  }
  pthread_mutex_unlock(&s->mu);
  return rc;
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
  if (head_part(&m, "", 0, acct, 1) != 0) return -ENOMEM;
  __atomic_add_fetch(&acct->unsent, 1, __ATOMIC_RELAXED);
  return send_parts(s, &m, 1, NULL);
}

void sa_hold(sa_sock *s, int on) {
  pthread_mutex_lock(&s->mu);
  s->hold = on;
  pthread_mutex_unlock(&s->mu);
}

// A message for a bundle, with the parts that become libzmq frames and the parts that are copied.
typedef struct {
  const char *dest, *self;
  int destlen, selflen;
  const void *meta;
  size_t metalen;
  int nframes;
  const sa_frame *frame;
  zmq_msg_t part[SA_BUNDLE_OUTSIDE];
  int n;
  uint32_t mark; // 1: the last element of part is a cancel byte
  size_t len;    // in the first frame
  sa_acct *acct;
  int64_t own, bytes;
} item;

// The layout of bundle.go.
#define BUNDLE_HEAD 8
#define RECORD_HEAD 24
#define OUTSIDE (1u << 31)
static const char bundle_magic[4] = {'S', 'A', 'F', '\xff'};

static size_t padded(size_t n) { return (n + 7) & ~(size_t)7; }

// Reports whether h is for the peer of it and has room for it.
static int fits(const sa_held *h, const item *it) {
  return h->count < SA_BUNDLE_MESSAGES && h->len + it->len <= SA_BUNDLE_ROOM &&
         h->n - h->names - 1 + it->n <= SA_BUNDLE_OUTSIDE && h->names == (it->destlen > 0 ? 2 : 0) &&
         (h->names == 0 || (zmq_msg_size((zmq_msg_t *)&h->part[0]) == (size_t)it->destlen &&
                            memcmp(zmq_msg_data((zmq_msg_t *)&h->part[0]), it->dest, (size_t)it->destlen) == 0));
}

// Starts a bundle. Returns NULL if there is not enough memory.
static sa_held *open_bundle(sa_sock *s, const item *it) {
  size_t room = BUNDLE_HEAD + it->len < SA_BUNDLE_ROOM / 4 ? SA_BUNDLE_ROOM / 4 : BUNDLE_HEAD + it->len;
  if (s->nheld == SA_MAX_HELD) send_held(s, NULL, NULL);
  sa_held *h = &s->held[s->nheld];
  h->head = malloc(sizeof *h->head + room);
  if (h->head == NULL) return NULL;
  h->head->acct = it->acct;
  h->head->own = 0;
  memset(h->head->bytes, 0, 4);
  memcpy(h->head->bytes + 4, bundle_magic, sizeof bundle_magic);
  h->names = h->n = h->count = 0;
  h->len = BUNDLE_HEAD;
  h->room = room;
  h->bytes = 0;
  h->next = NULL;
  if (it->destlen > 0) {
    if (copy_part(&h->part[0], it->dest, (size_t)it->destlen) != 0) goto nomem;
    if (copy_part(&h->part[1], it->self, (size_t)it->selflen) != 0) {
      zmq_msg_close(&h->part[0]);
      goto nomem;
    }
    h->names = 2;
  }
  h->n = h->names + 1;
  s->nheld++;
  return h;

nomem:
  free(h->head);
  h->head = NULL;
  return NULL;
}

static char *put(char *at, const void *data, size_t n) {
  if (n > 0) memcpy(at, data, n);
  memset(at + n, 0, padded(n) - n);
  return at + padded(n);
}

// Adds it to a bundle, and starts one if necessary. Returns NULL if there is not enough memory.
static sa_held *bundle(sa_sock *s, item *it) {
  sa_held *h = NULL;
  for (int i = s->nheld - 1; i >= 0 && h == NULL; i--) {
    sa_held *x = &s->held[i];
    if (x->head == NULL || x->head->acct != it->acct) continue;
    if (!fits(x, it)) break;
    h = x;
  }
  if (h == NULL) h = open_bundle(s, it);
  if (h == NULL) return NULL;
  if (h->len + it->len > h->room) {
    size_t room = 2 * h->room > h->len + it->len ? 2 * h->room : h->len + it->len;
    sa_head *more = realloc(h->head, sizeof *more + room);
    if (more == NULL) return NULL;
    h->head = more;
    h->room = room;
  }
  uint32_t head[RECORD_HEAD / 4] = {(uint32_t)it->metalen, (uint32_t)it->nframes, 0, 0, 0, it->mark};
  for (int i = 0; i < it->nframes; i++) head[2 + i] = (uint32_t)it->frame[i].len | (it->frame[i].lend ? OUTSIDE : 0);
  char *at = put(h->head->bytes + h->len, head, sizeof head);
  at = put(at, it->meta, it->metalen);
  for (int i = 0; i < it->nframes; i++)
    if (!it->frame[i].lend) at = put(at, it->frame[i].ptr, it->frame[i].len);
  h->len += it->len;
  h->count++;
  h->head->own += it->own;
  h->bytes += it->bytes;
  s->queued += it->bytes;
  for (int i = 0; i < it->n; i++, h->n++) {
    zmq_msg_init(&h->part[h->n]);
    zmq_msg_move(&h->part[h->n], &it->part[i]);
  }
  return h;
}

// Sends it in a bundle, like sa_send.
static int send_bundle(sa_sock *s, item *it, sa_slot *slot, int flags) {
  int rc = 0;
  pthread_mutex_lock(&s->mu);
  int full = s->nheld == SA_MAX_HELD; // the held messages may then be sent
  sa_held *h = bundle(s, it);
  if (h == NULL) {
    rc = -ENOMEM;
  } else if (flags & SA_MORE) {
    if (full) rc = bits(s);
  } else {
    if (s->first != NULL) pump(s, 0);
    rc = send_held(s, h, slot);
    if (rc == 0) rc = bits(s);
  }
  pthread_mutex_unlock(&s->mu);
  if (h != NULL) return rc;
  __atomic_sub_fetch(&it->acct->unsent, it->own, __ATOMIC_RELAXED);
  if (slot != NULL) slot->failed = 1;
  for (int i = 0; i < it->n; i++) zmq_msg_close(&it->part[i]);
  return rc;
}

int sa_send(sa_sock *s, const char *dest, int destlen, const char *self, int selflen, const void *meta, size_t metalen,
            int nframes, uintptr_t p0, size_t n0, int lend0, uintptr_t p1, size_t n1, int lend1, uintptr_t p2,
            size_t n2, int lend2, sa_slot *slot, sa_acct *acct, int64_t own, int flags) {
  zmq_msg_t part[SA_MAX_SEND];
  sa_frame frame[SA_MAX_DATA] = {{(void *)p0, n0, lend0}, {(void *)p1, n1, lend1}, {(void *)p2, n2, lend2}};
  int n = 0, next = 0, rc = 0, unmarked = flags & SA_MARK;
  int64_t bytes = own + (slot != NULL ? slot->bytes : 0), unheaded = own;

  if (flags & SA_BUNDLE) {
    item it = {.dest = dest, .destlen = destlen, .self = self, .selflen = selflen, .meta = meta, .metalen = metalen,
               .nframes = nframes, .frame = frame, .acct = acct, .own = own, .bytes = bytes};
    it.len = RECORD_HEAD + padded(metalen);
    for (; next < nframes; next++) {
      sa_frame *f = &frame[next];
      if (!f->lend) it.len += padded(f->len);
      else if (zmq_msg_init_data(&it.part[it.n], f->ptr, f->len, release, slot) == 0) it.n++;
      else break;
    }
    if (next == nframes && unmarked && zmq_msg_init_data(&it.part[it.n], &slot->mark, 1, release, slot) == 0) {
      unmarked = 0;
      it.mark = 1;
      it.n++;
    }
    if (next == nframes && !unmarked) return send_bundle(s, &it, slot, flags);
    for (int i = 0; i < it.n; i++) zmq_msg_close(&it.part[i]);
    goto nomem;
  }
  if (destlen > 0) {
    if (copy_part(&part[n], dest, (size_t)destlen) != 0) goto nomem;
    n++;
    if (copy_part(&part[n], self, (size_t)selflen) != 0) goto nomem;
    n++;
  }
  if (head_part(&part[n], meta, metalen, acct, own) != 0) goto nomem;
  unheaded = 0;
  n++;
  for (; next < nframes; next++, n++) {
    sa_frame *f = &frame[next];
    if (f->lend ? zmq_msg_init_data(&part[n], f->ptr, f->len, release, slot) : copy_part(&part[n], f->ptr, f->len))
      goto nomem;
  }
  if (unmarked) {
    if (zmq_msg_init_data(&part[n], &slot->mark, 1, release, slot) != 0) goto nomem;
    unmarked = 0;
    n++;
  }

  pthread_mutex_lock(&s->mu);
  if ((flags & SA_MORE) && s->nheld < SA_MAX_HELD) {
    move_parts(&s->held[s->nheld++], part, n, bytes);
    s->queued += bytes;
  } else {
    if (s->first != NULL) pump(s, 0);
    send_held(s, NULL, NULL);
    rc = flags & SA_URGENT ? send_parts(s, part, n, slot) : pass(s, part, n, slot, bytes);
    if (rc == 0) rc = bits(s);
  }
  pthread_mutex_unlock(&s->mu);
  return rc;

nomem:
  __atomic_sub_fetch(&acct->unsent, unheaded, __ATOMIC_RELAXED);
  if (slot != NULL) slot->failed = 1;
  for (int i = 0; i < n; i++) zmq_msg_close(&part[i]);
  for (; next < nframes; next++)
    if (frame[next].lend) release(NULL, slot);
  if (unmarked) release(NULL, slot);
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
