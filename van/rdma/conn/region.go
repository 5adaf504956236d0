package conn

import (
	"cmp"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// This file owns the registrations of callers' memory.

// Regions caches the memory regions of callers' tensors on one device. A region holds its memory until it is evicted: memory of Go is pinned,
// other memory is retained. An address therefore always means the memory that was registered there.
//
// Finding a region takes no lock. An unused region is evicted after a while, or when the cache is full.
type Regions struct {
	dev  verbs.Device
	back backend.Backend // allocates device memory

	sorted atomic.Pointer[[]*Region] // by address, then by length, since find tries the longest first

	// removing is held for reading while a region is removed, so that Invalidate can wait for that.
	removing sync.RWMutex

	// OnStuck is called for a region that could not be deregistered. Peers may still write there, so its memory is kept until the
	// process ends.
	OnStuck func(*Region, error)

	mu     sync.Mutex // guards changes of sorted
	bytes  int        // registered
	closed bool
}

// Limits of unused regions in the cache.
const (
	maxRegions   = 1024
	maxIdleBytes = 512 << 20
	maxIdle      = 30 * time.Second
)

// Region is registered memory of a caller.
type Region struct {
	Mem    backend.Mem
	access verbs.Access
	MR     verbs.MR
	pin    runtime.Pinner
	last   atomic.Uint64 // time of the last use
	// refs counts users. The region is dead if refs is negative.
	refs        atomic.Int32
	invalidated atomic.Bool // find skips it
	owner       *Regions
}

const regionDead = -1 << 30

func NewRegions(dev verbs.Device, back backend.Backend) *Regions {
	r := &Regions{dev: dev, back: back, OnStuck: func(*Region, error) {}}
	r.sorted.Store(&[]*Region{})
	return r
}

func (r *Region) acquire() bool {
	for {
		n := r.refs.Load()
		if n < 0 || r.invalidated.Load() {
			return false
		}
		if r.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// Release ends a use. The last one of an invalidated region deregisters it.
func (r *Region) Release() {
	r.last.Store(clock.Now())
	if r.refs.Add(-1) == 0 && r.invalidated.Load() {
		r.owner.remove(r)
	}
}

// findSteps is the number of preceding regions that find tries.
const findSteps = 8

// find returns a region that covers m, and counts a use of it. Memory that is sent has regions of its own, which no peer can write to: a region
// that peers write to is invalidated when its request is canceled.
func (rs *Regions) find(m backend.Mem, a verbs.Access) *Region {
	all := *rs.sorted.Load()
	addr := m.Addr()
	i, _ := slices.BinarySearchFunc(all, addr, func(r *Region, addr uint64) int {
		if r.Mem.Addr() <= addr {
			return -1
		}
		return 1
	})
	for k := i - 1; k >= 0 && k >= i-findSteps; k-- {
		r := all[k]
		if off := addr - r.Mem.Addr(); off+uint64(m.Len()) <= uint64(r.Mem.Len()) && r.access == a && r.Mem.Device() == m.Device() && r.acquire() {
			return r
		}
	}
	return nil
}

// Get returns a region that covers m, and registers one if necessary. The caller releases it.
func (rs *Regions) Get(m backend.Mem, a verbs.Access) (*Region, error) {
	if r := rs.find(m, a); r != nil {
		return r, nil
	}
	rs.Evict(clock.Now())
	r := &Region{Mem: m, access: a, owner: rs}
	if m.OnHost() {
		r.pin.Pin((*byte)(m.Ptr()))
	}
	m.Retain()
	mr, err := register(rs.dev, rs.back, m, a)
	if err != nil {
		r.pin.Unpin()
		m.Release()
		return nil, err
	}
	r.MR = mr
	r.refs.Store(1)
	rs.mu.Lock()
	closed := rs.closed
	if !closed {
		rs.change(func(all []*Region) []*Region {
			i, _ := slices.BinarySearchFunc(all, r, func(x, y *Region) int {
				return cmp.Or(cmp.Compare(x.Mem.Addr(), y.Mem.Addr()), cmp.Compare(x.Mem.Len(), y.Mem.Len()))
			})
			return slices.Insert(all, i, r)
		})
		rs.bytes += m.Len()
	}
	rs.mu.Unlock()
	if closed {
		return nil, errors.Join(verbs.ErrClosed, r.deregister())
	}
	return r, nil
}

// change replaces the table. rs.mu is held.
func (rs *Regions) change(f func([]*Region) []*Region) {
	all := f(slices.Clone(*rs.sorted.Load()))
	rs.sorted.Store(&all)
}

// stuckRegions holds the regions that could not be deregistered. It outlives the van, since the process must never reuse their memory.
var stuckRegions sync.Map

func (r *Region) deregister() error {
	if err := r.MR.Deregister(); err != nil {
		stuckRegions.Store(r, true)
		r.owner.OnStuck(r, err)
		return err
	}
	r.pin.Unpin()
	r.Mem.Release() // keep Mem: find may still read it
	return nil
}

// remove deregisters r unless it is in use.
func (rs *Regions) remove(r *Region) {
	rs.removing.RLock()
	defer rs.removing.RUnlock()
	if r.refs.CompareAndSwap(0, regionDead) {
		rs.removeDead(r)
	}
}

// removeDead removes a dead region from the table, and deregisters it.
func (rs *Regions) removeDead(r *Region) {
	rs.mu.Lock()
	rs.change(func(all []*Region) []*Region { return slices.DeleteFunc(all, func(x *Region) bool { return x == r }) })
	rs.bytes -= r.Mem.Len()
	rs.mu.Unlock()
	_ = r.deregister()
}

// idle returns the time since r was last used.
func (r *Region) idle(now uint64) time.Duration { return time.Duration(now - r.last.Load()) }

// InUse returns the number of regions in use.
func (rs *Regions) InUse() (n int) {
	for _, r := range *rs.sorted.Load() {
		if r.refs.Load() > 0 {
			n++
		}
	}
	return n
}

// Evict deregisters regions that were not used for maxIdle, and others if the cache is full.
func (rs *Regions) Evict(now uint64) {
	all := *rs.sorted.Load()
	if len(all) == 0 {
		return
	}
	rs.mu.Lock()
	over := rs.bytes > maxIdleBytes || len(all) >= maxRegions
	rs.mu.Unlock()
	var idle []*Region
	bytes := 0
	for _, r := range all {
		if r.refs.Load() == 0 && (over || r.idle(now) > maxIdle) {
			idle = append(idle, r)
			bytes += r.Mem.Len()
		}
	}
	slices.SortFunc(idle, func(x, y *Region) int { return cmp.Compare(x.last.Load(), y.last.Load()) })
	left := len(all)
	for _, r := range idle {
		n := r.Mem.Len()
		if r.idle(now) <= maxIdle && bytes <= maxIdleBytes/2 && left <= maxRegions*3/4 {
			break
		}
		rs.remove(r)
		bytes -= n
		left--
	}
}

// Invalidate ends remote write access to m, except by the regions in kept. It waits for removals in progress.
func (rs *Regions) Invalidate(m backend.Mem, kept []*Region) {
	rs.removing.Lock()
	defer rs.removing.Unlock()
	for _, r := range *rs.sorted.Load() {
		if r.access&verbs.RemoteWrite == 0 || !r.Mem.Overlaps(m) || slices.Contains(kept, r) {
			continue
		}
		r.invalidated.Store(true)
		if r.refs.Swap(regionDead) >= 0 { // users see failed completions
			rs.removeDead(r)
		}
	}
}

// Close deregisters everything.
func (rs *Regions) Close() error {
	rs.mu.Lock()
	rs.closed = true
	all := *rs.sorted.Load()
	rs.sorted.Store(&[]*Region{})
	rs.bytes = 0
	rs.mu.Unlock()
	var errs []error
	for _, r := range all {
		if r.refs.Swap(regionDead) >= 0 {
			errs = append(errs, r.deregister())
		}
	}
	return errors.Join(errs...)
}
