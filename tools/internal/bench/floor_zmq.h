// What ZMQ costs by itself: the same bytes to and fro between a DEALER and a ROUTER
// over TCP, one thread each, without any of this library.
#ifndef STEPAF_FLOOR_ZMQ_H
#define STEPAF_FLOOR_ZMQ_H

#include <stddef.h>
#include <stdint.h>

// Makes a ROUTER on a free port of loopback and writes where it is to at. Returns NULL
// after an error.
void *zmq_floor_bind(void *ctx, char *at, size_t len);

// Makes a DEALER that is connected to at. Returns NULL after an error.
void *zmq_floor_connect(void *ctx, const char *at);

// Answers each message with the out bytes of out_buf until the context is shut down.
// Returns 0, or errno. It closes the socket.
int zmq_floor_serve(void *soc, char *out_buf, size_t out, int touch);

// Does n rounds: sends out bytes, receives in bytes. Stores the nanoseconds of each.
// Returns 0, or errno.
int zmq_floor_measure(void *soc, char *out_buf, size_t out, size_t in, int n, int touch, int64_t *ns);

#endif
