//go:build fserver

#include "call.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "_cgo_export.h"
#include "docs.h"

// The largest number of items in a list argument.
#define MAX_ITEMS (1 << 20)

PyObject *sf_error_value, *sf_error_type;
static PyObject *error_base, *error_timeout, *error_connection, *error_finished;
int32_t sf_dropped;

PyObject *sf_raise(sf_error *e) {
  PyObject *kind = error_base;
  if (e->kind == SF_TIMEOUT) kind = error_timeout;
  if (e->kind == SF_CONNECTION) kind = error_connection;
  if (e->kind == SF_VALUE) kind = sf_error_value;
  if (e->kind == SF_FINISHED) kind = error_finished;
  const char *text = e->text != NULL ? e->text : "unknown error";
  // The exception must be an instance. Before Python 3.12 the interpreter otherwise uses the text of a SystemExit as the exit status.
  PyObject *instance = PyObject_CallFunction(kind, "s", text);
  if (instance != NULL) PyErr_SetObject(kind, instance);
  Py_XDECREF(instance);
  free(e->text);
  e->text = NULL;
  return NULL;
}

uint64_t sf_thread(void) { return (uint64_t)pthread_self(); }

void sf_drain_dropped(void) {
  if (__atomic_load_n(&sf_dropped, __ATOMIC_RELAXED) == 0) return; // saves a call of Go
  void *objects[64];
  int n;
  do {
    n = sf_drain(objects, 64);
    for (int i = 0; i < n; i++) Py_DECREF((PyObject *)objects[i]);
  } while (n == 64);
}

int sf_enter(void) {
  if (sf_forked) {
    PyErr_SetString(error_base,
                    "fserver_lib was imported before this process was forked, and its threads do not exist in the child: "
                    "use the start method 'spawn', or import it in the child only");
    return -1;
  }
  sf_drain_dropped();
  return 0;
}

int sf_int64_arg(PyObject *o, const char *what, int64_t *out) { return sf_int64_item(o, what, -1, out); }

int sf_int64_item(PyObject *o, const char *what, Py_ssize_t i, int64_t *out) {
  char name[64];
  PyObject *n = PyNumber_Index(o);
  if (n == NULL) {
    if (!sf_not_ours()) PyErr_Format(sf_error_type, "%s is %R, want an int", sf_name(name, sizeof name, what, i), o);
    return -1;
  }
  long long v = PyLong_AsLongLong(n);
  Py_DECREF(n);
  if (v == -1 && PyErr_Occurred()) {
    PyErr_Format(sf_error_value, "%s is %R, want an int that fits in 64 bits", sf_name(name, sizeof name, what, i), o);
    return -1;
  }
  *out = v;
  return 0;
}

int sf_uint64_arg(PyObject *o, const char *what, Py_ssize_t i, uint64_t *out) {
  char name[64];
  PyObject *n = PyNumber_Index(o);
  if (n == NULL) {
    if (sf_not_ours()) return -1;
    PyErr_Format(sf_error_type, "%s is %R, want an int from 0 to 2**64-1", sf_name(name, sizeof name, what, i), o);
    return -1;
  }
  unsigned long long v = PyLong_AsUnsignedLongLong(n);
  Py_DECREF(n);
  if (v == (unsigned long long)-1 && PyErr_Occurred()) {
    PyErr_Format(sf_error_value, "%s is %R, want an int from 0 to 2**64-1", sf_name(name, sizeof name, what, i), o);
    return -1;
  }
  *out = v;
  return 0;
}

const char *sf_name(char *buf, size_t n, const char *what, Py_ssize_t i) {
  if (i < 0)
    PyOS_snprintf(buf, n, "%s", what);
  else
    PyOS_snprintf(buf, n, "%s[%zd]", what, i);
  return buf;
}

int64_t sf_slice(int64_t ms, uint64_t start) {
  if (ms < 0) return SLICE_MS;
  int64_t left = ms - (int64_t)((sf_now() - start) / 1000000);
  return left >= SLICE_MS ? SLICE_MS : left > 0 ? left : 0;
}

int sf_not_ours(void) {
  return PyErr_Occurred() != NULL && (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError));
}

int sf_pardon(void) {
  if (sf_not_ours()) return -1;
  PyErr_Clear();
  return 0;
}

PyObject *sf_item(PyObject *d, const char *key) {
  PyObject *name = PyUnicode_FromString(key), *item = name != NULL ? PyDict_GetItemWithError(d, name) : NULL;
  Py_XDECREF(name);
  if (item == NULL) (void)sf_pardon();
  return item;
}

int sf_by_position(PyObject *args, PyObject *kw, Py_ssize_t least, Py_ssize_t most, PyObject **out) {
  Py_ssize_t n = PyTuple_Size(args);
  if (kw != NULL || n < least || n > most) return 0;
  for (Py_ssize_t i = 0; i < n; i++) out[i] = PyTuple_GetItem(args, i);
  return 1;
}

int sf_bool_arg(PyObject *o, const char *what, int *out) {
  int yes = o != NULL ? PyObject_IsTrue(o) : *out;
  if (yes >= 0)
    *out = yes;
  else if (!sf_not_ours())
    PyErr_Format(sf_error_type, "%s is %R, want a bool", what, o);
  return yes < 0 ? -1 : 0;
}

int sf_timeout_arg(PyObject *o, int64_t *out) {
  *out = -1;
  if (o == NULL || o == Py_None) return 0;
  if (sf_int64_arg(o, "timeout_ms", out) < 0) return -1;
  if (*out < 0 || *out > NO_LIMIT_MS) {
    PyErr_Format(sf_error_value, "timeout_ms is %R, want 0 or more milliseconds, or None for no limit", o);
    return -1;
  }
  return 0;
}

PyObject *sf_sequence(PyObject *o, const char *what, Py_ssize_t *n) {
  if (PyUnicode_Check(o) || PyBytes_Check(o) || !PySequence_Check(o)) {
    PyErr_Format(sf_error_type, "%s is %R, want a list or another sequence", what, o);
    return NULL;
  }
  Py_ssize_t size = PySequence_Size(o); // a range object may be larger than any memory
  if (size > MAX_ITEMS) {
    PyErr_Format(sf_error_value, "%s has %zd items, want at most %d", what, size, MAX_ITEMS);
    return NULL;
  }
  PyObject *t = size >= 0 ? PySequence_Tuple(o) : NULL;
  if (t == NULL) {
    if (!sf_not_ours()) PyErr_Format(sf_error_type, "%s cannot be read as a sequence", what);
    return NULL;
  }
  *n = PyTuple_Size(t);
  if (*n > MAX_ITEMS) { // its length has changed
    PyErr_Format(sf_error_value, "%s has %zd items, want at most %d", what, *n, MAX_ITEMS);
    Py_CLEAR(t);
  }
  return t;
}

// Makes an exception class and adds it to the module.
static PyObject *exception_of(PyObject *module, const char *name, const char *doc, PyObject *bases, PyObject *members) {
  char full[64] = "fserver_lib.";
  strncat(full, name, sizeof full - strlen(full) - 1);
  PyObject *class = PyErr_NewExceptionWithDoc(full, doc, bases, members);
  if (class == NULL) return NULL;
  Py_INCREF(class); // the module takes one reference
  if (PyModule_AddObject(module, name, class) < 0) {
    Py_DECREF(class);
    Py_CLEAR(class);
  }
  return class;
}

// Makes an exception class whose bases are a class of this module and, if not NULL, a class of
// Python.
static PyObject *exception(PyObject *module, const char *name, const char *doc, PyObject *python) {
  PyObject *bases = python != NULL ? PyTuple_Pack(2, error_base, python) : PyTuple_Pack(1, PyExc_RuntimeError);
  PyObject *class = bases != NULL ? exception_of(module, name, doc, bases, NULL) : NULL;
  Py_XDECREF(bases);
  return class;
}

// Creates the class for the end of a server's loop. It is a SystemExit with the code 0: if the program does not catch
// it, it ends the program.
static PyObject *finished(PyObject *module) {
  PyObject *members = Py_BuildValue("{si}", "code", 0);
  PyObject *class = members != NULL ? exception_of(module, "Finished", DOC_FINISHED, PyExc_SystemExit, members) : NULL;
  Py_XDECREF(members);
  return class;
}

int call_init(PyObject *module) {
  if ((error_base = exception(module, "Error", DOC_ERROR, NULL)) == NULL ||
      (error_timeout = exception(module, "TimeoutError", DOC_TIMEOUT_ERROR, PyExc_TimeoutError)) == NULL ||
      (error_connection = exception(module, "ConnectionError", DOC_CONNECTION_ERROR, PyExc_ConnectionError)) == NULL ||
      (sf_error_value = exception(module, "ValueError", DOC_VALUE_ERROR, PyExc_ValueError)) == NULL ||
      (sf_error_type = exception(module, "TypeError", DOC_TYPE_ERROR, PyExc_TypeError)) == NULL || (error_finished = finished(module)) == NULL)
    return -1;
  return 0;
}
