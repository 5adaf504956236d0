package rdma

import (
	"net/netip"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// raw is a process that calls the verbs itself, so that it can send anything.
type raw struct {
	r      *rig
	node   van.Node
	addr   netip.Addr
	port   int
	stack  *fakeverbs.Stack
	ch     verbs.Channel
	listen verbs.ID
	early  []verbs.Event
	ids    []verbs.ID
	dev    verbs.Device
	mem    []byte // registered
	mr     verbs.MR
}

// rawConn is a connection of a raw process.
type rawConn struct {
	*raw
	qps     []verbs.QP
	id      uint64
	answers [][]byte // the private data of a node's acceptances
}

func newRaw(r *rig, addr netip.Addr, node van.Node) *raw {
	r.Helper()
	p := &raw{r: r, node: node, addr: addr, stack: r.net.Stack(addr)}
	p.stack.SetName("raw")
	var err error
	p.ch, err = p.stack.NewChannel()
	p.check(err)
	p.listen, err = p.ch.NewID(0)
	p.check(err)
	p.check(p.listen.Bind(netip.AddrPortFrom(addr, 0)))
	p.check(p.listen.Listen(8))
	p.port = int(p.listen.LocalAddr().Port())
	return p
}

func (p *raw) check(err error) {
	p.r.Helper()
	if err != nil {
		p.r.Fatal(err)
	}
}

// end ends the process as SIGKILL does.
func (p *raw) end() { p.r.net.KillTelling(p.stack) }

// event waits for an event of a type. It keeps other events for later calls.
func (p *raw) event(want verbs.EventType) verbs.Event {
	p.r.Helper()
	for i, ev := range p.early {
		if ev.Type == want {
			p.early = append(p.early[:i], p.early[i+1:]...)
			return ev
		}
	}
	for {
		ev, err := p.ch.Next()
		p.check(err)
		if ev.Type == want {
			return ev
		}
		if ev.Type == verbs.Rejected {
			p.r.Fatalf("rejected: %v", (&conn.Manager{Rejection: rejection}).EventError(ev))
		}
		p.early = append(p.early, ev)
	}
}

// privateData returns p's private data.
func (p *raw) privateData(ours bool, epoch uint32, q, qps int) []byte {
	h := handshake{node: p.node.ID, port: p.port, host: p.addr.String(), epoch: epoch, qp: q, qpCount: qps}
	if b := h.encode(); ours {
		return b
	} else {
		return b[:contextLen]
	}
}

func (p *raw) options() verbs.QPOptions {
	return verbs.QPOptions{SendDepth: 512, RecvDepth: 256, Inline: inlineWanted}
}

// use makes a queue pair and memory on id's device.
func (p *raw) use(id verbs.ID) verbs.QP {
	p.r.Helper()
	dev, err := id.Device()
	p.check(err)
	if p.dev == nil {
		p.dev = dev
		p.check(dev.Reserve(8192))
		p.mem = make([]byte, 1<<20)
		p.mr, err = dev.Register(unsafe.Pointer(&p.mem[0]), len(p.mem), verbs.LocalWrite|verbs.RemoteWrite)
		p.check(err)
	}
	qp, err := id.CreateQP(p.options())
	p.check(err)
	p.ids = append(p.ids, id)
	return qp
}

// dial connects to a node as a node would. own makes the private data of each queue pair.
func (p *raw) dial(to *testNode, qps int, own func(q int) []byte) *rawConn {
	p.r.Helper()
	c := &rawConn{raw: p}
	var ids []verbs.ID
	for q := range qps {
		id, err := p.ch.NewID(uint64(q + 1))
		p.check(err)
		p.check(id.ResolveAddr(p.addr, netip.AddrPortFrom(to.addr, uint16(to.who.Port)), time.Second))
		p.event(verbs.AddrResolved)
		p.check(id.ResolveRoute(time.Second))
		p.event(verbs.RouteResolved)
		c.qps, ids = append(c.qps, p.use(id)), append(ids, id)
	}
	for q, id := range ids {
		p.check(id.Connect(verbs.ConnParam{Private: own(q), RetryCount: 6, RNRRetryCount: 7}))
	}
	for range qps {
		c.answers = append(c.answers, p.event(verbs.Established).Private)
	}
	return c
}

// accept accepts the queue pairs of a node's connection.
func (p *raw) accept(qps int, private func(q int) []byte) *rawConn {
	p.r.Helper()
	c := &rawConn{raw: p}
	for q := range qps {
		id := p.event(verbs.ConnectRequest).New
		c.qps = append(c.qps, p.use(id))
		p.check(id.Accept(verbs.ConnParam{Private: private(q), RetryCount: 6, RNRRetryCount: 7}))
		p.event(verbs.Established)
	}
	return c
}

// post posts one work request on queue pair q with the local data b.
func (c *rawConn) post(q int, wr verbs.SendWR, b []byte) {
	c.r.Helper()
	// The memory is never reused: it is large enough for all posts of a test.
	copy(c.mem, b)
	local := c.mem[:len(b)]
	c.mem = c.mem[len(b):]
	c.id++
	wr.QP, wr.ID, wr.Flags = c.qps[q].Handle(), c.id, verbs.Signaled
	wr.LocalAddr, wr.Len, wr.LKey = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(local)))), uint32(len(b)), c.mr.LKey()
	_, err := c.dev.Post([]verbs.SendWR{wr})
	c.check(err)
}

func (c *rawConn) send(imm uint32, b []byte) {
	c.r.Helper()
	c.post(0, verbs.SendWR{Op: verbs.OpSendImm, Imm: imm}, b)
}

// notify writes b to addr with an immediate.
func (c *rawConn) notify(q int, imm uint32, addr uint64, rkey uint32, b []byte) {
	c.r.Helper()
	c.post(q, verbs.SendWR{Op: verbs.OpWriteImm, Imm: imm, RemoteAddr: addr, RKey: rkey}, b)
}

// receive waits for a SEND.
func (c *rawConn) receive(imm uint32) []byte {
	c.r.Helper()
	limit := time.Now().Add(patience)
	for time.Now().Before(limit) {
		var out [1]verbs.Completion
		n, err := c.dev.Poll(out[:], 0, time.Second)
		c.check(err)
		if n == 1 && out[0].Type == verbs.RecvSend && out[0].Imm == imm {
			return recvData(&out[0])
		}
	}
	c.r.Fatalf("no SEND with immediate %d came", imm)
	return nil
}

// ask requests a slot and returns the reply.
func (c *rawConn) ask(s slotRequest) slotReply {
	c.r.Helper()
	var b [slotRequestLen]byte
	s.put(b[:])
	c.send(immSlotRequest, b[:])
	var r slotReply
	c.check(r.get(c.receive(immSlotReply)))
	if r.origin != s.origin {
		c.r.Fatalf("an answer to %d, want %d", r.origin, s.origin)
	}
	return r
}

// encode encodes m with a trailer, which may be nil.
func encode(r *rig, m *van.Message, t *trailer) []byte {
	r.Helper()
	n := m.EncodedLen()
	b := make([]byte, n, n+trailerLen)
	if err := m.EncodeTo(b); err != nil {
		r.Fatal(err)
	}
	if t != nil {
		b = b[:n+trailerLen]
		t.put(b[n:])
	}
	return b
}

// encodeParts encodes a message with placements, extra bytes after them, and a trailer.
func encodeParts(r *rig, m *van.Message, places []placement, extra []byte, t trailer) []byte {
	r.Helper()
	b := make([]byte, m.EncodedLen())
	if err := m.EncodeTo(b); err != nil {
		r.Fatal(err)
	}
	if t.metaLen == 0 {
		t.metaLen = len(b)
	}
	b = append(b, make([]byte, aligned(len(b))-len(b))...)
	for i := range places {
		var p [placementLen]byte
		places[i].put(p[:])
		b = append(b, p[:]...)
	}
	if len(extra) > 0 {
		b = append(append(b, make([]byte, aligned(len(b))-len(b))...), extra...)
	}
	b = append(b, make([]byte, trailerLen)...)
	t.put(b[len(b)-trailerLen:])
	return b
}
