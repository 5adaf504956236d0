package sim

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/van"
)

// Net is the network of a cluster. One lock makes the order of all that happens one.
type Net struct {
	seed seed
	tr   plan.Transport
	tl   *timeline
	base time.Time

	mu        sync.Mutex
	listeners map[string]*node // by address
	nodes     []*node
	links     map[pair]*link
	serials   map[string]int // connections of two processes, by their names
	ports     int
	lossy     bool // start-up is over: messages may be lost
	closed    bool
	sent      int
	fat       func(who, what string) // called when a node holds more than its budget
	storm     func()                 // called when more is sent than anything can explain
}

// maxSent is how many messages a run may need.
const maxSent = 300_000

// tooMuch tells that v holds more than its budget, once.
func (n *Net) tooMuch(v *node, what string) {
	if !v.over.Swap(true) && n.fat != nil {
		n.fat(v.name, what)
	}
}

// pair is two nodes of a plan, in order.
type pair struct{ a, b plan.Node }

func pairOf(a, b plan.Node) pair {
	if b < a {
		a, b = b, a
	}
	return pair{a, b}
}

// link is the faults of the link between two nodes.
type link struct {
	cut       int // number of the cut, 0 without
	cuts      int
	began     time.Duration // when the last one did
	healed    time.Duration // when it ended
	bandwidth int64
}

const (
	defaultDelay   = 100 * time.Microsecond
	defaultSilence = 20 * time.Second
	firstRetry     = 50 * time.Millisecond
	lastRetry      = 2 * time.Second
	maxLinger      = 2 * time.Second // of a node that leaves
	firstPort      = 20000
)

func newNet(s seed, tr plan.Transport, tl *timeline) *Net {
	return &Net{seed: s.of("net"), tr: tr, tl: tl, base: time.Now(), listeners: map[string]*node{}, links: map[pair]*link{},
		serials: map[string]int{}, ports: firstPort}
}

// now is the time since the beginning.
func (n *Net) now() time.Duration { return time.Since(n.base) }

func (n *Net) note(who, what string) { n.tl.add(entry{at: n.now(), who: who, what: what}) }

func (n *Net) noteMsg(who, what string, m *van.Message) {
	n.tl.add(entry{at: n.now(), who: who, what: what, msg: true, meta: summaryOf(m)})
}

// after calls f, which may take mu, unless the network has ended.
func (n *Net) after(d time.Duration, f func()) {
	time.AfterFunc(max(d, 0), func() {
		n.mu.Lock()
		closed := n.closed
		n.mu.Unlock()
		if !closed {
			f()
		}
	})
}

func (n *Net) link(a, b plan.Node) *link {
	p := pairOf(a, b)
	l := n.links[p]
	if l == nil {
		l = &link{bandwidth: n.tr.Bandwidth}
		n.links[p] = l
	}
	return l
}

// conn is a connection that from has dialled, and dials again when it breaks.
type conn struct {
	n        *Net
	from     *node
	peer     int // whom it serves; changed by Rename
	addr     string
	name     string
	seed     seed
	senderID int
	ident    string // routing id with which it is dialled
	route    string // routing id of the peer

	state   connState
	to      *node // while up
	tries   int
	attempt int // timers of earlier attempts compare it
	pending []*packet
	control []*packet // sent at this time, see inOrder
	fwd     *flow     // while up
	back    *flow
	lost    bool // it broke and has not been restored
	idle    bool // it is not dialed before the first message
}

type connState uint8

const (
	dialing connState = iota
	up
	leaving // no new messages, but sent ones leave
	ended
)

// flow is one direction of a connection that stands.
type flow struct {
	c       *conn
	back    bool
	seed    seed
	last    time.Duration // arrival of the latest
	free    time.Duration // when the link can take more
	seq     uint64
	stalled []*packet     // reached a cut or a stopped process
	until   time.Duration // messages sent over a cut link are not repeated before, see Transport.Backoff
	bytes   int64         // sent and not taken by the receiver
}

func (f *flow) name() string {
	if f.back {
		return f.c.name + " (back)"
	}
	return f.c.name
}

// ends returns the sender and the receiver. c.n.mu is held.
func (f *flow) ends() (from, to *node) {
	if f.back {
		return f.c.to, f.c.from
	}
	return f.c.from, f.c.to
}

// dial tries to connect. mu is held.
func (c *conn) dial(wait time.Duration) {
	c.attempt++
	attempt := c.attempt
	c.tries++
	jitter := c.seed.of("dial").at(uint64(attempt)).upTo(time.Millisecond)
	c.n.after(wait+c.n.tr.Delay.Or(defaultDelay)+jitter, func() { c.try(attempt) })
}

// retry is when the next attempt follows.
func (c *conn) retry() time.Duration { return min(firstRetry<<min(c.tries, 6), lastRetry) }

var (
	errDisconnected = errors.New("its connection was closed")
	errSilent       = fmt.Errorf("its connection was closed: %w", syscall.ETIMEDOUT)
	errRefused      = fmt.Errorf("no connection could be made: %w", syscall.ECONNREFUSED)
)

// try is an attempt to connect.
func (c *conn) try(attempt int) {
	n := c.n
	n.mu.Lock()
	if c.attempt != attempt || c.state == up || c.state == ended || c.from.dead {
		n.mu.Unlock()
		return
	}
	to := n.listeners[c.addr]
	switch {
	case c.from.frozen:
		c.dial(200 * time.Millisecond)
	case to == nil:
		c.dial(c.retry())
		id := c.peer
		n.mu.Unlock()
		c.from.tell(id, false, errRefused)
		return
	case n.link(c.from.who, to.who).cut != 0 || to.frozen || to.ghost:
		c.dial(time.Second)
	default:
		c.establish(to)
		id := c.peer
		n.mu.Unlock()
		c.from.tell(id, true, nil)
		return
	}
	n.mu.Unlock()
}

// establish makes the connection stand. mu is held.
func (c *conn) establish(to *node) {
	n := c.n
	c.to, c.tries, c.lost = to, 0, false
	serial := n.serials[c.from.name+">"+to.name]
	n.serials[c.from.name+">"+to.name]++
	c.name = c.from.name + " > " + to.name + " #" + strconv.Itoa(serial)
	s := n.seed.of(c.name)
	c.fwd = &flow{c: c, seed: s.of("forth")}
	c.back = &flow{c: c, back: true, seed: s.of("back")}
	n.note(c.name, "connected")
	if old := to.routes[c.ident]; old != nil && old != c && c.ident != "" {
		old.breakOff(false, "another connection has its routing id")
	}
	if c.ident != "" {
		to.routes[c.ident] = c
	}
	to.accepted[c] = true
	leaving := c.state == leaving
	if !leaving {
		c.state = up
	}
	for _, p := range c.pending {
		c.fwd.send(p)
	}
	c.pending = nil
	if leaving {
		c.fwd.send(&packet{fin: true})
	}
}

// breakOff ends a connection that is up, at both ends at once: messages in flight are
// lost, the dialler gets an event and dials again. mu is held.
func (c *conn) breakOff(silent bool, why string) {
	if c.to == nil {
		return
	}
	c.n.note(c.name, "broken: "+why)
	c.detach()
	if c.state != up {
		c.state = ended
		return
	}
	c.state = dialing
	c.lost = true
	c.dial(firstRetry + c.seed.of("again").at(uint64(c.attempt)).upTo(firstRetry))
	cause := errDisconnected
	if silent {
		cause = errSilent
	}
	from, id := c.from, c.peer
	soon := time.Microsecond + c.seed.of("soon").at(uint64(c.attempt)).upTo(10*time.Microsecond)
	c.n.after(soon, func() { from.tell(id, false, cause) })
}

// detach releases the remote end and the messages in flight. mu is held.
func (c *conn) detach() {
	to := c.to
	c.to = nil
	delete(to.accepted, c)
	if to.routes[c.ident] == c {
		delete(to.routes, c.ident)
	}
	c.fwd.drop()
	c.back.drop()
	c.fwd, c.back = nil, nil
	c.attempt++
}

// end closes the connection from the dialler's side. Messages sent before leave if
// linger is not 0. mu is held.
func (c *conn) end(linger time.Duration) {
	c.sendControl(func(*packet) bool { return true })
	switch {
	case c.state == leaving || c.state == ended:
	case c.to != nil:
		c.state = leaving
		c.fwd.send(&packet{fin: true})
		if c.n.tr.Backoff {
			c.abandon(min(linger, maxLinger))
		}
	case linger > 0 && len(c.pending) > 0 && !c.lost:
		c.state = leaving
		c.n.after(linger, func() {
			c.n.mu.Lock()
			defer c.n.mu.Unlock()
			if c.to == nil {
				c.giveUp()
			}
		})
	default:
		c.giveUp()
	}
}

// abandon drops the messages that the other side's system does not have after linger. mu is held.
func (c *conn) abandon(linger time.Duration) {
	f := c.fwd
	c.n.after(linger, func() {
		c.n.mu.Lock()
		defer c.n.mu.Unlock()
		if c.fwd == f && f.backsOff() && len(f.stalled) > 0 {
			c.breakOff(false, "its dialler has gone")
		}
	})
}

// giveUp drops the queued messages. mu is held.
func (c *conn) giveUp() {
	c.state = ended
	c.attempt++
	for _, p := range c.pending {
		p.drop()
	}
	c.pending = nil
}

// inOrder sends a control message after all other messages of the node at this time, and control messages of one time in the
// order of their timestamps, acknowledgements last. With PS_RESEND goroutines of a node send, repeat and acknowledge messages
// at the same time, and run in any order. mu is held.
func (c *conn) inOrder(p *packet) {
	p.made = c.n.now()
	if c.control = append(c.control, p); len(c.control) == 1 {
		c.controlSoon()
	}
}

func (c *conn) controlSoon() {
	c.n.after(1, func() {
		c.n.mu.Lock()
		defer c.n.mu.Unlock()
		now := c.n.now()
		c.sendControl(func(p *packet) bool { return p.made < now })
		if len(c.control) > 0 {
			c.controlSoon()
		}
	})
}

// sendControl sends the due messages of inOrder. mu is held.
func (c *conn) sendControl(due func(*packet) bool) {
	var all, rest []*packet
	for _, p := range c.control {
		if due(p) {
			all = append(all, p)
		} else {
			rest = append(rest, p)
		}
	}
	c.control = rest
	ack := func(p *packet) int {
		if p.msg.Control.Cmd == van.Ack {
			return 1
		}
		return 0
	}
	slices.SortStableFunc(all, func(a, b *packet) int {
		x, y := &a.msg, &b.msg
		return cmp.Or(cmp.Compare(a.made, b.made), cmp.Compare(ack(a), ack(b)), cmp.Compare(x.Timestamp, y.Timestamp),
			cmp.Compare(x.Control.MsgSig, y.Control.MsgSig), cmp.Compare(x.Control.Cmd, y.Control.Cmd))
	})
	for _, p := range all {
		if c.state == leaving || c.state == ended || c.from.dead {
			p.drop()
		} else {
			c.forward(p)
		}
	}
}

// forward sends p, or keeps it until the connection stands. mu is held.
func (c *conn) forward(p *packet) {
	if c.to != nil && c.state == up {
		c.fwd.send(p)
		return
	}
	c.pending = append(c.pending, p)
}

// unsent is how many bytes wait in the direction of fwd. mu is held.
func (c *conn) unsent() (sum int64) {
	for _, p := range c.pending {
		sum += p.size
	}
	if c.fwd != nil {
		sum += c.fwd.bytes
	}
	return sum
}

// send puts p on its way. mu is held.
func (f *flow) send(p *packet) {
	n := f.c.n
	from, to := f.ends()
	f.seq++
	if n.sent++; n.sent == maxSent {
		n.closed = true
		go n.storm()
	}
	s := f.seed.at(f.seq)
	p.flow = f
	p.size = int64(p.msg.PayloadLen()) + 300
	f.bytes += p.size
	t := &n.tr
	if !p.fin && n.lossy && from.ready && to.ready {
		if s.of("loss").chance(t.Loss) {
			n.noteMsg(f.name(), "lost", &p.msg)
			f.bytes -= p.size
			p.drop()
			return
		}
		if s.of("twice").chance(t.Duplicate) {
			f.carry(p.clone(), s.of("copy"))
		}
	}
	f.carry(p, s)
	if !p.fin && n.lossy && s.of("break").chance(t.Break) {
		c := f.c
		n.after(s.of("when").upTo(time.Millisecond), func() {
			n.mu.Lock()
			defer n.mu.Unlock()
			if c.to != nil {
				c.breakOff(false, "by chance")
			}
		})
	}
}

// carry lets p arrive when the link has brought it there. mu is held.
func (f *flow) carry(p *packet, s seed) {
	n := f.c.n
	from, to := f.ends()
	now := n.now()
	depart := max(now, f.free)
	if bw := n.link(from.who, to.who).bandwidth; bw > 0 {
		f.free = depart + time.Duration(p.size*int64(time.Second)/bw)
		depart = f.free
	}
	at := depart + n.tr.Delay.Or(defaultDelay) + s.of("jitter").upTo(max(n.tr.Jitter.D(), 20*time.Microsecond))
	if at <= f.last {
		at = f.last + 1 + s.of("step").upTo(time.Microsecond)
	}
	f.last = at
	n.after(at-now, func() { f.arrive(p) })
}

// arrive is the end of p's way.
func (f *flow) arrive(p *packet) {
	n := f.c.n
	n.mu.Lock()
	_, to := f.ends()
	switch {
	case f.c.fwd != f && f.c.back != f: // it broke meanwhile
		p.drop()
	case to.dead || to.ghost: // the kernel of a ghost has taken it
		p.drop()
	case f.backsOff() || to.frozen || len(f.stalled) > 0:
		f.stalled = append(f.stalled, p)
	default:
		f.take(p)
		return
	}
	n.mu.Unlock()
}

// take gives p to its receiver. It unlocks mu.
func (f *flow) take(p *packet) {
	n := f.c.n
	_, to := f.ends()
	if p.fin {
		c := f.c
		lost, id := f.finish(), c.peer
		n.mu.Unlock()
		if lost {
			c.from.tell(id, false, errDisconnected)
		}
		return
	}
	if p.lent && p.gone {
		n.noteMsg(f.name(), "given up", &p.msg)
		p.drop()
		n.mu.Unlock()
		return
	}
	p.land()
	p.sent()
	if err := p.unpack(); err != nil {
		panic(err) // of WriteDirectory
	}
	n.noteMsg(f.name(), "came", &p.msg)
	p.msg.Sender = p.sender
	to.take(p)
	n.mu.Unlock()
	to.ring()
}

// finish carries out the end of the connection that the other side has announced. It tells
// whether the dialler has lost a connection that it wants. mu is held.
func (f *flow) finish() bool {
	c := f.c
	if c.to == nil {
		return false
	}
	c.n.note(f.name(), "closed")
	c.detach()
	if !f.back || c.state != up {
		c.state = ended
		return false
	}
	c.state = dialing
	c.lost = true
	c.dial(firstRetry + c.seed.of("again").at(uint64(c.attempt)).upTo(firstRetry))
	return true
}

// drop drops the messages in flight. mu is held.
func (f *flow) drop() {
	for _, p := range f.stalled {
		p.drop()
	}
	f.stalled = nil
	f.bytes = 0
}

// backsOff tells whether nothing crosses the link, or nothing is sent over it. mu is held.
func (f *flow) backsOff() bool {
	n := f.c.n
	from, to := f.ends()
	return n.link(from.who, to.who).cut != 0 || n.now() < f.until
}

// resume sends stalled messages on, unless their receiver is stopped: then wake does it. mu is held.
func (f *flow) resume() {
	if _, to := f.ends(); to.frozen || f.backsOff() {
		return
	}
	stalled := f.stalled
	f.stalled = nil
	for _, p := range stalled {
		f.seq++
		f.carry(p, f.seed.at(f.seq).of("again"))
	}
}

// cut stops all traffic over the link of two nodes.
func (n *Net) cut(a, b plan.Node) {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.link(a, b)
	if l.cut != 0 {
		return
	}
	l.cuts++
	l.cut, l.began = l.cuts, n.now()
	n.note(string(a)+" - "+string(b), "cut")
	cut := l.cut
	wait := n.tr.Silence.Or(defaultSilence) + n.seed.of("silence").of(string(a)+string(b)).at(uint64(cut)).upTo(time.Second)
	n.after(wait, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		if l.cuts != cut {
			return
		}
		n.across(a, b, func(c *conn) {
			if c.fwd.backsOff() || c.back.backsOff() {
				c.breakOff(true, "nothing has come for a while")
			}
		})
	})
}

// apart tells whether the link of two nodes was cut at some time after t.
func (n *Net) apart(a, b plan.Node, t time.Duration) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.link(a, b)
	return l.cuts > 0 && (l.cut != 0 || l.healed >= t)
}

// across calls f for each connection that stands between two nodes. mu is held.
func (n *Net) across(a, b plan.Node, f func(*conn)) {
	for _, v := range n.nodes {
		if v.who != a && v.who != b {
			continue
		}
		for _, c := range v.list() {
			if c.to != nil && pairOf(v.who, c.to.who) == pairOf(a, b) {
				f(c)
			}
		}
	}
}

// heal ends a cut.
func (n *Net) heal(a, b plan.Node) {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.link(a, b)
	if l.cut == 0 {
		return
	}
	l.cut, l.healed = 0, n.now()
	took := l.healed - l.began
	n.note(string(a)+" - "+string(b), "healed")
	n.across(a, b, func(c *conn) {
		for _, f := range []*flow{c.fwd, c.back} {
			if n.tr.Backoff {
				f.backOff(f.seed.of("backoff").at(uint64(l.cuts)).upTo(took))
			} else {
				f.resume()
			}
		}
	})
}

// backOff resumes after a time, if the connection stands then. mu is held.
func (f *flow) backOff(wait time.Duration) {
	n := f.c.n
	f.until = n.now() + wait
	n.after(wait, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		if f.c.fwd == f || f.c.back == f {
			f.resume()
		}
	})
}

// breakLink breaks all connections between two nodes.
func (n *Net) breakLink(a, b plan.Node) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.across(a, b, func(c *conn) { c.breakOff(false, "the plan says so") })
}

// slow sets the bytes per second of a link; 0 restores them.
func (n *Net) slow(a, b plan.Node, bandwidth int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if bandwidth == 0 {
		bandwidth = n.tr.Bandwidth
	}
	n.link(a, b).bandwidth = bandwidth
}

// calm ends everything that is wrong with the network.
func (n *Net) calm() {
	n.mu.Lock()
	var pairs []pair
	for p, l := range n.links {
		l.bandwidth = n.tr.Bandwidth
		if l.cut != 0 {
			pairs = append(pairs, p)
		}
	}
	n.lossy = false
	n.mu.Unlock()
	for _, p := range pairs {
		n.heal(p.a, p.b)
	}
}

// close ends the network: nothing moves any more.
func (n *Net) close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.closed = true
}
