package window

// Device windows. Each rank has one allocation: a token, two flags for each signal of each rank, and the window's
// memory. All ranks map all allocations at Open. A Put is a copy into the receiver's memory by the named stream. A
// signal writes the number of signals so far into a flag of the receiver, after the copy in the same stream. A
// waiting stream waits until the flag has that number. No message and no kernel is needed, and the CPU only queues
// work.
//
// Ownership: the allocation belongs to this library. Once other ranks know it, it is never reused, even after Close,
// so a stale or lost rank, or a copy queued long ago, can only write to memory that nothing else uses. Memory of
// callers therefore cannot be a device window. The allocation and its mappings are freed when the backend is closed:
// the driver cannot free or unmap memory while streams may wait.
//
// The lower half of a flag belongs to the sender. The upper half belongs to the owner of the memory, and releases
// waiting streams. Streams of an ended window are released only when all other ranks have confirmed the end, are
// lost, or have not answered for gpusync.EndLimit: data that a released stream writes from incomplete tensors is not taken
// for valid, since Check then reports the end of the window. As in af/streams, a node that ends does not wait.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/af/collective"
	"github.com/stepaf/stepaf-go/internal/gpusync"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// onDevice is the state of a device window.
type onDevice struct {
	b        *base
	memory   memory
	outs     []*streamOut // by rank
	ins      []*streamIn  // by rank
	peers    []*peer
	unwatch  func()
	stopExit func()

	ending    *gpusync.Ending // by rank
	releasing sync.Once
	freed     chan struct{} // closed when waiting streams were released
}

// newOnDevice creates the parts that need no device memory.
func newOnDevice(b *base, peers []*peer) (*onDevice, error) {
	d, err := backend.StreamDeviceOf(b.app.Backend())
	if err != nil {
		return nil, err
	}
	n := len(peers)
	v := &onDevice{b: b, memory: memory{b: b, d: d, lap: lap, far: make([]backend.Mem, n), host: hostWords{signals: b.signals, fd: -1, far: make([]backend.Mem, n)}},
		peers: peers, ending: gpusync.NewEnding(n), freed: make(chan struct{})}
	v.ending.Over(b.self) // its end is not waited for
	m := &v.memory
	m.at = (headLen + n*b.signals*wordsLen + memAlign - 1) / memAlign * memAlign
	for _, p := range peers {
		v.outs = append(v.outs, &streamOut{m: m, p: p, sent: make([]uint64, b.signals)})
		v.ins = append(v.ins, &streamIn{m: m, p: p, taken: make([]atomic.Uint64, b.signals), streams: make([]atomic.Uint64, b.signals)})
	}
	return v, nil
}

// meet allocates n bytes and maps the memory of all ranks, or fails on all ranks. Memory is offered only when all
// ranks have allocated theirs.
func (v *onDevice) meet(ctx context.Context, c *collective.Comm, n int) error {
	m := &v.memory
	offer, bad := m.allocate(n)
	defer m.host.met()
	if err := v.exchangeErrors(ctx, c, bad); err != nil {
		return err
	}
	m.offered = true
	all, err := c.AllGatherBytes(ctx, offer)
	if err != nil {
		return err
	}
	for r, b := range all {
		switch {
		case r == v.b.self:
			m.reachHost(r, b)
		case bad == nil:
			bad = m.reach(r, b)
		}
	}
	return v.exchangeErrors(ctx, c, bad)
}

// exchangeErrors exchanges errors: it returns bad, which all ranks learn, or the error of another rank.
func (v *onDevice) exchangeErrors(ctx context.Context, c *collective.Comm, bad error) error {
	why := ""
	if bad != nil {
		why = bad.Error()
	}
	said, err := c.AllGatherBytes(ctx, []byte(why[:min(len(why), 1000)]))
	if err = cmp.Or(bad, err); err != nil {
		return err
	}
	for r, text := range said {
		if len(text) > 0 {
			return fmt.Errorf("%w at %s: %s", backend.ErrUnavailable, v.b.layer.Name(r), text)
		}
	}
	return nil
}

// begin lets the window be used.
func (v *onDevice) begin() error {
	for _, l := range v.outs {
		l.begin()
	}
	app := v.b.app
	v.unwatch = app.OnPeer(v.peerChanged)
	v.stopExit = app.OnExit(func() {
		v.b.fail(cmp.Or(app.Alive(), van.ErrClosed))
		gpusync.AwaitClose(v.freed)
	})
	return v.ending.Begin(&v.b.over)
}

// peerChanged is called when a node is lost or connected. It must not block.
func (v *onDevice) peerChanged(id int, up bool, _ error) {
	if r, is := slices.BinarySearch(v.b.layer.NodeIDs(), id); is && !up {
		v.ending.Over(r)
	}
}

// awaited returns a rank whose signal a stream waits for, or -1.
func (v *onDevice) awaited() int {
	return slices.IndexFunc(v.ins, (*streamIn).awaited)
}

// left ends the window if a stream waits for a signal that a rank has not sent before it closed the window. Signals
// that it has sent have arrived.
func (v *onDevice) left(rank int, err error) {
	if v.b.over.Load() == nil && v.ins[rank].awaited() {
		v.b.fail(fmt.Errorf("%w; a stream waits for %s", err, v.b.layer.Name(rank)))
	}
}

// end is called when the window is over. It notifies the other ranks, and releases waiting streams when the window is
// over on all ranks.
func (v *onDevice) end() {
	v.releasing.Do(func() {
		defer close(v.freed)
		if !v.memory.offered { // no other rank knows the window
			return
		}
		v.tell()
		if !v.ending.Begun() { // no stream contains work of it
			return
		}
		v.await()
		for _, l := range v.ins {
			if err := l.free(); err != nil {
				v.b.app.Log().Error("streams that wait for a window may not continue", "window", v.b.String(), "err", err)
				return
			}
		}
	})
}

// abandonSetup cleans up after a failed Open.
func (v *onDevice) abandonSetup() {
	v.end()
	if v.unwatch != nil {
		v.unwatch()
		v.stopExit()
	}
	_ = v.memory.free()
}

// endWaits is the first part of Close. If a stream waits here, the window ends and the stream is released, before
// anything waits for the stream; that includes a put that holds a lock while its stream is full. The error says that
// data put before may be incomplete.
func (v *onDevice) endWaits() error {
	r := v.awaited()
	if r < 0 {
		return nil
	}
	late := slices.ContainsFunc(v.outs, func(l *streamOut) bool { return !l.arrived(l.puts.Load()) })
	err := fmt.Errorf("%w: this window, while a stream waited for a signal of %s", van.ErrClosed, v.b.layer.Name(r))
	v.b.fail(err)
	v.end()
	if late {
		return &van.Error{Op: "close window", Node: v.b.app.Name(), Detail: v.b.String() + ": what was put and had not arrived is not whole", Err: err}
	}
	return nil
}

// close releases this rank's part of an ended window. Released streams get the limit again to reach their puts.
func (v *onDevice) close(ctx context.Context) (err error) {
	if *v.b.over.Load() != errClosed || v.awaited() >= 0 {
		v.end()
		var cancel context.CancelFunc
		ctx, cancel = v.b.layer.Limited()
		defer cancel()
	}
	for _, l := range v.outs {
		err = cmp.Or(err, l.flush(ctx, "close window"))
	}
	v.unwatch()
	v.stopExit()
	return errors.Join(err, v.memory.free())
}

// tell notifies the other ranks that the window is over here.
func (v *onDevice) tell() {
	for _, p := range v.peers {
		if p.rank == v.b.self {
			continue
		}
		p.in.mu.Lock()
		err := p.in.say(&note{verb: verbOver, signal: noSignal})
		p.in.mu.Unlock()
		if err != nil && !errors.Is(err, van.ErrPeerLost) && !errors.Is(err, van.ErrClosed) {
			v.b.app.Log().Info("could not notify a rank that a window has ended", "window", v.b.String(), "rank", p.rank, "err", err)
		}
	}
}

// await waits until the window is over on all other ranks, up to gpusync.EndLimit.
func (v *onDevice) await() {
	if i := v.ending.Await(v.b.app.Ended(), nil); i >= 0 {
		v.b.app.Log().Warn("streams are released, but a rank has not confirmed the end of the window", "window", v.b.String(), "rank", i)
	}
}
