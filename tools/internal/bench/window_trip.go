package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/collective"
	"github.com/stepaf/stepaf-go/af/window"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van/backend"
)

// The ranks of bench window.

// Measurements of a rank, besides askFloor. A line has the name, the size, and the number of round trips.
const (
	askTrips   = "trips"   // the begin or the end of each way from rank 0, and the nanoseconds of each round trip
	askStreams = "streams" // the same in streams
	askAhead   = "ahead"   // the average nanoseconds of a way, of round trips that are all queued at once
)

// tripper is a rank that makes round trips. In host memory the data of each round trip has its number.
type tripper struct {
	node   *postoffice.Node
	w      *window.Window
	comm   *collective.Comm
	back   backend.Backend
	stream af.Stream
	event  backend.Event
	src    backend.Mem
	block  byte // added to all bytes of a block
	floor  baseline
	server *floorServer
	size   int // of the floor
}

func newTripper(node *postoffice.Node, w *window.Window, comm *collective.Comm, most int) (*tripper, error) {
	t := &tripper{node: node, w: w, comm: comm, back: node.Backend()}
	var err error
	if onGPU(node) {
		t.stream, err = newStream(t.back)
	}
	if err == nil {
		t.event, err = t.back.NewEvent()
	}
	if err == nil {
		t.src, err = t.back.Alloc(most)
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

func (t *tripper) do(ctx context.Context, what string, size, n int) (*answer, error) {
	if what == askFloor {
		return t.doFloor(ctx, size, n)
	}
	src, err := t.prepare(ctx, size)
	if err != nil {
		return nil, err
	}
	a := &answer{}
	switch what {
	case askTrips:
		err = t.trips(ctx, src, n, a, af.Complete, func() error { return t.w.WaitSignal(ctx, 1-t.w.Rank(), 0) })
	case askStreams:
		err = t.trips(ctx, src, n, a, t.stream, func() error { return errors.Join(t.wait(ctx), t.arrived(ctx)) })
	case askAhead:
		err = t.ahead(ctx, src, n, a)
	default:
		err = fmt.Errorf("bench child: %q", what)
	}
	if err != nil {
		return nil, err
	}
	return a, t.check(size, n)
}

// image returns the data that rank r puts in this block, in round trip i of host memory.
func (t *tripper) image(r, size, i int) []byte {
	b := make([]byte, size)
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
func (t *tripper) prepare(ctx context.Context, size int) (src af.Tensor, err error) {
	t.block++
	m := t.w.Tensor()
	if err = t.back.Copy(m.Mem().Sub(0, size), backend.Bytes(make([]byte, size))); err == nil {
		err = t.back.Copy(t.src.Sub(0, size), backend.Bytes(t.image(t.w.Rank(), size, 0)))
	}
	if err == nil {
		err = t.comm.Barrier(ctx)
	}
	if err != nil {
		return src, err
	}
	return af.NewTensor(t.src.Sub(0, size), af.Uint8, int64(size))
}

// check compares the window with the other rank's puts, of which the last one has number i.
func (t *tripper) check(size, i int) error {
	got := make([]byte, size)
	m := t.w.Tensor()
	if err := t.back.Copy(backend.Bytes(got), m.Mem().Sub(0, size)); err != nil {
		return err
	}
	if !bytes.Equal(got, t.image(1-t.w.Rank(), size, i)) {
		return fmt.Errorf("PutSignal of %d bytes: wrong data in block %d", size, t.block)
	}
	return t.w.Check()
}

// checkNumber compares both ends of the data in host memory with the number of a round trip.
func (t *tripper) checkNumber(size, i int) error {
	got := t.w.Bytes()[:size]
	if first, last := le.Uint64(got), le.Uint64(got[size-8:]); first != uint64(i) || last != uint64(i) {
		return fmt.Errorf("PutSignal %d of %d bytes: wrong data, of numbers %d and %d", i, size, first, last)
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
func (t *tripper) trips(ctx context.Context, src af.Tensor, n int, a *answer, stream af.Stream, wait func() error) error {
	a.NS, a.At = make([]int64, n), make([]int64, n)
	host := !onGPU(t.node)
	for i := range n {
		if host {
			if err := t.w.Flush(ctx, 1-t.w.Rank()); err != nil { // before the source is overwritten
				return err
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
		a.At[i], a.NS[i] = int64(begun), int64(now-begun)
		if host && err == nil {
			err = t.checkNumber(src.Len(), i+1)
		}
		if t.w.Rank() == 1 {
			a.At[i] = int64(now)
			err = errors.Join(err, t.put(ctx, src, stream))
		}
		if err != nil {
			return err
		}
	}
	return t.arrived(ctx)
}

func (t *tripper) ahead(ctx context.Context, src af.Tensor, n int, a *answer) (err error) {
	begun := clock.Now()
	for range n {
		if t.w.Rank() == 0 {
			err = errors.Join(t.put(ctx, src, t.stream), t.wait(ctx))
		} else {
			err = errors.Join(t.wait(ctx), t.put(ctx, src, t.stream))
		}
		if err != nil {
			return err
		}
	}
	if err = t.arrived(ctx); err != nil {
		return err
	}
	a.NS = []int64{int64(clock.Now()-begun) / int64(2*n)}
	return nil
}

// doFloor measures the floor, of which rank 1 is the server.
func (t *tripper) doFloor(ctx context.Context, size, n int) (*answer, error) {
	if t.size != size {
		err := t.endFloor(ctx)
		if err == nil {
			err = t.beginFloor(ctx, size)
		}
		if err != nil {
			return nil, err
		}
	}
	if t.floor == nil {
		return &answer{NS: make([]int64, n)}, nil
	}
	return times(t.floor.measure(n))
}

func (t *tripper) beginFloor(ctx context.Context, size int) error {
	cfg := t.node.Config()
	x := floors{push: size, pull: size, clients: 1, pairs: 1, shared: cfg.EnableIPC == 1, bare: cfg.EnableIPC == 0 && cfg.VanType == zmq}
	kinds, err := x.kinds(t.node)
	if err != nil {
		return err
	}
	kind := kinds[len(kinds)-1] // libzmq alone instead of TCP
	var at string
	if t.w.Rank() == 1 {
		if t.server, err = kind.serve(); err != nil {
			return err
		}
		at = t.server.addr
	}
	all, err := t.comm.AllGatherBytes(ctx, []byte(at))
	if err == nil && t.w.Rank() == 0 {
		t.floor, err = kind.dial([]string{string(all[1])})
	}
	t.size = size
	return err
}

// endFloor ends it, the client first, and waits for the other rank.
func (t *tripper) endFloor(ctx context.Context) error {
	if t.floor != nil {
		t.floor.close()
	}
	err := t.comm.Barrier(ctx)
	if t.server != nil {
		t.server.close()
	}
	t.floor, t.server, t.size = nil, nil, 0
	return err
}
