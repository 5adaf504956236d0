//go:build fserver

#include "collective.h"

#include <stdlib.h>

#include "_cgo_export.h"
#include "call.h"
#include "docs.h"
#include "handle.h"
#include "request.h"
#include "tensor.h"
#include "window.h"

static PyObject *comm_class, *operation_class;

// The time to wait for a canceled task.
#define CANCELLED_MS 1000

// Waits for a task. ms < 0 means only the task's own limit; after ms the task ends with a TimeoutError. Returns 0, or
// -1 with an exception. After KeyboardInterrupt the task continues, unless cancel is set.
static int task_wait(uint64_t task, int64_t ms, int cancel) {
  uint64_t start = ms >= 0 ? sf_now() : 0;
  for (;;) {
    sf_error e = {0, NULL};
    int rc;
    int64_t slice = sf_slice(ms, start);
    Py_BEGIN_ALLOW_THREADS rc = sf_task_wait(task, slice, &e);
    Py_END_ALLOW_THREADS if (rc == SF_FAILED) {
      sf_raise(&e);
      return -1;
    }
    if (rc == SF_DONE) return 0;
    if (PyErr_CheckSignals() < 0) {
      if (cancel) {
        sf_task_interrupt(task);
        Py_BEGIN_ALLOW_THREADS sf_task_wait(task, CANCELLED_MS, &e);
        Py_END_ALLOW_THREADS free(e.text);
      }
      return -1;
    }
    if (ms >= 0 && sf_now() - start >= (uint64_t)ms * 1000000) {
      sf_task_cancel(task);
      ms = -1;
    }
  }
}

// Waits for a task and drops it. Unless the task is canceled, other threads may wait for it as well.
int sf_task_finish(uint64_t task, int cancel) {
  int rc = task_wait(task, -1, cancel);
  sf_handle_drop(task);
  sf_drain_dropped();
  return rc;
}

PyObject *sf_task_object(uint64_t task, PyObject *class, uint64_t at) {
  if (sf_task_finish(task, 1) == 0) return sf_handle_object(class, at);
  sf_handle_drop(at);
  return NULL;
}

// Returns the communicator of a method, or of a function of the module.
static uint64_t comm_of(PyObject *self) { return PyObject_TypeCheck(self, (PyTypeObject *)comm_class) ? sf_at(self) : SF_GROUP; }

// Creates the group's communicator.
static int make_group(void) {
  uint64_t task;
  sf_error e = {0, NULL};
  if (sf_comm_group(&task, &e) != SF_DONE) {
    sf_raise(&e);
    return -1;
  }
  return sf_task_finish(task, 0);
}

int sf_comm_ready(PyObject *self, uint64_t *at, int *rank, int *size) {
  sf_error e = {0, NULL};
  *at = comm_of(self);
  int there = sf_comm_place(*at, rank, size, &e);
  if (there == SF_PENDING) { // the first call creates the group's communicator
    if (make_group() < 0) return -1;
    there = sf_comm_place(*at, rank, size, &e);
  }
  if (there != SF_DONE) {
    sf_raise(&e);
    return -1;
  }
  return 0;
}

// Reads a tensor or a list of tensors. If none is set, None stands for no tensor.
static int read_tensors(PyObject *o, const char *what, int list, int writable, int none, sf_tensor **ts, Py_ssize_t *n) {
  *n = 0;
  if (list) return (*ts = tensors_in(o, what, NULL, NULL, writable, n)) != NULL ? 0 : -1;
  *ts = calloc(1, sizeof **ts);
  if (*ts == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  if (o == NULL || o == Py_None) {
    if (none) return 0;
    PyErr_Format(sf_error_type, "%s is None, want a tensor", what);
    return -1;
  }
  if (tensor_in(o, *ts, what, -1, writable) < 0) return -1;
  *n = 1;
  return 0;
}

// The arguments of a collective.
typedef struct {
  const char *format;
  int out_list, in_list;
  int root, reduction; // whether it has them
} shape;

static const shape shapes[] = {
    [SF_ALL_GATHER] = {"OO:all_gather", 0, 0, 0, 0},
    [SF_ALL_GATHER_V] = {"OO:all_gather_v", 1, 0, 0, 0},
    [SF_ALL_TO_ALL] = {"OO:all_to_all", 1, 1, 0, 0},
    [SF_BROADCAST] = {"OO:broadcast", 0, 0, 1, 0},
    [SF_GATHER] = {"OOO:gather", 0, 0, 1, 0},
    [SF_SCATTER] = {"OOO:scatter", 0, 0, 1, 0},
    [SF_REDUCE_SCATTER] = {"OO|O:reduce_scatter", 0, 0, 0, 1},
    [SF_ALL_REDUCE] = {"OO|O:all_reduce", 0, 0, 0, 1},
};

// Returns the GPU of the tensors, or -1. Tensors without bytes do not count.
static int32_t gpu_of(const sf_tensor *ts, Py_ssize_t n) {
  for (Py_ssize_t i = 0; i < n; i++)
    if (ts[i].device_type == SF_GPU && ts[i].nbytes > 0) return ts[i].device_id;
  return -1;
}

static PyObject *collect(PyObject *self, PyObject *args, PyObject *kw, int kind) {
  static char *both[] = {"out", "x", NULL}, *rooted[] = {"out", "x", "root", NULL}, *reduced[] = {"out", "x", "op", NULL}, *one[] = {"x", "root", NULL};
  const shape *s = &shapes[kind];
  PyObject *out = NULL, *x = NULL, *root_arg = NULL, *op = NULL, *text = NULL, *result = NULL;
  sf_tensor *outs = NULL, *ins = NULL;
  Py_ssize_t nout = 0, nin = 0;
  int64_t root = -1;
  uint64_t at = 0, task = 0;
  int rank = 0, size = 0;
  const char *reduction = "sum";
  sf_error e = {0, NULL};
  int ok;
  if (kind == SF_BROADCAST)
    ok = PyArg_ParseTupleAndKeywords(args, kw, s->format, one, &out, &root_arg);
  else
    ok = PyArg_ParseTupleAndKeywords(args, kw, s->format, s->root ? rooted : s->reduction ? reduced : both, &out, &x, s->root ? &root_arg : &op);
  if (!ok || (root_arg != NULL && sf_int64_arg(root_arg, "root", &root) < 0)) return NULL;
  if (op != NULL) {
    if (!PyUnicode_Check(op)) return PyErr_Format(sf_error_type, "op is %R, want 'sum', 'min', 'max' or 'product'", op), NULL;
    text = PyUnicode_AsUTF8String(op);
    if (text == NULL) return NULL;
    reduction = PyBytes_AsString(text);
  }
  if (sf_enter() < 0) goto out;
  if (!s->root)
    at = comm_of(self);
  else if (sf_comm_ready(self, &at, &rank, &size) < 0)
    goto out;
  if (s->root && (root < 0 || root >= size)) {
    PyErr_Format(sf_error_value, "root is %R, want 0 to %d", root_arg, size - 1);
    goto out;
  }
  int writable = kind != SF_BROADCAST || root != rank;
  int ignored = kind == SF_GATHER && root != rank; // out is ignored on ranks other than the root
  if (read_tensors(ignored ? NULL : out, kind == SF_BROADCAST ? "x" : "out", s->out_list, writable, ignored, &outs, &nout) < 0) goto out;
  ignored = kind == SF_BROADCAST || (kind == SF_SCATTER && root != rank);
  if (read_tensors(ignored ? NULL : x, "x", s->in_list, 0, ignored, &ins, &nin) < 0) goto out;
  if (tensors_keep(outs, nout) < 0 || tensors_keep(ins, nin) < 0) goto out;
  uint64_t stream = SF_COMPLETE;
  int32_t gpu = gpu_of(outs, nout);
  if (gpu < 0) gpu = gpu_of(ins, nin);
  if (gpu >= 0 && tensor_stream(gpu, &stream) < 0) goto out;
  result = sf_handle_object(operation_class, 0); // before the call: a lack of memory must not be an error of a call that has begun
  if (result == NULL) goto out;
  int rc;
  for (;;) {
    Py_BEGIN_ALLOW_THREADS rc = sf_comm_call(at, kind, outs, (int)nout, ins, (int)nin, stream, root, (char *)reduction, &task, &e);
    Py_END_ALLOW_THREADS if (rc != SF_PENDING) break;
    if (make_group() < 0) {
      Py_CLEAR(result);
      goto out;
    }
  }
  nout = nin = 0; // Go has taken over the owners
  if (rc == SF_DONE) {
    ((sf_handle *)result)->at = task;
    Py_INCREF(self);
    ((sf_handle *)result)->held[0] = self; // a dropped communicator ends its calls
  } else {
    Py_CLEAR(result);
    sf_raise(&e);
  }
out:
  Py_XDECREF(text);
  tensors_drop(outs, nout);
  tensors_drop(ins, nin);
  sf_drain_dropped(); // the objects of a call that was refused
  return result;
}

#define COLLECTIVE(name, kind) \
  static PyObject *py_##name(PyObject *self, PyObject *args, PyObject *kw) { return collect(self, args, kw, kind); }

COLLECTIVE(all_gather, SF_ALL_GATHER)
COLLECTIVE(all_gather_v, SF_ALL_GATHER_V)
COLLECTIVE(all_to_all, SF_ALL_TO_ALL)
COLLECTIVE(broadcast, SF_BROADCAST)
COLLECTIVE(gather, SF_GATHER)
COLLECTIVE(scatter, SF_SCATTER)
COLLECTIVE(reduce_scatter, SF_REDUCE_SCATTER)
COLLECTIVE(all_reduce, SF_ALL_REDUCE)

// barrier(), rebuild() and close().
static PyObject *wait_for_all(PyObject *self, PyObject *args, PyObject *kw, const char *format, int what) {
  static char *names[] = {"timeout_ms", NULL};
  PyObject *timeout = NULL;
  int64_t ms;
  uint64_t task;
  sf_error e = {0, NULL};
  if (!PyArg_ParseTupleAndKeywords(args, kw, format, names, &timeout) || sf_timeout_arg(timeout, &ms) < 0 || sf_enter() < 0) return NULL;
  if (sf_comm_task(comm_of(self), what, ms, &task, &e) != SF_DONE) return sf_raise(&e);
  if (sf_task_finish(task, 1) < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *comm_barrier(PyObject *self, PyObject *args, PyObject *kw) {
  return wait_for_all(self, args, kw, "|$O:barrier", SF_COMM_BARRIER);
}

static PyObject *py_rebuild(PyObject *self, PyObject *args, PyObject *kw) { return wait_for_all(self, args, kw, "|$O:rebuild", SF_COMM_REBUILD); }

static PyObject *comm_close(PyObject *self, PyObject *args, PyObject *kw) { return wait_for_all(self, args, kw, "|$O:close", SF_COMM_CLOSE); }

static PyObject *comm_new(PyTypeObject *type, PyObject *args, PyObject *kw) {
  static char *names[] = {"ranks", "id", "timeout_ms", NULL};
  PyObject *ranks = NULL, *id_arg = NULL, *timeout = NULL;
  int64_t id = 1, ms = 0, *list = NULL;
  Py_ssize_t n = 0;
  uint64_t at, task;
  sf_error e = {0, NULL};
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|O$OO:Communicator", names, &ranks, &id_arg, &timeout) || sf_enter() < 0) return NULL;
  if (id_arg != NULL && sf_int64_arg(id_arg, "id", &id) < 0) return NULL;
  if (id < 1 || id > 4095) return PyErr_Format(sf_error_value, "id is %R, want 1 to 4095: the group's communicator has 0", id_arg), NULL;
  if (timeout != NULL && timeout != Py_None && sf_timeout_arg(timeout, &ms) < 0) return NULL;
  if (timeout != NULL && timeout != Py_None && ms == 0) return PyErr_Format(sf_error_value, "timeout_ms is 0, want 1 or more milliseconds, or None for the default"), NULL;
  if (sf_ranks_arg(ranks, "ranks", &list, &n) < 0) return NULL;
  int rc = sf_comm_new(id, list, (int)n, ms, &at, &task, &e);
  free(list);
  return rc == SF_DONE ? sf_task_object(task, (PyObject *)type, at) : sf_raise(&e);
}

static PyObject *comm_place(PyObject *o, void *which) {
  int rank, size;
  sf_error e = {0, NULL};
  if (sf_enter() < 0) return NULL;
  if (sf_comm_place(sf_at(o), &rank, &size, &e) != SF_DONE) return sf_raise(&e);
  return PyLong_FromLong(which == NULL ? rank : size);
}

int operation_check(PyObject *o) { return PyObject_TypeCheck(o, (PyTypeObject *)operation_class); }

PyObject *operation_wait_for(PyObject *o, PyObject *timeout) {
  int64_t ms;
  if (sf_enter() < 0 || sf_timeout_arg(timeout, &ms) < 0) return NULL;
  int rc = task_wait(sf_at(o), ms, 0);
  sf_drain_dropped();
  if (rc < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *operation_wait(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"timeout_ms", NULL};
  PyObject *timeout = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|O:wait", names, &timeout)) return NULL;
  return operation_wait_for(o, timeout);
}

SF_NOT_CREATED(operation_new, "Operation cannot be created: all_gather() and other collectives return it")

#define KEYWORDS(f) (PyCFunction)(void (*)(void))(f), METH_VARARGS | METH_KEYWORDS

#define COLLECTIVES(self) \
  {"all_gather", KEYWORDS(py_all_gather), DOC_ALL_GATHER(self)}, {"all_gather_v", KEYWORDS(py_all_gather_v), DOC_ALL_GATHER_V(self)}, \
      {"all_to_all", KEYWORDS(py_all_to_all), DOC_ALL_TO_ALL(self)}, {"broadcast", KEYWORDS(py_broadcast), DOC_BROADCAST(self)}, \
      {"gather", KEYWORDS(py_gather), DOC_GATHER(self)}, {"scatter", KEYWORDS(py_scatter), DOC_SCATTER(self)}, \
      {"reduce_scatter", KEYWORDS(py_reduce_scatter), DOC_REDUCE_SCATTER(self)}, {"all_reduce", KEYWORDS(py_all_reduce), DOC_ALL_REDUCE(self)}, \
      {"open_window", KEYWORDS(sf_py_open_window), DOC_OPEN_WINDOW(self)}, {"rebuild", KEYWORDS(py_rebuild), DOC_REBUILD(self)}

static PyMethodDef functions[] = {COLLECTIVES("$module"), {NULL, NULL, 0, NULL}};

static PyMethodDef comm_methods[] = {
    COLLECTIVES("$self"),
    {"barrier", KEYWORDS(comm_barrier), DOC_COMM_BARRIER},
    {"close", KEYWORDS(comm_close), DOC_COMM_CLOSE},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef comm_values[] = {
    {"rank", comm_place, NULL, "This process's rank in the communicator, from 0.", NULL},
    {"size", comm_place, NULL, "The number of ranks.", (void *)1},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef operation_methods[] = {{"wait", KEYWORDS(operation_wait), DOC_OPERATION_WAIT}, {NULL, NULL, 0, NULL}};

static PyType_Slot comm_slots[] = {
    {Py_tp_doc, DOC_COMMUNICATOR}, {Py_tp_new, comm_new}, {Py_tp_dealloc, sf_handle_dealloc}, {Py_tp_methods, comm_methods}, {Py_tp_getset, comm_values}, {0, NULL},
};
static PyType_Slot operation_slots[] = {
    {Py_tp_doc, DOC_OPERATION}, {Py_tp_new, operation_new}, {Py_tp_dealloc, sf_handle_dealloc}, {Py_tp_methods, operation_methods}, {0, NULL},
};

static PyType_Spec comm_spec = {"fserver_lib.Communicator", sizeof(sf_handle), 0, Py_TPFLAGS_DEFAULT, comm_slots};
static PyType_Spec operation_spec = {"fserver_lib.Operation", sizeof(sf_handle), 0, Py_TPFLAGS_DEFAULT, operation_slots};

int collective_init(PyObject *module) {
  if (sf_add_class(module, "Communicator", &comm_spec, &comm_class) < 0 || sf_add_class(module, "Operation", &operation_spec, &operation_class) < 0) return -1;
  return PyModule_AddFunctions(module, functions);
}
