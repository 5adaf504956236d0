package conn

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

const both = verbs.LocalWrite | verbs.RemoteWrite

var errTest = errors.New("made to fail")

// bare returns a device without a van.
func bare(t *testing.T, options ...func(*fakeverbs.Config)) (verbs.Device, *fakeverbs.Stack, *fakeverbs.Net) {
	t.Helper()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	network := fakeverbs.NewNet(options...)
	network.OnError(func(err error) { t.Errorf("the network: %v", err) })
	a := netip.MustParseAddr("10.77.3.1")
	stack := network.Stack(a)
	stack.SetName("bare")
	ch, err := stack.NewChannel()
	check(err)
	listen, err := ch.NewID(0)
	check(err)
	check(listen.Bind(netip.AddrPortFrom(a, 0)))
	check(listen.Listen(8))
	id, err := ch.NewID(1)
	check(err)
	check(id.ResolveAddr(a, listen.LocalAddr(), time.Second))
	if ev, err := ch.Next(); err != nil || ev.Type != verbs.AddrResolved {
		t.Fatalf("event %v, error %v; want that the address is resolved", ev.Type, err)
	}
	dev, err := id.Device()
	check(err)
	t.Cleanup(func() {
		if n := stack.Registered(); n != 0 {
			t.Errorf("%d bytes are registered at the end", n)
		}
		network.Close()
	})
	return dev, stack, network
}

func TestRegionsFind(t *testing.T) {
	dev, stack, _ := bare(t)
	rs := NewRegions(dev, nil)
	buf := make([]byte, 1<<20)
	get := func(lo, hi int, a verbs.Access) *Region {
		t.Helper()
		r, err := rs.Get(backend.Bytes(buf[lo:hi]), a)
		if err != nil {
			t.Fatal(err)
		}
		r.Release()
		return r
	}
	middle := get(1000, 2000, both)
	for _, s := range []struct {
		lo, hi int
		access verbs.Access
		hit    bool
	}{
		{1000, 2000, both, true},
		{1000, 2000, 0, false}, // invalidation may end a region that peers write to
		{1500, 1501, verbs.LocalWrite, false},
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
	// A region for sending is not used for receiving.
	get(5000, 6000, 0)
	before := stack.Counters().Registrations
	get(5000, 6000, both)
	if stack.Counters().Registrations == before {
		t.Error("a region without access is used for writing")
	}
	if n, bytes := rs.stats(); n != 3 || bytes != 3000 {
		t.Errorf("%d regions of %d bytes, want 3 of 3000", n, bytes)
	}
	if err := rs.Close(); err != nil {
		t.Error(err)
	}
	if _, err := rs.Get(backend.Bytes(buf), 0); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("after close: %v, want %v", err, verbs.ErrClosed)
	}
}

// TestRegionsGrow: of regions with the same address, the longest is found first.
func TestRegionsGrow(t *testing.T) {
	dev, _, _ := bare(t)
	rs := NewRegions(dev, nil)
	defer rs.Close()
	buf := make([]byte, 1<<20)
	for n := 1; n <= 2*findSteps; n++ { // like a tensor of which more rows are sent each time
		for again := range 3 {
			r, err := rs.Get(backend.Bytes(buf[:n*4096]), both)
			if err != nil {
				t.Fatal(err)
			}
			r.Release()
			if have := len(*rs.sorted.Load()); have != n {
				t.Fatalf("%d regions after %d lengths, the last one %d times, want one for each", have, n, again+1)
			}
		}
	}
	if r := rs.find(backend.Bytes(buf[:100]), both); r == nil {
		t.Error("a part of all of them is not found")
	} else {
		r.Release()
	}
}

func TestRegionsEvict(t *testing.T) {
	dev, stack, _ := bare(t)
	rs := NewRegions(dev, nil)
	// The tensors overlap, so that they need little memory.
	const size, step = 4 << 20, 4 << 10
	tensors := make([][]byte, 2*maxIdleBytes/size)
	buf := make([]byte, size+len(tensors)*step)
	held, err := rs.Get(backend.Bytes(make([]byte, size)), 0)
	if err != nil {
		t.Fatal(err)
	}
	for i := range tensors {
		tensors[i] = buf[i*step:][:size]
		r, err := rs.Get(backend.Bytes(tensors[i]), 0)
		if err != nil {
			t.Fatal(err)
		}
		r.Release()
		if n, bytes := rs.stats(); bytes > maxIdleBytes+2*size || bytes != stack.Registered() || n > maxRegions {
			t.Fatalf("%d regions of %d bytes, %d registered", n, bytes, stack.Registered())
		}
	}
	// The last one used is still there.
	if r := rs.find(backend.Bytes(tensors[len(tensors)-1]), 0); r == nil {
		t.Error("what was used last has been evicted")
	} else {
		r.Release()
	}
	if rs.find(backend.Bytes(tensors[0]), 0) != nil {
		t.Error("what was used first has not been evicted")
	}
	// After a while, all unused regions end.
	rs.Evict(clock.Now())
	rs.Evict(clock.Now() + uint64(maxIdle) + 1e9)
	if n, bytes := rs.stats(); n != 1 || bytes != size {
		t.Errorf("%d regions of %d bytes, want the one in use", n, bytes)
	}
	held.Release()
	rs.Evict(held.last.Load() - 1) // used a moment after the clock was read
	if n, _ := rs.stats(); n != 1 {
		t.Error("what has just been used is evicted")
	}
	for range 2 * maxRegions {
		r, err := rs.Get(backend.Bytes(make([]byte, 100)), 0)
		if err != nil {
			t.Fatal(err)
		}
		r.Release()
		if n, _ := rs.stats(); n > maxRegions {
			t.Fatalf("%d regions, want up to %d", n, maxRegions)
		}
	}
	if err := rs.Close(); err != nil {
		t.Error(err)
	}
}

// holder is memory that counts its references.
type holder struct{ n atomic.Int32 }

func (h *holder) Retain()  { h.n.Add(1) }
func (h *holder) Release() { h.n.Add(-1) }

func TestRegionsHoldMemory(t *testing.T) {
	dev, _, network := bare(t)
	rs := NewRegions(dev, nil)
	// Go memory is kept while it is registered.
	var gone atomic.Bool
	func() {
		b := new([4096]byte)
		runtime.SetFinalizer(b, func(*[4096]byte) { gone.Store(true) })
		r, err := rs.Get(backend.Bytes(b[:]), 0)
		if err != nil {
			t.Fatal(err)
		}
		r.Release()
	}()
	for range 3 {
		runtime.GC()
	}
	if gone.Load() {
		t.Fatal("registered memory was collected")
	}
	rs.Evict(clock.Now() + uint64(maxIdle) + 1e9)
	// Other memory is retained.
	h := &holder{}
	b := make([]byte, 100)
	m := backend.At(unsafe.Pointer(&b[0]), len(b), backend.Host, h)
	r, err := rs.Get(m, both)
	if err != nil || h.n.Load() != 1 {
		t.Fatalf("error %v, %d holders", err, h.n.Load())
	}
	r.Release()
	if h.n.Load() != 1 {
		t.Error("the memory is released while it is registered")
	}
	rs.Invalidate(m, nil)
	if h.n.Load() != 0 {
		t.Errorf("%d holders after Invalidate", h.n.Load())
	}
	// If registering fails, nothing is retained.
	network.Fail(func(op fakeverbs.Op) error {
		if op.Kind == fakeverbs.OpRegister {
			return errTest
		}
		return nil
	})
	if _, err := rs.Get(m, both); !errors.Is(err, errTest) || h.n.Load() != 0 {
		t.Errorf("error %v, %d holders", err, h.n.Load())
	}
	network.Fail(nil)
	if err := rs.Close(); err != nil {
		t.Error(err)
	}
}

func TestRegionsRevoke(t *testing.T) {
	dev, stack, _ := bare(t)
	rs := NewRegions(dev, nil)
	buf := make([]byte, 10000)
	get := func(lo, hi int, a verbs.Access) *Region {
		r, err := rs.Get(backend.Bytes(buf[lo:hi]), a)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	used, idle, sending, other := get(0, 1000, both), get(1000, 2000, both), get(2000, 3000, 0), get(3000, 4000, both)
	idle.Release()
	rs.Invalidate(backend.Bytes(buf[500:3000]), nil)
	if n, bytes := rs.stats(); n != 2 || bytes != 2000 || stack.Registered() != 2000 {
		t.Errorf("%d regions of %d bytes, %d registered; want the one for sending and the one elsewhere", n, bytes, stack.Registered())
	}
	used.Release()
	sending.Release()
	other.Release()
	if r := get(0, 1000, both); r == used {
		t.Error("an invalidated region is found")
	} else {
		r.Release()
	}
	if err := rs.Close(); err != nil {
		t.Error(err)
	}
}

// TestRegionsConcurrent uses, evicts and invalidates regions concurrently. The holder of a region can rely on it.
func TestRegionsConcurrent(t *testing.T) {
	dev, stack, _ := bare(t)
	rs := NewRegions(dev, nil)
	buf := make([]byte, 64<<10)
	var all sync.WaitGroup
	for g := range 4 {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 1))
			for range 1500 {
				lo := rng.IntN(60) << 10
				r, err := rs.Get(backend.Bytes(buf[lo:lo+1024*(1+rng.IntN(3))]), []verbs.Access{0, both}[rng.IntN(2)])
				if err != nil {
					t.Error(err)
					return
				}
				if r.refs.Load() <= 0 && !r.invalidated.Load() {
					t.Error("a region in use has no users")
				}
				r.Release()
				switch rng.IntN(40) {
				case 0:
					rs.Evict(clock.Now() + uint64(2*maxIdle))
				case 1:
					rs.Invalidate(backend.Bytes(buf[lo:lo+4096]), nil)
				}
			}
		})
	}
	all.Wait()
	if n, bytes := rs.stats(); bytes != stack.Registered() {
		t.Errorf("%d regions of %d bytes, %d registered", n, bytes, stack.Registered())
	}
	// After Invalidate, no peer can write there any more.
	rs.Invalidate(backend.Bytes(buf), nil)
	for _, r := range *rs.sorted.Load() {
		if r.access&verbs.RemoteWrite != 0 {
			t.Error("a writable region is left")
		}
	}
	if err := rs.Close(); err != nil {
		t.Error(err)
	}
}

func TestCells(t *testing.T) {
	dev, stack, network := bare(t)
	c := &Cells{Device: dev}
	get := func(n int) Cell {
		t.Helper()
		x, err := c.Get(n)
		if err != nil || len(x.Mem) < n {
			t.Fatalf("%d bytes for %d, error %v", len(x.Mem), n, err)
		}
		return x
	}
	seen := map[uint64]bool{}
	var all []Cell
	for range 2*cellsEach + 1 {
		x := get(288)
		if seen[x.Addr] {
			t.Fatal("a cell was given out twice")
		}
		seen[x.Addr] = true
		all = append(all, x)
	}
	if n := stack.Registered(); n != 3*cellsEach*CellSize {
		t.Errorf("%d bytes registered", n)
	}
	for _, x := range all {
		if err := c.Put(x); err != nil {
			t.Fatal(err)
		}
	}
	before := stack.Counters().Registrations
	for range 10000 {
		x := get(CellSize)
		if !seen[x.Addr] {
			t.Fatal("a cell is not used again")
		}
		if err := c.Put(x); err != nil {
			t.Fatal(err)
		}
	}
	if stack.Counters().Registrations != before {
		t.Error("used cells cost registrations")
	}
	large := get(CellSize + 1)
	if err := c.Put(large); err != nil {
		t.Fatal(err)
	}
	network.Fail(func(op fakeverbs.Op) error {
		if op.Kind == fakeverbs.OpRegister {
			return errTest
		}
		return nil
	})
	if _, err := c.Get(CellSize + 1); !errors.Is(err, errTest) {
		t.Errorf("error %v, want %v", err, errTest)
	}
	network.Fail(nil)
	// A cell in use at the end can be read until it is put back.
	x, y := get(10), get(CellSize+1)
	x.Mem[0], y.Mem[0] = 1, 2
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if stack.Registered() != 0 || x.Mem[0] != 1 || y.Mem[0] != 2 {
		t.Errorf("%d bytes registered after close", stack.Registered())
	}
	if err := errors.Join(c.Put(x), c.Put(y)); err != nil {
		t.Error(err)
	}
	if _, err := c.Get(10); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("after close: %v, want %v", err, verbs.ErrClosed)
	}
}

// stats returns the number of regions and their bytes.
func (rs *Regions) stats() (n, bytes int) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	return len(*rs.sorted.Load()), rs.bytes
}

// TestStuckMemory: memory that cannot be deregistered is not freed: peers may still write there.
func TestStuckMemory(t *testing.T) {
	dev, _, network := bare(t)
	rs := NewRegions(dev, nil)
	var reported []int
	rs.OnStuck = func(r *Region, err error) {
		if !errors.Is(err, errTest) {
			t.Errorf("stuck because of %v, want %v", err, errTest)
		}
		reported = append(reported, r.Mem.Len())
	}
	h := &holder{}
	b := make([]byte, 300)
	var stuck []*Region
	for i := range 2 {
		r, err := rs.Get(backend.At(unsafe.Pointer(&b[100*i]), 100+i, backend.Host, h), both)
		if err != nil {
			t.Fatal(err)
		}
		stuck = append(stuck, r)
	}
	own, err := NewBlock(dev, PageSize, both)
	if err != nil {
		t.Fatal(err)
	}
	network.Fail(func(op fakeverbs.Op) error {
		if op.Kind == fakeverbs.OpDeregister {
			return errTest
		}
		return nil
	})
	rs.Invalidate(stuck[0].Mem, nil)
	stuck[1].Release()
	if err := rs.Close(); !errors.Is(err, errTest) {
		t.Errorf("close: %v, want %v", err, errTest)
	}
	for range 2 {
		if err := own.Close(); !errors.Is(err, errTest) {
			t.Errorf("close of a block: %v, want %v", err, errTest)
		}
	}
	own.Mem.Host()[0] = 1 // it would fault
	if h.n.Load() != 2 || !slices.Equal(reported, []int{100, 101}) {
		t.Errorf("%d holders of memory that is still registered, want 2; reported regions of %d bytes", h.n.Load(), reported)
	}
	network.Fail(nil)
	for _, mr := range []verbs.MR{stuck[0].MR, stuck[1].MR, own.MR} {
		if err := mr.Deregister(); err != nil {
			t.Error(err)
		}
	}
}

// exporter is a device whose memory is registered as a dma-buf.
type exporter struct {
	backend.Backend
	fd int
}

func (e *exporter) ExportDMABuf(backend.Mem) (fd, offset int, err error) { return e.fd, 0, nil }

// TestDMABufIsClosed: the descriptor of exported memory is closed after registering, successful or not.
func TestDMABufIsClosed(t *testing.T) {
	dev, stack, _ := bare(t)
	gpu := simgpu.New(1)
	defer gpu.Close()
	mem := gpu.Mem(make([]byte, 4096))
	for _, works := range []bool{true, false} {
		fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		if works {
			stack.DMABuf(fd, make([]byte, 4096))
		}
		mr, err := registerDMABuf(dev, &exporter{gpu, fd}, mem, both)
		if (err == nil) != works {
			t.Fatal(err)
		}
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != unix.EBADF {
			t.Errorf("the descriptor is still open (registered: %t)", works)
		}
		if works {
			if err := mr.Deregister(); err != nil {
				t.Error(err)
			}
			stack.DMABuf(fd, nil)
		}
	}
}
