// The message calls of libzmq that the Go binding offers only in copying form,
// gathered so that a message costs one call from Go in each direction.
#ifndef STEPAF_ZMQ_SHIM_H
#define STEPAF_ZMQ_SHIM_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <zmq.h>

// Frames of the largest message: sender, meta, keys, values, lengths, mark.
#define SA_MAX_PARTS 6
// Data frames of a message to send.
#define SA_MAX_DATA 3

// Frames of the largest message to send: destination and sender, meta, data, mark.
#define SA_MAX_SEND (SA_MAX_DATA + 4)
// Messages that a socket holds back for more to come, or bundles of them.
#define SA_MAX_HELD 16

// Bundles, see bundle.go: messages of one, frames of libzmq's beside its first, and bytes
// of the first if there are several messages.
#define SA_BUNDLE_MESSAGES 16
#define SA_BUNDLE_OUTSIDE (SA_MAX_DATA + 1)
#define SA_BUNDLE_ROOM 16384

// What one peer has not taken yet, in bytes. libzmq's threads take off what they let
// go, also after the socket was closed.
typedef struct {
  int64_t unsent;
} sa_acct;

// The first bytes of a message to send: its meta, or all of a bundle that is copied. Every
// message has one, so that letting it go tells that the message has left.
typedef struct {
  sa_acct *acct;
  int64_t own;
  char bytes[];
} sa_head;

// A message that waits for the next one, so that both leave together, or for the
// socket to send again.
typedef struct sa_held {
  zmq_msg_t part[SA_MAX_SEND];
  int n;
  int64_t bytes;
  struct sa_held *next;

  // A bundle that is being put together. part[names] is made of head when it leaves.
  sa_head *head; // NULL: none
  int names;     // parts before it: 0, or destination and sender
  uint32_t count;
  size_t len, room; // of head->bytes
} sa_held;

// A socket and the lock that makes it usable from every thread. waiting is set
// while its receiver sleeps on the socket's descriptor.
typedef struct {
  void *soc;
  int fd;   // libzmq's, readable when there may be something
  int wake; // an eventfd that ends sa_wait
  pthread_mutex_t mu;
  int waiting;
  int nheld;
  sa_held held[SA_MAX_HELD];

  // Data messages that libzmq is not to have yet, since it has enough of the peer's
  // already (window; 0: no limit), or the peer has asked to wait (hold).
  sa_acct *acct;
  int64_t window;
  int hold;
  sa_held *first, *last;
  int64_t queued; // bytes from first to last, and in held
} sa_sock;

// A received message. The parts stay valid until sa_msg_close.
typedef struct {
  zmq_msg_t part[SA_MAX_PARTS];
  void *data[SA_MAX_PARTS];
  size_t size[SA_MAX_PARTS];
  int n;     // parts held
  int extra; // parts beyond SA_MAX_PARTS, received and dropped
  size_t surplus; // bytes that these were on the connection
  int64_t weight; // the caller's
  int kind;       // the caller's
} sa_msg;

// Values in the hands of libzmq: refs frames of the message in slot index are
// not yet let go. Released slots queue on the list of their owner.
struct sa_slot;
typedef struct { struct sa_slot *head; } sa_list;
typedef struct sa_slot {
  struct sa_slot *next;
  sa_list *list;
  sa_acct *acct;
  int64_t bytes; // of the lent frames
  int refs;
  int failed; // sa_send failed: nothing left, nobody is to be told
  uint32_t index;
  // What the last frame of a message with SA_MARK says. libzmq reads it after the lent
  // frames before it have left: 0 says that they were as they had been lent.
  uint8_t mark;
} sa_slot;

// One data frame to send: lent to libzmq, or copied.
typedef struct {
  void *ptr;
  size_t len;
  int lend;
} sa_frame;

// Returns NULL when memory or descriptors are short.
sa_sock *sa_sock_new(void *soc, int fd);
void sa_sock_free(sa_sock *s);

sa_msg *sa_msg_new(void);
void sa_msg_close(sa_msg *m);
void sa_msg_free(sa_msg *m);

// Makes to, which is empty, one message of a bundle: its first part is from's part 1, which
// both have then, and the next ones are n parts of from's, from part first, which from has
// no longer.
void sa_msg_share(sa_msg *to, sa_msg *from, int first, int n);

// Returns the descriptor of the connection that m came from, or -1.
int sa_msg_fd(sa_msg *m);

// Returns the address of the host that m came from, as text, or NULL. It is valid as long as m is.
const char *sa_msg_host(sa_msg *m);

// Receives one message, looking for it for spin_ns nanoseconds at most. Returns 1,
// 0 when there is none, or -errno. While it looks it yields the processor to
// whoever is to bring the message. With park, a receiver without a message is
// marked as waiting.
int sa_recv(sa_sock *s, sa_msg *m, int64_t spin_ns, int park);

// Sleeps until the socket's descriptor is readable or sa_wake was called.
void sa_wait(sa_sock *s);
void sa_wake(sa_sock *s);

// How to send: after what is held, with more to come; ahead of all that waits.
#define SA_MORE 1
#define SA_URGENT 2
// With slot's mark as the last frame, which slot's refs counts, too.
#define SA_MARK 4
// As one of a bundle. No frame that is not lent may be longer than SA_BUNDLE_ROOM / 2.
#define SA_BUNDLE 8

// What sa_send, sa_flush and sa_pump return besides -errno: the sleeping receiver of s
// must be woken; something waits for sa_pump.
#define SA_WAKE 1
#define SA_QUEUED 2

// Sends dest and self (if destlen > 0), meta, and nframes data frames, without
// blocking, after what is held. With SA_MORE, holds the message if there is room. slot,
// whose refs is the number of lent frames, joins its list when libzmq has let go of all
// of them, also after a failure. The caller has added own, the bytes of everything that
// is not lent, and slot's bytes to acct; they are taken off when libzmq lets go, also
// after a failure. Returns bits, or -errno when nothing was sent.
int sa_send(sa_sock *s, const char *dest, int destlen, const char *self, int selflen, const void *meta, size_t metalen,
            int nframes, uintptr_t p0, size_t n0, int lend0, uintptr_t p1, size_t n1, int lend1, uintptr_t p2,
            size_t n2, int lend2, sa_slot *slot, sa_acct *acct, int64_t own, int flags);

// Sends what is held. Returns like sa_send.
int sa_flush(sa_sock *s);

// Sends what waits and may leave now: all of it with force. Returns like sa_send.
int sa_pump(sa_sock *s, int force);

// Receives what is there, and drops it.
void sa_discard(sa_sock *s);

// Sends an empty message, which a node of this library passes over, and counts one byte for
// it until libzmq lets go. Returns 0 or -errno.
int sa_probe(sa_sock *s, sa_acct *acct);

// Makes data messages wait, or go on.
void sa_hold(sa_sock *s, int on);

#endif
