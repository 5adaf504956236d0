// Prepared GPU exchanges: the result of prepare_streams().
#ifndef FSERVER_STREAMS_H
#define FSERVER_STREAMS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

// Adds the class StreamExchange to the module.
int streams_init(PyObject *module);

// prepare_streams().
PyObject *sf_py_prepare_streams(PyObject *self, PyObject *args, PyObject *kw);

#endif
