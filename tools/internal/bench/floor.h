// The floor: the same bytes in both directions over plain TCP, with blocking sockets and one thread each, without any
// library.
#ifndef STEPAF_FLOOR_H
#define STEPAF_FLOOR_H

#include <stddef.h>
#include <stdint.h>

// Answers rounds on fd until the peer closes: reads in bytes, writes out bytes. With touch, it reads and writes every
// byte after each round. Returns 0, or errno.
int floor_serve(int fd, char *in_buf, size_t in, char *out_buf, size_t out, int touch);

// Does n rounds on fd: writes out bytes, reads in bytes. Stores the nanoseconds of
// each round. With touch, it reads and writes every byte in between. Returns 0, or errno.
int floor_measure(int fd, char *out_buf, size_t out, char *in_buf, size_t in, int n, int touch, int64_t *ns);

// Returns the nanoseconds of CLOCK_MONOTONIC.
int64_t floor_now(void);

// floor_read reads every byte, floor_write writes every byte.
void floor_read(const char *buf, size_t n);
void floor_write(char *buf, size_t n);

#endif
