//go:build fserver

#include "dtypes.h"

#include <stdlib.h>
#include <string.h>

const struct sf_dtype sf_dtypes[] = {
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
_Static_assert(sizeof sf_dtypes / sizeof sf_dtypes[0] == NDTYPES, "NDTYPES is not the length of the table");

// DLPack 1.1's types of 8-bit floats, and PyTorch's codes for them.
static const struct {
  uint8_t type;
  int32_t dtype;
} float8[] = {{10, 24}, {11, 26}, {12, 23}, {13, 25}, {14, 44}};

int sf_code_of(dl_dtype d) {
  if (d.lanes != 1 || d.bits == 0) return -1;
  if (d.code == 6 && d.bits == 8) return BOOL;
  if (d.code == 1 && d.bits == 16) return UINT16;
  if (d.code == 1 && d.bits == 32) return UINT32;
  if (d.code == 1 && d.bits == 64) return UINT64;
  if (d.code == 5 && d.bits == 32) return COMPLEX32;
  for (size_t i = 0; d.bits == 8 && i < sizeof float8 / sizeof float8[0]; i++)
    if (float8[i].type == d.code) return float8[i].dtype;
  for (int i = 0; i < NDTYPES; i++)
    if (sf_dtypes[i].bits == d.bits && sf_dtypes[i].code == d.code) return i;
  return -1;
}

// The table has those that PyTorch of any age takes.
dl_dtype sf_type_of(int32_t code) {
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
  return (dl_dtype){sf_dtypes[code].code, sf_dtypes[code].bits, 1};
}

int sf_code_of_numpy(const char *s) {
  static const struct {
    char kind;
    uint8_t code;
  } kinds[] = {{'i', 0}, {'u', 1}, {'f', 2}, {'c', 5}, {'b', 6}};
  if (strlen(s) < 3 || s[0] == '>') return -1;
  for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++)
    if (s[1] == kinds[k].kind) return sf_code_of((dl_dtype){kinds[k].code, (uint8_t)(8 * atoi(s + 2)), 1});
  return -1;
}
