// Message calls of libzmq without the copies of the Go binding. A message costs one call from Go in each
// direction.
#ifndef STEPAF_ZMQ_SHIM_H
#define STEPAF_ZMQ_SHIM_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <zmq.h>

// Frames of the largest message: sender, meta, keys, values, lengths, cancel byte.
#define SA_MAX_PARTS 6
// Data frames of a message to send.
#define SA_MAX_DATA 3

// Frames of the largest message to send: destination and sender, meta, data, cancel byte.
#define SA_MAX_SEND (SA_MAX_DATA + 4)
// Messages or bundles that a socket holds back because more messages follow.
#define SA_MAX_HELD 16

// Limits of a bundle, see bundle.go: messages, frames after the first, and bytes of the first frame of several
// messages.
#define SA_BUNDLE_MESSAGES 16
#define SA_BUNDLE_OUTSIDE (SA_MAX_DATA + 1)
#define SA_BUNDLE_ROOM 16384

// The account of one peer: its unsent bytes. libzmq's threads subtract the bytes that they release,
// also after the socket was closed.
typedef struct {
  int64_t unsent;
} sa_acct;

// The first frame of a message to send: its meta, or the copied part of a bundle. Every message has one: its
// release shows that libzmq has copied or written the message.
typedef struct {
  sa_acct *acct;
  int64_t own;
  char bytes[];
} sa_head;

// A message that is held back to be sent together with the next one, or that is queued until the socket may
// send again.
typedef struct sa_held {
  zmq_msg_t part[SA_MAX_SEND];
  int n;
  int64_t bytes;
  struct sa_held *next;

  // A bundle that is being assembled. part[names] is made from head when the bundle is sent.
  sa_head *head; // NULL: none
  int names;     // parts before it: 0, or destination and sender
  uint32_t count;
  size_t len, room; // of head->bytes
} sa_held;

// A socket and the lock that makes it safe for concurrent use. waiting is set
// while the receiver sleeps on the socket's descriptor.
typedef struct {
  void *soc;
  int fd;   // libzmq's, readable when there may be a message
  int wake; // an eventfd that ends sa_wait
  pthread_mutex_t mu;
  int waiting;
  int nheld;
  sa_held held[SA_MAX_HELD];

  // Data messages that libzmq does not get yet: it has window bytes for the peer already
  // (0: no limit), or the peer has asked this node to wait (hold).
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
  size_t surplus; // bytes of the dropped parts
  int64_t weight; // the caller's
  int kind;       // the caller's
} sa_msg;

// Values that libzmq holds. refs is the number of frames of the message in slot index that libzmq has
// not released yet. Released slots are put on the list of their owner.
struct sa_slot;
typedef struct { struct sa_slot *head; } sa_list;
typedef struct sa_slot {
  struct sa_slot *next;
  sa_list *list;
  sa_acct *acct;
  int64_t bytes; // of the lent frames
  int refs;
  int failed; // sa_send failed: nothing was sent, and its caller reports the error
  uint32_t index;
  // The cancel byte, the last frame of a message with SA_MARK. libzmq reads it after the lent
  // frames before it. 0: these frames were unchanged.
  uint8_t mark;
} sa_slot;

// One data frame to send: lent to libzmq, or copied.
typedef struct {
  void *ptr;
  size_t len;
  int lend;
} sa_frame;

// Returns NULL if there is not enough memory or no descriptor.
sa_sock *sa_sock_new(void *soc, int fd);
void sa_sock_free(sa_sock *s);

sa_msg *sa_msg_new(void);
void sa_msg_close(sa_msg *m);
void sa_msg_free(sa_msg *m);

// Fills the empty message to with one message of a bundle. Its first part is part 1 of from, which both
// share. Its next parts are n parts of from, starting with part first; they are moved.
void sa_msg_share(sa_msg *to, sa_msg *from, int first, int n);

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

// Flags of sa_send.
// SA_MORE: more messages follow, so hold this one back. SA_URGENT: send before all queued data.
#define SA_MORE 1
#define SA_URGENT 2
// Append the cancel byte of slot as the last frame. The refs of slot include it.
#define SA_MARK 4
// Send the message in a bundle. No copied frame may be longer than SA_BUNDLE_ROOM / 2.
#define SA_BUNDLE 8

// Result bits of sa_send, sa_flush and sa_pump, which otherwise return -errno. SA_WAKE: the caller must wake the
// sleeping receiver of s. SA_QUEUED: messages wait for sa_pump.
#define SA_WAKE 1
#define SA_QUEUED 2

// Sends dest and self (if destlen > 0), meta, and nframes data frames after all held messages. Does not
// block. With SA_MORE, holds the message back if there is room. The refs of slot are the number of lent
// frames; slot is put on its list when libzmq has released all of them, also after a failure. The caller has
// added own, the bytes of everything that is not lent, and the bytes of slot to acct. They are subtracted when
// libzmq releases them, also after a failure. Returns the result bits, or -errno if nothing was sent.
int sa_send(sa_sock *s, const char *dest, int destlen, const char *self, int selflen, const void *meta, size_t metalen,
            int nframes, uintptr_t p0, size_t n0, int lend0, uintptr_t p1, size_t n1, int lend1, uintptr_t p2,
            size_t n2, int lend2, sa_slot *slot, sa_acct *acct, int64_t own, int flags);

// Sends the held messages. Returns like sa_send.
int sa_flush(sa_sock *s);

// Sends the queued messages that may be sent now, or all of them with force. Returns like sa_send.
int sa_pump(sa_sock *s, int force);

// Receives and drops all messages that have arrived.
void sa_discard(sa_sock *s);

// Sends an empty message, which nodes of this library ignore. It counts as one byte of acct until libzmq
// releases it. Returns 0 or -errno.
int sa_probe(sa_sock *s, sa_acct *acct);

// Makes data messages wait, or resumes them.
void sa_hold(sa_sock *s, int on);

#endif
