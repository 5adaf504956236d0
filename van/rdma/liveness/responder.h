//go:build linux && cgo && !nordma

#ifndef SL_RESPONDER_H
#define SL_RESPONDER_H

#include <stdint.h>

enum {
  SL_SIZE = 16, // bytes of a datagram
  SL_HEAD = 8, // bytes that say what a datagram is, and for which process
};

#define SL_NAME "stepaf-beat" // name of the thread

typedef struct sl_responder sl_responder;

// Starts a thread that answers each datagram on the socket fd that begins with question. The answer is the datagram with answer in place of
// question. Both are SL_HEAD bytes, and are copied. On failure it returns NULL and *err is the errno. fd, and end, an eventfd, must stay
// open until sl_stop returns.
sl_responder *sl_start(int fd, int end, const uint8_t *question, const uint8_t *answer, int *err);
// Ends the thread, and waits for its end.
void sl_stop(sl_responder *a);

#endif
