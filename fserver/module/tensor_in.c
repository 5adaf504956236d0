//go:build fserver

// Tensors from Python: torch.Tensor, NumPy arrays, and objects with __dlpack__.
#include <stdlib.h>
#include <string.h>

#include "_cgo_export.h"
#include "call.h"
#include "dtypes.h"
#include "exchange.h"
#include "tensor.h"
#include "torch.h"

#define TAKEN "fserver_lib.dltensor"

// Whether the library was built with CUDA, and the end of errors about GPU tensors if it was not.
static int cuda;
#define NO_CUDA "want cpu: this build has no CUDA; build with \"make af USE_CUDA=1\", see docs/gpu.md"

// DLPack's device types and type codes, for errors.
static const char *const DEVICES[] = {"none",   "cpu",   "cuda", "cuda_host", "opencl",      "none",    "none",  "vulkan", "metal",
                                      "vpi",    "rocm",  "rocm_host", "ext_dev", "cuda_managed", "oneapi", "webgpu", "hexagon", "maia"};
static const char *const TYPES[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
#define NAME(names, i) ((size_t)(i) < sizeof names / sizeof *names ? names[i] : "unknown")

// Names of attributes that are read of every tensor.
static PyObject *s_contiguous, *s_device, *s_type, *s_data_ptr, *s_dtype, *s_shape, *s_dlpack, *s_interface, *s_is_conj, *s_is_neg, *s_index,
    *s_dlpack_device, *s_is_cpu;

// label is the name of an argument for errors: item i of what, or what if i is -1.
typedef struct {
  const char *what;
  Py_ssize_t i;
  char buf[64];
} label;

static const char *named(label *name) { return sf_name(name->buf, sizeof name->buf, name->what, name->i); }

static int set_shape(sf_tensor *t, Py_ssize_t ndim, label *name) {
  if (ndim > SF_MAX_DIMS) {
    PyErr_Format(sf_error_value, "%s has %zd dimensions, want at most %d", named(name), ndim, SF_MAX_DIMS);
    return -1;
  }
  t->ndim = (int32_t)ndim;
  return 0;
}

// Sets the length in bytes. Go checks the sizes for overflow again.
static int set_bytes(sf_tensor *t, label *name) {
  int64_t n = sf_dtypes[t->dtype].size;
  for (int i = 0; i < t->ndim; i++) {
    if (t->shape[i] == 0) {
      t->nbytes = 0;
      return 0;
    }
  }
  for (int i = 0; i < t->ndim; i++) {
    if (t->shape[i] < 0 || n > INT32_MAX / t->shape[i]) {
      PyErr_Format(sf_error_value, "%s is larger than %d bytes, the limit of a message", named(name), INT32_MAX);
      return -1;
    }
    n *= t->shape[i];
  }
  t->nbytes = n;
  return 0;
}

// Reads t->ndim sizes from a tuple. It stops at the first exception: the next conversion could clear it.
static int read_shape(sf_tensor *t, PyObject *sizes) {
  for (int i = 0; i < t->ndim; i++) {
    t->shape[i] = PyLong_AsLongLong(PyTuple_GetItem(sizes, i));
    if (t->shape[i] == -1 && PyErr_Occurred()) return -1;
  }
  return 0;
}

// The functions from here to torch_lazy return -1 with an exception that must not be replaced.

// Writes a str attribute of an object into buf, or "" if there is none.
static int attr_text(PyObject *o, PyObject *attr, char *buf, size_t n) {
  buf[0] = 0;
  PyObject *s = PyObject_GetAttr(o, attr), *b = s != NULL ? PyUnicode_AsUTF8String(s) : NULL;
  if (b != NULL) PyOS_snprintf(buf, n, "%s", PyBytes_AsString(b));
  Py_XDECREF(s);
  Py_XDECREF(b);
  return b != NULL ? 0 : sf_pardon();
}

// Reports whether a method without arguments returns True. The method may be missing.
static int is(PyObject *o, PyObject *method) {
  PyObject *x = PyObject_CallMethodObjArgs(o, method, NULL);
  int yes = x != NULL ? PyObject_IsTrue(x) : -1;
  Py_XDECREF(x);
  return yes >= 0 ? yes : sf_pardon();
}

// Reports whether an attribute is True. The attribute may be missing.
static int has(PyObject *o, PyObject *attr) {
  PyObject *x = PyObject_GetAttr(o, attr);
  Py_XDECREF(x);
  return x != NULL ? x == Py_True : sf_pardon();
}

// Reports whether a tensor is a view with the memory of another tensor but other values.
static int torch_lazy(PyObject *o, int32_t dtype) {
  int conj = dtype >= COMPLEX32 && dtype <= COMPLEX128 ? is(o, s_is_conj) : 0;
  return conj != 0 ? conj : is(o, s_is_neg);
}

// torch_in by PyTorch's table, for tensors of no subclass. Returns 1, 0 if torch_in must read the tensor or raise the
// error, or -1 with an exception that must not be replaced.
static int torch_quick(PyObject *o, sf_tensor *t) {
  dl_tensor d;
  int rc = exchange_in(o, &d);
  if (rc <= 0) return rc;
  int gpu = cuda && d.device.device_type == DL_CUDA, dtype = sf_code_of(d.dtype);
  if (dtype == UINT8 || dtype == INT8) { // may stand for a type of fewer bits
    PyObject *own = PyObject_GetAttr(o, s_dtype);
    Py_XDECREF(own);
    if (own == NULL) return sf_pardon();
    if (own != sf_torch.dtypes[dtype]) return 0;
  }
  if ((!gpu && d.device.device_type != DL_CPU) || dtype < 0 || d.ndim < 0 || d.ndim > SF_MAX_DIMS || (d.ndim > 0 && d.strides == NULL)) return 0;
  int64_t n = 1, bytes = sf_dtypes[dtype].size; // n: elements of the dimensions read so far
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

// Reports whether o is a torch.Tensor itself. A subclass may override attributes.
static int is_plain(PyObject *o) {
  PyObject *class = (PyObject *)Py_TYPE(o);
  return class == sf_torch.tensor || class == sf_torch.parameter;
}

static int torch_device(PyObject *o, sf_tensor *t, label *name) {
  char device[16];
  t->device_type = SF_CPU;
  int on_cpu = is_plain(o) ? has(o, s_is_cpu) : 0; // much cheaper than reading the device
  if (on_cpu != 0) return on_cpu < 0 ? -1 : 0;
  PyObject *x = PyObject_GetAttr(o, s_device);
  if (x == NULL) return -1;
  if (attr_text(x, s_type, device, sizeof device) < 0) {
    Py_DECREF(x);
    return -1;
  }
  int gpu = strcmp(device, "cuda") == 0;
  if ((!gpu || !cuda) && strcmp(device, "cpu") != 0) {
    PyErr_Format(sf_error_value, gpu ? "%s is on device %S, " NO_CUDA : "%s is on device %S, want cpu or cuda: this build has no backend for it", named(name), x);
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
    PyErr_Format(sf_error_value, "%s is not contiguous, want a contiguous tensor: call .contiguous() and keep the result", named(name));
    return -1;
  }
  PyObject *x = PyObject_GetAttr(o, s_dtype);
  PyObject *code = x != NULL ? PyDict_GetItemWithError(sf_torch.codes, x) : NULL; // borrowed
  if (code == NULL) {
    if (sf_pardon() == 0)
      PyErr_Format(sf_error_value, "%s has dtype %S, which is not supported", named(name), x != NULL ? x : Py_None);
    Py_XDECREF(x);
    return -1;
  }
  t->dtype = (int32_t)PyLong_AsLong(code);
  Py_DECREF(x);
  int lazy = torch_lazy(o, t->dtype);
  if (lazy < 0) return -1;
  if (lazy) {
    PyErr_Format(sf_error_value, "%s is a conjugate or negative view: call .resolve_conj().resolve_neg() and keep the result", named(name));
    return -1;
  }

  x = PyObject_GetAttr(o, s_shape); // a tuple
  Py_ssize_t ndim = x != NULL ? PyTuple_Size(x) : -1;
  if (ndim < 0 || set_shape(t, ndim, name) < 0) {
    Py_XDECREF(x);
    return -1;
  }
  int rc = read_shape(t, x);
  Py_DECREF(x);
  if (rc < 0 || set_bytes(t, name) < 0) return -1;

  x = PyObject_CallMethodObjArgs(o, s_data_ptr, NULL);
  if (x == NULL) return -1;
  t->ptr = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(x);
  Py_DECREF(x);
  if (PyErr_Occurred()) return -1;
  if (t->ptr == NULL && t->nbytes > 0) {
    PyErr_Format(sf_error_value, "%s has no memory (a meta tensor?)", named(name));
    return -1;
  }
  Py_INCREF(o);
  t->owner = o;
  return 0;
}

// Reports whether an object is a numpy.ma.MaskedArray: its memory does not contain the mask. Returns -1 with an
// exception that must not be replaced.
static int is_masked(PyObject *o) {
  static PyObject *unmasked; // the latest class that is no MaskedArray
  PyObject *class = (PyObject *)Py_TYPE(o);
  if (class == unmasked) return 0;
  PyObject *ma = sf_item(PyImport_GetModuleDict(), "numpy.ma"); // if it is not imported, o is no MaskedArray
  PyObject *masked = ma != NULL ? PyObject_GetAttrString(ma, "MaskedArray") : NULL;
  int yes = masked != NULL ? PyObject_IsSubclass(class, masked) : 0;
  Py_XDECREF(masked);
  if (PyErr_Occurred()) return sf_pardon();
  if (!yes) {
    PyObject *before = unmasked;
    Py_INCREF(class);
    unmasked = class;
    Py_XDECREF(before);
  }
  return yes;
}

// NumPy arrays by their array interface, since DLPack does not share read-only arrays. Returns 0, -1 with an exception,
// or 1 if DLPack must be used.
static int numpy_in(PyObject *o, sf_tensor *t, label *name, int writable) {
  char type[16];
  int rc = 1;
  PyObject *d = PyObject_GetAttr(o, s_interface);
  if (d == NULL) return sf_pardon() < 0 ? -1 : 1;
  if (!PyDict_Check(d)) {
    Py_DECREF(d);
    return 1;
  }
  static const char *const keys[] = {"typestr", "shape", "data", "strides", "__ref"};
  PyObject *of[5] = {NULL}, *text = NULL;
  for (int i = 0; i < 5; i++)
    if ((of[i] = sf_item(d, keys[i])) == NULL && PyErr_Occurred()) {
      rc = -1;
      goto out;
    }
  PyObject *typestr = of[0], *shape = of[1], *data = of[2], *strides = of[3];
  text = typestr != NULL && PyUnicode_Check(typestr) ? PyUnicode_AsUTF8String(typestr) : NULL;
  if (PyErr_Occurred() && sf_pardon() < 0) { // the text is not valid UTF-8
    rc = -1;
    goto out;
  }
  if (text == NULL || shape == NULL || !PyTuple_Check(shape) || data == NULL || !PyTuple_Check(data) || PyTuple_Size(data) != 2)
    goto out;
  PyOS_snprintf(type, sizeof type, "%s", PyBytes_AsString(text));
  if ((t->dtype = sf_code_of_numpy(type)) < 0) goto out;
  rc = -1;
  if (of[4] != NULL) { // the memory is freed with d
    PyErr_Format(sf_error_type, "%s is %R, which has no memory of its own, want an array: use numpy.array", named(name), (PyObject *)Py_TYPE(o));
    goto out;
  }
  if (strides != NULL && strides != Py_None) {
    PyErr_Format(sf_error_value, "%s is not contiguous, want a contiguous array: use numpy.ascontiguousarray", named(name));
    goto out;
  }
  int readonly = writable ? PyObject_IsTrue(PyTuple_GetItem(data, 1)) : 0;
  if (readonly != 0) {
    if (readonly > 0 || sf_pardon() == 0)
      PyErr_Format(sf_error_value, "%s is read-only, want an array that can be written to", named(name));
    goto out;
  }
  if (set_shape(t, PyTuple_Size(shape), name) < 0) goto out;
  if (read_shape(t, shape) == 0) t->ptr = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(PyTuple_GetItem(data, 0));
  if (PyErr_Occurred()) {
    if (!sf_not_ours()) PyErr_Format(sf_error_type, "%s has an invalid __array_interface__", named(name));
    goto out;
  }
  if (set_bytes(t, name) < 0) goto out;
  if (t->ptr == NULL && t->nbytes > 0) {
    PyErr_Format(sf_error_value, "%s has no memory: its __array_interface__ says address 0", named(name));
    goto out;
  }
  t->device_type = SF_CPU;
  Py_INCREF(o);
  t->owner = o;
  rc = 0;
out:
  PyErr_Fetch(&of[0], &of[1], &of[2]); // keep an exception across the decrements
  Py_XDECREF(text);
  Py_DECREF(d);
  PyErr_Restore(of[0], of[1], of[2]);
  return rc;
}

// Frees the DLPack tensor of a capsule that this module has consumed. The deleter may be Python code, which must not see
// an exception that is being raised.
static void delete_taken(PyObject *capsule) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  dl_managed *m = PyCapsule_GetPointer(capsule, TAKEN);
  if (m->deleter != NULL) m->deleter(m);
  PyErr_Restore(type, value, trace);
}

// Calls __dlpack__. For an array on a GPU it passes the stream in which Python's work on that GPU is queued; the
// producer makes that stream wait until the array is filled.
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
    PyErr_Format(sf_error_value, "%s cannot be shared by DLPack: %S", named(name), value != NULL ? value : Py_None);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return -1;
  }
  dl_managed *m = PyCapsule_GetPointer(capsule, "dltensor");
  if (m == NULL) {
    PyErr_Clear();
    PyErr_Format(sf_error_type, "%s.__dlpack__() returned %R, want a DLPack capsule", named(name), capsule);
    goto fail;
  }
  int32_t on = m->t.device.device_type;
  int gpu = on == DL_CUDA || on == DL_CUDA_MANAGED;
  if (gpu && !cuda) {
    PyErr_Format(sf_error_value, "%s is on device cuda:%d, " NO_CUDA, named(name), (int)m->t.device.device_id);
    goto fail;
  }
  if (!gpu && on != DL_CPU && on != DL_CUDA_HOST) {
    PyErr_Format(sf_error_value, "%s is on DLPack device type %d (%s), want 1 (cpu) or 2 (cuda): this build has no backend for it", named(name),
                 (int)on, NAME(DEVICES, on));
    goto fail;
  }
  t->device_type = gpu ? SF_GPU : SF_CPU;
  t->device_id = gpu ? m->t.device.device_id : 0;
  t->dtype = sf_code_of(m->t.dtype);
  if (t->dtype < 0) {
    PyErr_Format(sf_error_value, "%s has DLPack type code %d (%s) with %d bits and %d lanes, which is not supported", named(name),
                 (int)m->t.dtype.code, NAME(TYPES, m->t.dtype.code), (int)m->t.dtype.bits, (int)m->t.dtype.lanes);
    goto fail;
  }
  if (m->t.ndim < 0 || (m->t.ndim > 0 && m->t.shape == NULL)) {
    PyErr_Format(sf_error_value, "%s has %d DLPack dimensions%s", named(name), (int)m->t.ndim, m->t.ndim < 0 ? "" : " and no shape");
    goto fail;
  }
  if (set_shape(t, m->t.ndim, name) < 0) goto fail;
  for (int d = 0; d < t->ndim; d++) t->shape[d] = m->t.shape[d];
  if (set_bytes(t, name) < 0) goto fail;
  int64_t stride = 1;
  for (int d = t->ndim - 1; m->t.strides != NULL && t->nbytes > 0 && d >= 0; d--) {
    if (t->shape[d] != 1 && m->t.strides[d] != stride) {
      PyErr_Format(sf_error_value, "%s is not contiguous, want a contiguous tensor", named(name));
      goto fail;
    }
    stride *= t->shape[d];
  }
  if (m->t.data == NULL && t->nbytes > 0) {
    PyErr_Format(sf_error_value, "%s has no memory: its DLPack data pointer is NULL", named(name));
    goto fail;
  }
  t->ptr = (char *)m->t.data + m->t.byte_offset;
  // DLPack requires the renaming, so that no other consumer takes ownership of the capsule.
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

int tensor_in(PyObject *o, sf_tensor *t, const char *what, Py_ssize_t i, int writable) {
  label at = {.what = what, .i = i}, *name = &at;
  memset(t, 0, sizeof *t);
  int ready = torch_ready();
  if (ready < 0) return -1;
  if (ready && is_plain(o)) {
    int rc = torch_quick(o, t);
    if (rc != 0) return rc > 0 ? 0 : -1;
    memset(t, 0, sizeof *t);
  }
  int is_torch = ready ? PyObject_IsInstance(o, sf_torch.tensor) : 0;
  if (is_torch < 0) {
    if (!sf_not_ours()) PyErr_Format(sf_error_type, "%s cannot be inspected, want a torch.Tensor or another object with __dlpack__", named(name));
    return -1;
  }
  if (is_torch) {
    if (torch_in(o, t, name) == 0) return 0;
    if (!PyErr_ExceptionMatches(sf_error_value) && !sf_not_ours()) {
      PyErr_Clear();
      PyErr_Format(sf_error_value, "%s is a tensor without an address of its own (sparse, quantised or a subclass)", named(name));
    }
    return -1;
  }
  const sf_tensor *own = tensor_own(o);
  if (own != NULL) { // the element type stays
    *t = *own;
    Py_INCREF(o);
    t->owner = o;
    return 0;
  }
  int rc = is_masked(o);
  if (rc > 0) PyErr_Format(sf_error_type, "%s is %R, whose mask is not sent, want an array: use its filled()", named(name), (PyObject *)Py_TYPE(o));
  if (rc != 0) return -1;
  rc = numpy_in(o, t, name, writable);
  if (rc <= 0) return rc;
  PyObject *method = PyObject_GetAttr(o, s_dlpack);
  if (method == NULL) {
    if (sf_pardon() == 0)
      PyErr_Format(sf_error_type, "%s is %R, want a torch.Tensor or another object with __dlpack__", named(name), (PyObject *)Py_TYPE(o));
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
      PyErr_Format(sf_error_type, "%s is a JAX array, which cannot be written to: pull into a NumPy array or a torch.Tensor", named(name));
      return -1;
    }
  }
  return dlpack_in(o, t, name);
}

int tensor_in_init(void) {
  static const struct {
    PyObject **s;
    const char *text;
  } names[] = {{&s_contiguous, "is_contiguous"}, {&s_device, "device"}, {&s_type, "type"}, {&s_data_ptr, "data_ptr"},
               {&s_dtype, "dtype"}, {&s_shape, "shape"}, {&s_dlpack, "__dlpack__"}, {&s_dlpack_device, "__dlpack_device__"},
               {&s_interface, "__array_interface__"}, {&s_is_conj, "is_conj"}, {&s_is_neg, "is_neg"}, {&s_index, "index"},
               {&s_is_cpu, "is_cpu"}};
  cuda = sf_cuda();
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
    if ((*names[i].s = PyUnicode_InternFromString(names[i].text)) == NULL) return -1;
  return 0;
}
