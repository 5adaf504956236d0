package replay

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma"
)

// Addresses of our node and of those of the original's.
var (
	oursAt   = netip.MustParseAddr("10.77.0.1")
	theirsAt = netip.MustParseAddrPort("10.77.0.2:7000")
)

const (
	serverID = 8
	workerID = 9
)

// ourNode is a van of ours and its received messages.
type ourNode struct {
	van.Van
	t     *testing.T
	stack *fakeverbs.Stack
	addr  netip.AddrPort
	got   chan *received
	watch chan bool // connections that broke, or stand again
}

// received is a copy of a received message.
type received struct {
	van.Meta
	sender int
	vals   []byte
	placed bool
}

func rulesNet(t *testing.T) *fakeverbs.Net {
	net := fakeverbs.NewNet()
	t.Cleanup(func() { checkNet(t, net) })
	return net
}

func newOurs(t *testing.T, net *fakeverbs.Net, role van.Role, id int, change ...func(*env.Config)) *ourNode {
	cfg := env.Default()
	cfg.VanType, cfg.EnableIPC = "ibverbs", 0
	for _, f := range change {
		f(cfg)
	}
	n := &ourNode{t: t, stack: net.Stack(oursAt), got: make(chan *received, 1<<12), watch: make(chan bool, 64)}
	n.stack.SetName("ours")
	n.Van = rdma.NewOn(n.stack, van.Options{Config: cfg})
	n.Van.(van.PeerWatcher).WatchPeers(func(_ int, up bool, cause error) {
		if errors.Is(cause, syscall.ECONNREFUSED) {
			return
		}
		select {
		case n.watch <- up:
		default:
		}
	})
	port, err := n.Bind(t.Context(), van.Node{Role: role, ID: van.Empty, Hostname: oursAt.String()})
	must(t, err)
	n.addr = netip.AddrPortFrom(oursAt, uint16(port))
	n.SetID(id)
	n.Start(func(m *van.Message) {
		r := &received{sender: m.Sender, placed: m.Placed}
		r.Meta.CopyFrom(&m.Meta)
		if m.Vals.Len() > 0 {
			r.vals = slices.Clone(m.Vals.Host())
		}
		n.got <- r
	})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		must(t, n.Close(ctx))
	})
	return n
}

// with makes a node of the original's, and connects both ways.
func (n *ourNode) with(net *fakeverbs.Net, role van.Role, id int, change ...func(*cppNode)) *cppNode {
	p := newCPP(n.t, net, theirsAt, role, id)
	for _, f := range change {
		f(p)
	}
	must(n.t, n.Connect(n.t.Context(), id, p.node()))
	p.connect(workerID+serverID-id, n.addr)
	n.t.Cleanup(p.die) // before our node closes
	return p
}

func (n *ourNode) next() *received {
	n.t.Helper()
	select {
	case m := <-n.got:
		return m
	case <-time.After(patience):
		n.t.Fatal("our node gets nothing")
		return nil
	}
}

// watched waits until the watcher of peers is called with want.
func (n *ourNode) watched(want bool) {
	n.t.Helper()
	select {
	case up := <-n.watch:
		if up != want {
			n.t.Fatalf("the watcher is told up=%t, want %t", up, want)
		}
	case <-time.After(patience):
		n.t.Fatalf("the watcher is not told up=%t", want)
	}
}

// dataMeta is the meta of a request.
func dataMeta(push bool, ts int32, key uint64, length int) van.Meta {
	var m van.Meta
	m.Reset()
	m.Head, m.AppID, m.CustomerID = van.Single, 0, 0
	m.Request, m.Push, m.Timestamp, m.Key, m.ValLen, m.IsTensor = true, push, ts, key, int32(length), true
	m.DataTypes = []van.DataType{van.TypeUint64, van.TypeOther}
	m.Dtype, m.Dim, m.Shape = 0, 1, [van.MaxDims]int64{int64(length)}
	return m
}

func keyFrame(key uint64) backend.Mem { return backend.Bytes(le.AppendUint64(nil, key)) }

func pushMsg(ts int32, key uint64, value []byte) *van.Message {
	m := &van.Message{Meta: dataMeta(true, ts, key, len(value)), Receiver: serverID, Frames: 2, Keys: keyFrame(key)}
	if len(value) > 0 {
		m.Vals = backend.Bytes(value)
	}
	return m
}

func pullMsg(ts int32, key uint64, into []byte) *van.Message {
	m := &van.Message{Meta: dataMeta(false, ts, key, len(into)), Receiver: serverID, Frames: 2, Keys: keyFrame(key), Into: backend.Bytes(into)}
	m.Addr = m.Into.Addr()
	return m
}

func controlMeta(ts int32) van.Meta {
	var m van.Meta
	m.Reset()
	m.Timestamp, m.Control.Cmd = ts, van.Heartbeat
	return m
}

func packedMeta(t testing.TB, m *van.Meta) []byte {
	b, err := m.AppendTo(nil)
	must(t, err)
	return b
}

// answerTo is the meta of the answer to a request, as the original makes it.
func answerTo(m *van.Meta) *van.Meta {
	var a van.Meta
	a.CopyFrom(m)
	a.Request, a.IsTensor, a.Dtype, a.Dim, a.Shape = false, false, 0, 0, [van.MaxDims]int64{}
	if a.Push {
		a.DataTypes = nil
	}
	return &a
}

// answer answers a request to a node of the original's.
func (n *cppNode) answer(m *cppMessage, value []byte) {
	a := packedMeta(n.t, answerTo(&m.meta))
	if m.meta.Push {
		n.send(m.from, a, nil)
	} else {
		n.send(m.from, a, nil, m.key, value)
	}
}

// passed sends a control message to a node of the original's, so that all that would have
// come by itself has come.
func (n *ourNode) passed(p *cppNode, ts int32) {
	n.t.Helper()
	must(n.t, n.Send(&van.Message{Meta: controlMeta(ts), Receiver: p.id}))
	if m := p.next(); m.meta.Control.Cmd != van.Heartbeat || m.meta.Timestamp != ts {
		n.t.Fatalf("the peer got %s, want the heartbeat %d", m.meta.String(), ts)
	}
	p.nothing()
}

// arrives takes the next message at p, which must have this timestamp and value.
func arrives(t *testing.T, p *cppNode, ts int32, value []byte) *cppMessage {
	t.Helper()
	m := p.next()
	if m.meta.IsControl() || m.meta.Timestamp != ts || !bytes.Equal(m.value, value) {
		t.Fatalf("the peer got %s with %d bytes %.16x, want timestamp %d and %d bytes %.16x", m.meta.String(), len(m.value), m.value, ts, len(value), value)
	}
	return m
}

func filledWith(n int, b byte) []byte { return bytes.Repeat([]byte{b}, n) }
