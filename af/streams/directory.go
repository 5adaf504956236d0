package streams

// What a node knows of exchanges: those that there are, those that workers offer, and who waits for offers.

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

// directory is what the exchanges of a node have in common. mu guards what follows it, and of each exchange and of its
// peers what says so.
type directory struct {
	node     cluster.App
	customer *cluster.Customer
	last     atomic.Uint64 // id of an exchange

	mu       sync.Mutex
	all      map[name]*Exchange
	offers   map[name]*note // to this server, not taken yet
	waiting  []*Exchange    // which this server prepares and has not matched, in the order of the calls
	changed  chan struct{}  // closed when offers, or what is known of one of all, have changed
	over     error          // why there are no exchanges any more
	watching bool
	ended    chan struct{} // closed when over is there

	failing sync.WaitGroup // goroutines that end exchanges, or ask the device; none begins when over is set
}

// name names an exchange: ids are those of workers.
type name struct {
	worker int // node id
	id     uint64
}

// maxOffers is how many exchanges a worker may offer which a server has not prepared.
const maxOffers = 64

// wake makes those who prepare look again. mu is held.
func (d *directory) wake() {
	close(d.changed)
	d.changed = make(chan struct{})
}

// names names peers, for errors.
func (d *directory) names(peers []*peer) string {
	var names []string
	for _, p := range peers {
		names = append(names, d.node.PeerName(p.id))
	}
	return strings.Join(names, ", ")
}

// begin has f run on a goroutine of its own, unless there are no exchanges any more. It tells which.
func (d *directory) begin(f func()) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.over != nil {
		return false
	}
	d.failing.Go(f)
	return true
}

// stop lets no exchanges begin, and returns those that there are.
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

// forget makes names those of no exchange that peers may speak of. mu is held.
func (d *directory) forget(names []name) {
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

// offered keeps an offer. mu is held.
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

// offersOf are the offers of a worker. dir.mu is held.
func (d *directory) offersOf(p *peer) (l []*note) {
	for k, n := range d.offers {
		if k.worker == p.id {
			l = append(l, n)
		}
	}
	return l
}

// alike refuses an exchange that p has prepared to be made in another way.
func (d *directory) alike(x *Exchange, p *peer, n *note) error {
	if n.host == (x.host != nil) {
		return nil
	}
	how := map[bool]string{false: "in streams", true: "by hosts"}
	return fmt.Errorf("%w: %s has prepared it %s, and this node %s", van.ErrInvalid, d.node.PeerName(p.id), how[n.host], how[!n.host])
}

// unwait takes x out of those that wait for offers; later ones with its keys move up. dir.mu is held.
func (d *directory) unwait(x *Exchange) {
	if i := slices.Index(d.waiting, x); i >= 0 {
		d.waiting = slices.Delete(d.waiting, i, i+1)
		d.wake()
	}
}
