// Communicators: collectives among nodes of one role.
#ifndef FSERVER_COLLECTIVE_H
#define FSERVER_COLLECTIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

// Adds the classes Communicator and Operation, and the functions of the group's communicator.
int collective_init(PyObject *module);

// Whether o is an Operation; and what wait() does with one. timeout may be NULL.
int operation_check(PyObject *o);
PyObject *operation_wait_for(PyObject *o, PyObject *timeout);

#endif
