package replay

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

var le = binary.LittleEndian

// cppNode is the RDMA transport of one node of the original, hand-made after its
// description, on a network in memory. It knows nothing of this library's additions:
// where the original would abort, the test fails.
type cppNode struct {
	t     testing.TB
	stack *fakeverbs.Stack
	role  van.Role
	host  string
	split bool // STEPMESH_SPLIT_QP_LAG
	// swapped opens queue pair 1 before 0.
	swapped bool

	channel verbs.Channel
	listen  verbs.ID
	wg      sync.WaitGroup
	msgs    chan *cppMessage // received messages
	gone    chan *cppEnd     // connections that have ended
	answers chan struct{}    // a token for settled: an answer to a question has come

	mu       sync.Mutex
	id       int // van.Empty before it has one
	port     int
	dev      verbs.Device
	closed   bool
	dying    bool // failures of connections do not matter any more
	ends     []*cppEnd
	incoming map[string]*cppEnd
	active   map[int]*cppEnd
	buffers  map[cppBuffer][]byte // registered receive buffers
	regions  map[uint64]*cppMem   // by address
	places   map[cppTriple]*cppPlace
	asked    map[uint64]*cppSending // by origin
	slots    []*cppSlot
	queue    []*cppMessage // waiting for slaves
	posted   map[uint64]func()
	serial   uint64
	starts   int // questions that it has been asked
}

const qpCount = 2

// cppEnd is an endpoint, as the original calls it: the queue pairs of one direction.
type cppEnd struct {
	n        *cppNode
	no       int
	name     string
	node     int // the peer's id, as it has said
	outgoing bool
	to       netip.AddrPort
	ids      [qpCount]verbs.ID
	qps      [qpCount]verbs.QP
	status   [qpCount]cppStatus
	count    int // the original's inComingCount, used for several things
	inited   int
	up       chan struct{} // closed when all stand
	once     sync.Once
	slaves   uint64 // sent or received
	data     map[uint64]*cppMem
	taken    []verbs.ID // not accepted yet
}

type cppStatus int

const (
	cppIdle cppStatus = iota
	cppConnecting
	cppConnected
	cppRejected
)

type cppBuffer struct {
	key  uint64
	node int
}

// cppTriple is the key of a cppPlace.
type cppTriple struct {
	key  uint64
	push bool
	to   int
}

// cppMem is registered memory.
type cppMem struct {
	b  []byte
	mr verbs.MR
}

func (m *cppMem) addr() uint64 { return address(m.b) }

func address(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// cppMessage is a message as the original's applications see it.
type cppMessage struct {
	end    *cppEnd
	from   int
	packed []byte
	meta   van.Meta
	key    []byte // the arrays, for messages with data
	value  []byte
	slot   *cppSlot
	number int // of the slot
}

// newCPP makes a node that listens at addr.
func newCPP(t testing.TB, net *fakeverbs.Net, addr netip.AddrPort, role van.Role, id int) *cppNode {
	t.Helper()
	n := &cppNode{t: t, stack: net.Stack(addr.Addr()), role: role, host: addr.Addr().String(), id: id,
		msgs: make(chan *cppMessage, 1<<12), gone: make(chan *cppEnd, 64),
		incoming: map[string]*cppEnd{}, active: map[int]*cppEnd{}, buffers: map[cppBuffer][]byte{}, regions: map[uint64]*cppMem{},
		places: map[cppTriple]*cppPlace{}, asked: map[uint64]*cppSending{}, answers: make(chan struct{}, 1), posted: map[uint64]func(){}}
	n.stack.SetName(fmt.Sprintf("C++ %s %d", role, id))
	var err error
	n.channel, err = n.stack.NewChannel()
	must(t, err)
	n.listen, err = n.channel.NewID(0)
	must(t, err)
	must(t, n.listen.Bind(addr))
	n.port = int(n.listen.LocalAddr().Port())
	n.wg.Go(n.events)
	must(t, n.listen.Listen(128))
	t.Cleanup(n.close)
	return n
}

// node is the record by which others connect to it.
func (n *cppNode) node() van.Node {
	return van.Node{Role: n.role, ID: n.id, Hostname: n.host, Port: n.port, Ports: []int32{int32(n.port)}}
}

// depths are those of the original.
func (n *cppNode) depths() (start, rx int) {
	if n.role == van.Scheduler {
		return 256, 16
	}
	return 128, 256
}

// abort is called where the original would end its process.
func (n *cppNode) abort(format string, args ...any) {
	n.t.Errorf("%s %d aborts: %s", n.role, n.id, fmt.Sprintf(format, args...))
}

// ok is must for goroutines that are not the test's.
func (n *cppNode) ok(err error) {
	if err != nil {
		n.t.Errorf("%s %d: %v", n.role, n.id, err)
	}
}

func (n *cppNode) close() {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		return
	}
	n.closed, n.dying = true, true
	var ids []verbs.ID
	for _, e := range n.ends {
		ids = append(ids, e.ids[:]...)
	}
	dev, regions := n.dev, n.regions
	n.mu.Unlock()
	for _, id := range append(ids, n.listen) {
		if id != nil {
			n.ok(id.Destroy())
		}
	}
	if dev != nil {
		dev.Wake()
	}
	n.ok(n.channel.Close())
	n.wg.Wait()
	for _, m := range regions {
		n.ok(m.mr.Deregister())
	}
}

// die makes the node take failed connections without complaint.
func (n *cppNode) die() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.dying = true
}

// context is the original's private data: 24 bytes and no more.
func (n *cppNode) context() []byte {
	b := make([]byte, 24)
	le.PutUint32(b, uint32(n.id))
	le.PutUint16(b[4:], uint16(n.port))
	copy(b[6:21], n.host)
	return b
}

func (n *cppNode) newEnd(name string, node int) *cppEnd {
	e := &cppEnd{n: n, no: len(n.ends), name: name, node: node, up: make(chan struct{}), data: map[uint64]*cppMem{}}
	n.ends = append(n.ends, e)
	return e
}

// connect begins to open the connection to a node. The original's sending waits for
// it; here, send does.
func (n *cppNode) connect(to int, addr netip.AddrPort) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if old := n.active[to]; old != nil {
		n.destroy(old)
	}
	e := n.newEnd("", to)
	e.outgoing, e.to = true, addr
	n.active[to] = e
	n.open(e)
}

// destroy ends a connection as the original does when it opens another one to the same
// id: without a word.
func (n *cppNode) destroy(e *cppEnd) {
	for q, id := range e.ids {
		if id != nil {
			n.ok(id.Destroy())
			e.ids[q] = nil
		}
	}
}

// open makes all queue pairs that do not stand. n.mu is held.
func (n *cppNode) open(e *cppEnd) {
	for q := range e.ids {
		if n.swapped {
			q = qpCount - 1 - q
		}
		if e.status[q] == cppConnected {
			continue
		}
		if e.ids[q] != nil {
			n.ok(e.ids[q].Destroy())
		}
		id, err := n.channel.NewID(cppCookie(e.no, q))
		n.ok(err)
		e.ids[q], e.status[q] = id, cppConnecting
		n.ok(id.ResolveAddr(netip.MustParseAddr(n.host), e.to, time.Second))
	}
}

func cppCookie(end, q int) uint64 { return uint64(end+1)<<8 | uint64(q) }

func (n *cppNode) events() {
	for {
		ev, err := n.channel.Next()
		if err != nil {
			if !errors.Is(err, verbs.ErrClosed) {
				n.t.Errorf("%s %d: %v", n.role, n.id, err)
			}
			return
		}
		n.mu.Lock()
		n.event(ev)
		n.mu.Unlock()
	}
}

func (n *cppNode) event(ev verbs.Event) {
	if n.closed {
		if ev.New != nil {
			n.ok(ev.New.Destroy())
		}
		return
	}
	if ev.Type == verbs.ConnectRequest {
		n.request(ev)
		return
	}
	e, q := n.ends[ev.Cookie>>8-1], int(ev.Cookie&0xff)
	id := e.ids[q]
	if id == nil {
		return
	}
	switch ev.Type {
	case verbs.AddrResolved:
		n.ok(id.ResolveRoute(time.Second))
	case verbs.RouteResolved:
		n.initQP(e, id, q)
		e.count++
		n.ok(id.Connect(verbs.ConnParam{Private: n.context(), RetryCount: 7, RNRRetryCount: 7}))
		e.wrap()
	case verbs.Established:
		e.status[q] = cppConnected
		e.count++
		e.wrap()
		if e.status == [qpCount]cppStatus{cppConnected, cppConnected} {
			e.once.Do(func() { close(e.up) })
		}
	case verbs.Rejected:
		e.status[q] = cppRejected
		n.again(e)
	case verbs.Disconnected:
		e.status[q] = cppIdle
		if q == 0 {
			select {
			case n.gone <- e:
			default:
			}
		}
	default:
		n.abort("unknown event %s", ev.Type)
	}
}

func (e *cppEnd) wrap() {
	if e.count == qpCount {
		e.count = 0
	}
}

// again makes the queue pairs again that were rejected, after a while. The original
// waits 500 ms.
func (n *cppNode) again(e *cppEnd) {
	for _, s := range e.status {
		if s == cppConnecting {
			return
		}
	}
	time.AfterFunc(5*time.Millisecond, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		if !n.closed && n.active[e.node] == e {
			n.open(e)
		}
	})
}

func (n *cppNode) initQP(e *cppEnd, id verbs.ID, q int) {
	dev, err := id.Device()
	n.ok(err)
	if n.dev == nil {
		n.dev = dev
		n.ok(dev.Reserve(1 << 14))
		n.wg.Go(n.poll)
	}
	start, rx := n.depths()
	e.qps[q], err = id.CreateQP(verbs.QPOptions{Cookie: cppCookie(e.no, q), SendDepth: start + rx, RecvDepth: rx / qpCount, Inline: 512})
	n.ok(err)
	if e.inited >= qpCount {
		n.abort("connected again under the name %q: the original posts no receive requests then, and the peer waits for ever", e.name)
	}
	e.inited++
}

// request takes a connect request. The original accepts it at once, which takes it
// milliseconds, so that the other requests of a peer that sends them together have arrived
// when the original gets the event that the first connection is up. Here that order is certain.
func (n *cppNode) request(ev verbs.Event) {
	if len(ev.Private) < 24 {
		n.abort("private data of %d bytes", len(ev.Private))
		return
	}
	host := string(ev.Private[6:22])
	for i, c := range host {
		if c == 0 {
			host = host[:i]
			break
		}
	}
	node := int(le.Uint32(ev.Private))
	name := fmt.Sprintf("%s,%d,%d", host, node, le.Uint16(ev.Private[4:]))
	e := n.incoming[name]
	if e == nil {
		e = n.newEnd(name, node)
		n.incoming[name] = e
	}
	q := e.count
	e.ids[q] = ev.New
	e.count++
	ev.New.SetCookie(cppCookie(e.no, q))
	n.initQP(e, ev.New, q)
	e.taken = append(e.taken, ev.New)
	if len(e.taken) == qpCount {
		for _, id := range e.taken {
			n.ok(id.Accept(verbs.ConnParam{Private: n.context(), RetryCount: 7, RNRRetryCount: 7}))
		}
		e.taken = nil
	}
	e.wrap()
}

// alloc makes registered memory. n.mu is held.
func (n *cppNode) alloc(size int) *cppMem { return n.register(make([]byte, size)) }

// register makes b known to the device, as far as it is not.
func (n *cppNode) register(b []byte) *cppMem {
	if m := n.regions[address(b)]; m != nil && len(m.b) >= len(b) {
		return m
	}
	mr, err := n.dev.Register(unsafe.Pointer(unsafe.SliceData(b)), len(b), verbs.LocalWrite|verbs.RemoteWrite)
	n.ok(err)
	m := &cppMem{b, mr}
	if old := n.regions[m.addr()]; old != nil {
		n.ok(old.mr.Deregister())
	}
	n.regions[m.addr()] = m
	return m
}

func (n *cppNode) free(m *cppMem) {
	delete(n.regions, m.addr())
	n.ok(m.mr.Deregister())
}

// next waits for the next message.
func (n *cppNode) next() *cppMessage {
	n.t.Helper()
	select {
	case m := <-n.msgs:
		return m
	case <-time.After(patience):
		n.t.Fatalf("%s %d: nothing comes", n.role, n.id)
		return nil
	}
}

// nothing checks that no message has arrived. Call it when a later message of
// the same connection has arrived.
func (n *cppNode) nothing() {
	n.t.Helper()
	select {
	case m := <-n.msgs:
		n.t.Fatalf("%s %d: got %s, want nothing", n.role, n.id, m.meta.String())
	default:
	}
}
