//go:build fserver

// This file runs in the child of a fork. It calls no Go, and only async-signal-safe functions.
// The child closes the descriptors by which peers notice that this process has ended: the
// connections of the node, the sockets at which it listens, and RDMA devices. While a child
// keeps them open, peers take the process for alive. It also closes the descriptors of fileno().
#define _GNU_SOURCE
#include "fork.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "abi.h"
#include "threads.h"

int sf_forked;

// The node's sockets. Go replaces the whole table; a child sees the table at the time of the fork.
static sf_sockets *own;

void sf_publish(sf_sockets *s) { free(__atomic_exchange_n(&own, s, __ATOMIC_ACQ_REL)); }

// The descriptors of fileno() and fileno(any=True), plus 1; 0 for none.
static int shown[2];

void sf_keep_descriptor(int any, int fd) { __atomic_store_n(&shown[any != 0], fd + 1, __ATOMIC_RELEASE); }

typedef union {
  struct sockaddr any;
  struct sockaddr_in v4;
  struct sockaddr_in6 v6;
  struct sockaddr_un local;
} address;

// internet sets ip and port of an IPv4 or IPv6 address. IPv4 is mapped to IPv6.
static int internet(const address *a, sf_address *out) {
  memset(out, 0, sizeof *out);
  if (a->any.sa_family == AF_INET) {
    out->ip[10] = out->ip[11] = 0xff;
    memcpy(out->ip + 12, &a->v4.sin_addr, 4);
    out->port = ntohs(a->v4.sin_port);
  } else if (a->any.sa_family == AF_INET6) {
    memcpy(out->ip, &a->v6.sin6_addr, 16);
    out->port = ntohs(a->v6.sin6_port);
  } else {
    return 0;
  }
  return 1;
}

// own_port reports whether the node listens at port.
static int own_port(const sf_sockets *s, long port) { return port != 0 && (port == s->ports[0] || port == s->ports[1]); }

// node_port reports whether the node or one of its peers listens at port.
static int node_port(const sf_sockets *s, long port) {
  if (own_port(s, port)) return 1;
  for (int i = 0; i < s->n; i++)
    if (port == s->peers[i].port) return 1;
  return 0;
}

// local_name reports whether a is a name of the transports within a host: "\0stepaf-..." in
// the abstract name space, or "/tmp/<port>" of DMLC_LOCAL.
static int local_name(const sf_sockets *s, const address *a, socklen_t size) {
  static const char mark[] = "\0stepaf-";
  size_t n = size > offsetof(struct sockaddr_un, sun_path) ? size - offsetof(struct sockaddr_un, sun_path) : 0;
  const char *path = a->local.sun_path;
  if (a->any.sa_family != AF_UNIX) return 0;
  if (n >= sizeof mark - 1 && memcmp(path, mark, sizeof mark - 1) == 0) return 1;
  if (n < 6 || memcmp(path, "/tmp/", 5) != 0) return 0;
  long port = 0;
  for (size_t i = 5; i < n && path[i] != 0; i++) {
    if (path[i] < '0' || path[i] > '9' || port > 65535) return 0;
    port = 10 * port + path[i] - '0';
  }
  return port > 0 && node_port(s, port);
}

static int is_nodes_socket(const sf_sockets *s, int fd) {
  address near = {0}, far = {0};
  sf_address here, there;
  socklen_t near_size = sizeof near, far_size = sizeof far, size = sizeof(int);
  int kind = 0;
  if (getsockname(fd, &near.any, &near_size) != 0) return 0;
  int connected = getpeername(fd, &far.any, &far_size) == 0;
  if (local_name(s, &near, near_size) || (connected && local_name(s, &far, far_size))) return 1;
  if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &kind, &size) != 0 || kind != SOCK_STREAM || !internet(&near, &here)) return 0;
  if (own_port(s, here.port)) return 1;
  if (connected && internet(&far, &there))
    for (int i = 0; i < s->n; i++)
      if (memcmp(&there, &s->peers[i], sizeof there) == 0) return 1;
  return 0;
}

static int is_rdma_device(int dir, const char *name) {
  static const char devices[] = "/dev/infiniband/";
  char to[sizeof devices];
  ssize_t n = readlinkat(dir, name, to, sizeof to);
  return n >= (ssize_t)sizeof devices - 1 && memcmp(to, devices, sizeof devices - 1) == 0;
}

// close_nodes_files closes the descriptors of the node in the child. It lists the descriptors with
// the system call, since opendir allocates memory.
static void close_nodes_files(const sf_sockets *s) {
  struct entry { // struct linux_dirent64
    uint64_t inode, offset;
    unsigned short size;
    unsigned char type;
    char name[];
  };
  _Alignas(struct entry) char buf[4096];
  int dir = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (dir < 0) return;
  for (long n; (n = syscall(SYS_getdents64, dir, buf, sizeof buf)) > 0;) {
    for (long at = 0; at < n; at += ((struct entry *)(buf + at))->size) {
      const char *name = ((struct entry *)(buf + at))->name;
      struct stat st;
      int fd = 0;
      for (const char *c = name; fd >= 0 && *c != 0; c++) fd = *c >= '0' && *c <= '9' ? 10 * fd + *c - '0' : -1;
      if (fd < 0 || fd == dir || fstat(fd, &st) != 0) continue;
      if (S_ISSOCK(st.st_mode) ? is_nodes_socket(s, fd) : S_ISCHR(st.st_mode) && is_rdma_device(dir, name)) close(fd);
    }
  }
  close(dir);
}

static void in_child(void) {
  int before = errno;
  int first = !sf_forked;
  sf_forked = 1;
  if (first) {
    threads_forked();
    for (int i = 0; i < 2; i++)
      if (shown[i] != 0) close(shown[i] - 1);
    if (own != NULL) close_nodes_files(own);
  }
  errno = before;
}

void fork_watch(void) { pthread_atfork(NULL, NULL, in_child); }
