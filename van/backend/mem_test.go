package backend

import (
	"math"
	"testing"
)

// TestExtent: a Mem returns its length and device. With impossible arguments it is empty, on an unknown device.
func TestExtent(t *testing.T) {
	for _, n := range []int{0, 1, 1 << 31, maxLen} {
		for _, d := range []Device{{}, Host, {CPU, -1}, {GPU, 0}, {GPU, 7}, {GPU, 16378}, {7, 1<<14 - 1}, {7, -1 << 14}} {
			m := At(nil, n, d, nil)
			if m.Len() != n || m.Device() != d {
				t.Errorf("%d bytes on %s are %d on %s", n, d, m.Len(), m.Device())
			}
			if s := m.Sub(n/2, n-n/2); s.Len() != n-n/2 || s.Device() != d {
				t.Errorf("a part of %d bytes on %s is %d on %s, want %d", n, d, s.Len(), s.Device(), n-n/2)
			}
		}
	}
	for _, m := range []Mem{At(nil, -1, Host, nil), At(nil, maxLen+1, Host, nil), At(nil, 1, Device{GPU, 1 << 14}, nil), At(nil, 1, Device{GPU, -1<<14 - 1}, nil), At(nil, 1, Device{8, 0}, nil), At(nil, 1, Device{-1, 0}, nil)} {
		if m.Len() != 0 || m.Device() != (Device{}) {
			t.Errorf("%d bytes on %s, want none of an unknown device", m.Len(), m.Device())
		}
	}
}

// TestSubOutside: a part that does not lie in the range is refused as a slice's is.
func TestSubOutside(t *testing.T) {
	m := Bytes(make([]byte, 10))
	for _, c := range [][2]int{{-1, 1}, {0, -1}, {11, -1}, {0, 11}, {10, 1}, {11, 0}, {math.MaxInt, 1}, {1, math.MaxInt}, {math.MinInt, math.MaxInt}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("Sub(%d, %d) of 10 bytes does not panic", c[0], c[1])
				}
			}()
			m.Sub(c[0], c[1])
		}()
	}
	if s := m.Sub(10, 0); s.Len() != 0 {
		t.Errorf("an empty part has %d bytes", s.Len())
	}
}

// TestHostOfDevice: memory of a device is no slice.
func TestHostOfDevice(t *testing.T) {
	b := make([]byte, 4)
	for _, d := range []Device{{GPU, 0}, {GPU, 7}, {}} {
		if h := At(Bytes(b).Ptr(), len(b), d, nil).Host(); h != nil {
			t.Errorf("memory on %s is a slice of %d bytes", d, len(h))
		}
	}
}

// TestAllocNothing: no bytes are on the host, too.
func TestAllocNothing(t *testing.T) {
	b, err := New("CPU", 0)
	if err != nil {
		t.Fatal(err)
	}
	if m, err := b.Alloc(0); err != nil || m.Len() != 0 || m.Device() != Host {
		t.Errorf("Alloc(0): %d bytes on %s, %v", m.Len(), m.Device(), err)
	}
}
