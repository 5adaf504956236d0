// Tensors in memory that the processes of a host share: empty_shared() and answer_tensor().
#ifndef FSERVER_SHARED_H
#define FSERVER_SHARED_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

// Adds the functions to the module.
int shared_init(PyObject *module);

#endif
