package kv

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// DefaultTimeout is how long Wait waits when its context has no deadline, counted
// from the request. It is the original's default.
const DefaultTimeout = 10 * time.Second

// Op is what a push or pull may have besides keys and values.
type Op struct {
	// Lens, for a push, is the number of values of each key. Empty means that all
	// keys have the same number.
	Lens []int32

	// PullLens, for a pull, is filled with the number of values of each key. An
	// empty slice is resized; another one must have one entry for each key.
	PullLens *[]int32

	// Cmd travels to the server's handler.
	Cmd int32

	// Done is called exactly once when the request is finished: with nil when its
	// values have arrived, else with what Wait returns. It runs before Wait
	// returns, on the transport's goroutine or, when nothing was sent, on the
	// caller's before the call returns. It may make further requests; it must not
	// wait for them. It is not called when the call itself returns an error. A
	// request that nobody waits for has no time limit; it ends when its servers have
	// answered or one of them is lost.
	Done func(error)
}

// Worker pushes values to the servers and pulls them back. All methods are safe
// for concurrent use.
type Worker[V Value] struct {
	// Timeout replaces DefaultTimeout; negative means none. Set it before use.
	Timeout time.Duration

	node     *postoffice.Node
	customer *postoffice.Customer
	simple   *SimpleApp
	servers  []int // node ids by server group rank, ascending
	ranges   []postoffice.KeyRange
	slicer   atomic.Pointer[Slicer]
	traces   postoffice.Traces
	calls    sync.Pool // of *call[V]
	copies   sync.Pool // of *copied[V]
}

// NewWorker makes a worker on node, which must have the worker role. customerID
// tells the workers of one application on this node apart. Call it after
// postoffice.Start.
func NewWorker[V Value](node *postoffice.Node, appID, customerID int) (*Worker[V], error) {
	if node.Role() != van.Worker {
		return nil, fmt.Errorf("%w: key-value worker on %s, want a node with role worker", van.ErrInvalid, node.Name())
	}
	w := &Worker[V]{node: node, simple: newSimpleApp(node, appID, nil), servers: node.ServerInstances(), ranges: node.ServerKeyRanges()}
	ready := make(chan struct{})
	c, err := node.AddCustomer(appID, customerID, func(msg *van.Message) {
		if msg.SimpleApp {
			<-ready
			w.simple.receive(msg)
			return
		}
		if n, speak := node.Rarely("kv: request to a worker"); speak {
			node.Log().Warn("dropped a request: a key-value worker serves none", "from", van.NodeName(msg.Sender), "so far", n)
		}
	})
	if err != nil {
		return nil, err
	}
	w.customer = c
	w.simple.customer.Store(c)
	close(ready)
	return w, nil
}

// SimpleApp is the exchange of small messages under the worker's ids.
func (w *Worker[V]) SimpleApp() *SimpleApp { return w.simple }

// Push sends the values of keys, which must ascend without repeats, to the
// servers that own them. Every key has len(vals)/len(keys) values unless op has
// Lens. Keys, values and lengths are copied. It returns the timestamp for Wait.
//
// Arguments that make no sense are an error that wraps van.ErrInvalid; then
// nothing was sent. At most one op may be given.
func (w *Worker[V]) Push(keys []Key, vals []V, op ...Op) (ts int32, err error) {
	return w.push(keys, vals, true, op)
}

// ZPush is Push without copying: keys, vals and the lengths must stay as they are
// until the request is done.
func (w *Worker[V]) ZPush(keys []Key, vals []V, op ...Op) (ts int32, err error) {
	return w.push(keys, vals, false, op)
}

// Pull asks the servers for the values of keys, which must ascend without repeats.
// They are in *vals, in the order of keys, when Wait returns nil or Done is called
// with nil; until then *vals is the library's. An empty *vals is resized. Another
// one must have exactly as many elements as come, the same number for each key
// unless the server says otherwise; with PullLens it may have more. Keys are
// copied. After an error *vals may be filled in part.
//
// Arguments that make no sense are an error that wraps van.ErrInvalid; then
// nothing was sent. At most one op may be given.
func (w *Worker[V]) Pull(keys []Key, vals *[]V, op ...Op) (ts int32, err error) {
	return w.pull(keys, vals, true, op)
}

// ZPull is Pull without copying: keys must stay as they are until the request is
// done.
func (w *Worker[V]) ZPull(keys []Key, vals *[]V, op ...Op) (ts int32, err error) {
	return w.pull(keys, vals, false, op)
}

func (w *Worker[V]) push(keys []Key, vals []V, private bool, ops []Op) (int32, error) {
	op, err := oneOp(ops)
	if err == nil && op.PullLens != nil {
		err = fmt.Errorf("%w: PullLens in a push", van.ErrInvalid)
	}
	if err == nil {
		err = checkKeys(van.ErrInvalid, keys)
	}
	if err == nil {
		err = checkShape(van.ErrInvalid, keys, len(vals), op.Lens)
	}
	if err != nil {
		return 0, w.refuse("push", err)
	}
	c := w.take()
	c.op, c.push, c.cmd, c.done = "push", true, op.Cmd, op.Done
	c.keys, c.vals, c.lens = keys, vals, op.Lens
	if err := c.cut(len(vals)); err != nil {
		c.discard()
		return 0, w.refuse("push", err)
	}
	if private {
		c.copyData()
	}
	return w.begin(c)
}

func (w *Worker[V]) pull(keys []Key, vals *[]V, private bool, ops []Op) (int32, error) {
	op, err := oneOp(ops)
	switch {
	case err != nil:
	case vals == nil:
		err = fmt.Errorf("%w: no place for the values (nil)", van.ErrInvalid)
	case len(op.Lens) > 0:
		err = fmt.Errorf("%w: Lens in a pull: use PullLens", van.ErrInvalid)
	case op.PullLens != nil && len(*op.PullLens) > 0 && len(*op.PullLens) != len(keys):
		err = fmt.Errorf("%w: *PullLens has %d entries for %d keys, want as many, or none", van.ErrInvalid, len(*op.PullLens), len(keys))
	default:
		err = checkKeys(van.ErrInvalid, keys)
	}
	if err == nil && op.PullLens == nil {
		err = checkShape(van.ErrInvalid, keys, len(*vals), nil)
	}
	if err != nil {
		return 0, w.refuse("pull", err)
	}
	c := w.take()
	c.op, c.push, c.cmd, c.done = "pull", false, op.Cmd, op.Done
	c.keys, c.vals, c.out, c.outLens = keys, *vals, vals, op.PullLens
	c.sized = len(*vals) > 0
	if c.outLens != nil {
		c.lens = slices.Grow((*c.outLens)[:0], len(keys))[:len(keys)]
	}
	if err := c.cut(len(*vals)); err != nil {
		c.discard()
		return 0, w.refuse("pull", err)
	}
	if private {
		c.copyKeys()
	}
	return w.begin(c)
}

func oneOp(ops []Op) (Op, error) {
	switch len(ops) {
	case 0:
		return Op{}, nil
	case 1:
		return ops[0], nil
	}
	return Op{}, fmt.Errorf("%w: %d ops, want at most one", van.ErrInvalid, len(ops))
}

func (w *Worker[V]) refuse(op string, err error) error {
	return &van.Error{Op: op, Node: w.node.Name(), Err: err}
}

// maxPayload is the largest sum of a message's data frames: the wire has 31 bits
// for it.
const maxPayload = math.MaxInt32

// begin opens the request and sends its messages.
func (w *Worker[V]) begin(c *call[V]) (int32, error) {
	keys, vals, lens := c.keys, c.vals, c.lens
	if err := w.customer.Open(&c.Request, c.op, c, 1, c.ids); err != nil {
		c.discard()
		return 0, err
	}
	ts := c.First()
	if c.Begin() { // else a server is away, or all of them: Wait says so
		for i := range c.parts {
			c.asked.Store(int32(i + 1))
			if err := c.send(ts, i, keys, vals, lens); err != nil {
				w.customer.Abort(&c.Request, err)
				break
			}
		}
		c.End()
	}
	c.msg.Reset() // holds on to nothing of the caller
	c.unhold()
	return ts, nil
}

// Wait waits until the request with timestamp ts is finished, and forgets it.
// Without a deadline in ctx it waits for w.Timeout from the request. Errors wrap
// van.ErrTimeout, van.ErrPeerLost, van.ErrClosed, van.ErrMalformed,
// van.ErrInvalid, postoffice.ErrUnknownHandler, or ctx's error, and name the
// servers concerned.
func (w *Worker[V]) Wait(ctx context.Context, ts int32) error {
	return waitFor(ctx, w.customer, ts, w.Timeout)
}

func waitFor(ctx context.Context, c *postoffice.Customer, ts int32, limit time.Duration) error {
	if limit == 0 {
		limit = DefaultTimeout
	}
	if _, has := ctx.Deadline(); has || limit < 0 {
		limit = 0
	}
	return c.Wait(ctx, ts, limit)
}

// SetSlicer replaces the division by key range for requests made from now on; nil
// restores it.
func (w *Worker[V]) SetSlicer(s Slicer) {
	if s == nil {
		w.slicer.Store(nil)
		return
	}
	w.slicer.Store(&s)
}

// ServerKeyRanges are the ranges of keys by server group rank.
func (w *Worker[V]) ServerKeyRanges() []postoffice.KeyRange { return slices.Clone(w.ranges) }

// FetchTrace returns the stamps of the request and of the answer for one
// timestamp, with several servers those of the last answer. Traces of the last
// 4096 answered timestamps are kept; for others the error wraps
// postoffice.ErrUnknownHandler.
func (w *Worker[V]) FetchTrace(ts int32) (request, response van.Trace, err error) {
	return w.traces.Fetch(w.node, ts)
}

// InFlight is the number of requests that are not finished or not waited for.
func (w *Worker[V]) InFlight() int { return w.customer.InFlight() }

// Close fails what is in flight and takes the worker off its node.
func (w *Worker[V]) Close() { w.customer.Close() }
