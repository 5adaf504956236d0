//go:build fserver

#include "streams.h"

#include "_cgo_export.h"
#include "call.h"
#include "collective.h"
#include "docs.h"
#include "handle.h"
#include "request.h"
#include "tensor.h"

static PyObject *streams_class;

typedef struct {
  sf_handle handle;
  int32_t device; // of the tensors, or -1 for the host
  int host;       // send() and receive() are made by the host
} streams_object;

PyObject *sf_py_prepare_streams(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"push_tensors", "push_keys", "pull_tensors", "pull_keys", "peers", "timeout_ms", "round_timeout_ms", "host", NULL};
  PyObject *a[8] = {NULL};
  request r;
  sf_error e = {0, NULL};
  uint64_t at = 0, task = 0;
  int64_t timeout = 15000, round = 15000;
  int host = 0;
  (void)self;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "OOOO|$OOOO:prepare_streams", names, &a[0], &a[1], &a[2], &a[3], &a[4], &a[5], &a[6], &a[7])) return NULL;
  if ((a[5] != NULL && sf_timeout_arg(a[5], &timeout) < 0) || (a[6] != NULL && sf_timeout_arg(a[6], &round) < 0) || (a[7] != NULL && sf_bool_arg(a[7], "host", &host) < 0)) return NULL;
  if (request_of(a[0], a[1], a[2], a[3], a[4], "peers", 1, &r) < 0) return NULL;
  if (request_keep(&r) < 0) return NULL;
  int32_t device = request_gpu(&r);
  int rc = sf_streams_prepare(r.push, (int)r.npush, r.pull, (int)r.npull, r.servers, (int)r.nservers, timeout, round, host, &at, &task, &e);
  request_free(&r);
  if (rc != SF_DONE) return sf_raise(&e);
  streams_object *x = (streams_object *)sf_task_object(task, streams_class, at);
  if (x == NULL) return NULL;
  x->device = device;
  x->host = host;
  return (PyObject *)x;
}

static PyObject *queue(streams_object *x, int send, int need_event) {
  uint64_t stream = SF_COMPLETE;
  sf_error e = {0, NULL};
  if (sf_enter() < 0) return NULL;
  if (need_event && x->device >= 0 && tensor_stream(x->device, &stream) < 0) return NULL;
  int rc;
  Py_BEGIN_ALLOW_THREADS rc = x->host ? sf_streams_send(x->handle.at, stream, &e) : sf_streams_queue(x->handle.at, send, stream, &e);
  Py_END_ALLOW_THREADS if (rc != SF_DONE) return sf_raise(&e);
  Py_RETURN_NONE;
}

static PyObject *streams_send(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"need_event", NULL};
  streams_object *x = (streams_object *)o;
  PyObject *arg = NULL;
  int need_event = 1;
  if (!sf_by_position(args, kw, 0, 1, &arg) && !PyArg_ParseTupleAndKeywords(args, kw, "|O:send", names, &arg)) return NULL;
  if (sf_bool_arg(arg, "need_event", &need_event) < 0) return NULL;
  if (!need_event && !x->host) {
    PyErr_SetString(sf_error_value, "need_event is False, want True: the stream sends, unless prepare_streams() was given host=True");
    return NULL;
  }
  return queue(x, 1, need_event);
}

static PyObject *streams_receive(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"timeout_ms", NULL};
  streams_object *x = (streams_object *)o;
  PyObject *timeout = NULL;
  int64_t ms = -1;
  if (!sf_by_position(args, kw, 0, 1, &timeout) && !PyArg_ParseTupleAndKeywords(args, kw, "|O:receive", names, &timeout)) return NULL;
  if (timeout != NULL && sf_timeout_arg(timeout, &ms) < 0) return NULL;
  if (!x->host) {
    if (ms < 0) return queue(x, 0, 1);
    PyErr_Format(sf_error_value, "timeout_ms is %R, want None: the stream waits, for as long as round_timeout_ms of prepare_streams() says", timeout);
    return NULL;
  }
  if (sf_enter() < 0) return NULL;
  for (uint64_t start = sf_now();;) {
    sf_error e = {0, NULL};
    int64_t slice = sf_slice(ms, start);
    int rc;
    Py_BEGIN_ALLOW_THREADS rc = sf_streams_receive(x->handle.at, slice, slice < SLICE_MS, &e);
    Py_END_ALLOW_THREADS if (rc == SF_DONE) Py_RETURN_NONE;
    if (rc != SF_PENDING) return sf_raise(&e);
    if (PyErr_CheckSignals() < 0) return NULL;
  }
}

static PyObject *streams_close(PyObject *o, PyObject *noargs) {
  sf_error e = {0, NULL};
  int rc;
  (void)noargs;
  if (sf_enter() < 0) return NULL;
  Py_BEGIN_ALLOW_THREADS rc = sf_streams_close(sf_at(o), &e);
  Py_END_ALLOW_THREADS sf_drain_dropped();
  if (rc != SF_DONE) return sf_raise(&e);
  Py_RETURN_NONE;
}

SF_NOT_CREATED(streams_new, "StreamExchange cannot be created: prepare_streams() returns it")

static PyMethodDef streams_methods[] = {
    {"send", (PyCFunction)(void (*)(void))streams_send, METH_VARARGS | METH_KEYWORDS, DOC_STREAMS_SEND},
    {"receive", (PyCFunction)(void (*)(void))streams_receive, METH_VARARGS | METH_KEYWORDS, DOC_STREAMS_RECEIVE},
    {"check", sf_handle_check, METH_NOARGS, DOC_STREAMS_CHECK},
    {"close", streams_close, METH_NOARGS, DOC_STREAMS_CLOSE},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef streams_values[] = {
    {"path", sf_handle_path, NULL, DOC_STREAMS_PATH, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot streams_slots[] = {
    {Py_tp_doc, DOC_STREAMS}, {Py_tp_new, streams_new}, {Py_tp_dealloc, sf_handle_dealloc}, {Py_tp_methods, streams_methods}, {Py_tp_getset, streams_values}, {0, NULL},
};

static PyType_Spec streams_spec = {"fserver_lib.StreamExchange", sizeof(streams_object), 0, Py_TPFLAGS_DEFAULT, streams_slots};

int streams_init(PyObject *module) {
  return sf_add_class(module, "StreamExchange", &streams_spec, &streams_class);
}
