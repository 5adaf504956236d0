package inproc

// A transport without a network, for measurements of the layers above a transport.

import (
	"context"
	"maps"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/internal/fifo"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/engine"
)

// Null is a transport without a network, for nodes of one process. It passes messages to the peer by reference, and
// copies only frames that Send must copy. It delivers the answer to a pull as one whose values are in place already,
// and does not move its bytes. So the cost of a push_pull is the cost of the layers above a transport.
//
// One goroutine at a time delivers, for all nodes: a caller that waits for an answer, or, if no caller polls, the net's
// own goroutine after at most nullTick.
type Null struct {
	turn sync.Mutex // held by the delivering goroutine

	mu   sync.Mutex
	ends map[string]*nullEnd      // by address
	port int                      // the latest port of a node
	sent fifo.Queue[*nullMessage] // sent and not delivered yet
	free fifo.Queue[*nullMessage]

	stop    chan struct{}
	stopped sync.WaitGroup
}

// nullTick is the longest time that a message waits if no caller polls.
const nullTick = 200 * time.Microsecond

// nullEnd is an address: its receiver, and messages that arrive before there is one.
type nullEnd struct {
	recv  van.Receiver // nil if there is none yet; guarded by Null.mu
	early []*nullMessage
}

// nullMessage is a message in flight.
type nullMessage struct {
	msg   van.Message
	to    *nullEnd
	done  van.Completion // of the sender's message
	short [3][van.CopyBelow]byte
}

// NewNull makes a network without nodes. Close ends it.
func NewNull() *Null {
	n := &Null{ends: map[string]*nullEnd{}, port: 20000, stop: make(chan struct{})}
	n.stopped.Go(func() {
		tick := time.NewTicker(nullTick)
		defer tick.Stop()
		for {
			select {
			case <-n.stop:
				return
			case <-tick.C:
				if n.Claim() {
					for n.PollOnce(0) == engine.Message {
					}
					n.Release(false, false)
				}
			}
		}
	})
	return n
}

// Close ends the goroutine of the net, after all nodes have ended.
func (n *Null) Close() {
	close(n.stop)
	n.stopped.Wait()
}

// Factory creates a node's transport.
func (n *Null) Factory(o van.Options) (van.Van, error) {
	v := &nullVan{net: n}
	o.Engine.Add(n)
	v.id.Store(van.Empty)
	v.peers.Store(&map[int]*nullEnd{})
	return v, nil
}

// Claim implements engine.Pollable.
func (n *Null) Claim() bool { return n.turn.TryLock() }

// Release implements engine.Pollable.
func (n *Null) Release(bool, bool) { n.turn.Unlock() }

// SpinTime implements engine.Pollable.
func (n *Null) SpinTime() time.Duration { return 0 }

// CanSleep implements engine.Pollable.
func (n *Null) CanSleep() bool { return false }

// Sleep implements engine.Pollable.
func (n *Null) Sleep(time.Duration) {}

// PollOnce implements engine.Pollable: it delivers one message. If there is none, a Poll ends.
func (n *Null) PollOnce(time.Duration) engine.PollResult {
	n.mu.Lock()
	if n.sent.Len() == 0 {
		n.mu.Unlock()
		return engine.LeaveToLoop
	}
	p := n.sent.Take()
	recv := p.to.recv
	if recv == nil {
		p.to.early = append(p.to.early, p)
	}
	n.mu.Unlock()
	if recv != nil {
		recv(&p.msg)
		p.msg.Release()
	}
	return engine.Message
}

// Free implements van.Owner.
func (n *Null) Free(m *van.Message) {
	p := (*nullMessage)(m.Native())
	if p.done != nil {
		p.done.Sent()
	}
	p.msg.Reset()
	p.to, p.done = nil, nil
	n.mu.Lock()
	n.free.Put(p)
	n.mu.Unlock()
}

// nullVan is the transport of one node.
type nullVan struct {
	net   *Null
	id    atomic.Int64
	self  *nullEnd
	peers atomic.Pointer[map[int]*nullEnd] // replaced, never changed, under net.mu
}

var (
	_ van.Van         = (*nullVan)(nil)
	_ engine.Pollable = (*Null)(nil)
)

// Type implements van.Van.
func (v *nullVan) Type() string { return "null" }

// SetID implements van.Van.
func (v *nullVan) SetID(id int) { v.id.Store(int64(id)) }

func (n *Null) endLocked(addr string) *nullEnd {
	e := n.ends[addr]
	if e == nil {
		e = &nullEnd{}
		n.ends[addr] = e
	}
	return e
}

// Bind implements van.Van.
func (v *nullVan) Bind(_ context.Context, self van.Node) (int, error) {
	v.net.mu.Lock()
	defer v.net.mu.Unlock()
	if self.Port == 0 {
		v.net.port++
		self.Port = v.net.port
	}
	v.self = v.net.endLocked(self.Addr())
	v.SetID(self.ID)
	return self.Port, nil
}

// Start implements van.Van.
func (v *nullVan) Start(recv van.Receiver) {
	v.net.mu.Lock()
	defer v.net.mu.Unlock()
	v.self.recv = recv
	for _, p := range v.self.early {
		v.net.sent.Put(p)
	}
	v.self.early = nil
}

// change replaces the table of peers by a copy that f has changed.
func (v *nullVan) change(f func(peers map[int]*nullEnd)) {
	v.net.mu.Lock()
	defer v.net.mu.Unlock()
	peers := maps.Clone(*v.peers.Load())
	f(peers)
	v.peers.Store(&peers)
}

// Connect implements van.Van.
func (v *nullVan) Connect(_ context.Context, id int, peer van.Node) error {
	v.change(func(peers map[int]*nullEnd) { peers[id] = v.net.endLocked(peer.Addr()) })
	return nil
}

// Rename implements van.Van.
func (v *nullVan) Rename(old, id int) error {
	v.change(func(peers map[int]*nullEnd) {
		peers[id] = peers[old]
		if old != id {
			delete(peers, old)
		}
	})
	return nil
}

// Disconnect implements van.Van.
func (v *nullVan) Disconnect(id int) {
	v.change(func(peers map[int]*nullEnd) { delete(peers, id) })
}

// Send implements van.Van.
func (v *nullVan) Send(m *van.Message) error {
	to := (*v.peers.Load())[m.Receiver]
	if to == nil {
		return &van.Error{Op: "send", Node: van.NodeName(int(v.id.Load())), Peer: van.NodeName(m.Receiver), Err: van.ErrUnknownPeer}
	}
	n := v.net
	n.mu.Lock()
	defer n.mu.Unlock()
	var p *nullMessage
	if n.free.Len() > 0 {
		p = n.free.Take()
	} else {
		p = &nullMessage{}
	}
	p.msg.CopyFrom(&m.Meta)
	p.msg.Sender, p.msg.Receiver, p.msg.Frames = int(v.id.Load()), m.Receiver, m.Frames
	p.msg.Placed = !m.Request && !m.Push
	for i := range m.Frames {
		f := m.Frame(i)
		if f.Len() < van.CopyBelow {
			f = backend.Bytes(p.short[i][:copy(p.short[i][:], f.Host())])
		}
		p.msg.SetFrame(i, f)
	}
	p.msg.Parts = append(p.msg.Parts[:0], m.Parts...)
	for i := range p.msg.Parts {
		p.msg.Parts[i].Placed = p.msg.Placed
	}
	p.to, p.done = to, m.Done
	p.msg.Adopt(n, unsafe.Pointer(p))
	n.sent.Put(p)
	return nil
}

// Close implements van.Van. Messages in flight to other nodes are still delivered.
func (v *nullVan) Close(context.Context) error {
	v.net.mu.Lock()
	defer v.net.mu.Unlock()
	if v.self != nil {
		v.self.recv = func(*van.Message) {}
	}
	return nil
}
