package collective

// Arithmetic of ReduceScatter and AllReduce, on host memory.

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Reduction is the operation that combines elements of several ranks.
type Reduction uint8

// Reductions. A minimum or maximum of a NaN is NaN; integers wrap around.
const (
	Sum Reduction = iota + 1
	Min
	Max
	Product
	lastReduction = Product
)

// String returns the name of the reduction.
func (r Reduction) String() string {
	if r == 0 || r > lastReduction {
		return fmt.Sprintf("reduction %d", uint8(r))
	}
	return [...]string{"", "sum", "min", "max", "product"}[r]
}

// folder writes the reduction of a and b to dst, element by element. All have whole elements and the same length; dst
// may be a or b.
type folder func(dst, a, b backend.Mem)

// folders holds the folders of an element type, by reduction.
type folders [lastReduction + 1]folder

// arithmetic holds the folders of each supported element type.
var arithmetic = map[af.Dtype]folders{
	af.Float32: numbers[float32](), af.Float64: numbers[float64](),
	af.Float16: halves(fromHalf, toHalf), af.BFloat16: halves(fromBrain, toBrain),
	af.Int8: numbers[int8](), af.Int16: numbers[int16](), af.Int32: numbers[int32](), af.Int64: numbers[int64](),
	af.Uint8: numbers[uint8](), af.Uint16: numbers[uint16](), af.Uint32: numbers[uint32](), af.Uint64: numbers[uint64](),
}

// folderFor returns the folder for an element type and a reduction, or an error if there is none.
func folderFor(d af.Dtype, r Reduction) (folder, error) {
	if r == 0 || r > lastReduction {
		return nil, fmt.Errorf("%w: %s, want Sum, Min, Max or Product", van.ErrInvalid, r)
	}
	if f := arithmetic[d][r]; f != nil {
		return f, nil
	}
	return nil, fmt.Errorf("%w: no arithmetic for %s, want an integer, float16, bfloat16, float32 or float64", van.ErrInvalid, d)
}

// elements is m as a slice of T. Its address is a multiple of T's size, see aligned.
func elements[T any](m backend.Mem) []T {
	var z T
	return unsafe.Slice((*T)(m.Ptr()), m.Len()/int(unsafe.Sizeof(z)))
}

type number interface {
	int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64 | float32 | float64
}

func sum[T number](a, b T) T     { return a + b }
func product[T number](a, b T) T { return a * b }
func least[T number](a, b T) T   { return min(a, b) }
func largest[T number](a, b T) T { return max(a, b) }

func numbers[T number]() folders {
	add := func(dst, a, b backend.Mem) { // without a call for each element
		d := elements[T](dst)
		x, y := elements[T](a)[:len(d)], elements[T](b)[:len(d)]
		for i := range d {
			d[i] = x[i] + y[i]
		}
	}
	return folders{Sum: add, Min: fold(least[T]), Max: fold(largest[T]), Product: fold(product[T])}
}

// fold applies f to each element.
func fold[T any](f func(a, b T) T) folder {
	return func(dst, a, b backend.Mem) {
		d := elements[T](dst)
		x, y := elements[T](a)[:len(d)], elements[T](b)[:len(d)]
		for i := range d {
			d[i] = f(x[i], y[i])
		}
	}
}

// halves reduces 16-bit floats in float32, and rounds each result.
func halves(from func(uint16) float32, to func(float32) uint16) folders {
	in := func(f func(a, b float32) float32) folder {
		return fold(func(a, b uint16) uint16 { return to(f(from(a), from(b))) })
	}
	return folders{Sum: in(sum[float32]), Min: in(least[float32]), Max: in(largest[float32]), Product: in(product[float32])}
}

func fromBrain(b uint16) float32 { return math.Float32frombits(uint32(b) << 16) }

// toBrain rounds to the nearest bfloat16, ties to even.
func toBrain(f float32) uint16 {
	b := math.Float32bits(f)
	if math.IsNaN(float64(f)) {
		return uint16(b>>16) | 0x40 // a NaN stays one
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

func fromHalf(h uint16) float32 {
	sign, exp, frac := uint32(h>>15)<<31, uint32(h>>10&0x1f), uint32(h&0x3ff)
	switch {
	case exp == 0x1f: // infinite, or not a number
		return math.Float32frombits(sign | 0x7f800000 | frac<<13)
	case exp == 0: // zero, or too small for a leading one
		v := float32(frac) / (1 << 24)
		return math.Float32frombits(math.Float32bits(v) | sign)
	}
	return math.Float32frombits(sign | (exp+112)<<23 | frac<<13)
}

// toHalf rounds to the nearest float16, ties to even.
func toHalf(f float32) uint16 {
	b := math.Float32bits(f)
	sign, exp, frac := uint16(b>>16&0x8000), int(b>>23&0xff)-112, b&0x7fffff
	switch {
	case b&0x7fffffff > 0x7f800000: // not a number
		return sign | 0x7e00
	case exp >= 0x1f:
		return sign | 0x7c00
	case exp < -10:
		return sign
	case exp <= 0: // too small for a leading one
		frac |= 0x800000
		return sign | uint16(roundTo(frac, uint(14-exp)))
	}
	// A fraction that rounds up to the next power of two carries into the exponent, which
	// is right, also to infinity.
	return sign | uint16(uint32(exp)<<10+roundTo(frac, 13))
}

// roundTo drops the last n bits of v and rounds to the nearest, ties to even.
func roundTo(v uint32, n uint) uint32 {
	half := uint32(1) << (n - 1)
	rest, q := v&(half<<1-1), v>>n
	if rest > half || rest == half && q&1 == 1 {
		q++
	}
	return q
}
