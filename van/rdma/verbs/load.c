//go:build linux && cgo && !nordma

#include "shim_internal.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

// Go reads and writes these directly.
_Static_assert(sizeof(sv_wr) == 56, "sv_wr");
_Static_assert(offsetof(sv_wr, qp) == 0 && offsetof(sv_wr, id) == 8 && offsetof(sv_wr, op) == 16 &&
                   offsetof(sv_wr, flags) == 20 && offsetof(sv_wr, imm) == 24 && offsetof(sv_wr, rkey) == 28 &&
                   offsetof(sv_wr, remote) == 32 && offsetof(sv_wr, local) == 40 && offsetof(sv_wr, len) == 48 &&
                   offsetof(sv_wr, lkey) == 52,
               "sv_wr");
_Static_assert(sizeof(sv_wc) == 48 + SV_RECV_SIZE, "sv_wc");
_Static_assert(offsetof(sv_wc, type) == 0 && offsetof(sv_wc, status) == 4 && offsetof(sv_wc, id) == 8 &&
                   offsetof(sv_wc, cookie) == 16 && offsetof(sv_wc, qp) == 24 && offsetof(sv_wc, imm) == 32 &&
                   offsetof(sv_wc, len) == 36 && offsetof(sv_wc, vendor) == 40 && offsetof(sv_wc, data) == 48,
               "sv_wc");
_Static_assert(SV_DEV_BITS + SV_GEN_BITS + SV_INDEX_BITS <= 64, "handle");
_Static_assert(SV_POS_BITS + SV_GEN_BITS + SV_INDEX_BITS <= 63, "wr_id");

static int failed(int *what, int which, char *err, int errlen, const char *text) {
  *what = which;
  snprintf(err, (size_t)errlen, "%s", text == NULL ? "" : text);
  return 0;
}

static int resolve(sv_lib *l, void *verbs, void *cm, int *what, char *err, int errlen) {
#define SV_VERBS_SYMBOL(f)                                                                                           \
  if ((l->f = (__typeof__(f) *)dlsym(verbs, #f)) == NULL) return failed(what, SV_LOAD_VERBS_SYMBOL, err, errlen, #f);
#define SV_CM_SYMBOL(f)                                                                                              \
  if ((l->f = (__typeof__(f) *)dlsym(cm, #f)) == NULL) return failed(what, SV_LOAD_CM_SYMBOL, err, errlen, #f);
  SV_VERBS_FUNCS(SV_VERBS_SYMBOL)
  SV_CM_FUNCS(SV_CM_SYMBOL)
  *(void **)&l->reg_dmabuf_mr = dlsym(verbs, "ibv_reg_dmabuf_mr");
  return 1;
}

sv_lib *sv_load(const char *verbs, const char *cm, const char *mlx5, int *what, char *err, int errlen) {
  sv_lib *l = calloc(1, sizeof *l);
  if (l == NULL) {
    failed(what, SV_LOAD_MEMORY, err, errlen, "");
    return NULL;
  }
  void *v = dlopen(verbs, RTLD_NOW | RTLD_LOCAL), *c = NULL;
  if (v == NULL) {
    failed(what, SV_LOAD_VERBS, err, errlen, dlerror());
  } else if ((c = dlopen(cm, RTLD_NOW | RTLD_LOCAL)) == NULL) {
    failed(what, SV_LOAD_CM, err, errlen, dlerror());
  }
  if (c == NULL || !resolve(l, v, c, what, err, errlen)) {
    free(l);
    return NULL;
  }
  void *m = dlopen(mlx5, RTLD_NOW | RTLD_LOCAL);
  if (m != NULL) {
    *(void **)&l->mlx5dv_is_supported = dlsym(m, "mlx5dv_is_supported");
    *(void **)&l->mlx5dv_modify_qp_lag_port = dlsym(m, "mlx5dv_modify_qp_lag_port");
  }
  return l;
}

int sv_has_mlx5(const sv_lib *l) { return l->mlx5dv_is_supported != NULL && l->mlx5dv_modify_qp_lag_port != NULL; }
int sv_has_dmabuf(const sv_lib *l) { return l->reg_dmabuf_mr != NULL; }

// Functions of the verbs return an errno, a negative errno, or -1 with errno set.
int sv_errno(int rc) {
  if (rc > 0) return rc;
  if (rc < -1) return -rc;
  return errno != 0 ? errno : EIO;
}
