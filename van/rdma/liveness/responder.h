//go:build linux && cgo && !nordma

#ifndef SL_RESPONDER_H
#define SL_RESPONDER_H

#include <stdint.h>

enum {
  SL_SIZE = 16, // of a datagram
  SL_HEAD = 8,  // of its part that says what it is and whom it is for
};

#define SL_NAME "stepaf-beat" // of the thread

typedef struct sl_responder sl_responder;

// Starts a thread that answers each datagram on the socket fd that begins with question, by
// what it got, with answer in place of that. Both are SL_HEAD bytes, which are copied. NULL:
// *err is the errno. fd, and end, an eventfd, must stay open until sl_stop returns.
sl_responder *sl_start(int fd, int end, const uint8_t *question, const uint8_t *answer, int *err);
// Ends the thread, and returns when it has ended.
void sl_stop(sl_responder *a);

#endif
