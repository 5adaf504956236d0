// Signal handlers as libuv, libev and Python before 3.10 install them: without SA_ONSTACK.
// test_signals.py compiles this and loads it with ctypes.
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <unistd.h>

static int64_t handled[65];
static pid_t program[64]; // the threads in which a handler may run; the list ends with 0
static int64_t elsewhere; // the number of handlers that ran in another thread

// The handler uses more stack than a goroutine has.
static void on(int sig) {
  volatile char frame[48 << 10];
  memset((char *)frame, sig, sizeof frame);
  __atomic_add_fetch(&handled[sig], 1, __ATOMIC_RELAXED);
  pid_t me = (pid_t)syscall(SYS_gettid);
  for (int i = 0; i < 64 && program[i] != 0; i++)
    if (program[i] == me) return;
  __atomic_add_fetch(&elsewhere, 1, __ATOMIC_RELAXED);
}

int install(int sig) {
  struct sigaction a;
  memset(&a, 0, sizeof a);
  a.sa_handler = on;
  a.sa_flags = SA_RESTART;
  return sigaction(sig, &a, NULL);
}

void expect_in(int i, int tid) { program[i] = tid; }
int64_t count(int sig) { return __atomic_load_n(&handled[sig], __ATOMIC_RELAXED); }
int64_t count_elsewhere(void) { return __atomic_load_n(&elsewhere, __ATOMIC_RELAXED); }

static int storming[64], every, stop;

static void *storm_run(void *unused) {
  (void)unused;
  while (!__atomic_load_n(&stop, __ATOMIC_ACQUIRE)) {
    for (int i = 0; storming[i] != 0; i++) {
      kill(getpid(), storming[i]);                                       // to any thread
      for (int k = 0; program[k] != 0; k++) syscall(SYS_tgkill, getpid(), program[k], storming[i]); // to each of the program
    }
    usleep(every);
  }
  return NULL;
}

static pthread_t stormer;

// Sends the signals of a list that ends with 0, again and again, from a thread of its own.
int storm(const int *signals, int us) {
  sigset_t all, old;
  int i = 0;
  for (; i < 63 && signals[i] != 0; i++) storming[i] = signals[i];
  storming[i] = 0;
  every = us;
  stop = 0;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  int err = pthread_create(&stormer, NULL, storm_run, NULL);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  return err;
}

void calm(void) {
  __atomic_store_n(&stop, 1, __ATOMIC_RELEASE);
  pthread_join(stormer, NULL);
}

// Returns a descriptor that is readable when sig is pending.
int signal_descriptor(int sig) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, sig);
  return signalfd(-1, &set, SFD_CLOEXEC);
}
