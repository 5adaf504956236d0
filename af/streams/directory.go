package streams

// directory: the exchanges of a node, the offers of workers, and the calls of Prepare that wait for offers.

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/van"
)

// directory is the state that the exchanges of a node share. mu guards the fields below it, and those of Exchange and
// peer that are declared as guarded by it.
type directory struct {
	node     cluster.App
	customer *cluster.Customer
	last     atomic.Uint64 // id of an exchange

	mu       sync.Mutex
	all      map[name]*Exchange
	offers   map[name]*note // offers to this server that are not matched yet
	waiting  []*Exchange    // exchanges that this server prepares and has not matched, in call order
	changed  chan struct{}  // closed when offers, or the state of an exchange in all, has changed
	over     error          // why no exchange can be prepared any more
	watching bool
	ended    chan struct{} // closed when over is set

	failing sync.WaitGroup // goroutines that end exchanges, or query the device; none is started after over is set
}

// name identifies an exchange. Ids are assigned by workers.
type name struct {
	worker int // node id
	id     uint64
}

// maxOffers is the maximum number of a worker's offers that a server has not matched.
const maxOffers = 64

// wake wakes all calls of Prepare. mu is held.
func (d *directory) wake() {
	close(d.changed)
	d.changed = make(chan struct{})
}

// names lists peers, for errors.
func (d *directory) names(peers []*peer) string {
	var names []string
	for _, p := range peers {
		names = append(names, d.node.PeerName(p.id))
	}
	return strings.Join(names, ", ")
}

// begin runs f on a goroutine of its own, and returns true, unless the directory has been stopped.
func (d *directory) begin(f func()) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.over != nil {
		return false
	}
	d.failing.Go(f)
	return true
}

// stop refuses new exchanges, and returns the existing ones.
func (d *directory) stop(err error) []*Exchange {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.over == nil {
		d.over = err
		close(d.ended)
	}
	clear(d.offers)
	d.wake()
	return slices.Collect(maps.Values(d.all))
}

// remove removes the names of an exchange; later messages about it are ignored. mu is held.
func (d *directory) remove(names []name) {
	for _, n := range names {
		delete(d.all, n)
	}
	d.wake()
}

// send sends n to a peer.
func (d *directory) send(id int, n *note) error {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Request, m.Push, m.Head, m.Timestamp = id, true, true, van.Single, d.customer.Skip(1)
	m.AppID, m.CustomerID = app, app
	m.Body = n.append(m.Body)
	return d.node.Send(m)
}

// offered stores an offer. mu is held.
func (d *directory) offered(of name, n *note) error {
	if d.all[of] != nil || d.offers[of] != nil {
		return fmt.Errorf("%w: exchange %d was offered before", van.ErrMalformed, of.id)
	}
	count := 0
	for k := range d.offers {
		if k.worker == of.worker {
			count++
		}
	}
	if count >= maxOffers {
		d.failing.Go(func() {
			_ = d.send(of.worker, &note{verb: verbOver, id: of.id, text: "too many exchanges are offered that the server has not prepared"})
		})
		return fmt.Errorf("%w: %d exchanges are offered that this server has not prepared", van.ErrQueueFull, count)
	}
	d.offers[of] = n
	d.wake()
	return nil
}

// offersOf returns the offers of a worker. mu is held.
func (d *directory) offersOf(p *peer) (l []*note) {
	for k, n := range d.offers {
		if k.worker == p.id {
			l = append(l, n)
		}
	}
	return l
}

// alike returns an error if p has prepared the exchange for streams and this node for hosts, or the reverse.
func (d *directory) alike(x *Exchange, p *peer, n *note) error {
	if n.host == (x.host != nil) {
		return nil
	}
	how := map[bool]string{false: "in streams", true: "by hosts"}
	return fmt.Errorf("%w: %s has prepared it %s, and this node %s", van.ErrInvalid, d.node.PeerName(p.id), how[n.host], how[!n.host])
}

// unwait removes x from the exchanges that wait for offers. Later ones with the same keys take its position. mu is
// held.
func (d *directory) unwait(x *Exchange) {
	if i := slices.Index(d.waiting, x); i >= 0 {
		d.waiting = slices.Delete(d.waiting, i, i+1)
		d.wake()
	}
}
