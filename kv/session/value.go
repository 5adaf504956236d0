package session

// Values of arguments and copies: arrays and other types, and their encoding.

import (
	"encoding/binary"
	"fmt"
	"math"
	"regexp"
	"slices"
	"unsafe"

	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/van"
)

// Array is a dense array in C order (the last dimension is contiguous), little endian.
type Array struct {
	Type  string // element type, with NumPy's name: float32, int64, uint8, bool, bfloat16, datetime64[ns] ...
	Shape []int
	Data  []byte
}

// sizes maps element types to their sizes.
var sizes = map[string]int{
	"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
	"int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}

// times matches the types of dates and times: an 8-byte count, and its unit.
var times = regexp.MustCompile(`^(datetime|timedelta)64(\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?$`)

// sizeOf returns the size of an element type, 0 for an unknown type.
func sizeOf(name string) int {
	if n, known := sizes[name]; known {
		return n
	}
	if times.MatchString(name) {
		return 8
	}
	return 0
}

// NewArray returns an array that refers to data. Without shape it has one dimension.
func NewArray[T kv.Value](data []T, shape ...int) (Array, error) {
	if len(shape) == 0 {
		shape = []int{len(data)}
	}
	a := Array{Type: typeOf[T](), Shape: shape}
	if len(data) > 0 {
		a.Data = unsafe.Slice((*byte)(unsafe.Pointer(&data[0])), len(data)*sizes[a.Type])
	}
	return a, a.check()
}

// Elements returns the elements of a: a view, unless the data of a is not aligned for T.
func Elements[T kv.Value](a Array) ([]T, error) {
	if want := typeOf[T](); a.Type != want {
		return nil, fmt.Errorf("%w: an array of %s, want %s", van.ErrInvalid, a.Type, want)
	}
	if err := a.check(); err != nil || len(a.Data) == 0 {
		return nil, err
	}
	if uintptr(unsafe.Pointer(&a.Data[0]))%unsafe.Alignof(*new(T)) != 0 {
		whole := make([]T, len(a.Data)/int(unsafe.Sizeof(*new(T))))
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&whole[0])), len(a.Data)), a.Data)
		return whole, nil
	}
	return unsafe.Slice((*T)(unsafe.Pointer(&a.Data[0])), len(a.Data)/int(unsafe.Sizeof(*new(T)))), nil
}

func typeOf[T kv.Value]() string {
	zero, one := T(0), T(1)
	kind := "uint"
	switch {
	case one/2 != 0:
		kind = "float"
	case zero-1 < zero:
		kind = "int"
	}
	return fmt.Sprint(kind, 8*unsafe.Sizeof(zero))
}

// check returns an error if the length of the array does not match its type and shape.
func (a *Array) check() error {
	total := sizeOf(a.Type)
	if total == 0 {
		return fmt.Errorf("%w: an array of %q, want one of float32, int64 and so on", van.ErrInvalid, a.Type)
	}
	if len(a.Shape) > maxDims {
		return fmt.Errorf("%w: an array of %d dimensions, want at most %d", van.ErrInvalid, len(a.Shape), maxDims)
	}
	if slices.Contains(a.Shape, 0) {
		total = 0
	}
	for _, d := range a.Shape {
		if d < 0 || d > 0 && total > math.MaxInt32/d {
			return fmt.Errorf("%w: an array of shape %v, want less than 2 GiB", van.ErrInvalid, a.Shape)
		}
		total *= d
	}
	if total != len(a.Data) {
		return fmt.Errorf("%w: %d bytes for an array of %s of shape %v, want %d", van.ErrInvalid, len(a.Data), a.Type, a.Shape, total)
	}
	return nil
}

const maxDims = 32

// Kinds of values on the wire.
const (
	tagNil byte = iota
	tagBool
	tagInt
	tagFloat
	tagString
	tagBytes
	tagArray
	tagHandle
)

// HandleID is the encoded form of a handle: the result of Handle.ID. Bindings to other languages, which know handles
// by number, pass it to Call instead of the Handle.
type HandleID uint64

// appendValue writes v to b. Array data begins at a multiple of 8 of b.
func appendValue(b []byte, v any) ([]byte, error) {
	switch v := v.(type) {
	case nil:
		return append(b, tagNil), nil
	case bool:
		if v {
			return append(b, tagBool, 1), nil
		}
		return append(b, tagBool, 0), nil
	case int:
		return appendInt(b, int64(v)), nil
	case int32:
		return appendInt(b, int64(v)), nil
	case int64:
		return appendInt(b, v), nil
	case float32:
		return appendFloat(b, float64(v)), nil
	case float64:
		return appendFloat(b, v), nil
	case string:
		return appendText(append(b, tagString), v)
	case []byte:
		b, err := appendLen(append(b, tagBytes), len(v))
		return append(b, v...), err
	case Array:
		return v.append(b)
	case HandleID:
		return binary.LittleEndian.AppendUint64(append(b, tagHandle), uint64(v)), nil
	}
	return b, fmt.Errorf("%w: a %T, want nil, a bool, a number, a string, bytes or an Array", van.ErrInvalid, v)
}

// appendKept writes a value that is stored or copied: any value but a handle.
func appendKept(b []byte, v any) ([]byte, error) {
	if isHandle(v) {
		return b, fmt.Errorf("%w: a handle cannot be stored as a value", van.ErrInvalid)
	}
	return appendValue(b, v)
}

func isHandle(v any) bool {
	_, is := v.(HandleID)
	return is
}

func appendInt(b []byte, v int64) []byte {
	return binary.LittleEndian.AppendUint64(append(b, tagInt), uint64(v))
}

func appendFloat(b []byte, v float64) []byte {
	return binary.LittleEndian.AppendUint64(append(b, tagFloat), math.Float64bits(v))
}

func appendLen(b []byte, n int) ([]byte, error) {
	if n > math.MaxInt32 {
		return b, fmt.Errorf("%w: %d bytes, want less than 2 GiB", van.ErrInvalid, n)
	}
	return binary.LittleEndian.AppendUint32(b, uint32(n)), nil
}

func appendText(b []byte, s string) ([]byte, error) {
	b, err := appendLen(b, len(s))
	return append(b, s...), err
}

func (a Array) append(b []byte) ([]byte, error) {
	if err := a.check(); err != nil {
		return b, err
	}
	b = append(b, tagArray, byte(len(a.Type)))
	b = append(b, a.Type...)
	b = append(b, byte(len(a.Shape)))
	for _, d := range a.Shape {
		b = binary.LittleEndian.AppendUint64(b, uint64(d))
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(len(a.Data)))
	for len(b)%8 != 0 {
		b = append(b, 0)
	}
	return append(b, a.Data...), nil
}

// reader parses a received message. Its results are views of the message.
type reader struct {
	b   []byte
	off int
	err error
}

// take returns the next n bytes, or nil with an error that names the missing item.
func (r *reader) take(n int, what string) []byte {
	if r.err == nil && (n < 0 || n > len(r.b)-r.off) {
		r.err = fmt.Errorf("%w: %s of %d bytes at byte %d of %d", van.ErrMalformed, what, n, r.off, len(r.b))
	}
	if r.err != nil {
		return nil
	}
	r.off += n
	return r.b[r.off-n : r.off : r.off]
}

func (r *reader) u8(what string) byte {
	if b := r.take(1, what); b != nil {
		return b[0]
	}
	return 0
}

func (r *reader) u32(what string) uint32 {
	if b := r.take(4, what); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (r *reader) u64(what string) uint64 {
	if b := r.take(8, what); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

func (r *reader) text(what string) string { return string(r.take(int(r.u32(what)), what)) }

// count returns the number of items that follow, of at least each bytes.
func (r *reader) count(each int, what string) int {
	n := r.u32(what)
	if r.err == nil && uint64(n)*uint64(each) > uint64(len(r.b)-r.off) {
		r.err = fmt.Errorf("%w: %d %s in %d bytes", van.ErrMalformed, n, what, len(r.b)-r.off)
	}
	if r.err != nil {
		return 0
	}
	return int(n)
}

// end returns the first error; remaining bytes are an error.
func (r *reader) end() error {
	if r.err == nil && r.off != len(r.b) {
		r.err = fmt.Errorf("%w: %d bytes too many", van.ErrMalformed, len(r.b)-r.off)
	}
	return r.err
}

// value parses the output of appendValue.
func (r *reader) value() any {
	switch tag := r.u8("value"); {
	case r.err != nil:
	case tag == tagNil:
	case tag == tagBool:
		return r.u8("bool") != 0
	case tag == tagInt:
		return int64(r.u64("integer"))
	case tag == tagFloat:
		return math.Float64frombits(r.u64("number"))
	case tag == tagString:
		return r.text("string")
	case tag == tagBytes:
		return r.take(int(r.u32("bytes")), "bytes")
	case tag == tagArray:
		return r.array()
	case tag == tagHandle:
		return HandleID(r.u64("handle"))
	default:
		r.err = fmt.Errorf("%w: value of kind %d", van.ErrMalformed, tag)
	}
	return nil
}

func (r *reader) array() Array {
	var a Array
	a.Type = string(r.take(int(r.u8("type")), "type"))
	dims := int(r.u8("dimensions"))
	if dims > maxDims {
		r.err = fmt.Errorf("%w: an array of %d dimensions, want at most %d", van.ErrMalformed, dims, maxDims)
		return a
	}
	a.Shape = make([]int, dims)
	for i := range a.Shape {
		a.Shape[i] = int(r.u64("dimension"))
	}
	n := int(r.u32("array"))
	r.take(-r.off&7, "array")
	a.Data = r.take(n, "array")
	if r.err == nil {
		if err := a.check(); err != nil {
			r.err = fmt.Errorf("%w: %w", van.ErrMalformed, err)
		}
	}
	return a
}

// Encode encodes values, for programs that pass them to another language, in the format described at Decode.
func Encode(values ...any) ([]byte, error) {
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(values)))
	for i, v := range values {
		var err error
		if b, err = appendValue(b, v); err != nil {
			return nil, fmt.Errorf("value %d: %w", i, err)
		}
	}
	return b, nil
}

// Decode parses the output of Encode: the number of values in 4 bytes, then each value after its kind in one byte:
//   - 0: nil
//   - 1: bool, one byte
//   - 2: integer, 8 bytes; 3: floating-point number, 8 bytes
//   - 4: string; 5: bytes; both after their length in 4 bytes
//   - 6: array: length of the type's name in one byte, the name, number of dimensions in one byte, each dimension in
//     8, length in 4, padding to a multiple of 8 from the start, and the elements
//   - 7: HandleID, 8 bytes
//
// All numbers are little endian. Bytes and arrays are views of b.
func Decode(b []byte) ([]any, error) {
	r := &reader{b: b}
	l := make([]any, r.count(1, "values"))
	for i := range l {
		l[i] = r.value()
	}
	return l, r.end()
}
