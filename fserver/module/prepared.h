// Prepared exchanges: the result of prepare().
#ifndef FSERVER_PREPARED_H
#define FSERVER_PREPARED_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

// Adds the class Exchange to the module.
int prepared_init(PyObject *module);

// prepare().
PyObject *sf_py_prepare(PyObject *self, PyObject *args, PyObject *kw);

#endif
