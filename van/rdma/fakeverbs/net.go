package fakeverbs

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

const (
	firstPort = 32768
	firstQP   = 17
)

// Net is the network. Its methods are safe for concurrent use.
type Net struct {
	fail atomic.Pointer[func(Op) error]

	// mu guards everything below, and what belongs to the Stacks: one lock makes the
	// order of all that happens one, and is held while memory is written.
	mu        sync.Mutex
	cfg       Config
	rnd       *rand.Rand
	closed    bool
	hosts     map[netip.Addr]*host
	stacks    []*Stack
	qps       map[verbs.Handle]*qp
	lastQP    uint32
	lastKey   uint32
	cuts      map[link]bool
	held      bool
	heldPairs map[uint32]bool
	rejects   int
	reason    int // of rejects
	failWR    func(WR) verbs.Status
	trace     func(Record)
	traceSeq  int
	errs      []error
	onError   func(error)
	buffers   [][]byte // of inline data, for use again

	agenda    agenda
	agendaSeq uint64
	timer     *time.Timer
	lastEvent time.Time // when the latest delayed event is due
}

// host is an address with its device.
type host struct {
	addr   netip.Addr
	name   string // of the device; "" for a loopback address, which has none
	index  int
	edit   func(*verbs.DeviceInfo)
	ports  map[uint16]*connID
	next   uint16
	absent bool // the device was removed
}

type link struct{ a, b netip.Addr }

func linkOf(a, b netip.Addr) link {
	a, b = a.Unmap(), b.Unmap()
	if b.Less(a) {
		a, b = b, a
	}
	return link{a, b}
}

// NewNet makes a network without hosts. Options change its Config.
func NewNet(options ...func(*Config)) *Net {
	n := &Net{cfg: defaults(), hosts: map[netip.Addr]*host{}, qps: map[verbs.Handle]*qp{}, lastQP: firstQP - 1,
		cuts: map[link]bool{}, heldPairs: map[uint32]bool{}}
	for _, o := range options {
		o(&n.cfg)
	}
	n.rnd = rand.New(rand.NewPCG(n.cfg.Seed, 0))
	return n
}

// Configure changes the Config. What has begun goes on with the old one. Seed has no
// effect any more.
func (n *Net) Configure(change func(*Config)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	change(&n.cfg)
}

// Stack makes a process on a host with a device at each of the addresses. Several
// Stacks may have the same address. Their ports are then the same ones, too.
func (n *Net) Stack(addrs ...netip.Addr) *Stack {
	n.mu.Lock()
	defer n.mu.Unlock()
	s := &Stack{net: n, channels: map[*channel]bool{}, buffers: map[int][]byte{}, name: fmt.Sprintf("stack%d", len(n.stacks))}
	for _, a := range addrs {
		s.hosts = append(s.hosts, n.host(a, true))
	}
	n.stacks = append(n.stacks, s)
	return s
}

func (n *Net) host(a netip.Addr, device bool) *host {
	a = a.Unmap()
	h := n.hosts[a]
	if h == nil {
		h = &host{addr: a, index: len(n.hosts), ports: map[uint16]*connID{}, next: firstPort}
		n.hosts[a] = h
	}
	if device && h.name == "" {
		h.name = fmt.Sprintf("fake%d", h.index)
	}
	return h
}

// freePort finds a port that is free at all of hosts.
func freePort(hosts []*host) (uint16, error) {
	first := hosts[0]
	for range 65536 - firstPort {
		port := first.next
		if first.next++; first.next == 0 {
			first.next = firstPort
		}
		if !slices.ContainsFunc(hosts, func(h *host) bool { return h.ports[port] != nil }) {
			return port, nil
		}
	}
	return 0, syscall.EADDRINUSE
}

// Info makes the device at addr describe itself as edit changes its description. A
// device with several ports obeys QPOptions.Port.
func (n *Net) Info(addr netip.Addr, edit func(*verbs.DeviceInfo)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.host(addr, true).edit = edit
}

// Errors returns what the users of the Net have done that real hardware or its
// libraries would not have forgiven: completion queues overrun, polls or reads of one
// queue by two callers, regions deregistered twice, channels closed with IDs, and what
// Config.CheckSource finds.
func (n *Net) Errors() []error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.errs)
}

// OnError calls f for each such error at once, as t.Error would want it. f must not use
// the Net.
func (n *Net) OnError(f func(error)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.onError = f
}

func (n *Net) report(err error) {
	n.errs = append(n.errs, err)
	if n.onError != nil {
		n.onError(err)
	}
}

// Leaks is that of all Stacks.
func (n *Net) Leaks() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var all []string
	for _, s := range n.stacks {
		for _, l := range s.leaks() {
			all = append(all, s.name+": "+l)
		}
	}
	return all
}

// Close ends the Net: all calls that wait or are made later return verbs.ErrClosed,
// those that give back succeed.
func (n *Net) Close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.closed = true
	n.agenda = nil
	if n.timer != nil {
		n.timer.Stop()
	}
	for _, s := range n.stacks {
		s.wakeAll()
	}
}

// byAge returns the queue pairs in the order in which they were made.
func (n *Net) byAge() []*qp {
	return slices.SortedFunc(maps.Values(n.qps), func(a, b *qp) int { return cmp.Compare(a.num, b.num) })
}

func (n *Net) cut(a, b netip.Addr) bool { return len(n.cuts) != 0 && n.cuts[linkOf(a, b)] }
