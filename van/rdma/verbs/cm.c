//go:build linux && cgo && !nordma

#include "shim_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

static int cm_errno(int rc) { return rc == 0 ? 0 : sv_errno(rc); }

sv_chan *sv_chan_new(sv_lib *l, int *err) {
  sv_chan *c = calloc(1, sizeof *c);
  *err = ENOMEM;
  if (c == NULL) return NULL;
  c->lib = l;
  pthread_mutex_init(&c->mu, NULL);
  errno = 0;
  c->ch = l->rdma_create_event_channel();
  if (c->ch == NULL) {
    *err = errno != 0 ? errno : EIO;
    pthread_mutex_destroy(&c->mu);
    free(c);
    return NULL;
  }
  int flags = fcntl(c->ch->fd, F_GETFL);
  if (flags < 0 || fcntl(c->ch->fd, F_SETFL, flags | O_NONBLOCK) < 0) {
    *err = errno;
    sv_chan_free(c);
    return NULL;
  }
  *err = 0;
  return c;
}

int sv_chan_fd(sv_chan *c) { return c->ch->fd; }

void sv_chan_free(sv_chan *c) {
  c->lib->rdma_destroy_event_channel(c->ch);
  pthread_mutex_destroy(&c->mu);
  free(c);
}

static void from_sockaddr(const struct sockaddr *sa, sv_addr *a) {
  memset(a, 0, sizeof *a);
  if (sa->sa_family == AF_INET) {
    const struct sockaddr_in *in = (const void *)sa;
    a->family = 4;
    a->port = ntohs(in->sin_port);
    memcpy(a->ip, &in->sin_addr, 4);
  } else if (sa->sa_family == AF_INET6) {
    const struct sockaddr_in6 *in = (const void *)sa;
    a->family = 6;
    a->port = ntohs(in->sin6_port);
    a->scope = in->sin6_scope_id;
    memcpy(a->ip, &in->sin6_addr, 16);
  }
}

static struct sockaddr *to_sockaddr(const sv_addr *a, struct sockaddr_storage *ss) {
  memset(ss, 0, sizeof *ss);
  if (a->family == 4) {
    struct sockaddr_in *in = (void *)ss;
    in->sin_family = AF_INET;
    in->sin_port = htons(a->port);
    memcpy(&in->sin_addr, a->ip, 4);
  } else if (a->family == 6) {
    struct sockaddr_in6 *in = (void *)ss;
    in->sin6_family = AF_INET6;
    in->sin6_port = htons(a->port);
    in->sin6_scope_id = a->scope;
    memcpy(&in->sin6_addr, a->ip, 16);
  } else {
    return NULL;
  }
  return (struct sockaddr *)ss;
}

static int event_type(enum rdma_cm_event_type t) {
  switch (t) {
  case RDMA_CM_EVENT_ADDR_RESOLVED: return SV_ADDR_RESOLVED;
  case RDMA_CM_EVENT_ADDR_ERROR: return SV_ADDR_ERROR;
  case RDMA_CM_EVENT_ROUTE_RESOLVED: return SV_ROUTE_RESOLVED;
  case RDMA_CM_EVENT_ROUTE_ERROR: return SV_ROUTE_ERROR;
  case RDMA_CM_EVENT_CONNECT_REQUEST: return SV_CONNECT_REQUEST;
  case RDMA_CM_EVENT_CONNECT_ERROR:
  case RDMA_CM_EVENT_UNREACHABLE: return SV_UNREACHABLE;
  case RDMA_CM_EVENT_REJECTED: return SV_REJECTED;
  case RDMA_CM_EVENT_ESTABLISHED: return SV_ESTABLISHED;
  case RDMA_CM_EVENT_DISCONNECTED: return SV_DISCONNECTED;
  case RDMA_CM_EVENT_DEVICE_REMOVAL: return SV_DEVICE_REMOVAL;
  case RDMA_CM_EVENT_TIMEWAIT_EXIT: return SV_TIMEWAIT_EXIT;
  default: return SV_OTHER_EVENT;
  }
}

static sv_id *wrap(sv_chan *c, uint64_t cookie) {
  sv_id *id = calloc(1, sizeof *id);
  if (id != NULL) {
    id->lib = c->lib;
    id->chan = c;
    id->cookie = cookie;
  }
  return id;
}

static int next_event(sv_chan *c, sv_event *e) {
  struct rdma_cm_event *ev;
  for (;;) {
    errno = 0;
    int rc = c->lib->rdma_get_cm_event(c->ch, &ev);
    if (rc != 0) return sv_errno(rc);

    sv_id *of = ev->event == RDMA_CM_EVENT_CONNECT_REQUEST ? ev->listen_id->context : ev->id->context;
    struct rdma_cm_id *fresh = NULL;
    e->type = event_type(ev->event);
    e->status = ev->status;
    e->cookie = __atomic_load_n(&of->cookie, __ATOMIC_RELAXED);
    e->fresh = NULL;
    memset(&e->peer, 0, sizeof e->peer);
    e->private_len = 0;
    if (ev->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
      from_sockaddr(&ev->id->route.addr.dst_addr, &e->peer);
      fresh = ev->id;
      e->fresh = wrap(c, 0);
      if (e->fresh != NULL) {
        e->fresh->id = fresh;
        fresh->context = e->fresh;
      }
    }
    switch (ev->event) { // other events have no connection parameters
    case RDMA_CM_EVENT_CONNECT_REQUEST:
    case RDMA_CM_EVENT_CONNECT_RESPONSE:
    case RDMA_CM_EVENT_REJECTED:
    case RDMA_CM_EVENT_ESTABLISHED:
      if (ev->param.conn.private_data != NULL && ev->param.conn.private_data_len > 0) {
        e->private_len = ev->param.conn.private_data_len;
        memcpy(e->private_data, ev->param.conn.private_data, e->private_len);
      }
      break;
    default: break;
    }
    if (ev->event == RDMA_CM_EVENT_ESTABLISHED) sv_ready(of);
    c->lib->rdma_ack_cm_event(ev);
    if (fresh == NULL || e->fresh != NULL) return 0;
    c->lib->rdma_destroy_id(fresh); // out of memory: drop the request
  }
}

int sv_next(sv_chan *c, sv_event *e) {
  pthread_mutex_lock(&c->mu);
  int err = next_event(c, e);
  pthread_mutex_unlock(&c->mu);
  return err;
}

sv_id *sv_id_new(sv_chan *c, uint64_t cookie, int *err) {
  sv_id *id = wrap(c, cookie);
  *err = ENOMEM;
  if (id == NULL) return NULL;
  errno = 0;
  *err = cm_errno(c->lib->rdma_create_id(c->ch, &id->id, id, RDMA_PS_TCP));
  if (*err == 0) return id;
  free(id);
  return NULL;
}

void sv_id_set_cookie(sv_id *id, uint64_t cookie) { __atomic_store_n(&id->cookie, cookie, __ATOMIC_RELAXED); }

uintptr_t sv_id_context(sv_id *id) { return (uintptr_t)id->id->verbs; }

void sv_id_addr(sv_id *id, sv_addr *a) { from_sockaddr(&id->id->route.addr.src_addr, a); }

int sv_bind(sv_id *id, const sv_addr *a) {
  struct sockaddr_storage ss;
  errno = 0;
  return cm_errno(id->lib->rdma_bind_addr(id->id, to_sockaddr(a, &ss)));
}

int sv_listen(sv_id *id, int backlog) {
  errno = 0;
  return cm_errno(id->lib->rdma_listen(id->id, backlog));
}

int sv_resolve_addr(sv_id *id, const sv_addr *src, const sv_addr *dst, int ms) {
  struct sockaddr_storage s, d;
  errno = 0;
  return cm_errno(id->lib->rdma_resolve_addr(id->id, to_sockaddr(src, &s), to_sockaddr(dst, &d), ms));
}

int sv_resolve_route(sv_id *id, int ms) {
  errno = 0;
  return cm_errno(id->lib->rdma_resolve_route(id->id, ms));
}

int sv_set_ack_timeout(sv_id *id, int exp) {
  uint8_t v = (uint8_t)exp;
  errno = 0;
  return cm_errno(id->lib->rdma_set_option(id->id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &v, sizeof v));
}

int sv_set_tos(sv_id *id, int tos) {
  uint8_t v = (uint8_t)tos;
  errno = 0;
  return cm_errno(id->lib->rdma_set_option(id->id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &v, sizeof v));
}

static struct rdma_conn_param conn_param(const void *priv, int privlen, int retry, int rnr) {
  struct rdma_conn_param p;
  memset(&p, 0, sizeof p);
  p.private_data = privlen > 0 ? priv : NULL;
  p.private_data_len = (uint8_t)privlen;
  p.retry_count = (uint8_t)retry;
  p.rnr_retry_count = (uint8_t)rnr;
  return p;
}

int sv_connect(sv_id *id, const void *priv, int privlen, int retry, int rnr) {
  struct rdma_conn_param p = conn_param(priv, privlen, retry, rnr);
  errno = 0;
  return cm_errno(id->lib->rdma_connect(id->id, &p));
}

int sv_accept(sv_id *id, const void *priv, int privlen, int retry, int rnr) {
  struct rdma_conn_param p = conn_param(priv, privlen, retry, rnr);
  errno = 0;
  int err = cm_errno(id->lib->rdma_accept(id->id, &p));
  if (err == 0) sv_ready(id);
  return err;
}

int sv_reject(sv_id *id, const void *priv, int privlen) {
  errno = 0;
  return cm_errno(id->lib->rdma_reject(id->id, privlen > 0 ? priv : NULL, (uint8_t)privlen));
}

int sv_disconnect(sv_id *id) {
  errno = 0;
  int err = cm_errno(id->lib->rdma_disconnect(id->id));
  if (err == 0 || id->id->qp == NULL) return err;
  // The ID is not connected (any more). Flush its posted requests all the same.
  struct ibv_qp_attr a;
  memset(&a, 0, sizeof a);
  a.qp_state = IBV_QPS_ERR;
  int rc = id->lib->ibv_modify_qp(id->id->qp, &a, IBV_QP_STATE);
  return rc == 0 ? 0 : sv_errno(rc);
}

int sv_id_free(sv_id *id) {
  sv_destroy_qp(id);
  errno = 0;
  int err = cm_errno(id->lib->rdma_destroy_id(id->id));
  if (err == 0) free(id);
  return err;
}
