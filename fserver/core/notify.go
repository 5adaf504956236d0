package core

// SimpleNotify: GPU streams that wait for a request or a batch while the Python thread continues.

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Notify makes a stream of the device wait for a request or for a batch, while the thread that queues the stream's work
// continues. The stream waits for a flag in pinned memory. A goroutine sets the flag when the request is complete or
// the batch has arrived. A Notify handles one wait at a time. All methods are safe for concurrent use.
type Notify struct {
	p *Process // supplies the session; nil if the Notify is attached already

	mu       sync.Mutex // not held in wait, which may block until a release makes room
	attached bool       // s, device and word are set and no longer change

	s      *Session
	device backend.FlagDevice
	word   backend.Mem

	counter uint32 // the value that ends the next wait
	under   *notice
	dropped bool
}

// notice is one wait that is under way, or whose result was not fetched yet.
type notice struct {
	op    string
	batch bool // it is for a batch, not for a request
	done  chan struct{}
	err   error
	items []Item

	// Guarded by mu:
	dropped bool // the result will not be fetched: return the batches to the queue
	ended   bool // the stream was released
}

// handlerLimit is the time from push_pull within which a request that a stream waits for must be complete, as in C++
// StepMesh.
const handlerLimit = postoffice.DefaultTimeout

// waitSlice is the time for which the goroutine of a Notify waits in one call.
const waitSlice = 50 * time.Millisecond

// NewNotify makes a Notify. Its flag, a page of pinned memory, stays until the device's backend is closed, since a
// stream may wait for it.
func (s *Session) NewNotify() (*Notify, error) {
	n := &Notify{counter: 1}
	if err := n.attach(s); err != nil {
		return nil, err
	}
	return n, nil
}

// NewNotify is Session.NewNotify. Before Init it makes a Notify that allocates its flag at its first use: programs
// written for C++ StepMesh create theirs before they set role, address and device.
func (p *Process) NewNotify() (*Notify, error) {
	switch s, err := p.Session(); {
	case err == nil:
		return s.NewNotify()
	case errors.Is(err, errEnded):
		return nil, err
	}
	return &Notify{p: p, counter: 1}, nil
}

// attach allocates the flag on the device of s. The caller holds n.mu, or is the only user of n.
func (n *Notify) attach(s *Session) error {
	d, err := backend.FlagDeviceOf(s.Device())
	if err == nil {
		n.word, err = d.AllocPinned(4)
	}
	if err != nil {
		return fmt.Errorf("SimpleNotify: %w", err)
	}
	n.s, n.device, n.attached = s, d, true
	n.set(0)
	return nil
}

// Attach attaches a Notify that was made before Init to the session. It returns the device of the streams.
func (n *Notify) Attach() (backend.Device, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.attached {
		s, err := n.p.Session()
		if err == nil {
			err = n.attach(s)
		}
		if err != nil {
			return backend.Device{}, err
		}
	}
	return n.s.Device().Device(), nil
}

// set writes the flag. A stream that sees it also sees all earlier writes.
func (n *Notify) set(v uint32) { atomic.StoreUint32((*uint32)(n.word.Ptr()), v) }

// release ends the waits of the streams. The caller holds n.mu.
func (n *Notify) release() {
	if !n.attached {
		return // no stream waits
	}
	n.set(n.counter)
	n.counter++
}

var errDropped = fmt.Errorf("%w: the object was dropped", ErrMisuse)

// Block makes stream wait until the next StreamWait or BlockAndGetBatch has ended.
func (n *Notify) Block(stream uintptr) error {
	if _, err := n.Attach(); err != nil {
		return fmt.Errorf("block_now_stream: %w", err)
	}
	n.mu.Lock()
	counter, dropped := n.counter, n.dropped
	n.mu.Unlock()
	if dropped {
		return fmt.Errorf("block_now_stream: %w", errDropped)
	}
	if err := n.wait(stream, counter); err != nil { // the stream does not wait if release was called in the meantime
		return fmt.Errorf("block_now_stream: %w", err)
	}
	return nil
}

// wait makes stream wait until the flag reaches counter. It refuses a stream that is being captured: later
// replays of the graph would not wait.
func (n *Notify) wait(stream uintptr, counter uint32) error {
	captured, err := n.device.Capturing(stream)
	if err != nil {
		return err
	}
	if captured {
		return fmt.Errorf("%w: the stream is being captured, and later replays of the graph would not wait", backend.ErrUnsupported)
	}
	return n.device.WaitFlag(stream, n.word, counter)
}

// StreamWait makes stream wait for a worker's request. If the request fails, the stream continues, and Done returns the
// error.
func (n *Notify) StreamWait(stream uintptr, handler int64) error {
	if _, err := n.Attach(); err != nil {
		return fmt.Errorf("stream_wait_event: %w", err)
	}
	if n.s.worker == nil {
		return wrongRole(n.s, "stream_wait_event", "worker")
	}
	return n.begin(&notice{op: "stream_wait_event"}, stream, func(*notice) error { return n.s.Wait(handler, handlerLimit, waitSlice) })
}

// BlockAndGetBatch makes stream wait for GetBatch, whose result Batch returns.
func (n *Notify) BlockAndGetBatch(stream uintptr) error {
	if _, err := n.Attach(); err != nil {
		return fmt.Errorf("block_now_stream_and_get_batch: %w", err)
	}
	if n.s.queue == nil {
		return wrongRole(n.s, "block_now_stream_and_get_batch", "server")
	}
	return n.begin(&notice{op: "block_now_stream_and_get_batch", batch: true}, stream, func(w *notice) (err error) {
		w.items, err = n.s.GetBatch(nil, waitSlice)
		return err
	})
}

// begin queues the stream's wait. It ends the wait when poll returns nil or an error other than ErrPending, or when the
// result will not be fetched.
func (n *Notify) begin(w *notice, stream uintptr, poll func(*notice) error) error {
	w.done = make(chan struct{})
	n.mu.Lock()
	under, dropped, counter := n.under, n.dropped, n.counter // counter stays until w has ended
	if under == nil && !dropped {
		n.under = w
	}
	n.mu.Unlock()
	switch {
	case dropped:
		return fmt.Errorf("%s: %w", w.op, errDropped)
	case under != nil:
		fetch := "wait_event_done"
		if under.batch {
			fetch = "get_future_batch_data"
		}
		return fmt.Errorf("%s: %w: the result of %s was not fetched: call %s() first", w.op, ErrMisuse, under.op, fetch)
	}
	if err := n.wait(stream, counter); err != nil {
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.under == w {
			n.under = nil
		}
		if n.dropped { // Drop has left the release to w
			n.release()
		}
		close(w.done) // for another thread that waits for it already
		return fmt.Errorf("%s: %w", w.op, err)
	}
	go func() {
		for w.err = ErrPending; errors.Is(w.err, ErrPending) && !n.isDropped(w); {
			w.err = poll(w)
		}
		n.end(w)
	}()
	return nil
}

func (n *Notify) isDropped(w *notice) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return w.dropped
}

func (n *Notify) end(w *notice) {
	n.mu.Lock()
	defer n.mu.Unlock()
	w.ended = true
	n.giveBack(w)
	n.release()
	close(w.done)
}

// giveBack returns w's batches to the queue if they will not be fetched. The caller holds n.mu.
func (n *Notify) giveBack(w *notice) {
	if w.ended && w.dropped && len(w.items) > 0 {
		n.s.GiveBack(w.items)
		w.items = nil
	}
}

// Drop ends the use of n, and does not block. Waiting streams continue, except a stream that waits for a request, which
// continues when the request has ended. Batches that were not fetched go back to the queue for the next GetBatch.
func (n *Notify) Drop() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.dropped {
		return
	}
	n.dropped = true
	w := n.under
	if w == nil || w.ended {
		n.release() // ends the waits of Block
	}
	if w != nil && w.batch {
		n.under, w.dropped = nil, true
		n.giveBack(w)
	}
}

// Done waits, for slice at most, for the end of a StreamWait. It returns the error of the StreamWait, or ErrPending.
// Without a StreamWait it returns nil at once.
func (n *Notify) Done(slice time.Duration) error {
	w, err := n.fetch("wait_event_done", slice, false)
	if w == nil {
		return err
	}
	return w.err
}

// Batch is Done for BlockAndGetBatch.
func (n *Notify) Batch(slice time.Duration) ([]Item, error) {
	const op = "get_future_batch_data"
	switch w, err := n.fetch(op, slice, true); {
	case w != nil:
		return w.items, w.err
	case err != nil:
		return nil, err
	default:
		return nil, fmt.Errorf("%s: %w: call block_now_stream_and_get_batch() first, once for each result", op, ErrMisuse)
	}
}

// fetch waits for the notice under way, if it is of the wanted kind, and removes it from n.
func (n *Notify) fetch(op string, slice time.Duration, batch bool) (*notice, error) {
	n.mu.Lock()
	w := n.under
	n.mu.Unlock()
	if w == nil || w.batch != batch {
		return nil, nil
	}
	if err := awaitSlice(w.done, slice); err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.under != w {
		return nil, fmt.Errorf("%s: %w: the result no longer exists: another thread has fetched it, or the wait did not begin", op, ErrMisuse)
	}
	n.under = nil
	return w, nil
}
