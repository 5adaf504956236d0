// Answer, the result of respond(): it reports whether the tensors of an answer were sent.
#ifndef FSERVER_ANSWER_H
#define FSERVER_ANSWER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "abi.h"

// Adds the class Answer to the module.
int answer_init(PyObject *module);

// Creates the state of an answer of n tensors. Returns NULL with an exception.
sf_answer *answer_state(Py_ssize_t n);

// Creates an Answer from a state that sf_respond has accepted. It takes over the caller's reference.
PyObject *answer_out(sf_answer *a);

#endif
