// Answer, what respond() returns: whether the tensors of an answer have left.
#ifndef FSERVER_ANSWER_H
#define FSERVER_ANSWER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "abi.h"

// Adds the class Answer to the module.
int answer_init(PyObject *module);

// Makes the state of an answer of n tensors. Returns NULL with an exception.
sf_answer *answer_state(Py_ssize_t n);

// Makes an Answer of a state that sf_respond has taken. It takes over the caller's hold.
PyObject *answer_out(sf_answer *a);

#endif
