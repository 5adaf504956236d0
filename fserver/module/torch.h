// What is needed of PyTorch.
#ifndef FSERVER_TORCH_H
#define FSERVER_TORCH_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "dtypes.h"

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

extern torch_parts sf_torch;

// Finds torch if the program has imported it. Returns 1, 0 also while another
// thread imports it, or -1 with an exception.
int torch_ready(void);

#endif
