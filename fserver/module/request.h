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

// Reads them; format is PyArg_ParseTupleAndKeywords's, with the function's name. Returns 0,
// or -1 with an exception.
int request_in(PyObject *args, PyObject *kw, const char *format, request *r);

// The same of arguments that are parsed; peers_what names peers, the ranks, in errors.
int request_of(PyObject *push, PyObject *push_keys, PyObject *pull, PyObject *pull_keys, PyObject *peers, const char *peers_what, int push_writable, request *r);

// Frees r, of which Go has taken over the owners of the tensors.
void request_free(request *r);

// Frees r with the owners.
void request_drop(request *r);

// The GPU whose streams the tensors are used in, or -1 when there is none, or when the
// caller does not want to wait for it.
int32_t request_device(const request *r);

// Whether handing the tensors over may take long: Python's lock is then released.
int request_long(const request *r);
int tensors_long(const sf_tensor *ts, Py_ssize_t n);

// Fills n tensors of list o, and their keys when keys is not NULL. Returns a malloc'ed
// array, or NULL with an exception. n receives the number.
sf_tensor *tensors_in(PyObject *o, const char *what, PyObject *keys, const char *keys_what, int writable, Py_ssize_t *n);

// Frees what tensors_in has returned, which may be NULL, with the owners.
void tensors_drop(sf_tensor *ts, Py_ssize_t n);

// Makes views the owners of torch.Tensors: they keep the memory also when a program gives a
// tensor another one, by "t.data = ...". Returns 0, or -1 with an exception.
int tensors_keep(sf_tensor *ts, Py_ssize_t n);

#endif
