//go:build fserver

#include "exchange.h"

#include "call.h"

static const dl_exchange *table;

int exchange_find(PyObject *class) {
  PyObject *capsule = PyObject_GetAttrString(class, "__dlpack_c_exchange_api__");
  const dl_exchange *x = capsule != NULL ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
  Py_XDECREF(capsule); // the table stays until the process ends
  if (x == NULL && sf_pardon() < 0) return -1;
  while (x != NULL && x->version.major > 1) x = x->older;
  if (x != NULL && x->version.major == 1) table = x;
  return 0;
}

int exchange_in(PyObject *o, dl_tensor *d) {
  if (table == NULL || table->tensor_from_object == NULL) return 0;
  if (table->tensor_from_object(o, d) == 0) return 1;
  return sf_pardon();
}

PyObject *exchange_out(dl_versioned *m) {
  void *o = NULL;
  if (table == NULL || table->object_from_managed == NULL) return NULL;
  if (table->object_from_managed(m, &o) == 0) return o;
  sf_pardon();
  return NULL;
}

int exchange_stream(int32_t device, uint64_t *stream) {
  void *s = NULL;
  if (table == NULL || table->current_stream == NULL) return 0;
  if (table->current_stream(DL_CUDA, device, &s) != 0) return sf_pardon();
  *stream = (uint64_t)(uintptr_t)s;
  return 1;
}
