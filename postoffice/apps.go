package postoffice

// The routing of data messages to the customers of a node.

import (
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

var errReplaced = fmt.Errorf("%w: another process has taken its place", van.ErrPeerLost)

// errNoApp: a message came for an application that this node does not have.
var errNoApp = errors.New("no such application")

// apps routes data messages to customers. Requests for an application that does not
// exist yet are kept, since peers may start sending before this process has made it.
type apps struct {
	table atomic.Pointer[map[appKey]*Customer]

	mu       sync.Mutex
	early    map[appKey][]early
	by       map[int]account // of early, by sender
	messages int             // of early
	bytes    int
	expiry   *time.Timer
	closed   bool
	noApp    logx.Sparse
	tooMany  logx.Sparse
}

type appKey struct{ app, customer int32 }

func (a *apps) init() {
	a.table.Store(&map[appKey]*Customer{})
	a.early, a.by = map[appKey][]early{}, map[int]account{}
}

// key returns the customer that a message is for: on a worker the customer id selects
// it, elsewhere the application id is the customer id.
func (n *Node) key(m *van.Meta) appKey {
	if n.role == van.Worker {
		return appKey{m.AppID, m.CustomerID}
	}
	return appKey{m.AppID, m.AppID}
}

// AddCustomer makes handle the receiver of the requests for an application.
// Answers are matched to the customer's own requests. On a worker several
// customers of one application are told apart by customer id; elsewhere the
// customer id is the application id. handle may block; see van.Receiver. Messages that
// were kept are delivered first.
func (n *Node) AddCustomer(app, customer int, handle func(*van.Message)) (*Customer, error) {
	if n.role != van.Worker {
		customer = app
	}
	c := newCustomer(n, app, customer, handle)
	k := appKey{int32(app), int32(customer)}
	a := &n.apps
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil, &van.Error{Op: "add customer", Node: n.Name(), Err: van.ErrClosed}
	}
	if (*a.table.Load())[k] != nil {
		return nil, &van.Error{Op: "add customer", Node: n.Name(), Detail: fmt.Sprintf("application %d, customer %d exists", app, customer), Err: van.ErrInvalid}
	}
	a.takeEarly(k, c)
	m := maps.Clone(*a.table.Load())
	m[k] = c
	a.table.Store(&m)
	return c, nil
}

func (n *Node) removeCustomer(c *Customer) {
	a := &n.apps
	a.mu.Lock()
	defer a.mu.Unlock()
	m := maps.Clone(*a.table.Load())
	k := appKey{int32(c.app), int32(c.id)}
	if m[k] == c {
		delete(m, k)
	}
	a.table.Store(&m)
}

// deliver hands a data message to its customer, or keeps it until there is one.
func (a *apps) deliver(n *Node, msg *van.Message) {
	k := n.key(&msg.Meta)
	c := (*a.table.Load())[k]
	if c == nil {
		if c = a.keep(n, k, msg); c == nil {
			return
		}
	}
	if c.behind.Load() && c.keepEarly(msg) {
		return
	}
	c.deliver(msg)
}

func (a *apps) customers() []*Customer {
	m := *a.table.Load()
	cs := make([]*Customer, 0, len(m))
	for _, c := range m {
		cs = append(cs, c)
	}
	return cs
}

// peerLost fails the requests that node id has not answered, and drops its requests for
// applications that have not been made.
func (a *apps) peerLost(id int, cause error) {
	a.mu.Lock()
	a.forget(func(_ appKey, e *early) bool { return e.msg.Sender == id })
	a.mu.Unlock()
	for _, c := range a.customers() {
		c.peerLost(id, cause)
	}
}

func (a *apps) abort(err error) {
	for _, c := range a.customers() {
		c.abortAll(err)
		c.endEarly()
	}
}

// failRequest fails the request that meta belongs to.
func (a *apps) failRequest(meta *van.Meta, peer int, err error) {
	for _, c := range a.customers() {
		if int32(c.app) == meta.AppID && int32(c.id) == meta.CustomerID {
			if r := c.lookup(meta.Timestamp); r != nil {
				r.failPeer(peer, err)
			}
		}
	}
}

// loop delivers a message that a node sends to itself.
func (a *apps) loop(n *Node, msg *van.Message) {
	c := &van.Message{Meta: msg.Meta, Sender: msg.Receiver, Receiver: msg.Receiver, Frames: msg.Frames}
	c.Body = append([]byte(nil), msg.Body...)
	c.DataTypes = append([]van.DataType(nil), msg.DataTypes...)
	for i := range msg.Frames {
		c.SetFrame(i, backend.Bytes(append([]byte(nil), msg.Frame(i).Host()...)))
	}
	c.Adopt(discarded{}, nil)
	if msg.Done != nil {
		msg.Done.Sent()
	}
	go func() {
		a.deliver(n, c)
		c.Release()
	}()
}

// discarded owns messages that the garbage collector frees.
type discarded struct{}

func (discarded) Free(*van.Message) {}
