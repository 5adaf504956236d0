// PyTorch's tensors by its table of C functions (DLPack 1.3, PyTorch 2.10), for which
// no Python code and no capsule is needed. Without it all of this does nothing.
#ifndef FSERVER_EXCHANGE_H
#define FSERVER_EXCHANGE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "dlpack.h"

// Looks for the table in a class. Returns 0, or -1 with an exception that is not ours.
int exchange_find(PyObject *class);

// Describes a tensor of that class, whose memory, shape and strides stay its own.
// Returns 1, 0 when it cannot be described, or -1 with an exception that is not ours.
int exchange_in(PyObject *o, dl_tensor *d);

// Makes a tensor of m, which it takes over. Returns NULL when that cannot be done, with
// an exception only if it is not ours; m is then still the caller's unless its deleter
// was called.
PyObject *exchange_out(dl_versioned *m);

// Finds the current stream of a GPU. Returns 1, 0 when it cannot tell, or -1 with an exception that is not ours.
int exchange_stream(int32_t device, uint64_t *stream);

#endif
