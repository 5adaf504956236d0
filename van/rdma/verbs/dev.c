//go:build linux && cgo && !nordma

#include "shim_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

static int last(void) { return errno != 0 ? errno : EIO; }

sv_dev *sv_dev_new(sv_lib *l, sv_id *id, uint32_t num, int cqe, int *err, const char **op) {
  struct ibv_device_attr a;
  sv_dev *d = calloc(1, sizeof *d);
  *op = "allocate memory";
  *err = ENOMEM;
  if (d == NULL) return NULL;
  d->lib = l;
  d->ctx = id->id->verbs;
  d->num = num;
  d->event = -1;
  snprintf(d->name, sizeof d->name, "%s", l->ibv_get_device_name(d->ctx->device));
  pthread_mutex_init(&d->poll_mu, NULL);
  pthread_mutex_init(&d->mu, NULL);
  pthread_mutex_init(&d->wake_mu, NULL);

  memset(&a, 0, sizeof a);
  *op = "query device";
  int rc = l->ibv_query_device(d->ctx, &a);
  *err = rc == 0 ? 0 : sv_errno(rc);
  if (rc != 0) goto fail;
  d->max_cqe = a.max_cqe;
  d->max_wr = a.max_qp_wr;

  errno = 0;
  *op = "create an event descriptor";
  d->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (d->event < 0) goto fail_errno;
  *op = "allocate a protection domain";
  d->pd = l->ibv_alloc_pd(d->ctx);
  if (d->pd == NULL) goto fail_errno;
  *op = "create a completion channel";
  d->comp = l->ibv_create_comp_channel(d->ctx);
  if (d->comp == NULL) goto fail_errno;
  int flags = fcntl(d->comp->fd, F_GETFL);
  if (flags < 0 || fcntl(d->comp->fd, F_SETFL, flags | O_NONBLOCK) < 0) goto fail_errno;
  *op = "create a completion queue";
  d->cq = l->ibv_create_cq(d->ctx, cqe < a.max_cqe ? cqe : a.max_cqe, NULL, d->comp, 0);
  if (d->cq == NULL) goto fail_errno;
  d->cqe = d->cq->cqe;
  return d;

fail_errno:
  *err = last();
fail:;
  const char *ignored;
  sv_dev_close(d, &ignored);
  sv_dev_free(d);
  return NULL;
}

const char *sv_dev_name(sv_dev *d) { return d->name; }
int sv_max_cqe(sv_dev *d) { return d->max_cqe; }
int sv_max_wr(sv_dev *d) { return d->max_wr; }
int sv_capacity(sv_dev *d) { return __atomic_load_n(&d->cqe, __ATOMIC_RELAXED); }

int sv_dev_close(sv_dev *d, const char **op) {
  int rc = 0;
  __atomic_store_n(&d->closed, 1, __ATOMIC_SEQ_CST);
  sv_wake(d);
  pthread_mutex_lock(&d->poll_mu); // sv_poll has returned
  pthread_mutex_lock(&d->mu);
  *op = "destroy the completion queue";
  if (d->cq != NULL && (rc = d->lib->ibv_destroy_cq(d->cq)) != 0) goto out;
  d->cq = NULL;
  *op = "destroy the completion channel";
  if (d->comp != NULL && (rc = d->lib->ibv_destroy_comp_channel(d->comp)) != 0) goto out;
  d->comp = NULL;
  *op = "free the protection domain";
  if (d->pd != NULL && (rc = d->lib->ibv_dealloc_pd(d->pd)) != 0) goto out;
  d->pd = NULL;
  // Do not leave this to sv_dev_free, which is called when Go's garbage collector finds d unused, if ever.
  pthread_mutex_lock(&d->wake_mu);
  if (d->event >= 0) close(d->event);
  d->event = -1;
  pthread_mutex_unlock(&d->wake_mu);
out:
  pthread_mutex_unlock(&d->mu);
  pthread_mutex_unlock(&d->poll_mu);
  return rc == 0 ? 0 : sv_errno(rc);
}

void sv_dev_free(sv_dev *d) {
  for (uint32_t i = 0; i < SV_CHUNKS && d->chunk[i] != NULL; i++) {
    for (int j = 0; j < SV_SLOTS; j++) {
      pthread_mutex_destroy(&d->chunk[i][j].post_mu);
      pthread_mutex_destroy(&d->chunk[i][j].poll_mu);
    }
    free(d->chunk[i]);
  }
  if (d->event >= 0) close(d->event);
  pthread_mutex_destroy(&d->mu);
  pthread_mutex_destroy(&d->wake_mu);
  pthread_mutex_destroy(&d->poll_mu);
  free(d);
}

int sv_resize(sv_dev *d, int n) {
  int err = 0;
  pthread_mutex_lock(&d->mu);
  if (d->closed) {
    err = SV_ESTALE;
  } else if (n > d->cqe) {
    int rc = d->lib->ibv_resize_cq(d->cq, n);
    if (rc != 0) err = sv_errno(rc);
    __atomic_store_n(&d->cqe, d->cq->cqe, __ATOMIC_RELAXED);
    __atomic_store_n(&d->resized, 1, __ATOMIC_SEQ_CST);
    sv_rouse(d);
  }
  pthread_mutex_unlock(&d->mu);
  return err;
}

// Returns a free slot for a queue pair, or NULL if out of memory. d->mu is held.
static sv_slot *take_slot(sv_dev *d) {
  sv_slot *s = d->free;
  if (s != NULL) {
    d->free = s->next_free;
    return s;
  }
  if (d->nslots == 1u << SV_INDEX_BITS) return NULL;
  uint32_t c = d->nslots / SV_SLOTS;
  if (d->nslots % SV_SLOTS == 0) {
    sv_slot *chunk = calloc(SV_SLOTS, sizeof *chunk);
    if (chunk == NULL) return NULL;
    for (int i = 0; i < SV_SLOTS; i++) {
      pthread_mutex_init(&chunk[i].post_mu, NULL);
      pthread_mutex_init(&chunk[i].poll_mu, NULL);
    }
    __atomic_store_n(&d->chunk[c], chunk, __ATOMIC_RELEASE);
  }
  s = &d->chunk[c][d->nslots % SV_SLOTS];
  s->index = d->nslots++;
  return s;
}

// A slot whose generations are used up is not reused.
static void give_slot(sv_dev *d, sv_slot *s) {
  pthread_mutex_lock(&d->mu);
  if (s->gen < SV_MASK(SV_GEN_BITS)) {
    s->next_free = d->free;
    d->free = s;
  }
  pthread_mutex_unlock(&d->mu);
}

static void free_queues(sv_dev *d, sv_slot *s) {
  if (s->rx_mr != NULL) d->lib->ibv_dereg_mr(s->rx_mr);
  if (s->rx != NULL) munmap(s->rx, s->rx_len);
  free(s->rx_wr);
  free(s->rx_sge);
  free(s->ids);
  s->rx_mr = NULL;
  s->rx = NULL;
  s->rx_wr = NULL;
  s->rx_sge = NULL;
  s->ids = NULL;
  s->repost = NULL;
  s->unposted = 0;
}

static int make_queues(sv_dev *d, sv_slot *s, const sv_qp_opts *o, const char **op) {
  uint32_t ring = 1;
  while (ring < o->send_depth) ring *= 2;
  s->send_depth = o->send_depth;
  s->mask = ring - 1;
  s->head = s->tail = 0;
  s->recv_depth = o->recv_depth;
  *op = "allocate memory of a queue pair";
  s->ids = calloc(ring, sizeof *s->ids);
  if (s->ids == NULL) return ENOMEM;
  if (o->recv_depth == 0) return 0;
  s->rx_wr = calloc(o->recv_depth, sizeof *s->rx_wr);
  s->rx_sge = calloc(o->recv_depth, sizeof *s->rx_sge);
  if (s->rx_wr == NULL || s->rx_sge == NULL) return ENOMEM;
  // Separate pages, so that the device's pages hold nothing else.
  s->rx_len = (size_t)o->recv_depth * SV_RECV_SIZE;
  s->rx = mmap(NULL, s->rx_len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (s->rx == MAP_FAILED) {
    s->rx = NULL;
    return errno;
  }
  *op = "register receive buffers of a queue pair";
  errno = 0;
  s->rx_mr = d->lib->ibv_reg_mr(d->pd, s->rx, s->rx_len, IBV_ACCESS_LOCAL_WRITE);
  return s->rx_mr == NULL ? last() : 0;
}

// Devices differ in how much inline data they accept. Tries to get the most, up to o->inline_size.
static int make_qp(sv_dev *d, sv_id *id, sv_qp_opts *o) {
  for (uint32_t inl = o->inline_size;; inl /= 2) {
    struct ibv_qp_init_attr a;
    memset(&a, 0, sizeof a);
    a.send_cq = a.recv_cq = d->cq;
    a.qp_type = IBV_QPT_RC;
    a.cap.max_send_wr = o->send_depth;
    a.cap.max_recv_wr = o->recv_depth > 0 ? o->recv_depth : 1;
    a.cap.max_send_sge = a.cap.max_recv_sge = 1;
    a.cap.max_inline_data = inl;
    errno = 0;
    int rc = d->lib->rdma_create_qp(id->id, d->pd, &a);
    if (rc == 0) {
      o->inline_size = a.cap.max_inline_data;
      o->num = id->id->qp->qp_num;
      return 0;
    }
    int err = sv_errno(rc);
    if (inl == 0 || (err != EINVAL && err != ENOMEM)) return err;
  }
}

static int post_receives(sv_slot *s, const char **op) {
  if (s->recv_depth == 0) return 0;
  for (uint32_t i = 0; i < s->recv_depth; i++) {
    s->rx_sge[i] = (struct ibv_sge){(uintptr_t)s->rx + (size_t)i * SV_RECV_SIZE, SV_RECV_SIZE, s->rx_mr->lkey};
    s->rx_wr[i] = (struct ibv_recv_wr){.wr_id = SV_RECV_BIT | sv_wr_id(s, i),
                                       .next = i + 1 < s->recv_depth ? &s->rx_wr[i + 1] : NULL,
                                       .sg_list = &s->rx_sge[i],
                                       .num_sge = 1};
  }
  struct ibv_recv_wr *bad;
  *op = "post receive requests of a queue pair";
  errno = 0;
  int rc = ibv_post_recv(s->qp, s->rx_wr, &bad);
  return rc == 0 ? 0 : sv_errno(rc);
}

int sv_create_qp(sv_dev *d, sv_id *id, sv_qp_opts *o, const char **op) {
  pthread_mutex_lock(&d->mu);
  sv_slot *s = d->closed ? NULL : take_slot(d);
  int closed = d->closed;
  pthread_mutex_unlock(&d->mu);
  *op = "find a place for a queue pair";
  if (s == NULL) return closed ? SV_ESTALE : ENOMEM;

  int err = make_queues(d, s, o, op);
  if (err == 0) {
    *op = "create a queue pair";
    err = make_qp(d, id, o);
  }
  if (err != 0) {
    free_queues(d, s);
    give_slot(d, s);
    return err;
  }
  pthread_mutex_lock(&s->post_mu);
  pthread_mutex_lock(&s->poll_mu);
  s->qp = id->id->qp;
  s->cookie = o->cookie;
  s->port = o->port;
  s->max_inline = o->inline_size;
  s->ready = s->pinned = 0;
  s->gen++;
  s->handle = d->num << SV_KEY_BITS | (uint64_t)s->gen << SV_INDEX_BITS | s->index;
  err = post_receives(s, op);
  o->handle = s->handle;
  pthread_mutex_unlock(&s->poll_mu);
  pthread_mutex_unlock(&s->post_mu);
  id->dev = d;
  __atomic_store_n(&id->handle, o->handle, __ATOMIC_RELEASE);
  if (err != 0) sv_destroy_qp(id);
  return err;
}

void sv_destroy_qp(sv_id *id) {
  uint64_t h = __atomic_exchange_n(&id->handle, 0, __ATOMIC_ACQ_REL);
  if (h == 0) return;
  sv_slot *s = sv_slot_at(id->dev, h);
  pthread_mutex_lock(&s->post_mu);
  pthread_mutex_lock(&s->poll_mu);
  s->handle = 0;
  s->qp = NULL;
  pthread_mutex_unlock(&s->poll_mu);
  pthread_mutex_unlock(&s->post_mu);
  pthread_mutex_lock(&id->chan->mu);
  id->lib->rdma_destroy_qp(id->id); // only now: no thread posts to it any more
  pthread_mutex_unlock(&id->chan->mu);
  free_queues(id->dev, s);
  give_slot(id->dev, s);
}

void sv_ready(sv_id *id) {
  uint64_t h = __atomic_load_n(&id->handle, __ATOMIC_ACQUIRE);
  if (h == 0) return;
  sv_lib *l = id->lib;
  sv_slot *s = sv_slot_at(id->dev, h);
  pthread_mutex_lock(&s->post_mu);
  if (s->handle == h && !s->ready) {
    s->ready = 1;
    // Permitted from the state RTS on.
    if (s->port > 0 && sv_has_mlx5(l) && l->mlx5dv_is_supported(s->qp->context->device))
      s->pinned = l->mlx5dv_modify_qp_lag_port(s->qp, (uint8_t)s->port) == 0;
  }
  pthread_mutex_unlock(&s->post_mu);
}

int sv_pinned(sv_dev *d, uint64_t handle) {
  sv_slot *s = sv_slot_at(d, handle);
  if (s == NULL) return 0;
  pthread_mutex_lock(&s->post_mu);
  int pinned = s->handle == handle && s->pinned;
  pthread_mutex_unlock(&s->post_mu);
  return pinned;
}

static int access_flags(int access) {
  int f = 0;
  if (access & SV_LOCAL_WRITE) f |= IBV_ACCESS_LOCAL_WRITE;
  // Providers refuse remote write without local write.
  if (access & SV_REMOTE_WRITE) f |= IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE;
  return f;
}

static int registered(struct ibv_mr *m, void **mr, uint32_t *lkey, uint32_t *rkey) {
  if (m == NULL) return last();
  *mr = m;
  *lkey = m->lkey;
  *rkey = m->rkey;
  return 0;
}

int sv_reg(sv_dev *d, uintptr_t p, size_t n, int access, void **mr, uint32_t *lkey, uint32_t *rkey) {
  errno = 0;
  return registered(d->lib->ibv_reg_mr(d->pd, (void *)p, n, access_flags(access)), mr, lkey, rkey);
}

int sv_reg_dmabuf(sv_dev *d, int fd, uint64_t off, size_t n, uint64_t iova, int access, void **mr, uint32_t *lkey,
                  uint32_t *rkey) {
  errno = 0;
  return registered(d->lib->reg_dmabuf_mr(d->pd, off, n, iova, fd, access_flags(access)), mr, lkey, rkey);
}

int sv_dereg(sv_dev *d, void *mr) {
  errno = 0;
  int rc = d->lib->ibv_dereg_mr(mr);
  return rc == 0 ? 0 : sv_errno(rc);
}
