// Signals between GPU and CPU: the class SimpleNotify and the functions on flags.
#ifndef FSERVER_CUDA_H
#define FSERVER_CUDA_H

#include "tensor.h"

// Of module.c: raises what Go says, begins every call, reads an int, waits for nothing
// longer than SLICE_MS, and turns n batches into a list; it frees them unless they are in
// room.
#define SLICE_MS 50 // after which Python may look after signals again
PyObject *sf_raise(sf_error *e);
int sf_enter(void);
int sf_int64_arg(PyObject *o, const char *what, int64_t *out);
PyObject *sf_batches_out(sf_batch *batches, int n, const void *room);

PyObject *sf_py_map_pinned_tensor(PyObject *self, PyObject *args);
PyObject *sf_py_write_flag(PyObject *self, PyObject *args);
PyObject *sf_py_wait_flag(PyObject *self, PyObject *args);
PyObject *sf_py_seq_add_one(PyObject *self, PyObject *args);

// Adds the class SimpleNotify to the module. value is the exception for wrong arguments.
int cuda_init(PyObject *module, PyObject *value);

#endif
