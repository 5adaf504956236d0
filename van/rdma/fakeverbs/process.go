package fakeverbs

// A Stack as a process: where it runs, whether it does, and what it has done.

import (
	"fmt"
	"net/netip"
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
	deferred   []func() // what others will notice when it goes on
	channels   map[*channel]bool
	buffers    map[int][]byte
	registered int
	limited    bool
	limit      int
	counters   Counters
}

// Counters counts what a Stack's user has done.
type Counters struct {
	WRs             int // work requests that Post posted
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

func (s *Stack) ended() bool { return s.dead || s.net.closed }

// hook counts the call and asks the function of Fail. The caller does not hold mu.
func (s *Stack) hook(op Op) error {
	op.N = int(s.calls[op.Kind].Add(1))
	f := s.net.fail.Load()
	if f == nil {
		return nil
	}
	op.Stack = s
	return (*f)(op)
}

// begin counts and locks for a call of what must not have ended. The caller unlocks.
func (s *Stack) begin(op Op, ended func() bool) error {
	err := s.hook(op)
	s.net.mu.Lock()
	if err == nil && ended() {
		err = fault(op.Kind.String(), verbs.ErrClosed, "%s", s.name)
	}
	return err
}

// toPeers does what peers will notice: now, or when the process goes on.
func (s *Stack) toPeers(do func()) {
	if s.stopped {
		s.deferred = append(s.deferred, do)
		return
	}
	do()
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

// sourceFor is the address from which dst is reached: itself when it is local.
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
