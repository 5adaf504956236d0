package backend

// The backend of ordinary host memory.

import (
	"context"
	"fmt"
	"unsafe"
)

// cpu is the backend of ordinary memory. Its events are always complete: the
// caller's writes are in memory by the time it calls.
type cpu struct{}

// NewCPU returns the backend of ordinary memory.
func NewCPU() Backend { return cpu{} }

func (cpu) Name() string   { return "CPU" }
func (cpu) Device() Device { return Host }

const alignment = 64

func (cpu) Alloc(n int) (Mem, error) {
	if n < 0 {
		return Mem{}, fmt.Errorf("backend CPU: Alloc(%d): want a length of at least 0", n)
	}
	if n == 0 {
		return Mem{size: extentOf(0, Host)}, nil
	}
	b := make([]byte, n+alignment)
	off := int(-uintptr(unsafe.Pointer(&b[0])) & (alignment - 1))
	m := Bytes(b[off : off+n : off+n])
	m.owner = &b[0]
	return m, nil
}

func (cpu) Free(Mem) error { return nil } // the garbage collector frees it

func (cpu) NewEvent() (Event, error) { return cpuEvent{}, nil }

func (cpu) Copy(dst, src Mem) error {
	if dst.Len() != src.Len() {
		return fmt.Errorf("backend CPU: Copy of %d bytes into %d", src.Len(), dst.Len())
	}
	if !dst.OnHost() || !src.OnHost() {
		return fmt.Errorf("backend CPU: Copy from %s to %s: want host memory", src.Device(), dst.Device())
	}
	copy(dst.Host(), src.Host())
	return nil
}

func (cpu) Close() error { return nil }

type cpuEvent struct{}

func (cpuEvent) Record(uintptr) error           { return nil }
func (cpuEvent) Query() (bool, error)           { return true, nil }
func (cpuEvent) Sync(ctx context.Context) error { return nil }
func (cpuEvent) Close() error                   { return nil }
