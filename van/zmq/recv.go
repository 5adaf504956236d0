package zmq

import (
	"context"
	"errors"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/dispatch"
	"github.com/stepaf/stepaf-go/internal/env"
	"github.com/stepaf/stepaf-go/van"
)

var errDisconnected = errors.New("its connection was closed")

// receiver reads one socket and hands messages up.
type receiver struct {
	v     *zvan
	sock  *socket
	loop  *dispatch.Loop[*van.Message]
	spin  time.Duration
	next  *van.Message // the message that try fills
	err   error
	try   func(uintptr) bool
	lanes lanes
	pool  pool
}

func newReceiver(v *zvan, s *socket) *receiver {
	r := &receiver{v: v, sock: s, spin: spinTime(v.cfg.BusyPoll)}
	r.try = func(uintptr) bool { return r.poll() }
	r.loop = dispatch.NewLoop(r.receive, r.deliver)
	r.loop.Discard = func(msg *van.Message) { msg.Release() }
	return r
}

// spinTime is how long a receiver looks before it sleeps. On a machine with few
// cores the spinner would keep the one it waits for from running.
func spinTime(b env.BusyPoll) time.Duration {
	switch {
	case b == env.SpinForever:
		return 1<<63 - 1
	case b == env.AlwaysBlock || runtime.NumCPU() < 4:
		return 0
	default:
		return 20 * time.Microsecond
	}
}

// stop ends the loop and waits for the handler that may be running.
func (r *receiver) stop(ctx context.Context) {
	r.sock.stop()
	if r.loop.Stop(ctx) == nil && r.next != nil {
		r.pool.Free(r.next)
		r.next = nil
	}
	r.pool.close()
}

// poll tries to receive into r.next. It returns true when there is a message or
// an error.
func (r *receiver) poll() bool {
	ok, err := r.sock.recv((*frames)(r.next.Native()))
	r.err = err
	return ok || err != nil
}

// receive blocks until a well-formed message has come.
func (r *receiver) receive() (*van.Message, *lane, bool) {
	for {
		if r.next == nil {
			r.next = r.pool.get()
		}
		if !r.await() {
			return nil, nil, false
		}
		r.v.lent.reap()
		if r.err != nil {
			if r.sock.closed.Load() {
				return nil, nil, false
			}
			r.v.log.Warn("receive failed", "err", r.err)
			continue
		}
		msg := r.next
		f := (*frames)(msg.Native())
		now := clock.Now()
		if err := parse(msg, f); err != nil {
			r.v.malformed(err, f)
			f.release()
			msg.Meta.Reset()
			continue
		}
		if msg.Request {
			msg.RequestTrace.PostRecv = now
		} else {
			msg.ResponseTrace.PostRecv = now
		}
		msg.Receiver = int(r.v.id.Load())
		size := 0
		for i := 1; i < f.len(); i++ {
			size += int(f.size[i])
		}
		r.v.stats.received(size)
		r.next = nil
		msg.Adopt(&r.pool, msg.Native())
		return msg, r.lanes.of(msg.Sender), true
	}
}

// await spins for a while, then sleeps, until poll succeeds.
func (r *receiver) await() bool {
	if r.spin > 0 {
		for start := clock.Now(); !r.sock.closed.Load(); {
			if r.poll() {
				return true
			}
			if r.spin != 1<<63-1 && clock.Now()-start > uint64(r.spin) {
				break
			}
		}
	}
	return r.sock.wait(r.try)
}

func (r *receiver) deliver(msg *van.Message) {
	r.v.recv(msg)
	msg.Release()
}

// parse checks the frames of a message and decodes them into msg. Frame 0 names
// the sender, frame 1 is the meta, the rest is data.
func parse(msg *van.Message, f *frames) error {
	n := f.len()
	if n < 2 || f.excess() > 0 {
		return &van.FieldError{Field: "frames", Value: n + f.excess(), Want: "a sender, a meta, and up to 3 data frames"}
	}
	if err := van.DecodeMeta(f.bytes(1), &msg.Meta); err != nil {
		return err
	}
	data := n - 2
	if data == 1 {
		return &van.FieldError{Field: "data frames", Value: data, Want: "0, 2 or 3"}
	}
	msg.Sender = senderOf(f.bytes(0))
	msg.Frames = data
	for i := range data {
		msg.SetFrame(i, f.mem(i+2))
	}
	return nil
}

// senderOf reads a node id from a routing id: "ps" and digits. Anything else is a
// node that has no id yet.
func senderOf(routing []byte) int {
	if len(routing) < 3 || len(routing) > 8 || routing[0] != 'p' || routing[1] != 's' {
		return van.Empty
	}
	id := 0
	for _, c := range routing[2:] {
		if c < '0' || c > '9' {
			return van.Empty
		}
		id = id*10 + int(c-'0')
	}
	if id == 0 || id > van.Empty {
		return van.Empty
	}
	return id
}

// malformed counts and reports nonsense from the network: the 1st, 2nd, 4th, ...
// so that a flood of it does not become a flood of lines.
func (v *zvan) malformed(err error, f *frames) {
	n := v.stats.malformed.Add(1)
	if n&(n-1) != 0 {
		return
	}
	from := "unknown"
	if f.len() > 0 {
		from = strconv.QuoteToASCII(string(f.bytes(0)))
	}
	v.log.Warn("dropped a malformed message", "err", err, "from", from, "frames", f.len(), "dropped so far", n)
}

type lane = dispatch.Lane[*van.Message]

// lanes gives each sender its lane. Senders without an id share one.
type lanes struct {
	m sync.Map // int to *lane
}

func (l *lanes) of(sender int) *lane {
	if p, ok := l.m.Load(sender); ok {
		return p.(*lane)
	}
	p, _ := l.m.LoadOrStore(sender, new(lane))
	return p.(*lane)
}

// pool reuses messages together with their memory in C.
type pool struct {
	mu     sync.Mutex
	free   []*van.Message
	closed bool
}

// poolCap bounds what an idle receiver keeps.
const poolCap = 256

func (p *pool) get() *van.Message {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.free); n > 0 {
		m := p.free[n-1]
		p.free = p.free[:n-1]
		return m
	}
	m := &van.Message{}
	m.Adopt(p, unsafe.Pointer(newFrames()))
	return m
}

// Free takes back a message that nobody holds any more.
func (p *pool) Free(m *van.Message) {
	f := (*frames)(m.Native())
	f.release()
	m.Reset()
	m.Adopt(p, unsafe.Pointer(f))
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.free) >= poolCap {
		f.free()
		return
	}
	p.free = append(p.free, m)
}

// close frees what the pool holds; messages still held elsewhere free themselves.
func (p *pool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, m := range p.free {
		(*frames)(m.Native()).free()
	}
	p.free = nil
}

// stats counts without locks.
type stats struct {
	sentN, sentB, recvN, recvB, malformed atomic.Uint64
}

func (s *stats) sent(bytes int)     { s.sentN.Add(1); s.sentB.Add(uint64(bytes)) }
func (s *stats) received(bytes int) { s.recvN.Add(1); s.recvB.Add(uint64(bytes)) }
func (s *stats) get() van.Stats {
	return van.Stats{SentMessages: s.sentN.Load(), SentBytes: s.sentB.Load(), ReceivedMessages: s.recvN.Load(),
		ReceivedBytes: s.recvB.Load(), Malformed: s.malformed.Load()}
}
