// Message calls of libzmq without the copies of the Go binding. A message costs one call from Go in each
// direction.
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
// Frames of the largest message to send: destination and sender, meta, data.
#define SA_MAX_SEND (SA_MAX_DATA + 3)

// An account of unsent bytes. unsent is their number, and SA_OPEN more as long as Go refers to the account. libzmq's threads
// subtract the bytes that they release, also after the socket was closed.
typedef struct {
  int64_t unsent;
} sa_acct;
#define SA_OPEN (1ll << 62)

// Subtracts bytes from acct, and frees it if nothing is left.
void sa_settle(sa_acct *acct, int64_t bytes);

// A socket and the lock that makes it safe for concurrent use. waiting is set
// while the receiver sleeps on the socket's descriptor.
typedef struct {
  void *soc;
  int fd;   // libzmq's, readable when there may be a message
  int wake; // an eventfd that ends sa_wait, or -1
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
  size_t surplus; // bytes of the dropped parts
  int64_t weight; // set and read by the caller only
  int stranger;   // set and read by the caller only
} sa_msg;

// With sleeps, a thread may sleep in sa_wait. Returns NULL if there is not enough memory or no descriptor.
sa_sock *sa_sock_new(void *soc, int fd, int sleeps);
void sa_sock_free(sa_sock *s);

sa_msg *sa_msg_new(void);
void sa_msg_close(sa_msg *m);
void sa_msg_free(sa_msg *m);

// Returns the descriptor of the connection on which m arrived, or -1.
int sa_msg_fd(sa_msg *m);

// Returns the source address of m as text, or NULL. It is valid as long as m is.
const char *sa_msg_host(sa_msg *m);

// Receives one message. Spins for spin_ns nanoseconds at most, and yields the processor meanwhile.
// Returns 1, 0 if there is no message, or -errno. With park, a receiver without a message is
// recorded as waiting.
int sa_recv(sa_sock *s, sa_msg *m, int64_t spin_ns, int park);

// Sleeps until the socket's descriptor is readable or sa_wake was called.
void sa_wait(sa_sock *s);
void sa_wake(sa_sock *s);

// Sends dest and self (if destlen > 0), meta, and nframes data frames, of which libzmq gets copies. Does not block. The
// caller has added bytes to acct. They are subtracted when libzmq has written the message or dropped it, also after a failure.
// Returns 0; 1: the caller must wake the sleeping receiver of s; or -errno if nothing was sent.
int sa_send(sa_sock *s, const char *dest, int destlen, const char *self, int selflen, const void *meta, size_t metalen,
            int nframes, uintptr_t p0, size_t n0, uintptr_t p1, size_t n1, uintptr_t p2, size_t n2, sa_acct *acct,
            int64_t bytes);

// Receives and drops all messages that have arrived.
void sa_discard(sa_sock *s);

// Sends an empty message, which nodes of this library ignore. It counts as one byte of acct until libzmq
// releases it. Returns 0 or -errno.
int sa_probe(sa_sock *s, sa_acct *acct);

#endif
