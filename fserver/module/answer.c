//go:build fserver

#include "answer.h"

#include <stdlib.h>

#include "_cgo_export.h"
#include "call.h"
#include "docs.h"
#include "handle.h"

static PyObject *answer_class;

typedef struct {
  PyObject_HEAD sf_answer *a;
} answer_object;

void sf_answer_drop(sf_answer *a) {
  if (__atomic_sub_fetch(&a->holds, 1, __ATOMIC_ACQ_REL) == 0) free(a);
}

PyObject *answer_make(Py_ssize_t n) {
  sf_answer *a = malloc(sizeof *a);
  if (a == NULL) return PyErr_NoMemory();
  a->left = (int32_t)n;
  a->holds = 1;
  a->waiters = 0;
  allocfunc alloc = (allocfunc)PyType_GetSlot((PyTypeObject *)answer_class, Py_tp_alloc);
  answer_object *o = (answer_object *)alloc((PyTypeObject *)answer_class, 0);
  if (o == NULL) {
    free(a);
    return NULL;
  }
  o->a = a;
  return (PyObject *)o;
}

sf_answer *answer_state(PyObject *o) { return ((answer_object *)o)->a; }

static void answer_dealloc(PyObject *o) {
  PyTypeObject *type = Py_TYPE(o);
  sf_answer_drop(((answer_object *)o)->a);
  freefunc f = (freefunc)PyType_GetSlot(type, Py_tp_free);
  f(o);
  Py_DECREF(type);
}

static PyObject *answer_done(PyObject *o, PyObject *noargs) {
  (void)noargs;
  if (sf_enter() < 0) return NULL;
  return PyBool_FromLong(__atomic_load_n(&((answer_object *)o)->a->left, __ATOMIC_ACQUIRE) == 0);
}

static PyObject *answer_wait(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"timeout_ms", NULL};
  PyObject *timeout = NULL;
  int64_t ms;
  sf_answer *a = ((answer_object *)o)->a;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|O:wait", names, &timeout)) return NULL;
  if (sf_enter() < 0 || sf_timeout_arg(timeout, &ms) < 0) return NULL;
  uint64_t start = sf_now();
  while (__atomic_load_n(&a->left, __ATOMIC_ACQUIRE) > 0) {
    sf_error e = {0, NULL};
    int64_t slice = SLICE_MS, spent = (int64_t)((sf_now() - start) / 1000000);
    int rc;
    if (ms >= 0 && spent >= ms) {
      sf_answer_timeout(a, ms, &e);
      return sf_raise(&e);
    }
    if (ms >= 0 && ms - spent < slice) slice = ms - spent;
    Py_BEGIN_ALLOW_THREADS rc = sf_answer_wait(a, slice, &e);
    Py_END_ALLOW_THREADS if (rc == SF_FAILED) return sf_raise(&e);
    if (PyErr_CheckSignals() < 0) return NULL;
  }
  sf_drain_dropped();
  Py_RETURN_NONE;
}

SF_NOT_CREATED(answer_new, "Answer cannot be created: respond() returns it")

static PyMethodDef answer_methods[] = {
    {"done", answer_done, METH_NOARGS, DOC_ANSWER_DONE},
    {"wait", (PyCFunction)(void (*)(void))answer_wait, METH_VARARGS | METH_KEYWORDS, DOC_ANSWER_WAIT},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot answer_slots[] = {
    {Py_tp_doc, DOC_ANSWER}, {Py_tp_new, answer_new}, {Py_tp_dealloc, answer_dealloc}, {Py_tp_methods, answer_methods}, {0, NULL},
};

static PyType_Spec answer_spec = {"fserver_lib.Answer", sizeof(answer_object), 0, Py_TPFLAGS_DEFAULT, answer_slots};

int answer_init(PyObject *module) {
  return sf_add_class(module, "Answer", &answer_spec, &answer_class);
}
