//go:build fserver

#include "tensor.h"

#include <stdlib.h>
#include <string.h>

#include "_cgo_export.h"
#include "dlpack.h"
#include "docs.h"
#include "exchange.h"

#define TAKEN "fserver_lib.dltensor"

// Element types: PyTorch's code is the index. dl code and bits are 0 where DLPack
// or a PyTorch of 2022 has no such type.
static const struct {
  const char *name;
  uint8_t size, code, bits;
} dtypes[] = {
    {"uint8", 1, 1, 8},      {"int8", 1, 0, 8},       {"int16", 2, 0, 16},     {"int32", 4, 0, 32},
    {"int64", 8, 0, 64},     {"float16", 2, 2, 16},   {"float32", 4, 2, 32},   {"float64", 8, 2, 64},
    {"complex32", 4, 0, 0},  {"complex64", 8, 5, 64}, {"complex128", 16, 5, 128}, {"bool", 1, 0, 0},
    {"qint8", 1, 0, 0},      {"quint8", 1, 0, 0},     {"qint32", 4, 0, 0},     {"bfloat16", 2, 4, 16},
    {"quint4x2", 1, 0, 0},   {"quint2x4", 1, 0, 0},   {"bits1x8", 1, 0, 0},    {"bits2x4", 1, 0, 0},
    {"bits4x2", 1, 0, 0},    {"bits8", 1, 0, 0},      {"bits16", 2, 0, 0},     {"float8_e5m2", 1, 0, 0},
    {"float8_e4m3fn", 1, 0, 0}, {"float8_e5m2fnuz", 1, 0, 0}, {"float8_e4m3fnuz", 1, 0, 0}, {"uint16", 2, 0, 0},
    {"uint32", 4, 0, 0},     {"uint64", 8, 0, 0},     {"uint1", 1, 0, 0},      {"uint2", 1, 0, 0},
    {"uint3", 1, 0, 0},      {"uint4", 1, 0, 0},      {"uint5", 1, 0, 0},      {"uint6", 1, 0, 0},
    {"uint7", 1, 0, 0},      {"int1", 1, 0, 0},       {"int2", 1, 0, 0},       {"int3", 1, 0, 0},
    {"int4", 1, 0, 0},       {"int5", 1, 0, 0},       {"int6", 1, 0, 0},       {"int7", 1, 0, 0},
    {"float8_e8m0fnu", 1, 0, 0}, {"float4_e2m1fn_x2", 1, 0, 0}, {"float8_e8m0fnu_x4", 4, 0, 0},
};
enum { NDTYPES = sizeof dtypes / sizeof dtypes[0], UINT8 = 0, INT8 = 1, FLOAT32 = 6, COMPLEX32 = 8, COMPLEX128 = 10, BOOL = 11, UINT16 = 27, UINT32 = 28, UINT64 = 29 };

static PyObject *error_value, *error_type, *tensor_class;

// Whether the library was built with CUDA, and what is said of a GPU's tensors if not.
static int cuda;
#define NO_CUDA "want cpu: this build has no CUDA; build with \"make USE_CUDA=1\", see docs/gpu.md"

// What is needed of torch, found when the first tensor comes after its import.
typedef struct {
  PyObject *tensor;    // torch.Tensor
  PyObject *parameter; // torch.nn.Parameter, or NULL
  PyObject *codes;     // dict: torch.dtype -> int
  PyObject *dtypes[NDTYPES];
  PyObject *from_dlpack, *empty;
  PyObject *current_stream; // NULL in a PyTorch without CUDA
  int gpu;                  // from_dlpack has made a tensor on a GPU: it prepares PyTorch for that
} torch_parts;

static torch_parts torch;

// Gives back one tensor of a batch. Work that is queued on a GPU may still read it:
// the library waits for that.
static void release(const sf_tensor *t, uint64_t lease) {
  uint64_t stream = SF_COMPLETE;
  if (sf_forked) return;
  if (t->device_type == SF_GPU && Py_IsInitialized()) { // PyTorch may call without the GIL
    PyGILState_STATE g = PyGILState_Ensure();
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace); // one that is on its way up
    if (tensor_stream(t->device_id, &stream) < 0) PyErr_Clear();
    PyErr_Restore(type, value, trace);
    PyGILState_Release(g);
  }
  sf_release(lease, stream);
}

// Names that are looked up for every tensor.
static PyObject *s_contiguous, *s_device, *s_type, *s_data_ptr, *s_dtype, *s_shape, *s_dlpack, *s_view, *s_interface, *s_is_conj, *s_is_neg, *s_index,
    *s_dlpack_device, *s_is_cpu;

// label is the name of an argument for errors: item i of what, or what if i is -1.
typedef struct {
  const char *what;
  Py_ssize_t i;
  char buf[64];
} label;

static const char *named(label *name) { return sf_name(name->buf, sizeof name->buf, name->what, name->i); }

const char *sf_name(char *buf, size_t n, const char *what, Py_ssize_t i) {
  if (i < 0)
    PyOS_snprintf(buf, n, "%s", what);
  else
    PyOS_snprintf(buf, n, "%s[%zd]", what, i);
  return buf;
}

int sf_not_ours(void) { return PyErr_Occurred() != NULL && !PyErr_ExceptionMatches(PyExc_Exception); }

int sf_pardon(void) {
  if (sf_not_ours()) return -1;
  PyErr_Clear();
  return 0;
}

// Gets an attribute that may be missing. Returns 1, 0, or -1 with an exception that is
// not ours.
static int maybe_attr(PyObject *o, const char *name, PyObject **out) {
  *out = PyObject_GetAttrString(o, name);
  return *out != NULL ? 1 : sf_pardon();
}

// Gets the types that this PyTorch has, with their codes.
static int find_dtypes(PyObject *m, torch_parts *p) {
  if ((p->codes = PyDict_New()) == NULL) return -1;
  for (int i = 0; i < NDTYPES; i++) {
    if (dtypes[i].name[0] == 'q') continue; // quantised tensors are more than their bytes
    int found = maybe_attr(m, dtypes[i].name, &p->dtypes[i]); // a later PyTorch may
    PyObject *code = found > 0 ? PyLong_FromLong(i) : NULL;
    if (found < 0 || (found > 0 && (code == NULL || PyDict_SetItem(p->codes, p->dtypes[i], code) < 0))) {
      Py_XDECREF(code);
      return -1;
    }
    Py_XDECREF(code);
  }
  return 0;
}

// Fills p. Returns 1, 0 when something is not there yet, or -1 with an exception.
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

// Finds torch if the program has imported it. Returns 1, 0 also while another
// thread imports it, or -1 with an exception.
static int torch_ready(void) {
  if (torch.tensor != NULL) return 1;
  torch_parts p = {0};
  PyObject *m = PyDict_GetItemString(PyImport_GetModuleDict(), "torch"); // borrowed, as the dict
  if (m == NULL) return 0;
  Py_INCREF(m);
  int rc = find_parts(m, &p);
  Py_DECREF(m);
  if (rc > 0 && torch.tensor == NULL) { // no other thread was faster
    torch = p;
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
  if (!ready || torch.current_stream == NULL || exchange_stream(device, stream)) return 0;
  PyObject *id = PyLong_FromLong(device), *s = id != NULL ? PyObject_CallFunctionObjArgs(torch.current_stream, id, NULL) : NULL;
  Py_XDECREF(id);
  if (s == NULL) return -1;
  *stream = PyLong_AsUnsignedLongLong(s);
  Py_DECREF(s);
  return PyErr_Occurred() ? -1 : 0;
}

int tensor_on_gpu(const sf_tensor *ts, Py_ssize_t n) {
  for (Py_ssize_t i = 0; i < n; i++)
    if (ts[i].device_type == SF_GPU) return 1;
  return 0;
}

int tensor_streams(const sf_tensor *ts, Py_ssize_t n, uint64_t *stream) {
  for (Py_ssize_t i = 0; i < n; i++)
    if (ts[i].device_type == SF_GPU) return tensor_stream(ts[i].device_id, stream);
  return 0;
}

static int set_shape(sf_tensor *t, Py_ssize_t ndim, label *name) {
  if (ndim > SF_MAX_DIMS) {
    PyErr_Format(error_value, "%s has %zd dimensions, want at most %d", named(name), ndim, SF_MAX_DIMS);
    return -1;
  }
  t->ndim = (int32_t)ndim;
  return 0;
}

// Fills in the length. The sizes are checked for overflow again in Go.
static int set_bytes(sf_tensor *t, label *name) {
  int64_t n = dtypes[t->dtype].size;
  for (int i = 0; i < t->ndim; i++) {
    if (t->shape[i] == 0) {
      t->nbytes = 0;
      return 0;
    }
  }
  for (int i = 0; i < t->ndim; i++) {
    if (t->shape[i] < 0 || n > INT32_MAX / t->shape[i]) {
      PyErr_Format(error_value, "%s is larger than the %d bytes that a message has room for", named(name), INT32_MAX);
      return -1;
    }
    n *= t->shape[i];
  }
  t->nbytes = n;
  return 0;
}

// The functions from here to torch_lazy return -1 with an exception that is not ours.

// The C string of a str attribute of an object, in buf; "" when it has none.
static int attr_text(PyObject *o, PyObject *attr, char *buf, size_t n) {
  buf[0] = 0;
  PyObject *s = PyObject_GetAttr(o, attr), *b = s != NULL ? PyUnicode_AsUTF8String(s) : NULL;
  if (b != NULL) PyOS_snprintf(buf, n, "%s", PyBytes_AsString(b));
  Py_XDECREF(s);
  Py_XDECREF(b);
  return b != NULL ? 0 : sf_pardon();
}

// Whether a method without arguments returns True; it may be missing.
static int is(PyObject *o, PyObject *method) {
  PyObject *x = PyObject_CallMethodObjArgs(o, method, NULL);
  int yes = x != NULL ? PyObject_IsTrue(x) : -1;
  Py_XDECREF(x);
  return yes >= 0 ? yes : sf_pardon();
}

// Whether an attribute is True; it may be missing.
static int has(PyObject *o, PyObject *attr) {
  PyObject *x = PyObject_GetAttr(o, attr);
  Py_XDECREF(x);
  return x != NULL ? x == Py_True : sf_pardon();
}

// Whether a view has the memory of another tensor, and other values.
static int torch_lazy(PyObject *o, int32_t dtype) {
  int conj = dtype >= COMPLEX32 && dtype <= COMPLEX128 ? is(o, s_is_conj) : 0;
  return conj != 0 ? conj : is(o, s_is_neg);
}

// DLPack 1.1's types of 8-bit floats, and PyTorch's codes for them.
static const struct {
  uint8_t type;
  int32_t dtype;
} float8[] = {{10, 24}, {11, 26}, {12, 23}, {13, 25}, {14, 44}};

// PyTorch's code for DLPack's element type, or -1.
static int code_of(dl_dtype d) {
  if (d.lanes != 1 || d.bits == 0) return -1;
  if (d.code == 6 && d.bits == 8) return BOOL;
  if (d.code == 1 && d.bits == 16) return UINT16;
  if (d.code == 1 && d.bits == 32) return UINT32;
  if (d.code == 1 && d.bits == 64) return UINT64;
  if (d.code == 5 && d.bits == 32) return COMPLEX32;
  for (size_t i = 0; d.bits == 8 && i < sizeof float8 / sizeof float8[0]; i++)
    if (float8[i].type == d.code) return float8[i].dtype;
  for (int i = 0; i < NDTYPES; i++)
    if (dtypes[i].bits == d.bits && dtypes[i].code == d.code) return i;
  return -1;
}

// torch_in by PyTorch's table, for tensors of no subclass. Returns 1, 0 when torch_in
// must read it or say what is wrong with it, or -1 with an exception.
static int torch_quick(PyObject *o, sf_tensor *t) {
  dl_tensor d;
  int rc = exchange_in(o, &d);
  if (rc <= 0) return rc;
  int gpu = cuda && d.device.device_type == DL_CUDA, dtype = code_of(d.dtype);
  if (dtype == UINT8 || dtype == INT8) { // or a type of fewer bits
    PyObject *own = PyObject_GetAttr(o, s_dtype);
    Py_XDECREF(own);
    if (own == NULL) return sf_pardon();
    if (own != torch.dtypes[dtype]) return 0;
  }
  if ((!gpu && d.device.device_type != DL_CPU) || dtype < 0 || d.ndim < 0 || d.ndim > SF_MAX_DIMS || (d.ndim > 0 && d.strides == NULL)) return 0;
  int64_t n = 1, bytes = dtypes[dtype].size; // n is of the dimensions so far
  for (int i = d.ndim - 1; i >= 0; i--) {
    int64_t size = t->shape[i] = d.shape[i];
    if (size <= 0 || (size != 1 && d.strides[i] != n) || n > INT32_MAX / bytes / size) return 0;
    n *= size;
  }
  t->ptr = (char *)d.data + d.byte_offset;
  int lazy = d.data != NULL ? torch_lazy(o, dtype) : 1;
  if (lazy != 0) return lazy < 0 ? -1 : 0;
  t->nbytes = n * bytes;
  t->ndim = d.ndim;
  t->dtype = dtype;
  t->device_type = gpu ? SF_GPU : SF_CPU;
  t->device_id = gpu ? d.device.device_id : 0;
  Py_INCREF(o);
  t->owner = o;
  return 1;
}

// Whether a torch.Tensor is of no subclass that could see things differently.
static int plain(PyObject *o) {
  PyObject *class = (PyObject *)Py_TYPE(o);
  return class == torch.tensor || class == torch.parameter;
}

static int torch_device(PyObject *o, sf_tensor *t, label *name) {
  char device[16];
  t->device_type = SF_CPU;
  int on_cpu = plain(o) ? has(o, s_is_cpu) : 0; // by far cheaper than the rest
  if (on_cpu != 0) return on_cpu < 0 ? -1 : 0;
  PyObject *x = PyObject_GetAttr(o, s_device);
  if (x == NULL) return -1;
  if (attr_text(x, s_type, device, sizeof device) < 0) {
    Py_DECREF(x);
    return -1;
  }
  int gpu = strcmp(device, "cuda") == 0;
  if ((!gpu || !cuda) && strcmp(device, "cpu") != 0) {
    PyErr_Format(error_value, gpu ? "%s is on device %S, " NO_CUDA : "%s is on device %S, want cpu or cuda: this build has no backend for it", named(name), x);
    Py_DECREF(x);
    return -1;
  }
  t->device_type = gpu ? SF_GPU : SF_CPU;
  if (gpu) {
    PyObject *index = PyObject_GetAttr(x, s_index);
    t->device_id = index != NULL ? (int32_t)PyLong_AsLong(index) : -1;
    Py_XDECREF(index);
  }
  Py_DECREF(x);
  return PyErr_Occurred() ? -1 : 0;
}

static int torch_in(PyObject *o, sf_tensor *t, label *name) {
  if (torch_device(o, t, name) < 0) return -1;
  int contiguous = is(o, s_contiguous);
  if (contiguous < 0) return -1;
  if (!contiguous) {
    PyErr_Format(error_value, "%s is not contiguous, want a contiguous tensor: call .contiguous() and keep the result", named(name));
    return -1;
  }
  PyObject *x = PyObject_GetAttr(o, s_dtype);
  PyObject *code = x != NULL ? PyDict_GetItemWithError(torch.codes, x) : NULL; // borrowed
  if (code == NULL) {
    if (sf_pardon() == 0)
      PyErr_Format(error_value, "%s has dtype %S, which is not supported", named(name), x != NULL ? x : Py_None);
    Py_XDECREF(x);
    return -1;
  }
  t->dtype = (int32_t)PyLong_AsLong(code);
  Py_DECREF(x);
  int lazy = torch_lazy(o, t->dtype);
  if (lazy < 0) return -1;
  if (lazy) {
    PyErr_Format(error_value, "%s is a conjugate or negative view: call .resolve_conj().resolve_neg() and keep the result", named(name));
    return -1;
  }

  x = PyObject_GetAttr(o, s_shape); // a tuple
  Py_ssize_t ndim = x != NULL ? PyTuple_Size(x) : -1;
  if (ndim < 0 || set_shape(t, ndim, name) < 0) {
    Py_XDECREF(x);
    return -1;
  }
  for (Py_ssize_t d = 0; d < ndim; d++) t->shape[d] = PyLong_AsLongLong(PyTuple_GetItem(x, d));
  Py_DECREF(x);
  if (PyErr_Occurred() || set_bytes(t, name) < 0) return -1;

  x = PyObject_CallMethodObjArgs(o, s_data_ptr, NULL);
  if (x == NULL) return -1;
  t->ptr = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(x);
  Py_DECREF(x);
  if (PyErr_Occurred()) return -1;
  if (t->ptr == NULL && t->nbytes > 0) {
    PyErr_Format(error_value, "%s has no memory (a meta tensor?)", named(name));
    return -1;
  }
  Py_INCREF(o);
  t->owner = o;
  return 0;
}

// PyTorch's code for NumPy's type string such as "<f4", or -1.
static int code_of_numpy(const char *s) {
  static const struct {
    char kind;
    uint8_t code;
  } kinds[] = {{'i', 0}, {'u', 1}, {'f', 2}, {'c', 5}, {'b', 6}};
  if (strlen(s) < 3 || s[0] == '>') return -1;
  for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++)
    if (s[1] == kinds[k].kind) return code_of((dl_dtype){kinds[k].code, (uint8_t)(8 * atoi(s + 2)), 1});
  return -1;
}

// NumPy arrays by their array interface, since DLPack does not share read-only
// ones. Returns 0, -1 with an exception, or 1 when DLPack must do.
static int numpy_in(PyObject *o, sf_tensor *t, label *name, int writable) {
  char type[16];
  int rc = 1;
  PyObject *d = PyObject_GetAttr(o, s_interface);
  if (d == NULL) return sf_pardon() < 0 ? -1 : 1;
  if (!PyDict_Check(d)) {
    Py_DECREF(d);
    return 1;
  }
  PyObject *typestr = PyDict_GetItemString(d, "typestr"), *shape = PyDict_GetItemString(d, "shape");
  PyObject *data = PyDict_GetItemString(d, "data"), *strides = PyDict_GetItemString(d, "strides"); // all borrowed
  PyObject *text = typestr != NULL && PyUnicode_Check(typestr) ? PyUnicode_AsUTF8String(typestr) : NULL;
  if (text == NULL) PyErr_Clear(); // no text, or none that UTF-8 has
  if (text == NULL || shape == NULL || !PyTuple_Check(shape) || data == NULL || !PyTuple_Check(data) || PyTuple_Size(data) != 2)
    goto out;
  PyOS_snprintf(type, sizeof type, "%s", PyBytes_AsString(text));
  if ((t->dtype = code_of_numpy(type)) < 0) goto out;
  rc = -1;
  if (PyDict_GetItemString(d, "__ref") != NULL) { // it goes with d
    PyErr_Format(error_type, "%s is %R, which has no memory of its own, want an array: use numpy.array", named(name), (PyObject *)Py_TYPE(o));
    goto out;
  }
  if (strides != NULL && strides != Py_None) {
    PyErr_Format(error_value, "%s is not contiguous, want a contiguous array: use numpy.ascontiguousarray", named(name));
    goto out;
  }
  int readonly = writable ? PyObject_IsTrue(PyTuple_GetItem(data, 1)) : 0;
  if (readonly != 0) {
    if (readonly > 0 || sf_pardon() == 0)
      PyErr_Format(error_value, "%s is read-only, want an array that can be written to", named(name));
    goto out;
  }
  if (set_shape(t, PyTuple_Size(shape), name) < 0) goto out;
  for (int k = 0; k < t->ndim; k++) t->shape[k] = PyLong_AsLongLong(PyTuple_GetItem(shape, k));
  t->ptr = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(PyTuple_GetItem(data, 0));
  if (PyErr_Occurred()) {
    if (!sf_not_ours()) PyErr_Format(error_type, "%s has an __array_interface__ that NumPy would not give it", named(name));
    goto out;
  }
  if (set_bytes(t, name) < 0) goto out;
  t->device_type = SF_CPU;
  Py_INCREF(o);
  t->owner = o;
  rc = 0;
out:
  PyErr_Fetch(&typestr, &shape, &data); // keep an exception across the decrements
  Py_XDECREF(text);
  Py_DECREF(d);
  PyErr_Restore(typestr, shape, data);
  return rc;
}

// Frees what a capsule of ours has taken over from a producer.
static void delete_taken(PyObject *capsule) {
  dl_managed *m = PyCapsule_GetPointer(capsule, TAKEN);
  if (m->deleter != NULL) m->deleter(m);
}

// Calls __dlpack__: of a GPU's array with the stream in which Python's work on that GPU
// is queued, so that the producer makes that wait for what fills the array.
static PyObject *dlpack_of(PyObject *o) {
  int type = 0, id = 0;
  PyObject *d = cuda ? PyObject_CallMethodObjArgs(o, s_dlpack_device, NULL) : NULL;
  if (d != NULL && (!PyTuple_Check(d) || !PyArg_ParseTuple(d, "ii", &type, &id))) type = 0;
  Py_XDECREF(d);
  if (PyErr_Occurred() && sf_pardon() < 0) return NULL;
  if (type != DL_CUDA && type != DL_CUDA_MANAGED) return PyObject_CallMethodObjArgs(o, s_dlpack, NULL);
  uint64_t stream;
  if (tensor_stream(id, &stream) < 0) return NULL;
  PyObject *f = PyObject_GetAttr(o, s_dlpack), *args = PyTuple_New(0);
  PyObject *kw = Py_BuildValue("{s:K}", "stream", (unsigned long long)(stream != 0 ? stream : 1)); // 1 is the default stream
  PyObject *capsule = f != NULL && args != NULL && kw != NULL ? PyObject_Call(f, args, kw) : NULL;
  Py_XDECREF(f);
  Py_XDECREF(args);
  Py_XDECREF(kw);
  return capsule;
}

static int dlpack_in(PyObject *o, sf_tensor *t, label *name) {
  PyObject *capsule = dlpack_of(o);
  if (capsule == NULL) {
    if (sf_not_ours()) return -1;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_Format(error_value, "%s cannot be shared by DLPack: %S", named(name), value != NULL ? value : Py_None);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return -1;
  }
  dl_managed *m = PyCapsule_GetPointer(capsule, "dltensor");
  if (m == NULL) {
    PyErr_Clear();
    PyErr_Format(error_type, "%s.__dlpack__() returned %R, want a DLPack capsule", named(name), capsule);
    goto fail;
  }
  int32_t on = m->t.device.device_type;
  int gpu = on == DL_CUDA || on == DL_CUDA_MANAGED;
  if (gpu && !cuda) {
    PyErr_Format(error_value, "%s is on device cuda:%d, " NO_CUDA, named(name), (int)m->t.device.device_id);
    goto fail;
  }
  if (!gpu && on != DL_CPU && on != DL_CUDA_HOST) {
    PyErr_Format(error_value, "%s is on DLPack device type %d, want 1 (cpu) or 2 (cuda): this build has no backend for it", named(name), (int)on);
    goto fail;
  }
  t->device_type = gpu ? SF_GPU : SF_CPU;
  t->device_id = gpu ? m->t.device.device_id : 0;
  t->dtype = code_of(m->t.dtype);
  if (t->dtype < 0) {
    PyErr_Format(error_value, "%s has DLPack type code %d with %d bits and %d lanes, which is not supported", named(name),
                 (int)m->t.dtype.code, (int)m->t.dtype.bits, (int)m->t.dtype.lanes);
    goto fail;
  }
  if (m->t.ndim < 0 || set_shape(t, m->t.ndim, name) < 0) goto fail;
  for (int d = 0; d < t->ndim; d++) t->shape[d] = m->t.shape[d];
  if (set_bytes(t, name) < 0) goto fail;
  int64_t stride = 1;
  for (int d = t->ndim - 1; m->t.strides != NULL && t->nbytes > 0 && d >= 0; d--) {
    if (t->shape[d] != 1 && m->t.strides[d] != stride) {
      PyErr_Format(error_value, "%s is not contiguous, want a contiguous tensor", named(name));
      goto fail;
    }
    stride *= t->shape[d];
  }
  t->ptr = (char *)m->t.data + m->t.byte_offset;
  // As DLPack wants it, so that nobody else takes it over while Go uses it.
  PyObject *taken = PyCapsule_New(m, TAKEN, NULL);
  if (taken == NULL || PyCapsule_SetName(capsule, "used_dltensor") < 0 || PyCapsule_SetDestructor(taken, delete_taken) < 0) {
    Py_XDECREF(taken);
    goto fail;
  }
  Py_DECREF(capsule);
  t->owner = taken; // keeps the memory
  return 0;
fail:
  Py_DECREF(capsule);
  return -1;
}

// Tensor is what Python gets from Go when there is no torch.
typedef struct {
  PyObject_HEAD sf_tensor t;
  uint64_t lease;
} tensor_object;

int tensor_in(PyObject *o, sf_tensor *t, const char *what, Py_ssize_t i, int writable) {
  label at = {.what = what, .i = i}, *name = &at;
  memset(t, 0, sizeof *t);
  int ready = torch_ready();
  if (ready < 0) return -1;
  if (ready && plain(o)) {
    int rc = torch_quick(o, t);
    if (rc != 0) return rc > 0 ? 0 : -1;
    memset(t, 0, sizeof *t);
  }
  int is_torch = ready ? PyObject_IsInstance(o, torch.tensor) : 0;
  if (is_torch < 0) {
    if (!sf_not_ours()) PyErr_Format(error_type, "%s does not tell what it is, want a torch.Tensor or another object with __dlpack__", named(name));
    return -1;
  }
  if (is_torch) {
    if (torch_in(o, t, name) == 0) return 0;
    if (!PyErr_ExceptionMatches(error_value) && !sf_not_ours()) {
      PyErr_Clear();
      PyErr_Format(error_value, "%s is a tensor without an address of its own (sparse, quantised or a subclass)", named(name));
    }
    return -1;
  }
  if ((PyObject *)Py_TYPE(o) == tensor_class) { // our own: keeps its element type
    *t = ((tensor_object *)o)->t;
    Py_INCREF(o);
    t->owner = o;
    return 0;
  }
  int rc = numpy_in(o, t, name, writable);
  if (rc <= 0) return rc;
  PyObject *method = PyObject_GetAttr(o, s_dlpack);
  if (method == NULL) {
    if (sf_pardon() == 0)
      PyErr_Format(error_type, "%s is %R, want a torch.Tensor or another object with __dlpack__", named(name), (PyObject *)Py_TYPE(o));
    return -1;
  }
  Py_DECREF(method);
  if (writable) {
    PyObject *mod = PyObject_GetAttrString((PyObject *)Py_TYPE(o), "__module__");
    PyObject *text = mod != NULL ? PyUnicode_AsUTF8String(mod) : NULL;
    int jax = text != NULL && strncmp(PyBytes_AsString(text), "jax", 3) == 0;
    Py_XDECREF(mod);
    Py_XDECREF(text);
    if (text == NULL && sf_pardon() < 0) return -1;
    if (jax) {
      PyErr_Format(error_type, "%s is a JAX array, which cannot be written to: pull into a NumPy array or a torch.Tensor", named(name));
      return -1;
    }
  }
  return dlpack_in(o, t, name);
}

// Memory of a batch in one of DLPack's two forms.
typedef struct {
  union {
    dl_managed plain; // what a capsule holds
    dl_versioned versioned;
  } m;
  int64_t shape[SF_MAX_DIMS + 1], strides[SF_MAX_DIMS + 1];
  sf_tensor tensor;
  uint64_t lease;
  PyObject *keeper; // a Tensor, or NULL: then it holds the batch itself
  int *gone;        // while a tensor is made of it: set when it is freed, and the batch then is not released
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

static void delete_capsule(PyObject *capsule) {
  if (!PyCapsule_IsValid(capsule, "dltensor")) return; // somebody has taken it over
  dl_managed *m = PyCapsule_GetPointer(capsule, "dltensor");
  m->deleter(m);
}

// DLPack's type for a code; 0 bits when it has none. The table has those that
// PyTorch of any age takes.
static dl_dtype type_of(int32_t code) {
  switch (code) {
    case BOOL: return (dl_dtype){6, 8, 1};
    case UINT16: return (dl_dtype){1, 16, 1};
    case UINT32: return (dl_dtype){1, 32, 1};
    case UINT64: return (dl_dtype){1, 64, 1};
    case COMPLEX32: return (dl_dtype){5, 32, 1};
  }
  for (size_t i = 0; i < sizeof float8 / sizeof float8[0]; i++)
    if (float8[i].dtype == code) return (dl_dtype){float8[i].type, 8, 1};
  if (code < 0 || code >= NDTYPES) return (dl_dtype){0, 0, 1};
  return (dl_dtype){dtypes[code].code, dtypes[code].bits, 1};
}

// Fills in d, which is part of x. With bytes set, it is a row of uint8.
static void describe(exported *x, dl_tensor *d, const sf_tensor *t, uint64_t lease, PyObject *keeper, int bytes) {
  static char nothing;
  d->data = t->ptr != NULL ? t->ptr : &nothing;
  d->device.device_type = t->device_type == SF_GPU ? DL_CUDA : DL_CPU;
  d->device.device_id = t->device_type == SF_GPU ? t->device_id : 0;
  if (bytes) {
    d->dtype = (dl_dtype){1, 8, 1};
    d->ndim = 1;
    x->shape[0] = t->nbytes;
  } else {
    d->dtype = type_of(t->dtype);
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

// Exports t. With bytes set, as a row of uint8. *out is of the capsule's.
static PyObject *export_tensor(const sf_tensor *t, uint64_t lease, PyObject *keeper, int bytes, exported **out) {
  exported *x = malloc(sizeof *x);
  if (x == NULL) return PyErr_NoMemory();
  describe(x, &x->m.plain.t, t, lease, keeper, bytes);
  x->m.plain.context = x;
  x->m.plain.deleter = delete_plain;
  PyObject *capsule = PyCapsule_New(x, "dltensor", delete_capsule);
  if (capsule == NULL) {
    free(x);
    return NULL;
  }
  Py_XINCREF(keeper);
  *out = x;
  return capsule;
}

// torch_out by PyTorch's table. Returns 1, 0 when it must be done by a capsule, or -1
// with an exception.
static int quick_out(const sf_tensor *t, uint64_t lease, PyObject *keeper, PyObject **out) {
  int gone = 0;
  if (type_of(t->dtype).bits == 0 || (t->device_type == SF_GPU && !torch.gpu)) return 0;
  exported *x = malloc(sizeof *x);
  if (x == NULL) return 0;
  dl_versioned *m = &x->m.versioned;
  describe(x, &m->t, t, lease, keeper, 0);
  m->version = (dl_version){1, 0};
  m->flags = 0;
  m->context = x;
  m->deleter = delete_versioned;
  x->gone = &gone;
  Py_XINCREF(keeper);
  *out = exchange_out(m);
  if (*out != NULL) {
    if (!gone)
      x->gone = NULL;
    else if (keeper == NULL) // it is a copy
      release(t, lease);
    return 1;
  }
  if (!gone) {
    Py_XDECREF(keeper);
    free(x);
  } else if (!PyErr_Occurred()) {
    PyErr_SetString(error_value, "PyTorch makes no tensor of what a worker pushed");
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

// A tensor without elements, which needs no memory.
static PyObject *torch_empty(const sf_tensor *t, PyObject *dtype) {
  PyObject *s = shape_tuple(t), *kw = PyDict_New(), *args = s != NULL ? PyTuple_Pack(1, s) : NULL, *r = NULL;
  if (args != NULL && kw != NULL && PyDict_SetItemString(kw, "dtype", dtype) == 0) r = PyObject_Call(torch.empty, args, kw);
  Py_XDECREF(s);
  Py_XDECREF(args);
  Py_XDECREF(kw);
  return r;
}

// PyTorch's type for a code; NULL when it has none.
static PyObject *torch_dtype(int32_t code) { return code >= 0 && code < NDTYPES ? torch.dtypes[code] : NULL; }

// Makes a tensor of a type that PyTorch has. keeper may be NULL: then it holds the
// batch. *kept: see tensor_out.
static PyObject *torch_out(const sf_tensor *t, uint64_t lease, PyObject *keeper, int *kept) {
  PyObject *dtype = torch_dtype(t->dtype), *r, *v = NULL;
  int direct = dtypes[t->dtype].bits != 0, gone = 0;
  if (t->nbytes == 0) {
    r = torch_empty(t, dtype);
    if (r != NULL && keeper == NULL) release(t, lease);
    return r;
  }
  int done = quick_out(t, lease, keeper, &r);
  if (done != 0) return done > 0 ? r : NULL;
  exported *x;
  PyObject *capsule = export_tensor(t, lease, keeper, !direct, &x);
  if (capsule == NULL) return NULL;
  x->gone = &gone;
  r = PyObject_CallFunctionObjArgs(torch.from_dlpack, capsule, NULL);
  torch.gpu |= r != NULL && t->device_type == SF_GPU;
  if (r != NULL && !direct) {
    PyObject *s = shape_tuple(t);
    v = s != NULL ? PyObject_CallMethodObjArgs(r, s_view, dtype, NULL) : NULL;
    Py_DECREF(r);
    r = v != NULL ? PyObject_CallMethodObjArgs(v, s_view, s, NULL) : NULL;
    Py_XDECREF(v);
    Py_XDECREF(s);
  }
  if (r == NULL) { // the exception must not be lost, nor seen by those who free
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_DECREF(capsule);
    PyErr_Restore(type, value, trace);
  } else {
    Py_DECREF(capsule);
  }
  if (!gone)
    x->gone = NULL; // whoever has it releases the batch
  else if (r != NULL && keeper == NULL) // it is a copy
    release(t, lease);
  *kept = !gone;
  return r;
}

PyObject *tensor_over(const sf_tensor *t, PyObject *keeper) {
  int ready = torch_ready(), kept = 0;
  if (ready == 0) PyErr_SetString(error_type, "a tensor on a GPU is a torch.Tensor: import torch first");
  if (ready > 0 && torch_dtype(t->dtype) == NULL) {
    PyErr_SetString(error_value, "the tensor is of a dtype that this PyTorch does not have");
    return NULL;
  }
  return ready > 0 ? torch_out(t, 0, keeper, &kept) : NULL;
}

PyObject *tensor_out(const sf_tensor *t, uint64_t lease, int *kept) {
  *kept = 0;
  int ready = torch_ready();
  if (ready < 0) return NULL;
  if (ready && torch_dtype(t->dtype) != NULL) return torch_out(t, lease, NULL, kept);
  allocfunc alloc = (allocfunc)PyType_GetSlot((PyTypeObject *)tensor_class, Py_tp_alloc);
  tensor_object *o = (tensor_object *)alloc((PyTypeObject *)tensor_class, 0);
  if (o == NULL) return NULL;
  o->t = *t;
  o->t.owner = NULL;
  o->lease = lease;
  return (PyObject *)o;
}

static void tensor_dealloc(PyObject *o) {
  PyTypeObject *type = Py_TYPE(o);
  release(&((tensor_object *)o)->t, ((tensor_object *)o)->lease);
  freefunc f = (freefunc)PyType_GetSlot(type, Py_tp_free);
  f(o);
  Py_DECREF(type);
}

static PyObject *tensor_shape(PyObject *o, void *unused) {
  (void)unused;
  return shape_tuple(&((tensor_object *)o)->t);
}

static const char *dtype_name(const sf_tensor *t) { return t->dtype >= 0 && t->dtype < NDTYPES ? dtypes[t->dtype].name : "unknown"; }

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

// What has come is complete, whatever the consumer's stream, and goes in the form
// without a version, which every consumer takes.
static PyObject *tensor_dlpack(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
  const sf_tensor *t = &((tensor_object *)o)->t;
  PyObject *stream, *version, *device = Py_None, *copy = Py_None;
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
  if (type_of(t->dtype).bits == 0) {
    PyErr_Format(error_value, "DLPack has no code for dtype %s", dtype_name(t));
    return NULL;
  }
  exported *x;
  return export_tensor(t, 0, o, 0, &x);
}

static PyMethodDef tensor_methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))tensor_dlpack, METH_VARARGS | METH_KEYWORDS, DOC_TENSOR_DLPACK},
    {"__dlpack_device__", tensor_dlpack_device, METH_NOARGS, DOC_TENSOR_DLPACK_DEVICE},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef tensor_attributes[] = {
    {"shape", tensor_shape, NULL, DOC_TENSOR_SHAPE, NULL},
    {"dtype", tensor_dtype, NULL, DOC_TENSOR_DTYPE, NULL},
    {"nbytes", tensor_nbytes, NULL, DOC_TENSOR_NBYTES, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

// Only Go makes tensors.
static PyObject *tensor_new(PyTypeObject *type, PyObject *args, PyObject *kw) {
  (void)type;
  (void)args;
  (void)kw;
  PyErr_SetString(error_type, "fserver_lib.Tensor cannot be made, only received");
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

int tensor_init(PyObject *module, PyObject *value, PyObject *type) {
  static const struct {
    PyObject **s;
    const char *text;
  } names[] = {{&s_contiguous, "is_contiguous"}, {&s_device, "device"}, {&s_type, "type"},       {&s_data_ptr, "data_ptr"},
               {&s_dtype, "dtype"},              {&s_shape, "shape"},   {&s_dlpack, "__dlpack__"}, {&s_view, "view"},
               {&s_interface, "__array_interface__"}, {&s_is_conj, "is_conj"}, {&s_is_neg, "is_neg"},
               {&s_index, "index"},              {&s_dlpack_device, "__dlpack_device__"}, {&s_is_cpu, "is_cpu"}};
  error_value = value;
  error_type = type;
  cuda = sf_cuda();
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
    if ((*names[i].s = PyUnicode_InternFromString(names[i].text)) == NULL) return -1;
  tensor_class = PyType_FromSpec(&tensor_spec);
  if (tensor_class == NULL) return -1;
  Py_INCREF(tensor_class);
  return PyModule_AddObject(module, "Tensor", tensor_class);
}
