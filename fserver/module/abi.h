// The interface between the Go side and the C side of fserver_lib.
#ifndef FSERVER_ABI_H
#define FSERVER_ABI_H

#include <stdint.h>

#define SF_MAX_DIMS 8

// Values of device_type.
enum { SF_CPU = 1, SF_GPU = 2 };

// In place of a stream: there is no work to wait for.
#define SF_COMPLETE UINT64_MAX

// A tensor. In a call to Go, owner is a Python object with one reference that Go takes over. When Go no longer needs
// the memory, sf_drain returns the object. In a result of Go, owner is unused.
typedef struct {
  void *ptr;
  int64_t nbytes;
  int64_t shape[SF_MAX_DIMS];
  int32_t ndim;
  int32_t dtype; // PyTorch's code
  int32_t device_type;
  int32_t device_id;
  uint64_t key;
  void *owner;
} sf_tensor;

// A batch from Go. The caller must return each tensor with sf_release(lease, stream).
typedef struct {
  uint64_t id, lease;
  int32_t n;
  sf_tensor *tensors;
} sf_batch;

// In place of a number of batches for sf_get_batch: one batch of each worker.
#define SF_ONE (-1)

// In place of a number of rows for sf_exchange_start: all rows of the tensors.
#define SF_ALL_ROWS (-1)

// The result of respond(), in memory of malloc. All fields are atomic.
typedef struct {
  int32_t left;    // tensors that are not sent yet
  int32_t holds;   // references: Python's, and the library's while left > 0
  int32_t waiters; // callers in sf_answer_wait
} sf_answer;

// Drops one reference.
void sf_answer_drop(sf_answer *a);

// Kinds of errors: which Python exception an error becomes.
enum { SF_RUNTIME = 1, SF_TIMEOUT, SF_CONNECTION, SF_VALUE, SF_FINISHED };

// An error; text is malloc'ed.
typedef struct {
  int kind;
  char *text;
} sf_error;

// An address of a peer. IPv4 addresses are mapped to IPv6; all zeros if the host is not known.
typedef struct {
  uint8_t ip[16];
  int32_t port;
} sf_address;

// The sockets of this process's node, for fork.c. The table is constant after it was published.
typedef struct {
  int32_t ports[2]; // the node listens at these ports, 0 for none
  int32_t n;
  sf_address peers[];
} sf_sockets;

// Publishes the sockets that a forked child closes. It takes ownership of the memory, which comes from malloc.
void sf_publish(sf_sockets *s);

// Records a descriptor of fileno(any=...), which a forked child closes.
void sf_keep_descriptor(int any, int fd);

// The operations of sf_signal: flag = seq; wait until flag >= seq; seq += 1.
enum { SF_WRITE_FLAG, SF_WAIT_FLAG, SF_SEQ_ADD_ONE };

// The events that a stream waits for in sf_notify_stream: the request of a handler, the next release, or the batch that the
// call begins to get.
enum { SF_STREAM_WAIT, SF_STREAM_BLOCK, SF_STREAM_GET_BATCH };

// In place of a communicator of sf_comm_new: the communicator of this node's group.
#define SF_GROUP 0

// The collectives of sf_comm_call.
enum { SF_ALL_GATHER, SF_ALL_GATHER_V, SF_ALL_TO_ALL, SF_BROADCAST, SF_GATHER, SF_SCATTER, SF_REDUCE_SCATTER, SF_ALL_REDUCE };

// The operations of sf_comm_task.
enum { SF_COMM_BARRIER, SF_COMM_REBUILD, SF_COMM_CLOSE };

// The calls of a window. SF_NO_SIGNAL in place of a signal: no signal.
enum { SF_WINDOW_PUT, SF_WINDOW_SIGNAL, SF_WINDOW_WAIT, SF_WINDOW_FLUSH };
#define SF_NO_SIGNAL (-1)

// Results of calls that wait in slices. SF_CAPTURED: the call went into a graph. SF_CONNECTS: the call did nothing, since it may wait for a
// connection; the caller releases Python's lock and repeats it.
enum { SF_CONNECTS = -3, SF_CAPTURED = -2, SF_FAILED = -1, SF_DONE = 0, SF_PENDING = 1 };

// The number of objects that sf_drain would return. Only Go writes it.
extern int32_t sf_dropped;

#endif
