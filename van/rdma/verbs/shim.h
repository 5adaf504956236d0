//go:build linux && cgo && !nordma

// The shim's interface to Go. Functions return 0 or an errno unless stated otherwise.
#ifndef SV_SHIM_H
#define SV_SHIM_H

#include <stddef.h>
#include <stdint.h>

typedef struct sv_lib sv_lib;
typedef struct sv_chan sv_chan;
typedef struct sv_id sv_id;
typedef struct sv_dev sv_dev;

enum {
  SV_RECV_SIZE = 64,
  SV_INDEX_BITS = 20, // queue pairs of a device at one time
  SV_GEN_BITS = 24, // queue pairs that use one slot of the table in succession
  SV_POS_BITS = 19, // positions in a queue
  SV_DEV_BITS = 20,   // devices
  SV_MAX_DEPTH = 1 << (SV_POS_BITS - 1),
};

// Results of sv_post and sv_poll, in addition to those of the providers.
enum {
  SV_ESTALE = 100001, // no such queue pair, or the device is closed
  SV_EFULL,
  SV_ENOTREADY, // the queue pair is not connected
  SV_EINLINE,   // more inline data than granted
  SV_EOPCODE,
  SV_EPOLLING, // two callers of sv_poll
};

// The same layout as SendWR and Completion in Go.
typedef struct {
  uint64_t qp, id;
  uint32_t op, flags, imm, rkey;
  uint64_t remote, local;
  uint32_t len, lkey;
} sv_wr;

typedef struct {
  uint32_t type, status;
  uint64_t id, cookie, qp;
  uint32_t imm, len, vendor, pad;
  uint8_t data[SV_RECV_SIZE];
} sv_wc;

enum { SV_OP_SEND_IMM = 1, SV_OP_WRITE, SV_OP_WRITE_IMM };
enum { SV_SIGNALED = 1, SV_INLINE = 2 };
enum { SV_SEND_DONE = 1, SV_RECV_SEND, SV_RECV_WRITE, SV_RECV_FAILED };
enum { SV_LOCAL_WRITE = 1, SV_REMOTE_WRITE = 2 };

enum {
  SV_ADDR_RESOLVED = 1,
  SV_ADDR_ERROR,
  SV_ROUTE_RESOLVED,
  SV_ROUTE_ERROR,
  SV_CONNECT_REQUEST,
  SV_UNREACHABLE,
  SV_REJECTED,
  SV_ESTABLISHED,
  SV_DISCONNECTED,
  SV_DEVICE_REMOVAL,
  SV_TIMEWAIT_EXIT,
  SV_OTHER_EVENT,
};

// load.c

// The step of sv_load that failed.
enum { SV_LOAD_VERBS = 1, SV_LOAD_CM, SV_LOAD_VERBS_SYMBOL, SV_LOAD_CM_SYMBOL, SV_LOAD_MEMORY };

// Opens the libraries, which are never closed. On failure it returns NULL, *what is the failed step, and err the reason.
sv_lib *sv_load(const char *verbs, const char *cm, const char *mlx5, int *what, char *err, int errlen);
int sv_has_mlx5(const sv_lib *l);
int sv_has_dmabuf(const sv_lib *l);

// info.c

typedef struct {
  char name[64], firmware[64];
  int32_t ports, max_qp, max_cqe, max_mr, max_wr;
} sv_devinfo;

typedef struct {
  uint32_t state, ethernet, mtu, max_msg;
} sv_portinfo;

enum { SV_MAX_PORTS = 255 };

typedef struct sv_list sv_list;
sv_list *sv_list_new(sv_lib *l, int *n, int *err);
const char *sv_list_name(sv_list *s, int i);
// ports has SV_MAX_PORTS entries.
int sv_list_query(sv_list *s, int i, sv_devinfo *info, sv_portinfo *ports);
void sv_list_free(sv_list *s);
int sv_dev_query(sv_dev *d, sv_devinfo *info, sv_portinfo *ports);

// cm.c

typedef struct {
  uint16_t family; // 4, 6, or 0 for none
  uint16_t port;
  uint32_t scope;
  uint8_t ip[16];
} sv_addr;

typedef struct {
  int32_t type, status;
  uint64_t cookie;
  sv_id *fresh; // the new ID of a connect request
  sv_addr peer;
  uint32_t private_len;
  uint8_t private_data[256];
} sv_event;

sv_chan *sv_chan_new(sv_lib *l, int *err);
int sv_chan_fd(sv_chan *c); // non-blocking; belongs to the channel
void sv_chan_free(sv_chan *c);
// Reads the next event and acknowledges it. Returns EAGAIN if there is none.
int sv_next(sv_chan *c, sv_event *e);

sv_id *sv_id_new(sv_chan *c, uint64_t cookie, int *err);
void sv_id_set_cookie(sv_id *id, uint64_t cookie);
uintptr_t sv_id_context(sv_id *id); // identifies the device; 0 without a device
void sv_id_addr(sv_id *id, sv_addr *a);
int sv_bind(sv_id *id, const sv_addr *a);
int sv_listen(sv_id *id, int backlog);
int sv_resolve_addr(sv_id *id, const sv_addr *src, const sv_addr *dst, int ms);
int sv_resolve_route(sv_id *id, int ms);
int sv_set_ack_timeout(sv_id *id, int exp);
int sv_set_tos(sv_id *id, int tos);
int sv_connect(sv_id *id, const void *priv, int privlen, int retry, int rnr);
int sv_accept(sv_id *id, const void *priv, int privlen, int retry, int rnr);
int sv_reject(sv_id *id, const void *priv, int privlen);
int sv_disconnect(sv_id *id);
// Destroys the queue pair, too. Frees id if it returns 0.
int sv_id_free(sv_id *id);

// dev.c

// On failure it returns NULL, and *op is the failed operation.
sv_dev *sv_dev_new(sv_lib *l, sv_id *id, uint32_t num, int cqe, int *err, const char **op);
const char *sv_dev_name(sv_dev *d);
// Releases everything but the memory of d, which late callers may still read. On failure, *op is the failed operation, and the function can be
// called again.
int sv_dev_close(sv_dev *d, const char **op);
void sv_dev_free(sv_dev *d);
int sv_resize(sv_dev *d, int n);
int sv_capacity(sv_dev *d);
int sv_max_cqe(sv_dev *d);
int sv_max_wr(sv_dev *d);

typedef struct {
  uint64_t cookie, handle;
  uint32_t send_depth, recv_depth, inline_size, port, num;
} sv_qp_opts; // inline_size, handle, num are set

// On failure, *op is the failed operation.
int sv_create_qp(sv_dev *d, sv_id *id, sv_qp_opts *o, const char **op);
int sv_pinned(sv_dev *d, uint64_t handle);

int sv_reg(sv_dev *d, uintptr_t p, size_t n, int access, void **mr, uint32_t *lkey, uint32_t *rkey);
int sv_reg_dmabuf(sv_dev *d, int fd, uint64_t off, size_t n, uint64_t iova, int access, void **mr, uint32_t *lkey,
                  uint32_t *rkey);
int sv_dereg(sv_dev *d, void *mr);

// data.c

// Returns the number of posted requests in the lower half, and the reason for stopping early in the upper half.
uint64_t sv_post(sv_dev *d, const sv_wr *w, int n);
// Returns the number of completions, or -errno.
int sv_poll(sv_dev *d, sv_wc *out, int max, int64_t spin_ns, int64_t block_ns);
void sv_wake(sv_dev *d);

#endif
