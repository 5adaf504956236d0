package local

import (
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestLongRead: a value that takes several system calls to read is read one part behind the
// other.
func TestLongRead(t *testing.T) {
	const n = maxRead + 1<<20
	area := func() []byte {
		b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Munmap(b) })
		return b
	}
	from, to := area(), area()
	marks := []int{0, maxRead - 1, maxRead, n - 1}
	for i, at := range marks {
		from[at] = byte(i + 1)
	}
	r, err := openRemote(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	if err := r.read(to, uint64(uintptr(unsafe.Pointer(&from[0])))); err != nil {
		t.Skip("memory of processes cannot be read here:", err)
	}
	for i, at := range marks {
		if to[at] != byte(i+1) {
			t.Errorf("byte %d is %d, want %d", at, to[at], i+1)
		}
	}
}
