// Communicators: collectives among nodes of one role.
#ifndef FSERVER_COLLECTIVE_H
#define FSERVER_COLLECTIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

// Adds the classes Communicator and Operation, and the functions of the group's communicator.
int collective_init(PyObject *module);

// Finds the communicator that a method, or a function of the module, is about; the group's is made if it has not
// been. Returns 0, or -1 with an exception.
int sf_comm_ready(PyObject *self, uint64_t *at, int *rank, int *size);

// Whether o is an Operation; and what wait() does with one. timeout may be NULL.
int operation_check(PyObject *o);
PyObject *operation_wait_for(PyObject *o, PyObject *timeout);

// Waits for a task of Go's and drops it. Others may wait for it as well unless it is cancelled, as with
// KeyboardInterrupt if cancel is set. Returns 0, or -1 with an exception.
int sf_task_finish(uint64_t task, int cancel);

#endif
