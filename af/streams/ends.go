package streams

// Ends: what a node has for all its exchanges.

import (
	"cmp"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/internal/random"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// device is what exchanges need of a node's backend.
type device = backend.StreamDevice

// Words lie in device memory of pageLen bytes, which is what drivers share at least, each in a
// line of its own. An exchange has a slot there: a head with a token and with what it copies to peers' words, and
// a word for each peer.
const (
	pageLen    = 2 << 20
	wordStride = 128
	slotHead   = wordStride
	validAt    = 64 // in the head: 1, and 0 when the exchange is over
	maxBytes   = af.MaxTensorBytes
)

// Ends is what a node has for exchanges in streams. There may be one of it on a node. All methods are
// safe for concurrent use.
type Ends struct {
	node     postoffice.App
	customer *postoffice.Customer
	unwatch  func()
	stopExit func()

	making  sync.Mutex    // guards what follows; held while the driver is called
	dev     *device       // nil before the first Prepare; then it does not change
	release uintptr       // the stream that lets others go on
	buffers *backend.Pool // for memory that cannot be shared
	page    backend.Mem   // of the device, what is left of the last one
	pinned  backend.Mem   // the same of the host

	mu       sync.Mutex // guards what follows
	all      map[name]*Exchange
	offers   map[name]*note // to this server, not taken yet
	waiting  []*Exchange    // which this server prepares and has not matched, in the order of the calls
	changed  chan struct{}  // closed when offers, or what is known of one of all, have changed
	over     error          // why there are no exchanges any more
	watching bool
	ended    chan struct{} // closed by Close
	last     atomic.Uint64 // id of an exchange

	failing sync.WaitGroup // goroutines that end exchanges, or ask the device; none begins when over is set
}

// name names an exchange: ids are those of workers.
type name struct {
	worker int // node id
	id     uint64
}

// maxOffers is how many exchanges a worker may offer which a server has not prepared.
const maxOffers = 64

// New makes what node, a worker or a server, needs. Call it after postoffice.Start; peers may have
// called Prepare before. It needs nothing of the device before Prepare.
func New(node *postoffice.Node) (*Ends, error) {
	e := &Ends{node: node.App(), all: map[name]*Exchange{}, offers: map[name]*note{}, changed: make(chan struct{}), ended: make(chan struct{})}
	if r := node.Role(); r != van.Worker && r != van.Server {
		return nil, fmt.Errorf("%w: exchanges in streams on %s, want a node with role worker or server", van.ErrInvalid, node.Name())
	}
	e.last.Store(random.Uint64())
	var err error
	if e.customer, err = e.node.AddCustomer(app, app, e.receive); err != nil {
		return nil, err
	}
	e.unwatch = node.OnPeer(e.peerChanged)
	e.stopExit = e.node.OnExit(func() { e.end(cmp.Or(e.node.Alive(), van.ErrClosed)) })
	return e, nil
}

// Close ends all exchanges, and tells the peers.
func (e *Ends) Close() {
	e.unwatch()
	e.end(fmt.Errorf("%w: this node's exchanges in streams", van.ErrClosed))
	e.stopExit()
	e.customer.Close()
}

// end ends all exchanges, and lets no new ones begin. The device may be closed then, unless its driver lets nobody in.
func (e *Ends) end(err error) {
	e.stop(err)
	done := make(chan struct{})
	go func() { e.failing.Wait(); close(done) }()
	patience := time.NewTimer(closeLimit)
	defer patience.Stop()
	select {
	case <-done:
	case <-patience.C:
	}
}

// stop is end, but may leave some to other goroutines that have begun.
func (e *Ends) stop(err error) {
	e.mu.Lock()
	if e.over == nil {
		e.over = err
		close(e.ended)
	}
	clear(e.offers)
	e.wake()
	var all []*Exchange
	for _, x := range e.all {
		all = append(all, x)
	}
	e.mu.Unlock()
	var ending sync.WaitGroup
	for _, x := range all {
		ending.Go(func() { x.fail(err) })
	}
	ending.Wait()
}

// closeLimit is how long the end of all waits for goroutines that are in the driver.
const closeLimit = time.Second

// wake makes those who prepare look again. e.mu is held.
func (e *Ends) wake() {
	close(e.changed)
	e.changed = make(chan struct{})
}

// peerChanged is told that a peer is lost, or that it or its replacement is there. It must not block.
func (e *Ends) peerChanged(id int, up bool, cause error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	defer e.wake()
	if up {
		return
	}
	for n := range e.offers {
		if n.worker == id {
			delete(e.offers, n)
		}
	}
	if !errors.Is(cause, van.ErrPeerLost) {
		cause = fmt.Errorf("%w: %w", van.ErrPeerLost, cause)
	}
	for _, x := range e.all {
		i := x.with(id)
		switch {
		case i < 0:
		case x.meeting:
			x.peers[i].offered, x.peers[i].said = false, nil
		default:
			x.peers[i].over = true
			if e.over != nil {
				break
			}
			e.failing.Go(func() { x.fail(&van.Error{Op: "exchange", Peer: e.node.PeerName(id), Err: cause}) })
		}
	}
}

// open finds out what the node's device can do, once. e.making is held.
func (e *Ends) open() error {
	if e.dev != nil {
		return nil
	}
	b := e.node.Backend()
	d, err := backend.StreamDeviceOf(b)
	if err != nil {
		return err
	}
	if e.release, err = d.NewStream(); err != nil {
		return err
	}
	e.buffers = backend.NewPool(poolBytes, b.Alloc, b.Free).For(b)
	e.dev = d
	return nil
}

// poolBytes bounds the buffers for memory that cannot be shared.
const poolBytes = 4 << 30

// slot makes a slot with words for so many peers. e.making is held.
func (e *Ends) slot(peers int) (m backend.Mem, err error) {
	n := slotHead + peers*wordStride
	if n > pageLen {
		return m, fmt.Errorf("%w: %d peers, want at most %d", van.ErrInvalid, peers, pageLen/wordStride-1)
	}
	if e.page.Len() < n {
		if e.page, err = e.dev.Alloc(pageLen); err != nil {
			return m, err
		}
	}
	m = e.page.Sub(0, n)
	e.page = behind(e.page, n)
	return m, nil
}

// hostPage is how much host memory is pinned at a time.
const hostPage = 4096

// hostWords makes two words of pinned host memory. e.making is held.
func (e *Ends) hostWords() (m backend.Mem, err error) {
	if e.pinned.Len() < wordStride {
		if e.pinned, err = e.dev.AllocPinned(hostPage); err != nil {
			return m, err
		}
	}
	m = e.pinned.Sub(0, 8)
	e.pinned = behind(e.pinned, wordStride)
	return m, nil
}

// behind is what is left of m behind n bytes. An empty rest is no memory: it would point behind the allocation.
func behind(m backend.Mem, n int) backend.Mem {
	if m.Len() == n {
		return backend.Mem{}
	}
	return m.Sub(n, m.Len()-n)
}

// send sends n to a peer.
func (e *Ends) send(id int, n *note) error {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Request, m.Push, m.Head, m.Timestamp = id, true, true, van.Single, e.customer.Skip(1)
	m.AppID, m.CustomerID = app, app
	m.Body = n.append(m.Body)
	return e.node.Send(m)
}

// receive handles a message. It runs on a goroutine of the transport.
func (e *Ends) receive(msg *van.Message) {
	n, err := parse(msg.Body)
	if err == nil {
		err = e.take(msg.Sender, &n)
	}
	if err != nil {
		if k, show := e.node.Rarely("streams: " + logx.Kind(err)); show {
			e.node.Log().Warn("refused a message about an exchange in streams", "from", e.node.PeerName(msg.Sender), "err", err, "so far", k)
		}
	}
}

// take takes what a peer says.
func (e *Ends) take(from int, n *note) error {
	want := van.Worker
	if e.node.Role() == van.Worker {
		want = van.Server
	}
	if from == van.Empty || van.RoleOf(from) != want {
		return fmt.Errorf("%w: a message of %s, want one of a %s", van.ErrMalformed, van.NodeName(from), want)
	}
	of := name{from, n.id}
	if want == van.Server {
		of.worker = e.node.ID()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	x := e.all[of]
	switch {
	case n.verb == verbOver && x != nil:
		i := x.with(from)
		if i < 0 {
			return fmt.Errorf("%w: the end of exchange %d, which is with others", van.ErrMalformed, n.id)
		}
		x.peers[i].over = true
		if e.over == nil {
			e.failing.Go(func() { x.left(from, n.text) })
		}
	case e.over != nil:
		return nil
	case n.verb == verbOver:
		delete(e.offers, of)
	case n.verb == verbOffer && want == van.Worker:
		return e.offered(of, n)
	case n.verb == verbAccept && want == van.Server && x != nil:
		return x.accepted(from, n)
	case n.verb == verbAccept && want == van.Server: // it is over here, and the server may have been told before it was offered
		e.failing.Go(func() { _ = e.send(from, &note{verb: verbOver, id: n.id, text: "it was over before this answer"}) })
		return nil
	default:
		return &van.FieldError{Field: "body verb", Value: n.verb, Want: "what a " + want.String() + " says"}
	}
	e.wake()
	return nil
}

// offered keeps an offer. e.mu is held.
func (e *Ends) offered(of name, n *note) error {
	if e.all[of] != nil || e.offers[of] != nil {
		return fmt.Errorf("%w: exchange %d was offered before", van.ErrMalformed, of.id)
	}
	count := 0
	for k := range e.offers {
		if k.worker == of.worker {
			count++
		}
	}
	if count >= maxOffers {
		e.failing.Go(func() {
			_ = e.send(of.worker, &note{verb: verbOver, id: of.id, text: "too many exchanges are offered that the server has not prepared"})
		})
		return fmt.Errorf("%w: %d exchanges are offered that this server has not prepared", van.ErrQueueFull, count)
	}
	e.offers[of] = n
	e.wake()
	return nil
}

// watchEvery is how often watch looks.
const watchEvery = 100 * time.Millisecond

// watch ends exchanges whose rounds take too long, and all when the node has failed.
func (e *Ends) watch() {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	var all []*Exchange
	for {
		select {
		case <-e.ended:
			return
		case <-e.node.Ended():
			e.stop(cmp.Or(e.node.Alive(), van.ErrClosed))
			return
		case <-tick.C:
		}
		e.mu.Lock()
		all = all[:0]
		for _, x := range e.all {
			if x.limit > 0 && x.ready {
				all = append(all, x)
			}
		}
		e.mu.Unlock()
		now := clock.Now()
		for _, x := range all {
			x.look(now)
		}
	}
}
