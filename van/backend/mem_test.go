package backend

import "testing"

// TestExtent: a Mem says what it was made with, and what no memory can have is empty, of an unknown device.
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
