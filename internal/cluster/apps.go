package cluster

// The routing of data messages to the customers of a node.

import (
	"errors"
	"fmt"
	"maps"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

var errReplaced = fmt.Errorf("%w: another process has taken its place", van.ErrPeerLost)

// errNoApp: a message arrived for an application that this node does not have.
var errNoApp = errors.New("no such application")

// AddCustomer makes handle the receiver of the requests for an application. Answers are matched to the customer's own
// requests. On a worker several customers of one application are distinguished by customer id; elsewhere the customer
// id is the application id. handle may block; see van.Receiver. Queued messages are delivered first.
func (a App) AddCustomer(id, customer int, handle func(*van.Message)) (*Customer, error) {
	return a.add(id, customer, NewInbound(), false, handle)
}

// AddServer is AddCustomer for an application that accepts requests. in lists them, and belongs to no other customer.
func (a App) AddServer(id, customer int, in *Inbound, handle func(*van.Message)) (*Customer, error) {
	return a.add(id, customer, in, true, handle)
}

func (a App) add(id, customer int, in *Inbound, serves bool, handle func(*van.Message)) (*Customer, error) {
	n := a.Node
	if n.role != van.Worker {
		customer = id
	}
	k := appKey{int32(id), int32(customer)}
	apps := &n.apps
	apps.mu.Lock()
	defer apps.mu.Unlock()
	if apps.ended {
		return nil, &van.Error{Op: "add customer", Node: n.Name(), Err: n.lifetime.Alive()}
	}
	if (*apps.table.Load())[k] != nil {
		return nil, &van.Error{Op: "add customer", Node: n.Name(), Detail: fmt.Sprintf("application %d, customer %d exists", id, customer), Err: van.ErrInvalid}
	}
	// A customer that is made again continues its timestamps: PS_RESEND takes earlier timestamps of a process for
	// duplicates.
	first, again := apps.next[k]
	if !again && !failpoint.On("incarnation") && !failpoint.On("stale-answer") {
		// A replacement process must not use the timestamps of the earlier process: answers to those may still
		// arrive.
		first = int32(n.rand() % (1 << 30))
	}
	c := newCustomer(n, id, customer, first, in, handle)
	c.serves = serves
	apps.takeCanceled(k, in)
	c.deliverBacklog(apps.takeQueued(k))
	m := maps.Clone(*apps.table.Load())
	m[k] = c
	apps.table.Store(&m)
	apps.changed.Broadcast()
	return c, nil
}

// receive passes a data message of p to its application.
func (a *apps) receive(msg *van.Message, p *process) {
	msg.ProcessEpoch = p.epoch
	if p.incarnation != 0 {
		msg.RequestTrace.PreStart = 0 // it holds the incarnations, not a time
	}
	a.profile.received(&msg.Meta)
	a.deliver(msg)
}

// deliver delivers a data message to its customer, or queues it until there is one.
func (a *apps) deliver(msg *van.Message) {
	k := a.key(msg.AppID, msg.CustomerID)
	c := (*a.table.Load())[k]
	if c == nil {
		if c = a.enqueue(k, msg); c == nil {
			return
		}
	}
	if c.backlogs.active.Load() && c.backlogs.enqueue(msg) {
		return
	}
	if msg.Request && msg.InPoll && c.serves && a.role == van.Worker {
		c.deliverOnBacklog(msg)
		return
	}
	c.deliver(msg)
}

// peerLost fails the requests that node id has not answered, if they were opened up to openedUntil, and drops its queued requests,
// but not those of a process that has replaced it.
func (a *apps) peerLost(id int, cause error, openedUntil uint64) {
	a.mu.Lock()
	a.dropQueued(func(_ appKey, e *queuedRequest) bool {
		return e.msg.Sender == id && !a.processes.waits(id, e.msg.ProcessEpoch)
	})
	a.changed.Broadcast()
	a.mu.Unlock()
	for _, c := range a.customers() {
		c.peerLost(id, cause, openedUntil)
	}
}

func (a *apps) failAll(err error) {
	a.mu.Lock()
	a.ended = true
	a.changed.Broadcast()
	a.mu.Unlock()
	for _, c := range a.customers() {
		c.abortAll(err)
		c.backlogs.end()
	}
}

// failRequest fails the request that meta belongs to, if peer owes an answer to it.
func (a *apps) failRequest(meta *van.Meta, peer int, err error) {
	for _, c := range a.customers() {
		if int32(c.app) == meta.AppID && int32(c.id) == meta.CustomerID {
			if r := c.lookup(meta.Timestamp); r != nil {
				r.failAt(meta.Timestamp, peer, err)
			}
		}
	}
}

// cancel passes a cancellation to its customer. If there is none yet, it drops the queued requests that w names, and keeps w for
// requests that arrive later.
func (a *apps) cancel(app int, w Canceled, epoch uint32) {
	k := a.key(int32(app), w.Customer)
	a.mu.Lock()
	c := (*a.table.Load())[k]
	if c == nil {
		a.dropQueued(func(of appKey, e *queuedRequest) bool {
			return of == k && e.msg.Sender == w.Sender && e.msg.ProcessEpoch == epoch && w.Has(e.msg.CustomerID, e.msg.Timestamp)
		})
		a.keepCanceled(k, w, epoch)
		a.changed.Broadcast()
	}
	a.mu.Unlock()
	if c == nil {
		return
	}
	c.inbound.cancel(w, epoch)
	if f := c.onCanceled.Load(); f != nil {
		(*f)(w)
	}
}

// deliverToSelf delivers a message that a node sends to itself. It drops the message if the node has failed or leaves.
func (a *apps) deliverToSelf(msg *van.Message) {
	c := &van.Message{Meta: msg.Meta, Sender: msg.Receiver, Receiver: msg.Receiver, Frames: msg.Frames}
	c.Body = append([]byte(nil), msg.Body...)
	c.DataTypes = append([]van.DataType(nil), msg.DataTypes...)
	for i := range msg.Frames {
		c.SetFrame(i, backend.Bytes(append([]byte(nil), msg.Frame(i).Host()...)))
	}
	c.Adopt(garbageCollected{}, nil)
	if msg.Done != nil {
		msg.Done.Sent()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ended {
		c.Release()
		return
	}
	a.deliveries.Go(func() {
		a.deliver(c)
		c.Release()
	})
}

// garbageCollected owns messages that the garbage collector frees.
type garbageCollected struct{}

func (garbageCollected) Free(*van.Message) {}
