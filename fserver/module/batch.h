// Batches of a server, from Go to Python.
#ifndef FSERVER_BATCH_H
#define FSERVER_BATCH_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "abi.h"

// Converts n batches to a list. Frees the batches unless they are in room.
PyObject *sf_batches_out(sf_batch *batches, int n, const void *room);

#endif
