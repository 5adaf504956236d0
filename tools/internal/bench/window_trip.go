package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/collective"
	"github.com/stepaf/stepaf-go/af/window"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van/backend"
)

// The ranks of bench window.

// Measurements of a rank.
const (
	askTrips   = "trips"   // the begin or the end of each way from rank 0, and the nanoseconds of each round trip
	askStreams = "streams" // the same in streams
	askAhead   = "ahead"   // the average nanoseconds of a way, of round trips that are all queued at once
	askEnd     = "end"     // closes the window
)

// tripper is a rank that makes round trips. In host memory the data of each round trip has its number.
type tripper struct {
	node   *postoffice.Node
	w      *window.Window
	comm   *collective.Comm
	back   backend.Backend
	stream af.Stream
	event  backend.Event
	size   int
	src    backend.Mem
	block  byte    // number of the block; image XORs it into every byte
	at     []int64 // when each way of a block began on rank 0 or ended on rank 1, by the clock of the host
}

func newTripper(ctx context.Context, node *postoffice.Node, comm *collective.Comm, size int) (_ *tripper, err error) {
	t := &tripper{node: node, comm: comm, back: node.Backend(), size: size}
	t.w, err = window.Open(ctx, comm, window.Options{Size: size, Signals: 1, Device: onGPU(node)})
	if err == nil && onGPU(node) {
		t.stream, err = newStream(t.back)
	}
	if err == nil {
		t.event, err = t.back.NewEvent()
	}
	if err == nil {
		t.src, err = t.back.Alloc(size)
	}
	return t, err
}

// newStream returns a new stream of a device.
func newStream(b backend.Backend) (af.Stream, error) {
	a, ok := b.(backend.AsyncCopier)
	if !ok {
		return 0, fmt.Errorf("bench: backend %s has no streams", b.Name())
	}
	s, err := a.NewStream()
	return af.Stream(s), err
}

func (*tripper) close() {} // askEnd does it

func (t *tripper) times() []int64 { return t.at }

func (t *tripper) do(ctx context.Context, what, _ string, _ time.Duration, n int) (ns []int64, err error) {
	if what == askEnd {
		if err := t.comm.Barrier(ctx); err != nil {
			return nil, err
		}
		return nil, errors.Join(t.w.Close(), t.comm.Shutdown(ctx))
	}
	src, err := t.prepare(ctx)
	if err != nil {
		return nil, err
	}
	switch what {
	case askTrips:
		ns, err = t.trips(ctx, src, n, af.Complete, func() error { return t.w.WaitSignal(ctx, 1-t.w.Rank(), 0) })
	case askStreams:
		ns, err = t.trips(ctx, src, n, t.stream, func() error { return errors.Join(t.wait(ctx), t.arrived(ctx)) })
	case askAhead:
		ns, err = t.ahead(ctx, src, n)
	default:
		err = fmt.Errorf("bench child: %q", what)
	}
	if err != nil {
		return nil, err
	}
	return ns, t.check(n)
}

// image returns the data that rank r puts in this block, in round trip i of host memory.
func (t *tripper) image(r, i int) []byte {
	b := make([]byte, t.size)
	fill(b)
	for k := range b {
		b[k] ^= t.block*2 + byte(r)
	}
	if !onGPU(t.node) {
		number(b, i)
	}
	return b
}

// number writes the number of a round trip to both ends of its data.
func number(b []byte, i int) {
	le.PutUint64(b, uint64(i))
	le.PutUint64(b[len(b)-8:], uint64(i))
}

// prepare fills the source, clears the window, and waits for the other rank.
func (t *tripper) prepare(ctx context.Context) (src af.Tensor, err error) {
	t.block++
	m := t.w.Tensor()
	if err = t.back.Copy(m.Mem(), backend.Bytes(make([]byte, t.size))); err == nil {
		err = t.back.Copy(t.src, backend.Bytes(t.image(t.w.Rank(), 0)))
	}
	if err == nil {
		err = t.comm.Barrier(ctx)
	}
	if err != nil {
		return src, err
	}
	return af.NewTensor(t.src, af.Uint8, int64(t.size))
}

// check compares the window with the other rank's puts, of which the last one has number i.
func (t *tripper) check(i int) error {
	got := make([]byte, t.size)
	m := t.w.Tensor()
	if err := t.back.Copy(backend.Bytes(got), m.Mem()); err != nil {
		return err
	}
	if !bytes.Equal(got, t.image(1-t.w.Rank(), i)) {
		return fmt.Errorf("PutSignal of %d bytes: wrong data in block %d", t.size, t.block)
	}
	return t.w.Check()
}

// checkNumber compares both ends of the data in host memory with the number of a round trip.
func (t *tripper) checkNumber(i int) error {
	got := t.w.Bytes()
	if first, last := le.Uint64(got), le.Uint64(got[t.size-8:]); first != uint64(i) || last != uint64(i) {
		return fmt.Errorf("PutSignal %d of %d bytes: wrong data, of numbers %d and %d", i, t.size, first, last)
	}
	return nil
}

func (t *tripper) put(ctx context.Context, src af.Tensor, s af.Stream) error {
	return t.w.PutSignal(ctx, 1-t.w.Rank(), 0, src, 0, s)
}

func (t *tripper) wait(ctx context.Context) error {
	return t.w.WaitSignal(ctx, 1-t.w.Rank(), 0, t.stream)
}

// arrived waits until the stream has ended.
func (t *tripper) arrived(ctx context.Context) error {
	if err := t.event.Record(uintptr(t.stream)); err != nil {
		return err
	}
	return t.event.Sync(ctx)
}

// trips makes n round trips. The rank puts in stream, and waits by wait.
func (t *tripper) trips(ctx context.Context, src af.Tensor, n int, stream af.Stream, wait func() error) ([]int64, error) {
	ns, host := make([]int64, n), !onGPU(t.node)
	t.at = make([]int64, n)
	for i := range ns {
		if host {
			if err := t.w.Flush(ctx, 1-t.w.Rank()); err != nil { // before the source is overwritten
				return nil, err
			}
			number(src.Bytes(), i+1)
		}
		var err error
		begun := clock.Now()
		if t.w.Rank() == 0 {
			err = t.put(ctx, src, stream)
		}
		if err == nil {
			err = wait()
		}
		now := clock.Now()
		t.at[i], ns[i] = int64(begun), int64(now-begun)
		if host && err == nil {
			err = t.checkNumber(i + 1)
		}
		if t.w.Rank() == 1 {
			t.at[i] = int64(now)
			err = errors.Join(err, t.put(ctx, src, stream))
		}
		if err != nil {
			return nil, err
		}
	}
	return ns, t.arrived(ctx)
}

func (t *tripper) ahead(ctx context.Context, src af.Tensor, n int) (_ []int64, err error) {
	begun := clock.Now()
	for range n {
		if t.w.Rank() == 0 {
			err = errors.Join(t.put(ctx, src, t.stream), t.wait(ctx))
		} else {
			err = errors.Join(t.wait(ctx), t.put(ctx, src, t.stream))
		}
		if err != nil {
			return nil, err
		}
	}
	err = t.arrived(ctx)
	return []int64{int64(clock.Now()-begun) / int64(2*n)}, err
}
