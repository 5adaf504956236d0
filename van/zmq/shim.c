#include "shim.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

sa_sock *sa_sock_new(void *soc) {
  sa_sock *s = calloc(1, sizeof *s);
  if (s == NULL) return NULL;
  s->soc = soc;
  pthread_mutex_init(&s->mu, NULL);
  return s;
}

void sa_sock_free(sa_sock *s) {
  pthread_mutex_destroy(&s->mu);
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

// A multipart message arrives whole: after its first part no receive can fail
// for want of data.
int sa_recv(sa_sock *s, sa_msg *m) {
  int rc = 1, more = 1;
  m->n = 0;
  m->extra = 0;
  pthread_mutex_lock(&s->mu);
  s->waiting = 0;
  while (more) {
    zmq_msg_t surplus, *p = m->n < SA_MAX_PARTS ? &m->part[m->n] : &surplus;
    zmq_msg_init(p);
    int n;
    do n = zmq_msg_recv(p, s->soc, ZMQ_DONTWAIT);
    while (n < 0 && zmq_errno() == EINTR);
    if (n < 0) {
      rc = zmq_errno() == EAGAIN && m->n == 0 ? 0 : -zmq_errno();
      if (rc == 0) s->waiting = 1;
      zmq_msg_close(p);
      break;
    }
    more = zmq_msg_more(p);
    if (p == &surplus) {
      m->extra++;
      zmq_msg_close(p);
      continue;
    }
    m->data[m->n] = zmq_msg_data(p);
    m->size[m->n] = (size_t)n;
    m->n++;
  }
  pthread_mutex_unlock(&s->mu);
  if (rc < 0) sa_msg_close(m);
  return rc;
}

// Runs on a thread of libzmq when it no longer needs a lent frame.
static void release(void *data, void *hint) {
  (void)data;
  sa_slot *slot = hint;
  if (__atomic_sub_fetch(&slot->refs, 1, __ATOMIC_ACQ_REL) > 0) return;
  sa_list *l = slot->list;
  slot->next = __atomic_load_n(&l->head, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(&l->head, &slot->next, slot, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
  }
}

static int copy_part(zmq_msg_t *p, const void *data, size_t n) {
  if (zmq_msg_init_size(p, n) != 0) return -1;
  if (n > 0) memcpy(zmq_msg_data(p), data, n);
  return 0;
}

int sa_send(sa_sock *s, const char *dest, int destlen, const char *self, int selflen, const void *meta, size_t metalen,
            int nframes, uintptr_t p0, size_t n0, int lend0, uintptr_t p1, size_t n1, int lend1, uintptr_t p2,
            size_t n2, int lend2, sa_slot *slot) {
  zmq_msg_t part[SA_MAX_DATA + 3];
  sa_frame frame[SA_MAX_DATA] = {{(void *)p0, n0, lend0}, {(void *)p1, n1, lend1}, {(void *)p2, n2, lend2}};
  int n = 0, next = 0, rc = 0;

  if (destlen > 0) {
    if (copy_part(&part[n], dest, (size_t)destlen) != 0) goto nomem;
    n++;
    if (copy_part(&part[n], self, (size_t)selflen) != 0) goto nomem;
    n++;
  }
  if (copy_part(&part[n], meta, metalen) != 0) goto nomem;
  n++;
  for (; next < nframes; next++, n++) {
    sa_frame *f = &frame[next];
    if (f->lend ? zmq_msg_init_data(&part[n], f->ptr, f->len, release, slot) : copy_part(&part[n], f->ptr, f->len))
      goto nomem;
  }

  // Only the first part can be refused: the queue takes a message whole.
  pthread_mutex_lock(&s->mu);
  for (int i = 0; i < n; i++) {
    int sent, flags = ZMQ_DONTWAIT | (i < n - 1 ? ZMQ_SNDMORE : 0);
    do sent = zmq_msg_send(&part[i], s->soc, flags);
    while (sent < 0 && zmq_errno() == EINTR);
    if (sent < 0) {
      rc = -zmq_errno();
      if (slot != NULL) slot->failed = 1;
      for (; i < n; i++) zmq_msg_close(&part[i]);
      break;
    }
  }
  // Sending may have taken the signal that would have woken the receiver.
  if (s->waiting) {
    int events = 0;
    size_t len = sizeof events;
    if (zmq_getsockopt(s->soc, ZMQ_EVENTS, &events, &len) == 0 && (events & ZMQ_POLLIN)) {
      s->waiting = 0;
      if (rc == 0) rc = 1;
    }
  }
  pthread_mutex_unlock(&s->mu);
  return rc;

nomem:
  if (slot != NULL) slot->failed = 1;
  for (int i = 0; i < n; i++) zmq_msg_close(&part[i]);
  for (; next < nframes; next++)
    if (frame[next].lend) release(NULL, slot);
  return -ENOMEM;
}
