package simgpu

// Streams and events of a Device.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/van/backend"
)

// streams are queues of functions.
type streams struct {
	st *state

	mu     sync.Mutex
	all    map[uintptr]*stream
	graph  *Graph        // that is being captured
	graphs uintptr       // that were captured
	last   uintptr       // of NewStream
	own    int           // streams of NewStream
	hold   chan struct{} // not nil: new streams of NewStream execute nothing until it is closed
	events int
	made   int // events

	ordered        bool // copies begin in the order in which they were queued
	copies, copied atomic.Uint64
}

// stream runs its functions one after the other.
type stream struct {
	work   chan func()
	done   chan struct{}
	queued atomic.Int64
}

// Copy implements backend.Backend.
func (q *streams) Copy(dst, src backend.Mem) error {
	if err := q.st.fails(); err != nil {
		return err
	}
	if dst.Len() != src.Len() {
		return fmt.Errorf("Copy of %d bytes into %d", src.Len(), dst.Len())
	}
	move(dst, src)
	return nil
}

// move copies src to dst. Four bytes at an address that they divide are a word, which others may read and write
// meanwhile.
func move(dst, src backend.Mem) {
	if dst.Len() == 4 && dst.Addr()%4 == 0 && src.Addr()%4 == 0 {
		atomic.StoreUint32((*uint32)(dst.Ptr()), atomic.LoadUint32((*uint32)(src.Ptr())))
		return
	}
	copy(Raw(dst), Raw(src))
}

// Graph is the work put into a stream between Capture and End.
type Graph struct {
	q      *streams
	number uintptr
	from   []uintptr // Capture was called for the first stream; the others have joined it
	work   []func()

	rewound int
	invalid bool
}

// Capture begins a graph: until its End, work put into stream s goes there.
func (q *streams) Capture(s uintptr) *Graph {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.graphs++
	q.graph = &Graph{q: q, number: q.graphs, from: []uintptr{s}}
	return q.graph
}

// captures returns the graph into which work queued on stream s goes, or nil. mu is held.
func (q *streams) captures(s uintptr) *Graph {
	if q.graph == nil || !slices.Contains(q.graph.from, s) {
		return nil
	}
	return q.graph
}

// Follow implements backend.GraphFlagger. A graph does its work in the order in which it was captured, that of all its streams.
func (q *streams) Follow(s, other uintptr) error {
	if err := q.st.fails(); err != nil {
		return err
	}
	q.mu.Lock()
	g, joined := q.captures(other), q.captures(s) != nil
	if g != nil && !joined {
		g.from = append(g.from, s)
	}
	q.mu.Unlock()
	switch {
	case g != nil:
		return nil
	case joined:
		return fmt.Errorf("stream %d is being captured, and stream %d is not", s, other)
	}
	mark := make(chan struct{})
	q.Queue(other, func() { close(mark) })
	q.Queue(s, func() { <-mark })
	return nil
}

// Point implements backend.GraphFlagger.
func (q *streams) Point(s uintptr) (at [6]uintptr, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if g := q.captures(s); g != nil {
		at = [6]uintptr{g.number, 1, uintptr(len(g.work))}
	}
	return at, q.st.fails()
}

// Rewind implements backend.GraphFlagger.
func (q *streams) Rewind(s uintptr, at [6]uintptr) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	g := q.captures(s)
	if g == nil || g.number != at[0] || at[2] > uintptr(len(g.work)) || s == g.from[0] {
		return fmt.Errorf("Rewind of stream %d to %v, which is no point of the capture that it has joined", s, at)
	}
	g.rewound++
	return nil
}

// Rewound is how often streams that have joined the capture continued from an earlier point.
func (g *Graph) Rewound() int {
	g.q.mu.Lock()
	defer g.q.mu.Unlock()
	return g.rewound
}

// Invalidate makes later WriteFlags of the capture fail, as after a call that the driver allows in no capture.
func (g *Graph) Invalidate() {
	g.q.mu.Lock()
	defer g.q.mu.Unlock()
	g.invalid = true
}

// End ends the capture.
func (g *Graph) End() {
	g.q.mu.Lock()
	defer g.q.mu.Unlock()
	g.q.graph = nil
}

// Len is how many pieces of work are in g.
func (g *Graph) Len() int {
	g.q.mu.Lock()
	defer g.q.mu.Unlock()
	return len(g.work)
}

// Replay puts the work of g into stream s.
func (g *Graph) Replay(s uintptr) {
	for _, f := range g.work {
		g.q.Queue(s, f)
	}
}

// Capturing implements backend.GraphFlagger.
func (q *streams) Capturing(s uintptr) (bool, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.captures(s) != nil, nil
}

// Queue puts f into a stream, which is made when it is first used.
func (q *streams) Queue(s uintptr, f func()) {
	q.mu.Lock()
	if g := q.captures(s); g != nil {
		g.work = append(g.work, f)
		q.mu.Unlock()
		return
	}
	x := q.all[s]
	if x == nil {
		x = &stream{work: make(chan func(), 4096), done: make(chan struct{})}
		q.all[s] = x
		go func() {
			defer close(x.done)
			for f := range x.work {
				f()
				x.queued.Add(-1)
			}
		}()
	}
	x.queued.Add(1)
	q.mu.Unlock()
	x.work <- f
}

// Settle waits until stream s has done what was queued, which must not take long.
func (q *streams) Settle(t testing.TB, s uintptr) {
	t.Helper()
	done := make(chan struct{})
	q.Queue(s, func() { close(done) })
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatalf("device %d: stream %d has not executed its work after 20 s", q.st.dev.ID, s)
	}
}

// Queued is how many pieces of work in stream s are not done.
func (q *streams) Queued(s uintptr) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	if x := q.all[s]; x != nil {
		return int(x.queued.Load())
	}
	return 0
}

// WriteFlag implements backend.StreamFlagger.
func (q *streams) WriteFlag(s uintptr, word backend.Mem, v uint32) error {
	q.Queue(s, func() {
		memfd.Wrote()
		atomic.StoreUint32((*uint32)(word.Ptr()), v)
	})
	return nil
}

// WriteFlags implements backend.StreamFlagger.
func (q *streams) WriteFlags(s uintptr, l []backend.FlagWrite) error {
	q.mu.Lock()
	g := q.captures(s)
	invalid := g != nil && g.invalid
	q.mu.Unlock()
	if invalid {
		return fmt.Errorf("the capture of stream %d is invalid", s)
	}
	for _, w := range l {
		if err := q.WriteFlag(s, w.Word, w.V); err != nil {
			return err
		}
	}
	return nil
}

// CopyFlags implements backend.StreamFlagger.
func (q *streams) CopyFlags(dst, src backend.Mem, s uintptr, l []backend.FlagWrite) error {
	if captured, _ := q.Capturing(s); captured {
		return fmt.Errorf("%w: stream %d is being captured", backend.ErrUnsupported, s)
	}
	if err := q.CopyAsync(dst, src, s); err != nil {
		return err
	}
	return q.WriteFlags(s, l)
}

// await makes stream s wait until done, or the end of the device.
func (q *streams) await(s uintptr, done func() bool) error {
	q.Queue(s, func() {
		for !done() && q.st.fails() == nil {
			runtime.Gosched()
		}
	})
	return nil
}

// WaitFlag implements backend.StreamFlagger.
func (q *streams) WaitFlag(s uintptr, word backend.Mem, v uint32) error {
	return q.await(s, func() bool { return int32(atomic.LoadUint32((*uint32)(word.Ptr()))-v) >= 0 })
}

// WaitBits implements backend.GraphFlagger.
func (q *streams) WaitBits(s uintptr, word backend.Mem, bits uint64) error {
	return q.await(s, func() bool { return atomic.LoadUint64((*uint64)(word.Ptr()))&bits != 0 })
}

// CopyGated implements backend.GatedCopier.
func (q *streams) CopyGated(copies []backend.GatedCopy, s uintptr) error {
	for _, c := range copies {
		if err := q.WaitBits(s, c.Gate, math.MaxUint64); err != nil {
			return err
		}
		q.Queue(s, func() {
			if atomic.LoadUint64((*uint64)(c.Gate.Ptr()))>>32 == 0 {
				move(c.Dst, c.Src)
			}
		})
	}
	return nil
}

// WaitCount implements backend.GraphFlagger.
func (q *streams) WaitCount(s uintptr, word backend.Mem, n uint64) error {
	return q.await(s, func() bool { return int64(atomic.LoadUint64((*uint64)(word.Ptr()))-n) >= 0 })
}

// NewStream implements backend.AsyncCopier.
func (q *streams) NewStream() (uintptr, error) {
	if err := q.st.fails(); err != nil {
		return 0, err
	}
	q.mu.Lock()
	q.last++
	q.own++
	s := q.last + 1<<20 // far from the streams of tests
	hold := q.hold
	q.mu.Unlock()
	q.Queue(s, func() {
		if hold != nil {
			<-hold
		}
	})
	return s, nil
}

// HoldNewStreams makes streams of NewStream that are created from now on execute nothing until resume is called.
func (q *streams) HoldNewStreams() (resume func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	hold := make(chan struct{})
	q.hold = hold
	return func() { close(hold) }
}

// FreeStream implements backend.AsyncCopier.
func (q *streams) FreeStream(s uintptr) error {
	q.mu.Lock()
	x := q.all[s]
	delete(q.all, s)
	if x != nil {
		q.own--
	}
	q.mu.Unlock()
	if x == nil {
		return errors.New("freed what is no stream")
	}
	close(x.work)
	return nil
}

// Streams is how many streams of NewStream there are.
func (q *streams) Streams() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.own
}

// CopyAsync implements backend.AsyncCopier.
func (q *streams) CopyAsync(dst, src backend.Mem, s uintptr) error {
	if err := q.st.fails(); err != nil {
		return err
	}
	if dst.Len() != src.Len() {
		return fmt.Errorf("CopyAsync of %d bytes into %d", src.Len(), dst.Len())
	}
	if q.ordered {
		turn := q.copies.Add(1) - 1
		q.Queue(s, func() {
			for q.copied.Load() != turn && q.st.fails() == nil {
				runtime.Gosched()
			}
			move(dst, src)
			q.copied.Add(1)
		})
		return nil
	}
	q.Queue(s, func() { move(dst, src) })
	return nil
}

// OneCopyEngine makes the copies of CopyAsync begin in the order in which they were queued, also those of different
// streams, as the engines of a GPU do. Call it before the first copy.
func (q *streams) OneCopyEngine() { q.ordered = true }

// CopyRecord implements backend.AsyncCopier.
func (q *streams) CopyRecord(dst, src backend.Mem, s uintptr, e backend.Event) error {
	if err := q.CopyAsync(dst, src, s); err != nil {
		return err
	}
	return e.Record(s)
}

// Idle implements backend.StreamIdler.
func (q *streams) Idle(s uintptr) (bool, error) {
	q.mu.Lock()
	x, captured := q.all[s], q.captures(s) != nil
	q.mu.Unlock()
	return !captured && (x == nil || x.queued.Load() == 0), q.st.fails()
}

// event is done when the stream has come to its latest mark.
type event struct {
	q      *streams
	mu     sync.Mutex
	mark   chan struct{} // closed when done
	closed bool
}

// NewEvent implements backend.Backend.
func (q *streams) NewEvent() (backend.Event, error) {
	if err := q.st.fails(); err != nil {
		return nil, err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.events++
	q.made++
	return &event{q: q}, nil
}

func (e *event) Record(s uintptr) error {
	if err := e.q.st.fails(); err != nil {
		return err
	}
	mark := make(chan struct{})
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return errors.New("Record of a closed event")
	}
	e.mark = mark
	e.mu.Unlock()
	e.q.Queue(s, func() { close(mark) })
	return nil
}

func (e *event) latest() chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.mark
}

func (e *event) Query() (bool, error) {
	select {
	case <-e.latest():
		return true, nil
	default:
		return e.latest() == nil, nil
	}
}

func (e *event) Sync(ctx context.Context) error {
	if done, err := e.Query(); done || err != nil { // even if ctx is done, as a device does
		return cmp.Or(err, e.q.st.fails())
	}
	select {
	case <-e.latest():
	case <-ctx.Done():
		return ctx.Err()
	}
	return e.q.st.fails()
}

func (e *event) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return errors.New("event closed twice")
	}
	e.closed = true
	e.q.mu.Lock()
	defer e.q.mu.Unlock()
	e.q.events--
	return nil
}

// Events returns how many events there are, and how many were ever made.
func (q *streams) Events() (open, made int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.events, q.made
}

// close waits for the streams.
func (q *streams) close() {
	q.mu.Lock()
	all := q.all
	q.all = nil
	q.mu.Unlock()
	for _, s := range all {
		close(s.work)
		<-s.done
	}
}
