//go:build fserver

#include "handle.h"

#include <stdlib.h>

#include "_cgo_export.h"
#include "call.h"

PyObject *sf_handle_object(PyObject *class, uint64_t at) {
  allocfunc alloc = (allocfunc)PyType_GetSlot((PyTypeObject *)class, Py_tp_alloc);
  PyObject *o = alloc((PyTypeObject *)class, 0);
  if (o != NULL)
    ((sf_handle *)o)->at = at;
  else if (at != 0)
    sf_handle_drop(at);
  return o;
}

void sf_handle_dealloc(PyObject *o) {
  sf_handle *h = (sf_handle *)o;
  PyTypeObject *type = Py_TYPE(o);
  if (!sf_forked && h->at != 0) {
    PyObject *kind, *value, *trace; // an object may end while an exception is on its way
    PyErr_Fetch(&kind, &value, &trace);
    sf_handle_drop(h->at);
    sf_drain_dropped();
    PyErr_Restore(kind, value, trace);
  }
  for (int i = 0; i < 3; i++) Py_XDECREF(h->held[i]);
  freefunc f = (freefunc)PyType_GetSlot(type, Py_tp_free);
  f(o);
  Py_DECREF(type);
}

PyObject *sf_handle_check(PyObject *o, PyObject *noargs) {
  sf_error e = {0, NULL};
  (void)noargs;
  if (sf_enter() < 0) return NULL;
  if (sf_handle_error(sf_at(o), &e) != SF_DONE) return sf_raise(&e);
  Py_RETURN_NONE;
}

PyObject *sf_handle_path(PyObject *o, void *unused) {
  (void)unused;
  if (sf_enter() < 0) return NULL;
  char *text = NULL;
  Py_BEGIN_ALLOW_THREADS sf_path(sf_at(o), &text);
  Py_END_ALLOW_THREADS PyObject *path = PyUnicode_FromString(text);
  free(text);
  return path;
}

int sf_add_class(PyObject *module, const char *name, PyType_Spec *spec, PyObject **class) {
  *class = PyType_FromSpec(spec);
  if (*class == NULL) return -1;
  Py_INCREF(*class);
  return PyModule_AddObject(module, name, *class);
}
