// What every call of the module needs: its beginning, its arguments and its exceptions.
#ifndef FSERVER_CALL_H
#define FSERVER_CALL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "abi.h"
#include "fork.h"

// Nothing is waited for longer, so that Python may look after signals.
#define SLICE_MS 50

// A time limit that is as good as none.
#define NO_LIMIT_MS ((int64_t)1 << 40)

// The exceptions for wrong arguments.
extern PyObject *sf_error_value, *sf_error_type;

// Adds the exceptions to the module.
int call_init(PyObject *module);

// Begins every call: -1 with an exception after a fork, else 0.
int sf_enter(void);

// Drops the references to objects that Go no longer needs.
void sf_drain_dropped(void);

// The calling thread, for Go.
uint64_t sf_thread(void);

// Raises the exception for an error of Go's. Returns NULL.
PyObject *sf_raise(sf_error *e);

// How long to wait at once, of ms milliseconds (below 0: no limit) from start, by sf_now.
int64_t sf_slice(int64_t ms, uint64_t start);

// Whether an exception such as KeyboardInterrupt is set, which must not become one
// of ours.
int sf_not_ours(void);

// Clears the exception of a step that may fail, if one is set. Returns 0, or -1 when it
// is one that must not become ours, which stays.
int sf_pardon(void);

// Writes the name of an argument into buf: item i of what, or what if i is -1.
const char *sf_name(char *buf, size_t n, const char *what, Py_ssize_t i);

// These read an argument and return 0, or -1 with an exception that names it.
int sf_int64_arg(PyObject *o, const char *what, int64_t *out);
int sf_uint64_arg(PyObject *o, const char *what, Py_ssize_t i, uint64_t *out);

// A bool; NULL leaves *out as it is.
int sf_bool_arg(PyObject *o, int *out);

// A time limit in milliseconds; None is -1.
int sf_timeout_arg(PyObject *o, int64_t *out);

// The items of a sequence, as a tuple or list whose items can be borrowed.
PyObject *sf_sequence(PyObject *o, const char *what, Py_ssize_t *n);

// Reads arguments that were all given by position, in the order of names; those left
// out stay NULL. Returns 0 when PyArg_ParseTupleAndKeywords must do it.
int sf_by_position(PyObject *args, PyObject *kw, Py_ssize_t least, Py_ssize_t most, PyObject **out);

#endif
