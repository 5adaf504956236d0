package af

// Element types.

import "fmt"

// Dtype is the element type of a tensor: PyTorch's at::ScalarType code, which is also its code on the wire. New
// codes are only ever appended there.
type Dtype int32

// Element types by PyTorch's names.
const (
	Uint8          Dtype = 0
	Int8           Dtype = 1
	Int16          Dtype = 2
	Int32          Dtype = 3
	Int64          Dtype = 4
	Float16        Dtype = 5
	Float32        Dtype = 6
	Float64        Dtype = 7
	ComplexHalf    Dtype = 8
	Complex64      Dtype = 9
	Complex128     Dtype = 10
	Bool           Dtype = 11
	QInt8          Dtype = 12
	QUInt8         Dtype = 13
	QInt32         Dtype = 14
	BFloat16       Dtype = 15
	QUInt4x2       Dtype = 16
	QUInt2x4       Dtype = 17
	Bits1x8        Dtype = 18
	Bits2x4        Dtype = 19
	Bits4x2        Dtype = 20
	Bits8          Dtype = 21
	Bits16         Dtype = 22
	Float8E5M2     Dtype = 23
	Float8E4M3FN   Dtype = 24
	Float8E5M2FNUZ Dtype = 25
	Float8E4M3FNUZ Dtype = 26
	Uint16         Dtype = 27
	Uint32         Dtype = 28
	Uint64         Dtype = 29
	Uint1          Dtype = 30
	Uint7          Dtype = 36
	Int1           Dtype = 37
	Int7           Dtype = 43
	Float8E8M0FNU  Dtype = 44
	Float4E2M1FNx2 Dtype = 45
	Float8E8M0x4   Dtype = 46
)

type dtypeInfo struct {
	name string
	size int8
}

// dtypes has a row for every code; packed types count containers.
var dtypes = [...]dtypeInfo{
	{"uint8", 1}, {"int8", 1}, {"int16", 2}, {"int32", 4}, {"int64", 8}, {"float16", 2}, {"float32", 4}, {"float64", 8},
	{"complex32", 4}, {"complex64", 8}, {"complex128", 16}, {"bool", 1}, {"qint8", 1}, {"quint8", 1}, {"qint32", 4},
	{"bfloat16", 2}, {"quint4x2", 1}, {"quint2x4", 1}, {"bits1x8", 1}, {"bits2x4", 1}, {"bits4x2", 1}, {"bits8", 1},
	{"bits16", 2}, {"float8_e5m2", 1}, {"float8_e4m3fn", 1}, {"float8_e5m2fnuz", 1}, {"float8_e4m3fnuz", 1},
	{"uint16", 2}, {"uint32", 4}, {"uint64", 8},
	{"uint1", 1}, {"uint2", 1}, {"uint3", 1}, {"uint4", 1}, {"uint5", 1}, {"uint6", 1}, {"uint7", 1},
	{"int1", 1}, {"int2", 1}, {"int3", 1}, {"int4", 1}, {"int5", 1}, {"int6", 1}, {"int7", 1},
	{"float8_e8m0fnu", 1}, {"float4_e2m1fn_x2", 1}, {"float8_e8m0fnu_x4", 4},
}

// Valid reports whether the code is known.
func (d Dtype) Valid() bool { return d >= 0 && int(d) < len(dtypes) }

// Size is the number of bytes of one element, 0 for unknown codes.
func (d Dtype) Size() int {
	if !d.Valid() {
		return 0
	}
	return int(dtypes[d].size)
}

// String returns the name that torch.dtype has, without "torch.".
func (d Dtype) String() string {
	if !d.Valid() {
		return fmt.Sprintf("dtype(%d)", int32(d))
	}
	return dtypes[d].name
}
