package rdma

import (
	"slices"
	"testing"
	"unsafe"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// rawServer is a StepMesh node that a worker sends requests to.
type rawServer struct {
	*raw
	w   *testNode
	who *testNode
}

func newRawServer(r *rig, w *testNode) *rawServer {
	r.Helper()
	s := &rawServer{raw: newRaw(r, rawAddr, van.Node{ID: 8}), w: w}
	s.who = &testNode{who: van.Node{Role: van.Server, ID: 8, Hostname: rawAddr.String(), Port: s.port}}
	w.connect(s.who)
	return s
}

func (s *rawServer) private(int) []byte { return s.privateData(false, 0, 0, 0) }

// take accepts the worker's connection.
func (s *rawServer) take() *rawConn {
	s.r.Helper()
	c := s.accept(2, s.private)
	s.w.wantUp(s.who)
	return c
}

// skip drops the other events of the attempt that request belongs to, which was rejected. If the rejection took a moment, there are requests for the other
// queue pairs.
func (s *rawServer) skip(request verbs.Event) {
	s.r.Helper()
	old, err := decodeHandshake(request.Private)
	s.check(err)
	for {
		ev, err := s.ch.Next()
		s.check(err)
		if ev.Type == verbs.ConnectRequest {
			h, err := decodeHandshake(ev.Private)
			s.check(err)
			if h.epoch != old.epoch {
				s.early = append(s.early, ev)
				return
			}
		}
	}
}

// open connects to the worker.
func (s *rawServer) open() *rawConn {
	s.r.Helper()
	return s.dial(s.w, 2, s.private)
}

// pull makes the worker pull n bytes under key, on its connection c.
func (s *rawServer) pull(c *rawConn, key uint64, n int) {
	s.r.Helper()
	s.w.must(pull(s.who, key, int(key), make([]byte, n)))
	var q slotRequest
	s.check(q.get(c.receive(immSlotRequest)))
	at := s.mem[len(s.mem)-4096:]
	var b [slotReplyLen]byte
	(&slotReply{origin: q.origin, index: uint32(key), meta: uint64(uintptr(unsafe.Pointer(&at[0]))), metaKey: s.mr.RKey()}).put(b[:])
	c.send(immSlotReply, b[:])
	s.r.until("the request has been sent", func() bool { return slices.Contains(s.expected(), key) })
}

// expected returns the keys whose answers may still arrive.
func (s *rawServer) expected() (keys []uint64) {
	p := (*s.w.tables.peers.Load())[s.who.who.ID]
	p.mu.Lock()
	defer p.mu.Unlock()
	for k := range p.pulls {
		keys = append(keys, k.key)
	}
	slices.Sort(keys)
	return keys
}

// incoming returns the serial numbers of the connections to n.
func (n *testNode) incoming() (all []uint32) {
	for serial, c := range *n.tables.conns.Load() {
		if c.in != nil {
			all = append(all, serial)
		}
	}
	slices.Sort(all)
	return all
}

// A StepMesh server dies silently and is restarted: pulls from the new process are not released with the old one's connection.
func TestOriginalAgain(t *testing.T) {
	r := newRig(t)
	w := r.node(9)
	s := newRawServer(r, w)
	first := s.take()
	s.open()
	old := w.incoming()
	s.pull(first, 1, 1000)

	p := (*w.tables.peers.Load())[s.who.who.ID]
	p.mu.Lock()
	l := p.link
	p.mu.Unlock()
	l.fail(van.ErrPeerLost)
	w.wantDown(s.who)
	second := s.take()
	s.pull(second, 2, 1000)
	s.open()
	r.until("what the old one owed is given up", func() bool { return !slices.Contains(s.expected(), 1) })
	if now := w.incoming(); len(now) != 1 || now[0] == old[0] {
		t.Errorf("incoming connections %v, want one that is not %v", now, old)
	}
	if keys := s.expected(); !slices.Equal(keys, []uint64{2}) {
		t.Errorf("answers to keys %v are expected, want those to 2", keys)
	}
	s.end()
	r.until("all is given up with the new one", func() bool { return len(s.expected()) == 0 })
}

// If Connect is called for a node while a connection to it is being made, messages wait for that connection, even if its connect request is rejected: the new
// process may not have listened yet.
func TestConnectWhileConnecting(t *testing.T) {
	for _, refused := range []bool{false, true} {
		t.Run(map[bool]string{false: "accepted", true: "refused"}[refused], func(t *testing.T) {
			r := newRig(t)
			w := r.node(9)
			s := newRawServer(r, w)
			s.take()
			p := (*w.tables.peers.Load())[s.who.who.ID]
			p.currentLink().fail(van.ErrPeerLost)
			w.wantDown(s.who)
			r.until("a connect request is with it", func() bool {
				p.mu.Lock()
				defer p.mu.Unlock()
				return p.state.connecting
			})
			w.connect(s.who)
			if refused {
				old := s.event(verbs.ConnectRequest)
				s.check(old.New.Reject(nil))
				w.wantDown(s.who)
				s.skip(old)
			}
			w.must(push(s.who, 1, 1, value(1000, 1)))
			s.take().receive(immSlotRequest)
			s.end()
		})
	}
}
