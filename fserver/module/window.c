//go:build fserver

#include "window.h"

#include <stdlib.h>
#include <string.h>

#include "_cgo_export.h"
#include "call.h"
#include "collective.h"
#include "docs.h"
#include "dtypes.h"
#include "handle.h"
#include "request.h"
#include "tensor.h"

static PyObject *window_class;

typedef struct {
  sf_handle handle;
  int32_t device; // -1: in host memory
} window_object;

// A window object holds these (indices of held):
//   - its communicator, because a dropped communicator ends its windows
//   - the owner of host memory, as long as tensors refer to it
//   - the tensor that open_window() was given
enum { COMM, MEMORY, GIVEN };

// Reads the argument device. Returns SF_CPU or SF_GPU, or -1 with an exception.
static int where_arg(PyObject *o, uint64_t comm) {
  int where = -1;
  sf_error e = {0, NULL};
  if (o == NULL || o == Py_None) {
    if (sf_window_where(comm, &where, &e) != SF_DONE) sf_raise(&e);
    return where;
  }
  PyObject *text = PyUnicode_Check(o) ? PyUnicode_AsUTF8String(o) : NULL;
  if (text != NULL) where = strcmp(PyBytes_AsString(text), "cpu") == 0 ? SF_CPU : strcmp(PyBytes_AsString(text), "cuda") == 0 ? SF_GPU : -1;
  Py_XDECREF(text);
  if (where < 0 && !PyErr_Occurred()) PyErr_Format(sf_error_value, "device is %R, want 'cpu', 'cuda' or None", o);
  return where;
}

static void free_memory(PyObject *capsule) { free(PyCapsule_GetPointer(capsule, NULL)); }

// Go refuses larger sizes on all ranks.
#define MAX_SIZE ((int64_t)1 << 40)

// Allocates host memory for a window. t gets an owner, except for a size that Go will refuse.
static int allocate(int64_t size, sf_tensor *t) {
  if (size < 0 || size > MAX_SIZE) return 0;
  t->ptr = calloc(size > 0 ? (size_t)size : 1, 1);
  t->owner = t->ptr != NULL ? PyCapsule_New(t->ptr, NULL, free_memory) : NULL;
  if (t->owner == NULL) {
    free(t->ptr);
    if (!PyErr_Occurred()) PyErr_Format(PyExc_MemoryError, "no memory for a window of %lld bytes", (long long)size);
    return -1;
  }
  t->nbytes = t->shape[0] = size;
  t->ndim = 1;
  t->dtype = UINT8;
  t->device_type = SF_CPU;
  return 0;
}

PyObject *sf_py_open_window(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"size", "signals", "device", "timeout_ms", NULL};
  PyObject *size_arg = NULL, *signals_arg = NULL, *device = NULL, *timeout = NULL, *given = NULL;
  int64_t size = 0, signals = 1, ms = -1;
  uint64_t comm = 0, at = 0, task = 0;
  sf_error e = {0, NULL};
  sf_tensor t = {0};
  int rank, ranks, where;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "O|O$OO:open_window", names, &size_arg, &signals_arg, &device, &timeout)) return NULL;
  if (sf_enter() < 0) return NULL;
  if (signals_arg != NULL && sf_int64_arg(signals_arg, "signals", &signals) < 0) return NULL;
  if (timeout != NULL && sf_timeout_arg(timeout, &ms) < 0) return NULL;
  if (sf_comm_ready(self, &comm, &rank, &ranks) < 0 || (where = where_arg(device, comm)) < 0) return NULL;
  PyObject *method = where == SF_CPU ? PyObject_GetAttrString(size_arg, "__dlpack__") : NULL;
  Py_XDECREF(method);
  if (method == NULL && sf_pardon() < 0) return NULL;
  if (method != NULL)
    given = size_arg;
  else if (sf_int64_arg(size_arg, "size", &size) < 0)
    return NULL;
  if (given != NULL) {
    if (tensor_in(given, &t, "size", -1, 1) < 0) return NULL;
    if (tensors_keep(&t, 1) < 0) {
      Py_DECREF((PyObject *)t.owner);
      return NULL;
    }
    if (t.device_type != SF_CPU) {
      Py_DECREF((PyObject *)t.owner);
      return PyErr_Format(sf_error_value, "size is a tensor on cuda:%d, want a tensor in host memory", (int)t.device_id), NULL;
    }
  } else if (where == SF_CPU && allocate(size, &t) < 0) {
    return NULL;
  }
  PyObject *memory = t.owner;
  Py_XINCREF(memory); // Go takes the other reference
  int rc = sf_window_open(comm, size, signals, where == SF_CPU ? &t : NULL, ms, &at, &task, &e);
  if (rc != SF_DONE) {
    sf_raise(&e);
    Py_XDECREF(memory);
    sf_drain_dropped();
    return NULL;
  }
  window_object *w = (window_object *)sf_task_object(task, window_class, at);
  if (w == NULL) {
    Py_XDECREF(memory);
    return NULL;
  }
  sf_window_tensor(at, &t);
  w->device = where == SF_CPU ? -1 : t.device_id;
  Py_INCREF(self);
  w->handle.held[COMM] = self;
  w->handle.held[MEMORY] = memory;
  Py_XINCREF(given);
  w->handle.held[GIVEN] = given;
  return (PyObject *)w;
}

// Makes a call of a window in host memory, which may wait. t has an owner if the call is a put.
static int in_slices(window_object *w, int what, int64_t rank, int64_t offset, int64_t signal, sf_tensor *t, int64_t ms) {
  uint64_t start = sf_now();
  for (;;) {
    sf_error e = {0, NULL};
    int rc;
    int64_t waited = (int64_t)((sf_now() - start) / 1000000);
    Py_XINCREF((PyObject *)t->owner); // Go takes this reference
    Py_BEGIN_ALLOW_THREADS rc = sf_window_slice(w->handle.at, what, rank, offset, signal, t, sf_slice(-1, 0), ms, waited, &e);
    Py_END_ALLOW_THREADS sf_drain_dropped();
    if (rc == SF_FAILED) sf_raise(&e);
    if (rc != SF_PENDING) return rc == SF_DONE ? 0 : -1;
    if (PyErr_CheckSignals() < 0) return -1;
  }
}

// Makes a call. For a window on devices it goes to the current stream. x may be NULL.
static PyObject *call(PyObject *o, int what, PyObject *rank_arg, PyObject *offset_arg, PyObject *x, PyObject *signal_arg, int64_t signal, PyObject *timeout) {
  window_object *w = (window_object *)o;
  int64_t rank, offset = 0, ms = -1;
  uint64_t stream = SF_COMPLETE;
  sf_tensor t = {0};
  sf_error e = {0, NULL};
  int rc;
  if (sf_enter() < 0 || sf_int64_arg(rank_arg, "rank", &rank) < 0) return NULL;
  if (offset_arg != NULL && sf_int64_arg(offset_arg, "offset", &offset) < 0) return NULL;
  if (signal_arg != NULL && sf_int64_arg(signal_arg, "signal", &signal) < 0) return NULL;
  if (signal_arg != NULL && signal < 0) return PyErr_Format(sf_error_value, "signal is %R, want 0 or more", signal_arg), NULL;
  if (timeout != NULL && timeout != Py_None) {
    if (w->device >= 0) return PyErr_Format(sf_error_value, "timeout_ms is %R, want None: the stream waits, without a limit", timeout), NULL;
    if (sf_timeout_arg(timeout, &ms) < 0) return NULL;
  }
  if (w->device >= 0 && tensor_stream(w->device, &stream) < 0) return NULL;
  if (x != NULL) {
    if (tensor_in(x, &t, "x", -1, 0) < 0) return NULL;
    if (t.nbytes > 0 && (w->device < 0 ? t.device_type != SF_CPU : t.device_type != SF_GPU || t.device_id != w->device)) {
      Py_DECREF((PyObject *)t.owner);
      if (w->device < 0) return PyErr_Format(sf_error_value, "x is on another device, want a tensor in host memory"), NULL;
      return PyErr_Format(sf_error_value, "x is on another device, want a tensor on cuda:%d", (int)w->device), NULL;
    }
  }
  if (w->device < 0) {
    rc = x != NULL && tensors_keep(&t, 1) < 0 ? -1 : in_slices(w, what, rank, offset, signal, &t, ms);
  } else {
    Py_BEGIN_ALLOW_THREADS rc = sf_window_queue(w->handle.at, what, rank, offset, signal, &t, stream, &e);
    Py_END_ALLOW_THREADS if (rc != SF_DONE) sf_raise(&e);
  }
  Py_XDECREF((PyObject *)t.owner);
  if (rc != SF_DONE) return NULL;
  Py_RETURN_NONE;
}

static PyObject *window_put(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"rank", "offset", "x", NULL};
  PyObject *rank, *offset, *x;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "OOO:put", names, &rank, &offset, &x)) return NULL;
  return call(o, SF_WINDOW_PUT, rank, offset, x, NULL, SF_NO_SIGNAL, NULL);
}

static PyObject *window_put_signal(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"rank", "offset", "x", "signal", NULL};
  PyObject *rank, *offset, *x, *signal = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "OOO|O:put_signal", names, &rank, &offset, &x, &signal)) return NULL;
  return call(o, SF_WINDOW_PUT, rank, offset, x, signal, 0, NULL);
}

static PyObject *window_signal(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"rank", "signal", NULL};
  PyObject *rank, *signal = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "O|O:signal", names, &rank, &signal)) return NULL;
  return call(o, SF_WINDOW_SIGNAL, rank, NULL, NULL, signal, 0, NULL);
}

static PyObject *window_wait_signal(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"rank", "signal", "timeout_ms", NULL};
  PyObject *rank, *signal = NULL, *timeout = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "O|O$O:wait_signal", names, &rank, &signal, &timeout)) return NULL;
  return call(o, SF_WINDOW_WAIT, rank, NULL, NULL, signal, 0, timeout);
}

static PyObject *window_flush(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"rank", NULL};
  PyObject *rank;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "O:flush", names, &rank)) return NULL;
  return call(o, SF_WINDOW_FLUSH, rank, NULL, NULL, NULL, 0, NULL);
}

static PyObject *window_close(PyObject *o, PyObject *noargs) {
  uint64_t task;
  (void)noargs;
  if (sf_enter() < 0) return NULL;
  sf_window_close(sf_at(o), &task);
  if (sf_task_finish(task, 0) < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *window_tensor(PyObject *o, void *unused) {
  sf_tensor t;
  (void)unused;
  if (sf_enter() < 0) return NULL;
  PyObject *given = ((sf_handle *)o)->held[GIVEN];
  if (given != NULL) return Py_INCREF(given), given;
  sf_window_tensor(sf_at(o), &t);
  return tensor_over(&t, o);
}

SF_NOT_CREATED(window_new, "Window cannot be created: open_window() returns it")

#define KEYWORDS(f) (PyCFunction)(void (*)(void))(f), METH_VARARGS | METH_KEYWORDS

static PyMethodDef window_methods[] = {
    {"put", KEYWORDS(window_put), DOC_WINDOW_PUT},
    {"put_signal", KEYWORDS(window_put_signal), DOC_WINDOW_PUT_SIGNAL},
    {"signal", KEYWORDS(window_signal), DOC_WINDOW_SIGNAL},
    {"wait_signal", KEYWORDS(window_wait_signal), DOC_WINDOW_WAIT_SIGNAL},
    {"flush", KEYWORDS(window_flush), DOC_WINDOW_FLUSH},
    {"check", sf_handle_check, METH_NOARGS, DOC_WINDOW_CHECK},
    {"close", window_close, METH_NOARGS, DOC_WINDOW_CLOSE},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef window_values[] = {
    {"tensor", window_tensor, NULL, "This rank's memory: bytes, a torch.Tensor where there is PyTorch; or the tensor that open_window() was given.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot window_slots[] = {
    {Py_tp_doc, DOC_WINDOW}, {Py_tp_new, window_new}, {Py_tp_dealloc, sf_handle_dealloc}, {Py_tp_methods, window_methods}, {Py_tp_getset, window_values}, {0, NULL},
};

static PyType_Spec window_spec = {"fserver_lib.Window", sizeof(window_object), 0, Py_TPFLAGS_DEFAULT, window_slots};

int window_init(PyObject *module) {
  return sf_add_class(module, "Window", &window_spec, &window_class);
}
