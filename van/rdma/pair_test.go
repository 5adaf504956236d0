package rdma

import (
	"context"
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// Ids of the two nodes of a pair.
const (
	serverID = 8
	workerID = 9
)

const testTime = 30 * time.Second

// pair is a worker and a server on one emulated network. Their vans are not connected yet.
type pair struct {
	testing.TB
	net            *fakeverbs.Net
	worker, server *rvan
	atWorker       chan *van.Message // retained
	atServer       chan *van.Message
}

func newPair(t testing.TB, change func(*env.Config)) *pair {
	p := &pair{TB: t, net: fakeverbs.NewNet(), atWorker: make(chan *van.Message, 1000), atServer: make(chan *van.Message, 1000)}
	p.net.OnError(func(err error) { t.Errorf("the network: %v", err) })
	t.Cleanup(func() {
		p.close()
		for _, l := range p.net.Leaks() {
			t.Errorf("leaked: %s", l)
		}
		p.net.Close()
	})
	p.worker = p.node(workerID, van.Worker, p.atWorker, change)
	p.server = p.node(serverID, van.Server, p.atServer, change)
	return p
}

func (p *pair) node(id int, role van.Role, to chan *van.Message, change func(*env.Config)) *rvan {
	p.Helper()
	cfg := env.Default()
	cfg.VanType = "ibverbs"
	if change != nil {
		change(cfg)
	}
	addr := netip.MustParseAddr("10.77.0.1")
	v := NewOn(p.net.Stack(addr), van.Options{Config: cfg}).(*rvan)
	LongNets(v)
	_, err := v.Bind(context.Background(), van.Node{Role: role, ID: van.Empty, Hostname: addr.String()})
	if err != nil {
		p.Fatal(err)
	}
	v.SetID(id)
	v.Start(func(m *van.Message) { to <- m.Retain() })
	return v
}

// connect connects from to to, which has this id.
func (p *pair) connect(from *rvan, id int, to *rvan) {
	p.Helper()
	if err := from.Connect(context.Background(), id, to.local.self); err != nil {
		p.Fatal(err)
	}
}

func (p *pair) both() {
	p.Helper()
	p.connect(p.worker, serverID, p.server)
	p.connect(p.server, workerID, p.worker)
}

func (p *pair) next(c chan *van.Message) *van.Message {
	p.Helper()
	select {
	case m := <-c:
		return m
	case <-time.After(testTime):
		p.Fatal("no message")
		return nil
	}
}

// until polls a condition.
func (p *pair) until(what string, ok func() bool) {
	p.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.After(testTime); !ok(); {
		select {
		case <-tick.C:
		case <-end:
			p.Fatalf("no %s within %s", what, testTime)
		}
	}
}

func (p *pair) close() {
	p.Helper()
	for _, v := range []*rvan{p.worker, p.server} {
		if err := v.Close(context.Background()); err != nil {
			p.Errorf("Close: %v", err)
		}
	}
}

// tensor makes a message of one key, in the form of the tensor application.
func tensor(to, ts int, key uint64, request, push bool, vals []byte) *van.Message {
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Timestamp, m.Key, m.ValLen = to, int32(ts), key, int32(len(vals))
	m.AppID, m.CustomerID, m.Head = 0, 0, 0
	m.Request, m.Push, m.IsTensor = request, push, true
	m.Frames = 2
	m.DataTypes = append(m.DataTypes, van.TypeUint64, van.TypeOther)
	m.Keys = backend.Bytes(binary.LittleEndian.AppendUint64(nil, key))
	if push || !request {
		m.Vals = backend.Bytes(vals)
	}
	return m
}

// pullInto makes a request with the destination into.
func pullInto(to, ts int, key uint64, into []byte) *van.Message {
	m := tensor(to, ts, key, true, false, into)
	m.Into = backend.Bytes(into)
	m.Addr = m.Into.Addr()
	return m
}

// rejectAll makes all connect requests fail until end is called.
func (p *pair) rejectAll() (end func()) {
	p.net.RejectNext(1<<30, 8)
	return func() { p.net.RejectNext(0, 0) }
}
