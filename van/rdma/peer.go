package rdma

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// peer is the way to one node: messages that wait, and the connection while it
// stands. One goroutine (see dial.go) makes the connection and makes it again.
type peer struct {
	v    *rvan
	id   atomic.Int32
	node van.Node
	addr netip.AddrPort
	// incarnation is that of the process that the table names; 0 when it does not.
	incarnation uint32
	stop        context.CancelFunc
	ends        chan struct{} // closed when the goroutine has ended

	native atomic.Bool // the last connection was to a native node
	tag    uint32      // with the number of a control message: of this peer

	inbound atomic.Pointer[inbound] // the peer's connection to this node

	notifying sync.Mutex // held while the watcher is told of a connection that may end meanwhile

	mu           sync.Mutex
	sender       *rendezvous.Sender[*outgoing]
	link         *link // nil while there is none
	lost         bool  // there was a connection, and it broke
	connects     int   // connections there have been
	detached     bool  // it is not in the table any more: its connection is not made again
	connecting   bool  // connect requests are with the peer,
	connectingAs int   // as those of this node id
	ended        bool
	inboundDown  *inboundDown // nil while both connections stand, or this node's does not
	free         []*outgoing
	unsent       int // bytes of payload that wait
	// lastNumber is the number of the last control message.
	lastNumber uint32
	// tickedAt is when Sender.Tick was last called.
	tickedAt uint64
	waitDue  conn.DueItem // for messages, and returned slots, that wait
	pulls    map[pullKey]pullDestination
}

// link is one standing connection.
type link struct {
	*conn.SendQueue[sentMessage]
	ids     []verbs.ID
	host    *device
	dialect outboundDialect
	native  bool // a native node
	// numbered: control messages have numbers, so that those that may have arrived can be
	// sent again.
	numbered    bool
	connectedAs int // the id that this node had when it connected
	epoch       uint32
	probeDue    conn.DueItem
	splits      uint64 // split messages so far
	seq         uint64 // of control messages that have numbers
	failed      chan error
	uncertain   []*inbound // whose credits may have been lost with this link
	once        sync.Once
}

// fail says that the connection has broken. Only the first cause counts.
func (l *link) fail(err error) { l.once.Do(func() { l.failed <- err }) }

// pullKey names a pull request in flight.
type pullKey struct {
	ts            int32
	app, customer int16
	key           uint64
}

// pullDestination is where the answer to a pull request is to be put.
type pullDestination struct {
	mem      backend.Mem
	region   *conn.Region
	stepmesh bool // the peer is a StepMesh node
	link     *link
}

func keyOf(m *van.Meta) pullKey {
	return pullKey{m.Timestamp, int16(m.AppID), int16(m.CustomerID), m.Key}
}

// outgoing is a message on its way out.
type outgoing struct {
	meta          []byte
	oneShot       bool // a control or simple-app message
	control       bool
	number        uint32 // of control messages
	request, push bool
	singleKey     bool // of StepMesh form: one key, which the meta repeats
	key           uint64
	into          backend.Mem
	pullKey       pullKey
	direct        bool // the value goes to addr with rkey
	addr          uint64
	rkey          uint32
	pullLen       int  // of a pull request's answer
	revoked       bool // nobody waits for the answer any more
	of            requestOf
	recalled      bool // the lent frames are the caller's again

	frames int
	lens   [van.MaxFrames]uint32
	data   [van.MaxFrames]backend.Mem // lent by the caller; empty where copied
	copies []byte                     // of small frames, each aligned
	done   van.Completion
	size   int  // payload
	unsent int  // of it, in the sum of those that wait
	inMeta bool // all frames were copied, and fit behind the meta
}

// smallPayload is the payload up to which frames are copied by Send: it costs less
// than looking after the caller's memory.
const smallPayload = stageEach - metaRoom

// stageEach is the staging memory of a message: its meta, up to metaRoom bytes, and
// its copied frames.
const (
	stageEach = conn.CellSize
	metaRoom  = 512
)

// small is the length below which a frame of a larger payload is copied.
const small = 64

// Send implements van.Van.
func (v *rvan) Send(msg *van.Message) error {
	p := (*v.peers.Load())[msg.Receiver]
	if p == nil {
		if v.closed.Load() {
			return v.sendError(msg, nil, van.ErrClosed)
		}
		return v.sendError(msg, nil, van.ErrUnknownPeer)
	}
	now := clock.Now()
	if msg.Request || msg.IsControl() {
		msg.RequestTrace.PostSend = now
	} else {
		msg.ResponseTrace.PostSend = now
	}
	if err := msg.Validate(); err != nil {
		return v.sendError(msg, p, err)
	}
	size := msg.PayloadLen()
	if size > maxData {
		return v.sendError(msg, p, fmt.Errorf("%w: %d bytes of payload, want at most %d", van.ErrInvalid, size, maxData))
	}
	p.mu.Lock()
	done, err := p.send(msg, size)
	p.mu.Unlock()
	if err != nil {
		return v.sendError(msg, p, err)
	}
	if done {
		msg.Done.Sent()
	}
	v.stats.sent(msg.EncodedLen() + size)
	if msg.IsControl() {
		v.wakeIdleLoops()
	}
	return nil
}

// send hands msg to the rendezvous. done says that its frames have been copied.
// p.mu is held.
func (p *peer) send(msg *van.Message, size int) (done bool, err error) {
	data := !msg.IsControl() && !msg.SimpleApp
	switch {
	case p.ended:
		return false, van.ErrClosed
	case p.lost && data:
		return false, fmt.Errorf("%w: its connection broke and has not been restored", van.ErrPeerLost)
	case data && p.sender.Waiting() > 0 && p.unsent+size > p.v.cfg.SendBudget && p.v.cfg.SendBudget > 0 && !failpoint.On("send-budget"):
		if n := p.v.stats.refusedSends.Add(1); n&(n-1) == 0 {
			p.v.log.Warn("rdma: a message is refused: too much waits for its peer", "peer", p.name(), "bytes that wait", p.unsent, "STEPAF_SEND_BUDGET", p.v.cfg.SendBudget, "refused so far", n)
		}
		return false, fmt.Errorf("%w: %d bytes wait, with %d more that is over STEPAF_SEND_BUDGET, %d", van.ErrQueueFull, p.unsent, size, p.v.cfg.SendBudget)
	case p.sender.Waiting() >= p.v.cfg.RDMAMaxConcurrWR:
		return false, fmt.Errorf("%w: %d messages wait (BYTEPS_RDMA_MAX_CONCURR_WR)", van.ErrQueueFull, p.sender.Waiting())
	}
	var o *outgoing
	if n := len(p.free); n > 0 {
		o, p.free = p.free[n-1], p.free[:n-1]
	} else {
		o = &outgoing{}
	}
	if err := o.fill(msg, size); err != nil {
		p.recycle(o)
		return false, err
	}
	if p.link != nil {
		if err := p.link.dialect.check(o); err != nil {
			p.recycle(o)
			return false, err
		}
	}
	if o.control {
		p.lastNumber++
		o.number = p.lastNumber
	}
	o.unsent = size
	p.unsent += size
	done = msg.Done != nil && o.done == nil
	idle := p.sender.Waiting() == 0
	err = p.sender.Submit(o)
	if err != nil {
		p.recycle(o)
		return false, fmt.Errorf("%w: %w", van.ErrInvalid, err)
	}
	p.pump()
	if idle && data && p.link != nil && p.sender.Waiting() > 0 && p.link.host.sleeping.Load() {
		p.link.host.dev.Wake() // the loop sleeps too long for tick
	}
	p.flush(msg.More)
	return done, nil
}

// fill takes over what msg has.
func (o *outgoing) fill(msg *van.Message, size int) error {
	n := msg.EncodedLen()
	if n > maxMeta-trailerLen {
		return fmt.Errorf("%w: %d bytes of meta and body, want at most %d", van.ErrInvalid, n, maxMeta-trailerLen)
	}
	if cap(o.meta) < n {
		o.meta = make([]byte, max(n, metaRoom))
	}
	o.meta = o.meta[:n]
	if err := msg.EncodeTo(o.meta); err != nil {
		return err
	}
	control := msg.IsControl() || msg.SimpleApp
	o.control = msg.IsControl()
	o.oneShot, o.request, o.push, o.key = control, msg.Request, msg.Push, msg.Key
	o.frames, o.size, o.lens = msg.Frames, size, [van.MaxFrames]uint32{}
	o.into, o.direct, o.singleKey, o.pullLen, o.revoked = backend.Mem{}, false, false, 0, false
	o.of, o.recalled = requestOf{msg.AppID, msg.CustomerID, msg.Timestamp}, false
	if !control && msg.Frames >= 2 && msg.Keys.Len() == 8 && msg.Keys.OnHost() {
		o.useSingleKeyForm(msg)
	}
	o.copies = o.copies[:0]
	lent := false
	for i := range msg.Frames {
		f := msg.Frame(i)
		o.lens[i], o.data[i] = uint32(f.Len()), backend.Mem{}
		if o.singleKey && i != 1 || f.Len() == 0 {
			continue // the receiver makes them from the meta
		}
		if f.OnHost() && (f.Len() < small || size <= smallPayload-van.MaxFrames*frameAlign) {
			o.copies = append(o.copies, f.Host()...)
			continue
		}
		o.data[i] = f
		lent = true
	}
	if n := o.packedLen(); n > maxData {
		return fmt.Errorf("%w: %d bytes of payload, each frame aligned to %d, want at most %d", van.ErrInvalid, n, frameAlign, maxData)
	}
	if lent {
		o.done = msg.Done
	}
	o.inMeta = !lent && o.frames > 0 && len(o.copies) > 0 && aligned(len(o.meta))+o.packedLen()+trailerLen <= conn.CellSize
	return nil
}

// useSingleKeyForm finds out whether msg has the form that StepMesh can send: one key,
// which the meta repeats, and val_len bytes.
func (o *outgoing) useSingleKeyForm(msg *van.Message) {
	key := le.Uint64(msg.Keys.Host())
	pull := msg.Request && !msg.Push
	vals := msg.Vals.Len() == int(msg.ValLen) || pull && msg.Vals.Len() == 0
	lens := msg.Frames == 2 || msg.Lens.Len() == 4 && msg.Lens.OnHost() && le.Uint32(msg.Lens.Host()) == uint32(msg.ValLen)
	if !vals || !lens || key != msg.Key && msg.Key != 0 {
		return
	}
	// As StepMesh does.
	le.PutUint64(o.meta[metaKey:], key)
	o.singleKey, o.key = true, key
	if pull {
		o.pullLen = int(msg.ValLen)
		if msg.Into.Len() == o.pullLen && msg.Addr == msg.Into.Addr() {
			o.into, o.pullKey = msg.Into, keyOf(&msg.Meta)
		}
	}
	if !msg.Request && !msg.Push && msg.Option != 0 && msg.Vals.Len() > 0 {
		o.direct, o.addr, o.rkey = true, msg.Addr, uint32(msg.Option)
	}
}

func (p *peer) recycle(o *outgoing) {
	p.unsent -= o.unsent
	o.unsent = 0
	o.done, o.into, o.data = nil, backend.Mem{}, [van.MaxFrames]backend.Mem{}
	if len(p.free) < 256 && cap(o.meta) <= 4*metaRoom && cap(o.copies) <= 2*stageEach {
		p.free = append(p.free, o)
	}
}

// flush posts what waits, unless more follows at once. p.mu is held.
func (p *peer) flush(more bool) {
	l := p.link
	if l != nil && p.waiting() {
		l.host.active.Add(&p.waitDue)
	}
	if l == nil || l.Unposted() == 0 || more && l.Unposted() < maxHeld {
		return
	}
	if err := l.Post(); err != nil {
		l.fail(asLost(err))
	}
}

// maxHeld is how many work requests wait for each other at most.
const maxHeld = 24

// Flush implements van.Flusher.
func (v *rvan) Flush(id int) {
	if p := (*v.peers.Load())[id]; p != nil {
		p.mu.Lock()
		p.flush(false)
		p.mu.Unlock()
	}
}

// pump does what the rendezvous says, as long as the link has room. p.mu is held.
func (p *peer) pump() {
	for l := p.link; l != nil && l.HasRoom(); {
		a, ok := p.sender.Next()
		if !ok {
			return
		}
		switch a.Kind {
		case rendezvous.Put:
			p.put(a.Item, a.Slot)
		case rendezvous.Request:
			p.requestSlot(a.Origin, a.Item, a.Need)
		case rendezvous.Drop:
			p.dropOne(a.Item, a.Err)
		}
	}
}

// need says what o needs at its receiver. p.mu is held.
func (p *peer) need(o *outgoing) rendezvous.Need {
	if p.link == nil {
		return rendezvous.Need{OneShot: o.oneShot, Meta: len(o.meta)}
	}
	return p.link.dialect.need(o)
}

// packedLen is the length of the data that is written to the slot.
func (o *outgoing) packedLen() int {
	if o.singleKey {
		return int(o.lens[1])
	}
	n := 0
	for i := range o.frames {
		n = aligned(n) + int(o.lens[i])
	}
	return n
}

// requestSlot sends a slot request. The link has room. p.mu is held.
func (p *peer) requestSlot(origin uint64, o *outgoing, need rendezvous.Need) {
	l := p.link
	id, _, stage, _ := l.Begin()
	s := start{metaLen: uint64(need.Meta), origin: origin}
	l.dialect.request(&s, o, need)
	s.put(stage[:startLen])
	l.Add(id, 0, l.Staged(verbs.SendWR{Op: verbs.OpSendImm, Flags: verbs.Signaled, Imm: immStart}, stage[:startLen]))
	p.flush(false)
}

// dropOne drops a message that waits, and fails the requests that wait for its answer.
// p.mu is held.
func (p *peer) dropOne(o *outgoing, err error) {
	if o.done != nil {
		go o.done.Sent()
	}
	p.failMessage(o, err)
}

// endPull ends a request: msg is the answer. It returns the memory that the answer's
// value was to be put into, if msg means it. A value that is not there yet is copied to it
// if it has its length: here, since with the lock goes the right to write, see Revoke.
func (p *peer) endPull(msg *van.Meta, value []byte) (mem backend.Mem, copied bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !msg.Push {
		k := keyOf(msg)
		if x, ok := p.pulls[k]; ok {
			delete(p.pulls, k)
			if msg.Addr == x.mem.Addr() && int(msg.ValLen) == x.mem.Len() {
				mem = x.mem
				if copied = len(value) > 0 && len(value) == mem.Len() && mem.OnHost(); copied {
					copy(mem.Host(), value)
				}
			}
			x.region.Release()
		}
	}
	if l := p.link; l != nil && l.dialect.answered(p.sender, msg.Key, msg.Push) {
		p.pump()
		p.flush(false)
	}
	return mem, copied
}

// abandonPulls gives up the memory that a StepMesh node, whose connection has
// ended, will not write to any more. again says that it has connected again: that one may
// have been asked already.
func (p *peer) abandonPulls(again bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k, x := range p.pulls {
		if x.stepmesh && !(again && x.link == p.link) {
			delete(p.pulls, k)
			x.region.Release()
		}
	}
}

// takeCredits takes back the slots that the peer has given back.
func (p *peer) takeCredits(t *trailer) (ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link == nil || p.link.epoch != t.epoch {
		return true // of an earlier connection
	}
	ok = true
	for _, i := range t.credits[:t.n] {
		ok = p.sender.Credit(uint32(i)) && ok
	}
	p.returnSlots()
	p.pump()
	p.flush(false)
	return ok
}

// tick is called every few milliseconds while something waits. It tells whether it still
// does.
func (p *peer) tick(now uint64, _ bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link == nil || !p.waiting() {
		return false
	}
	if time.Duration(now-p.tickedAt) >= tickTime { // a loop that hardly sleeps calls it often
		p.tickedAt = now
		p.returnSlots()
		p.sender.Tick()
		p.pump()
	}
	p.flush(false)
	return p.waiting()
}

// probeLink probes l if nothing is under way on it.
func (p *peer) probeLink(l *link, now uint64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link != l {
		return false
	}
	l.host.probes.Add(&l.probeDue)
	if l.Idle() {
		l.probe()
	}
	return false
}

// waiting tells whether something waits for room or for a slot. p.mu is held.
func (p *peer) waiting() bool { return p.sender.Waiting() > 0 || len(p.sender.Returns()) > 0 }

// probe writes nothing to the peer: a link that is lost shows only in what is sent, and a
// node that waits for an answer sends nothing.
func (l *link) probe() {
	id, _, _, ok := l.Begin()
	if !ok {
		return
	}
	l.Add(id, 0, verbs.SendWR{Op: verbs.OpWrite, Flags: verbs.Signaled | verbs.Inline})
	if err := l.Post(); err != nil {
		l.fail(asLost(err))
	}
}
