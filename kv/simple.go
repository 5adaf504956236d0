package kv

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// SimpleData is a request or an answer that a SimpleApp has received.
type SimpleData struct {
	Head       int32
	Body       []byte // the receiver's own
	Sender     int    // node id
	Timestamp  int32  // the requester's
	CustomerID int32  // the requester's

	epoch uint32 // of the requester's process, see van.Message
}

// SimpleHandler takes a request or an answer. It runs on the transport's
// goroutine and holds up the messages of that sender, no others.
type SimpleHandler func(data SimpleData, app *SimpleApp)

// SimpleApp exchanges small messages, a number and some bytes, between any nodes
// that are connected: those of different roles, and a node and itself. All
// methods are safe for concurrent use.
type SimpleApp struct {
	// Timeout replaces DefaultTimeout; negative means none. Set it before use.
	Timeout time.Duration

	node     *postoffice.Node
	app      int
	customer atomic.Pointer[postoffice.Customer]
	own      bool // made by NewSimpleApp
	request  atomic.Pointer[SimpleHandler]
	response atomic.Pointer[SimpleHandler]
	calls    sync.Pool // of *simpleCall
}

// NewSimpleApp makes an application on node. On a worker customerID tells the
// applications with one appID apart; a server or scheduler reaches only the one
// whose customerID is the appID, since that is what its requests carry.
//
// request takes requests and must answer each with Response; nil answers with an
// empty body, as the original does. SetRequestHandle can replace it, but what comes
// before that goes to the first one.
func NewSimpleApp(node *postoffice.Node, appID, customerID int, request SimpleHandler) (*SimpleApp, error) {
	a := newSimpleApp(node, appID, request)
	a.own = true
	ready := make(chan struct{})
	c, err := node.AddCustomer(appID, customerID, func(msg *van.Message) {
		<-ready
		if !msg.SimpleApp {
			if n, speak := node.Rarely("kv: not a simple request"); speak {
				node.Log().Warn("dropped a request: not one for a simple application", "from", van.NodeName(msg.Sender), "message", msg.Meta.String(), "so far", n)
			}
			return
		}
		a.receive(msg)
	})
	if err != nil {
		return nil, err
	}
	a.customer.Store(c)
	close(ready)
	return a, nil
}

func newSimpleApp(node *postoffice.Node, appID int, request SimpleHandler) *SimpleApp {
	a := &SimpleApp{node: node, app: appID}
	a.SetRequestHandle(request)
	return a
}

// SetRequestHandle names who takes requests; nil answers them with an empty body.
func (a *SimpleApp) SetRequestHandle(h SimpleHandler) {
	if h == nil {
		h = func(d SimpleData, a *SimpleApp) {
			if err := a.Response(d, nil); err != nil {
				if n, speak := a.node.Rarely("kv: not answered: " + logx.Kind(err)); speak {
					a.node.Log().Warn("request not answered", "err", err, "so far", n)
				}
			}
		}
	}
	a.request.Store(&h)
}

// SetResponseHandle names who takes the answers to this application's requests,
// before Wait returns; nil ignores them. Answers of different nodes may come at the
// same time.
func (a *SimpleApp) SetResponseHandle(h SimpleHandler) {
	if h == nil {
		a.response.Store(nil)
		return
	}
	a.response.Store(&h)
}

func dataOf(msg *van.Message) SimpleData {
	return SimpleData{Head: msg.Head, Body: slices.Clone(msg.Body), Sender: msg.Sender, Timestamp: msg.Timestamp, CustomerID: msg.CustomerID, epoch: msg.Epoch}
}

// receive takes a request.
func (a *SimpleApp) receive(msg *van.Message) {
	if msg.Sender == van.Empty {
		if n, speak := a.node.Rarely("kv: no id"); speak {
			a.node.Log().Warn("dropped a request of a node without an id", "message", msg.Meta.String(), "so far", n)
		}
		return
	}
	(*a.request.Load())(dataOf(msg), a)
}

// Request sends head and body to node id to, or to every member of group to: a
// sum of van.ServerGroup, van.WorkerGroup and van.SchedulerID. Each owes an
// answer. It returns the timestamp for Wait.
//
// A group without members, or with one that this node has no connection to (other
// nodes of its own role), is an error that wraps van.ErrInvalid; then nothing was
// sent.
func (a *SimpleApp) Request(head int32, body []byte, to int) (ts int32, err error) {
	c := a.customer.Load()
	if c == nil {
		return 0, a.refuse(fmt.Errorf("%w: this server does not serve yet: set its request handle first", van.ErrInvalid))
	}
	if len(body) > math.MaxInt32 {
		return 0, a.refuse(fmt.Errorf("%w: body of %d bytes, want at most %d", van.ErrInvalid, len(body), math.MaxInt32))
	}
	ids, err := a.receivers(to)
	if err != nil {
		return 0, a.refuse(err)
	}
	r, _ := a.calls.Get().(*simpleCall)
	if r == nil {
		r = &simpleCall{a: a}
	}
	r.holds.Store(2)
	if err := c.Open(&r.Request, "simple request", r, 1, ids); err != nil {
		return 0, err
	}
	ts = r.First()
	for _, id := range ids {
		m := &r.msg
		m.Reset()
		m.Receiver = id
		m.Request, m.SimpleApp, m.Head, m.Timestamp = true, true, head, ts
		m.AppID, m.CustomerID = int32(c.AppID()), int32(c.ID())
		m.Body = append(m.Body[:0], body...)
		if err := a.node.Send(m); err != nil {
			c.Abort(&r.Request, err)
			break
		}
	}
	r.Recycle()
	return ts, nil
}

// receivers lists the nodes that to names.
func (a *SimpleApp) receivers(to int) ([]int, error) {
	ids := a.node.Members(to)
	if len(ids) == 0 {
		return nil, fmt.Errorf("%w: no such node or group: %d, want a node id or a sum of %d (scheduler), %d (servers) and %d (workers)",
			van.ErrInvalid, to, van.SchedulerID, van.ServerGroup, van.WorkerGroup)
	}
	for _, id := range ids {
		if van.RoleOf(id) == a.node.Role() && id != a.node.ID() {
			return nil, fmt.Errorf("%w: %s is not connected to %s: nodes of one role are not", van.ErrInvalid, a.node.Name(), van.NodeName(id))
		}
	}
	return ids, nil
}

func (a *SimpleApp) refuse(err error) error {
	return &van.Error{Op: "simple request", Node: a.node.Name(), Err: err}
}

// Response answers a request. Answer each once: the requester drops a second one.
func (a *SimpleApp) Response(req SimpleData, body []byte) error {
	if len(body) > math.MaxInt32 {
		return &van.Error{Op: "respond", Node: a.node.Name(), Err: fmt.Errorf("%w: body of %d bytes, want at most %d", van.ErrInvalid, len(body), math.MaxInt32)}
	}
	m := messages.Get().(*van.Message)
	m.Reset()
	m.Receiver, m.Epoch = req.Sender, req.epoch
	m.SimpleApp, m.Head, m.Timestamp = true, req.Head, req.Timestamp
	m.AppID, m.CustomerID = int32(a.app), req.CustomerID
	m.Body = append(m.Body[:0], body...)
	err := a.node.Send(m)
	messages.Put(m)
	return err
}

var messages = sync.Pool{New: func() any { return new(van.Message) }}

// Wait waits until every receiver of the request with timestamp ts has answered,
// and forgets it. Limits and errors are those of Worker.Wait.
func (a *SimpleApp) Wait(ctx context.Context, ts int32) error {
	c := a.customer.Load()
	if c == nil {
		return &van.Error{Op: "wait", Node: a.node.Name(), Detail: fmt.Sprintf("handler %d", ts), Err: postoffice.ErrUnknownHandler}
	}
	return waitFor(ctx, c, ts, a.Timeout)
}

// Close fails what is in flight and takes the application off its node. One that
// belongs to a Worker or Server is closed with that.
func (a *SimpleApp) Close() {
	if a.own {
		a.customer.Load().Close()
	}
}

// simpleCall is one request in flight.
type simpleCall struct {
	postoffice.Request
	a     *SimpleApp
	holds atomic.Int32 // the sender's and the customer's
	msg   van.Message
}

func (r *simpleCall) Answer(_, _ int, msg *van.Message) error {
	if !msg.SimpleApp {
		return fmt.Errorf("%w: answer to timestamp %d is not one of a simple application", van.ErrMalformed, msg.Timestamp)
	}
	if h := r.a.response.Load(); h != nil {
		(*h)(dataOf(msg), r.a)
	}
	return nil
}

func (r *simpleCall) Finished(error) {}

// Recycle gives up one hold.
func (r *simpleCall) Recycle() {
	if r.holds.Add(-1) == 0 {
		r.a.calls.Put(r)
	}
}
