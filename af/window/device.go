package window

// Windows on devices. Each rank has one allocation: a token, two words for each signal of each rank, and
// behind them the window's memory. All ranks map all of them at Open. A Put is a copy into the receiver's memory, by the
// stream that it names; a signal is a write, behind it in that stream, of how many there have been, into a
// word of the receiver. Who waits has its stream wait until the word says so many. There is no message and no
// kernel in it, and the CPU only queues.
//
// Who owns what: the allocation is this library's, and once it was offered never used again, not even when the window is closed, so what a
// stale or lost rank may still write, or a copy that was queued long ago, is memory that nobody else has. This is why
// tensors of callers cannot be windows on devices. It is freed when the backend is closed, as the mappings are: the
// driver frees and unmaps nothing while streams may wait.
//
// The lower half of a word is its sender's. The upper half is its owner's, and makes all who wait go on.
// Streams of a window that is over go on only when all other ranks have said that it is over for them, too, or are lost (or
// have said nothing for partLimit): what they write then, from tensors that were never filled, is nothing that a rank takes for
// good, since its Check says why it is not. As for exchanges of af/streams, a node that ends waits for nobody.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af/collective"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// onDevice is what a window on a device has.
type onDevice struct {
	b        *base
	memory   memory
	outs     []*streamOut // by rank
	ins      []*streamIn  // by rank
	parting  parting
	unwatch  func()
	stopExit func()

	ending sync.Once
	freed  chan struct{} // closed when streams that waited go on
}

// newOnDevice makes what needs no memory of the device.
func newOnDevice(b *base, peers []*peer) (*onDevice, error) {
	d, err := backend.StreamDeviceOf(b.app.Backend())
	if err != nil {
		return nil, err
	}
	n := len(peers)
	v := &onDevice{b: b, memory: memory{b: b, d: d, lap: lap, far: make([]backend.Mem, n), host: hostWords{signals: b.signals, fd: -1, far: make([]backend.Mem, n)}},
		freed:   make(chan struct{}),
		parting: parting{b: b, peers: peers, ended: make([]bool, n), changed: make(chan struct{})}}
	m := &v.memory
	m.at = (headLen + n*b.signals*wordsLen + memAlign - 1) / memAlign * memAlign
	for _, p := range peers {
		v.outs = append(v.outs, &streamOut{m: m, p: p, sent: make([]uint64, b.signals)})
		v.ins = append(v.ins, &streamIn{m: m, p: p, taken: make([]atomic.Uint64, b.signals), streams: make([]atomic.Uint64, b.signals)})
	}
	return v, nil
}

// meet takes memory of n bytes and maps that of all ranks, or fails on all. Nothing is offered before all ranks have theirs.
func (v *onDevice) meet(ctx context.Context, c *collective.Comm, n int) error {
	m := &v.memory
	offer, bad := m.allocate(n)
	defer m.host.met()
	if err := v.hear(ctx, c, bad); err != nil {
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
	return v.hear(ctx, c, bad)
}

// hear is bad, which all ranks are told of, or what another one says.
func (v *onDevice) hear(ctx context.Context, c *collective.Comm, bad error) error {
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
		select {
		case <-v.freed:
		case <-time.After(exitLimit):
		}
	})
	return v.parting.begin()
}

// peerChanged is told that a node is lost, or there. It must not block.
func (v *onDevice) peerChanged(id int, up bool, _ error) {
	if r, is := slices.BinarySearch(v.b.layer.NodeIDs(), id); is && !up {
		v.parting.over(r)
	}
}

// awaited is a rank for which a stream waits, or -1.
func (v *onDevice) awaited() int {
	return slices.IndexFunc(v.ins, (*streamIn).awaited)
}

// left ends the window if a stream waits for what a rank that has closed its end has not signalled. What it has signalled has come.
func (v *onDevice) left(rank int, err error) {
	if v.b.over.Load() == nil && v.ins[rank].awaited() {
		v.b.fail(fmt.Errorf("%w; a stream waits for %s", err, v.b.layer.Name(rank)))
	}
}

// end is called when the window is over: the others are told, and when it is for them, too, streams that
// wait go on.
func (v *onDevice) end() {
	v.ending.Do(func() {
		defer close(v.freed)
		if !v.memory.offered { // no other rank has this window
			return
		}
		v.parting.tell()
		if !v.parting.isReady() { // nothing is in streams
			return
		}
		v.parting.parted()
		for _, l := range v.ins {
			if err := l.free(); err != nil {
				v.b.app.Log().Error("streams that wait for a window may not go on", "window", v.b.String(), "err", err)
				return
			}
		}
	})
}

// giveUp ends what Open has begun. It has not returned the window.
func (v *onDevice) giveUp() {
	v.end()
	if v.unwatch != nil {
		v.unwatch()
		v.stopExit()
	}
	_ = v.memory.giveBack()
}

// letGo is the first part of Close. If a stream waits here the window is over, and the stream goes on, before anything waits for
// that: also a put in it that waits for room, with a lock held. The error says that what was put may be nothing good.
func (v *onDevice) letGo() error {
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

// close ends this rank's part, of a window that is over. Streams that were let go get the limit once more to
// come to what they have put.
func (v *onDevice) close(ctx context.Context) (err error) {
	if !errors.Is(*v.b.over.Load(), errClosed) || v.awaited() >= 0 {
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
	return errors.Join(err, v.memory.giveBack())
}

// partLimit is how long streams of a window that is over wait for a rank to say that it is over there, and exitLimit the
// same when the node has ended.
const (
	partLimit = 10 * time.Second
	exitLimit = time.Second
)

// parting is how the ranks part.
type parting struct {
	b     *base
	peers []*peer

	mu      sync.Mutex    // of what follows
	ready   bool          // Open has returned the window
	ended   []bool        // by rank: the window is over for it, or it is lost
	changed chan struct{} // closed when one of ended has changed
}

// isReady tells whether Open has returned the window, or is about to.
func (q *parting) isReady() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.ready
}

// begin lets the window be used.
func (q *parting) begin() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if err := q.b.over.Load(); err != nil { // meanwhile; nothing is in streams
		return *err
	}
	q.ready = true
	return nil
}

// over notes that the window is over for a rank.
func (q *parting) over(rank int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ended[rank] = true
	close(q.changed)
	q.changed = make(chan struct{})
}

// tell tells the other ranks that the window is over here.
func (q *parting) tell() {
	for _, p := range q.peers {
		if p.rank == q.b.self {
			continue
		}
		p.in.mu.Lock()
		err := p.in.say(&note{verb: verbOver, signal: noSignal})
		p.in.mu.Unlock()
		if err != nil && !errors.Is(err, van.ErrPeerLost) && !errors.Is(err, van.ErrClosed) {
			q.b.app.Log().Info("could not tell a rank that a window is over", "window", q.b.String(), "rank", p.rank, "err", err)
		}
	}
}

// parted waits until the window is over for all other ranks, as far as can be known.
func (q *parting) parted() {
	patience := time.After(partLimit)
	for {
		q.mu.Lock()
		changed := q.changed
		i := slices.IndexFunc(q.peers, func(p *peer) bool { return p.rank != q.b.self && !q.ended[p.rank] && p.gone.Load() == nil })
		q.mu.Unlock()
		if i < 0 {
			return
		}
		select {
		case <-changed:
		case <-q.b.app.Ended():
			return
		case <-patience:
			q.b.app.Log().Warn("streams go on, but a rank has not said that the window is over there, too", "window", q.b.String(), "rank", i)
			return
		}
	}
}
