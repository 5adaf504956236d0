package af_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// replays is a cluster whose worker has a device, and whose servers answer with each byte
// plus one, unless mute.
type replays struct {
	*testcluster.Cluster
	dev  *simgpu.Device
	w    *af.Worker
	mute atomic.Bool
}

func startReplays(t *testing.T, over testcluster.Transport, servers int, hook ...*hooks.Van) *replays {
	t.Helper()
	o := testcluster.Options{Over: over, Servers: servers}
	if len(hook) > 0 {
		o.Wrap = hook[0].Wrap("worker", 0)
	}
	return startReplaysOf(t, o)
}

func startReplaysOf(t *testing.T, o testcluster.Options) *replays {
	t.Helper()
	d := &replays{dev: simgpu.New(0)}
	t.Cleanup(func() { // after the nodes are closed
		if err := d.dev.Close(); err != nil {
			t.Error(err)
		}
	})
	o.Backend = func(role string, _ int) backend.Backend {
		return map[string]backend.Backend{"worker": d.dev}[role]
	}
	d.Cluster = testcluster.Start(t, o)
	for _, n := range d.Servers {
		s, err := af.NewServer(n, af.ServerOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Handle(func(b af.Batch) {
			if d.mute.Load() {
				return
			}
			out := make([]byte, b.Pushes()[0].Val.Len())
			for i, v := range simgpu.Raw(b.Pushes()[0].Val.Mem()) {
				out[i] = v + 1
			}
			if err := b.Respond([]af.KeyTensor{{Val: hostTensor(t, out)}}); err != nil {
				t.Error(err)
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	var err error
	if d.w, err = af.NewWorker(d.Workers[0], af.WorkerOptions{}); err != nil {
		t.Fatal(err)
	}
	return d
}

// prepared is an exchange of the device's memory.
type prepared struct {
	*af.Prepared
	push, pull []byte
}

func (d *replays) prepare(t *testing.T, key uint64, n int, opts ...af.CallOption) *prepared {
	t.Helper()
	p := &prepared{push: make([]byte, n), pull: make([]byte, n*len(d.Servers))}
	pulls := make([]af.KeyTensor, len(d.Servers))
	for i := range pulls {
		x, err := af.NewTensor(d.dev.Mem(p.pull[i*n:(i+1)*n]), af.Uint8, int64(n))
		if err != nil {
			t.Fatal(err)
		}
		pulls[i] = af.KeyTensor{Key: key + 1, Val: x}
	}
	var err error
	if p.Prepared, err = d.w.Prepare([]af.KeyTensor{{Key: key, Val: deviceTensor(t, d.dev, p.push)}}, testcluster.PerServer(pulls, len(pulls)), opts...); err != nil {
		t.Fatal(err)
	}
	return p
}

// round captures a start and a wait on stream s.
func (p *prepared) round(t *testing.T, s af.Stream, limit time.Duration, opts ...af.StartOption) {
	t.Helper()
	if err := errors.Join(p.QueueStart(s, opts...), p.QueueWait(s, limit)); err != nil {
		t.Fatal(err)
	}
}

// within captures a round in a graph that is not replayed: its limit holds for all rounds from now on.
func (d *replays) within(t *testing.T, p *prepared, s af.Stream, limit time.Duration) {
	t.Helper()
	g := d.dev.Capture(uintptr(s))
	p.round(t, s, limit)
	g.End()
}

// TestReplays: three micro-batches in flight, replayed with changing contents, concurrently with rounds of Start.
func TestReplays(t *testing.T) {
	for _, over := range all {
		t.Run(over.String(), func(t *testing.T) {
			d := startReplays(t, over, 2)
			const s, replays = 5, 200
			var parts [3]*prepared
			for i := range parts {
				parts[i] = d.prepare(t, uint64(10*i), 100+i)
			}
			var value, wrong atomic.Int64
			g := d.dev.Capture(s)
			d.dev.Queue(s, func() {
				v := value.Add(1)
				for i, p := range parts {
					fill(p.push, byte(v)+byte(i))
					fill(p.pull, 0)
				}
			})
			for _, p := range parts {
				if err := p.QueueStart(s); err != nil {
					t.Fatal(err)
				}
			}
			for i, p := range parts {
				if err := p.QueueWait(s, 0); err != nil {
					t.Fatal(err)
				}
				d.dev.Queue(s, func() {
					for _, b := range p.pull {
						if b != byte(value.Load())+byte(i)+1 {
							wrong.Add(1)
						}
					}
				})
			}
			g.End()
			if n := d.w.Customer().InFlight(); n != 0 {
				t.Errorf("%d calls in flight: the capture has run", n)
			}
			for i := range replays {
				g.Replay(s)
				if i%20 != 0 {
					continue
				}
				d.dev.Settle(t, s)
				call, err := parts[1].Start(af.Stream(s))
				if err == nil {
					err = call.Wait(t.Context())
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			d.dev.Settle(t, s)
			if n := wrong.Load(); n > 0 {
				t.Errorf("%d wrong bytes", n)
			}
			for _, p := range parts {
				if err := p.Check(); err != nil {
					t.Error(err)
				}
			}
			d.Finalize(t)
		})
	}
}

// TestReplayRows: graphs for different numbers of rows share an exchange.
func TestReplayRows(t *testing.T) {
	d := startReplays(t, testcluster.SHM, 1)
	const s = 5
	p := d.prepare(t, 1, 50)
	graphs := map[int]*simgpu.Graph{}
	for _, rows := range []int{0, 1, 7, 50} {
		graphs[rows] = d.dev.Capture(s)
		p.round(t, s, 0, af.Rows(rows))
		graphs[rows].End()
	}
	for i, rows := range []int{7, 0, 50, 1, 7, 50, 0} {
		fill(p.push, byte(i+1))
		fill(p.pull, 0)
		graphs[rows].Replay(s)
		d.dev.Settle(t, s)
		for k, b := range p.pull {
			if want := byte(i + 2); (k < rows && b != want) || (k >= rows && b != 0) {
				t.Fatalf("%d rows: byte %d is %d", rows, k, b)
			}
		}
	}
	vantest.Fails(t, p.QueueStart(s, af.Rows(51)), van.ErrInvalid, "51 rows", "push tensor 0 (key 1)")
	vantest.Fails(t, p.QueueStart(s, af.Rows(-1)), van.ErrInvalid)
	if err := p.Check(); err != nil {
		t.Error(err)
	}
	d.Finalize(t)
}

// TestReplayMisuse: starts without waits, before and in a replay.
func TestReplayMisuse(t *testing.T) {
	d := startReplays(t, testcluster.SHM, 1)
	const s = 5
	p := d.prepare(t, 1, 50)
	g := d.dev.Capture(s)
	p.round(t, s, 0)
	if err := p.QueueStart(s); err != nil {
		t.Fatal(err)
	}
	vantest.Fails(t, p.QueueStart(s), af.ErrStarted, "queue the wait for its last start first")
	g.End()
	g = d.dev.Capture(s) // the first graph is not used
	p.round(t, s, 0)
	g.End()
	d.mute.Store(true)
	call, err := p.Start(af.Stream(s))
	if err != nil {
		t.Fatal(err)
	}
	g.Replay(s)
	d.dev.Settle(t, s) // it does not wait for the round of Start
	vantest.Fails(t, p.Check(), af.ErrStarted, "round 1", "wait for its last call first")
	if err := p.Check(); err != nil {
		t.Errorf("the error is told again: %v", err)
	}
	late, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	vantest.Fails(t, call.Wait(late), van.ErrTimeout)

	// The other way round.
	g.Replay(s)
	for !errors.Is(err, af.ErrStarted) {
		if call, err = p.Start(af.Stream(af.Complete)); err == nil {
			_ = call.Wait(late)
		}
	}
}

// TestReplayFails: a server does not answer in time, or is lost while a stream waits for it. The stream goes on,
// and the error names the round and the peer.
func TestReplayFails(t *testing.T) {
	d := startReplays(t, testcluster.SHM, 2)
	const s = 5
	p := d.prepare(t, 1, 50)
	g := d.dev.Capture(s)
	p.round(t, s, 20*time.Millisecond)
	g.End()
	d.mute.Store(true)
	g.Replay(s)
	g.Replay(s)
	d.dev.Settle(t, s)
	err := p.QueueStart(s)
	vantest.Fails(t, err, van.ErrTimeout, "worker 0", "round 1 that a stream has started", "server 0", "limit 20ms", "1 later rounds")

	d.mute.Store(false)
	d.within(t, p, s, 20*time.Second)
	fill(p.push, 7)
	g.Replay(s)
	d.dev.Settle(t, s)
	if err := p.Check(); err != nil || p.pull[99] != 8 {
		t.Errorf("after a round that has failed: %v, %d", err, p.pull[99])
	}

	d.mute.Store(true)
	p.round(t, s, -1) // not captured
	eventually(t, "the exchange is in flight", func() bool { return d.w.Customer().InFlight() > 0 })
	d.Servers[1].Close()
	d.dev.Settle(t, s)
	_, err = p.Start()
	vantest.Fails(t, err, van.ErrPeerLost, "round 4", "server 1")
	g.Replay(s)
	d.dev.Settle(t, s)
	vantest.Fails(t, p.QueueWait(s, 0), van.ErrPeerLost, "round 5", "server 1")
}

// TestReplayReleased: if the library cannot go on, for example because a driver call blocks, streams are released
// permanently at the limit of a round, but not within the first second. Other exchanges work as before.
func TestReplayReleased(t *testing.T) {
	hook := &hooks.Van{}
	d := startReplays(t, testcluster.InProc, 1, hook)
	const s = 5
	p, other := d.prepare(t, 1, 50), d.prepare(t, 3, 50)
	g := d.dev.Capture(s)
	p.round(t, s, 20*time.Second)
	g.End()
	g.Replay(s)
	d.dev.Settle(t, s)
	if err := p.Check(); err != nil || p.pull[0] != 1 {
		t.Fatalf("a round: %v, %d", err, p.pull[0])
	}
	d.within(t, p, s, 300*time.Millisecond)
	block := make(chan struct{})
	hook.OnSend(func(m *van.Message) hooks.Verdict {
		if m.Request && !m.IsControl() {
			<-block
		}
		return hooks.Pass
	})
	for range 100 {
		g.Replay(s)
	}
	d.dev.Settle(t, s)
	vantest.Fails(t, p.Check(), van.ErrTimeout, "worker 0", "round 2", "fewer replays ahead", "limit 1s")
	vantest.Fails(t, p.QueueStart(s), van.ErrClosed)
	close(block)
	other.round(t, s, 0)
	d.dev.Settle(t, s)
	if err := other.Check(); err != nil || other.pull[0] != 1 {
		t.Errorf("another exchange: %v, %d", err, other.pull[0])
	}
	g.Replay(s)
	d.dev.Settle(t, s)
	p.Close()
	d.Finalize(t)
	if n := d.w.Customer().InFlight(); n != 0 {
		t.Errorf("%d calls in flight", n)
	}
}

// TestReplayAfterClose: neither a closed exchange, nor a closed worker, nor a node that has
// left leaves a stream waiting.
func TestReplayAfterClose(t *testing.T) {
	for name, end := range map[string]func(*replays, *prepared){
		"exchange": func(_ *replays, p *prepared) { p.Close() },
		"worker":   func(d *replays, _ *prepared) { d.w.Close() },
		"node":     func(d *replays, _ *prepared) { d.Workers[0].Close() },
	} {
		t.Run(name, func(t *testing.T) {
			d := startReplays(t, testcluster.SHM, 1)
			const s = 5
			p, other := d.prepare(t, 1, 50), d.prepare(t, 3, 50)
			g := d.dev.Capture(s)
			p.round(t, s, 50*time.Millisecond)
			g.End()
			g.Replay(s)
			d.dev.Settle(t, s)
			d.mute.Store(true)
			g.Replay(s)
			end(d, p)
			d.dev.Settle(t, s)
			for p.Check() == nil { // the error of a round is there before its stream goes on, but it may not have begun
				g.Replay(s)
				d.dev.Settle(t, s)
			}
			for range 3 {
				g.Replay(s)
				d.dev.Settle(t, s)
			}
			if err := p.Check(); err != nil && !errors.Is(err, van.ErrClosed) && !errors.Is(err, van.ErrTimeout) {
				t.Error(err)
			}
			g.Replay(s)
			d.dev.Settle(t, s)
			vantest.Fails(t, p.Check(), van.ErrClosed, "round")
			vantest.Fails(t, p.QueueStart(s), van.ErrClosed)
			vantest.Fails(t, p.QueueWait(s, 0), van.ErrClosed)
			if name != "exchange" {
				vantest.Fails(t, other.QueueStart(s), van.ErrClosed)
				return
			}
			d.mute.Store(false)
			other.round(t, s, 0)
			d.dev.Settle(t, s)
			if err := other.Check(); err != nil || other.pull[7] != 1 {
				t.Errorf("another exchange: %v, %d", err, other.pull[7])
			}
		})
	}
}

// TestReplayCloseBehindABlockedDriver: if a driver call blocks the library, Close releases the streams
// nevertheless, and Check returns an error for their round.
func TestReplayCloseBehindABlockedDriver(t *testing.T) {
	hook := &hooks.Van{}
	d := startReplays(t, testcluster.InProc, 1, hook)
	const s = 5
	p := d.prepare(t, 1, 50)
	g := d.dev.Capture(s)
	p.round(t, s, -1) // no limit
	g.End()
	block, blocked := make(chan struct{}), make(chan struct{}, 1)
	hook.OnSend(func(m *van.Message) hooks.Verdict {
		if m.Request && !m.IsControl() {
			select {
			case blocked <- struct{}{}:
			default:
			}
			<-block
		}
		return hooks.Pass
	})
	g.Replay(s)
	<-blocked
	d.w.Close()
	d.dev.Settle(t, s)
	vantest.Fails(t, p.Check(), van.ErrClosed, "round 1")
	d.mute.Store(true) // the worker's node may have left when an answer arrives
	close(block)
}

// simDevice is the name under which pinning embeds a device, which has a method Device.
type simDevice = simgpu.Device

// pinning is a device whose AllocPinned for an exchange's flags waits, while hold is set, until a stream has executed its work, as a driver
// may. Messages allocate pinned memory at the same time.
type pinning struct {
	*simDevice
	hold    atomic.Bool
	blocked chan struct{}
}

func (d *pinning) AllocPinned(n int) (backend.Mem, error) {
	if calledBy("(*graphs).add") && d.hold.Swap(false) {
		over := make(chan struct{})
		d.Queue(5, func() { close(over) })
		close(d.blocked)
		<-over
	}
	return d.simDevice.AllocPinned(n)
}

// calledBy reports whether the goroutine is in a function whose name ends so.
func calledBy(name string) bool {
	var pcs [64]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(1, pcs[:])])
	for more := true; more; {
		var f runtime.Frame
		if f, more = frames.Next(); strings.HasSuffix(f.Function, name) {
			return true
		}
	}
	return false
}

// TestReplayWhileAllocationBlocks: if the allocation of flags for another exchange blocks until a stream continues, rounds go on and
// closed exchanges end. Close releases the streams, and thereby the allocation.
func TestReplayWhileAllocationBlocks(t *testing.T) {
	d := &replays{dev: simgpu.New(0)}
	defer d.dev.Close()
	pin := &pinning{simDevice: d.dev, blocked: make(chan struct{})}
	d.Cluster = testcluster.Start(t, testcluster.Options{Backend: func(role string, _ int) backend.Backend {
		return map[string]backend.Backend{"worker": pin}[role]
	}})
	d.w = newWorker(t, d.Workers[0])
	var list [32]*prepared // their flags fill a page
	for i := range list {
		list[i] = d.prepare(t, 1, 8)
		d.within(t, list[i], 6, 50*time.Millisecond)
	}
	list[0].round(t, 5, -1) // the server does not answer
	pin.hold.Store(true)
	another, added := d.prepare(t, 1, 8), make(chan error, 1)
	go func() { added <- another.QueueStart(7) }()
	<-pin.blocked
	list[1].Close()
	for i, x := range list[2:8] {
		x.round(t, 6, 50*time.Millisecond)
		d.dev.Settle(t, 6)
		err := x.Check()
		if i < 5 && err != nil && strings.Contains(err.Error(), "the library could not run") { // nothing ran on this machine for a second
			continue
		}
		vantest.Fails(t, err, van.ErrTimeout, "no answer from server 0")
		break
	}
	closed := make(chan struct{})
	go func() {
		d.w.Close()
		close(closed)
	}()
	select {
	case <-closed:
		d.dev.Settle(t, 5)
		vantest.Fails(t, <-added, van.ErrClosed)
	case <-time.After(20 * time.Second):
		t.Fatal("Close does not return")
	}
}

// TestReplaysFirstQueued: of several goroutines that first queue something of an exchange at once, each finds it
// complete.
func TestReplaysFirstQueued(t *testing.T) {
	for range 20 {
		d := startReplays(t, testcluster.InProc, 1)
		x := d.prepare(t, 1, 8)
		var all sync.WaitGroup
		for s := range af.Stream(4) {
			all.Go(func() {
				if err := x.QueueWait(s, 0); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		d.w.Close()
	}
}

// TestReplayNeedsDevice: on host memory there are no streams.
func TestReplayNeedsDevice(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	w := newWorker(t, c.Workers[0])
	x, err := w.Prepare([]af.KeyTensor{{Key: 1, Val: hostTensor(t, []byte{1})}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	vantest.Fails(t, x.QueueStart(3), backend.ErrUnavailable, "STEPMESH_BAKCEND")
	vantest.Fails(t, x.QueueWait(3, 0), backend.ErrUnavailable)
	x.Close()
	if err := x.Check(); err != nil {
		t.Error(err)
	}
}

// TestDefaultLimitOfRounds: the default limit of a round is that of a call: longer than the detection of a stopped server.
func TestDefaultLimitOfRounds(t *testing.T) {
	d := startReplaysOf(t, testcluster.Options{Set: func(c *postoffice.Config) {
		c.HeartbeatInterval, c.HeartbeatTimeout = 2*time.Second, 30*time.Second
	}})
	const s = af.Stream(1)
	for _, x := range []struct {
		opts        []af.CallOption
		limit, want time.Duration
	}{{nil, 0, 35 * time.Second}, {nil, time.Second, time.Second}, {[]af.CallOption{af.Within(3 * time.Second)}, 0, 3 * time.Second}, {nil, -1, -1}} {
		p := d.prepare(t, 10, 8, x.opts...)
		d.within(t, p, s, x.limit)
		if got := p.RoundLimit(); got != x.want {
			t.Errorf("limits %v and %s: a round has %s, want %s", x.opts, x.limit, got, x.want)
		}
	}
}
