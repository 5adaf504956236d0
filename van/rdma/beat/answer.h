//go:build linux && cgo && !nordma

#ifndef SB_ANSWER_H
#define SB_ANSWER_H

#include <stdint.h>

enum {
  SB_SIZE = 16, // of a datagram
  SB_HEAD = 8,  // of its part that says what it is and whom it is for
};

#define SB_NAME "stepaf-beat" // of the thread

typedef struct sb_answerer sb_answerer;

// Starts a thread that answers each datagram on the socket fd that begins with question, by
// what it got, with answer in place of that. Both are SB_HEAD bytes, which are copied. NULL:
// *err is the errno. fd, and end, an eventfd, must stay open until sb_stop returns.
sb_answerer *sb_start(int fd, int end, const uint8_t *question, const uint8_t *answer, int *err);
// Ends the thread, and returns when it has ended.
void sb_stop(sb_answerer *a);

#endif
