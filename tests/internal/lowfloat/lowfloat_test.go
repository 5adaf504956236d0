package lowfloat

import (
	"math"
	"testing"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

func TestBF16(t *testing.T) {
	inf := float32(math.Inf(1))
	tests := []struct {
		in   float32
		want uint16
	}{
		{0, 0}, {float32(math.Copysign(0, -1)), 0x8000}, {1, 0x3f80}, {-2, 0xc000}, {inf, 0x7f80},
		{math.MaxFloat32, 0x7f80},
		{math.Float32frombits(0x3f808000), 0x3f80}, // a tie: down to even
		{math.Float32frombits(0x3f818000), 0x3f82}, // a tie: up to even
		{math.Float32frombits(0x3f808001), 0x3f81},
	}
	for _, tt := range tests {
		if got := BF16(tt.in); got != tt.want {
			t.Errorf("BF16(%g) = %#x, want %#x", tt.in, got, tt.want)
		}
	}
	if v := FromBF16(BF16(float32(math.NaN()))); !nan(v) {
		t.Errorf("NaN became %g", v)
	}
	for c := range 1 << 16 {
		if v := FromBF16(uint16(c)); !nan(v) && BF16(v) != uint16(c) {
			t.Fatalf("%#x is %g, which is %#x", c, v, BF16(v))
		}
	}
}

func TestFP8(t *testing.T) {
	tests := []struct {
		in         float32
		e4m3, e5m2 uint8
	}{
		{0, 0, 0},
		{1, 0x38, 0x3c},
		{-1, 0xb8, 0xbc},
		{448, 0x7e, 0x5f},
		{464, 0x7e, 0x5f}, // halfway between 448 and the 480 that e4m3fn does not have: to even
		{465, 0x7f, 0x5f},
		{57344, 0x7f, 0x7b},
		{61440, 0x7f, 0x7c},
		{1.0 / 512, 0x01, 0x18},
		{1.0 / 1024, 0x00, 0x14}, // a tie at half of the smallest e4m3fn
		{1.0 / 65536, 0x00, 0x01},
		{1.0625, 0x38, 0x3c}, // a tie of e4m3fn, to even
		{1.1875, 0x3a, 0x3d},
	}
	for _, tt := range tests {
		if got := E4M3(tt.in); got != tt.e4m3 {
			t.Errorf("E4M3(%g) = %#x, want %#x", tt.in, got, tt.e4m3)
		}
		if got := E5M2(tt.in); got != tt.e5m2 {
			t.Errorf("E5M2(%g) = %#x, want %#x", tt.in, got, tt.e5m2)
		}
	}
	for c := range 256 {
		if v := FromE4M3(uint8(c)); !nan(v) && E4M3(v) != uint8(c) {
			t.Errorf("e4m3 %#x is %g, which is %#x", c, v, E4M3(v))
		}
		if v := FromE5M2(uint8(c)); !nan(v) && E5M2(v) != uint8(c) {
			t.Errorf("e5m2 %#x is %g, which is %#x", c, v, E5M2(v))
		}
	}
	if v := FromE4M3(E4M3(float32(math.NaN()))); !nan(v) {
		t.Errorf("e4m3 NaN became %g", v)
	}
	if v := FromE5M2(E5M2(float32(math.Inf(-1)))); !math.IsInf(float64(v), -1) {
		t.Errorf("e5m2 -Inf became %g", v)
	}
}

func nan(v float32) bool { return math.IsNaN(float64(v)) }
