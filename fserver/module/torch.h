// The parts of PyTorch that the module uses.
#ifndef FSERVER_TORCH_H
#define FSERVER_TORCH_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "dtypes.h"

// The parts of torch, looked up when the first tensor arrives after the import of torch.
typedef struct {
  PyObject *tensor;    // torch.Tensor
  PyObject *parameter; // torch.nn.Parameter, or NULL
  PyObject *codes;     // dict: torch.dtype -> int
  PyObject *dtypes[NDTYPES];
  PyObject *from_dlpack, *empty;
  PyObject *current_stream; // NULL in a PyTorch without CUDA
  int gpu;                  // from_dlpack has created a tensor on a GPU, which initializes CUDA in PyTorch
} torch_parts;

extern torch_parts sf_torch;

// Looks up torch if the program has imported it. Returns 1, 0 (also while another thread imports torch), or -1 with an
// exception.
int torch_ready(void);

#endif
