//go:build fserver

#include "shared.h"

#include "_cgo_export.h"
#include "call.h"
#include "docs.h"
#include "handle.h"
#include "tensor.h"

static PyObject *memory_class; // keeps the memory of a tensor of empty_shared()

static PyObject *py_empty_shared(PyObject *self, PyObject *size) {
  sf_error e = {0, NULL};
  sf_tensor t;
  int64_t n;
  uint64_t at;
  (void)self;
  if (sf_enter() < 0 || sf_int64_arg(size, "size", &n) < 0) return NULL;
  int done;
  Py_BEGIN_ALLOW_THREADS // the system clears the memory
  done = sf_shared_alloc(n, &at, &t, &e);
  Py_END_ALLOW_THREADS
  if (done != SF_DONE) return sf_raise(&e);
  PyObject *memory = sf_handle_object(memory_class, at);
  if (memory == NULL) return NULL;
  PyObject *tensor = tensor_over(&t, memory);
  Py_DECREF(memory);
  return tensor;
}

static PyObject *py_answer_tensor(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"handler", "i", NULL};
  PyObject *a[2] = {NULL}; // the arguments
  sf_error e = {0, NULL};
  sf_tensor t;
  uint64_t id, lease;
  int64_t i = 0;
  int have = 0, kept;
  (void)self;
  if (!sf_by_position(args, kw, 1, 2, a) && !PyArg_ParseTupleAndKeywords(args, kw, "O|O:answer_tensor", names, &a[0], &a[1])) return NULL;
  if (sf_enter() < 0 || sf_uint64_arg(a[0], "handler", -1, &id) < 0 || (a[1] != NULL && sf_int64_arg(a[1], "i", &i) < 0)) return NULL;
  if (sf_answer_tensor(id, i, &t, &lease, &have, &e) != SF_DONE) return sf_raise(&e);
  if (!have) Py_RETURN_NONE;
  PyObject *tensor = tensor_out(&t, lease, &kept);
  if (tensor == NULL && !kept) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    sf_release(lease, SF_COMPLETE);
    PyErr_Restore(type, value, trace);
  }
  return tensor;
}

SF_NOT_CREATED(memory_new, "SharedMemory cannot be created: it is the memory of a tensor of empty_shared()")

static PyType_Slot memory_slots[] = {{Py_tp_new, memory_new}, {Py_tp_dealloc, sf_handle_dealloc}, {0, NULL}};

static PyType_Spec memory_spec = {"fserver_lib._SharedMemory", sizeof(sf_handle), 0, Py_TPFLAGS_DEFAULT, memory_slots};

static PyMethodDef functions[] = {
    {"empty_shared", py_empty_shared, METH_O, DOC_EMPTY_SHARED},
    {"answer_tensor", (PyCFunction)(void (*)(void))py_answer_tensor, METH_VARARGS | METH_KEYWORDS, DOC_ANSWER_TENSOR},
    {NULL, NULL, 0, NULL},
};

int shared_init(PyObject *module) {
  if (sf_add_class(module, "_SharedMemory", &memory_spec, &memory_class) < 0) return -1;
  return PyModule_AddFunctions(module, functions);
}
