//go:build fserver

// fserver_lib for Python: converts Python's arguments to the structures of abi.h, calls Go, and converts results and
// errors back. It uses the limited API only, so that one binary serves Python 3.8 and later.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>

#include "_cgo_export.h"
#include "answer.h"
#include "batch.h"
#include "call.h"
#include "collective.h"
#include "cuda.h"
#include "docs.h"
#include "prepared.h"
#include "shared.h"
#include "request.h"
#include "streams.h"
#include "tensor.h"
#include "threads.h"
#include "window.h"

// Waits for the job that Go has begun, and handles signals while it waits.
static PyObject *wait_job(void) {
  for (;;) {
    sf_error e = {0, NULL};
    int rc;
    Py_BEGIN_ALLOW_THREADS rc = sf_job(SLICE_MS, &e);
    Py_END_ALLOW_THREADS if (rc != SF_PENDING) sf_drain_dropped(); // stop() releases memory, and there may be no later call
    if (rc == SF_FAILED) return sf_raise(&e);
    if (rc == SF_DONE) Py_RETURN_NONE;
    if (PyErr_CheckSignals() < 0) {
      Py_BEGIN_ALLOW_THREADS sf_cancel();
      Py_END_ALLOW_THREADS return NULL;
    }
  }
}

// Returns a borrowed reference to a module. Returns NULL without an exception if the program has not imported it, and NULL with one if the
// lookup failed.
static PyObject *imported(const char *name) { return sf_item(PyImport_GetModuleDict(), name); }

// Registers _exit_child in a child process of multiprocessing. Such a child ends with os._exit and does not call the functions of
// atexit, but it calls these finalizers. The import is too early for it: with some start methods the child imports the main
// module, and afterwards clears its list of finalizers.
static int watch_end_of_child(PyObject *module) {
  static int done;
  if (done) return 0;
  PyObject *util = imported("multiprocessing.util"), *process = util != NULL ? imported("multiprocessing.process") : NULL;
  if (process == NULL) return PyErr_Occurred() != NULL ? -1 : 0;
  PyObject *parent = PyObject_CallMethod(process, "parent_process", NULL);
  if (parent == NULL || parent == Py_None) { // the main process
    Py_XDECREF(parent);
    return parent != NULL ? 0 : -1;
  }
  Py_DECREF(parent);
  PyObject *f = PyObject_GetAttrString(module, "_exit_child"), *r = NULL;
  if (f != NULL) r = PyObject_CallMethod(util, "Finalize", "OO()Oi", Py_None, f, Py_None, -100); // after other finalizers, and the child's children
  Py_XDECREF(f);
  Py_XDECREF(r);
  done = r != NULL;
  return done ? 0 : -1;
}

// Accepts the path of a backend's library only if it is empty. Programs written for other builds of StepMesh pass init("") or
// init(path).
static int no_path(PyObject *path) {
  if (path == NULL || (PyUnicode_Check(path) && PyUnicode_GetLength(path) == 0)) return 0;
  if (!PyUnicode_Check(path))
    PyErr_Format(sf_error_type, "init: path is %R, want a str", path);
  else
    PyErr_Format(sf_error_value,
                 "init: path is %R, but this library loads no backends from files, so the backend of that file is missing: "
                 "call init() and set STEPMESH_BAKCEND=CPU or GPU",
                 path);
  return -1;
}

static PyObject *py_init(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"", "timeout_ms", NULL};
  PyObject *path = NULL, *timeout = NULL;
  int64_t ms;
  sf_error e = {0, NULL};
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|O$O:init", names, &path, &timeout)) return NULL;
  if (sf_enter() < 0 || no_path(path) < 0 || sf_timeout_arg(timeout, &ms) < 0 || watch_end_of_child(self) < 0) return NULL;
  threads_fill_standard(); // the program may have closed these descriptors since the import
  if (sf_init(ms, &e) != SF_DONE) return sf_raise(&e);
  return wait_job();
}

// Reports whether this is Python's only thread, so that no other thread can call get_batch.
static int only_thread(void) {
  PyObject *f = PySys_GetObject("_current_frames"); // borrowed
  PyObject *frames = f != NULL ? PyObject_CallObject(f, NULL) : NULL;
  Py_ssize_t n = frames != NULL ? PyDict_Size(frames) : 0;
  Py_XDECREF(frames);
  if (n < 0 || frames == NULL) PyErr_Clear();
  return n == 1;
}

static PyObject *py_stop(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"timeout_ms", NULL};
  PyObject *timeout = NULL;
  int64_t ms;
  sf_error e = {0, NULL};
  (void)self;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|$O:stop", names, &timeout)) return NULL;
  if (sf_enter() < 0 || sf_timeout_arg(timeout, &ms) < 0) return NULL;
  int rc = sf_stop(ms, sf_thread(), only_thread(), &e);
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
  if (sf_enter() < 0 || sf_timeout_arg(timeout, &ms) < 0) return NULL;
  if (sf_barrier(servers, workers, instances, ms, &e) != SF_DONE) return sf_raise(&e);
  return wait_job();
}

static PyObject *py_push_pull(PyObject *self, PyObject *args, PyObject *kw) {
  request r;
  uint64_t stream = SF_COMPLETE;
  sf_error e = {0, NULL};
  (void)self;
  if (request_in(args, kw, "OOOO|O$O:push_pull", &r) < 0) return NULL;
  int32_t device = request_device(&r);
  if (device >= 0 && tensor_stream(device, &stream) < 0) {
    request_drop(&r);
    return NULL;
  }
  int64_t h = SF_CONNECTS; // Go takes ownership of the owners, and reads the tensors only during the call
  if (!request_long(&r)) h = sf_push_pull(r.push, (int)r.npush, r.pull, (int)r.npull, stream, r.servers, (int)r.nservers, 1, &e);
  if (h == SF_CONNECTS) {
    Py_BEGIN_ALLOW_THREADS h = sf_push_pull(r.push, (int)r.npush, r.pull, (int)r.npull, stream, r.servers, (int)r.nservers, 0, &e);
    Py_END_ALLOW_THREADS
  }
  request_free(&r);
  if (h < 0) return sf_raise(&e);
  PyObject *handler = PyLong_FromLongLong(h);
  if (handler == NULL) { // the program cannot wait for a request without its number: cancel it
    Py_BEGIN_ALLOW_THREADS sf_wait(h, 0, SLICE_MS, &e);
    Py_END_ALLOW_THREADS free(e.text);
  }
  return handler;
}

static PyObject *py_wait(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"handler", "timeout_ms", NULL};
  PyObject *a[2] = {NULL}; // the arguments
  int64_t h, ms = 15000;
  (void)self;
  if (!sf_by_position(args, kw, 1, 2, a) && !PyArg_ParseTupleAndKeywords(args, kw, "O|O:wait", names, &a[0], &a[1])) return NULL;
  if (operation_check(a[0])) return operation_wait_for(a[0], a[1]);
  if (sf_enter() < 0 || sf_int64_arg(a[0], "handler", &h) < 0 || (a[1] != NULL && sf_timeout_arg(a[1], &ms) < 0)) return NULL;
  if (ms < 0) ms = NO_LIMIT_MS;
  for (;;) {
    sf_error e = {0, NULL};
    int rc;
    Py_BEGIN_ALLOW_THREADS rc = sf_wait(h, ms, SLICE_MS, &e);
    Py_END_ALLOW_THREADS if (rc == SF_FAILED) return sf_raise(&e);
    if (rc == SF_DONE) break;
    if (PyErr_CheckSignals() < 0) return NULL;
  }
  sf_drain_dropped();
  Py_RETURN_NONE;
}

static PyObject *py_poll(PyObject *self, PyObject *arg) {
  int64_t h;
  sf_error e = {0, NULL};
  (void)self;
  if (sf_enter() < 0 || sf_int64_arg(arg, "handler", &h) < 0) return NULL;
  int rc = sf_poll(h, &e);
  if (rc == SF_FAILED) return sf_raise(&e);
  sf_drain_dropped();
  return PyBool_FromLong(rc == SF_DONE);
}

static PyObject *py_fileno(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"any", NULL};
  PyObject *any_arg = NULL;
  int any = 0;
  sf_error e = {0, NULL};
  (void)self;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|$O:fileno", names, &any_arg)) return NULL;
  if (sf_enter() < 0 || sf_bool_arg(any_arg, "any", &any) < 0) return NULL;
  threads_fill_standard(); // the program may have closed these descriptors since init()
  int fd = sf_fileno(any, &e);
  if (fd == SF_FAILED) return sf_raise(&e);
  return PyLong_FromLong(fd);
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

static PyObject *py_stats(PyObject *self, PyObject *noargs) {
  char *text = NULL;
  sf_error e = {0, NULL};
  (void)self;
  (void)noargs;
  if (sf_enter() < 0) return NULL;
  int rc;
  Py_BEGIN_ALLOW_THREADS rc = sf_stats(&text, &e);
  Py_END_ALLOW_THREADS if (rc != SF_DONE) return sf_raise(&e);
  PyObject *json = PyImport_ImportModule("json");
  PyObject *stats = json == NULL ? NULL : PyObject_CallMethod(json, "loads", "s", text);
  Py_XDECREF(json);
  free(text);
  return stats;
}

static PyObject *py_get_nanosecond(PyObject *self, PyObject *noargs) {
  (void)self;
  (void)noargs;
  if (sf_forked) return sf_enter(), NULL;
  return PyLong_FromUnsignedLongLong(sf_now());
}

static PyObject *py_get_batch(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"timeout_ms", "any", "max_batches", NULL};
  PyObject *timeout = NULL, *any_arg = NULL, *max = NULL;
  int64_t ms, most = SF_ONE;
  int any = 0;
  (void)self;
  if (!sf_by_position(args, kw, 0, 0, NULL) && !PyArg_ParseTupleAndKeywords(args, kw, "|$OOO:get_batch", names, &timeout, &any_arg, &max))
    return NULL;
  if (sf_enter() < 0 || sf_timeout_arg(timeout, &ms) < 0 || sf_bool_arg(any_arg, "any", &any) < 0) return NULL;
  if (any) most = 0;
  if (max != NULL && max != Py_None) {
    if (sf_int64_arg(max, "max_batches", &most) < 0) return NULL;
    if (!any || most < 1) {
      PyErr_Format(sf_error_value, "max_batches is %R, want at least 1, together with any=True", max);
      return NULL;
    }
  }
  uint64_t start = ms >= 0 ? sf_now() : 0;
  union { // large enough for most batches
    sf_batch first;
    char all[2048];
  } room;
  sf_batch *batches = NULL;
  int n = 0;
  for (;;) {
    sf_error e = {0, NULL};
    int rc;
    int64_t slice = sf_slice(ms, start);
    Py_BEGIN_ALLOW_THREADS rc = sf_get_batch(slice, most, sf_thread(), &room, sizeof room, &batches, &n, &e);
    Py_END_ALLOW_THREADS if (rc == SF_FAILED) return sf_raise(&e);
    if (rc == SF_DONE) break;
    if (PyErr_CheckSignals() < 0) return NULL;
    sf_drain_dropped(); // the tensors of answers that were sent in the meantime
    if (ms >= 0 && sf_now() - start >= (uint64_t)ms * 1000000) {
      sf_batch_timeout(ms, &e);
      return sf_raise(&e);
    }
  }
  return sf_batches_out(batches, n, &room);
}

// Answers a batch. Takes over the owners of ts, and keeps no pointer to ts.
static int respond(uint64_t id, sf_tensor *ts, Py_ssize_t n, uint64_t stream, sf_answer *a, sf_error *e) {
  int rc = SF_CONNECTS;
  if (!tensors_long(ts, n)) rc = sf_respond(id, ts, (int)n, stream, a, 1, e);
  if (rc != SF_CONNECTS) return rc;
  Py_BEGIN_ALLOW_THREADS rc = sf_respond(id, ts, (int)n, stream, a, 0, e);
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
  if (!sf_by_position(args, kw, 2, 3, a) && !PyArg_ParseTupleAndKeywords(args, kw, "OO|O:respond", names, &a[0], &a[1], &a[2])) return NULL;
  if (sf_bool_arg(a[2], "need_event", &need_event) < 0 || sf_enter() < 0 || sf_uint64_arg(a[1], "handler", -1, &id) < 0) return NULL;
  sf_tensor *ts = tensors_in(a[0], "tensors", NULL, NULL, 0, &n);
  if (ts == NULL) return NULL;
  uint64_t stream = SF_COMPLETE;
  if (need_event && tensor_streams(ts, n, &stream) < 0) {
    tensors_drop(ts, n);
    return NULL;
  }
  PyObject *answer = answer_make(n);
  if (answer == NULL) {
    tensors_drop(ts, n);
    return NULL;
  }
  int rc = respond(id, ts, n, stream, answer_state(answer), &e);
  free(ts);
  if (rc == SF_DONE) return answer;
  Py_DECREF(answer);
  return sf_raise(&e);
}

static PyObject *py_refuse(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"handler", "reason", NULL};
  PyObject *a[2] = {NULL}; // the arguments
  uint64_t id;
  sf_error e = {0, NULL};
  (void)self;
  if (!sf_by_position(args, kw, 2, 2, a) && !PyArg_ParseTupleAndKeywords(args, kw, "OO:refuse", names, &a[0], &a[1])) return NULL;
  if (sf_enter() < 0 || sf_uint64_arg(a[0], "handler", -1, &id) < 0) return NULL;
  if (!PyUnicode_Check(a[1])) {
    PyErr_Format(sf_error_type, "reason is %R, want a str", a[1]);
    return NULL;
  }
  PyObject *text = PyUnicode_AsEncodedString(a[1], "utf-8", "replace");
  if (text == NULL) return NULL;
  int rc = sf_refuse(id, PyBytes_AsString(text), PyBytes_Size(text), &e);
  Py_DECREF(text);
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
  ts = tensors_in(tensors, "tensors_vec", NULL, NULL, 0, &n);
  if (ts != NULL) items = sf_sequence(handlers, "handler_vec", &m);
  if (items == NULL) goto out;
  if (n != m) {
    PyErr_Format(sf_error_value, "%zd tensors_vec but %zd handler_vec, want as many", n, m);
    goto out;
  }
  if (buf.ndim == 0) {
    PyErr_SetString(sf_error_value, "ret_buffer has no dimensions, want at least one");
    goto out;
  }
  for (Py_ssize_t i = 0; i < n; i++) {
    if (ts[i].ndim == 0) {
      PyErr_Format(sf_error_value, "tensors_vec[%zd] has no dimensions, want as many rows as the answer has", i);
      goto out;
    }
    if (ts[i].shape[0] > buf.shape[0]) {
      PyErr_Format(sf_error_value, "tensors_vec[%zd] has %lld rows, ret_buffer only %lld", i, (long long)ts[i].shape[0],
                   (long long)buf.shape[0]);
      goto out;
    }
    if (sf_uint64_arg(PyTuple_GetItem(items, i), "handler_vec", i, &ts[i].key) < 0) goto out; // the field key is unused otherwise
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
    if (respond(ts[i].key, &part, 1, stream, NULL, &failed) == SF_DONE) {
      if (part.nbytes > 0) stream = SF_COMPLETE; // answers leave in order, and all are parts of one buffer
    } else if (e.kind == 0) {
      e = failed; // the other workers still get their answers
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
  tensors_drop(ts, n);
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
  rank_items = sf_sequence(ranks, "worker_ranks", &n);
  if (rank_items != NULL) key_items = sf_sequence(keys, "push_keys", &m);
  if (key_items == NULL) goto out;
  if (n != m || n == 0) {
    PyErr_Format(sf_error_value, "%zd worker_ranks and %zd push_keys, want as many, and at least one", n, m);
    goto out;
  }
  rs = calloc((size_t)n, sizeof *rs);
  ks = calloc((size_t)n, sizeof *ks);
  if (rs == NULL || ks == NULL) {
    PyErr_NoMemory();
    goto out;
  }
  for (Py_ssize_t i = 0; i < n; i++)
    if (sf_int64_item(PyTuple_GetItem(rank_items, i), "worker_ranks", i, &rs[i]) < 0 ||
        sf_uint64_arg(PyTuple_GetItem(key_items, i), "push_keys", i, &ks[i]) < 0)
      goto out;
  if (tensor_in(tensor, &t, "tensor", -1, 1) < 0) goto out;
  if (tensors_keep(&t, 1) < 0) {
    Py_DECREF((PyObject *)t.owner);
    goto out;
  }
  int rc; // RDMA registers the memory, which takes a while
  Py_BEGIN_ALLOW_THREADS rc = sf_register(&t, rs, ks, (int)n, &e);
  Py_END_ALLOW_THREADS if (rc != SF_DONE) {
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
  PyObject *result = Py_None;
  (void)self;
  (void)noargs;
  Py_INCREF(result);
  if (!sf_forked) {
    sf_error e = {0, NULL};
    int rc = sf_finish(&e);
    if (rc != SF_PENDING) { // the loop of a server has ended with its workers, and the program has not called stop()
      Py_DECREF(result);
      result = rc == SF_DONE ? wait_job() : sf_raise(&e);
    }
    Py_BEGIN_ALLOW_THREADS sf_exit();
    Py_END_ALLOW_THREADS
  }
  return result;
}

// Waits until the threads of the program have ended that are not daemons, as the interpreter does before it calls _exit.
static int join_threads(void) {
  PyObject *threading = imported("threading");
  if (threading == NULL) return PyErr_Occurred() != NULL ? -1 : 0;
  PyObject *all = PyObject_CallMethod(threading, "enumerate", NULL);
  PyObject *own = all != NULL ? PyObject_CallMethod(threading, "current_thread", NULL) : NULL;
  int rc = own != NULL ? 0 : -1;
  for (Py_ssize_t i = 0; rc == 0 && i < PyList_Size(all); i++) {
    PyObject *thread = PyList_GetItem(all, i); // borrowed
    if (thread == own) continue;
    PyObject *daemon = PyObject_GetAttrString(thread, "daemon");
    int is = daemon != NULL ? PyObject_IsTrue(daemon) : -1;
    PyObject *r = is == 0 ? PyObject_CallMethod(thread, "join", NULL) : NULL;
    if (is < 0 || (is == 0 && r == NULL)) rc = -1;
    Py_XDECREF(daemon);
    Py_XDECREF(r);
  }
  Py_XDECREF(own);
  Py_XDECREF(all);
  return rc;
}

static PyObject *py_exit_child(PyObject *self, PyObject *noargs) {
  if (!sf_forked && join_threads() < 0) return NULL;
  return py_exit(self, noargs);
}

// The call behind fserver.session: _session(op, handle, rank, name, data, timeout_ms) makes a core.SessionCall and
// returns (handle, rank, name, data), or None if the call does not wait.
static PyObject *py_session(PyObject *self, PyObject *args) {
  int op;
  unsigned long long handle;
  const char *name, *data;
  Py_ssize_t n;
  PyObject *rank_arg, *timeout;
  int64_t ms, rank, rank_out = 0, n_out = 0;
  uint64_t ticket = 0, handle_out = 0;
  char *name_out = NULL;
  void *data_out = NULL;
  sf_error e = {0, NULL};
  (void)self;
  if (!PyArg_ParseTuple(args, "iKOsy#O:_session", &op, &handle, &rank_arg, &name, &data, &n, &timeout)) return NULL;
  if (sf_enter() < 0 || sf_int64_arg(rank_arg, "rank", &rank) < 0 || sf_timeout_arg(timeout, &ms) < 0) return NULL;
  int rc;
  Py_BEGIN_ALLOW_THREADS rc = sf_session(op, handle, rank, (char *)name, (void *)data, n, ms, &ticket, &e);
  Py_END_ALLOW_THREADS if (rc == SF_FAILED) return sf_raise(&e);
  if (rc == SF_DONE) Py_RETURN_NONE;
  PyObject *waited = wait_job(), *result = NULL;
  if (waited != NULL && PyErr_CheckSignals() < 0) Py_CLEAR(waited); // an exception after the return would lose the result
  int ended = waited != NULL; // else the call is undone, which may wait for the ranks
  Py_BEGIN_ALLOW_THREADS sf_session_fetch(ticket, ended, &handle_out, &rank_out, &name_out, &data_out, &n_out);
  Py_END_ALLOW_THREADS if (waited != NULL) result = Py_BuildValue("KLsy#", (unsigned long long)handle_out, (long long)rank_out, name_out, (char *)data_out, (Py_ssize_t)n_out);
  Py_XDECREF(waited);
  free(name_out);
  free(data_out);
  return result;
}

#define KEYWORDS(f) (PyCFunction)(void (*)(void))(f), METH_VARARGS | METH_KEYWORDS

static PyMethodDef methods[] = {
    {"init", KEYWORDS(py_init), DOC_INIT},
    {"stop", KEYWORDS(py_stop), DOC_STOP("stop")},
    {"finalize", KEYWORDS(py_stop), DOC_STOP("finalize")},
    {"barrier", KEYWORDS(py_barrier), DOC_BARRIER},
    {"push_pull", KEYWORDS(py_push_pull), DOC_PUSH_PULL},
    {"prepare", KEYWORDS(sf_py_prepare), DOC_PREPARE},
    {"prepare_streams", KEYWORDS(sf_py_prepare_streams), DOC_PREPARE_STREAMS},
    {"wait", KEYWORDS(py_wait), DOC_WAIT},
    {"poll", py_poll, METH_O, DOC_POLL},
    {"fileno", KEYWORDS(py_fileno), DOC_FILENO},
    {"get_all_handlers", py_get_all_handlers, METH_O, DOC_GET_ALL_HANDLERS},
    {"fetch_trace", py_fetch_trace, METH_O, DOC_FETCH_TRACE},
    {"stats", py_stats, METH_NOARGS, DOC_STATS},
    {"get_nanosecond", py_get_nanosecond, METH_NOARGS, DOC_GET_NANOSECOND},
    {"get_batch", KEYWORDS(py_get_batch), DOC_GET_BATCH},
    {"respond", KEYWORDS(py_respond), DOC_RESPOND},
    {"respond_vec", py_respond_vec, METH_VARARGS, DOC_RESPOND_VEC},
    {"refuse", KEYWORDS(py_refuse), DOC_REFUSE},
    {"register_recv_buffer", py_register_recv_buffer, METH_VARARGS, DOC_REGISTER_RECV_BUFFER},
    {"map_pinned_tensor", sf_py_map_pinned_tensor, METH_VARARGS, DOC_MAP_PINNED_TENSOR},
    {"write_flag", sf_py_write_flag, METH_VARARGS, DOC_WRITE_FLAG},
    {"wait_flag", sf_py_wait_flag, METH_VARARGS, DOC_WAIT_FLAG},
    {"seq_add_one", sf_py_seq_add_one, METH_VARARGS, DOC_SEQ_ADD_ONE},
    {"_session", py_session, METH_VARARGS, NULL},
    {"_exit", py_exit, METH_NOARGS, NULL},
    {"_exit_child", py_exit_child, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

// With a size of -1 Python would copy the module into other interpreters without asking PyInit_fserver_lib.
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fserver_lib", DOC_MODULE, 0, methods, NULL, NULL, NULL, NULL};

// The first function is in the limited API since Python 3.9. Python 3.8 has the second, Python 3.7 only the third, and
// Python 3.6 none. Versions before 3.8 load the library all the same, and get an ImportError that names the required
// version.
extern PyInterpreterState *PyInterpreterState_Get(void) __attribute__((weak));
extern PyInterpreterState *_PyInterpreterState_Get(void) __attribute__((weak));
extern int64_t PyInterpreterState_GetID(PyInterpreterState *) __attribute__((weak));

static int new_enough(void) {
  if (PyInterpreterState_Get != NULL || _PyInterpreterState_Get != NULL) return 1;
  PyErr_Format(PyExc_ImportError, "fserver_lib needs Python 3.8 or later; this is %s", Py_GetVersion());
  return 0;
}

// Refuses all interpreters but the main one: objects that the module refers to, and releases from its own threads,
// belong to one interpreter, and the end of another interpreter would wait for them forever.
static int in_main(void) {
  PyInterpreterState *here = PyInterpreterState_Get != NULL ? PyInterpreterState_Get() : _PyInterpreterState_Get();
  long long id = PyInterpreterState_GetID(here);
  if (id == 0) return 0;
  if (id > 0) PyErr_Format(PyExc_ImportError, "fserver_lib was imported in interpreter %lld, want the main one: a process is one node", id);
  return -1;
}

// Leaves the cluster when the interpreter ends. A lookup of an attribute clears an exception that is set already, such as the
// KeyboardInterrupt of an import.
static int at_exit(PyObject *module) {
  PyObject *atexit = PyImport_ImportModule("atexit"), *r = NULL;
  PyObject *f = atexit != NULL ? PyObject_GetAttrString(module, "_exit") : NULL;
  if (f != NULL) r = PyObject_CallMethod(atexit, "register", "O", f);
  Py_XDECREF(atexit);
  Py_XDECREF(f);
  Py_XDECREF(r);
  return r != NULL ? 0 : -1;
}

PyMODINIT_FUNC PyInit_fserver_lib(void) {
  if (!new_enough() || in_main() < 0) return NULL;
  PyObject *module = PyState_FindModule(&definition);
  if (module != NULL) { // imported before, then removed from sys.modules
    Py_INCREF(module);
    return module;
  }
  if ((module = PyModule_Create(&definition)) == NULL) return NULL;
  if (call_init(module) < 0 || tensor_in_init() < 0 || tensor_init(module) < 0 || cuda_init(module) < 0 || answer_init(module) < 0 || prepared_init(module) < 0 ||
      collective_init(module) < 0 || streams_init(module) < 0 || window_init(module) < 0 || shared_init(module) < 0 || at_exit(module) < 0) {
    Py_DECREF(module);
    return NULL;
  }
  threads_init();
  fork_watch();
  return module;
}
