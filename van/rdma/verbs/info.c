//go:build linux && cgo && !nordma

#include "shim_internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct sv_list {
  sv_lib *lib;
  struct ibv_device **dev;
};

sv_list *sv_list_new(sv_lib *l, int *n, int *err) {
  sv_list *s = calloc(1, sizeof *s);
  *err = ENOMEM;
  if (s == NULL) return NULL;
  s->lib = l;
  errno = 0;
  s->dev = l->ibv_get_device_list(n);
  if (s->dev == NULL) {
    *err = errno != 0 ? errno : EIO;
    free(s);
    return NULL;
  }
  *err = 0;
  return s;
}

void sv_list_free(sv_list *s) {
  s->lib->ibv_free_device_list(s->dev);
  free(s);
}

const char *sv_list_name(sv_list *s, int i) { return s->lib->ibv_get_device_name(s->dev[i]); }

int sv_list_query(sv_list *s, int i, sv_devinfo *info, sv_portinfo *ports) {
  errno = 0;
  struct ibv_context *ctx = s->lib->ibv_open_device(s->dev[i]);
  if (ctx == NULL) return errno != 0 ? errno : EIO;
  int err = sv_query(s->lib, ctx, info, ports);
  s->lib->ibv_close_device(ctx);
  return err;
}

int sv_dev_query(sv_dev *d, sv_devinfo *info, sv_portinfo *ports) {
  // Not concurrently with sv_dev_close: the context may end with the last ID of the channel.
  pthread_mutex_lock(&d->mu);
  int err = d->closed ? SV_ESTALE : sv_query(d->lib, d->ctx, info, ports);
  pthread_mutex_unlock(&d->mu);
  return err;
}

int sv_query(sv_lib *l, struct ibv_context *ctx, sv_devinfo *info, sv_portinfo *ports) {
  struct ibv_device_attr a;
  memset(&a, 0, sizeof a);
  int rc = l->ibv_query_device(ctx, &a);
  if (rc != 0) return sv_errno(rc);
  memset(info, 0, sizeof *info);
  snprintf(info->name, sizeof info->name, "%s", l->ibv_get_device_name(ctx->device));
  snprintf(info->firmware, sizeof info->firmware, "%.*s", (int)sizeof a.fw_ver, a.fw_ver);
  info->ports = a.phys_port_cnt;
  info->max_qp = a.max_qp;
  info->max_cqe = a.max_cqe;
  info->max_mr = a.max_mr;
  info->max_wr = a.max_qp_wr;
  for (int i = 0; i < info->ports; i++) {
    // The function fills the first version of the structure, which has all that is needed here.
    struct ibv_port_attr p;
    memset(&p, 0, sizeof p);
    rc = l->ibv_query_port(ctx, (uint8_t)(i + 1), (void *)&p);
    if (rc != 0) return sv_errno(rc);
    ports[i].state = p.state;
    ports[i].ethernet = p.link_layer == IBV_LINK_LAYER_ETHERNET;
    ports[i].mtu = p.active_mtu > 0 ? 128u << p.active_mtu : 0;
    ports[i].max_msg = p.max_msg_sz;
  }
  return 0;
}
