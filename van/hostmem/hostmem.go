// Package hostmem allocates host memory that other processes of this host can map, so that values in it need no copy.
package hostmem

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Allocation is memory that is mapped from a file of its own. It is the owner of its backend.Mem, and counts the users: the
// memory is unmapped when Free was called and no transport uses it any more.
type Allocation struct {
	base  unsafe.Pointer
	n     int // requested bytes
	size  int // mapped bytes: n rounded up to whole pages
	users atomic.Int32
	free  sync.Once

	mu   sync.RWMutex // locked while the file is replaced
	file atomic.Pointer[File]
}

// File is the file of an allocation. Another file that replaces it has another inode.
type File struct {
	FD    int
	Inode uint64

	writable atomic.Bool // a peer may write to it
}

// allocations are those of the process, as its addresses are; all its nodes use them.
var allocations struct {
	mu    sync.Mutex                    // guards changes
	list  atomic.Pointer[[]*Allocation] // by address
	freed atomic.Uint64
}

// Freed returns how many allocations were unmapped so far.
func Freed() uint64 { return allocations.freed.Load() }

// Alloc allocates n bytes, with contents 0. Free frees them.
func Alloc(n int) (backend.Mem, error) {
	const most = 1 << 46
	if n < 0 || n > most {
		return backend.Mem{}, fmt.Errorf("shared memory of %d bytes, want 0 to %d", n, most)
	}
	a := &Allocation{n: n, size: pages(n)}
	a.users.Store(1)
	file, err := newFile(a.size)
	if err != nil {
		return backend.Mem{}, err
	}
	a.file.Store(file)
	if a.base, err = unix.MmapPtr(file.FD, 0, nil, uintptr(a.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return backend.Mem{}, errors.Join(fmt.Errorf("map shared memory of %d bytes: %w", a.size, err), unix.Close(file.FD))
	}
	change(func(list []*Allocation) []*Allocation {
		i, _ := search(list, a.addr())
		return slices.Insert(list, i, a)
	})
	return backend.At(a.base, n, backend.Host, a), nil
}

// pageSize is the size of a small page. Larger ones are multiples of it.
const pageSize = 4096

// pages returns the bytes of the pages for n bytes, at least one page.
func pages(n int) int { return max((n+pageSize-1)&^(pageSize-1), pageSize) }

func newFile(size int) (*File, error) {
	fd, err := memfd.New(size)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, errors.Join(fmt.Errorf("fstat: %w", err), unix.Close(fd))
	}
	return &File{FD: fd, Inode: st.Ino}, nil
}

// Free frees memory that Alloc has returned, once no transport uses it. For other memory, and memory that was freed, it does
// nothing.
func Free(mem backend.Mem) {
	if a, ok := mem.Owner().(*Allocation); ok {
		a.free.Do(a.Release)
	}
}

// Retain implements backend.Holder.
func (a *Allocation) Retain() { a.users.Add(1) }

// Release implements backend.Holder.
func (a *Allocation) Release() {
	if a.users.Add(-1) > 0 {
		return
	}
	change(func(list []*Allocation) []*Allocation {
		return slices.DeleteFunc(list, func(x *Allocation) bool { return x == a })
	})
	_ = unix.MunmapPtr(a.base, uintptr(a.size))
	_ = unix.Close(a.file.Load().FD)
	allocations.freed.Add(1)
}

// change replaces the list by the result of f, which gets a copy of it.
func change(f func(list []*Allocation) []*Allocation) {
	allocations.mu.Lock()
	defer allocations.mu.Unlock()
	list := f(slices.Clone(all()))
	allocations.list.Store(&list)
}

func all() []*Allocation {
	if l := allocations.list.Load(); l != nil {
		return *l
	}
	return nil
}

func search(list []*Allocation, addr uint64) (int, bool) {
	return slices.BinarySearchFunc(list, addr, func(a *Allocation, addr uint64) int { return cmp.Compare(a.addr(), addr) })
}

func (a *Allocation) addr() uint64 { return uint64(uintptr(a.base)) }

// Extent returns the address and the length of the allocation.
func (a *Allocation) Extent() (addr uint64, n int) { return a.addr(), a.size }

// Find returns the allocation that all of mem lies in, or nil. The caller holds a reference to mem.
func Find(mem backend.Mem) *Allocation {
	list := all()
	if len(list) == 0 || mem.Len() == 0 || !mem.OnHost() {
		return nil
	}
	i, exact := search(list, mem.Addr())
	if !exact {
		i--
	}
	if i < 0 || mem.Addr()+uint64(mem.Len()) > list[i].addr()+uint64(list[i].size) {
		return nil
	}
	return list[i]
}

// Allocated reports whether an allocation begins at addr.
func Allocated(addr uint64) bool {
	_, ok := search(all(), addr)
	return ok
}

// IsWhole reports whether mem, which lies in a, is all of it.
func (a *Allocation) IsWhole(mem backend.Mem) bool {
	return mem.Addr() == a.addr() && mem.Len() == a.n
}

// Export returns the file of a for a peer, which will map it. writable says that the peer may write to it.
func (a *Allocation) Export(writable bool) *File {
	f := a.file.Load()
	if writable && !f.writable.Load() {
		f.writable.Store(true)
	}
	return f
}

// HasFile reports whether mem lies in the file with that inode. If so, mem has everything that a peer wrote to the file before
// it sent its message.
func HasFile(mem backend.Mem, inode uint64) bool {
	a := Find(mem)
	if a == nil {
		return false
	}
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.file.Load().Inode == inode
}

// Revoke gives an allocation another file, with the same contents at the same address, if a peer may write to its file: what
// the peer writes from now on is lost. mem is the whole allocation, and only that peer may write to it meanwhile; for other
// memory Revoke does nothing.
func Revoke(mem backend.Mem) error {
	a := Find(mem)
	if a == nil || !a.IsWhole(mem) {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.file.Load().writable.Load() {
		return nil
	}
	file, err := newFile(a.size)
	if err != nil {
		return fmt.Errorf("take memory back from peers: %w", err)
	}
	// The contents are copied through another mapping first: threads that read the memory see the same bytes before and
	// after.
	to, err := unix.MmapPtr(file.FD, 0, nil, uintptr(a.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err == nil {
		copy(unsafe.Slice((*byte)(to), a.size), unsafe.Slice((*byte)(a.base), a.size))
		if err = unix.MunmapPtr(to, uintptr(a.size)); err == nil {
			_, err = unix.MmapPtr(file.FD, 0, a.base, uintptr(a.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED|unix.MAP_POPULATE)
		}
	}
	if err != nil {
		return errors.Join(fmt.Errorf("take memory back from peers: map %d bytes: %w", a.size, err), unix.Close(file.FD))
	}
	return unix.Close(a.file.Swap(file).FD)
}
