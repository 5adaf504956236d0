package streams

// The state of Ends: the exchanges of a node, the offers of workers, and the calls of Prepare that wait for offers. Also
// the methods that change only the state.

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/van"
)

// Ends manages the stream exchanges of a node. A node may have one. All methods are safe for concurrent use.
type Ends struct {
	node     cluster.App
	customer *cluster.Customer
	last     atomic.Uint64 // id of an exchange
	memory   memory
	unwatch  func()
	stopExit func()

	mu       sync.Mutex // guards the fields below, and those of Exchange and peer that are declared as guarded by it
	all      map[name]*Exchange
	offers   map[name]*note // offers to this server that are not matched yet
	waiting  []*Exchange    // exchanges that this server prepares and has not matched, in call order
	changed  chan struct{}  // closed when offers, or the state of an exchange in all, has changed
	over     error          // why no exchange can be prepared any more
	watching bool
	ended    chan struct{} // closed when over is set

	failing sync.WaitGroup // goroutines that end exchanges, or query the device; the last are started when over is set
}

// name identifies an exchange. Ids are assigned by workers.
type name struct {
	worker int // node id
	id     uint64
}

// start runs f on a goroutine of its own, and returns true, unless stop has been called.
func (e *Ends) start(f func()) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.over != nil {
		return false
	}
	e.failing.Go(f)
	return true
}

// wake wakes all calls of Prepare. ends.mu is held.
func (e *Ends) wake() {
	close(e.changed)
	e.changed = make(chan struct{})
}

// remove removes the names of an exchange; later messages about it are ignored. ends.mu is held.
func (e *Ends) remove(names []name) {
	for _, n := range names {
		delete(e.all, n)
	}
	e.wake()
}

// names lists peers, for errors.
func (e *Ends) names(peers []*peer) string {
	var names []string
	for _, p := range peers {
		names = append(names, e.node.PeerName(p.id))
	}
	return strings.Join(names, ", ")
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

// maxOffers is the maximum number of a worker's offers that a server has not matched.
const maxOffers = 64

// offered stores an offer. ends.mu is held.
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

// alike returns an error if p has prepared the exchange for streams and this node for hosts, or the reverse.
func (e *Ends) alike(x *Exchange, p *peer, n *note) error {
	if n.host == (x.host != nil) {
		return nil
	}
	how := map[bool]string{false: "in streams", true: "by hosts"}
	return fmt.Errorf("%w: %s has prepared it %s, and this node %s", van.ErrInvalid, e.node.PeerName(p.id), how[n.host], how[!n.host])
}

// unwait removes x from the exchanges that wait for offers. Later ones with the same keys take its position. mu is
// held.
func (e *Ends) unwait(x *Exchange) {
	if i := slices.Index(e.waiting, x); i >= 0 {
		e.waiting = slices.Delete(e.waiting, i, i+1)
		e.wake()
	}
}
