// Package hostmem allocates host memory that other processes of this host can map: tensors in it are handed over
// without a copy.
package hostmem

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Memory is an allocation. It is the owner of its backend.Mem, which counts the users: the memory is unmapped when Free
// was called and no transport uses it any more.
type Memory struct {
	base  unsafe.Pointer
	size  int // whole pages
	users atomic.Int32
	free  sync.Once

	mu    sync.RWMutex // locked while the file is replaced
	file  atomic.Pointer[File]
	shown atomic.Bool // a peer may write to the file
}

// File is the file of an allocation.
type File struct {
	FD   int
	Name uint64 // its inode number; a file that replaces it has another one
}

// Addresses are a property of the process, and so is this list: all nodes of a process use it.
var allocations struct {
	mu    sync.Mutex                // guards changes
	list  atomic.Pointer[[]*Memory] // by address
	freed atomic.Uint64
}

// Freed is the number of allocations that were unmapped so far.
func Freed() uint64 { return allocations.freed.Load() }

// Alloc allocates n bytes, with contents 0. Free frees them.
func Alloc(n int) (backend.Mem, error) {
	if n < 0 || n > 1<<bits.UintSize/4-1 {
		return backend.Mem{}, fmt.Errorf("shared memory of %d bytes, want 0 or more", n)
	}
	m := &Memory{size: max(roundUp(n), pageSize)}
	m.users.Store(1)
	file, err := newFile(m.size)
	if err != nil {
		return backend.Mem{}, err
	}
	m.file.Store(&file)
	if m.base, err = unix.MmapPtr(file.FD, 0, nil, uintptr(m.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return backend.Mem{}, errors.Join(fmt.Errorf("map shared memory of %d bytes: %w", m.size, err), unix.Close(file.FD))
	}
	change(func(list []*Memory) []*Memory {
		i, _ := search(list, m.addr())
		return slices.Insert(list, i, m)
	})
	return backend.At(m.base, n, backend.Host, m), nil
}

const pageSize = 4096 // a larger page is a multiple of it, and the kernel rounds up

func roundUp(n int) int { return (n + pageSize - 1) &^ (pageSize - 1) }

func newFile(size int) (File, error) {
	fd, err := memfd.New(size)
	if err != nil {
		return File{}, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return File{}, errors.Join(fmt.Errorf("fstat: %w", err), unix.Close(fd))
	}
	return File{fd, st.Ino}, nil
}

// Free frees memory that Alloc has returned, once no transport uses it. Other memory, and memory that was freed, are
// left alone.
func Free(mem backend.Mem) {
	if m, ok := mem.Owner().(*Memory); ok {
		m.free.Do(m.Release)
	}
}

// Retain implements backend.Holder.
func (m *Memory) Retain() { m.users.Add(1) }

// Release implements backend.Holder.
func (m *Memory) Release() {
	if m.users.Add(-1) > 0 {
		return
	}
	change(func(list []*Memory) []*Memory {
		return slices.DeleteFunc(list, func(x *Memory) bool { return x == m })
	})
	m.mu.Lock()
	defer m.mu.Unlock()
	_ = unix.MunmapPtr(m.base, uintptr(m.size))
	_ = unix.Close(m.file.Load().FD)
	allocations.freed.Add(1)
}

// change replaces the list by what f makes of a copy.
func change(f func(list []*Memory) []*Memory) {
	allocations.mu.Lock()
	defer allocations.mu.Unlock()
	list := f(slices.Clone(all()))
	allocations.list.Store(&list)
}

func all() []*Memory {
	if l := allocations.list.Load(); l != nil {
		return *l
	}
	return nil
}

func search(list []*Memory, addr uint64) (int, bool) {
	return slices.BinarySearchFunc(list, addr, func(m *Memory, a uint64) int { return cmp.Compare(m.addr(), a) })
}

func (m *Memory) addr() uint64 { return uint64(uintptr(m.base)) }

// Extent is the address and the length of the allocation.
func (m *Memory) Extent() (addr uint64, n int) { return m.addr(), m.size }

// Of returns the allocation that all of mem lies in, or nil. The caller has a user of it.
func Of(mem backend.Mem) *Memory {
	list := all()
	if len(list) == 0 || mem.Len() == 0 || !mem.OnHost() {
		return nil
	}
	i, exact := search(list, mem.Addr())
	if !exact {
		i--
	}
	if i < 0 {
		return nil
	}
	if m := list[i]; mem.Addr()+uint64(mem.Len()) <= m.addr()+uint64(m.size) {
		return m
	}
	return nil
}

// Allocated reports whether an allocation begins at addr.
func Allocated(addr uint64) bool {
	_, ok := search(all(), addr)
	return ok
}

// Show returns the file of m for a peer, which will map it. writes says that the peer may write to it.
func (m *Memory) Show(writes bool) File {
	if writes && !m.shown.Load() {
		m.mu.RLock() // Revoke clears shown
		defer m.mu.RUnlock()
		m.shown.Store(true)
	}
	return *m.file.Load()
}

// Has reports whether mem lies in the file with that name. What a peer has written there before it said so is in mem
// then.
func Has(mem backend.Mem, name uint64) bool {
	m := Of(mem)
	if m == nil {
		return false
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.file.Load().Name == name
}

// Revoke gives the allocation of mem another file, with the same contents at the same address, if a peer may write to its
// file: what the peer writes from now on is lost. Answers that other peers are writing to the same allocation are not
// in it either; Has tells. Other memory is left alone.
func Revoke(mem backend.Mem) error {
	m := Of(mem)
	if m == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.shown.Load() {
		return nil
	}
	file, err := newFile(m.size)
	if err != nil {
		return fmt.Errorf("take memory back from peers: %w", err)
	}
	// The contents are copied through a mapping of their own, which then replaces the allocation's: threads that read the
	// memory see the same bytes before and after.
	to, err := unix.MmapPtr(file.FD, 0, nil, uintptr(m.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return errors.Join(fmt.Errorf("take memory back from peers: map %d bytes: %w", m.size, err), unix.Close(file.FD))
	}
	copy(unsafe.Slice((*byte)(to), m.size), unsafe.Slice((*byte)(m.base), m.size))
	err = unix.MunmapPtr(to, uintptr(m.size))
	if err == nil {
		_, err = unix.MmapPtr(file.FD, 0, m.base, uintptr(m.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED|unix.MAP_POPULATE)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("take memory back from peers: map %d bytes: %w", m.size, err), unix.Close(file.FD))
	}
	_ = unix.Close(m.file.Swap(&file).FD)
	m.shown.Store(false)
	return nil
}
