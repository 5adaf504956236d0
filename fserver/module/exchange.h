// PyTorch's tensors by its table of C functions (DLPack 1.3, PyTorch 2.10), without Python code and capsules. If
// PyTorch has no such table, these functions do nothing.
#ifndef FSERVER_EXCHANGE_H
#define FSERVER_EXCHANGE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "dlpack.h"

// Looks up the table in a class. Returns 0, or -1 with an exception that must not be replaced.
int exchange_find(PyObject *class);

// Describes a tensor of that class. Memory, shape and strides remain the tensor's. Returns 1, 0 if it cannot be
// described, or -1 with an exception that must not be replaced.
int exchange_in(PyObject *o, dl_tensor *d);

// Creates a tensor of m and takes ownership of m. Returns NULL if it cannot, with an exception only if that must not be
// replaced; m then remains the caller's unless its deleter was called.
PyObject *exchange_out(dl_versioned *m);

// Finds the current stream of a GPU. Returns 1, 0 if it is not known, or -1 with an exception that must not be
// replaced.
int exchange_stream(int32_t device, uint64_t *stream);

#endif
