//go:build fserver

#include "request.h"

#include <stdlib.h>

#include "call.h"
#include "tensor.h"
#include "torch.h"

// A copy of at least this many bytes takes so long that Python's lock is released for it.
#define LONG_COPY (256 << 10)

sf_tensor *tensors_in(PyObject *o, const char *what, PyObject *keys, const char *keys_what, int writable, Py_ssize_t *n) {
  sf_tensor *ts = NULL;
  PyObject *items = sf_sequence(o, what, n), *key_items = NULL;
  Py_ssize_t done = 0, nkeys;
  if (items == NULL) return NULL;
  if (keys != NULL) {
    key_items = sf_sequence(keys, keys_what, &nkeys);
    if (key_items == NULL) goto fail;
    if (nkeys != *n) {
      PyErr_Format(sf_error_value, "%zd %s but %zd %s, want as many", *n, what, nkeys, keys_what);
      goto fail;
    }
  }
  ts = calloc((size_t)*n + 1, sizeof *ts);
  if (ts == NULL) {
    PyErr_NoMemory();
    goto fail;
  }
  for (; done < *n; done++) {
    if (tensor_in(PyTuple_GetItem(items, done), &ts[done], what, done, writable) < 0) goto fail;
    if (keys != NULL && sf_uint64_arg(PyTuple_GetItem(key_items, done), keys_what, done, &ts[done].key) < 0) {
      done++;
      goto fail;
    }
  }
  Py_DECREF(items);
  Py_XDECREF(key_items);
  return ts;
fail:
  tensors_drop(ts, done);
  Py_XDECREF(items);
  Py_XDECREF(key_items);
  return NULL;
}

void tensors_drop(sf_tensor *ts, Py_ssize_t n) {
  for (Py_ssize_t i = 0; ts != NULL && i < n; i++) Py_XDECREF((PyObject *)ts[i].owner);
  free(ts);
}

int tensors_long(const sf_tensor *ts, Py_ssize_t n) {
  int64_t bytes = 0;
  for (Py_ssize_t i = 0; i < n; i++) bytes += ts[i].nbytes;
  return bytes >= LONG_COPY || tensor_gpu(ts, n) >= 0;
}

int sf_ranks_arg(PyObject *o, const char *what, int64_t **out, Py_ssize_t *n) {
  if (o == NULL || o == Py_None) return 0;
  PyObject *items = sf_sequence(o, what, n);
  if (items == NULL) return -1;
  *out = calloc((size_t)*n + 1, sizeof **out);
  int failed = *out == NULL;
  if (failed) PyErr_NoMemory();
  for (Py_ssize_t i = 0; !failed && i < *n; i++) failed = sf_int64_item(PyTuple_GetItem(items, i), what, i, &(*out)[i]) < 0;
  Py_DECREF(items);
  if (failed) {
    free(*out);
    *out = NULL;
  }
  return failed ? -1 : 0;
}

int request_in(PyObject *args, PyObject *kw, const char *format, request *r) {
  static char *names[] = {"push_tensors", "push_keys", "pull_tensors", "pull_keys", "need_event", "servers", NULL};
  PyObject *a[6] = {NULL}; // the arguments
  int need_event = 1;
  if (!sf_by_position(args, kw, 4, 5, a) && !PyArg_ParseTupleAndKeywords(args, kw, format, names, &a[0], &a[1], &a[2], &a[3], &a[4], &a[5]))
    return -1;
  if (sf_bool_arg(a[4], "need_event", &need_event) < 0) return -1;
  int rc = request_of(a[0], a[1], a[2], a[3], a[5], "servers", 0, r);
  r->need_event = need_event;
  return rc;
}

int request_of(PyObject *push, PyObject *push_keys, PyObject *pull, PyObject *pull_keys, PyObject *peers, const char *peers_what, int push_writable, request *r) {
  *r = (request){.need_event = 1};
  if (sf_enter() < 0) return -1;
  r->push = tensors_in(push, "push_tensors", push_keys, "push_keys", push_writable, &r->npush);
  if (r->push != NULL) r->pull = tensors_in(pull, "pull_tensors", pull_keys, "pull_keys", 1, &r->npull);
  if (r->pull != NULL && sf_ranks_arg(peers, peers_what, &r->servers, &r->nservers) == 0) return 0;
  request_drop(r);
  return -1;
}

void request_free(request *r) {
  free(r->push);
  free(r->pull);
  free(r->servers);
}

void request_drop(request *r) {
  tensors_drop(r->push, r->npush);
  tensors_drop(r->pull, r->npull);
  free(r->servers);
}

int32_t request_gpu(const request *r) {
  int32_t device = tensor_gpu(r->push, r->npush);
  return device >= 0 ? device : tensor_gpu(r->pull, r->npull); // work in the stream may still use the pull tensors
}

int32_t request_device(const request *r) { return r->need_event ? request_gpu(r) : -1; }

int request_keep(request *r) {
  if (tensors_keep(r->push, r->npush) == 0 && tensors_keep(r->pull, r->npull) == 0) return 0;
  request_drop(r);
  return -1;
}

int request_long(const request *r) { return tensors_long(r->push, r->npush) || tensor_gpu(r->pull, r->npull) >= 0; }

int tensors_keep(sf_tensor *ts, Py_ssize_t n) {
  if (sf_torch.tensor == NULL) return 0;
  for (Py_ssize_t i = 0; i < n; i++) {
    PyObject *o = ts[i].owner;
    int is_torch = PyObject_IsInstance(o, sf_torch.tensor);
    PyObject *view = is_torch > 0 ? PyObject_CallMethod(o, "detach", NULL) : NULL;
    if (view != NULL) {
      ts[i].owner = view;
      Py_DECREF(o);
    } else if (PyErr_Occurred() && sf_pardon() < 0) {
      return -1;
    }
  }
  return 0;
}
