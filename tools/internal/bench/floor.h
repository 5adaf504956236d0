// The floor: the same bytes in both directions over plain TCP, with blocking sockets and one thread each, or through
// shared memory, without any library.
#ifndef STEPAF_FLOOR_H
#define STEPAF_FLOOR_H

#include <stddef.h>
#include <stdint.h>

// Answers rounds on fd until the peer closes: reads in bytes, writes out bytes. With touch, it reads and writes every
// byte after each round. Returns 0, or errno.
int floor_serve(int fd, char *in_buf, size_t in, char *out_buf, size_t out, int touch);

// A flag that threads, also of several processes, wait for. It has cache lines of its own.
struct floor_word {
  uint32_t value;
  uint32_t asleep; // a thread sleeps until the value changes
  char apart[120];
};

// A barrier of the threads of a process, which begin each round together. peers is their number. The other fields, but poll, are 0 at
// first.
struct floor_gate {
  struct floor_word turn;
  int64_t poll; // nanoseconds of polling before a thread sleeps
  uint32_t peers;
  uint32_t waiting;
  uint32_t broken;
};

// Ends all waits at the gate, also later ones, with ECANCELED.
void floor_gate_break(struct floor_gate *gate);

// Does n rounds on fd: writes out bytes, reads in bytes. Stores the time at which each round starts and ends. With
// touch, it reads and writes every byte in between. Returns 0, or errno.
int floor_measure(int fd, char *out_buf, size_t out, char *in_buf, size_t in, int n, int touch, struct floor_gate *gate,
                  int64_t *start, int64_t *end);

// The beginning of the shared memory of one pair. The pushed bytes follow, and then the pulled bytes.
struct floor_shared {
  struct floor_word there; // the number of the latest push, or FLOOR_ENDED
  struct floor_word back;  // the number of the latest pull, or FLOOR_ENDED
};
#define FLOOR_ENDED UINT32_MAX

// Answers rounds until floor_shared_end: waits for a push, copies out bytes to mem + at. A wait polls for poll
// nanoseconds before it sleeps.
void floor_shared_serve(char *mem, size_t at, const char *out_buf, size_t out, int64_t poll);

// Does n rounds: copies out bytes to mem + at, waits for the pull. The arguments are those of floor_measure and of
// floor_shared_serve.
int floor_shared_measure(char *mem, size_t at, const char *out_buf, size_t out, int64_t poll, int n,
                         struct floor_gate *gate, int64_t *start, int64_t *end);

// Ends the server of mem, and the rounds of its client.
void floor_shared_end(char *mem);

// Returns the nanoseconds of CLOCK_MONOTONIC.
int64_t floor_now(void);

// floor_read reads every byte, floor_write writes every byte.
void floor_read(const char *buf, size_t n);
void floor_write(char *buf, size_t n);

#endif
