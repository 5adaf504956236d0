//go:build fserver

#include "tensor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "_cgo_export.h"
#include "call.h"
#include "docs.h"
#include "dtypes.h"
#include "exchange.h"
#include "handle.h"
#include "torch.h"

static PyObject *tensor_class, *s_view;

// Returns one tensor of a batch. Work queued on a GPU may still read it; the library waits for that work.
static void release(const sf_tensor *t, uint64_t lease) {
  uint64_t stream = SF_COMPLETE;
  if (sf_forked) return;
  if (t->device_type == SF_GPU && Py_IsInitialized()) { // PyTorch may call without the GIL
    PyGILState_STATE g = PyGILState_Ensure();
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace); // keeps an exception that is being raised
    if (tensor_stream(t->device_id, &stream) < 0) PyErr_Clear();
    PyErr_Restore(type, value, trace);
    PyGILState_Release(g);
  }
  sf_release(lease, stream);
}

// Tensor is the class of tensors from Go if torch was not imported or lacks the type.
typedef struct {
  PyObject_HEAD sf_tensor t;
  uint64_t lease;   // of a batch, unless keeper is set
  PyObject *keeper; // keeps the memory
} tensor_object;

const sf_tensor *tensor_own(PyObject *o) { return (PyObject *)Py_TYPE(o) == tensor_class ? &((tensor_object *)o)->t : NULL; }

// Memory of a batch in one of DLPack's two forms.
typedef struct {
  union {
    dl_managed plain; // the form in a capsule
    dl_versioned versioned;
  } m;
  int64_t shape[SF_MAX_DIMS + 1], strides[SF_MAX_DIMS + 1];
  sf_tensor tensor;
  uint64_t lease;
  PyObject *keeper; // a Tensor; if NULL, this structure has the lease
  int *gone;        // not NULL while a tensor is created from it: delete_exported then sets *gone and does not release the batch
} exported;

static void delete_exported(exported *x) {
  if (x->gone != NULL) *x->gone = 1;
  if (x->keeper == NULL) {
    if (x->gone == NULL) release(&x->tensor, x->lease);
  } else if (!sf_forked && Py_IsInitialized()) {
    PyGILState_STATE g = PyGILState_Ensure();
    Py_DECREF(x->keeper);
    PyGILState_Release(g);
  }
  free(x);
}

static void delete_plain(dl_managed *m) { delete_exported(m->context); }
static void delete_versioned(dl_versioned *m) { delete_exported(m->context); }

static const char *const plain_name = "dltensor", *const versioned_name = "dltensor_versioned";

static void delete_capsule(PyObject *capsule) {
  // A consumer that has taken ownership of a capsule has renamed it.
  const char *name = PyCapsule_IsValid(capsule, plain_name) ? plain_name : versioned_name;
  if (PyCapsule_IsValid(capsule, name)) delete_exported(PyCapsule_GetPointer(capsule, name));
}

// Returns the address of t's memory, which may be NULL for a tensor without elements.
static void *address(const sf_tensor *t) {
  static char nothing;
  return t->ptr != NULL ? t->ptr : &nothing;
}

// Fills in d, which is part of x. With bytes set, it is a row of uint8.
static void describe(exported *x, dl_tensor *d, const sf_tensor *t, uint64_t lease, PyObject *keeper, int bytes) {
  d->data = address(t);
  d->device.device_type = t->device_type == SF_GPU ? DL_CUDA : DL_CPU;
  d->device.device_id = t->device_type == SF_GPU ? t->device_id : 0;
  if (bytes) {
    d->dtype = (dl_dtype){1, 8, 1};
    d->ndim = 1;
    x->shape[0] = t->nbytes;
  } else {
    d->dtype = sf_type_of(t->dtype);
    d->ndim = t->ndim;
    memcpy(x->shape, t->shape, sizeof t->shape);
  }
  int64_t stride = 1;
  for (int i = d->ndim - 1; i >= 0; i--) {
    x->strides[i] = stride;
    stride *= x->shape[i] > 0 ? x->shape[i] : 1;
  }
  d->shape = x->shape;
  d->strides = x->strides;
  d->byte_offset = 0;
  x->tensor = *t;
  x->lease = lease;
  x->keeper = keeper;
  x->gone = NULL;
}

// Fills in x in the versioned form of DLPack. Only this form can say that the memory is writable.
static void describe_versioned(exported *x, const sf_tensor *t, uint64_t lease, PyObject *keeper) {
  dl_versioned *m = &x->m.versioned;
  describe(x, &m->t, t, lease, keeper, 0);
  m->version = (dl_version){1, 0};
  m->flags = 0;
  m->context = x;
  m->deleter = delete_versioned;
}

// Exports t in the versioned or the unversioned form of DLPack. With bytes set, it exports t in the
// unversioned form, as a row of uint8. *out belongs to the capsule.
static PyObject *export_tensor(const sf_tensor *t, uint64_t lease, PyObject *keeper, int versioned, int bytes, exported **out) {
  exported *x = malloc(sizeof *x);
  if (x == NULL) return PyErr_NoMemory();
  if (versioned) {
    describe_versioned(x, t, lease, keeper);
  } else {
    describe(x, &x->m.plain.t, t, lease, keeper, bytes);
    x->m.plain.context = x;
    x->m.plain.deleter = delete_plain;
  }
  PyObject *capsule = PyCapsule_New(x, versioned ? versioned_name : plain_name, delete_capsule);
  if (capsule == NULL) {
    free(x);
    return NULL;
  }
  Py_XINCREF(keeper);
  *out = x;
  return capsule;
}

// torch_out by PyTorch's table. Returns 1, 0 if a capsule must be used, or -1 with an exception.
static int quick_out(const sf_tensor *t, uint64_t lease, PyObject *keeper, PyObject **out) {
  int gone = 0;
  if (sf_type_of(t->dtype).bits == 0 || (t->device_type == SF_GPU && !sf_torch.gpu)) return 0;
  exported *x = malloc(sizeof *x);
  if (x == NULL) return 0;
  describe_versioned(x, t, lease, keeper);
  x->gone = &gone;
  Py_XINCREF(keeper);
  *out = exchange_out(&x->m.versioned);
  if (*out != NULL) {
    if (!gone)
      x->gone = NULL;
    else if (keeper == NULL) // PyTorch has copied the memory
      release(t, lease);
    return 1;
  }
  if (!gone) {
    Py_XDECREF(keeper);
    free(x);
  } else if (!PyErr_Occurred()) {
    PyErr_SetString(sf_error_value, "PyTorch cannot create a tensor from the pushed memory");
  }
  return PyErr_Occurred() ? -1 : 0;
}

static PyObject *shape_tuple(const sf_tensor *t) {
  PyObject *s = PyTuple_New(t->ndim);
  for (int i = 0; s != NULL && i < t->ndim; i++) {
    PyObject *n = PyLong_FromLongLong(t->shape[i]);
    if (n == NULL || PyTuple_SetItem(s, i, n) < 0) Py_CLEAR(s);
  }
  return s;
}

// Creates a tensor without elements, which needs no memory.
static PyObject *torch_empty(const sf_tensor *t, PyObject *dtype) {
  PyObject *s = shape_tuple(t), *kw = PyDict_New(), *args = s != NULL ? PyTuple_Pack(1, s) : NULL, *r = NULL;
  if (args != NULL && kw != NULL && PyDict_SetItemString(kw, "dtype", dtype) == 0) r = PyObject_Call(sf_torch.empty, args, kw);
  Py_XDECREF(s);
  Py_XDECREF(args);
  Py_XDECREF(kw);
  return r;
}

// Returns PyTorch's type for a code, or NULL if PyTorch has none.
static PyObject *torch_dtype(int32_t code) { return code >= 0 && code < NDTYPES ? sf_torch.dtypes[code] : NULL; }

// Creates a tensor of a type that PyTorch has. If keeper is NULL, the tensor has the lease of the batch. *kept: see
// tensor_out.
static PyObject *torch_out(const sf_tensor *t, uint64_t lease, PyObject *keeper, int *kept) {
  PyObject *dtype = torch_dtype(t->dtype), *r, *v = NULL;
  int direct = sf_dtypes[t->dtype].bits != 0, gone = 0;
  if (t->nbytes == 0) {
    r = torch_empty(t, dtype);
    if (r != NULL && keeper == NULL) release(t, lease);
    return r;
  }
  int done = quick_out(t, lease, keeper, &r);
  if (done != 0) return done > 0 ? r : NULL;
  exported *x;
  PyObject *capsule = export_tensor(t, lease, keeper, 0, !direct, &x);
  if (capsule == NULL) return NULL;
  x->gone = &gone;
  r = PyObject_CallFunctionObjArgs(sf_torch.from_dlpack, capsule, NULL);
  sf_torch.gpu |= r != NULL && t->device_type == SF_GPU;
  if (r != NULL && !direct) {
    PyObject *s = shape_tuple(t);
    v = s != NULL ? PyObject_CallMethodObjArgs(r, s_view, dtype, NULL) : NULL;
    Py_DECREF(r);
    r = v != NULL ? PyObject_CallMethodObjArgs(v, s_view, s, NULL) : NULL;
    Py_XDECREF(v);
    Py_XDECREF(s);
  }
  if (r == NULL) { // keeps the exception; the destructors must not see it
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_DECREF(capsule);
    PyErr_Restore(type, value, trace);
  } else {
    Py_DECREF(capsule);
  }
  if (!gone)
    x->gone = NULL; // the object that refers to x releases the batch
  else if (r != NULL && keeper == NULL) // PyTorch has copied the memory
    release(t, lease);
  *kept = !gone;
  return r;
}

static PyObject *new_tensor(const sf_tensor *t, uint64_t lease, PyObject *keeper) {
  allocfunc alloc = (allocfunc)PyType_GetSlot((PyTypeObject *)tensor_class, Py_tp_alloc);
  tensor_object *o = (tensor_object *)alloc((PyTypeObject *)tensor_class, 0);
  if (o == NULL) return NULL;
  o->t = *t;
  o->t.owner = NULL;
  o->lease = lease;
  Py_XINCREF(keeper);
  o->keeper = keeper;
  return (PyObject *)o;
}

PyObject *tensor_over(const sf_tensor *t, PyObject *keeper) {
  int ready = torch_ready(), kept = 0;
  if (ready < 0) return NULL;
  if (ready > 0 && torch_dtype(t->dtype) != NULL) return torch_out(t, 0, keeper, &kept);
  if (ready > 0) return PyErr_SetString(sf_error_value, "the tensor is of a dtype that this PyTorch does not have"), NULL;
  if (t->device_type == SF_GPU) return PyErr_SetString(sf_error_type, "a tensor on a GPU is a torch.Tensor: import torch first"), NULL;
  return new_tensor(t, 0, keeper);
}

PyObject *tensor_out(const sf_tensor *t, uint64_t lease, int *kept) {
  *kept = 0;
  int ready = torch_ready();
  if (ready < 0) return NULL;
  if (ready && torch_dtype(t->dtype) != NULL) return torch_out(t, lease, NULL, kept);
  return new_tensor(t, lease, NULL);
}

static void tensor_dealloc(PyObject *o) {
  PyTypeObject *type = Py_TYPE(o);
  if (((tensor_object *)o)->keeper != NULL)
    Py_DECREF(((tensor_object *)o)->keeper);
  else
    release(&((tensor_object *)o)->t, ((tensor_object *)o)->lease);
  freefunc f = (freefunc)PyType_GetSlot(type, Py_tp_free);
  f(o);
  Py_DECREF(type);
}

static PyObject *tensor_shape(PyObject *o, void *unused) {
  (void)unused;
  return shape_tuple(&((tensor_object *)o)->t);
}

static const char *dtype_name(const sf_tensor *t) { return t->dtype >= 0 && t->dtype < NDTYPES ? sf_dtypes[t->dtype].name : "unknown"; }

static PyObject *tensor_dtype(PyObject *o, void *unused) {
  (void)unused;
  return PyUnicode_FromString(dtype_name(&((tensor_object *)o)->t));
}

static PyObject *tensor_nbytes(PyObject *o, void *unused) {
  (void)unused;
  return PyLong_FromLongLong(((tensor_object *)o)->t.nbytes);
}

static PyObject *tensor_repr(PyObject *o) {
  PyObject *s = tensor_shape(o, NULL);
  PyObject *r = s != NULL ? PyUnicode_FromFormat("<fserver_lib.Tensor %s%R>", dtype_name(&((tensor_object *)o)->t), s) : NULL;
  Py_XDECREF(s);
  return r;
}

static PyObject *tensor_dlpack_device(PyObject *o, PyObject *noargs) {
  const sf_tensor *t = &((tensor_object *)o)->t;
  (void)noargs;
  return t->device_type == SF_GPU ? Py_BuildValue("(ii)", DL_CUDA, (int)t->device_id) : Py_BuildValue("(ii)", DL_CPU, 0);
}

// A received tensor is complete, so the consumer's stream does not matter. A consumer that supports the
// versioned form gets it, since consumers take the memory of the unversioned form for read-only.
static PyObject *tensor_dlpack(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
  const sf_tensor *t = &((tensor_object *)o)->t;
  PyObject *stream, *version = Py_None, *device = Py_None, *copy = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|$OOOO:__dlpack__", names, &stream, &version, &device, &copy)) return NULL;
  int copied = PyObject_IsTrue(copy);
  if (copied != 0) {
    if (copied > 0) PyErr_SetString(PyExc_BufferError, "a fserver_lib.Tensor makes no copies: copy what from_dlpack returns");
    return NULL;
  }
  if (device != Py_None) {
    PyObject *own = tensor_dlpack_device(o, NULL);
    int same = own != NULL ? PyObject_RichCompareBool(own, device, Py_EQ) : -1;
    if (same == 0) PyErr_Format(PyExc_BufferError, "a fserver_lib.Tensor on DLPack's device %R does not go to %R", own, device);
    Py_XDECREF(own);
    if (same <= 0) return NULL;
  }
  if (sf_type_of(t->dtype).bits == 0) {
    PyErr_Format(sf_error_value, "DLPack has no code for dtype %s", dtype_name(t));
    return NULL;
  }
  long major = 0;
  if (version != Py_None) {
    PyObject *first = PyTuple_Check(version) && PyTuple_Size(version) == 2 ? PyTuple_GetItem(version, 0) : NULL;
    if (first == NULL || !PyLong_Check(first)) {
      PyErr_Format(sf_error_type, "max_version is %R, want None or a tuple of two ints", version);
      return NULL;
    }
    major = PyLong_AsLong(first);
    if (major == -1 && PyErr_Occurred()) return NULL;
  }
  exported *x;
  return export_tensor(t, 0, o, major >= 1, 0, &x);
}

// Returns NumPy's letter for a type, or 0 if NumPy has no such type.
static char numpy_kind(dl_dtype d) {
  int power = d.bits == 8 || d.bits == 16 || d.bits == 32 || d.bits == 64;
  switch (d.code) {
  case 0: return power ? 'i' : 0;
  case 1: return power ? 'u' : 0;
  case 2: return power && d.bits > 8 ? 'f' : 0;
  case 5: return d.bits == 64 || d.bits == 128 ? 'c' : 0;
  case 6: return d.bits == 8 ? 'b' : 0;
  }
  return 0;
}

// numpy.asarray makes a writable array of this in every version of NumPy. Before version 2.1 numpy.from_dlpack makes a
// read-only array.
static PyObject *tensor_array_interface(PyObject *o, void *unused) {
  const sf_tensor *t = &((tensor_object *)o)->t;
  dl_dtype d = sf_type_of(t->dtype);
  char kind = numpy_kind(d), type[8];
  (void)unused;
  if (kind == 0 || t->device_type == SF_GPU) {
    PyErr_Format(PyExc_AttributeError, "a fserver_lib.Tensor of dtype %s%s has no __array_interface__", dtype_name(t),
                 t->device_type == SF_GPU ? " on a GPU" : "");
    return NULL;
  }
  snprintf(type, sizeof type, "<%c%d", kind, d.bits / 8);
  PyObject *shape = shape_tuple(t), *at = shape != NULL ? PyLong_FromVoidPtr(address(t)) : NULL;
  if (at == NULL) {
    Py_XDECREF(shape);
    return NULL;
  }
  return Py_BuildValue("{sNsss(NO)si}", "shape", shape, "typestr", type, "data", at, Py_False, "version", 3);
}

// For types that NumPy does not have, or has only with packages such as ml_dtypes.
static PyObject *tensor_array(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"dtype", "copy", NULL};
  PyObject *dtype = Py_None, *copy = Py_None, *result = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|OO:__array__", names, &dtype, &copy)) return NULL;
  PyObject *numpy = PyImport_ImportModule("numpy");
  int known = numpy_kind(sf_type_of(((tensor_object *)o)->t.dtype)) != 0 && ((tensor_object *)o)->t.device_type != SF_GPU;
  PyObject *view = numpy != NULL ? PyObject_CallMethod(numpy, known ? "asarray" : "from_dlpack", "O", o) : NULL;
  if (view != NULL && copy == Py_None) { // before NumPy 2, array() does not accept copy=None
    result = PyObject_CallMethod(numpy, "asarray", "OO", view, dtype);
  } else if (view != NULL) {
    PyObject *array = PyObject_GetAttrString(numpy, "array");
    PyObject *of = PyTuple_Pack(2, view, dtype), *how = Py_BuildValue("{sO}", "copy", copy);
    if (array != NULL && of != NULL && how != NULL) result = PyObject_Call(array, of, how);
    Py_XDECREF(how);
    Py_XDECREF(of);
    Py_XDECREF(array);
  }
  Py_XDECREF(view);
  Py_XDECREF(numpy);
  return result;
}

static PyMethodDef tensor_methods[] = {
    {"__array__", (PyCFunction)(void (*)(void))tensor_array, METH_VARARGS | METH_KEYWORDS, DOC_TENSOR_ARRAY},
    {"__dlpack__", (PyCFunction)(void (*)(void))tensor_dlpack, METH_VARARGS | METH_KEYWORDS, DOC_TENSOR_DLPACK},
    {"__dlpack_device__", tensor_dlpack_device, METH_NOARGS, DOC_TENSOR_DLPACK_DEVICE},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef tensor_attributes[] = {
    {"shape", tensor_shape, NULL, DOC_TENSOR_SHAPE, NULL},
    {"dtype", tensor_dtype, NULL, DOC_TENSOR_DTYPE, NULL},
    {"nbytes", tensor_nbytes, NULL, DOC_TENSOR_NBYTES, NULL},
    {"__array_interface__", tensor_array_interface, NULL, DOC_TENSOR_ARRAY_INTERFACE, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

// Only Go creates tensors.
static PyObject *tensor_new(PyTypeObject *type, PyObject *args, PyObject *kw) {
  (void)type;
  (void)args;
  (void)kw;
  PyErr_SetString(sf_error_type, "fserver_lib.Tensor cannot be created: get_batch() returns it");
  return NULL;
}

static PyType_Slot tensor_slots[] = {
    {Py_tp_doc, DOC_TENSOR},
    {Py_tp_new, tensor_new},
    {Py_tp_dealloc, tensor_dealloc},
    {Py_tp_repr, tensor_repr},
    {Py_tp_methods, tensor_methods},
    {Py_tp_getset, tensor_attributes},
    {0, NULL},
};

static PyType_Spec tensor_spec = {"fserver_lib.Tensor", sizeof(tensor_object), 0, Py_TPFLAGS_DEFAULT, tensor_slots};

int tensor_init(PyObject *module) {
  if ((s_view = PyUnicode_InternFromString("view")) == NULL) return -1;
  return sf_add_class(module, "Tensor", &tensor_spec, &tensor_class);
}
