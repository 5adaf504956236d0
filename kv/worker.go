package kv

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// Call is a request in flight, see postoffice.Call.
type Call = postoffice.Call

// WorkerOptions of NewWorker. The zero value is what StepMesh uses.
type WorkerOptions struct {
	AppID      int
	CustomerID int // tells the workers of one application on this node apart

	// Timeout is how long Call.Wait waits when its context has no deadline, counted from
	// the request: 0 is postoffice.DefaultTimeout, negative no limit.
	Timeout time.Duration

	// Slicer replaces the division of keys by the servers' ranges.
	Slicer Slicer
}

// Worker pushes values to the servers and pulls them back. All methods are safe
// for concurrent use.
type Worker[V Value] struct {
	node        cluster.App
	o           WorkerOptions
	customer    *cluster.Customer
	simple      *SimpleApp
	servers     []int // node ids by server group rank, ascending
	ranges      []postoffice.KeyRange
	invalidator van.Invalidator // nil if no peer writes into the memory of pulls
	calls       sync.Pool       // of *call[V]
	copies      sync.Pool       // of *copied[V]
	skew        skew
}

// NewWorker makes a worker on node, which must have the worker role. Call it after
// postoffice.Start.
func NewWorker[V Value](node *postoffice.Node, o WorkerOptions) (*Worker[V], error) {
	if node.Role() != van.Worker {
		return nil, fmt.Errorf("%w: key-value worker on %s, want a node with role worker", van.ErrInvalid, node.Name())
	}
	w := &Worker[V]{node: (*cluster.Node)(node).App(), o: o, simple: newSimpleApp(node, o.AppID, o.Timeout, nil), servers: (*cluster.Node)(node).Topology().ServerInstances(), ranges: node.Topology().ServerKeyRanges()}
	w.invalidator, _ = van.As[van.Invalidator]((*cluster.Node)(node).Van())
	c, err := w.node.AddServer(o.AppID, o.CustomerID, w.simple.inbound, w.simple.takesOnly("a key-value worker"))
	if err != nil {
		return nil, err
	}
	c.KeepTraces()
	w.customer = c
	if len(w.servers) > 1 {
		w.skew.left.Store(skewRequests)
	}
	w.simple.begin(c)
	return w, nil
}

// SimpleApp is the exchange of small messages under the worker's ids.
func (w *Worker[V]) SimpleApp() *SimpleApp { return w.simple }

// Push sends the values of keys, which must ascend without repeats, to the
// servers that own them. Every key has len(vals)/len(keys) values, or the number in Lens.
// Keys, values and lengths are copied, unless NoCopy is among the options, which are
// Lens, Cmd, Within, Done and NoCopy.
//
// Arguments that make no sense are an error that wraps postoffice.ErrInvalid; then
// nothing was sent.
func (w *Worker[V]) Push(keys []Key, vals []V, opts ...PushOption) (Call, error) {
	o, err := with(w.o.Timeout, opts)
	if err == nil {
		err = checkKeys(van.ErrInvalid, keys)
	}
	if err == nil {
		err = checkShape(van.ErrInvalid, keys, len(vals), o.lens)
	}
	if err != nil {
		return Call{}, w.refuse("push", err)
	}
	c := w.take()
	c.op, c.push, c.cmd, c.done = "push", true, o.cmd, o.done
	c.keys, c.vals, c.lens = keys, vals, o.lens
	if err := c.cut(len(vals)); err != nil {
		c.discard()
		return Call{}, w.refuse("push", err)
	}
	if !o.noCopy {
		c.copyData()
	}
	return w.begin(c, o.limit)
}

// Pull asks the servers for the values of keys, which must ascend without repeats.
// They are in *vals, in the order of keys, when Wait returns nil or Done's function is
// called with nil; until then *vals is the library's. An empty *vals is resized. Another
// one must have exactly as many elements as arrive, the same number for each key
// unless the server says otherwise; with LensInto it may have more. Keys are
// copied, unless NoCopy is among the options, which are LensInto, Cmd, Within, Done and
// NoCopy. After an error *vals may be filled in part.
//
// Arguments that make no sense are an error that wraps postoffice.ErrInvalid; then
// nothing was sent.
func (w *Worker[V]) Pull(keys []Key, vals *[]V, opts ...PullOption) (Call, error) {
	o, err := with(w.o.Timeout, opts)
	switch {
	case err != nil:
	case vals == nil:
		err = fmt.Errorf("%w: no place for the values (nil)", van.ErrInvalid)
	case o.into != nil && len(*o.into) > 0 && len(*o.into) != len(keys):
		err = fmt.Errorf("%w: LensInto has %d entries for %d keys, want as many, or none", van.ErrInvalid, len(*o.into), len(keys))
	default:
		err = checkKeys(van.ErrInvalid, keys)
	}
	if err == nil && o.into == nil {
		err = checkShape(van.ErrInvalid, keys, len(*vals), nil)
	}
	if err != nil {
		return Call{}, w.refuse("pull", err)
	}
	c := w.take()
	c.op, c.push, c.cmd, c.done = "pull", false, o.cmd, o.done
	c.keys, c.vals, c.out, c.outLens = keys, *vals, vals, o.into
	c.sized = len(*vals) > 0
	if c.outLens != nil {
		c.lens = slices.Grow((*c.outLens)[:0], len(keys))[:len(keys)]
	}
	if err := c.cut(len(*vals)); err != nil {
		c.discard()
		return Call{}, w.refuse("pull", err)
	}
	if !o.noCopy {
		c.copyKeys()
	}
	return w.begin(c, o.limit)
}

func (w *Worker[V]) refuse(op string, err error) error {
	return &van.Error{Op: op, Node: w.node.Name(), Err: err}
}

// maxPayload is the largest sum of a message's data frames: the wire has 31 bits
// for it.
const maxPayload = math.MaxInt32

// begin opens the request and sends its messages.
func (w *Worker[V]) begin(c *call[V], limit time.Duration) (Call, error) {
	keys, vals, lens, expires := c.keys, c.vals, c.lens, c.done != nil
	if err := w.customer.Open(&c.Request, c.op, c, 1, c.ids); err != nil {
		c.discard()
		return Call{}, err
	}
	call := c.Call(limit)
	if expires {
		c.Expire(limit)
	}
	if c.Begin() { // else a server is away, or all of them: Wait says so
		for i := range c.parts {
			c.asked.Store(int32(i + 1))
			if err := c.send(call.Timestamp(), i, keys, vals, lens); err != nil {
				w.customer.Abort(&c.Request, err)
				break
			}
		}
		c.End()
	}
	c.msg.Reset() // holds on to nothing of the caller
	c.unhold()
	return Call(call), nil
}

// Close fails the requests in flight and unregisters the worker from its node. It does not wait, and returns nil.
func (w *Worker[V]) Close() error {
	w.customer.Close()
	return nil
}
