// Communicators: collectives among nodes of one role.
#ifndef FSERVER_COLLECTIVE_H
#define FSERVER_COLLECTIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

// Adds the classes Communicator and Operation, and the functions of the group's communicator.
int collective_init(PyObject *module);

// Finds the communicator of a method, or of a function of the module. The group's communicator is created if necessary.
// Returns 0, or -1 with an exception.
int sf_comm_ready(PyObject *self, uint64_t *at, int *rank, int *size);

// operation_check reports whether o is an Operation. operation_wait_for is wait() of one. timeout may be NULL.
int operation_check(PyObject *o);
PyObject *operation_wait_for(PyObject *o, PyObject *timeout);

// Waits for a task of Go and drops it. If cancel is set, KeyboardInterrupt cancels the task. Unless the task is
// canceled, other threads may wait for it as well. Returns 0, or -1 with an exception.
int sf_task_finish(uint64_t task, int cancel);

// Waits for the task that creates the object of Go with that handle, and makes Python's object of it. On failure it
// drops the handle, and returns NULL with an exception.
PyObject *sf_task_object(uint64_t task, PyObject *class, uint64_t at);

#endif
