// The tensors, keys and servers of a request, from Python's arguments.
#ifndef FSERVER_REQUEST_H
#define FSERVER_REQUEST_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "abi.h"

// The arguments of push_pull() and prepare().
typedef struct {
  sf_tensor *push, *pull;
  Py_ssize_t npush, npull;
  int64_t *servers; // NULL for all
  Py_ssize_t nservers;
  int need_event;
} request;

// Reads the arguments. format is a format of PyArg_ParseTupleAndKeywords, with the function's name. Returns 0, or -1
// with an exception.
int request_in(PyObject *args, PyObject *kw, const char *format, request *r);

// Like request_in, for arguments that are parsed already. peers_what is the name of peers, the ranks, in errors.
int request_of(PyObject *push, PyObject *push_keys, PyObject *pull, PyObject *pull_keys, PyObject *peers, const char *peers_what, int push_writable, request *r);

// Frees r after Go has taken over the owners of the tensors.
void request_free(request *r);

// Frees r and the owners.
void request_drop(request *r);

// Calls tensors_keep for the tensors of r. On failure it drops r.
int request_keep(request *r);

// Returns the GPU of the tensors, or -1.
int32_t request_gpu(const request *r);

// Reads ranks. *out is malloc'ed, or NULL for None, which means all. Returns 0, or -1 with an exception.
int sf_ranks_arg(PyObject *o, const char *what, int64_t **out, Py_ssize_t *n);

// Returns the GPU whose current stream the request waits for, or -1 if there is none or the caller does not want to
// wait.
int32_t request_device(const request *r);

// Reports whether passing the tensors to Go may take long. The caller then releases Python's lock.
int request_long(const request *r);
int tensors_long(const sf_tensor *ts, Py_ssize_t n);

// Reads the n tensors of list o, and their keys if keys is not NULL. Returns a malloc'ed array, or NULL with an
// exception.
sf_tensor *tensors_in(PyObject *o, const char *what, PyObject *keys, const char *keys_what, int writable, Py_ssize_t *n);

// Frees the result of tensors_in, which may be NULL, and the owners.
void tensors_drop(sf_tensor *ts, Py_ssize_t n);

// Makes views the owners of torch.Tensors. A view keeps the memory even if the program assigns another tensor's memory
// with "t.data = ...". Returns 0, or -1 with an exception.
int tensors_keep(sf_tensor *ts, Py_ssize_t n);

#endif
