// The structures of DLPack's specification: the unversioned tensor, the tensor of version 1, and the table of functions
// of version 1.3.
#ifndef FSERVER_DLPACK_H
#define FSERVER_DLPACK_H

#include <stdint.h>

typedef struct {
  int32_t device_type, device_id;
} dl_device;

typedef struct {
  uint8_t code, bits;
  uint16_t lanes;
} dl_dtype;

typedef struct {
  void *data;
  dl_device device;
  int32_t ndim;
  dl_dtype dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed {
  dl_tensor t;
  void *context;
  void (*deleter)(struct dl_managed *);
} dl_managed;

typedef struct {
  uint32_t major, minor;
} dl_version;

typedef struct dl_versioned {
  dl_version version;
  void *context;
  void (*deleter)(struct dl_versioned *);
  uint64_t flags;
  dl_tensor t;
} dl_versioned;

// The functions return 0, or -1 with an exception. No function waits for a stream.
typedef struct dl_exchange {
  dl_version version;
  struct dl_exchange *older;
  void *allocate, *managed_from_object; // not used here
  int (*object_from_managed)(dl_versioned *m, void **object);
  int (*tensor_from_object)(void *object, dl_tensor *borrowed); // may be NULL
  int (*current_stream)(int32_t device_type, int32_t device_id, void **stream);
} dl_exchange;

enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3, DL_CUDA_MANAGED = 13 };

#endif
