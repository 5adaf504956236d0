// The message calls of libzmq that the Go binding offers only in copying form,
// gathered so that a message costs one call from Go in each direction.
#ifndef STEPAF_ZMQ_SHIM_H
#define STEPAF_ZMQ_SHIM_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <zmq.h>

// Frames of the largest message: sender, meta, keys, values, lengths.
#define SA_MAX_PARTS 5
// Data frames of a message to send.
#define SA_MAX_DATA 3

// A socket and the lock that makes it usable from every thread. waiting is set
// while its receiver sleeps on the socket's descriptor.
typedef struct {
  void *soc;
  pthread_mutex_t mu;
  int waiting;
} sa_sock;

// A received message. The parts stay valid until sa_msg_close.
typedef struct {
  zmq_msg_t part[SA_MAX_PARTS];
  void *data[SA_MAX_PARTS];
  size_t size[SA_MAX_PARTS];
  int n;     // parts held
  int extra; // parts beyond SA_MAX_PARTS, received and dropped
} sa_msg;

// Values in the hands of libzmq: refs frames of the message in slot index are
// not yet let go. Released slots queue on the list of their owner.
struct sa_slot;
typedef struct { struct sa_slot *head; } sa_list;
typedef struct sa_slot {
  struct sa_slot *next;
  sa_list *list;
  int refs;
  int failed; // the send failed: nothing left, nobody is to be told
  uint32_t index;
} sa_slot;

// One data frame to send: lent to libzmq, or copied.
typedef struct {
  void *ptr;
  size_t len;
  int lend;
} sa_frame;

sa_sock *sa_sock_new(void *soc);
void sa_sock_free(sa_sock *s);

sa_msg *sa_msg_new(void);
void sa_msg_close(sa_msg *m);
void sa_msg_free(sa_msg *m);

// Receives one message without blocking. Returns 1, 0 when there is none (and
// marks the receiver as waiting), or -errno.
int sa_recv(sa_sock *s, sa_msg *m);

// Sends dest and self (if destlen > 0), meta, and nframes data frames, without
// blocking. slot, whose refs is the number of lent frames, joins its list when
// libzmq has let go of all of them, also after a failure. Returns 0, or 1 when the
// sleeping receiver of s must be woken, or -errno when nothing was sent.
int sa_send(sa_sock *s, const char *dest, int destlen, const char *self, int selflen, const void *meta, size_t metalen,
            int nframes, uintptr_t p0, size_t n0, int lend0, uintptr_t p1, size_t n1, int lend1, uintptr_t p2,
            size_t n2, int lend2, sa_slot *slot);

#endif
