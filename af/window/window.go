package window

// Window: creation, messages of other ranks, events of the communicator, and the end.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/collective"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/commlayer"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Options are the options of Open. The size of the memory and Signals must be the same on all ranks.
type Options struct {
	// Memory is host memory that other ranks may put into. If it is empty, Open allocates Size bytes, at most 1 TiB.
	Memory af.Tensor
	Size   int

	// Device allocates the Size bytes, at most af.MaxTensorBytes, on the ranks' devices, which must be GPUs of one
	// host with access to each other.
	Device bool

	// Signals is the number of signals of each rank at each other rank: 0 to 65,535.
	Signals int
}

// Window is one rank's end of a window. All methods are safe for concurrent use.
type Window struct {
	base     base
	customer *cluster.Customer
	dev      *onDevice // nil for a host window
	peers    peers

	shut  chan struct{} // closed at the end of Close
	ended sync.Once     // see end
}

// Open creates this rank's end of a window and waits until all ranks of c have created theirs. All ranks call it, in
// the same order as other calls of c. Differing options are an error on all ranks. Other ranks may write to the
// memory from the call of Open until Close. 256 windows of a communicator may be open at once.
func Open(ctx context.Context, c *collective.Comm, o Options) (*Window, error) {
	for n := 1; ; n++ {
		w, err := open(ctx, c, o)
		if n == windowsEach || !errors.Is(err, errInUse) { // the same on all ranks
			return w, err
		}
	}
}

// errInUse: an open window has the application id of the next one.
var errInUse = fmt.Errorf("%w: an earlier window that is not closed uses its number, of %d", van.ErrInvalid, windowsEach)

// open tries to open the next window. errInUse is returned on all ranks.
func open(ctx context.Context, c *collective.Comm, o Options) (*Window, error) {
	w := &Window{base: base{layer: commlayer.Of(c), signals: o.Signals, self: c.Rank(), aliveEvery: aliveEvery}, shut: make(chan struct{})}
	b := &w.base
	b.app, b.isOver = b.layer.App(), w.isOver
	bad := b.take(o)
	for r, id := range b.layer.NodeIDs() {
		w.peers = append(w.peers, newPeer(b, r, id))
	}
	if bad == nil && o.Device { // before Enter, since changed reads it
		w.dev, bad = newOnDevice(b, w.peers)
	}
	child, err := b.layer.Enter("open window", w.changed)
	if err != nil {
		return nil, err
	}
	b.child = child
	b.mem.Retain()
	if bad == nil {
		b.id = appOf(child.Epoch, child.Number, b.layer.ID())
		w.customer, bad = b.app.AddCustomer(b.id, b.id, w.receive) // receive may be called before it returns
		if bad == nil {
			b.first.Store(w.customer.Skip(0) &^ 1)
		} else if errors.Is(bad, van.ErrInvalid) { // the id is in use
			bad = fmt.Errorf("%w: %w", errInUse, bad)
		}
	}
	size := b.mem.Len()
	if w.dev != nil {
		size = o.Size
	}
	err = w.agree(ctx, c, size, bad)
	if err == nil && w.dev != nil {
		if err = w.dev.meet(ctx, c, size); err == nil {
			err = w.dev.begin()
		}
	}
	if err != nil {
		b.fail(err)
		if w.dev != nil {
			w.dev.abandonSetup()
		}
		w.end() // a rank without an error may have put already
		b.mem.Release()
		if w.dev != nil {
			err = errors.Join(err, w.dev.memory.discard())
		}
		return nil, &van.Error{Op: "open window", Node: b.app.Name(), Detail: fmt.Sprintf("communicator %d, window %d", b.layer.ID(), child.Number), Err: err}
	}
	return w, nil
}

// maxSize is the largest Options.Size of host windows.
const maxSize = 1 << 40

// take sets the memory of a host window, and checks the options.
func (b *base) take(o Options) error {
	b.mem = o.Memory.Mem()
	most := maxSize
	if o.Device {
		most = af.MaxTensorBytes
	}
	switch {
	case o.Signals < 0 || o.Signals > maxSignals:
		b.signals = 0
		return fmt.Errorf("%w: %d signals, want 0 to %d", van.ErrInvalid, o.Signals, maxSignals)
	case o.Size < 0 || o.Size > 0 && b.mem.Len() > 0:
		return fmt.Errorf("%w: size %d beside memory of %d bytes, want 0 or more, and one of the two", van.ErrInvalid, o.Size, b.mem.Len())
	case o.Size > most:
		return fmt.Errorf("%w: size %d, want at most %d", van.ErrInvalid, o.Size, most)
	case o.Device && b.mem.Len() > 0:
		return fmt.Errorf("%w: memory for a window on the device, want Size: others may write there for longer than a caller's memory lasts", van.ErrInvalid)
	case o.Device: // allocated later
	case !b.mem.OnHost():
		return notOnHost(o.Memory)
	case b.mem.Len() == 0:
		b.mem = backend.Slice(make([]uint64, (o.Size+7)/8)).Sub(0, o.Size)
	}
	return nil
}

// agree compares the windows of all ranks; bad is the error of this rank's arguments.
func (w *Window) agree(ctx context.Context, c *collective.Comm, size int, bad error) error {
	own := shape{uint64(size), uint32(w.base.signals), w.base.child.Number, bad != nil, w.dev != nil, false}
	if errors.Is(bad, errInUse) {
		own.refused, own.inUse = false, true
	}
	all, err := c.AllGatherBytes(ctx, own.append(nil))
	if own.refused {
		return bad
	}
	if err != nil {
		return err
	}
	inUse := bad
	for r, b := range all {
		s, err := parseShape(b)
		if err != nil {
			return fmt.Errorf("%s: %w", w.base.layer.Name(r), err)
		}
		if s.inUse && inUse == nil {
			inUse = fmt.Errorf("%w at %s", errInUse, w.base.layer.Name(r))
		}
		if s.inUse = own.inUse; s != own {
			return fmt.Errorf("%w: window %d has %s at %s, and is window %d with %s at rank %d, here",
				collective.ErrMismatch, s.number, s, w.base.layer.Name(r), own.number, own, w.base.self)
		}
	}
	return inUse
}

// Rank returns this node's rank in the communicator, from 0.
func (w *Window) Rank() int { return w.base.self }

// Size returns the number of ranks.
func (w *Window) Size() int { return len(w.peers) }

// Bytes returns this rank's memory, nil for a device window. Other ranks may be writing to parts for which no signal
// was received.
func (w *Window) Bytes() []byte { return w.base.mem.Host() }

// Tensor returns this rank's memory as bytes on the host or on the device. Device memory remains allocated until the
// node's backend is closed.
func (w *Window) Tensor() af.Tensor {
	t, _ := af.NewTensor(w.base.mem, af.Uint8, int64(w.base.mem.Len())) // cannot fail for this length
	return t
}

// Check returns nil, or why the window has ended. If it returns nil, the data that streams have waited for and
// processed so far is complete and correct. It does not wait.
func (w *Window) Check() error {
	err := w.base.over.Load()
	if err == nil {
		return nil
	}
	return w.base.bad("window", *err)
}

// Refused returns the number of messages to this window that were malformed or too late. Nothing of them was written.
func (w *Window) Refused() uint64 { return w.base.refused.Load() }

// Close ends this rank's end of the window. It flushes earlier puts, for at most the communicator's limit (Options.Timeout), and
// notifies the other ranks, whose calls towards this rank fail from then on. When Close returns, with any result,
// nothing is written to this rank's memory or read from the sources of its puts any more. The error says which data
// may not have arrived; it is nil if the window had failed before.
//
// A device window ends on all ranks if a stream of this rank waits for a signal that has not arrived: the stream
// continues, and data put after the wait is incomplete. Other ranks may still write to this rank's memory, which is
// not used for anything else. If a stream does not reach queued work, within the limit again after its release, Close
// returns an error, also for a window that had failed: the stream may still read the sources of these puts.
func (w *Window) Close() error {
	if w.base.closed.Swap(true) {
		<-w.shut
		return nil
	}
	defer close(w.shut)
	b := &w.base
	ctx, cancel := b.layer.Limited()
	defer cancel()
	var failed error
	if w.dev != nil && b.over.Load() == nil {
		failed = w.dev.endWaits()
	}
	for r, p := range w.peers {
		if r == b.self || b.over.Load() != nil {
			continue
		}
		if err := w.flush(ctx, "flush", r); err != nil && b.over.Load() == nil {
			failed = cmp.Or(failed, err)
		}
		p.out.sayClosed()
	}
	b.fail(errClosed)
	for _, p := range w.peers {
		w.quiesce(p)
	}
	if w.dev != nil {
		failed = cmp.Or(failed, w.dev.close(ctx))
	}
	failed = cmp.Or(failed, w.peers.takeBack(ctx, b))
	b.mem.Release()
	if w.alone() || *b.over.Load() != errClosed { // or the communicator has failed
		w.end()
	}
	return failed
}

// receive handles a message. It runs on a goroutine of the transport.
func (w *Window) receive(msg *van.Message) {
	b := &w.base
	if err := w.handle(msg); err != nil {
		b.refused.Add(1)
		b.app.Rarely("window: "+logx.Kind(err)).Warn("refused a message to a window",
			"window", b.String(), "from", b.app.PeerName(msg.Sender), "err", err)
	}
}

// handle handles a message. The error says why a message is malformed.
func (w *Window) handle(msg *van.Message) error {
	b := &w.base
	rank, member := slices.BinarySearch(b.layer.NodeIDs(), msg.Sender)
	n, err := parse(msg.Body)
	switch {
	case err != nil:
		return err
	case !member || rank == b.self:
		return fmt.Errorf("%w: %s is not another rank of %s", van.ErrMalformed, van.NodeName(msg.Sender), b)
	case n.window != b.child.Number || n.epoch != b.child.Epoch:
		if n.verb == verbPut {
			return errStale
		}
		return nil
	}
	p := w.peers[rank]
	switch {
	case n.verb == verbTaken:
		return p.out.learn(&n)
	case n.verb == verbOver && w.dev != nil:
		w.dev.ending.Over(rank)
		b.fail(fmt.Errorf("%w: the window is over at %s", van.ErrClosed, b.layer.Name(rank)))
		return nil
	case n.verb == verbOver, n.verb == verbPut && w.dev != nil:
		return fmt.Errorf("%w: %s, which is not for windows of this kind", van.ErrMalformed, [...]string{verbOver: "the end of a window on devices", verbPut: "a put in a message"}[n.verb])
	}
	left, err := p.in.receive(msg, n)
	if left {
		w.leave(rank, errRankClosed)
	}
	return err
}

// changed is called by the communicator when a rank is lost or leaves, or the communicator fails.
func (w *Window) changed(rank int, err error) {
	if rank < 0 {
		w.base.fail(err)
		if w.base.closed.Load() {
			go w.end() // the communicator has not finished failing
		}
		return
	}
	w.leave(rank, err)
}

// isOver is called when the window has become unusable.
func (w *Window) isOver(err error) {
	for _, p := range w.peers {
		p.sleepers.wakeAll()
	}
	if w.dev != nil && err != errClosed && w.dev.ending.Begun() { // otherwise Close or Open calls end
		go w.dev.end()
	}
}

// leave records that a rank has closed the window.
func (w *Window) leave(rank int, err error) {
	if p := w.peers[rank]; p.gone.CompareAndSwap(nil, &err) {
		p.sleepers.wakeAll()
		if w.dev != nil {
			w.dev.ending.Over(rank)
			go w.dev.left(rank, err)
		}
	}
	if w.base.closed.Load() && w.base.over.Load() != nil && w.alone() {
		go w.end() // the caller may be a delivery to the customer
	}
}

// alone reports whether all other ranks have closed the window.
func (w *Window) alone() bool {
	return !slices.ContainsFunc(w.peers, func(p *peer) bool { return p.rank != w.base.self && p.gone.Load() == nil })
}

// quiesce waits for calls that send to a rank or process its messages. The window is over.
func (w *Window) quiesce(p *peer) {
	if p.quiesce() {
		w.leave(p.rank, errRankClosed)
	}
}

// end removes an ended window from its node. A later window with its application id continues after its timestamps.
func (w *Window) end() {
	w.ended.Do(func() {
		used := uint64(0)
		for _, p := range w.peers {
			w.quiesce(p)
			p.in.mu.Lock()
			used = max(used, p.out.next.Load(), p.in.oddTimestamps)
			p.in.mu.Unlock()
		}
		w.base.child.Leave()
		if w.customer != nil {
			w.customer.Skip(int32(2 * used & math.MaxInt32))
			w.customer.Close()
		}
	})
}
