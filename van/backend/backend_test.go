package backend

import (
	"errors"
	"testing"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

// TestNewInAnyCase: names are found however they are written.
func TestNewInAnyCase(t *testing.T) {
	for _, name := range []string{"CPU", "cpu", "Cpu"} {
		if b, err := New(name, 0); err != nil || b.Name() != "CPU" {
			t.Errorf("New(%q): %v, %v", name, b, err)
		}
	}
	if b, err := New("abacus", 0); !errors.Is(err, ErrUnavailable) {
		t.Errorf("New of what there is not: %v, %v", b, err)
	}
}

// TestOverlaps: ranges of one device that have a byte in common, and no others, overlap.
func TestOverlaps(t *testing.T) {
	all := Bytes(make([]byte, 16))
	for _, x := range []struct {
		a, b [2]int // from, bytes
		want bool
	}{
		{[2]int{0, 4}, [2]int{0, 4}, true}, {[2]int{0, 4}, [2]int{3, 4}, true}, {[2]int{0, 16}, [2]int{5, 1}, true},
		{[2]int{0, 4}, [2]int{4, 4}, false}, {[2]int{0, 4}, [2]int{8, 4}, false}, {[2]int{0, 8}, [2]int{4, 0}, false}, {[2]int{4, 0}, [2]int{4, 0}, false},
	} {
		a, b := all.Sub(x.a[0], x.a[1]), all.Sub(x.b[0], x.b[1])
		if a.Overlaps(b) != x.want || b.Overlaps(a) != x.want {
			t.Errorf("%v and %v: %t and %t, want %t", x.a, x.b, a.Overlaps(b), b.Overlaps(a), x.want)
		}
		if there := At(b.Ptr(), b.Len(), Device{Type: GPU}, nil); a.Overlaps(there) {
			t.Errorf("%v and %v of another device overlap", x.a, x.b)
		}
	}
	if (Mem{}).Overlaps(Mem{}) || all.Overlaps(Mem{}) {
		t.Error("the zero Mem overlaps")
	}
}
