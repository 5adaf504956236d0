package kv

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
)

// SimpleMessage is a request or an answer that a SimpleApp has received.
type SimpleMessage struct {
	Head       int32
	Body       []byte // the receiver's own
	Sender     postoffice.NodeID
	Timestamp  int32 // the requester's
	CustomerID int32 // the requester's

	app   *SimpleApp
	epoch uint32            // of the requester's process, see van.Message
	state *cluster.Accepted // set for a request; nil for an answer
}

// SimpleHandler takes a request or an answer. It runs on the transport's goroutine, or on a goroutine for the sender. Later messages
// of the same sender wait for it, those of other senders do not.
type SimpleHandler func(SimpleMessage)

// SimpleOptions of NewSimpleApp.
type SimpleOptions struct {
	AppID int

	// CustomerID tells, on a worker, the applications with one AppID apart; a server or
	// scheduler reaches only the one whose CustomerID is the AppID, since that is what its
	// requests carry.
	CustomerID int

	// Timeout is how long Call.Wait waits when its context has no deadline, counted from
	// the request: 0 is postoffice.DefaultTimeout, negative no limit.
	Timeout time.Duration

	// Handler handles requests and must answer each with Respond, or Refuse it; nil answers with an empty body, as the
	// original does. Handle can replace it; earlier requests go to the first handler.
	Handler SimpleHandler
}

// SimpleApp exchanges small messages, a number and some bytes, between any nodes
// that are connected: those of different roles, and a node and itself. All
// methods are safe for concurrent use.
type SimpleApp struct {
	node     cluster.App
	app      int
	timeout  time.Duration
	inbound  *cluster.Inbound // accepted requests; a Server or Worker shares it with its SimpleApp
	customer atomic.Pointer[cluster.Customer]
	ready    chan struct{} // closed when customer is there
	own      bool          // made by NewSimpleApp
	request  atomic.Pointer[SimpleHandler]
	response atomic.Pointer[SimpleHandler]
	calls    sync.Pool // of *simpleCall
}

// NewSimpleApp makes an application on node.
func NewSimpleApp(node *postoffice.Node, o SimpleOptions) (*SimpleApp, error) {
	a := newSimpleApp(node, o.AppID, o.Timeout, o.Handler)
	a.own = true
	c, err := a.node.AddServer(o.AppID, o.CustomerID, a.inbound, a.takesOnly("this application"))
	if err != nil {
		return nil, err
	}
	a.begin(c)
	return a, nil
}

func newSimpleApp(node *postoffice.Node, appID int, timeout time.Duration, h SimpleHandler) *SimpleApp {
	a := &SimpleApp{node: (*cluster.Node)(node).App(), app: appID, timeout: timeout, inbound: cluster.NewInbound(), ready: make(chan struct{})}
	a.Handle(h)
	return a
}

// begin lets requests of and to c pass, which hands what it gets to takes.
func (a *SimpleApp) begin(c *cluster.Customer) {
	a.customer.Store(c)
	close(a.ready)
}

// Handle sets the handler of requests; nil answers them with an empty body.
func (a *SimpleApp) Handle(h SimpleHandler) {
	if h == nil {
		h = func(m SimpleMessage) {
			if err := m.Respond(nil); err != nil {
				_ = m.Refuse(err)
				a.node.Rarely("kv: not answered: "+logx.Kind(err)).Warn("request not answered", "err", err)
			}
		}
	}
	a.request.Store(&h)
}

// OnAnswer sets the handler of the answers to this application's requests, which is called before Wait returns;
// nil ignores answers. It may be called concurrently for answers of different nodes.
func (a *SimpleApp) OnAnswer(h SimpleHandler) {
	if h == nil {
		a.response.Store(nil)
		return
	}
	a.response.Store(&h)
}

func (a *SimpleApp) messageOf(msg *van.Message) SimpleMessage {
	return SimpleMessage{app: a, Head: msg.Head, Body: slices.Clone(msg.Body), Sender: postoffice.NodeID(msg.Sender), Timestamp: msg.Timestamp, CustomerID: msg.CustomerID, epoch: msg.ProcessEpoch}
}

// takes handles a request for a simple application, and reports whether msg is one. It may be called before begin.
func (a *SimpleApp) takes(msg *van.Message) bool {
	switch {
	case !msg.SimpleApp:
		return false
	case msg.Sender == van.Empty:
		a.node.Rarely("kv: no id").Warn("dropped a request of a node without an id", "message", &msg.Meta)
	default:
		<-a.ready
		a.serve(msg)
	}
	return true
}

// takesOnly returns a handler that calls takes, and refuses all other requests in the name of who, the application.
func (a *SimpleApp) takesOnly(who string) func(*van.Message) {
	err := fmt.Errorf("%w: %s serves simple requests only", van.ErrInvalid, who)
	return func(msg *van.Message) {
		if !a.takes(msg) {
			a.node.Rarely("kv: not a simple request").Warn("dropped a request", "err", err, "from", van.NodeName(msg.Sender), "message", &msg.Meta)
			a.node.Refuse(msg.Sender, msg.ProcessEpoch, msg.AppID, msg.CustomerID, msg.Timestamp, err)
		}
	}
}

// serve calls the handler with a request, or refuses it.
func (a *SimpleApp) serve(msg *van.Message) {
	m := a.messageOf(msg)
	m.state = &cluster.Accepted{}
	a.inbound.Enter(msg.Sender)
	defer a.inbound.Exit(msg.Sender)
	if err := a.inbound.Accept(m.state, msg.Sender, msg.ProcessEpoch, msg.CustomerID, msg.Timestamp); err != nil {
		a.node.Refuse(msg.Sender, msg.ProcessEpoch, msg.AppID, msg.CustomerID, msg.Timestamp, err)
		return
	}
	(*a.request.Load())(m)
}

// Request sends head and body to a node, or to every member of a group. Each owes an answer.
//
// A group without members, or with a member that this node has no connection to (other
// nodes of its own role), is an error that wraps postoffice.ErrInvalid; then nothing was
// sent.
func (a *SimpleApp) Request(head int32, body []byte, to postoffice.Target, opts ...SimpleOption) (Call, error) {
	c := a.customer.Load()
	if c == nil {
		return Call{}, a.refuse(fmt.Errorf("%w: this server does not serve yet: call its Handle first", van.ErrInvalid))
	}
	if len(body) > math.MaxInt32 {
		return Call{}, a.refuse(fmt.Errorf("%w: body of %d bytes, want at most %d", van.ErrInvalid, len(body), math.MaxInt32))
	}
	ids, err := a.receivers(to)
	if err != nil {
		return Call{}, a.refuse(err)
	}
	r, _ := a.calls.Get().(*simpleCall)
	if r == nil {
		r = &simpleCall{a: a}
	}
	r.holds.Store(2)
	r.done = nil
	for _, o := range opts {
		if d, is := o.(DoneOption); is {
			r.done = d.f
		}
	}
	if err := c.Open(&r.Request, "simple request", r, 1, ids); err != nil {
		return Call{}, err
	}
	call := r.Call(a.timeout)
	if r.done != nil {
		r.Expire(a.timeout)
	}
	if r.Begin() { // otherwise a receiver is lost: Wait returns that error
		r.send(c, head, body, ids)
		r.End()
	}
	r.Recycle()
	return Call(call), nil
}

// receivers lists the nodes that to names.
func (a *SimpleApp) receivers(to postoffice.Target) ([]int, error) {
	ids := a.node.Members(membersOf(to))
	if len(ids) == 0 {
		return nil, fmt.Errorf("%w: no such node or group: %d, want a node id or a sum of %d (scheduler), %d (servers) and %d (workers)",
			van.ErrInvalid, membersOf(to), van.SchedulerID, van.ServerGroup, van.WorkerGroup)
	}
	for _, id := range ids {
		if van.RoleOf(id) == a.node.Role() && id != a.node.ID() {
			return nil, fmt.Errorf("%w: %s is not connected to %s: nodes of one role are not", van.ErrInvalid, a.node.Name(), van.NodeName(id))
		}
	}
	return ids, nil
}

// membersOf is the node id or group that to has, 0 for nil.
func membersOf(to postoffice.Target) int {
	switch to := to.(type) {
	case postoffice.NodeID:
		return int(to)
	case postoffice.Group:
		return int(to)
	}
	return 0
}

func (a *SimpleApp) refuse(err error) error {
	return &van.Error{Op: "simple request", Node: a.node.Name(), Err: err}
}

// errNotRequest: an answer can be neither answered nor refused, since its sender waits for nothing.
var errNotRequest = fmt.Errorf("%w: the message is an answer, want a request", van.ErrInvalid)

// Respond answers a request. Answer each once: the requester drops a second one. After postoffice.ErrQueueFull, the
// request can still be answered or refused; unlike that of a Request, it is not refused by Respond.
func (d SimpleMessage) Respond(body []byte) error {
	a := d.app
	if a == nil {
		return &van.Error{Op: "respond", Err: fmt.Errorf("%w: no SimpleApp has received this message", van.ErrInvalid)}
	}
	if d.state == nil {
		return &van.Error{Op: "respond", Node: a.node.Name(), Peer: a.node.PeerName(int(d.Sender)), Err: errNotRequest}
	}
	if len(body) > math.MaxInt32 {
		return &van.Error{Op: "respond", Node: a.node.Name(), Err: fmt.Errorf("%w: body of %d bytes, want at most %d", van.ErrInvalid, len(body), math.MaxInt32)}
	}
	m := messages.Get().(*van.Message)
	m.Reset()
	m.Receiver, m.ProcessEpoch = int(d.Sender), d.epoch
	m.SimpleApp, m.Head, m.Timestamp = true, d.Head, d.Timestamp
	m.AppID, m.CustomerID = int32(a.app), d.CustomerID
	m.Body = append(m.Body[:0], body...)
	err := a.node.Send(m)
	messages.Put(m)
	if err == nil || !errors.Is(err, van.ErrQueueFull) {
		d.leave()
	}
	return err
}

// leave records that the request has its answer.
func (d SimpleMessage) leave() { d.app.inbound.Leave(d.state) }

// Refuse tells the requester that this node does not answer: its call fails at once, see Request.Refuse. Requests only
// can be refused.
func (d SimpleMessage) Refuse(why error) error {
	a := d.app
	no := cluster.Declined(why)
	switch {
	case a == nil:
		return &van.Error{Op: "refuse", Err: fmt.Errorf("%w: no SimpleApp has received this message", van.ErrInvalid)}
	case why == nil:
		return &van.Error{Op: "refuse", Node: a.node.Name(), Err: no}
	case d.state == nil:
		return &van.Error{Op: "refuse", Node: a.node.Name(), Peer: a.node.PeerName(int(d.Sender)), Err: errNotRequest}
	}
	a.node.Refuse(int(d.Sender), d.epoch, int32(a.app), d.CustomerID, d.Timestamp, no)
	d.leave()
	return nil
}

var messages = sync.Pool{New: func() any { return new(van.Message) }}

// Context returns the context of a request, see Request.Context. The context of an answer has ended.
func (d SimpleMessage) Context() context.Context {
	if d.state == nil {
		ctx, end := context.WithCancel(context.Background())
		end()
		return ctx
	}
	return d.app.inbound.Context(d.state, int(d.Sender), func() bool { return true })
}

// Wanted reports whether the sender of a request may still wait for its answer: it has not canceled the request,
// is not lost, and has not been replaced. Unlike Context, Wanted allocates nothing, and its result does not change with the answer.
func (d SimpleMessage) Wanted() bool {
	if d.app == nil {
		return false
	}
	c := d.app.customer.Load()
	return c != nil && c.IsAwaited(int(d.Sender), d.epoch, d.CustomerID, d.Timestamp)
}

// Close fails the requests in flight and removes the application from its node. It does not wait, and returns nil. An
// application that belongs to a Worker or Server is closed with it: Close of the application has no effect.
func (a *SimpleApp) Close() error {
	if a.own {
		a.customer.Load().Close()
	}
	return nil
}

// simpleCall is one request in flight.
type simpleCall struct {
	cluster.Request
	a     *SimpleApp
	holds atomic.Int32 // the sender's and the customer's
	done  func(error)
	msg   van.Message
}

// send sends the request to the nodes with these ids, or fails it.
func (r *simpleCall) send(c *cluster.Customer, head int32, body []byte, ids []int) {
	m := &r.msg
	for _, id := range ids {
		m.Reset()
		m.Receiver = id
		m.Request, m.SimpleApp, m.Head, m.Timestamp = true, true, head, r.First()
		m.AppID, m.CustomerID = int32(c.AppID()), int32(c.ID())
		m.Body = append(m.Body[:0], body...)
		if err := r.a.node.Send(m); err != nil {
			c.Abort(&r.Request, err)
			return
		}
	}
}

func (r *simpleCall) Answer(_, _ int, msg *van.Message) error {
	if !msg.SimpleApp {
		return fmt.Errorf("%w: answer to timestamp %d is not one of a simple application", van.ErrMalformed, msg.Timestamp)
	}
	if h := r.a.response.Load(); h != nil {
		(*h)(r.a.messageOf(msg))
	}
	return nil
}

func (r *simpleCall) Finished(err error) {
	if done := r.done; done != nil {
		done(err)
	}
}

// Recycle drops one reference.
func (r *simpleCall) Recycle() {
	if r.holds.Add(-1) == 0 {
		r.a.calls.Put(r)
	}
}
