// The floor: the same bytes to and fro over plain TCP, blocking sockets, one
// thread each, without any library.
#ifndef STEPAF_FLOOR_H
#define STEPAF_FLOOR_H

#include <stddef.h>
#include <stdint.h>

// Answers rounds on fd until the peer closes: reads in bytes, writes out bytes.
// Returns 0, or errno.
int floor_serve(int fd, char *in_buf, size_t in, char *out_buf, size_t out);

// Does n rounds on fd: writes out bytes, reads in bytes. Stores the nanoseconds of
// each round. Returns 0, or errno.
int floor_measure(int fd, char *out_buf, size_t out, char *in_buf, size_t in, int n, int64_t *ns);

#endif
