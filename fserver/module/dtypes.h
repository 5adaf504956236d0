// Element types: PyTorch's codes, and their names in DLPack and NumPy.
#ifndef FSERVER_DTYPES_H
#define FSERVER_DTYPES_H

#include "dlpack.h"

enum { NDTYPES = 47, UINT8 = 0, INT8 = 1, FLOAT32 = 6, COMPLEX32 = 8, COMPLEX128 = 10, BOOL = 11, UINT16 = 27, UINT32 = 28, UINT64 = 29 };

// The index is PyTorch's code. code and bits are DLPack's; they are 0 if neither DLPack nor a PyTorch of 2022 has the
// type.
extern const struct sf_dtype {
  const char *name;
  uint8_t size, code, bits;
} sf_dtypes[NDTYPES];

// Returns PyTorch's code for DLPack's element type, or -1.
int sf_code_of(dl_dtype d);

// Returns PyTorch's code for a type string of NumPy such as "<f4", or -1.
int sf_code_of_numpy(const char *s);

// Returns DLPack's type for a code. Its bits are 0 if there is none.
dl_dtype sf_type_of(int32_t code);

#endif
