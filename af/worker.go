package af

// Worker: the API of workers.

import (
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/streamqueue"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// Call is a PushPull in flight, see postoffice.Call.
type Call = postoffice.Call

// WorkerOptions are the options of NewWorker. The zero value is what StepMesh uses.
type WorkerOptions struct {
	AppID      int
	CustomerID int // distinguishes the workers of one application on this node

	// Timeout is how long Call.Wait waits when its context has no deadline, counted from
	// the PushPull: 0 is postoffice.DefaultTimeout, negative no limit.
	Timeout time.Duration
}

// Worker pushes tensors to all servers and pulls results back. All methods are safe for
// concurrent use.
type Worker struct {
	node    cluster.App
	timeout time.Duration
	calls   calls
	graphs  graphs // exchanges that streams start
	forget  func() // unregisters the worker from the node
}

// NewWorker makes a worker on node, which must have the worker role. A cluster's servers
// must be known: call it after postoffice.Start.
func NewWorker(node *postoffice.Node, o WorkerOptions) (*Worker, error) {
	if node.Role() != van.Worker {
		return nil, fmt.Errorf("%w: tensor worker on %s, want a node with role worker", van.ErrInvalid, node.Name())
	}
	w := &Worker{node: (*cluster.Node)(node).App(), timeout: o.Timeout}
	c := &w.calls
	c.node, c.servers, c.queue = w.node, w.node.Topology().ServerInstances(), streamqueue.New(node.Backend(), node.Config().BusyPoll)
	c.revoker, _ = van.As[van.Invalidator]((*cluster.Node)(node).Van())
	w.graphs.init(w.node)
	var err error
	c.customer, err = w.node.AddCustomer(o.AppID, o.CustomerID, func(msg *van.Message) {
		w.node.Rarely("af: request to a worker").Warn("dropped a request: a tensor worker serves none",
			"from", van.NodeName(msg.Sender))
		w.node.Refuse(msg.Sender, msg.ProcessEpoch, msg.AppID, msg.CustomerID, msg.Timestamp, fmt.Errorf("%w: a tensor worker serves no requests", van.ErrInvalid))
	})
	if err != nil {
		return nil, err
	}
	c.customer.KeepTraces()
	w.forget = w.node.OnExit(func() {
		w.graphs.close()
		c.queue.Close()
	})
	return w, nil
}

// PushPull sends every push tensor to every server, and asks server s for the pull tensors pull[s]. The number of pull tensors is the
// same for all servers. PushPull returns at once. A call with P push tensors and Q pull tensors of each server has P+Q consecutive
// timestamps, pushes first. Either list may be nil, but not both. Options are To, Within and a Stream.
//
// Keys of one list must differ. Tensors must stay as they are until Call.Wait has returned. A pull tensor is filled by the time Wait
// returns nil; its size must be that of the answer. Pull tensors must not share memory with each other. They may share memory with push
// tensors if the call has one server. After an error of Wait some servers may have had the batch, and pull tensors may be filled in part.
//
// Batches are sent in the order of the calls. A batch with tensors on the node's device
// waits for work on that device, see Stream; when that work fails, so does Wait.
func (w *Worker) PushPull(push []KeyTensor, pull [][]KeyTensor, opts ...CallOption) (Call, error) {
	o, err := with(options{limit: w.timeout}, opts)
	b := w.calls.take()
	if err == nil {
		err = b.address(o.to)
	}
	var device bool
	if err == nil {
		device, err = b.fill(push, pull)
	}
	if err != nil {
		b.unref()
		return Call{}, &van.Error{Op: "push_pull", Node: w.node.Name(), Err: err}
	}
	b.retain()
	return b.start(device, o)
}

// Close fails the calls in flight and unregisters the worker from its node. It does not wait, and returns nil.
func (w *Worker) Close() error {
	w.calls.customer.Close()
	done := w.graphs.close()
	w.calls.queue.Close()
	if done { // otherwise the goroutines may run until the node has left
		w.forget()
	}
	return nil
}
