// Answer, the result of respond(): it reports whether the tensors of an answer were sent.
#ifndef FSERVER_ANSWER_H
#define FSERVER_ANSWER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "abi.h"

// Adds the class Answer to the module.
int answer_init(PyObject *module);

// Creates an Answer of n tensors, for sf_respond. It is created before the answer is sent, so that a lack of memory is
// not an error of an answer that was sent. Returns NULL with an exception.
PyObject *answer_make(Py_ssize_t n);

// Returns the state of an Answer.
sf_answer *answer_state(PyObject *o);

#endif
