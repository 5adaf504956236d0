package window

// Window: its making, what it hears of other ranks and of its communicator, and its end.

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

// Options of Open. The size of the memory and Signals must be the same on all ranks.
type Options struct {
	// Memory is what others may put into, on the host. If it is empty Open makes Size bytes, 1 TiB at most.
	Memory af.Tensor
	Size   int

	// Device puts the Size bytes, af.MaxTensorBytes at most, on the ranks' devices, which must be GPUs of one host that reach each other.
	Device bool

	// Signals is how many signals each rank has at each other one: 0 to 65,535.
	Signals int
}

// Window is this rank's end of one. All methods are safe for concurrent use.
type Window struct {
	base     base
	customer *cluster.Customer
	dev      *onDevice // nil for one on the host
	peers    peers

	shut  chan struct{} // closed when Close has done its work
	ended sync.Once     // see end
}

// Open makes this rank's end of a window and waits until all ranks of c have made theirs: all
// call it, in the same order as other calls of c. What differs is an error on all ranks. Others
// may write to the memory, from the moment that Open is called until Close. 256 windows of a communicator may be open at once.
func Open(ctx context.Context, c *collective.Comm, o Options) (*Window, error) {
	for n := 1; ; n++ {
		w, err := open(ctx, c, o)
		if n == windowsEach || !errors.Is(err, errInUse) { // on all ranks
			return w, err
		}
	}
}

// errInUse: a window that is not closed has the application id that the next one would have.
var errInUse = fmt.Errorf("%w: a window that is not closed has its place, of %d", van.ErrInvalid, windowsEach)

// open tries to open the next window, which may fail with errInUse on all ranks.
func open(ctx context.Context, c *collective.Comm, o Options) (*Window, error) {
	w := &Window{base: base{layer: commlayer.Of(c), signals: o.Signals, self: c.Rank(), aliveEvery: aliveEvery}, shut: make(chan struct{})}
	b := &w.base
	b.app, b.isOver = b.layer.App(), w.isOver
	bad := b.take(o)
	for r, id := range b.layer.NodeIDs() {
		w.peers = append(w.peers, newPeer(b, r, id))
	}
	if bad == nil && o.Device { // before Enter: changed looks at it
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
		w.customer, bad = b.app.AddCustomer(b.id, b.id, w.receive) // which may be called before it returns
		if bad == nil {
			b.first.Store(w.customer.Skip(0) &^ 1)
		} else if errors.Is(bad, van.ErrInvalid) { // it exists
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
			w.dev.giveUp()
		}
		w.end() // a rank for which all is well may have put already
		b.mem.Release()
		if w.dev != nil {
			err = errors.Join(err, w.dev.memory.discard())
		}
		return nil, &van.Error{Op: "open window", Node: b.app.Name(), Detail: fmt.Sprintf("communicator %d, window %d", b.layer.ID(), child.Number), Err: err}
	}
	return w, nil
}

// maxSize is the largest Options.Size on hosts. On devices it is that of Window.Tensor.
const maxSize = 1 << 40

// take takes the memory of a host.
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
	case o.Device: // which is made later
	case !b.mem.OnHost():
		return notOnHost(o.Memory)
	case b.mem.Len() == 0:
		b.mem = backend.Slice(make([]uint64, (o.Size+7)/8)).Sub(0, o.Size)
	}
	return nil
}

// agree compares the windows of all ranks; bad is why this rank's makes no sense.
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

// String names the window, for errors.
func (w *Window) String() string { return w.base.String() }

// Rank is this node's rank in the communicator, from 0.
func (w *Window) Rank() int { return w.base.self }

// Size is the number of ranks.
func (w *Window) Size() int { return len(w.peers) }

// Bytes is this rank's memory, nil if it is on a device. Others may write what this rank has not been told of by a signal.
func (w *Window) Bytes() []byte { return w.base.mem.Host() }

// Tensor is this rank's memory, bytes of the host or of the device. That of a device lasts until the node's backend is closed.
func (w *Window) Tensor() af.Tensor {
	t, _ := af.NewTensor(w.base.mem, af.Uint8, int64(w.base.mem.Len())) // of that length
	return t
}

// Check returns why the window is over, from then on, or nil: then what streams have waited for, and have done by now,
// is whole and right. It does not wait.
func (w *Window) Check() error {
	err := w.base.over.Load()
	if err == nil {
		return nil
	}
	return w.base.bad("window", *err)
}

// Refused is how many messages for this window made no sense or came too late; nothing of them was
// written.
func (w *Window) Refused() uint64 { return w.base.refused.Load() }

// Close ends this rank's end of the window: it flushes what was put, for the communicator's limit at most, and
// tells the others, whose calls towards this rank fail from then on. When it returns nothing is
// written to this rank's memory any more, nor read from that of its puts, with any result. The
// error says what may not have arrived; there is none when the window had failed before.
//
// A window on devices is over on all ranks if a stream waits here for a signal that has not come: it goes on, and what
// was put behind the wait is not whole. Others may still write to this rank's memory there, which nobody else ever gets.
// If a stream does not come to what was put in it, for the limit once more when it was let go, Close returns an error, also of
// a window that had failed: the sources of these puts may still be read until the stream has.
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
		failed = w.dev.letGo()
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
	if w.alone() || !errors.Is(*b.over.Load(), errClosed) { // or the communicator has failed
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

// handle handles a message, or says why it makes no sense.
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
		w.dev.parting.over(rank)
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

// changed is told by the communicator.
func (w *Window) changed(rank int, err error) {
	if rank < 0 {
		w.base.fail(err)
		if w.base.closed.Load() {
			go w.end() // the communicator is in the middle of its failure
		}
		return
	}
	w.leave(rank, err)
}

// isOver is what follows when the window has become unusable.
func (w *Window) isOver(err error) {
	for _, p := range w.peers {
		p.sleepers.wakeAll()
	}
	if w.dev != nil && err != errClosed && w.dev.parting.isReady() { // otherwise Close, or Open, looks after it
		go w.dev.end()
	}
}

// leave notes that a rank has closed its end.
func (w *Window) leave(rank int, err error) {
	if p := w.peers[rank]; p.gone.CompareAndSwap(nil, &err) {
		p.sleepers.wakeAll()
		if w.dev != nil {
			w.dev.parting.over(rank)
			go w.dev.left(rank, err)
		}
	}
	if w.base.closed.Load() && w.base.over.Load() != nil && w.alone() {
		go w.end() // this may be a delivery to the customer
	}
}

// alone tells whether all other ranks have closed their ends.
func (w *Window) alone() bool {
	return !slices.ContainsFunc(w.peers, func(p *peer) bool { return p.rank != w.base.self && p.gone.Load() == nil })
}

// quiesce waits for who is sending to a rank, or taking what comes from it: the window is over.
func (w *Window) quiesce(p *peer) {
	if p.quiesce() {
		w.leave(p.rank, errRankClosed)
	}
}

// end takes the window off its node, when it is over. A later one with its application id goes on
// behind its timestamps.
func (w *Window) end() {
	w.ended.Do(func() {
		used := uint64(0)
		for _, p := range w.peers {
			w.quiesce(p)
			p.in.mu.Lock()
			used = max(used, p.out.next.Load(), p.in.tells)
			p.in.mu.Unlock()
		}
		w.base.child.Leave()
		if w.customer != nil {
			w.customer.Skip(int32(2 * used & math.MaxInt32))
			w.customer.Close()
		}
	})
}
