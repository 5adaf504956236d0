package resend

// The kept messages by key and by the time of the next try, and their peers.

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/wake"
	"github.com/stepaf/stepaf-go/van"
)

// table holds the entries and their peers.
type table struct {
	timeout time.Duration // time until an entry is due

	mu              sync.Mutex
	byKey           map[key]*entry // the first entry of each key; others follow by entry.behind
	count           int            // number of all entries
	first           *entry         // of the list ordered by the time of the next try
	last            *entry
	sending         map[*entry]int // entries with running or imminent transmits, and how many. They may have left the table since
	conns           map[int]string // peers and their addresses
	unresponsive    map[int]bool   // peers to which a message has timed out, each with a probe among the entries
	anyUnresponsive atomic.Bool    // len(quiet) > 0
	closed          bool           // no entry is added any more
	none            chan struct{}  // if not nil, closed when count falls to 0
	wake            chan struct{}  // a token when the list stops being empty
}

// add adds e. If first is true, e is the first with its key and the caller must transmit it at once. If open is
// false, the table is closed and e was not added.
func (t *table) add(e *entry) (first, open bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return false, false
	}
	e.inTable = true
	t.count++
	if head := t.byKey[e.key]; head != nil {
		for head.behind != nil {
			head = head.behind
		}
		head.behind = e
		return false, true
	}
	t.byKey[e.key] = e
	t.scheduleLocked(e)
	t.sending[e]++
	return true, true
}

// acknowledged removes the entry that ack names. Between our nodes an acknowledgement
// carries the incarnations of the acknowledged message in reverse order, since a message of
// another process under the same id may have had the same signature.
func (t *table) acknowledged(ack *van.Message) (e, next *entry) {
	by, of := ack.Incarnations()
	t.mu.Lock()
	defer t.mu.Unlock()
	e = t.byKey[key{ack.Sender, ack.Control.MsgSig}]
	if e == nil || (of != 0 && e.from != 0 && of != e.from || by != 0 && e.to != 0 && by != e.to) && !failpoint.On("incarnation") {
		return nil, nil
	}
	next, _ = t.removeLocked(e)
	return e, next
}

// released removes the oldest barrier request that the release m can belong to: a request of the customer that m names, or
// else of any customer. m names the customer of the last request, which may be another node's. A node has one open request
// of each customer.
func (t *table) released(m *van.Message) (oldest, next *entry) {
	t.mu.Lock()
	defer t.mu.Unlock()
	named := func(e *entry) bool { return e.customer == m.CustomerID }
	for _, e := range t.byKey {
		switch fits := e.key.peer == m.Sender && e.barrier == m.Control.Cmd; {
		case !fits:
		case oldest == nil, named(e) && !named(oldest), named(e) == named(oldest) && e.start.Before(oldest.start):
			oldest = e
		}
	}
	if oldest != nil {
		next, _ = t.removeLocked(oldest)
	}
	return oldest, next
}

// connect records the address of peer, and returns its previous one.
func (t *table) connect(peer int, addr string) (old string, again bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	old, again = t.conns[peer]
	t.conns[peer] = addr
	delete(t.unresponsive, peer)
	return old, again
}

func (t *table) disconnect(peer int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.conns, peer)
	delete(t.unresponsive, peer)
}

func (t *table) rename(old, peer int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if addr, ok := t.conns[old]; ok {
		t.conns[peer] = addr
		delete(t.conns, old)
	}
}

// scheduleLocked appends e to the list, which keeps it in order: the timeout is the
// same for all.
func (t *table) scheduleLocked(e *entry) {
	e.tries++
	e.due = time.Now().Add(t.timeout)
	e.queued = true
	e.prev, e.next = t.last, nil
	if t.last == nil {
		t.first = e
		wake.Put(t.wake)
	} else {
		t.last.next = e
	}
	t.last = e
}

func (t *table) unlinkLocked(e *entry) {
	if !e.queued {
		return
	}
	e.queued = false
	if e.prev == nil {
		t.first = e.next
	} else {
		e.prev.next = e.next
	}
	if e.next == nil {
		t.last = e.prev
	} else {
		e.next.prev = e.prev
	}
	e.prev, e.next = nil, nil
}

// remove removes e, the first of its key. It returns false if e has been removed
// already. Otherwise the table's reference to e passes to the caller, which must pass
// next, if not nil, to launch.
func (t *table) remove(e *entry) (next *entry, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.removeLocked(e)
}

func (t *table) removeLocked(e *entry) (next *entry, ok bool) {
	if !e.inTable {
		return nil, false
	}
	e.inTable = false
	t.unlinkLocked(e)
	if next = e.behind; next != nil {
		e.behind = nil
		t.byKey[e.key] = next
		next.refs.Add(1)
		t.scheduleLocked(next)
		t.sending[next]++
	} else {
		delete(t.byKey, e.key)
	}
	t.fewerLocked(1)
	return next, true
}

func (t *table) fewerLocked(n int) {
	if t.count -= n; t.count == 0 && t.none != nil {
		close(t.none)
		t.none = nil
	}
}

// take removes and returns all entries of peer, or of all peers.
func (t *table) take(peer int, all bool) []*entry {
	t.mu.Lock()
	defer t.mu.Unlock()
	var taken []*entry
	if delete(t.unresponsive, peer); all {
		clear(t.unresponsive)
	}
	for k, e := range t.byKey {
		if !all && k.peer != peer {
			continue
		}
		delete(t.byKey, k)
		for e != nil {
			next := e.behind
			e.behind, e.inTable = nil, false
			t.unlinkLocked(e)
			taken = append(taken, e)
			e = next
		}
	}
	if len(taken) > 0 {
		t.fewerLocked(len(taken))
	}
	return taken
}

// removeAny is remove for an entry that may follow others of its key.
func (t *table) removeAny(e *entry) (next *entry, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	before := t.byKey[e.key]
	if before == e || !e.inTable {
		return t.removeLocked(e)
	}
	for before.behind != e {
		before = before.behind
	}
	before.behind, e.behind, e.inTable = e.behind, nil, false
	t.fewerLocked(1)
	return nil, true
}

// sent ends a transmit of e.
func (t *table) sent(e *entry) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.sending[e]--; t.sending[e] == 0 {
		delete(t.sending, e)
	}
}

// canceled returns the entries of q that the node with id self has kept or is sending, each with a reference.
func (t *table) canceled(q *van.Requests, self int) (found []*entry) {
	var m van.Meta
	m.Reset()
	m.Request, m.AppID, m.CustomerID = true, q.App, q.Customer
	t.mu.Lock()
	defer t.mu.Unlock()
	for e := range t.sending {
		if !e.inTable && q.Has(&e.msg.Meta) {
			e.refs.Add(1)
			found = append(found, e)
		}
	}
	if t.count == 0 {
		return found
	}
	for peer := range t.conns {
		for m.Timestamp = q.First; m.Timestamp-q.First < q.Count; m.Timestamp++ {
			for e := t.byKey[key{peer, signature(&m, self, peer)}]; e != nil; e = e.behind {
				if q.Has(&e.msg.Meta) {
					e.refs.Add(1)
					found = append(found, e)
				}
			}
		}
	}
	return found
}

// responded records a message of peer, and reports whether the peer was unresponsive.
func (t *table) responded(peer int) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	back := t.unresponsive[peer]
	delete(t.unresponsive, peer)
	t.anyUnresponsive.Store(len(t.unresponsive) > 0)
	return back
}
