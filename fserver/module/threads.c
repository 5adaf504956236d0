//go:build fserver

// This file keeps the program's signals and Go's code apart. A signal handler that was
// installed without SA_ONSTACK (by libuv, by Python before 3.10) runs on the stack that its
// thread uses at that moment. The stack of a goroutine has a few KiB, and the handler writes
// below its end. There are three rules.
//
// 1. Threads that this library starts block every signal but those of their own faults.
//    The mask is set before Go's runtime starts. The runtime unblocks SIGCHLD, SIGPROF and
//    others in each of its threads (runtime.minitSignalMask), so:
//      a. The new thread blocks all signals and sends itself CONFINE, which stays pending.
//      b. The runtime sets its mask. That unblocks CONFINE, too.
//      c. The kernel delivers CONFINE before the thread executes another instruction.
//      d. Its handler, on the alternate stack, changes the mask that the kernel restores.
// 2. A thread of the program runs Go on a stack with STACK bytes below the code. The stack
//    grows in the thread's first call, during which all signals are blocked as in rule 1.
//    The linker's flag gcshrinkstackoff prevents the runtime from shrinking it. The
//    alternative, blocking signals in each call, costs two system calls.
// 3. The child of a fork runs no Go, and its signals have the actions that they would have
//    without this library.
//
// Functions of the C library and of runtime/cgo are replaced by the linker (--wrap) in this
// library only. tests/python/test_signals.py checks the masks and the stacks.
#define _GNU_SOURCE
#include "threads.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include "_cgo_export.h"
#include "call.h"

// The signal of rule 1: Go's runtime unblocks it, Linux never sends it, and programs do not use it.
#define CONFINE SIGSTKFLT

// The signals of faults. The kernel delivers them to the thread that caused the fault.
static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};

// The signals whose handlers Go's runtime replaces when the library is loaded.
static const int taken[] = {SIGSEGV, SIGBUS, SIGFPE, SIGPIPE, SIGURG};
#define TAKEN (int)(sizeof taken / sizeof *taken)
static struct sigaction before[TAKEN], gos[TAKEN];

#define LOCAL static __thread __attribute__((tls_model("initial-exec")))

// The effect of the next CONFINE in this thread.
LOCAL enum { PASS_ON, CONFINES, IGNORED } confine;

// known is set if this thread may run Go: rule 1 or 2 was applied.
LOCAL int known;

static pthread_mutex_t installing = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction others; // the program's action for CONFINE
static void (*release_thread)(void *);

int __real_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int __real_pthread_key_create(pthread_key_t *, void (*)(void *));
uintptr_t __real__cgo_wait_runtime_init_done(void);

static void quiet(sigset_t *set) {
  sigfillset(set);
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(set, faults[i]);
}

// on_confine handles CONFINE.
static void on_confine(int sig, siginfo_t *info, void *context) {
  int what = confine;
  confine = PASS_ON;
  if (what == CONFINES) {
    sigset_t set;
    quiet(&set);
    memcpy(&((ucontext_t *)context)->uc_sigmask, &set, 8); // the kernel's mask has 64 bits, that of C has more
  } else if (what == PASS_ON) { // another sender meant it for the program
    if (others.sa_flags & SA_SIGINFO) {
      others.sa_sigaction(sig, info, context);
    } else if (others.sa_handler == SIG_DFL) {
      signal(sig, SIG_DFL);
      raise(sig); // when this handler has returned
    } else if (others.sa_handler != SIG_IGN) {
      others.sa_handler(sig);
    }
  }
}

// send_confine sends CONFINE to this thread, which blocks it.
static void send_confine(void) {
  struct sigaction now, ours = {.sa_sigaction = on_confine, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};
  sigfillset(&ours.sa_mask);
  pthread_mutex_lock(&installing);
  if (sigaction(CONFINE, NULL, &now) == 0 && !((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_confine)) {
    others = now;
    sigaction(CONFINE, &ours, NULL);
  }
  pthread_mutex_unlock(&installing);
  confine = CONFINES;
  pthread_kill(pthread_self(), CONFINE);
}

typedef struct {
  void *(*run)(void *);
  void *arg;
} beginning;

static void *begin(void *v) {
  beginning b = *(beginning *)v;
  free(v);
  sigset_t set;
  quiet(&set);
  pthread_sigmask(SIG_SETMASK, &set, NULL);
  known = 1;
  send_confine();
  return b.run(b.arg);
}

// Every thread that code of this library starts, above all Go's runtime, begins with rule 1.
int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *attr, void *(*run)(void *), void *arg) {
  sigset_t all, old;
  beginning *b = malloc(sizeof *b);
  if (b == NULL) return EAGAIN;
  *b = (beginning){run, arg};
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old); // blocked from the first instruction of the new thread
  int err = __real_pthread_create(t, attr, begin, b);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (err != 0) free(b);
  return err;
}

// prepare applies rule 2. It is not inlined: its caller is on the path of every call.
static __attribute__((noinline)) void prepare(void) {
  sigset_t all, old;
  known = 1;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  send_confine();
  sf_deepen();
  if (confine == CONFINES) confine = IGNORED; // the runtime did not unblock CONFINE
  pthread_sigmask(SIG_SETMASK, &old, NULL);
}

// runtime/cgo calls this first in every call from C to Go.
uintptr_t __wrap__cgo_wait_runtime_init_done(void) {
  if (__builtin_expect(!known, 0)) prepare();
  return __real__cgo_wait_runtime_init_done();
}

static void thread_ends(void *g) {
  if (sf_forked) return;
  release_thread(g);
  known = 0; // the destructor of another key may still call Go
}

// runtime/cgo creates one key. Its destructor runs Go, also in a thread of a forked child.
int __wrap_pthread_key_create(pthread_key_t *key, void (*destructor)(void *)) {
  release_thread = destructor;
  return __real_pthread_key_create(key, destructor != NULL ? thread_ends : NULL);
}

void threads_fill_standard(void) {
  for (int fd = 0; fd <= 2; fd++) {
    if (fcntl(fd, F_GETFD) >= 0 || errno != EBADF) continue;
    int n = open("/dev/null", O_RDWR);
    if (n > 2) close(n); // another thread has opened the descriptor
  }
}

// This constructor has a priority, so it runs before the one that starts Go's runtime.
static __attribute__((constructor(101))) void remember(void) {
  threads_fill_standard();
  for (int i = 0; i < TAKEN; i++) sigaction(taken[i], NULL, &before[i]);
}

// The kernel's structure for rt_sigaction. It can change glibc's own signals.
typedef struct {
  void *handler;
  unsigned long flags;
  void *restorer;
  uint64_t mask;
} kernel_action;

// onstack makes the handler of one of glibc's own signals run on the alternate stack. glibc
// installs the handler of setuid when it creates the first thread; Go's runtime has read the handlers before that.
static void onstack(int sig) {
  kernel_action a;
  if (syscall(SYS_rt_sigaction, sig, NULL, &a, sizeof a.mask) != 0 || (a.flags & SA_ONSTACK) || a.handler == SIG_DFL || a.handler == SIG_IGN) return;
  a.flags |= SA_ONSTACK;
  syscall(SYS_rt_sigaction, sig, &a, NULL, sizeof a.mask);
}

void threads_init(void) {
  for (int i = 0; i < TAKEN; i++) sigaction(taken[i], NULL, &gos[i]);
  for (int i = 0; i < TAKEN; i++)
    if (taken[i] == SIGURG) sigaction(SIGURG, &before[i], NULL); // the runtime does not preempt by it: asyncpreemptoff
  onstack(32);
  onstack(33);
}

void threads_forked(void) {
  for (int i = 0; i < TAKEN; i++) {
    struct sigaction now;
    if (sigaction(taken[i], NULL, &now) == 0 && now.sa_sigaction == gos[i].sa_sigaction) sigaction(taken[i], &before[i], NULL);
  }
}
