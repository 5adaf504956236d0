package rdma

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/fakeverbs"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

const both = verbs.LocalWrite | verbs.RemoteWrite

// bare is a device without a van.
func bare(t *testing.T, options ...func(*fakeverbs.Config)) (verbs.Device, *fakeverbs.Stack, *fakeverbs.Net) {
	t.Helper()
	r := &rig{T: t, net: fakeverbs.NewNet(options...)}
	r.net.OnError(func(err error) { t.Errorf("the network: %v", err) })
	a := netip.MustParseAddr("10.77.3.1")
	p := newRaw(r, a, testNode{}.who)
	id, err := p.ch.NewID(1)
	p.check(err)
	p.check(id.ResolveAddr(a, netip.AddrPortFrom(a, uint16(p.port)), time.Second))
	p.event(verbs.AddrResolved)
	dev, err := id.Device()
	p.check(err)
	t.Cleanup(func() {
		if n := p.stack.Registered(); n != 0 {
			t.Errorf("%d bytes are registered at the end", n)
		}
		r.net.Close()
	})
	return dev, p.stack, r.net
}

func TestRegionsFind(t *testing.T) {
	dev, stack, _ := bare(t)
	rs := newRegions(dev, nil)
	buf := make([]byte, 1<<20)
	get := func(lo, hi int, a verbs.Access) *region {
		t.Helper()
		r, err := rs.get(backend.Bytes(buf[lo:hi]), a)
		if err != nil {
			t.Fatal(err)
		}
		r.release()
		return r
	}
	middle := get(1000, 2000, both)
	for _, s := range []struct {
		lo, hi int
		access verbs.Access
		hit    bool
	}{
		{1000, 2000, both, true},
		{1000, 2000, 0, true}, // more access than needed
		{1500, 1501, verbs.LocalWrite, true},
		{1999, 2000, both, true},
		{999, 2000, both, false},
		{1000, 2001, both, false},
		{1999, 2001, both, false},
		{2000, 3000, both, false},
		{0, 1000, both, false},
	} {
		before := stack.Counters().Registrations
		r := get(s.lo, s.hi, s.access)
		if hit := stack.Counters().Registrations == before; hit != s.hit || hit && r != middle {
			t.Errorf("[%d, %d) with access %d: found %t, want %t", s.lo, s.hi, s.access, hit, s.hit)
		}
		if !s.hit {
			rs.remove(r)
		}
	}
	// A region for sending is not for receiving.
	get(5000, 6000, 0)
	before := stack.Counters().Registrations
	get(5000, 6000, both)
	if stack.Counters().Registrations == before {
		t.Error("a region without access is used for writing")
	}
	if n, bytes := rs.stats(); n != 3 || bytes != 3000 {
		t.Errorf("%d regions of %d bytes, want 3 of 3000", n, bytes)
	}
	if err := rs.close(); err != nil {
		t.Error(err)
	}
	if _, err := rs.get(backend.Bytes(buf), 0); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("after close: %v, want %v", err, verbs.ErrClosed)
	}
}

func TestRegionsEvict(t *testing.T) {
	dev, stack, _ := bare(t)
	rs := newRegions(dev, nil)
	// Tensors that overlap, so that they need little memory.
	const size, step = 4 << 20, 4 << 10
	tensors := make([][]byte, 2*maxIdleBytes/size)
	buf := make([]byte, size+len(tensors)*step)
	held, err := rs.get(backend.Bytes(make([]byte, size)), 0)
	if err != nil {
		t.Fatal(err)
	}
	for i := range tensors {
		tensors[i] = buf[i*step:][:size]
		r, err := rs.get(backend.Bytes(tensors[i]), 0)
		if err != nil {
			t.Fatal(err)
		}
		r.release()
		if n, bytes := rs.stats(); bytes > maxIdleBytes+2*size || bytes != stack.Registered() || n > maxRegions {
			t.Fatalf("%d regions of %d bytes, %d registered", n, bytes, stack.Registered())
		}
	}
	// What was used last is still there.
	if r := rs.find(backend.Bytes(tensors[len(tensors)-1]), 0); r == nil {
		t.Error("what was used last has been evicted")
	} else {
		r.release()
	}
	if rs.find(backend.Bytes(tensors[0]), 0) != nil {
		t.Error("what was used first has not been evicted")
	}
	// Without use all but the one in use end.
	rs.evict(clock.Now())
	rs.evict(clock.Now() + uint64(maxIdle) + 1e9)
	if n, bytes := rs.stats(); n != 1 || bytes != size {
		t.Errorf("%d regions of %d bytes, want the one in use", n, bytes)
	}
	held.release()
	rs.evict(held.last.Load() - 1) // used a moment after the clock was read
	if n, _ := rs.stats(); n != 1 {
		t.Error("what has just been used is evicted")
	}
	for range 2 * maxRegions {
		r, err := rs.get(backend.Bytes(make([]byte, 100)), 0)
		if err != nil {
			t.Fatal(err)
		}
		r.release()
		if n, _ := rs.stats(); n > maxRegions {
			t.Fatalf("%d regions, want up to %d", n, maxRegions)
		}
	}
	if err := rs.close(); err != nil {
		t.Error(err)
	}
}

// holder is memory that counts who holds it.
type holder struct{ n atomic.Int32 }

func (h *holder) Retain()  { h.n.Add(1) }
func (h *holder) Release() { h.n.Add(-1) }

func TestRegionsHoldMemory(t *testing.T) {
	dev, _, network := bare(t)
	rs := newRegions(dev, nil)
	// Go memory stays while it is registered.
	var gone atomic.Bool
	func() {
		b := new([4096]byte)
		runtime.SetFinalizer(b, func(*[4096]byte) { gone.Store(true) })
		r, err := rs.get(backend.Bytes(b[:]), 0)
		if err != nil {
			t.Fatal(err)
		}
		r.release()
	}()
	for range 3 {
		runtime.GC()
	}
	if gone.Load() {
		t.Fatal("registered memory was collected")
	}
	rs.evict(clock.Now() + uint64(maxIdle) + 1e9)
	// Others' is retained.
	h := &holder{}
	b := make([]byte, 100)
	m := backend.At(unsafe.Pointer(&b[0]), len(b), backend.Host, h)
	r, err := rs.get(m, both)
	if err != nil || h.n.Load() != 1 {
		t.Fatalf("error %v, %d holders", err, h.n.Load())
	}
	r.release()
	if h.n.Load() != 1 {
		t.Error("the memory is let go while it is registered")
	}
	rs.revoke(m, nil)
	if h.n.Load() != 0 {
		t.Errorf("%d holders after revoke", h.n.Load())
	}
	// When registering fails nothing is held.
	network.Fail(func(op fakeverbs.Op) error {
		if op.Kind == fakeverbs.OpRegister {
			return errTest
		}
		return nil
	})
	if _, err := rs.get(m, both); !errors.Is(err, errTest) || h.n.Load() != 0 {
		t.Errorf("error %v, %d holders", err, h.n.Load())
	}
	network.Fail(nil)
	if err := rs.close(); err != nil {
		t.Error(err)
	}
}

func TestRegionsRevoke(t *testing.T) {
	dev, stack, _ := bare(t)
	rs := newRegions(dev, nil)
	buf := make([]byte, 10000)
	get := func(lo, hi int, a verbs.Access) *region {
		r, err := rs.get(backend.Bytes(buf[lo:hi]), a)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	used, idle, sending, other := get(0, 1000, both), get(1000, 2000, both), get(2000, 3000, 0), get(3000, 4000, both)
	idle.release()
	rs.revoke(backend.Bytes(buf[500:3000]), nil)
	if n, bytes := rs.stats(); n != 2 || bytes != 2000 || stack.Registered() != 2000 {
		t.Errorf("%d regions of %d bytes, %d registered; want the one for sending and the one elsewhere", n, bytes, stack.Registered())
	}
	used.release()
	sending.release()
	other.release()
	if r := get(0, 1000, both); r == used {
		t.Error("a revoked region is found")
	} else {
		r.release()
	}
	if err := rs.close(); err != nil {
		t.Error(err)
	}
}

// TestRegionsConcurrent uses, evicts and revokes at once. Whoever has a region can
// rely on it.
func TestRegionsConcurrent(t *testing.T) {
	dev, stack, _ := bare(t)
	rs := newRegions(dev, nil)
	buf := make([]byte, 64<<10)
	var all sync.WaitGroup
	for g := range 4 {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 1))
			for range 1500 {
				lo := rng.IntN(60) << 10
				r, err := rs.get(backend.Bytes(buf[lo:lo+1024*(1+rng.IntN(3))]), []verbs.Access{0, both}[rng.IntN(2)])
				if err != nil {
					t.Error(err)
					return
				}
				if r.refs.Load() <= 0 && !r.gone.Load() {
					t.Error("a region in use has no users")
				}
				r.release()
				switch rng.IntN(40) {
				case 0:
					rs.evict(clock.Now() + uint64(2*maxIdle))
				case 1:
					rs.revoke(backend.Bytes(buf[lo:lo+4096]), nil)
				}
			}
		})
	}
	all.Wait()
	if n, bytes := rs.stats(); bytes != stack.Registered() {
		t.Errorf("%d regions of %d bytes, %d registered", n, bytes, stack.Registered())
	}
	// After a revoke nothing there can be written to, whatever else goes on.
	rs.revoke(backend.Bytes(buf), nil)
	for _, r := range *rs.sorted.Load() {
		if r.access&verbs.RemoteWrite != 0 {
			t.Error("a writable region is left")
		}
	}
	if err := rs.close(); err != nil {
		t.Error(err)
	}
}

func TestCells(t *testing.T) {
	dev, stack, network := bare(t)
	c := &cells{dev: dev}
	get := func(n int) cell {
		t.Helper()
		x, err := c.get(n)
		if err != nil || len(x.mem) < n {
			t.Fatalf("%d bytes for %d, error %v", len(x.mem), n, err)
		}
		return x
	}
	seen := map[uint64]bool{}
	var all []cell
	for range 2*cellsEach + 1 {
		x := get(rawMeta)
		if seen[x.addr] {
			t.Fatal("a cell was given out twice")
		}
		seen[x.addr] = true
		all = append(all, x)
	}
	if n := stack.Registered(); n != 3*cellsEach*cellSize {
		t.Errorf("%d bytes registered", n)
	}
	for _, x := range all {
		if err := c.put(x); err != nil {
			t.Fatal(err)
		}
	}
	before := stack.Counters().Registrations
	for range 10000 {
		x := get(cellSize)
		if !seen[x.addr] {
			t.Fatal("a cell is not used again")
		}
		if err := c.put(x); err != nil {
			t.Fatal(err)
		}
	}
	if stack.Counters().Registrations != before {
		t.Error("used cells cost registrations")
	}
	large := get(cellSize + 1)
	if err := c.put(large); err != nil {
		t.Fatal(err)
	}
	network.Fail(func(op fakeverbs.Op) error {
		if op.Kind == fakeverbs.OpRegister {
			return errTest
		}
		return nil
	})
	if _, err := c.get(cellSize + 1); !errors.Is(err, errTest) {
		t.Errorf("error %v, want %v", err, errTest)
	}
	network.Fail(nil)
	// What is out at the end can be read until it is put back.
	x, y := get(10), get(cellSize+1)
	x.mem[0], y.mem[0] = 1, 2
	if err := c.close(); err != nil {
		t.Fatal(err)
	}
	if stack.Registered() != 0 || x.mem[0] != 1 || y.mem[0] != 2 {
		t.Errorf("%d bytes registered after close", stack.Registered())
	}
	if err := errors.Join(c.put(x), c.put(y)); err != nil {
		t.Error(err)
	}
	if _, err := c.get(10); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("after close: %v, want %v", err, verbs.ErrClosed)
	}
}

// stats returns the number of regions and their bytes.
func (rs *regions) stats() (n, bytes int) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	return len(*rs.sorted.Load()), rs.bytes
}
