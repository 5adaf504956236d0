//go:build linux && cgo && !nordma

#include "responder.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

struct sl_responder {
  int fd, end;
  uint8_t question[SL_HEAD], answer[SL_HEAD];
  pthread_t thread;
};

// Handles one datagram, if there is one. It never waits: an answer that does not fit into the socket's buffer is lost, as a datagram
// in the network may be.
static void take(const sl_responder *a) {
  uint8_t b[SL_SIZE + 1]; // longer datagrams are truncated
  struct sockaddr_storage from;
  socklen_t len = sizeof from;
  ssize_t n = recvfrom(a->fd, b, sizeof b, MSG_DONTWAIT, (struct sockaddr *)&from, &len);
  if (n != SL_SIZE || memcmp(b, a->question, SL_HEAD) != 0) return;
  memcpy(b, a->answer, SL_HEAD);
  sendto(a->fd, b, SL_SIZE, MSG_DONTWAIT | MSG_NOSIGNAL, (struct sockaddr *)&from, len);
}

static void *run(void *arg) {
  sl_responder *a = arg;
  prctl(PR_SET_NAME, SL_NAME);
  struct pollfd p[2] = {{.fd = a->end, .events = POLLIN}, {.fd = a->fd, .events = POLLIN}};
  for (;;) {
    if (poll(p, 2, -1) < 0) {
      if (errno == EINTR || errno == ENOMEM) continue;
      return NULL;
    }
    if (p[0].revents) return NULL;
    take(a);
  }
}

sl_responder *sl_start(int fd, int end, const uint8_t *question, const uint8_t *answer, int *err) {
  sl_responder *a = calloc(1, sizeof *a);
  if (a == NULL) {
    *err = ENOMEM;
    return NULL;
  }
  a->fd = fd;
  a->end = end;
  memcpy(a->question, question, SL_HEAD);
  memcpy(a->answer, answer, SL_HEAD);
  // Signals are for Go's threads: here, their handlers would wait for Go's scheduler.
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  *err = pthread_create(&a->thread, NULL, run, a);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (*err != 0) {
    free(a);
    return NULL;
  }
  return a;
}

void sl_stop(sl_responder *a) {
  const uint64_t one = 1;
  while (write(a->end, &one, sizeof one) < 0 && errno == EINTR) {
  }
  pthread_join(a->thread, NULL);
  free(a);
}
