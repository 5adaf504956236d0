//go:build linux && cgo && !nordma

#define _GNU_SOURCE // ppoll
#include "shim_internal.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
  CHAIN = 32,   // longest chain of work requests
  BATCH = SV_BATCH,
  CLOCK = 8, // polls between two reads of the clock
  YIELD = 4000, // ns between yields, which other threads need on a machine with few cores
};

// Replaces the id of a work request whose completion is not reported.
#define SV_NOBODY UINT64_MAX

static int make_wr(const sv_slot *s, const sv_wr *w, struct ibv_send_wr *wr, struct ibv_sge *sge) {
  wr->next = NULL;
  wr->sg_list = sge;
  wr->num_sge = w->len > 0; // some devices treat length 0 as 2 GiB
  wr->send_flags = 0;
  if (w->flags & SV_SIGNALED) wr->send_flags |= IBV_SEND_SIGNALED;
  if (w->flags & SV_INLINE) {
    if (w->len > s->max_inline) return SV_EINLINE;
    wr->send_flags |= IBV_SEND_INLINE;
  }
  sge->addr = w->local;
  sge->length = w->len;
  sge->lkey = w->lkey;
  wr->imm_data = w->imm;
  wr->wr.rdma.remote_addr = w->remote;
  wr->wr.rdma.rkey = w->rkey;
  switch (w->op) {
  case SV_OP_SEND_IMM: wr->opcode = IBV_WR_SEND_WITH_IMM; return 0;
  case SV_OP_WRITE: wr->opcode = IBV_WR_RDMA_WRITE; return 0;
  case SV_OP_WRITE_IMM: wr->opcode = IBV_WR_RDMA_WRITE_WITH_IMM; return 0;
  default: return SV_EOPCODE;
  }
}

// Posts the leading work requests of w that are for one queue pair. Returns their number. If the chain ends early, *err says why.
static int post_chain(sv_slot *s, const sv_wr *w, int n, int *err) {
  struct ibv_send_wr wr[CHAIN], *bad = NULL;
  struct ibv_sge sge[CHAIN];
  uint32_t room = s->send_depth - (s->head - __atomic_load_n(&s->tail, __ATOMIC_ACQUIRE));
  int k = 0;
  for (; k < n && k < CHAIN && w[k].qp == s->handle; k++) {
    *err = (uint32_t)k == room ? SV_EFULL : make_wr(s, &w[k], &wr[k], &sge[k]);
    if (*err != 0) break;
    uint32_t pos = (s->head + (uint32_t)k) & s->mask;
    s->ids[pos] = w[k].id;
    wr[k].wr_id = sv_wr_id(s, pos);
    if (k > 0) wr[k - 1].next = &wr[k];
  }
  if (k == 0) return 0;
  errno = 0;
  int rc = ibv_post_send(s->qp, wr, &bad);
  if (rc == 0) {
    s->head += (uint32_t)k;
    return k;
  }
  *err = sv_errno(rc);
  if (*err == ENOMEM) *err = SV_EFULL;
  if (bad >= wr && bad < wr + k) {
    s->head += (uint32_t)(bad - wr);
    return (int)(bad - wr);
  }
  // The provider does not say which requests were posted. Report none, but keep their positions in use.
  for (int i = 0; i < k; i++) s->ids[(s->head + (uint32_t)i) & s->mask] = SV_NOBODY;
  s->head += (uint32_t)k;
  return 0;
}

uint64_t sv_post(sv_dev *d, const sv_wr *w, int n) {
  int done = 0, err = 0;
  while (done < n && err == 0) {
    sv_slot *s = sv_slot_at(d, w[done].qp);
    if (s == NULL) {
      err = SV_ESTALE;
      break;
    }
    pthread_mutex_lock(&s->post_mu);
    if (s->handle != w[done].qp || s->handle == 0)
      err = SV_ESTALE;
    else if (!s->ready)
      err = SV_ENOTREADY;
    else
      done += post_chain(s, w + done, n - done, &err);
    pthread_mutex_unlock(&s->post_mu);
  }
  return (uint64_t)err << 32 | (uint32_t)done;
}

static void take_send(sv_slot *s, uint32_t pos, sv_wc *o) {
  uint32_t tail = s->tail;
  o->type = SV_SEND_DONE;
  o->id = s->ids[pos & s->mask];
  o->imm = 0;
  o->len = 0;
  __atomic_store_n(&s->tail, tail + ((pos - tail) & s->mask) + 1, __ATOMIC_RELEASE);
}

// Returns whether the receive request is to be posted again. On a broken queue pair it is not, since it would be flushed at once.
static int take_recv(sv_slot *s, const struct ibv_wc *wc, uint32_t pos, sv_wc *o) {
  o->id = 0;
  o->imm = 0;
  o->len = 0;
  if (wc->status != IBV_WC_SUCCESS) {
    o->type = SV_RECV_FAILED;
    return 0;
  }
  if (wc->wc_flags & IBV_WC_WITH_IMM) o->imm = wc->imm_data;
  o->len = wc->byte_len;
  if (wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
    o->type = SV_RECV_WRITE;
  } else {
    o->type = SV_RECV_SEND;
    if (o->len > SV_RECV_SIZE) o->len = SV_RECV_SIZE;
    memcpy(o->data, s->rx + (size_t)pos * SV_RECV_SIZE, o->len);
  }
  s->unposted++;
  s->rx_wr[pos].next = s->repost;
  s->repost = &s->rx_wr[pos];
  return 1;
}

// Fills *o and returns 1, or returns 0 if the completion is stale. If the slot has receive requests to post again, *again is the slot.
static int take(sv_dev *d, const struct ibv_wc *wc, sv_wc *o, sv_slot **again) {
  uint32_t pos = (uint32_t)(wc->wr_id >> SV_KEY_BITS & SV_MASK(SV_POS_BITS));
  sv_slot *s = sv_slot_at(d, wc->wr_id);
  int ok = 0;
  *again = NULL;
  if (s == NULL) return 0;
  pthread_mutex_lock(&s->poll_mu);
  if (s->handle != 0 && sv_key(s->handle) == sv_key(wc->wr_id)) {
    ok = 1;
    o->status = wc->status;
    o->vendor = wc->status == IBV_WC_SUCCESS ? 0 : wc->vendor_err;
    o->cookie = s->cookie;
    o->qp = s->handle;
    if (!(wc->wr_id & SV_RECV_BIT)) {
      take_send(s, pos, o);
      ok = o->id != SV_NOBODY;
    } else if (pos < s->recv_depth) {
      if (take_recv(s, wc, pos, o)) *again = s;
    } else {
      ok = 0;
    }
  }
  pthread_mutex_unlock(&s->poll_mu);
  return ok;
}

static int repost(sv_slot *s) {
  struct ibv_recv_wr *bad;
  int rc = 0;
  pthread_mutex_lock(&s->poll_mu);
  if (s->qp != NULL && s->repost != NULL) { // repost is NULL if this batch had the slot twice
    errno = 0;
    rc = ibv_post_recv(s->qp, s->repost, &bad);
    s->repost = NULL;
    s->unposted = 0;
  }
  pthread_mutex_unlock(&s->poll_mu);
  return rc == 0 ? 0 : sv_errno(rc);
}

static void repost_all(sv_dev *d) {
  for (int i = 0; i < d->nagain; i++) {
    int err = repost(d->again[i]);
    if (err != 0) d->failed = err;
  }
  d->nagain = 0;
}

// Polls completions. Returns their number, or -errno. The next call posts the receive requests again, since the caller has more urgent work,
// unless few of them are left.
static int harvest(sv_dev *d, sv_wc *out, int max) {
  struct ibv_wc wc[BATCH];
  int n = 0, k, want;
  do {
    if (d->nagain > 0) repost_all(d);
    want = max - n < BATCH ? max - n : BATCH;
    k = ibv_poll_cq(d->cq, want, wc);
    if (k < 0) return n > 0 ? n : -sv_errno(k);
    int few = 0;
    for (int i = 0; i < k; i++) {
      sv_slot *s;
      n += take(d, &wc[i], &out[n], &s);
      if (s == NULL) continue;
      if (d->nagain == 0 || d->again[d->nagain - 1] != s) d->again[d->nagain++] = s;
      few |= s->unposted * 2 >= s->recv_depth;
    }
    if (few) repost_all(d);
  } while (k == want && n < max);
  return n;
}

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int woken(sv_dev *d) {
  return __atomic_load_n(&d->wake, __ATOMIC_RELAXED) && __atomic_exchange_n(&d->wake, 0, __ATOMIC_SEQ_CST);
}

// Polls until end (0: forever). Returns a number of completions, -errno, or 0 at the end. After sv_wake it returns 0 and sets *woke.
static int spin(sv_dev *d, sv_wc *out, int max, int64_t end, int *woke) {
  int64_t yielded = now();
  for (uint32_t i = 1;; i++) {
    int n = harvest(d, out, max);
    if (n != 0) return n;
    *woke = woken(d);
    if (*woke) return 0;
    if (i % CLOCK != 0) continue;
    int64_t t = now();
    if (end != 0 && t >= end) return 0;
    if (t - yielded >= YIELD) {
      sched_yield();
      yielded = t;
    }
  }
}

// Requests an event for the next completion, unless one is requested.
static int arm(sv_dev *d) {
  if (__atomic_exchange_n(&d->resized, 0, __ATOMIC_SEQ_CST)) d->armed = 0;
  if (d->armed) return 0;
  errno = 0;
  int rc = ibv_req_notify_cq(d->cq, 0);
  if (rc != 0) return sv_errno(rc);
  d->armed = 1;
  return 0;
}

static int take_events(sv_dev *d) {
  struct ibv_cq *cq;
  void *context;
  for (;;) {
    errno = 0;
    if (d->lib->ibv_get_cq_event(d->comp, &cq, &context) != 0)
      return errno == EAGAIN || errno == EINTR ? 0 : sv_errno(-1);
    d->lib->ibv_ack_cq_events(cq, 1);
    d->armed = 0;
  }
}

// Sleeps at most until end. Returns a number of completions, -errno, or 0.
static int block(sv_dev *d, sv_wc *out, int max, int64_t end) {
  for (;;) {
    int err = arm(d);
    if (err != 0) return -err;
    int n = harvest(d, out, max);
    if (n != 0) return n;
    int64_t left = end - now();
    if (left <= 0) return 0;

    struct pollfd p[2] = {{d->comp->fd, POLLIN, 0}, {d->event, POLLIN, 0}};
    struct timespec t = {left / 1000000000, left % 1000000000};
    __atomic_store_n(&d->sleeping, 1, __ATOMIC_SEQ_CST);
    int rc = 0;
    err = 0;
    if (!__atomic_load_n(&d->wake, __ATOMIC_SEQ_CST) && !__atomic_load_n(&d->resized, __ATOMIC_SEQ_CST)) {
      rc = ppoll(p, 2, &t, NULL);
      err = errno;
    }
    __atomic_store_n(&d->sleeping, 0, __ATOMIC_SEQ_CST);
    if (rc < 0 && err != EINTR) return -err;
    if (rc > 0 && p[1].revents) {
      uint64_t x;
      if (read(d->event, &x, sizeof x) < 0) x = 0; // an old wake-up, which was read before
    }
    if (rc > 0 && p[0].revents && (err = take_events(d)) != 0) return -err;
    if (woken(d)) return harvest(d, out, max);
  }
}

static int poll_locked(sv_dev *d, sv_wc *out, int max, int64_t spin_ns, int64_t block_ns) {
  if (__atomic_load_n(&d->closed, __ATOMIC_SEQ_CST)) return -SV_ESTALE;
  if (d->failed != 0) {
    int err = d->failed;
    d->failed = 0;
    return -err;
  }
  const int64_t longest = 1ll << 60; // about 36 years; avoids overflow
  if (spin_ns > longest) spin_ns = longest;
  if (block_ns > longest) block_ns = longest;
  int woke = 0;
  int n = harvest(d, out, max);
  if (n != 0 || (spin_ns == 0 && block_ns <= 0)) return n;
  if (spin_ns != 0) n = spin(d, out, max, spin_ns > 0 ? now() + spin_ns : 0, &woke);
  if (n == 0 && !woke && block_ns > 0 && !woken(d)) n = block(d, out, max, now() + block_ns);
  if (n == 0 && __atomic_load_n(&d->closed, __ATOMIC_SEQ_CST)) return -SV_ESTALE;
  return n;
}

int sv_poll(sv_dev *d, sv_wc *out, int max, int64_t spin_ns, int64_t block_ns) {
  if (pthread_mutex_trylock(&d->poll_mu) != 0)
    return __atomic_load_n(&d->closed, __ATOMIC_SEQ_CST) ? -SV_ESTALE : -SV_EPOLLING;
  int n = poll_locked(d, out, max, spin_ns, block_ns);
  pthread_mutex_unlock(&d->poll_mu);
  return n;
}

void sv_wake(sv_dev *d) {
  __atomic_store_n(&d->wake, 1, __ATOMIC_SEQ_CST);
  sv_rouse(d);
}

void sv_rouse(sv_dev *d) {
  uint64_t one = 1;
  if (!__atomic_load_n(&d->sleeping, __ATOMIC_SEQ_CST)) return;
  pthread_mutex_lock(&d->wake_mu); // the descriptor must not be closed, and its number reused, meanwhile
  if (d->event >= 0 && write(d->event, &one, sizeof one) < 0) one = 0; // full: the sleeper is awake
  pthread_mutex_unlock(&d->wake_mu);
}
