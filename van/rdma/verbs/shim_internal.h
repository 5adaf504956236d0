//go:build linux && cgo && !nordma

// Declarations that only the C files use.
#ifndef SV_INTERNAL_H
#define SV_INTERNAL_H

#include "shim.h"

#include <infiniband/verbs.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stdbool.h>

// verbs.h defines macros with these names.
#undef ibv_reg_mr
#undef ibv_query_port
#undef ibv_get_device_list

// Library functions that are not inline functions of the headers. X(library function)
#define SV_VERBS_FUNCS(X)                                                                                            \
  X(ibv_get_device_list)                                                                                             \
  X(ibv_free_device_list)                                                                                            \
  X(ibv_get_device_name)                                                                                             \
  X(ibv_open_device)                                                                                                 \
  X(ibv_close_device)                                                                                                \
  X(ibv_query_device)                                                                                                \
  X(ibv_query_port)                                                                                                  \
  X(ibv_alloc_pd)                                                                                                    \
  X(ibv_dealloc_pd)                                                                                                  \
  X(ibv_reg_mr)                                                                                                      \
  X(ibv_dereg_mr)                                                                                                    \
  X(ibv_create_comp_channel)                                                                                         \
  X(ibv_destroy_comp_channel)                                                                                        \
  X(ibv_create_cq)                                                                                                   \
  X(ibv_resize_cq)                                                                                                   \
  X(ibv_destroy_cq)                                                                                                  \
  X(ibv_get_cq_event)                                                                                                \
  X(ibv_ack_cq_events)                                                                                               \
  X(ibv_modify_qp)

#define SV_CM_FUNCS(X)                                                                                               \
  X(rdma_create_event_channel)                                                                                       \
  X(rdma_destroy_event_channel)                                                                                      \
  X(rdma_get_cm_event)                                                                                               \
  X(rdma_ack_cm_event)                                                                                               \
  X(rdma_create_id)                                                                                                  \
  X(rdma_destroy_id)                                                                                                 \
  X(rdma_bind_addr)                                                                                                  \
  X(rdma_listen)                                                                                                     \
  X(rdma_resolve_addr)                                                                                               \
  X(rdma_resolve_route)                                                                                              \
  X(rdma_set_option)                                                                                                 \
  X(rdma_create_qp)                                                                                                  \
  X(rdma_destroy_qp)                                                                                                 \
  X(rdma_connect)                                                                                                    \
  X(rdma_accept)                                                                                                     \
  X(rdma_reject)                                                                                                     \
  X(rdma_disconnect)

struct sv_lib {
#define SV_FIELD(f) __typeof__(f) *f;
  SV_VERBS_FUNCS(SV_FIELD)
  SV_CM_FUNCS(SV_FIELD)
#undef SV_FIELD
  // Functions of newer libraries, or NULL. Older headers do not declare them.
  struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *, uint64_t, size_t, uint64_t, int, int);
  bool (*mlx5dv_is_supported)(struct ibv_device *);
  int (*mlx5dv_modify_qp_lag_port)(struct ibv_qp *, uint8_t);
};

struct sv_chan {
  sv_lib *lib;
  struct rdma_event_channel *ch;
  // librdmacm changes the state of a queue pair while it reads an event. The queue pair must not be destroyed then.
  pthread_mutex_t mu;
};

// Belongs to one rdma_cm_id, whose context points to it.
struct sv_id {
  sv_lib *lib;
  sv_chan *chan;
  struct rdma_cm_id *id;
  uint64_t cookie;
  sv_dev *dev;
  uint64_t handle; // of its queue pair, or 0
};

enum { SV_BATCH = 64 }; // completions polled at a time

enum { SV_SLOTS = 256, SV_CHUNKS = (1 << SV_INDEX_BITS) / SV_SLOTS };

// A slot of the queue pair table. Its memory lives as long as the device, so that a stale handle can be compared with it.
typedef struct sv_slot {
  pthread_mutex_t post_mu; // held by sv_post; to change qp or handle, hold both mutexes
  pthread_mutex_t poll_mu; // held by sv_poll while it uses this slot
  struct ibv_qp *qp;
  uint64_t handle; // 0: no queue pair
  uint64_t cookie;
  uint32_t gen, index;
  struct sv_slot *next_free;
  int ready, pinned; // ready: RTS was reached
  uint32_t port;

  // The send queue is a ring. Posting moves head, polling moves tail. A completion frees all requests posted before it, signaled or not.
  uint32_t send_depth, mask, head, tail, max_inline;
  uint64_t *ids; // of the work requests

  uint32_t recv_depth;
  uint8_t *rx; // SV_RECV_SIZE bytes for each receive request
  size_t rx_len;
  struct ibv_mr *rx_mr;
  struct ibv_recv_wr *rx_wr;
  struct ibv_sge *rx_sge;
  struct ibv_recv_wr *repost; // receive requests to be posted again
  uint32_t unposted;          // their number
} sv_slot;

struct sv_dev {
  sv_lib *lib;
  struct ibv_context *ctx;
  struct ibv_pd *pd;
  struct ibv_comp_channel *comp;
  struct ibv_cq *cq;
  int max_cqe, max_wr, cqe;
  uint64_t num; // in the upper bits of handles
  pthread_mutex_t wake_mu; // guards event
  int event;               // wakes a sleeping sv_poll; -1 when closed
  char name[64];

  pthread_mutex_t poll_mu; // held by sv_poll
  int closed, wake, sleeping;
  int resized; // armed may be outdated
  int armed; // the completion channel will report the next completion
  sv_slot *again[SV_BATCH]; // slots with receive requests to be posted again
  int nagain;
  int failed; // errno of a receive request that could not be posted again

  pthread_mutex_t mu; // guards the table
  sv_slot *chunk[SV_CHUNKS];
  uint32_t nslots;
  sv_slot *free;
};

#define SV_MASK(bits) ((1ull << (bits)) - 1)
#define SV_KEY_BITS (SV_INDEX_BITS + SV_GEN_BITS)

// A handle consists of the device's number, the generation and the index. A wr_id has the position in the queue instead of the number, and bit
// 63 if it is a receive's.
#define SV_RECV_BIT (1ull << 63)
static inline uint64_t sv_key(uint64_t x) { return x & SV_MASK(SV_KEY_BITS); }
static inline uint64_t sv_wr_id(const sv_slot *s, uint32_t pos) {
  return sv_key(s->handle) | (uint64_t)pos << SV_KEY_BITS;
}

static inline sv_slot *sv_slot_at(sv_dev *d, uint64_t key) {
  uint64_t i = key & SV_MASK(SV_INDEX_BITS);
  sv_slot *c = __atomic_load_n(&d->chunk[i / SV_SLOTS], __ATOMIC_ACQUIRE);
  return c == NULL ? NULL : &c[i % SV_SLOTS];
}

int sv_errno(int rc); // the errno of a call that returned rc, which is not 0

// Makes a sleeping sv_poll check its flags.
void sv_rouse(sv_dev *d);
// Called when the queue pair of id is connected. Pins it.
void sv_ready(sv_id *id);
void sv_destroy_qp(sv_id *id);
int sv_query(sv_lib *l, struct ibv_context *ctx, sv_devinfo *info, sv_portinfo *ports);

#endif
