// Signals between GPU and CPU: the class SimpleNotify and the functions on flags.
#ifndef FSERVER_CUDA_H
#define FSERVER_CUDA_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *sf_py_map_pinned_tensor(PyObject *self, PyObject *args);
PyObject *sf_py_write_flag(PyObject *self, PyObject *args);
PyObject *sf_py_wait_flag(PyObject *self, PyObject *args);
PyObject *sf_py_seq_add_one(PyObject *self, PyObject *args);

// Adds the class SimpleNotify to the module.
int cuda_init(PyObject *module);

#endif
