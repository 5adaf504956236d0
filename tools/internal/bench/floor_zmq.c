#include "floor_zmq.h"

#include <errno.h>
#include <zmq.h>

#include "floor.h"

static void *open_socket(void *ctx, int type) {
  void *soc = zmq_socket(ctx, type);
  int zero = 0;
  if (soc != NULL) zmq_setsockopt(soc, ZMQ_LINGER, &zero, sizeof zero);
  return soc;
}

void *zmq_floor_bind(void *ctx, char *at, size_t len) {
  void *soc = open_socket(ctx, ZMQ_ROUTER);
  if (soc == NULL) return NULL;
  if (zmq_bind(soc, "tcp://127.0.0.1:*") == 0 && zmq_getsockopt(soc, ZMQ_LAST_ENDPOINT, at, &len) == 0) return soc;
  zmq_close(soc);
  return NULL;
}

void *zmq_floor_connect(void *ctx, const char *at) {
  void *soc = open_socket(ctx, ZMQ_DEALER);
  if (soc == NULL) return NULL;
  if (zmq_connect(soc, at) == 0) return soc;
  zmq_close(soc);
  return NULL;
}

static void keep(void *data, void *hint) {
  (void)data;
  (void)hint;
}

// Sends n bytes without copying them, as this library does. Returns 0, or errno.
static int send_lent(void *soc, char *data, size_t n) {
  zmq_msg_t m;
  if (zmq_msg_init_data(&m, data, n, keep, NULL) != 0) return zmq_errno();
  while (zmq_msg_send(&m, soc, 0) < 0) {
    if (zmq_errno() == EINTR) continue;
    int err = zmq_errno();
    zmq_msg_close(&m);
    return err;
  }
  return 0;
}

// Returns 0, or errno.
static int receive(void *soc, zmq_msg_t *m) {
  while (zmq_msg_recv(m, soc, 0) < 0)
    if (zmq_errno() != EINTR) return zmq_errno();
  return 0;
}

static int serve_one(void *soc, zmq_msg_t *from, zmq_msg_t *m, char *out_buf, size_t out) {
  int err = receive(soc, from);
  if (err == 0) err = receive(soc, m);
  if (err != 0) return err;
  while (zmq_msg_send(from, soc, ZMQ_SNDMORE) < 0)
    if (zmq_errno() != EINTR) return zmq_errno();
  return send_lent(soc, out_buf, out);
}

int zmq_floor_serve(void *soc, char *out_buf, size_t out, int touch) {
  zmq_msg_t from, m;
  zmq_msg_init(&from);
  zmq_msg_init(&m);
  int err;
  while ((err = serve_one(soc, &from, &m, out_buf, out)) == 0)
    if (touch) floor_read(zmq_msg_data(&m), zmq_msg_size(&m));
  zmq_msg_close(&from);
  zmq_msg_close(&m);
  zmq_close(soc);
  return err == ETERM ? 0 : err;
}

int zmq_floor_measure(void *soc, char *out_buf, size_t out, size_t in, int n, int touch, int64_t *ns) {
  zmq_msg_t m;
  zmq_msg_init(&m);
  int err = 0;
  for (int i = 0; i < n && err == 0; i++) {
    if (touch) floor_write(out_buf, out);
    int64_t start = floor_now();
    err = send_lent(soc, out_buf, out);
    if (err == 0) err = receive(soc, &m);
    ns[i] = floor_now() - start;
    if (err == 0 && zmq_msg_size(&m) != in) err = EPIPE;
    if (err == 0 && touch) floor_read(zmq_msg_data(&m), in);
  }
  zmq_msg_close(&m);
  return err;
}
