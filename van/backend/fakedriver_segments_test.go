package backend

// The fake driver's memory that is mapped from allocations. An allocation is a memfd, so
// that two fakes share it as two processes share a device's.

import (
	"fmt"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// fakeSegments is that part of a fakeDriver; its mutex guards it.
type fakeSegments struct {
	handles  map[uint64]*fakeHandle
	mapped   map[uintptr]fakeMapping
	reserved map[uintptr]int
	access   int // the device of the last memAccess
}

type fakeHandle struct {
	fd, refs int
	private  bool // made without a descriptor
}

type fakeMapping struct {
	n int
	h uint64
}

func (s *fakeSegments) init() {
	if s.handles == nil {
		s.handles, s.mapped, s.reserved = map[uint64]*fakeHandle{}, map[uintptr]fakeMapping{}, map[uintptr]int{}
	}
}

func (s *fakeSegments) left() map[string]int {
	return map[string]int{"allocations": len(s.handles), "mappings": len(s.mapped), "reservations": len(s.reserved)}
}

// drop releases one hold. The mutex is held.
func (s *fakeSegments) drop(h uint64) bool {
	x := s.handles[h]
	if x == nil {
		return false
	}
	if x.refs--; x.refs == 0 {
		_ = unix.Close(x.fd)
		delete(s.handles, h)
	}
	return true
}

// add makes a handle of a file, which it takes. The mutex is held. Numbers are used again,
// as the driver uses its own.
func (s *fakeSegments) add(fd int) uint64 {
	s.init()
	h := uint64(0x5000)
	for s.handles[h] != nil {
		h++
	}
	s.handles[h] = &fakeHandle{fd: fd, refs: 1}
	return h
}

// create allocates n bytes and returns their handle.
func (f *fakeDriver) create(n int) uint64 {
	fd, err := unix.MemfdCreate("fake", unix.MFD_CLOEXEC)
	if err == nil {
		err = unix.Ftruncate(fd, int64(n))
	}
	if err != nil {
		panic(err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.seg.add(fd)
}

// expand does what PyTorch does: it maps allocations of these lengths one after the other,
// and returns their address.
func (f *fakeDriver) expand(sizes ...int) uintptr {
	total := 0
	for _, n := range sizes {
		total += n
	}
	base, err := unix.MmapPtr(-1, 0, nil, uintptr(total), unix.PROT_NONE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		panic(err)
	}
	at := uintptr(base)
	for _, n := range sizes {
		f.remap(at, n)
		at += uintptr(n)
	}
	return uintptr(base)
}

// remap puts a new allocation at addr.
func (f *fakeDriver) remap(addr uintptr, n int) {
	h := f.create(n)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mapLocked(addr, n, h)
	f.seg.drop(h) // PyTorch keeps it, which changes nothing: the mapping does, too
}

// unmap takes what is mapped at addr away, as PyTorch does when it trims.
func (f *fakeDriver) unmap(addr uintptr) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.unmapLocked(addr)
}

func (f *fakeDriver) mapLocked(addr uintptr, n int, h uint64) {
	x := f.seg.handles[h]
	if _, err := unix.MmapPtr(x.fd, 0, pointer(addr), uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		panic(err)
	}
	x.refs++
	f.seg.mapped[addr] = fakeMapping{n, h}
}

func (f *fakeDriver) unmapLocked(addr uintptr) {
	m := f.seg.mapped[addr]
	delete(f.seg.mapped, addr)
	f.seg.drop(m.h)
	if _, err := unix.MmapPtr(-1, 0, pointer(addr), uintptr(m.n), unix.PROT_NONE, unix.MAP_ANON|unix.MAP_PRIVATE|unix.MAP_FIXED); err != nil {
		panic(err)
	}
}

// at finds the mapping in which addr lies. The mutex is held.
func (s *fakeSegments) at(addr uintptr) (uintptr, fakeMapping, bool) {
	for base, m := range s.mapped {
		if addr >= base && addr < base+uintptr(m.n) {
			return base, m, true
		}
	}
	return 0, fakeMapping{}, false
}

func (f *fakeDriver) handleAt(addr uintptr) (uint64, error) {
	if err := f.call("handleAt", true); err != nil {
		return 0, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	_, m, ok := f.seg.at(addr)
	if !ok {
		return 0, f.err("handleAt", codeInvalidValue)
	}
	f.seg.handles[m.h].refs++
	return m.h, nil
}

func (f *fakeDriver) handleRelease(h uint64) error {
	if err := f.call("handleRelease", true); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.seg.drop(h) {
		f.misuses = append(f.misuses, fmt.Sprintf("handle %#x is released too often", h))
		return f.err("handleRelease", codeInvalidValue)
	}
	return nil
}

func (f *fakeDriver) handleShareable(h uint64) (bool, error) {
	if err := f.call("handleShareable", true); err != nil {
		return false, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return !f.seg.handles[h].private, nil
}

func (f *fakeDriver) handleExport(h uint64) (int, error) {
	if err := f.call("handleExport", true); err != nil {
		return -1, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return unix.FcntlInt(uintptr(f.seg.handles[h].fd), unix.F_DUPFD_CLOEXEC, 0)
}

func (f *fakeDriver) handleImport(fd int) (uint64, error) {
	if err := f.call("handleImport", true); err != nil {
		return 0, err
	}
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return 0, f.err("handleImport", codeInvalidValue)
	}
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return 0, f.err("handleImport", 999)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.seg.add(own), nil
}

func (f *fakeDriver) addressReserve(n int) (uintptr, error) {
	if err := f.call("addressReserve", true); err != nil {
		return 0, err
	}
	p, err := unix.MmapPtr(-1, 0, nil, uintptr(n), unix.PROT_NONE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return 0, f.err("addressReserve", codeOutOfMemory)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.seg.init()
	f.seg.reserved[uintptr(p)] = n
	return uintptr(p), nil
}

func (f *fakeDriver) addressFree(addr uintptr, n int) error {
	if err := f.call("addressFree", true); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, _, mapped := f.seg.at(addr); mapped || f.seg.reserved[addr] != n {
		return f.err("addressFree", codeInvalidValue)
	}
	delete(f.seg.reserved, addr)
	return unix.MunmapPtr(pointer(addr), uintptr(n))
}

func (f *fakeDriver) memMap(addr uintptr, n int, h uint64) error {
	if err := f.call("memMap", true); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	var st unix.Stat_t
	if x := f.seg.handles[h]; x == nil || f.seg.reserved[addr] < n || unix.Fstat(x.fd, &st) != nil || int64(n) > st.Size {
		return f.err("memMap", codeInvalidValue)
	}
	f.mapLocked(addr, n, h)
	return nil
}

func (f *fakeDriver) memUnmap(addr uintptr, n int) error {
	if err := f.frees("memUnmap"); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.seg.mapped[addr].n != n {
		return f.err("memUnmap", codeInvalidValue)
	}
	f.unmapLocked(addr)
	return nil
}

func (f *fakeDriver) memAccess(addr uintptr, n, ordinal int) error {
	f.mu.Lock()
	f.seg.access = ordinal
	f.mu.Unlock()
	return f.call("memAccess", true)
}

// bytesAt is memory of any fake.
func bytesAt(addr uintptr, n int) []byte { return unsafe.Slice((*byte)(pointer(addr)), n) }

// descriptors is how many files the process has open.
func descriptors(t testing.TB) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}
