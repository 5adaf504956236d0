package fakeverbs

// This file owns Stacks: a Stack is a process on a host, with counters of its calls.

import (
	"fmt"
	"net/netip"
	"sync/atomic"
	"syscall"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// Stack is one process with its devices. It implements verbs.Stack.
type Stack struct {
	net   *Net
	hosts []*host
	calls [opCount]atomic.Int64

	// Guarded by net.mu.
	name       string
	dead       bool
	stopped    bool
	deferred   []func() // effects on peers, postponed until Wake
	channels   map[*channel]bool
	buffers    map[int][]byte
	registered int
	limited    bool
	limit      int
	counters   Counters
}

// Counters counts the calls of a Stack's user.
type Counters struct {
	WRs             int // work requests that Post posted
	Registrations   int
	Deregistrations int
	Channels        int // made
	IDs             int // made by NewID or by connect requests
	QueuePairs      int // made
}

var _ verbs.Stack = (*Stack)(nil)

// Name returns the name set by SetName, else "stackN".
func (s *Stack) Name() string {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	return s.name
}

// SetName sets the Stack's name in errors and Records.
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

// Registered returns the number of registered bytes.
func (s *Stack) Registered() int {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	return s.registered
}

// Limit makes registrations fail with ENOMEM if Registered would exceed bytes, like the limit of locked memory.
func (s *Stack) Limit(bytes int) {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	s.limited, s.limit = true, bytes
}

// DMABuf makes fd a dma-buf of mem. RegisterDMABuf fails for any other fd.
func (s *Stack) DMABuf(fd int, mem []byte) {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	s.buffers[fd] = mem
}

func (s *Stack) ended() bool { return s.dead || s.net.closed }

// hook counts the call and calls the function of Fail. The caller does not hold mu.
func (s *Stack) hook(op Op) error {
	op.N = int(s.calls[op.Kind].Add(1))
	f := s.net.fail.Load()
	if f == nil {
		return nil
	}
	op.Stack = s
	return (*f)(op)
}

// begin counts a call on an object that must not have ended, and locks. The caller unlocks.
func (s *Stack) begin(op Op, ended func() bool) error {
	err := s.hook(op)
	s.net.mu.Lock()
	if err == nil && ended() {
		err = fault(op.Kind.String(), verbs.ErrClosed, "%s", s.name)
	}
	return err
}

// toPeers carries out do, which affects peers, now or, if the process is stopped, after Wake.
func (s *Stack) toPeers(do func()) {
	if s.stopped {
		s.deferred = append(s.deferred, do)
		return
	}
	do()
}

// hostsFor returns the hosts of an ID bound to a: all hosts of the Stack if a is unspecified.
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

// sourceFor returns the source address for dst: dst itself if it is local.
func (s *Stack) sourceFor(dst netip.Addr) netip.Addr {
	for _, h := range s.hosts {
		if h.addr == dst {
			return dst
		}
	}
	for _, h := range s.hosts {
		if h.addr.Is4() == dst.Is4() && !dst.IsLoopback() {
			return h.addr
		}
	}
	if dst.IsLoopback() {
		return dst
	}
	return netip.IPv4Unspecified()
}
