// Tensors between Python and Go: torch.Tensor by its methods, everything else by
// DLPack, without copies.
#ifndef FSERVER_TENSOR_H
#define FSERVER_TENSOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "abi.h"

// Adds the class Tensor to the module.
int tensor_init(PyObject *module);

// Fills t from a tensor of Python's; t->owner then is a reference to what keeps
// its memory. what and i name the argument, i -1 alone. writable: Go will write
// there. Returns 0, or -1 with an exception that names the argument.
int tensor_in(PyObject *o, sf_tensor *t, const char *what, Py_ssize_t i, int writable);

// Prepares tensor_in.
int tensor_in_init(void);

// What a Tensor of ours describes, or NULL if o is none.
const sf_tensor *tensor_own(PyObject *o);

// Finds the stream that the current work of Python is queued in on a GPU: PyTorch's
// current one, the default stream without PyTorch. Returns 0, or -1 with an exception.
int tensor_stream(int32_t device, uint64_t *stream);

// The GPU of the first of n tensors that lies on one, or -1. With one a call of Go may copy
// or wait: others run in Python meanwhile. Calls without one are too short for that.
int32_t tensor_gpu(const sf_tensor *ts, Py_ssize_t n);

// The same as tensor_stream for the first of n tensors that lies on a GPU; without one
// *stream stays.
int tensor_streams(const sf_tensor *ts, Py_ssize_t n, uint64_t *stream);

// Makes a tensor over memory that keeper keeps: a torch.Tensor when torch was imported, else a
// Tensor, which is never on a GPU.
PyObject *tensor_over(const sf_tensor *t, PyObject *keeper);

// Makes a tensor over memory of a batch with that lease: a torch.Tensor when torch was
// imported and has that type, else a Tensor. It calls sf_release once when it is gone. On
// failure the caller must, unless *kept says that somebody else has the memory and will.
PyObject *tensor_out(const sf_tensor *t, uint64_t lease, int *kept);

#endif
