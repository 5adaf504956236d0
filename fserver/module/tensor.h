// Tensors between Python and Go, without copies: torch.Tensor by its methods, other objects by DLPack.
#ifndef FSERVER_TENSOR_H
#define FSERVER_TENSOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "abi.h"

// Adds the class Tensor to the module.
int tensor_init(PyObject *module);

// Fills t from a tensor of Python. t->owner becomes a reference to the object that keeps the memory. what and i name
// the argument; i is -1 for an argument that is no list. writable: Go will write to the memory. Returns 0, or -1 with
// an exception that names the argument.
int tensor_in(PyObject *o, sf_tensor *t, const char *what, Py_ssize_t i, int writable);

// Prepares tensor_in.
int tensor_in_init(void);

// Returns the tensor of a fserver_lib.Tensor, or NULL if o is no such object.
const sf_tensor *tensor_own(PyObject *o);

// Finds the stream in which Python's current work on a GPU is queued: PyTorch's current stream, or without PyTorch the
// default stream. Returns 0, or -1 with an exception.
int tensor_stream(int32_t device, uint64_t *stream);

// Returns the GPU of the first of n tensors that is on a GPU, or -1. If there is one, a call of Go may copy or wait, so
// the caller releases Python's lock. Other calls are too short for that.
int32_t tensor_gpu(const sf_tensor *ts, Py_ssize_t n);

// Like tensor_stream, for the first of n tensors that is on a GPU. If there is none, *stream does not change.
int tensor_streams(const sf_tensor *ts, Py_ssize_t n, uint64_t *stream);

// Creates a tensor of memory that keeper keeps: a torch.Tensor if torch was imported, else a fserver_lib.Tensor, which
// is never on a GPU.
PyObject *tensor_over(const sf_tensor *t, PyObject *keeper);

// Creates a tensor of the memory of a batch with that lease: a torch.Tensor if torch was imported and has the type,
// else a fserver_lib.Tensor. The tensor calls sf_release once when it is freed. On failure the caller must call
// sf_release, unless *kept is set: then another object has the memory and will call it.
PyObject *tensor_out(const sf_tensor *t, uint64_t lease, int *kept);

#endif
