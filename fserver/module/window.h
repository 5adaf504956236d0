// Windows: the result of open_window().
#ifndef FSERVER_WINDOW_H
#define FSERVER_WINDOW_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

// Adds the class Window to the module.
int window_init(PyObject *module);

// open_window(), of the module and of a Communicator.
PyObject *sf_py_open_window(PyObject *self, PyObject *args, PyObject *kw);

#endif
