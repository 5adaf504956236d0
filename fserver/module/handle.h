// Python objects that stand for objects of Go: communicators, operations, exchanges, windows, notifies.
#ifndef FSERVER_HANDLE_H
#define FSERVER_HANDLE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

// The beginning of such an object.
typedef struct {
  PyObject_HEAD
  uint64_t at;       // Go's handle; 0: none
  PyObject *held[3]; // objects that must not end before this one, or NULL
} sf_handle;

// Returns Go's handle of an object.
static inline uint64_t sf_at(PyObject *o) { return ((sf_handle *)o)->at; }

// Makes the object of that class for a handle. The handle may be 0; the caller then sets it later. On failure it drops
// the handle, and returns NULL with an exception.
PyObject *sf_handle_object(PyObject *class, uint64_t at);

// sf_handle_dealloc is the tp_dealloc of these classes.
void sf_handle_dealloc(PyObject *o);

// sf_handle_check is the method check() of the classes whose objects have an error.
PyObject *sf_handle_check(PyObject *o, PyObject *noargs);

// sf_handle_path is the getter of the attribute path of exchanges.
PyObject *sf_handle_path(PyObject *o, void *unused);

// Defines the tp_new of a class that only a call of the module creates.
#define SF_NOT_CREATED(name, text)                                            \
  static PyObject *name(PyTypeObject *type, PyObject *args, PyObject *kw) {   \
    (void)type;                                                               \
    (void)args;                                                               \
    (void)kw;                                                                 \
    PyErr_SetString(sf_error_type, "fserver_lib." text);                      \
    return NULL;                                                              \
  }

// Creates a class and adds it to the module. Returns 0, or -1 with an exception.
int sf_add_class(PyObject *module, const char *name, PyType_Spec *spec, PyObject **class);

#endif
