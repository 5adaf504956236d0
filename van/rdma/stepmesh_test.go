package rdma

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// original is a StepMesh node that sends with one queue pair.
type original struct {
	*pair
	ch  verbs.Channel
	id  verbs.ID
	dev verbs.Device
	qp  verbs.QP
	mem []byte
	mr  verbs.MR
}

// newOriginal connects a node with this id to the server.
func newOriginal(p *pair, id int) *original {
	p.Helper()
	return newOriginalOn(p, id, "10.77.0.2", "10.77.0.2")
}

// newOriginalOn is newOriginal at addr, with this name.
func newOriginalOn(p *pair, id int, addr, host string) *original {
	p.Helper()
	o := &original{pair: p}
	must := func(err error) {
		p.Helper()
		if err != nil {
			p.Fatal(err)
		}
	}
	var err error
	o.ch, err = p.net.Stack(netip.MustParseAddr(addr)).NewChannel()
	must(err)
	o.id, err = o.ch.NewID(1)
	must(err)
	must(o.id.ResolveAddr(netip.Addr{}, netip.AddrPortFrom(p.server.cm.Source, uint16(p.server.local.self.Port)), time.Second))
	o.event(verbs.AddrResolved)
	must(o.id.ResolveRoute(time.Second))
	o.event(verbs.RouteResolved)
	o.dev, err = o.id.Device()
	must(err)
	o.qp, err = o.id.CreateQP(verbs.QPOptions{SendDepth: 64, RecvDepth: 64, Inline: 512})
	must(err)
	h := handshake{node: id, port: 4000, host: host}
	must(o.id.Connect(verbs.ConnParam{Private: h.encode()[:contextLen], RetryCount: 7, RNRRetryCount: 7}))
	o.event(verbs.Established)
	o.mem = make([]byte, 4096)
	o.mr, err = o.dev.Register(backend.Bytes(o.mem).Ptr(), len(o.mem), verbs.LocalWrite)
	must(err)
	p.Cleanup(func() {
		must(o.mr.Deregister())
		must(o.id.Destroy())
		must(o.ch.Close())
	})
	return o
}

func (o *original) event(want verbs.EventType) {
	o.Helper()
	if ev, err := o.ch.Next(); err != nil || ev.Type != want {
		o.Fatalf("event %v, %v, want %v", ev.Type, err, want)
	}
}

func (o *original) post(wr verbs.SendWR, b []byte) {
	o.Helper()
	wr.QP, wr.Flags = o.qp.Handle(), verbs.Signaled
	wr.LocalAddr, wr.Len, wr.LKey = backend.Bytes(o.mem).Addr(), uint32(copy(o.mem, b)), o.mr.LKey()
	if _, err := o.dev.Post([]verbs.SendWR{wr}); err != nil {
		o.Fatal(err)
	}
}

// completion waits for the next completion of that type.
func (o *original) completion(want verbs.CompletionType) verbs.Completion {
	o.Helper()
	out := make([]verbs.Completion, 1)
	for end := time.Now().Add(testTime); time.Now().Before(end); {
		n, err := o.dev.Poll(out, 0, 100*time.Millisecond)
		if err != nil {
			o.Fatal(err)
		}
		if n > 0 && out[0].Status != verbs.StatusOK {
			o.Fatalf("completion: %s", out[0].Status)
		}
		if n > 0 && out[0].Type == want {
			return out[0]
		}
	}
	o.Fatal("no completion")
	return verbs.Completion{}
}

// ask requests a slot.
func (o *original) ask(s slotRequest) (r slotReply) {
	o.Helper()
	b := make([]byte, slotRequestLen)
	s.put(b)
	o.post(verbs.SendWR{Op: verbs.OpSendImm, Imm: immSlotRequest}, b)
	c := o.completion(verbs.RecvSend)
	if err := r.get(recvData(&c)); err != nil || c.Imm != immSlotReply {
		o.Fatalf("reply with immediate %d: %v", c.Imm, err)
	}
	return r
}

// send writes m to the slot.
func (o *original) send(m *van.Message, at slotReply) {
	o.Helper()
	b := make([]byte, m.EncodedLen())
	if err := m.EncodeTo(b); err != nil {
		o.Fatal(err)
	}
	o.post(verbs.SendWR{Op: verbs.OpWriteImm, Imm: at.index, RemoteAddr: at.meta, RKey: at.metaKey}, b)
	o.completion(verbs.SendDone)
}

func oneQP(c *env.Config) { c.QPNum = 1 }

// StepMesh requests a new slot for each control message and never returns one.
func TestControlOfOriginalKeepsNoSlot(t *testing.T) {
	p := newPair(t, oneQP)
	o := newOriginal(p, 11)
	m := &van.Message{}
	m.Reset()
	m.Control.Cmd = van.Heartbeat
	for i := range 50 {
		m.Timestamp = int32(i)
		o.send(m, o.ask(slotRequest{metaLen: uint64(m.EncodedLen())}))
		p.next(p.atServer).Release()
	}
	if n := p.server.budget.slots.Len(); n > 1 {
		t.Errorf("%d slots are given away after 50 control messages, want at most 1", n)
	}
}

// StepMesh slots of one key share memory until a larger one is requested. On a connection that has ended, none is granted.
func TestAreaOfKey(t *testing.T) {
	p := newPair(t, oneQP)
	o := newOriginal(p, 11)
	push := func(meta, n uint64) slotReply {
		return o.ask(slotRequest{metaLen: meta, dataNum: 2, data: [4]uint64{8, n}, key: 5})
	}
	a, b, c := push(300, 1000), push(400, 1000), push(300, 2000)
	if a.data == 0 || a.data != b.data || c.data == a.data || c.data == 0 {
		t.Errorf("data at %#x, %#x and, larger, %#x", a.data, b.data, c.data)
	}
	for _, x := range *p.server.tables.conns.Load() {
		if x.in == nil {
			continue
		}
		for n, want := range map[int]int{1000: 0, 2000: 0, 2001: 2001} {
			if got := x.in.dialect.dataCost(&slotRequest{key: 5}, rendezvous.Need{Data: n}); got != want {
				t.Errorf("a slot for %d bytes costs %d, want %d", n, got, want)
			}
		}
		x.in.fail(van.ErrPeerLost)
		p.until("end of the connection", func() bool {
			x.in.mu.Lock()
			defer x.in.mu.Unlock()
			return x.in.closed
		})
		if _, err := (slotSet{x.in}).keyArea(6, 100); !errors.Is(err, van.ErrClosed) {
			t.Errorf("memory on a connection that has ended: %v", err)
		}
	}
}

// Messages on which a StepMesh node would abort are refused.
func TestFitsOriginal(t *testing.T) {
	some := make([]byte, 100)
	answer := tensor(workerID, 1, 5, false, false, some)
	answer.Option = 7
	var text, long van.Message
	for _, m := range []*van.Message{&text, &long} {
		m.Reset()
		m.SimpleApp, m.Body = true, []byte("text")
	}
	long.Frames, long.Vals = 2, backend.Bytes(some)
	twoKeys := tensor(serverID, 1, 5, true, true, some)
	twoKeys.Keys = backend.Bytes(make([]byte, 16))
	ack := tensor(workerID, 1, 5, false, true, nil)
	ack.Frames, ack.Keys = 0, backend.Mem{}
	empty := tensor(serverID, 1, 5, true, false, nil)
	for _, c := range []struct {
		name string
		m    *van.Message
		want bool
	}{
		{"push", tensor(serverID, 1, 5, true, true, some), true},
		{"push of two keys", twoKeys, false},
		{"pull", pullInto(serverID, 1, 5, some), true},
		{"pull without memory for the answer", tensor(serverID, 1, 5, true, false, some), false},
		{"pull of nothing", empty, false},
		{"answer to a push", ack, true},
		{"answer to a pull", answer, true},
		{"answer without an address", tensor(workerID, 1, 5, false, false, some), false},
		{"text", &text, true},
		{"text with values", &long, false},
	} {
		o := &outgoing{}
		if err := o.fill(c.m, c.m.PayloadLen()); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		d := &stepmeshOut{keySizes: map[uint64]int{}}
		if err := d.check(o); (err == nil) != c.want || err != nil && !errors.Is(err, van.ErrInvalid) {
			t.Errorf("%s: %v, want it to fit: %t", c.name, err, c.want)
		}
	}
}

// Private data has space for 15 bytes of a host's name: two nodes without ids may look the same.
func TestOriginalsWithLongNames(t *testing.T) {
	p := newPair(t, oneQP)
	for i := range 2 {
		newOriginalOn(p, van.Empty, fmt.Sprintf("10.77.0.%d", 2+i), fmt.Sprintf("a-rather-long-name-%d", i))
	}
	for _, x := range *p.server.tables.conns.Load() {
		if x.in != nil && x.in.failed.Load() {
			t.Errorf("a connection has ended")
		}
	}
}

// TestPushWhileConnecting: a push to a C++ node that is sent as soon as the watcher is notified of the connection does not limit the size of an
// earlier push of its key, which was queued before the connection.
func TestPushWhileConnecting(t *testing.T) {
	r := newRig(t)
	w := r.node(9, oneQP)
	p := newRaw(r, rawAddr, van.Node{ID: 10})
	defer p.end()
	to := &testNode{who: van.Node{ID: 10, Hostname: rawAddr.String(), Port: p.port}}
	w.WatchPeers(func(_ int, up bool, cause error) {
		if up {
			w.must(push(to, 1, 2, value(1000, 2)))
		} else {
			t.Errorf("the peer is said to be lost: %v", cause)
		}
	})
	w.connect(to)
	w.must(push(to, 1, 1, value(5000, 1)))
	c := p.accept(1, func(q int) []byte { return p.privateData(false, 0, q, 1) })
	var s slotRequest
	p.check(s.get(c.receive(immSlotRequest)))
	if s.data[1] != 5000 {
		t.Errorf("the first slot request is for %d bytes, want those of the first push, 5000", s.data[1])
	}
	w.Disconnect(10)
}
