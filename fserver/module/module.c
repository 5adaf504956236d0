//go:build fserver

// fserver_lib for Python: turns Python's arguments into the structures of abi.h,
// calls Go, and turns results and errors back. Uses the limited API only, so that
// one binary serves Python 3.8 and later.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "_cgo_export.h"
#include "cuda.h"
#include "docs.h"
#include "tensor.h"

// The longest list that is read.
#define MAX_ITEMS (1 << 20)

// The most descriptors that are closed in a child.
#define MAX_FILES (1 << 14)

static PyObject *error_base, *error_timeout, *error_connection, *error_value, *error_type;
int sf_forked;
int32_t sf_dropped;

// What a child must not keep: as long as it has them, a peer does not notice that this
// process has ended. They are found before the fork: afterwards only system calls are safe.
static sf_file files[MAX_FILES];
static int files_len;
static pthread_mutex_t forking = PTHREAD_MUTEX_INITIALIZER;

static void before_fork(void) {
  pthread_mutex_lock(&forking);
  files_len = sf_forked ? 0 : sf_files(files, MAX_FILES);
}

static void parent_after_fork(void) { pthread_mutex_unlock(&forking); }

static void after_fork(void) {
  int before = errno;
  sf_forked = 1;
  for (int i = 0; i < files_len; i++) {
    struct stat st; // another thread may have closed it, and opened something else, just before the fork
    if (fstat(files[i].fd, &st) == 0 && st.st_dev == files[i].device && st.st_ino == files[i].num) close(files[i].fd);
  }
  pthread_mutex_unlock(&forking);
  errno = before;
}

// Raises what Go says.
PyObject *sf_raise(sf_error *e) {
  PyObject *kind = error_base;
  if (e->kind == SF_TIMEOUT) kind = error_timeout;
  if (e->kind == SF_CONNECTION) kind = error_connection;
  if (e->kind == SF_VALUE) kind = error_value;
  PyErr_SetString(kind, e->text != NULL ? e->text : "unknown error");
  free(e->text);
  e->text = NULL;
  return NULL;
}

// Drops what Go needs no more.
static void drain(void) {
  if (__atomic_load_n(&sf_dropped, __ATOMIC_RELAXED) == 0) return; // Go is not called for nothing
  void *objects[64];
  int n;
  do {
    n = sf_drain(objects, 64);
    for (int i = 0; i < n; i++) Py_DECREF((PyObject *)objects[i]);
  } while (n == 64);
}

// Every call begins here. Go does not survive a fork.
int sf_enter(void) {
  if (sf_forked) {
    PyErr_SetString(error_base,
                    "fserver_lib was imported before this process was forked, which its threads do not survive: "
                    "use the start method 'spawn', or import it in the child only");
    return -1;
  }
  drain();
  return 0;
}

int sf_int64_arg(PyObject *o, const char *what, int64_t *out) {
  PyObject *n = PyNumber_Index(o);
  if (n == NULL) {
    if (!sf_not_ours()) PyErr_Format(error_type, "%s is %R, want an int", what, o);
    return -1;
  }
  long long v = PyLong_AsLongLong(n);
  Py_DECREF(n);
  if (v == -1 && PyErr_Occurred()) {
    PyErr_Format(error_value, "%s is %R, which is too large", what, o);
    return -1;
  }
  *out = v;
  return 0;
}

static int uint64_arg(PyObject *o, const char *what, Py_ssize_t i, uint64_t *out) {
  char name[64];
  PyObject *n = PyNumber_Index(o);
  if (n == NULL) {
    if (sf_not_ours()) return -1;
    PyErr_Format(error_type, "%s is %R, want an int from 0 to 2**64-1", sf_name(name, sizeof name, what, i), o);
    return -1;
  }
  unsigned long long v = PyLong_AsUnsignedLongLong(n);
  Py_DECREF(n);
  if (v == (unsigned long long)-1 && PyErr_Occurred()) {
    PyErr_Format(error_value, "%s is %R, want an int from 0 to 2**64-1", sf_name(name, sizeof name, what, i), o);
    return -1;
  }
  *out = v;
  return 0;
}

// Reads arguments that were all given by position, in the order of names; those left
// out stay NULL. Returns 0 when PyArg_ParseTupleAndKeywords must do it.
static int by_position(PyObject *args, PyObject *kw, Py_ssize_t least, Py_ssize_t most, PyObject **out) {
  Py_ssize_t n = PyTuple_Size(args);
  if (kw != NULL || n < least || n > most) return 0;
  for (Py_ssize_t i = 0; i < n; i++) out[i] = PyTuple_GetItem(args, i);
  return 1;
}

// A bool; NULL leaves *out as it is.
static int bool_arg(PyObject *o, int *out) {
  int yes = o != NULL ? PyObject_IsTrue(o) : *out;
  if (yes >= 0) *out = yes;
  return yes < 0 ? -1 : 0;
}

// A time limit in milliseconds; None is -1.
static int timeout_arg(PyObject *o, int64_t *out) {
  *out = -1;
  if (o == NULL || o == Py_None) return 0;
  if (sf_int64_arg(o, "timeout_ms", out) < 0) return -1;
  if (*out < 0 || *out > (int64_t)1 << 40) {
    PyErr_Format(error_value, "timeout_ms is %R, want 0 or more milliseconds, or None for no limit", o);
    return -1;
  }
  return 0;
}

// The items of a sequence, as a tuple or list whose items can be borrowed.
static PyObject *sequence(PyObject *o, const char *what, Py_ssize_t *n) {
  if (PyUnicode_Check(o) || PyBytes_Check(o) || !PySequence_Check(o)) {
    PyErr_Format(error_type, "%s is %R, want a list or another sequence", what, o);
    return NULL;
  }
  Py_ssize_t size = PySequence_Size(o); // of range objects, too, that no memory could hold
  if (size > MAX_ITEMS) {
    PyErr_Format(error_value, "%s has %zd items, want at most %d", what, size, MAX_ITEMS);
    return NULL;
  }
  PyObject *t = size >= 0 ? PySequence_Tuple(o) : NULL;
  if (t == NULL) {
    if (!sf_not_ours()) PyErr_Format(error_type, "%s cannot be read as a sequence", what);
    return NULL;
  }
  *n = PyTuple_Size(t);
  if (*n > MAX_ITEMS) { // its length was another one
    PyErr_Format(error_value, "%s has %zd items, want at most %d", what, *n, MAX_ITEMS);
    Py_CLEAR(t);
  }
  return t;
}

// Fills n tensors of list o, and their keys when keys is not NULL. Returns a
// malloc'ed array, or NULL. n is -1 or the number wanted, and receives the number.
static sf_tensor *tensor_list(PyObject *o, const char *what, PyObject *keys, const char *keys_what, int writable,
                              Py_ssize_t *n) {
  sf_tensor *ts = NULL;
  PyObject *items = sequence(o, what, n), *key_items = NULL;
  Py_ssize_t done = 0, nkeys;
  if (items == NULL) return NULL;
  if (keys != NULL) {
    key_items = sequence(keys, keys_what, &nkeys);
    if (key_items == NULL) goto fail;
    if (nkeys != *n) {
      PyErr_Format(error_value, "%zd %s but %zd %s, want as many", *n, what, nkeys, keys_what);
      goto fail;
    }
  }
  ts = calloc((size_t)*n + 1, sizeof *ts);
  if (ts == NULL) {
    PyErr_NoMemory();
    goto fail;
  }
  for (; done < *n; done++) {
    if (tensor_in(PyTuple_GetItem(items, done), &ts[done], what, done, writable) < 0) goto fail;
    if (keys != NULL && uint64_arg(PyTuple_GetItem(key_items, done), keys_what, done, &ts[done].key) < 0) {
      done++;
      goto fail;
    }
  }
  Py_DECREF(items);
  Py_XDECREF(key_items);
  return ts;
fail:
  for (Py_ssize_t i = 0; i < done; i++) Py_XDECREF((PyObject *)ts[i].owner);
  free(ts);
  Py_XDECREF(items);
  Py_XDECREF(key_items);
  return NULL;
}

static void drop_list(sf_tensor *ts, Py_ssize_t n) {
  for (Py_ssize_t i = 0; ts != NULL && i < n; i++) Py_XDECREF((PyObject *)ts[i].owner);
  free(ts);
}

// Waits for the job that Go has begun, looking after signals.
static PyObject *wait_job(void) {
  for (;;) {
    sf_error e = {0, NULL};
    int rc;
    Py_BEGIN_ALLOW_THREADS rc = sf_job(SLICE_MS, &e);
    Py_END_ALLOW_THREADS if (rc == SF_FAILED) return sf_raise(&e);
    if (rc == SF_DONE) Py_RETURN_NONE;
    if (PyErr_CheckSignals() < 0) {
      Py_BEGIN_ALLOW_THREADS sf_cancel();
      Py_END_ALLOW_THREADS return NULL;
    }
  }
}

static PyObject *py_init(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"timeout_ms", NULL};
  PyObject *timeout = NULL;
  int64_t ms;
  sf_error e = {0, NULL};
  (void)self;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|$O:init", names, &timeout)) return NULL;
  if (sf_enter() < 0 || timeout_arg(timeout, &ms) < 0) return NULL;
  if (sf_init(ms, &e) != SF_DONE) return sf_raise(&e);
  return wait_job();
}

static PyObject *py_stop(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"timeout_ms", NULL};
  PyObject *timeout = NULL;
  int64_t ms;
  sf_error e = {0, NULL};
  (void)self;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|$O:stop", names, &timeout)) return NULL;
  if (sf_enter() < 0 || timeout_arg(timeout, &ms) < 0) return NULL;
  int rc = sf_stop(ms, &e);
  if (rc == SF_PENDING) Py_RETURN_NONE;
  if (rc != SF_DONE) return sf_raise(&e);
  return wait_job();
}

static PyObject *py_barrier(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"include_server", "include_client", "instance_barrier", "timeout_ms", NULL};
  int servers, workers, instances = 1;
  PyObject *timeout = NULL;
  int64_t ms;
  sf_error e = {0, NULL};
  (void)self;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "pp|p$O:barrier", names, &servers, &workers, &instances, &timeout)) return NULL;
  if (sf_enter() < 0 || timeout_arg(timeout, &ms) < 0) return NULL;
  if (sf_barrier(servers, workers, instances, ms, &e) != SF_DONE) return sf_raise(&e);
  return wait_job();
}

// Values of so many bytes take long enough to copy that other threads are to run meanwhile.
#define LONG_COPY (256 << 10)

// Tells whether handing over tensors may take long: Python's lock is then released.
static int takes_long(const sf_tensor *ts, Py_ssize_t n) {
  int64_t bytes = 0;
  for (Py_ssize_t i = 0; i < n; i++) bytes += ts[i].nbytes;
  return bytes >= LONG_COPY || tensor_on_gpu(ts, n);
}

static PyObject *py_push_pull(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"push_tensors", "push_keys", "pull_tensors", "pull_keys", "need_event", NULL};
  PyObject *a[5] = {NULL}; // the arguments
  int need_event = 1;
  Py_ssize_t n = 0, m = 0;
  sf_error e = {0, NULL};
  (void)self;
  if (!by_position(args, kw, 4, 5, a) && !PyArg_ParseTupleAndKeywords(args, kw, "OOOO|O:push_pull", names, &a[0], &a[1], &a[2], &a[3], &a[4]))
    return NULL;
  if (bool_arg(a[4], &need_event) < 0 || sf_enter() < 0) return NULL;
  sf_tensor *ps = tensor_list(a[0], "push_tensors", a[1], "push_keys", 0, &n);
  if (ps == NULL) return NULL;
  sf_tensor *qs = tensor_list(a[2], "pull_tensors", a[3], "pull_keys", 1, &m);
  if (qs == NULL) {
    drop_list(ps, n);
    return NULL;
  }
  uint64_t stream = SF_COMPLETE; // of a GPU: the pull tensors, too, may still be in use there
  if (need_event && (tensor_streams(ps, n, &stream) < 0 || (stream == SF_COMPLETE && tensor_streams(qs, m, &stream) < 0))) {
    drop_list(ps, n);
    drop_list(qs, m);
    return NULL;
  }
  int64_t h; // in the call Go uses ps, qs and the memory of their owners, which it has taken over
  if (takes_long(ps, n) || tensor_on_gpu(qs, m)) {
    Py_BEGIN_ALLOW_THREADS h = sf_push_pull(ps, (int)n, qs, (int)m, stream, &e);
    Py_END_ALLOW_THREADS
  } else {
    h = sf_push_pull(ps, (int)n, qs, (int)m, stream, &e);
  }
  free(ps);
  free(qs);
  if (h < 0) return sf_raise(&e);
  return PyLong_FromLongLong(h);
}

static PyObject *py_wait(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"handler", "timeout_ms", NULL};
  PyObject *a[2] = {NULL}; // the arguments
  int64_t h, ms = 10000;
  (void)self;
  if (!by_position(args, kw, 1, 2, a) && !PyArg_ParseTupleAndKeywords(args, kw, "O|O:wait", names, &a[0], &a[1])) return NULL;
  if (sf_enter() < 0 || sf_int64_arg(a[0], "handler", &h) < 0 || (a[1] != NULL && timeout_arg(a[1], &ms) < 0)) return NULL;
  if (ms < 0) ms = (int64_t)1 << 40;
  for (;;) {
    sf_error e = {0, NULL};
    int rc;
    Py_BEGIN_ALLOW_THREADS rc = sf_wait(h, ms, SLICE_MS, &e);
    Py_END_ALLOW_THREADS if (rc == SF_FAILED) return sf_raise(&e);
    if (rc == SF_DONE) break;
    if (PyErr_CheckSignals() < 0) return NULL;
  }
  drain();
  Py_RETURN_NONE;
}

static PyObject *py_get_all_handlers(PyObject *self, PyObject *arg) {
  int64_t h;
  int n = 0;
  sf_error e = {0, NULL};
  (void)self;
  if (sf_enter() < 0 || sf_int64_arg(arg, "handler", &h) < 0) return NULL;
  if (sf_handlers(h, &n, &e) != SF_DONE) return sf_raise(&e);
  PyObject *list = PyList_New(n);
  for (int i = 0; list != NULL && i < n; i++) {
    PyObject *x = PyLong_FromLongLong(h + i);
    if (x == NULL || PyList_SetItem(list, i, x) < 0) {
      Py_DECREF(list);
      return NULL;
    }
  }
  return list;
}

static PyObject *py_fetch_trace(PyObject *self, PyObject *arg) {
  int64_t h;
  uint64_t stamps[8];
  sf_error e = {0, NULL};
  (void)self;
  if (sf_enter() < 0 || sf_int64_arg(arg, "handler", &h) < 0) return NULL;
  if (sf_trace(h, stamps, &e) != SF_DONE) return sf_raise(&e);
  PyObject *list = PyList_New(8);
  for (int i = 0; list != NULL && i < 8; i++) {
    PyObject *x = PyLong_FromUnsignedLongLong(stamps[i]);
    if (x == NULL || PyList_SetItem(list, i, x) < 0) {
      Py_DECREF(list);
      return NULL;
    }
  }
  return list;
}

static PyObject *py_get_nanosecond(PyObject *self, PyObject *noargs) {
  (void)self;
  (void)noargs;
  if (sf_forked) return sf_enter(), NULL;
  return PyLong_FromUnsignedLongLong(sf_now());
}

// The batch as (handler, tensors, keys). *used is the number of its tensors that are
// given back by others: all on success, on failure those that *made, which may be NULL,
// or an exception holds.
static PyObject *batch_out(sf_batch *b, int *used, PyObject **made) {
  PyObject *ts = PyList_New(b->n), *keys = PyList_New(b->n), *id = PyLong_FromUnsignedLongLong(b->id);
  int ok = ts != NULL && keys != NULL && id != NULL;
  *used = 0;
  for (int i = 0; ok && i < b->n; i++) {
    int kept = 0;
    PyObject *key = PyLong_FromUnsignedLongLong(b->tensors[i].key);
    PyObject *t = key != NULL ? tensor_out(&b->tensors[i], b->lease, &kept) : NULL;
    ok = t != NULL;
    *used += ok || kept;
    if (ok) {
      PyList_SetItem(keys, i, key);
      PyList_SetItem(ts, i, t);
    } else {
      Py_XDECREF(key);
    }
  }
  PyObject *tuple = ok ? PyTuple_Pack(3, id, ts, keys) : NULL;
  Py_XDECREF(id);
  Py_XDECREF(keys);
  if (tuple != NULL)
    Py_DECREF(ts);
  else
    *made = ts;
  return tuple;
}

PyObject *sf_batches_out(sf_batch *batches, int n, const void *room) {
  PyObject *list = PyList_New(n), *made = NULL;
  int i = 0, used = 0; // batches in list, and what the one after them has lent
  for (; list != NULL && i < n; i++) {
    PyObject *b = batch_out(&batches[i], &used, &made);
    if (b == NULL) break;
    PyList_SetItem(list, i, b);
  }
  if (i < n) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace); // from those who free
    sf_put_back(batches, n);
    for (; i < n; i++, used = 0)
      for (int k = used; k < batches[i].n; k++) sf_release(batches[i].lease, SF_COMPLETE);
    Py_XDECREF(made);
    Py_CLEAR(list);
    PyErr_Restore(type, value, trace);
  }
  if (batches != room) free(batches);
  return list;
}

static PyObject *py_get_batch(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"timeout_ms", NULL};
  PyObject *timeout = NULL;
  int64_t ms;
  (void)self;
  if (!by_position(args, kw, 0, 0, NULL) && !PyArg_ParseTupleAndKeywords(args, kw, "|$O:get_batch", names, &timeout)) return NULL;
  if (sf_enter() < 0 || timeout_arg(timeout, &ms) < 0) return NULL;
  uint64_t start = ms >= 0 ? sf_now() : 0;
  union { // what most batches fit in
    sf_batch first;
    char all[2048];
  } room;
  sf_batch *batches = NULL;
  int n = 0;
  for (;;) {
    sf_error e = {0, NULL};
    int rc;
    int64_t slice = SLICE_MS;
    if (ms >= 0) {
      int64_t left = ms - (int64_t)((sf_now() - start) / 1000000);
      if (left < slice) slice = left > 0 ? left : 0;
    }
    Py_BEGIN_ALLOW_THREADS rc = sf_get_batch(slice, &room, sizeof room, &batches, &n, &e);
    Py_END_ALLOW_THREADS if (rc == SF_FAILED) return sf_raise(&e);
    if (rc == SF_DONE) break;
    if (PyErr_CheckSignals() < 0) return NULL;
    drain(); // answers that have left since
    if (ms >= 0 && sf_now() - start >= (uint64_t)ms * 1000000) {
      sf_batch_timeout(ms, &e);
      return sf_raise(&e);
    }
  }
  return sf_batches_out(batches, n, &room);
}

// Answers a batch. Takes over the owners of ts, and keeps no pointer to ts.
static int respond(uint64_t id, sf_tensor *ts, Py_ssize_t n, uint64_t stream, sf_error *e) {
  int rc;
  if (!takes_long(ts, n)) return sf_respond(id, ts, (int)n, stream, e);
  Py_BEGIN_ALLOW_THREADS rc = sf_respond(id, ts, (int)n, stream, e);
  Py_END_ALLOW_THREADS return rc;
}

static PyObject *py_respond(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"tensors", "handler", "need_event", NULL};
  PyObject *a[3] = {NULL}; // the arguments
  int need_event = 0;
  uint64_t id;
  Py_ssize_t n = 0;
  sf_error e = {0, NULL};
  (void)self;
  if (!by_position(args, kw, 2, 3, a) && !PyArg_ParseTupleAndKeywords(args, kw, "OO|O:respond", names, &a[0], &a[1], &a[2])) return NULL;
  if (bool_arg(a[2], &need_event) < 0 || sf_enter() < 0 || uint64_arg(a[1], "handler", -1, &id) < 0) return NULL;
  sf_tensor *ts = tensor_list(a[0], "tensors", NULL, NULL, 0, &n);
  if (ts == NULL) return NULL;
  uint64_t stream = SF_COMPLETE;
  if (need_event && tensor_streams(ts, n, &stream) < 0) {
    drop_list(ts, n);
    return NULL;
  }
  int rc = respond(id, ts, n, stream, &e);
  free(ts);
  if (rc != SF_DONE) return sf_raise(&e);
  Py_RETURN_NONE;
}

static PyObject *py_respond_vec(PyObject *self, PyObject *args) {
  PyObject *buffer, *tensors, *handlers, *items = NULL, *result = NULL;
  sf_tensor buf, *ts = NULL;
  sf_error e = {0, NULL};
  Py_ssize_t n = 0, m = 0;
  (void)self;
  if (!PyArg_ParseTuple(args, "OOO:respond_vec", &buffer, &tensors, &handlers)) return NULL;
  if (sf_enter() < 0 || tensor_in(buffer, &buf, "ret_buffer", -1, 0) < 0) return NULL;
  ts = tensor_list(tensors, "tensors_vec", NULL, NULL, 0, &n);
  if (ts != NULL) items = sequence(handlers, "handler_vec", &m);
  if (items == NULL) goto out;
  if (n != m) {
    PyErr_Format(error_value, "%zd tensors_vec but %zd handler_vec, want as many", n, m);
    goto out;
  }
  if (buf.ndim == 0) {
    PyErr_SetString(error_value, "ret_buffer has no dimensions, want rows to take from");
    goto out;
  }
  for (Py_ssize_t i = 0; i < n; i++) {
    if (ts[i].ndim == 0) {
      PyErr_Format(error_value, "tensors_vec[%zd] has no dimensions, want as many rows as the answer is to have", i);
      goto out;
    }
    if (ts[i].shape[0] > buf.shape[0]) {
      PyErr_Format(error_value, "tensors_vec[%zd] has %lld rows, ret_buffer only %lld", i, (long long)ts[i].shape[0],
                   (long long)buf.shape[0]);
      goto out;
    }
    if (uint64_arg(PyTuple_GetItem(items, i), "handler_vec", i, &ts[i].key) < 0) goto out; // its key is free
  }
  uint64_t stream = SF_COMPLETE;
  if (tensor_streams(&buf, 1, &stream) < 0) goto out;
  if (sf_check_respond(ts, (int)n, &e) != SF_DONE) {
    sf_raise(&e);
    goto out;
  }
  for (Py_ssize_t i = 0; i < n; i++) {
    sf_tensor part = buf; // always from row 0, as in the original
    part.shape[0] = ts[i].shape[0];
    part.nbytes = buf.shape[0] > 0 ? buf.nbytes / buf.shape[0] * part.shape[0] : 0;
    Py_INCREF((PyObject *)part.owner);
    sf_error failed = {0, NULL};
    if (respond(ts[i].key, &part, 1, stream, &failed) == SF_DONE) {
      if (part.nbytes > 0) stream = SF_COMPLETE; // answers leave in order, and all are parts of one buffer
    } else if (e.kind == 0) {
      e = failed; // and the others get theirs
    } else {
      free(failed.text);
    }
  }
  if (e.kind != 0) {
    sf_raise(&e);
    goto out;
  }
  Py_INCREF(Py_None);
  result = Py_None;
out:
  Py_DECREF((PyObject *)buf.owner);
  drop_list(ts, n);
  Py_XDECREF(items);
  return result;
}

static PyObject *py_register_recv_buffer(PyObject *self, PyObject *args) {
  PyObject *tensor, *ranks, *keys, *rank_items = NULL, *key_items = NULL, *result = NULL;
  Py_ssize_t n = 0, m = 0;
  sf_tensor t;
  int64_t *rs = NULL;
  uint64_t *ks = NULL;
  sf_error e = {0, NULL};
  (void)self;
  if (!PyArg_ParseTuple(args, "OOO:register_recv_buffer", &tensor, &ranks, &keys)) return NULL;
  if (sf_enter() < 0) return NULL;
  rank_items = sequence(ranks, "worker_ranks", &n);
  if (rank_items != NULL) key_items = sequence(keys, "push_keys", &m);
  if (key_items == NULL) goto out;
  if (n != m || n == 0) {
    PyErr_Format(error_value, "%zd worker_ranks and %zd push_keys, want as many, and at least one", n, m);
    goto out;
  }
  rs = calloc((size_t)n, sizeof *rs);
  ks = calloc((size_t)n, sizeof *ks);
  if (rs == NULL || ks == NULL) {
    PyErr_NoMemory();
    goto out;
  }
  for (Py_ssize_t i = 0; i < n; i++)
    if (sf_int64_arg(PyTuple_GetItem(rank_items, i), "worker_ranks", &rs[i]) < 0 ||
        uint64_arg(PyTuple_GetItem(key_items, i), "push_keys", i, &ks[i]) < 0)
      goto out;
  if (tensor_in(tensor, &t, "tensor", -1, 1) < 0) goto out;
  if (sf_register(&t, rs, ks, (int)n, &e) != SF_DONE) {
    sf_raise(&e);
    goto out;
  }
  Py_INCREF(Py_None);
  result = Py_None;
out:
  free(rs);
  free(ks);
  Py_XDECREF(rank_items);
  Py_XDECREF(key_items);
  return result;
}

static PyObject *py_exit(PyObject *self, PyObject *noargs) {
  (void)self;
  (void)noargs;
  if (!sf_forked) {
    Py_BEGIN_ALLOW_THREADS sf_exit();
    Py_END_ALLOW_THREADS
  }
  Py_RETURN_NONE;
}

#define KEYWORDS(f) (PyCFunction)(void (*)(void))(f), METH_VARARGS | METH_KEYWORDS

static PyMethodDef methods[] = {
    {"init", KEYWORDS(py_init), DOC_INIT},
    {"stop", KEYWORDS(py_stop), DOC_STOP},
    {"barrier", KEYWORDS(py_barrier), DOC_BARRIER},
    {"push_pull", KEYWORDS(py_push_pull), DOC_PUSH_PULL},
    {"wait", KEYWORDS(py_wait), DOC_WAIT},
    {"get_all_handlers", py_get_all_handlers, METH_O, DOC_GET_ALL_HANDLERS},
    {"fetch_trace", py_fetch_trace, METH_O, DOC_FETCH_TRACE},
    {"get_nanosecond", py_get_nanosecond, METH_NOARGS, DOC_GET_NANOSECOND},
    {"get_batch", KEYWORDS(py_get_batch), DOC_GET_BATCH},
    {"respond", KEYWORDS(py_respond), DOC_RESPOND},
    {"respond_vec", py_respond_vec, METH_VARARGS, DOC_RESPOND_VEC},
    {"register_recv_buffer", py_register_recv_buffer, METH_VARARGS, DOC_REGISTER_RECV_BUFFER},
    {"map_pinned_tensor", sf_py_map_pinned_tensor, METH_VARARGS, DOC_MAP_PINNED_TENSOR},
    {"write_flag", sf_py_write_flag, METH_VARARGS, DOC_WRITE_FLAG},
    {"wait_flag", sf_py_wait_flag, METH_VARARGS, DOC_WAIT_FLAG},
    {"seq_add_one", sf_py_seq_add_one, METH_VARARGS, DOC_SEQ_ADD_ONE},
    {"_exit", py_exit, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fserver_lib", DOC_MODULE, -1, methods, NULL, NULL, NULL, NULL};

// Makes an exception class with the base class of ours and, if not NULL, one of
// Python's own, and adds it to the module.
static PyObject *exception(PyObject *module, const char *name, const char *doc, PyObject *python) {
  char full[64] = "fserver_lib.";
  PyObject *bases = python != NULL ? PyTuple_Pack(2, error_base, python) : PyTuple_Pack(1, PyExc_RuntimeError);
  if (bases == NULL) return NULL;
  strncat(full, name, sizeof full - strlen(full) - 1);
  PyObject *class = PyErr_NewExceptionWithDoc(full, doc, bases, NULL);
  Py_DECREF(bases);
  if (class == NULL) return NULL;
  Py_INCREF(class); // the module takes one
  if (PyModule_AddObject(module, name, class) < 0) {
    Py_DECREF(class);
    Py_CLEAR(class);
  }
  return class;
}

// Leaves the cluster when the interpreter ends.
static int at_exit(PyObject *module) {
  PyObject *atexit = PyImport_ImportModule("atexit"), *f = PyObject_GetAttrString(module, "_exit"), *r = NULL;
  if (atexit != NULL && f != NULL) r = PyObject_CallMethod(atexit, "register", "O", f);
  Py_XDECREF(atexit);
  Py_XDECREF(f);
  Py_XDECREF(r);
  return r != NULL ? 0 : -1;
}

PyMODINIT_FUNC PyInit_fserver_lib(void) {
  PyObject *module = PyModule_Create(&definition);
  if (module == NULL) return NULL;
  if ((error_base = exception(module, "Error", DOC_ERROR, NULL)) == NULL ||
      (error_timeout = exception(module, "TimeoutError", DOC_TIMEOUT_ERROR, PyExc_TimeoutError)) == NULL ||
      (error_connection = exception(module, "ConnectionError", DOC_CONNECTION_ERROR, PyExc_ConnectionError)) == NULL ||
      (error_value = exception(module, "ValueError", DOC_VALUE_ERROR, PyExc_ValueError)) == NULL ||
      (error_type = exception(module, "TypeError", DOC_TYPE_ERROR, PyExc_TypeError)) == NULL ||
      tensor_init(module, error_value, error_type) < 0 || cuda_init(module, error_value) < 0 || at_exit(module) < 0) {
    Py_DECREF(module);
    return NULL;
  }
  pthread_atfork(before_fork, parent_after_fork, after_fork);
  return module;
}
