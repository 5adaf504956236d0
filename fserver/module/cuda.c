//go:build fserver

#include "cuda.h"

#include <string.h>

#include "_cgo_export.h"
#include "batch.h"
#include "call.h"
#include "docs.h"
#include "handle.h"
#include "request.h"
#include "tensor.h"

enum { INT64 = 4 }; // PyTorch's code

// Returns the CUDA view of a pinned host tensor. The view keeps the memory of the tensor.
PyObject *sf_py_map_pinned_tensor(PyObject *self, PyObject *args) {
  PyObject *tensor, *device, *r = NULL;
  int64_t id;
  sf_tensor t;
  sf_error e = {0, NULL};
  (void)self;
  if (!PyArg_ParseTuple(args, "OO:map_pinned_tensor", &tensor, &device)) return NULL;
  if (sf_enter() < 0 || sf_int64_arg(device, "device_index", &id) < 0 || tensor_in(tensor, &t, "tensor", -1, 0) < 0) return NULL;
  if (tensors_keep(&t, 1) < 0) {
    Py_DECREF((PyObject *)t.owner);
    return NULL;
  }
  PyObject *keeper = t.owner;
  int rc;
  Py_BEGIN_ALLOW_THREADS rc = sf_map_pinned(&t, id, &e); // the first call initializes CUDA
  Py_END_ALLOW_THREADS if (rc == SF_DONE) r = tensor_over(&t, keeper);
  else
    sf_raise(&e);
  Py_DECREF(keeper);
  return r;
}

// Reads a counter argument: an int64 tensor on a GPU.
static int counter(PyObject *o, const char *what, sf_tensor *t) {
  if (tensor_in(o, t, what, -1, 1) < 0) return -1;
  if (t->device_type == SF_GPU && t->dtype == INT64 && t->nbytes >= 8) return 0;
  PyErr_Format(sf_error_value, "%s is %R, want a tensor of int64 on a GPU (map_pinned_tensor makes one of pinned memory)", what, o);
  Py_DECREF((PyObject *)t->owner);
  return -1;
}

static PyObject *signal_stream(int what, PyObject *first, const char *first_name, PyObject *second) {
  sf_tensor a, b;
  sf_error e = {0, NULL};
  uint64_t stream;
  int failed = 1, rc;
  if (sf_enter() < 0) return NULL;
  Py_BEGIN_ALLOW_THREADS rc = sf_need_cuda(&e); // the first call initializes CUDA
  Py_END_ALLOW_THREADS if (rc != SF_DONE) return sf_raise(&e);
  if (counter(first, first_name, &a) < 0) return NULL;
  if (second == NULL || counter(second, "seq", &b) == 0) {
    if (second != NULL && b.device_id != a.device_id) {
      PyErr_Format(sf_error_value, "seq is on cuda:%d, want cuda:%d, the device of %s", (int)b.device_id, (int)a.device_id, first_name);
    } else if (tensor_stream(a.device_id, &stream) == 0) {
      // It blocks while the device's queue is full, perhaps until another thread continues.
      Py_BEGIN_ALLOW_THREADS failed = sf_signal(what, &a, second != NULL ? &b : &a, stream, &e) != SF_DONE;
      Py_END_ALLOW_THREADS if (failed) sf_raise(&e);
    }
    if (second != NULL) Py_DECREF((PyObject *)b.owner);
  }
  Py_DECREF((PyObject *)a.owner);
  if (failed) return NULL;
  Py_RETURN_NONE;
}

PyObject *sf_py_write_flag(PyObject *self, PyObject *args) {
  PyObject *flag, *seq;
  (void)self;
  return PyArg_ParseTuple(args, "OO:write_flag", &flag, &seq) ? signal_stream(SF_WRITE_FLAG, flag, "flag", seq) : NULL;
}

PyObject *sf_py_wait_flag(PyObject *self, PyObject *args) {
  PyObject *flag, *seq;
  (void)self;
  return PyArg_ParseTuple(args, "OO:wait_flag", &flag, &seq) ? signal_stream(SF_WAIT_FLAG, flag, "flag", seq) : NULL;
}

PyObject *sf_py_seq_add_one(PyObject *self, PyObject *args) {
  PyObject *seq;
  (void)self;
  return PyArg_ParseTuple(args, "O:seq_add_one", &seq) ? signal_stream(SF_SEQ_ADD_ONE, seq, "seq", NULL) : NULL;
}

// init() of SimpleNotify. Before, the object has no handle.
static PyObject *notify_start(PyObject *o, PyObject *noargs) {
  sf_handle *n = (sf_handle *)o;
  sf_error e = {0, NULL};
  uint64_t at = 0;
  int rc;
  (void)noargs;
  if (sf_enter() < 0) return NULL;
  if (n->at != 0) Py_RETURN_NONE;
  Py_BEGIN_ALLOW_THREADS rc = sf_notify_new(&at, &e); // initializes CUDA and allocates pinned memory
  Py_END_ALLOW_THREADS if (rc != SF_DONE) return sf_raise(&e);
  if (n->at == 0)
    n->at = at;
  else // another thread was faster
    sf_handle_drop(at);
  Py_RETURN_NONE;
}

// Calls Go with the current stream. It blocks while the device's queue is full, perhaps until another thread continues.
// Only the first of the calls uses handler.
static PyObject *notify_stream(PyObject *o, int what, int64_t handler) {
  uint64_t stream = 0;
  sf_error e = {0, NULL};
  uint64_t id = sf_at(o);
  int32_t device;
  int rc;
  Py_BEGIN_ALLOW_THREADS rc = sf_notify_device(id, &device, &e); // the first call may allocate pinned memory
  Py_END_ALLOW_THREADS if (rc != SF_DONE) return sf_raise(&e);
  if (tensor_stream(device, &stream) < 0) return NULL;
  Py_BEGIN_ALLOW_THREADS rc = sf_notify_stream(id, what, handler, stream, &e);
  Py_END_ALLOW_THREADS if (rc != SF_DONE) return sf_raise(&e);
  Py_RETURN_NONE;
}

static PyObject *notify_stream_wait_event(PyObject *o, PyObject *arg) {
  int64_t handler;
  if (sf_enter() < 0 || sf_int64_arg(arg, "handler", &handler) < 0) return NULL;
  return notify_stream(o, SF_STREAM_WAIT, handler);
}

static PyObject *notify_block(PyObject *o, PyObject *noargs) {
  (void)noargs;
  return sf_enter() < 0 ? NULL : notify_stream(o, SF_STREAM_BLOCK, 0);
}

static PyObject *notify_block_and_get(PyObject *o, PyObject *noargs) {
  (void)noargs;
  return sf_enter() < 0 ? NULL : notify_stream(o, SF_STREAM_GET_BATCH, 0);
}

static PyObject *notify_done(PyObject *o, PyObject *noargs) {
  uint64_t id = sf_at(o);
  (void)noargs;
  if (sf_enter() < 0) return NULL;
  for (;;) {
    sf_error e = {0, NULL};
    int rc;
    Py_BEGIN_ALLOW_THREADS rc = sf_notify_done(id, SLICE_MS, &e);
    Py_END_ALLOW_THREADS if (rc == SF_FAILED) return sf_raise(&e);
    if (rc == SF_DONE) Py_RETURN_NONE;
    if (PyErr_CheckSignals() < 0) return NULL;
  }
}

static PyObject *notify_batch(PyObject *o, PyObject *noargs) {
  uint64_t id = sf_at(o);
  (void)noargs;
  if (sf_enter() < 0) return NULL;
  for (;;) {
    sf_error e = {0, NULL};
    sf_batch *batches = NULL;
    int rc, n = 0;
    Py_BEGIN_ALLOW_THREADS rc = sf_notify_batch(id, SLICE_MS, &batches, &n, &e);
    Py_END_ALLOW_THREADS if (rc == SF_FAILED) return sf_raise(&e);
    if (rc == SF_DONE) return sf_batches_out(batches, n, NULL);
    if (PyErr_CheckSignals() < 0) return NULL;
  }
}

static PyObject *notify_new(PyTypeObject *type, PyObject *args, PyObject *named) {
  if (PyTuple_Size(args) > 0 || (named != NULL && PyDict_Size(named) > 0)) {
    PyErr_SetString(PyExc_TypeError, "SimpleNotify() takes no arguments");
    return NULL;
  }
  return PyType_GenericNew(type, args, named);
}

static PyMethodDef notify_methods[] = {
    {"init", notify_start, METH_NOARGS, DOC_NOTIFY_INIT},
    {"stream_wait_event", notify_stream_wait_event, METH_O, DOC_NOTIFY_STREAM_WAIT_EVENT},
    {"wait_event_done", notify_done, METH_NOARGS, DOC_NOTIFY_WAIT_EVENT_DONE},
    {"block_now_stream", notify_block, METH_NOARGS, DOC_NOTIFY_BLOCK_NOW_STREAM},
    {"block_now_stream_and_get_batch", notify_block_and_get, METH_NOARGS, DOC_NOTIFY_BLOCK_AND_GET_BATCH},
    {"get_future_batch_data", notify_batch, METH_NOARGS, DOC_NOTIFY_GET_FUTURE_BATCH_DATA},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot notify_slots[] = {
    {Py_tp_doc, DOC_NOTIFY},
    {Py_tp_new, notify_new},
    {Py_tp_dealloc, sf_handle_dealloc},
    {Py_tp_methods, notify_methods},
    {0, NULL},
};

static PyType_Spec notify_spec = {"fserver_lib.SimpleNotify", sizeof(sf_handle), 0, Py_TPFLAGS_DEFAULT, notify_slots};

int cuda_init(PyObject *module) {
  PyObject *class = PyType_FromSpec(&notify_spec);
  return class != NULL ? PyModule_AddObject(module, "SimpleNotify", class) : -1;
}
