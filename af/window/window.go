package window

// Window: its making, its failure and its end.

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/collective"
	"github.com/stepaf/stepaf-go/postoffice"
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
	layer    collective.Layer
	app      postoffice.App
	tenant   *collective.Tenant
	customer *postoffice.Customer
	id       int          // of the application, and of the customer
	first    atomic.Int32 // timestamp of the first message, even
	mem      backend.Mem
	dev      *onDevice // nil for one on the host
	signals  int
	self     int
	peers    []*peer

	over    atomic.Pointer[error] // why it cannot be used
	refused atomic.Uint64
	closed  atomic.Bool
	shut    chan struct{} // closed when Close has done its work
	ended   sync.Once
}

// Open makes this rank's end of a window and waits until all ranks of c have made theirs: all
// call it, in the same order as other calls of c. What differs is an error on all ranks. Others
// may write to the memory, from the moment that Open is called until Close.
func Open(ctx context.Context, c *collective.Comm, o Options) (*Window, error) {
	w := &Window{layer: c.Layer(), signals: o.Signals, self: c.Rank(), shut: make(chan struct{})}
	w.app = w.layer.App()
	bad := w.take(o)
	for r, id := range w.layer.NodeIDs() {
		w.peers = append(w.peers, newPeer(w, r, id))
	}
	if bad == nil && o.Device { // before Enter: changed looks at it
		w.dev, bad = newOnDevice(w)
	}
	tenant, err := w.layer.Enter("open window", w.changed)
	if err != nil {
		return nil, err
	}
	w.tenant = tenant
	w.mem.Retain()
	if bad == nil {
		w.id = appOf(tenant.Epoch, tenant.Number, w.layer.ID())
		w.customer, bad = w.app.AddCustomer(w.id, w.id, w.receive) // which may be called before it returns
		if bad == nil {
			w.first.Store(w.customer.Skip(0) &^ 1)
		}
	}
	size := w.mem.Len()
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
		w.fail(err)
		if w.dev != nil {
			w.dev.giveUp()
		}
		w.end() // a rank for which all is well may have put already
		w.mem.Release()
		if w.dev != nil {
			err = errors.Join(err, w.dev.discard())
		}
		return nil, &van.Error{Op: "open window", Node: w.app.Name(), Detail: fmt.Sprintf("communicator %d, window %d", w.layer.ID(), tenant.Number), Err: err}
	}
	return w, nil
}

// maxSize is the largest Options.Size on hosts. On devices it is that of Window.Tensor.
const maxSize = 1 << 40

// take takes the memory of a host.
func (w *Window) take(o Options) error {
	w.mem = o.Memory.Mem()
	most := maxSize
	if o.Device {
		most = af.MaxTensorBytes
	}
	switch {
	case o.Signals < 0 || o.Signals > maxSignals:
		w.signals = 0
		return fmt.Errorf("%w: %d signals, want 0 to %d", van.ErrInvalid, o.Signals, maxSignals)
	case o.Size < 0 || o.Size > 0 && w.mem.Len() > 0:
		return fmt.Errorf("%w: size %d beside memory of %d bytes, want 0 or more, and one of the two", van.ErrInvalid, o.Size, w.mem.Len())
	case o.Size > most:
		return fmt.Errorf("%w: size %d, want at most %d", van.ErrInvalid, o.Size, most)
	case o.Device && w.mem.Len() > 0:
		return fmt.Errorf("%w: memory for a window on the device, want Size: others may write there for longer than a caller's memory lasts", van.ErrInvalid)
	case o.Device: // which is made later
	case !w.mem.OnHost():
		return notOnHost(o.Memory)
	case w.mem.Len() == 0:
		w.mem = backend.Slice(make([]uint64, (o.Size+7)/8)).Sub(0, o.Size)
	}
	return nil
}

// agree compares the windows of all ranks; bad is why this rank's makes no sense.
func (w *Window) agree(ctx context.Context, c *collective.Comm, size int, bad error) error {
	own := shape{uint64(size), uint32(w.signals), w.tenant.Number, bad != nil, w.dev != nil}
	all, err := Exchange(ctx, c, own.append(nil))
	if err := cmp.Or(bad, err); err != nil {
		return err
	}
	for r, b := range all {
		s, err := parseShape(b)
		if err != nil {
			return fmt.Errorf("%s: %w", w.layer.Name(r), err)
		}
		if s != own {
			return fmt.Errorf("%w: window %d has %s at %s, and is window %d with %s at rank %d, here",
				collective.ErrMismatch, s.number, s, w.layer.Name(r), own.number, own, w.self)
		}
	}
	return nil
}

// maxValue is the longest value that Exchange takes.
const maxValue = 1 << 20

// Exchange gives every rank of c the values of all, in the order of ranks: addresses, say, or keys. Lengths
// may differ, up to 1 MiB. All ranks call it.
func Exchange(ctx context.Context, c *collective.Comm, value []byte) ([][]byte, error) {
	own, lens := make([]uint32, 1), make([]uint32, c.Size())
	own[0] = uint32(min(len(value), maxValue+1)) // too long for all of them, who then know whose it is
	in, err := af.FromSlice(own)
	out, err2 := af.FromSlice(lens)
	if err := cmp.Or(err, err2); err != nil {
		return nil, err
	}
	op, err := c.AllGather(out, in)
	if err == nil {
		err = op.Wait(ctx)
	}
	if err != nil {
		return nil, err
	}
	values, parts := make([][]byte, c.Size()), make([]af.Tensor, c.Size())
	for r, n := range lens {
		if n > maxValue {
			return nil, fmt.Errorf("exchange: %w: rank %d has a value of %d bytes, want at most %d", van.ErrMalformed, r, n, maxValue)
		}
		values[r] = make([]byte, n)
		if parts[r], err = af.FromBytes(values[r], af.Uint8, int64(n)); err != nil {
			return nil, err
		}
	}
	if in, err = af.FromBytes(value, af.Uint8, int64(len(value))); err != nil {
		return nil, err
	}
	if op, err = c.AllGatherV(parts, in); err == nil {
		err = op.Wait(ctx)
	}
	if err != nil {
		return nil, err
	}
	return values, nil
}

// Rank is this node's rank in the communicator, from 0.
func (w *Window) Rank() int { return w.self }

// Size is the number of ranks.
func (w *Window) Size() int { return len(w.peers) }

// Bytes is this rank's memory, nil if it is on a device. Others may write what this rank has not been told of by a signal.
func (w *Window) Bytes() []byte { return w.mem.Host() }

// Tensor is this rank's memory, bytes of the host or of the device. That of a device lasts until the node's backend is closed.
func (w *Window) Tensor() af.Tensor {
	t, _ := af.New(w.mem, af.Uint8, int64(w.mem.Len())) // of that length
	return t
}

// Check returns why the window is over, from then on, or nil: then what streams have waited for, and have done by now,
// is whole and right. It does not wait.
func (w *Window) Check() error {
	err := w.over.Load()
	if err == nil {
		return nil
	}
	return &van.Error{Op: "window", Node: w.app.Name(), Detail: w.String(), Err: *err}
}

// Refused is how many messages for this window made no sense or came too late; nothing of them was
// written.
func (w *Window) Refused() uint64 { return w.refused.Load() }

// changed is told by the communicator.
func (w *Window) changed(rank int, err error) {
	if rank < 0 {
		w.fail(err)
		if w.closed.Load() {
			go w.end() // the communicator is in the middle of its failure
		}
		return
	}
	w.leave(rank, err)
}

// fail makes the window unusable. Only the first error counts.
func (w *Window) fail(err error) {
	if w.over.CompareAndSwap(nil, &err) {
		for _, p := range w.peers {
			p.wakeAll()
		}
		if w.dev != nil && err != errClosed && w.dev.isReady() { // otherwise Close, or Open, looks after it
			go w.dev.end()
		}
	}
}

// leave notes that a rank has closed its end.
func (w *Window) leave(rank int, err error) {
	if p := w.peers[rank]; p.gone.CompareAndSwap(nil, &err) {
		p.wakeAll()
		if w.dev != nil {
			w.dev.over(rank)
			go w.dev.left(rank, err)
		}
	}
	if w.closed.Load() && w.over.Load() != nil && w.alone() {
		go w.end() // this may be a delivery to the customer
	}
}

// alone tells whether all other ranks have closed their ends.
func (w *Window) alone() bool {
	for r, p := range w.peers {
		if r != w.self && p.gone.Load() == nil {
			return false
		}
	}
	return true
}

// end takes the window off its node, when it is over. A later one with its application id goes on
// behind its timestamps.
func (w *Window) end() {
	w.ended.Do(func() {
		used := uint64(0)
		for _, p := range w.peers {
			p.quiesce()
			p.recv.Lock()
			used = max(used, p.next.Load(), p.tells)
			p.recv.Unlock()
		}
		w.tenant.Leave()
		if w.customer != nil {
			w.customer.Skip(int32(2 * used & math.MaxInt32))
			w.customer.Close()
		}
	})
}

var errClosed = fmt.Errorf("%w: this window", van.ErrClosed)

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
	if w.closed.Swap(true) {
		<-w.shut
		return nil
	}
	defer close(w.shut)
	ctx, cancel := w.limited()
	defer cancel()
	var failed error
	if w.dev != nil && w.over.Load() == nil {
		failed = w.dev.letGo()
	}
	for r, p := range w.peers {
		if r == w.self || w.over.Load() != nil {
			continue
		}
		if err := w.flush(ctx, "flush", r); err != nil && w.over.Load() == nil {
			failed = cmp.Or(failed, err)
		}
		p.sayClosed()
	}
	w.fail(errClosed)
	for _, p := range w.peers {
		p.quiesce()
	}
	if w.dev != nil {
		failed = cmp.Or(failed, w.dev.close(ctx))
	}
	failed = cmp.Or(failed, w.takeBack(ctx))
	w.mem.Release()
	if w.alone() || !errors.Is(*w.over.Load(), errClosed) { // or the communicator has failed
		w.end()
	}
	return failed
}

// limited is a context that lasts for the communicator's limit.
func (w *Window) limited() (context.Context, context.CancelFunc) {
	ctx := context.Background()
	if limit := w.layer.Limit(ctx); limit > 0 {
		return context.WithTimeoutCause(ctx, limit, van.ErrTimeout)
	}
	return ctx, func() {}
}

// takeBack makes what transports still read the caller's again.
func (w *Window) takeBack(ctx context.Context) error {
	if !w.lends() {
		return nil
	}
	if x, ok := van.As[van.Recaller](w.app.Van()); ok {
		w.lent(func(seq uint64) {
			x.Recall(van.Requests{App: int32(w.id), Customer: int32(w.id), First: w.timestamp(seq), Count: 1})
		})
		return nil
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for w.lends() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return &van.Error{Op: "close window", Node: w.app.Name(), Detail: "the transport still reads memory of puts", Err: timeout(context.Cause(ctx))}
		}
	}
	return nil
}

// lent calls f with the numbers of messages of which a transport reads memory.
func (w *Window) lent(f func(seq uint64)) {
	for _, p := range w.peers {
		for i := range p.lendings {
			if seq := p.lendings[i].seq.Load(); seq != 0 {
				f(seq - 1)
			}
		}
	}
}

// lends tells whether there are any.
func (w *Window) lends() (any bool) {
	w.lent(func(uint64) { any = true })
	return any
}

// timestamp is that of the message with a number: even, since those of other messages are odd.
func (w *Window) timestamp(seq uint64) int32 {
	return int32((uint64(w.first.Load()) + seq<<1) & math.MaxInt32)
}

// timeout makes the end of a context's time van.ErrTimeout.
func timeout(cause error) error {
	if errors.Is(cause, context.DeadlineExceeded) && !errors.Is(cause, van.ErrTimeout) {
		return fmt.Errorf("%w: %w", van.ErrTimeout, cause)
	}
	return cause
}

// keyFrame is what the key frame of data holds.
var keyFrame = binary.LittleEndian.AppendUint64(nil, dataKey)
