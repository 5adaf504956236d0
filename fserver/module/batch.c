//go:build fserver

#include "batch.h"

#include <stdlib.h>

#include "_cgo_export.h"
#include "tensor.h"

// Returns the batch as (handler, tensors, keys). *used is the number of its tensors that other code returns with
// sf_release: after a success all of them, after a failure those that *made, which may be NULL, or an exception refers
// to.
static PyObject *batch_out(sf_batch *b, int *used, PyObject **made) {
  PyObject *ts = PyList_New(b->n), *keys = PyList_New(b->n), *id = PyLong_FromUnsignedLongLong(b->id);
  int ok = ts != NULL && keys != NULL && id != NULL;
  *used = 0;
  for (int i = 0; ok && i < b->n; i++) {
    int kept = 0;
    PyObject *key = PyLong_FromUnsignedLongLong(b->tensors[i].key);
    PyObject *t = key != NULL ? tensor_out(&b->tensors[i], b->lease, &kept) : NULL;
    ok = t != NULL;
    *used += ok || kept;
    if (ok) {
      PyList_SetItem(keys, i, key);
      PyList_SetItem(ts, i, t);
    } else {
      Py_XDECREF(key);
    }
  }
  PyObject *tuple = ok ? PyTuple_Pack(3, id, ts, keys) : NULL;
  Py_XDECREF(id);
  Py_XDECREF(keys);
  if (tuple != NULL)
    Py_DECREF(ts);
  else
    *made = ts;
  return tuple;
}

PyObject *sf_batches_out(sf_batch *batches, int n, const void *room) {
  int signaled = PyErr_CheckSignals() < 0; // an exception after the return would lose the list
  PyObject *list = signaled ? NULL : PyList_New(n), *made = NULL;
  int i = 0, used = 0; // batches in list, and the used tensors of the batch after them
  for (; list != NULL && i < n; i++) {
    PyObject *b = batch_out(&batches[i], &used, &made);
    if (b == NULL) break;
    PyList_SetItem(list, i, b);
  }
  if (i < n) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace); // the destructors below must not see the exception
    sf_put_back(batches, n);
    for (; i < n; i++, used = 0)
      for (int k = used; k < batches[i].n; k++) sf_release(batches[i].lease, SF_COMPLETE);
    Py_XDECREF(made);
    Py_CLEAR(list);
    PyErr_Restore(type, value, trace);
  }
  if (batches != room) free(batches);
  return list;
}
