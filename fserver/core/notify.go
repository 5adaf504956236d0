package core

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/van/backend"
)

// Notify makes a stream of the device wait for a request or for a batch, while the
// thread that queues the stream's work goes on: a word in pinned memory, for which the
// stream waits, and a goroutine that waits and then sets it. It does one at a time.
// All methods are safe for concurrent use.
type Notify struct {
	s      *Session
	device backend.StreamFlagger
	word   backend.Mem

	mu      sync.Mutex
	counter uint32 // what the next wait is for
	under   *notice
}

// notice is one wait that is under way, or whose result nobody has fetched.
type notice struct {
	op    string
	done  chan struct{}
	err   error
	items []Item
}

// handlerLimit is how long a request may take that a stream waits for, from its
// push_pull; it is the original's.
const handlerLimit = 10 * time.Second

// waitSlice is how long the goroutine of a Notify waits at a time.
const waitSlice = 50 * time.Millisecond

// NewNotify makes a Notify. Its word, a page of pinned memory, lives as long as the
// device's backend, since a stream may wait for it.
func (s *Session) NewNotify() (*Notify, error) {
	b := s.Device()
	flagger, can := b.(backend.StreamFlagger)
	pinner, pins := b.(backend.HostPinner)
	if !can || !pins {
		return nil, fmt.Errorf("SimpleNotify: %w: this node's backend is %s (STEPMESH_BAKCEND), want one of a GPU", backend.ErrUnavailable, b.Name())
	}
	word, err := pinner.AllocPinned(4)
	if err != nil {
		return nil, fmt.Errorf("SimpleNotify: %w", err)
	}
	n := &Notify{s: s, device: flagger, word: word, counter: 1}
	n.set(0)
	return n, nil
}

// set is what a stream waits for. Whatever was written before is visible to it.
func (n *Notify) set(v uint32) { atomic.StoreUint32((*uint32)(n.word.Ptr()), v) }

// Block makes stream wait for the next release, which StreamWait or BlockAndGetBatch
// gives.
func (n *Notify) Block(stream uintptr) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.device.WaitFlag(stream, n.word, n.counter)
}

// StreamWait makes stream wait for a worker's request. When that fails, the stream goes
// on all the same, and Done has the error.
func (n *Notify) StreamWait(stream uintptr, handler int64) error {
	if n.s.worker == nil {
		return n.s.wrongRole("stream_wait_event", "worker")
	}
	return n.begin("stream_wait_event", stream, func(*notice) error { return n.s.Wait(handler, handlerLimit, waitSlice) })
}

// BlockAndGetBatch makes stream wait until GetBatch has returned, to which Batch gives
// the result.
func (n *Notify) BlockAndGetBatch(stream uintptr) error {
	if n.s.queue == nil {
		return n.s.wrongRole("block_now_stream_and_get_batch", "server")
	}
	return n.begin("block_now_stream_and_get_batch", stream, func(w *notice) (err error) {
		w.items, err = n.s.GetBatch(nil, waitSlice)
		return err
	})
}

// begin queues the stream's wait, and lets it go when look returns another error than
// ErrPending.
func (n *Notify) begin(op string, stream uintptr, look func(*notice) error) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.under != nil {
		return fmt.Errorf("%s: %w: the result of %s was not fetched: call wait_event_done() or get_future_batch_data() first", op, ErrMisuse, n.under.op)
	}
	if err := n.device.WaitFlag(stream, n.word, n.counter); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	w := &notice{op: op, done: make(chan struct{})}
	n.under = w
	go func() {
		for w.err = look(w); errors.Is(w.err, ErrPending); {
			w.err = look(w)
		}
		n.mu.Lock()
		n.set(n.counter)
		n.counter++
		n.mu.Unlock()
		close(w.done)
	}()
	return nil
}

// Done waits for the end of what StreamWait has begun, for slice at most, and returns
// its error, or ErrPending. It returns at once when there is nothing.
func (n *Notify) Done(slice time.Duration) error {
	w, err := n.fetch("wait_event_done", slice)
	if w == nil {
		return err
	}
	for i := range w.items { // of a batch that nobody wants
		w.items[i].Release()
	}
	return w.err
}

// Batch is Done for BlockAndGetBatch.
func (n *Notify) Batch(slice time.Duration) ([]Item, error) {
	n.mu.Lock()
	w := n.under
	n.mu.Unlock()
	if w == nil || w.op != "block_now_stream_and_get_batch" {
		return nil, fmt.Errorf("get_future_batch_data: %w: call block_now_stream_and_get_batch() first, once for each result", ErrMisuse)
	}
	if w, err := n.fetch("get_future_batch_data", slice); w == nil {
		return nil, err
	}
	return w.items, w.err
}

// fetch waits for what is under way and takes it.
func (n *Notify) fetch(op string, slice time.Duration) (*notice, error) {
	n.mu.Lock()
	w := n.under
	n.mu.Unlock()
	if w == nil {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), slice)
	defer cancel()
	select {
	case <-w.done:
	case <-ctx.Done():
		return nil, ErrPending
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.under != w {
		return nil, fmt.Errorf("%s: %w: another thread has fetched the result", op, ErrMisuse)
	}
	n.under = nil
	return w, nil
}
