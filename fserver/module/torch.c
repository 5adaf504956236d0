//go:build fserver

#include "torch.h"

#include "call.h"
#include "exchange.h"
#include "tensor.h"

torch_parts sf_torch;

// Gets an attribute that may be missing. Returns 1, 0, or -1 with an exception that must not be replaced.
static int maybe_attr(PyObject *o, const char *name, PyObject **out) {
  *out = PyObject_GetAttrString(o, name);
  return *out != NULL ? 1 : sf_pardon();
}

// Gets the types that this PyTorch has, with their codes.
static int find_dtypes(PyObject *m, torch_parts *p) {
  if ((p->codes = PyDict_New()) == NULL) return -1;
  for (int i = 0; i < NDTYPES; i++) {
    if (sf_dtypes[i].name[0] == 'q') continue; // a quantized tensor is more than its bytes
    int found = maybe_attr(m, sf_dtypes[i].name, &p->dtypes[i]); // a later PyTorch may have it
    PyObject *code = found > 0 ? PyLong_FromLong(i) : NULL;
    if (found < 0 || (found > 0 && (code == NULL || PyDict_SetItem(p->codes, p->dtypes[i], code) < 0))) {
      Py_XDECREF(code);
      return -1;
    }
    Py_XDECREF(code);
  }
  return 0;
}

// Fills p. Returns 1, 0 if a part does not exist yet, or -1 with an exception.
static int find_parts(PyObject *m, torch_parts *p) {
  PyObject *c = NULL, *nn = NULL;
  int rc = maybe_attr(m, "Tensor", &p->tensor);
  if (rc > 0) rc = maybe_attr(m, "empty", &p->empty);
  if (rc > 0) rc = maybe_attr(m, "_C", &c);
  if (rc > 0) rc = maybe_attr(c, "_from_dlpack", &p->from_dlpack);
  if (rc > 0 && maybe_attr(c, "_cuda_getCurrentRawStream", &p->current_stream) < 0) rc = -1;
  if (rc > 0 && (maybe_attr(m, "nn", &nn) < 0 || (nn != NULL && maybe_attr(nn, "Parameter", &p->parameter) < 0))) rc = -1;
  Py_XDECREF(c);
  Py_XDECREF(nn);
  if (rc > 0 && (find_dtypes(m, p) < 0 || exchange_find(p->tensor) < 0)) rc = -1;
  return rc > 0 && p->dtypes[FLOAT32] == NULL ? 0 : rc;
}

int torch_ready(void) {
  if (sf_torch.tensor != NULL) return 1;
  torch_parts p = {0};
  PyObject *m = sf_item(PyImport_GetModuleDict(), "torch");
  if (m == NULL) return PyErr_Occurred() ? -1 : 0;
  Py_INCREF(m);
  int rc = find_parts(m, &p);
  Py_DECREF(m);
  if (rc > 0 && sf_torch.tensor == NULL) { // no other thread has set it
    sf_torch = p;
    return 1;
  }
  Py_XDECREF(p.tensor);
  Py_XDECREF(p.parameter);
  Py_XDECREF(p.codes);
  Py_XDECREF(p.from_dlpack);
  Py_XDECREF(p.empty);
  Py_XDECREF(p.current_stream);
  for (int i = 0; i < NDTYPES; i++) Py_XDECREF(p.dtypes[i]);
  return rc;
}

int tensor_stream(int32_t device, uint64_t *stream) {
  int ready = torch_ready();
  if (ready < 0) return -1;
  *stream = 0;
  if (!ready || sf_torch.current_stream == NULL) return 0;
  int found = exchange_stream(device, stream);
  if (found != 0) return found < 0 ? -1 : 0;
  PyObject *id = PyLong_FromLong(device), *s = id != NULL ? PyObject_CallFunctionObjArgs(sf_torch.current_stream, id, NULL) : NULL;
  Py_XDECREF(id);
  if (s == NULL) return -1;
  *stream = PyLong_AsUnsignedLongLong(s);
  Py_DECREF(s);
  return PyErr_Occurred() ? -1 : 0;
}

int32_t tensor_gpu(const sf_tensor *ts, Py_ssize_t n) {
  for (Py_ssize_t i = 0; i < n; i++)
    if (ts[i].device_type == SF_GPU) return ts[i].device_id;
  return -1;
}

int tensor_streams(const sf_tensor *ts, Py_ssize_t n, uint64_t *stream) {
  int32_t device = tensor_gpu(ts, n);
  return device >= 0 ? tensor_stream(device, stream) : 0;
}
