// Package lowfloat converts between float32 and the small floating-point types
// that models use, as PyTorch does: to the nearest value, ties to even.
package lowfloat

import "math"

// BF16 is the bfloat16 nearest to f. Values too large become infinite.
func BF16(f float32) uint16 {
	b := math.Float32bits(f)
	if b&0x7fffffff > 0x7f800000 {
		return uint16(b>>16) | 0x40 // keep NaN one
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

// FromBF16 is the value of a bfloat16.
func FromBF16(h uint16) float32 { return math.Float32frombits(uint32(h) << 16) }

// fp8 describes a type of 8 bits: 1 of sign, then exponent, then mantissa.
type fp8 struct {
	mantissa uint
	bias     int
	largest  uint8 // code of the largest finite value
	inf      uint8 // code of infinity; nan where there is none
	nan      uint8
}

var (
	e4m3fn = fp8{mantissa: 3, bias: 7, largest: 0x7e, inf: 0x7f, nan: 0x7f}
	e5m2   = fp8{mantissa: 2, bias: 15, largest: 0x7b, inf: 0x7c, nan: 0x7f}
)

// E4M3 is the float8_e4m3fn nearest to f. A number that rounds beyond 448 is NaN.
func E4M3(f float32) uint8 { return e4m3fn.encode(f) }

// FromE4M3 is the value of a float8_e4m3fn.
func FromE4M3(c uint8) float32 {
	if c&0x7f == 0x7f {
		return float32(math.NaN())
	}
	return e4m3fn.decode(c)
}

// E5M2 is the float8_e5m2 nearest to f. A number that rounds beyond 57344 is infinite.
func E5M2(f float32) uint8 { return e5m2.encode(f) }

// FromE5M2 is the value of a float8_e5m2.
func FromE5M2(c uint8) float32 {
	switch c & 0x7f {
	case 0x7c:
		return float32(math.Inf(1 - int(c>>7)*2))
	case 0x7d, 0x7e, 0x7f:
		return float32(math.NaN())
	}
	return e5m2.decode(c)
}

// decode is the value of a finite code.
func (t fp8) decode(c uint8) float32 {
	e := int(c & 0x7f >> t.mantissa)
	m := int(c & (1<<t.mantissa - 1))
	if e == 0 {
		e = 1 // subnormal: no hidden one
	} else {
		m |= 1 << t.mantissa
	}
	v := math.Ldexp(float64(m), e-t.bias-int(t.mantissa))
	if c&0x80 != 0 {
		v = -v
	}
	return float32(v)
}

func (t fp8) encode(f float32) uint8 {
	sign := uint8(math.Float32bits(f) >> 24 & 0x80)
	a := math.Abs(float64(f))
	if a != a {
		return sign | t.nan
	}
	// The unit in the last place at a; below the smallest normal it stays.
	_, e := math.Frexp(a)
	ulp := math.Ldexp(1, max(e-1, 1-t.bias)-int(t.mantissa))
	r := math.RoundToEven(a/ulp) * ulp
	if r > float64(t.decode(t.largest)) {
		return sign | t.inf
	}
	// Finite codes are in the order of their values.
	lo, hi := 0, int(t.largest)
	for lo < hi {
		if mid := (lo + hi) / 2; float64(t.decode(uint8(mid))) < r {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return sign | uint8(lo)
}
