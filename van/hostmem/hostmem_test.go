package hostmem

import (
	"bytes"
	"math"
	"testing"

	"golang.org/x/sys/unix"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/van/backend"
)

func alloc(t *testing.T, n int) backend.Mem {
	t.Helper()
	m, err := Alloc(n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { Free(m) })
	return m
}

// TestFind: memory belongs to the allocation that all its bytes lie in.
func TestFind(t *testing.T) {
	a, b := alloc(t, 10_000), alloc(t, 1)
	own := a.Owner().(*Allocation)
	_, size := own.Extent()
	for _, c := range []struct {
		name string
		mem  backend.Mem
		want *Allocation
	}{
		{"all", a, own}, {"a part", a.Sub(9_000, 1_000), own}, {"the last byte", a.Sub(9_999, 1), own}, {"another allocation", b, b.Owner().(*Allocation)},
		{"none", a.Sub(5, 0), nil}, {"Go's memory", backend.Bytes(make([]byte, 100)), nil},
		{"beyond the end", backend.At(a.Ptr(), size+1, backend.Host, nil), nil}, {"on a device", backend.At(a.Ptr(), 10, backend.Device{Type: backend.GPU}, nil), nil},
	} {
		if got := Find(c.mem); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
	for _, n := range []int{-1, math.MinInt, math.MaxInt} {
		if _, err := Alloc(n); err == nil {
			t.Errorf("%d bytes were allocated", n)
		}
	}
}

// TestFree: memory is unmapped once, after Free and the end of its last use.
func TestFree(t *testing.T) {
	m, err := Alloc(100)
	if err != nil {
		t.Fatal(err)
	}
	before := Freed()
	m.Retain()
	Free(m)
	Free(m)
	copy(m.Host(), "still there")
	if Find(m) == nil || Freed() != before {
		t.Fatal("freed while it is in use")
	}
	m.Release()
	if Find(m) != nil || Allocated(m.Addr()) || Freed() != before+1 {
		t.Error("not freed after its last use")
	}
	Free(backend.Bytes([]byte("Go's memory")))
}

// TestRevoke: an allocation that a peer may write to gets another file with the same contents at the same address.
func TestRevoke(t *testing.T) {
	m := alloc(t, 5000)
	own := m.Owner().(*Allocation)
	copy(m.Host(), "contents")
	file := own.Export(false)
	if err := Revoke(m); err != nil || own.Export(false) != file {
		t.Fatalf("%v: memory that no peer writes to has another file", err)
	}
	if file != own.Export(true) {
		t.Fatal("Export has changed the file")
	}
	_, size := own.Extent()
	peer, err := unix.Mmap(file.FD, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(peer)
	copy(peer[100:], "answer")
	if string(m.Host()[100:106]) != "answer" || !HasFile(m, file.Inode) {
		t.Fatal("the peer does not write to the memory")
	}
	for _, part := range []backend.Mem{m.Sub(0, 4096), m.Sub(1, 4999), m.Sub(0, 4999)} {
		if err := Revoke(part); err != nil || own.Export(false) != file {
			t.Fatalf("%v: the allocation of a part has another file", err)
		}
	}
	if err := Revoke(m); err != nil {
		t.Fatal(err)
	}
	copy(peer, "late")
	if !bytes.HasPrefix(m.Host(), []byte("contents")) || string(m.Host()[100:106]) != "answer" {
		t.Errorf("the memory has %q and %q", m.Host()[:8], m.Host()[100:106])
	}
	if HasFile(m, file.Inode) || !HasFile(m, own.Export(false).Inode) {
		t.Error("the memory has its former file")
	}
	if err := Revoke(backend.Bytes([]byte("Go's memory"))); err != nil {
		t.Error(err)
	}
}
