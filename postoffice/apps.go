package postoffice

import (
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

var errReplaced = fmt.Errorf("%w: another process has taken its place", van.ErrPeerLost)

// errNoApp: a message came for an application that this node does not have.
var errNoApp = errors.New("no such application")

// Bounds of what is kept for an application that has not been made yet.
const (
	maxEarly      = 4096
	maxEarlyBytes = 1 << 30
)

// apps routes data messages to customers. What comes for an application before it
// exists is kept, so that a peer that is quicker is not lost.
type apps struct {
	table atomic.Pointer[map[appKey]*Customer]

	mu         sync.Mutex
	early      map[appKey][]*van.Message
	earlyBytes int
	earlyCount int
	closed     bool
}

type appKey struct{ app, customer int32 }

func (a *apps) init() {
	a.table.Store(&map[appKey]*Customer{})
	a.early = map[appKey][]*van.Message{}
}

// key says whom a message is for: on a worker the customer id selects the
// customer, elsewhere the customer is the application.
func (n *Node) key(m *van.Meta) appKey {
	if n.role == van.Worker {
		return appKey{m.AppID, m.CustomerID}
	}
	return appKey{m.AppID, m.AppID}
}

// AddCustomer makes handle the receiver of the requests for an application.
// Answers are matched to the customer's own requests. On a worker several
// customers of one application are told apart by customer id; elsewhere the
// customer id is the application id. handle may block; see van.Receiver. What
// came before is delivered first.
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
	if early := a.early[k]; len(early) > 0 {
		delete(a.early, k)
		a.earlyCount -= len(early)
		c.early = map[int][]*van.Message{}
		for _, m := range early {
			a.earlyBytes -= m.PayloadLen()
			c.early[m.Sender] = append(c.early[m.Sender], m)
		}
		c.behind.Store(true)
		for sender := range maps.Clone(c.early) {
			go c.catchUp(sender)
		}
	}
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

// deliver hands a data message to its customer, or keeps it for one to come.
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

// keep stores a request for an application that does not exist yet. It returns
// the customer if it has come meanwhile.
func (a *apps) keep(n *Node, k appKey, msg *van.Message) *Customer {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := (*a.table.Load())[k]; c != nil {
		return c
	}
	switch {
	case a.closed:
	case !msg.Request:
		if k, speak := n.Rarely("no app: answer"); speak {
			n.log.Info("dropped an answer", "err", errNoApp, "from", van.NodeName(msg.Sender), "message", msg.Meta.String(), "so far", k)
		}
	case a.earlyCount >= maxEarly || a.earlyBytes+msg.PayloadLen() > maxEarlyBytes:
		if k, speak := n.Rarely("no app: request"); speak {
			n.log.Warn("dropped a request: too many came for applications that this node does not have", "err", errNoApp,
				"from", van.NodeName(msg.Sender), "message", msg.Meta.String(), "kept", a.earlyCount, "so far", k)
		}
	default:
		if a.earlyCount == 0 {
			n.log.Info("keeping requests until their application is made", "app", k.app, "customer", k.customer)
		}
		a.early[k] = append(a.early[k], msg.Retain())
		a.earlyCount++
		a.earlyBytes += msg.PayloadLen()
	}
	return nil
}

// keepEarly queues msg behind those of its sender that came before the customer.
func (c *Customer) keepEarly(msg *van.Message) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	queue, behind := c.early[msg.Sender]
	if behind {
		c.early[msg.Sender] = append(queue, msg.Retain())
	}
	return behind
}

// catchUp delivers what one sender sent before the customer was there. A handler
// that blocks holds up that sender only, as it always does.
func (c *Customer) catchUp(sender int) {
	for {
		c.mu.Lock()
		queue := c.early[sender]
		if len(queue) == 0 {
			delete(c.early, sender)
			c.behind.Store(len(c.early) > 0)
			c.mu.Unlock()
			return
		}
		msg := queue[0]
		c.early[sender] = queue[1:]
		c.mu.Unlock()
		c.deliver(msg)
		msg.Release()
	}
}

func (a *apps) customers() []*Customer {
	m := *a.table.Load()
	cs := make([]*Customer, 0, len(m))
	for _, c := range m {
		cs = append(cs, c)
	}
	return cs
}

func (a *apps) peerLost(id int, cause error) {
	for _, c := range a.customers() {
		c.peerLost(id, cause)
	}
}

func (a *apps) abort(err error) {
	for _, c := range a.customers() {
		c.abortAll(err)
	}
}

// failRequest fails the request that meta belongs to.
func (a *apps) failRequest(meta *van.Meta, peer int, err error) {
	for _, c := range a.customers() {
		if int32(c.app) == meta.AppID && int32(c.id) == meta.CustomerID {
			if r := c.lookup(meta.Timestamp); r != nil {
				r.lose(peer, err)
			}
		}
	}
}

// discard lets go of what was kept for applications that never came.
func (a *apps) discard() {
	a.mu.Lock()
	a.closed = true
	early := a.early
	a.early = map[appKey][]*van.Message{}
	a.mu.Unlock()
	for _, msgs := range early {
		for _, m := range msgs {
			m.Release()
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
