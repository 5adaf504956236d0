package van_test

import (
	"errors"
	"testing"

	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/van"
)

// TestMapExport: a mapping that is shorter than its descriptor says is an error of the peer.
func TestMapExport(t *testing.T) {
	d, other := simgpu.New(0), simgpu.New(1)
	defer d.Close()
	defer other.Close()
	m, err := d.Alloc(100)
	if err != nil {
		t.Fatal(err)
	}
	e, err := d.Export(m)
	if err != nil {
		t.Fatal(err)
	}
	e.Offset = 40
	got, _, err := van.MapExport(other, e, 60)
	if err != nil || got.Len() != 60 || got.Addr() != m.Addr()+40 {
		t.Errorf("%d bytes at %#x, %v; want 60 at %#x", got.Len(), got.Addr(), err, m.Addr()+40)
	}
	for _, off := range []int{41, 101} {
		e.Offset = off
		if _, _, err := van.MapExport(other, e, 60); !errors.Is(err, van.ErrMalformed) {
			t.Errorf("60 bytes at %d of 100: %v, want %v", off, err, van.ErrMalformed)
		}
	}
	e.Handle[0]++
	if _, _, err := van.MapExport(other, e, 1); err == nil || errors.Is(err, van.ErrMalformed) {
		t.Errorf("another handle: %v", err)
	}
}
