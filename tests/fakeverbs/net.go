package fakeverbs

// This file owns the Net: its hosts, and the state that they share.

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

	// mu guards everything below, and the state of the Stacks. This one lock orders all operations, and is held while memory is written.
	mu          sync.Mutex
	cfg         Config
	rnd         *rand.Rand
	closed      bool
	hosts       map[netip.Addr]*host
	stacks      []*Stack
	qps         map[verbs.Handle]*qp
	lastQP      uint32
	lastKey     uint32
	cuts        cuts
	held        bool
	heldPairs   map[uint32]bool
	rejects     int
	reason      int // of rejects
	failWR      func(WR) verbs.Status
	trace       recorder
	misuse      misuse
	freeBuffers buffers
	schedule    schedule
	lastEvent   time.Time // time of the latest delayed event
}

// host is an address with its device.
type host struct {
	addr   netip.Addr
	name   string // of the device; "" for a loopback address, which has no device
	index  int
	edit   func(*verbs.DeviceInfo)
	ports  map[uint16]*connID
	next   uint16
	absent bool // the device was removed
}

// cuts holds the lost links.
type cuts map[link]bool

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
		cuts: cuts{}, heldPairs: map[uint32]bool{}}
	for _, o := range options {
		o(&n.cfg)
	}
	n.schedule.mu = &n.mu
	n.rnd = rand.New(rand.NewPCG(n.cfg.Seed, 0))
	return n
}

// Configure changes the Config. Operations in progress continue with the old one. A change of Seed has no effect.
func (n *Net) Configure(change func(*Config)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	change(&n.cfg)
}

// Stack makes a process on a host with a device at each of the addresses. Several Stacks may have the same address; they then share its ports.
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

// freePort returns a port that is free at all hosts.
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

// Info sets a function that edits the description of the device at addr. A device with several ports applies QPOptions.Port.
func (n *Net) Info(addr netip.Addr, edit func(*verbs.DeviceInfo)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.host(addr, true).edit = edit
}

// Errors returns misuse that hardware or its libraries would not tolerate: overrun completion queues, concurrent polls or reads of one queue, regions
// that were deregistered twice, channels closed with IDs, and the findings of Config.CheckSource.
func (n *Net) Errors() []error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.misuse.errs)
}

// OnError calls f at once for each such error, for example to call t.Error. f must not use the Net.
func (n *Net) OnError(f func(error)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.misuse.on = f
}

// byAge returns the queue pairs in the order of their creation.
func (n *Net) byAge() []*qp {
	return slices.SortedFunc(maps.Values(n.qps), func(a, b *qp) int { return cmp.Compare(a.num, b.num) })
}

// pair returns the queue pair with this number, or nil.
func (n *Net) pair(num uint32) *qp { return n.qps[verbs.Handle(num)] }

func (c cuts) has(a, b netip.Addr) bool { return len(c) != 0 && c[linkOf(a, b)] }

// misuse collects the errors for Errors.
type misuse struct {
	errs []error
	on   func(error)
}

func (m *misuse) report(err error) {
	m.errs = append(m.errs, err)
	if m.on != nil {
		m.on(err)
	}
}

func (h *host) info(cfg *Config) verbs.DeviceInfo {
	linkLocal := netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80, 14: byte(h.index >> 8), 15: byte(h.index)})
	info := verbs.DeviceInfo{Name: h.name, Firmware: "fake", MaxQP: 65536, MaxCQE: cfg.MaxCQE, MaxMR: cfg.MaxMR,
		MaxWR: cfg.MaxWR,
		Ports: []verbs.PortInfo{{Num: 1, Active: true, State: "ACTIVE", LinkLayer: "Ethernet", MTU: 4096, Rate: 100,
			MaxMsg: cfg.MaxMsg, GIDs: []verbs.GID{
				{Index: 0, Addr: linkLocal, Type: "RoCE v2", Iface: h.name},
				{Index: 1, Addr: h.addr, Type: "RoCE v2", Iface: h.name}}}}}
	if h.edit != nil {
		h.edit(&info)
	}
	return info
}
