//go:build fserver

#include "prepared.h"

#include <stdlib.h>

#include "_cgo_export.h"
#include "call.h"
#include "docs.h"
#include "handle.h"
#include "request.h"
#include "tensor.h"

static PyObject *exchange_class;

typedef struct {
  sf_handle handle;
  int32_t device; // of the tensors, or -1 for the host
  int need_event;
  int takes_long; // start() may take long
  int eager;      // start() has returned a handler, so wait() needs no stream
} exchange_object;

PyObject *sf_py_prepare(PyObject *self, PyObject *args, PyObject *kw) {
  request r;
  sf_error e = {0, NULL};
  uint64_t at = 0;
  (void)self;
  if (request_in(args, kw, "OOOO|O$O:prepare", &r) < 0) return NULL;
  if (request_keep(&r) < 0) return NULL;
  int rc = sf_prepare(r.push, (int)r.npush, r.pull, (int)r.npull, r.servers, (int)r.nservers, &at, &e);
  int need_event = r.need_event;
  int32_t device = request_gpu(&r);
  int takes_long = request_long(&r);
  request_free(&r);
  if (rc != SF_DONE) return sf_raise(&e);
  exchange_object *x = (exchange_object *)sf_handle_object(exchange_class, at);
  if (x == NULL) return NULL;
  x->device = device;
  x->need_event = need_event;
  x->takes_long = takes_long;
  x->eager = 0;
  return (PyObject *)x;
}

static PyObject *exchange_start(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"rows", NULL};
  exchange_object *x = (exchange_object *)o;
  PyObject *arg = NULL;
  int64_t rows = SF_ALL_ROWS, h = SF_CONNECTS;
  uint64_t stream = SF_COMPLETE;
  sf_error e = {0, NULL};
  if (!sf_by_position(args, kw, 0, 1, &arg) && !PyArg_ParseTupleAndKeywords(args, kw, "|O:start", names, &arg)) return NULL;
  if (sf_enter() < 0) return NULL;
  if (arg != NULL && arg != Py_None) {
    if (sf_int64_arg(arg, "rows", &rows) < 0) return NULL;
    if (rows < 0) {
      PyErr_Format(sf_error_value, "rows is %R, want 0 or more, or None for all", arg);
      return NULL;
    }
  }
  if (x->device >= 0 && tensor_stream(x->device, &stream) < 0) return NULL;
  if (!x->takes_long) h = sf_exchange_start(x->handle.at, rows, stream, x->need_event, 1, &e);
  if (h == SF_CONNECTS) {
    Py_BEGIN_ALLOW_THREADS h = sf_exchange_start(x->handle.at, rows, stream, x->need_event, 0, &e);
    Py_END_ALLOW_THREADS
  }
  if (h == SF_CAPTURED) return PyLong_FromLong(-1);
  if (h < 0) return sf_raise(&e);
  PyObject *handler = PyLong_FromLongLong(h);
  x->eager = handler != NULL;
  if (handler == NULL) { // start() fails, so no round may be in flight
    Py_BEGIN_ALLOW_THREADS sf_exchange_wait(x->handle.at, SF_COMPLETE, 0, SLICE_MS, &e);
    Py_END_ALLOW_THREADS free(e.text);
  }
  return handler;
}

static PyObject *exchange_wait(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"timeout_ms", NULL};
  exchange_object *x = (exchange_object *)o;
  PyObject *timeout = NULL;
  uint64_t stream = SF_COMPLETE;
  int64_t ms = 15000;
  if (!sf_by_position(args, kw, 0, 1, &timeout) && !PyArg_ParseTupleAndKeywords(args, kw, "|O:wait", names, &timeout)) return NULL;
  if (sf_enter() < 0 || (timeout != NULL && sf_timeout_arg(timeout, &ms) < 0)) return NULL;
  if (ms < 0) ms = NO_LIMIT_MS;
  if (x->device >= 0 && !x->eager && tensor_stream(x->device, &stream) < 0) return NULL;
  for (;;) {
    sf_error e = {0, NULL};
    int rc;
    Py_BEGIN_ALLOW_THREADS rc = sf_exchange_wait(x->handle.at, stream, ms, SLICE_MS, &e);
    Py_END_ALLOW_THREADS if (rc != SF_PENDING) x->eager = 0;
    if (rc == SF_FAILED) return sf_raise(&e);
    if (rc == SF_DONE || rc == SF_CAPTURED) break;
    if (PyErr_CheckSignals() < 0) return NULL;
  }
  sf_drain_dropped();
  Py_RETURN_NONE;
}

static PyObject *exchange_poll(PyObject *o, PyObject *noargs) {
  exchange_object *x = (exchange_object *)o;
  sf_error e = {0, NULL};
  (void)noargs;
  if (sf_enter() < 0) return NULL;
  int rc = sf_exchange_wait(x->handle.at, SF_COMPLETE, NO_LIMIT_MS, 0, &e);
  if (rc != SF_PENDING) x->eager = 0;
  if (rc == SF_FAILED) return sf_raise(&e);
  sf_drain_dropped();
  return PyBool_FromLong(rc == SF_DONE);
}

static PyObject *exchange_close(PyObject *o, PyObject *noargs) {
  if (sf_enter() < 0) return NULL;
  sf_exchange_close(sf_at(o));
  sf_drain_dropped();
  return sf_handle_check(o, noargs);
}

SF_NOT_CREATED(exchange_new, "Exchange cannot be created: prepare() returns it")

static PyMethodDef exchange_methods[] = {
    {"start", (PyCFunction)(void (*)(void))exchange_start, METH_VARARGS | METH_KEYWORDS, DOC_EXCHANGE_START},
    {"wait", (PyCFunction)(void (*)(void))exchange_wait, METH_VARARGS | METH_KEYWORDS, DOC_EXCHANGE_WAIT},
    {"poll", exchange_poll, METH_NOARGS, DOC_EXCHANGE_POLL},
    {"check", sf_handle_check, METH_NOARGS, DOC_EXCHANGE_CHECK},
    {"close", exchange_close, METH_NOARGS, DOC_EXCHANGE_CLOSE},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef exchange_values[] = {
    {"path", sf_handle_path, NULL, DOC_EXCHANGE_PATH, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot exchange_slots[] = {
    {Py_tp_doc, DOC_EXCHANGE}, {Py_tp_new, exchange_new}, {Py_tp_dealloc, sf_handle_dealloc}, {Py_tp_methods, exchange_methods}, {Py_tp_getset, exchange_values}, {0, NULL},
};

static PyType_Spec exchange_spec = {"fserver_lib.Exchange", sizeof(exchange_object), 0, Py_TPFLAGS_DEFAULT, exchange_slots};

int prepared_init(PyObject *module) {
  return sf_add_class(module, "Exchange", &exchange_spec, &exchange_class);
}
