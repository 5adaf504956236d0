// The start of each call of the module, its arguments and its exceptions.
#ifndef FSERVER_CALL_H
#define FSERVER_CALL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "abi.h"
#include "fork.h"

// No wait is longer, so that Python can handle signals between waits.
#define SLICE_MS 50

// A time limit longer than any program runs.
#define NO_LIMIT_MS ((int64_t)1 << 40)

// The exceptions for wrong arguments.
extern PyObject *sf_error_value, *sf_error_type;

// Adds the exceptions to the module.
int call_init(PyObject *module);

// Begins every call. Returns -1 with an exception in the child of a fork, else 0.
int sf_enter(void);

// Drops the references to objects that Go no longer needs.
void sf_drain_dropped(void);

// Returns an identifier of the calling thread.
uint64_t sf_thread(void);

// Raises the exception for an error of Go. Returns NULL.
PyObject *sf_raise(sf_error *e);

// Returns the length of the next wait. ms is the limit in milliseconds (below 0: no limit), counted from start, a time
// of sf_now.
int64_t sf_slice(int64_t ms, uint64_t start);

// Reports whether an exception is set, such as KeyboardInterrupt or MemoryError, that must not be replaced by an
// exception of this module.
int sf_not_ours(void);

// Returns a borrowed reference to d[key]; NULL if d has no such key. If an exception is set then, which must not be
// replaced, the key could not be looked up.
PyObject *sf_item(PyObject *d, const char *key);

// Clears the exception of a step that may fail, if one is set. Returns 0, or -1 if the exception must not be replaced;
// it then stays set.
int sf_pardon(void);

// Writes the name of an argument into buf: item i of what, or what itself if i is -1.
const char *sf_name(char *buf, size_t n, const char *what, Py_ssize_t i);

// Each of these reads an argument and returns 0, or -1 with an exception that names the argument.
int sf_int64_arg(PyObject *o, const char *what, int64_t *out);
int sf_int64_item(PyObject *o, const char *what, Py_ssize_t i, int64_t *out);
int sf_uint64_arg(PyObject *o, const char *what, Py_ssize_t i, uint64_t *out);

// A bool. If o is NULL, *out stays as it is.
int sf_bool_arg(PyObject *o, const char *what, int *out);

// A time limit in milliseconds; None is -1.
int sf_timeout_arg(PyObject *o, int64_t *out);

// Returns the items of a sequence, as a tuple or list whose items can be borrowed.
PyObject *sf_sequence(PyObject *o, const char *what, Py_ssize_t *n);

// Reads arguments that were all given by position, in the order of names. Arguments that were left out stay NULL.
// Returns 0 if PyArg_ParseTupleAndKeywords must read them.
int sf_by_position(PyObject *args, PyObject *kw, Py_ssize_t least, Py_ssize_t most, PyObject **out);

#endif
