// The cost of libzmq alone: the same bytes in both directions between a DEALER and a ROUTER over TCP, with one thread
// each, without this library.
#ifndef STEPAF_FLOOR_ZMQ_H
#define STEPAF_FLOOR_ZMQ_H

#include <stddef.h>
#include <stdint.h>

// Creates a ROUTER on a free port of loopback and writes its address to at. Returns NULL after an error.
void *zmq_floor_bind(void *ctx, char *at, size_t len);

// Creates a DEALER that is connected to at. Returns NULL after an error.
void *zmq_floor_connect(void *ctx, const char *at);

// Answers each message with the out bytes of out_buf until the context is shut down.
// Returns 0, or errno. It closes the socket.
int zmq_floor_serve(void *soc, char *out_buf, size_t out, int touch);

// Does n rounds: sends out bytes, receives in bytes. Stores the nanoseconds of each.
// Returns 0, or errno.
int zmq_floor_measure(void *soc, char *out_buf, size_t out, size_t in, int n, int touch, int64_t *ns);

#endif
