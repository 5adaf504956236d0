package fakeverbs

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"syscall"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// Stack is one process with its view of its host's devices. It implements verbs.Stack.
type Stack struct {
	net   *Net
	hosts []*host
	calls [opCount]atomic.Int64

	// Guarded by net.mu.
	name       string
	dead       bool
	stopped    bool
	kept       []func() // what others will notice when it goes on
	channels   map[*channel]bool
	buffers    map[int][]byte
	registered int
	limited    bool
	limit      int
	counters   Counters
}

// Counters counts what a Stack's user has done.
type Counters struct {
	Posts           int // calls of Post
	WRs             int // work requests that they posted
	Polls           int // calls of Poll
	Completions     int // that they returned
	Wakes           int
	Registrations   int
	Deregistrations int
	Channels        int // made
	IDs             int // made, or brought by connect requests
	QueuePairs      int // made
}

var _ verbs.Stack = (*Stack)(nil)

// Name is what SetName has set, "stackN" without.
func (s *Stack) Name() string {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	return s.name
}

// SetName names the Stack in errors and Records.
func (s *Stack) SetName(name string) {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	s.name = name
}

// Counters returns the counters.
func (s *Stack) Counters() Counters {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	return s.counters
}

// Registered is how many bytes are registered.
func (s *Stack) Registered() int {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	return s.registered
}

// Limit makes registrations fail with ENOMEM that would bring Registered above bytes,
// as the limit of locked memory does.
func (s *Stack) Limit(bytes int) {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	s.limited, s.limit = true, bytes
}

// DMABuf makes mem what the dma-buf fd stands for. Without, RegisterDMABuf fails.
func (s *Stack) DMABuf(fd int, mem []byte) {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	s.buffers[fd] = mem
}

// Leaks names the channels, IDs, queue pairs and regions that have not been given
// back. A killed Stack has none.
func (s *Stack) Leaks() []string {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	return s.leaks()
}

func (s *Stack) leaks() []string {
	var all []string
	for c := range s.channels {
		if !c.closed {
			all = append(all, "a channel")
		}
		for id := range c.ids {
			if id.unread {
				continue
			}
			all = append(all, "ID "+id.describe())
			if id.qp != nil {
				all = append(all, fmt.Sprintf("queue pair %d", id.qp.num))
			}
		}
		for _, d := range c.devices {
			for _, m := range d.lkeys {
				all = append(all, fmt.Sprintf("region of %d bytes at %#x on %s", m.size, m.start, d.host.name))
			}
		}
	}
	slices.SortFunc(all, cmp.Compare[string])
	return all
}

// Devices lists one device for each address.
func (s *Stack) Devices() ([]verbs.DeviceInfo, error) {
	if err := s.hook(Op{Kind: OpDevices}); err != nil {
		return nil, err
	}
	n := s.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if s.ended() {
		return nil, fault("devices", verbs.ErrClosed, "%s", s.name)
	}
	var all []verbs.DeviceInfo
	for _, h := range s.hosts {
		if !h.absent {
			all = append(all, n.info(h))
		}
	}
	return all, nil
}

func (n *Net) info(h *host) verbs.DeviceInfo {
	linkLocal := netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80, 14: byte(h.index >> 8), 15: byte(h.index)})
	info := verbs.DeviceInfo{Name: h.name, Firmware: "fake", MaxQP: 65536, MaxCQE: n.cfg.MaxCQE, MaxMR: n.cfg.MaxMR,
		MaxWR: n.cfg.MaxWR, MaxSize: 1 << 40,
		Ports: []verbs.PortInfo{{Num: 1, Active: true, State: "ACTIVE", LinkLayer: "Ethernet", MTU: 4096, Rate: 100,
			MaxMsg: n.cfg.MaxMsg, GIDs: []verbs.GID{
				{Index: 0, Addr: linkLocal, Type: "RoCE v2", Iface: h.name},
				{Index: 1, Addr: h.addr, Type: "RoCE v2", Iface: h.name}}}}}
	if h.edit != nil {
		h.edit(&info)
	}
	return info
}

// NewChannel opens an event channel.
func (s *Stack) NewChannel() (verbs.Channel, error) {
	if err := s.hook(Op{Kind: OpNewChannel}); err != nil {
		return nil, err
	}
	n := s.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if s.ended() {
		return nil, fault("new channel", verbs.ErrClosed, "%s", s.name)
	}
	c := newChannel(s)
	s.channels[c] = true
	s.counters.Channels++
	return c, nil
}

func (s *Stack) ended() bool { return s.dead || s.net.closed }

func (s *Stack) wakeAll() {
	for c := range s.channels {
		c.cond.Broadcast()
		for _, d := range c.devices {
			d.cond.Broadcast()
		}
	}
}

// hostsFor returns where an ID bound to a is bound: at all hosts of the Stack when a
// is unspecified.
func (s *Stack) hostsFor(a netip.Addr) ([]*host, error) {
	a = a.Unmap()
	if a.IsUnspecified() {
		if len(s.hosts) == 0 {
			return nil, fmt.Errorf("a host without addresses: %w", syscall.EADDRNOTAVAIL)
		}
		return s.hosts, nil
	}
	for _, h := range s.hosts {
		if h.addr == a {
			return []*host{h}, nil
		}
	}
	if a.IsLoopback() {
		return []*host{s.net.host(a, false)}, nil
	}
	return nil, syscall.EADDRNOTAVAIL
}
