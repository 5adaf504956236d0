//go:build fserver

#include "window.h"

#include "_cgo_export.h"
#include "call.h"
#include "collective.h"
#include "docs.h"
#include "tensor.h"

static PyObject *window_class;

typedef struct {
  PyObject_HEAD
  uint64_t at; // what Go knows it by
  int32_t device;
  PyObject *of; // a communicator that is dropped ends its windows
} window_object;

PyObject *sf_py_open_window(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"size", "signals", "timeout_ms", NULL};
  PyObject *size_arg = NULL, *signals_arg = NULL, *timeout = NULL;
  int64_t size, signals = 1, ms = -1;
  uint64_t comm = 0, at = 0, task = 0;
  sf_error e = {0, NULL};
  sf_tensor t;
  int rank, ranks;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "O|O$O:open_window", names, &size_arg, &signals_arg, &timeout)) return NULL;
  if (sf_enter() < 0 || sf_int64_arg(size_arg, "size", &size) < 0) return NULL;
  if (signals_arg != NULL && sf_int64_arg(signals_arg, "signals", &signals) < 0) return NULL;
  if (timeout != NULL && sf_timeout_arg(timeout, &ms) < 0) return NULL;
  if (sf_comm_ready(self, &comm, &rank, &ranks) < 0) return NULL;
  if (sf_window_open(comm, size, signals, ms, &at, &task, &e) != SF_DONE) return sf_raise(&e);
  window_object *w = NULL;
  if (sf_task_finish(task, 1) == 0) {
    allocfunc alloc = (allocfunc)PyType_GetSlot((PyTypeObject *)window_class, Py_tp_alloc);
    w = (window_object *)alloc((PyTypeObject *)window_class, 0);
  }
  if (w == NULL) {
    sf_window_drop(at);
    return NULL;
  }
  sf_window_tensor(at, &t);
  w->at = at;
  w->device = t.device_id;
  Py_INCREF(self);
  w->of = self;
  return (PyObject *)w;
}

static void window_dealloc(PyObject *o) {
  PyTypeObject *type = Py_TYPE(o);
  if (!sf_forked) sf_window_drop(((window_object *)o)->at);
  Py_XDECREF(((window_object *)o)->of);
  freefunc f = (freefunc)PyType_GetSlot(type, Py_tp_free);
  f(o);
  Py_DECREF(type);
}

// Puts a call into the current stream. x may be NULL.
static PyObject *queue(PyObject *o, int what, PyObject *rank_arg, PyObject *offset_arg, PyObject *x, PyObject *signal_arg, int64_t signal) {
  window_object *w = (window_object *)o;
  int64_t rank, offset = 0;
  uint64_t stream;
  sf_tensor t = {0};
  sf_error e = {0, NULL};
  if (sf_enter() < 0 || sf_int64_arg(rank_arg, "rank", &rank) < 0) return NULL;
  if (offset_arg != NULL && sf_int64_arg(offset_arg, "offset", &offset) < 0) return NULL;
  if (signal_arg != NULL && sf_int64_arg(signal_arg, "signal", &signal) < 0) return NULL;
  if (signal_arg != NULL && signal < 0) return PyErr_Format(sf_error_value, "signal is %R, want 0 or more", signal_arg), NULL;
  if (tensor_stream(w->device, &stream) < 0) return NULL;
  if (x != NULL) {
    if (tensor_in(x, &t, "x", -1, 0) < 0) return NULL;
    if (t.nbytes > 0 && (t.device_type != SF_GPU || t.device_id != w->device)) {
      Py_DECREF((PyObject *)t.owner);
      return PyErr_Format(sf_error_value, "x lies elsewhere, want a tensor on cuda:%d", (int)w->device), NULL;
    }
  }
  int rc;
  Py_BEGIN_ALLOW_THREADS rc = sf_window_queue(w->at, what, rank, offset, signal, &t, stream, &e);
  Py_END_ALLOW_THREADS if (x != NULL) Py_DECREF((PyObject *)t.owner);
  if (rc != SF_DONE) return sf_raise(&e);
  Py_RETURN_NONE;
}

static PyObject *window_put(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"rank", "offset", "x", NULL};
  PyObject *rank, *offset, *x;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "OOO:put", names, &rank, &offset, &x)) return NULL;
  return queue(o, SF_WINDOW_PUT, rank, offset, x, NULL, SF_NO_SIGNAL);
}

static PyObject *window_put_signal(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"rank", "offset", "x", "signal", NULL};
  PyObject *rank, *offset, *x, *signal = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "OOO|O:put_signal", names, &rank, &offset, &x, &signal)) return NULL;
  return queue(o, SF_WINDOW_PUT, rank, offset, x, signal, 0);
}

static PyObject *window_signal(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"rank", "signal", NULL};
  PyObject *rank, *signal = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "O|O:signal", names, &rank, &signal)) return NULL;
  return queue(o, SF_WINDOW_SIGNAL, rank, NULL, NULL, signal, 0);
}

static PyObject *window_wait_signal(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"rank", "signal", NULL};
  PyObject *rank, *signal = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "O|O:wait_signal", names, &rank, &signal)) return NULL;
  return queue(o, SF_WINDOW_WAIT, rank, NULL, NULL, signal, 0);
}

static PyObject *window_flush(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"rank", NULL};
  PyObject *rank;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "O:flush", names, &rank)) return NULL;
  return queue(o, SF_WINDOW_FLUSH, rank, NULL, NULL, NULL, 0);
}

static PyObject *window_check(PyObject *o, PyObject *noargs) {
  sf_error e = {0, NULL};
  (void)noargs;
  if (sf_enter() < 0) return NULL;
  if (sf_window_check(((window_object *)o)->at, &e) != SF_DONE) return sf_raise(&e);
  Py_RETURN_NONE;
}

static PyObject *window_close(PyObject *o, PyObject *noargs) {
  uint64_t task;
  (void)noargs;
  if (sf_enter() < 0) return NULL;
  sf_window_close(((window_object *)o)->at, &task);
  if (sf_task_finish(task, 0) < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *window_tensor(PyObject *o, void *unused) {
  sf_tensor t;
  (void)unused;
  if (sf_enter() < 0) return NULL;
  sf_window_tensor(((window_object *)o)->at, &t);
  return tensor_over(&t, o);
}

// Only open_window() makes one.
static PyObject *window_new(PyTypeObject *type, PyObject *args, PyObject *kw) {
  (void)type;
  (void)args;
  (void)kw;
  PyErr_SetString(sf_error_type, "fserver_lib.Window cannot be made: open_window() returns it");
  return NULL;
}

#define KEYWORDS(f) (PyCFunction)(void (*)(void))(f), METH_VARARGS | METH_KEYWORDS

static PyMethodDef window_methods[] = {
    {"put", KEYWORDS(window_put), DOC_WINDOW_PUT},
    {"put_signal", KEYWORDS(window_put_signal), DOC_WINDOW_PUT_SIGNAL},
    {"signal", KEYWORDS(window_signal), DOC_WINDOW_SIGNAL},
    {"wait_signal", KEYWORDS(window_wait_signal), DOC_WINDOW_WAIT_SIGNAL},
    {"flush", KEYWORDS(window_flush), DOC_WINDOW_FLUSH},
    {"check", window_check, METH_NOARGS, DOC_WINDOW_CHECK},
    {"close", window_close, METH_NOARGS, DOC_WINDOW_CLOSE},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef window_values[] = {
    {"tensor", window_tensor, NULL, "This rank's memory, a torch.Tensor of bytes on this process's GPU.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot window_slots[] = {
    {Py_tp_doc, DOC_WINDOW}, {Py_tp_new, window_new}, {Py_tp_dealloc, window_dealloc}, {Py_tp_methods, window_methods}, {Py_tp_getset, window_values}, {0, NULL},
};

static PyType_Spec window_spec = {"fserver_lib.Window", sizeof(window_object), 0, Py_TPFLAGS_DEFAULT, window_slots};

int window_init(PyObject *module) {
  window_class = PyType_FromSpec(&window_spec);
  if (window_class == NULL) return -1;
  Py_INCREF(window_class);
  return PyModule_AddObject(module, "Window", window_class);
}
