package local

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// places are where received values are wanted: the memory that pull requests in
// flight have named, and the buffers registered for pushes.
type places struct {
	mu      sync.Mutex
	into    map[request]backend.Mem
	asked   atomic.Int32 // len(into), for who need not look
	writing []*landing
	pushes  map[push]backend.Mem
}

// unlock ends a change of into.
func (p *places) unlock() {
	p.asked.Store(int32(len(p.into)))
	p.mu.Unlock()
}

// landing is the memory in which an answer is landing.
type landing struct {
	mem     backend.Mem   // empty: none
	mu      sync.Mutex    // held while bytes are written
	revoked bool          // under mu
	copied  backend.Event // under mu: of the device's copy under way
}

// fill calls f, which begins a copy of the device that ends with event, unless the
// landing was revoked.
func (l *landing) fill(event backend.Event, f func() error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.revoked {
		return errRevoked
	}
	err := f()
	if err == nil {
		l.copied = event
	}
	return err
}

// filled says that the copy has ended.
func (l *landing) filled() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.copied = nil
}

// take makes nobody write to the landing any more. It fails when the device's copy under
// way does not end before ctx.
func (l *landing) take(ctx context.Context) error {
	l.mu.Lock() // a copy of the host's at most is under way
	defer l.mu.Unlock()
	l.revoked = true
	if l.copied == nil {
		return nil
	}
	if err := l.copied.Sync(ctx); ctx.Err() != nil {
		return err
	}
	return nil // if it has failed, so has the device, which writes nothing then
}

// write calls f, which writes to the landing, unless it was revoked.
func (l *landing) write(f func() error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.revoked {
		return errRevoked
	}
	return f()
}

var errRevoked = errors.New("the memory for the answer was taken back")

// request names a pull in flight.
type request struct {
	peer                int
	app, customer, time int32
}

// push names what a peer pushes.
type push struct {
	peer int
	key  uint64
}

func newPlaces() *places {
	return &places{into: map[request]backend.Mem{}, pushes: map[push]backend.Mem{}}
}

func requestOf(peer int, m *van.Meta) request {
	return request{peer, m.AppID, m.CustomerID, m.Timestamp}
}

// expect makes msg.Into the place of the answer to a pull that is about to be sent.
// Small answers to the host come without it.
func (p *places) expect(msg *van.Message) bool {
	if n := msg.Into.Len(); !msg.Request || msg.Push || n == 0 || msg.Into.OnHost() && n < streamFrom {
		return false
	}
	p.mu.Lock()
	defer p.unlock()
	p.into[requestOf(msg.Receiver, &msg.Meta)] = msg.Into
	return true
}

// drop forgets what msg, which could not be sent, has named.
func (p *places) drop(msg *van.Message) {
	p.mu.Lock()
	defer p.unlock()
	delete(p.into, requestOf(msg.Receiver, &msg.Meta))
}

// find returns where n bytes of values of a received message are wanted, if that is on
// the device or on the host, as device says. The answer to a pull makes that l, which
// must be given to settle in the end.
func (p *places) find(msg *van.Message, n int, l *landing, device bool) (dst backend.Mem, ok bool) {
	p.mu.Lock()
	defer p.unlock()
	switch {
	case msg.Request && msg.Push && msg.Keys.Len() == 8:
		dst = p.pushes[push{msg.Sender, binary.LittleEndian.Uint64(msg.Keys.Host())}]
		if dst.Len() < n || dst.OnHost() == device {
			return backend.Mem{}, false
		}
		return dst.Sub(0, n), true
	case !msg.Request && !msg.Push:
		r := requestOf(msg.Sender, &msg.Meta)
		dst, ok = p.into[r]
		delete(p.into, r)
		if !ok || dst.Len() != n || dst.OnHost() == device {
			return backend.Mem{}, false
		}
		l.mem, l.revoked = dst, false
		p.writing = append(p.writing, l)
		return dst, true
	}
	return backend.Mem{}, false
}

// answered forgets the place of an answer from peer that has come another way: with it
// the memory is the caller's again.
func (p *places) answered(peer int, m *van.Meta) {
	if p.asked.Load() == 0 { // the question was noted before it was sent
		return
	}
	p.mu.Lock()
	defer p.unlock()
	delete(p.into, requestOf(peer, m))
}

// settle ends the use of a landing, if it is one.
func (p *places) settle(l *landing) {
	if l.mem.Len() == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.Index(p.writing, l); i >= 0 {
		p.writing = slices.Delete(p.writing, i, i+1)
	}
	l.mem = backend.Mem{}
}

// revoke takes back memory: when it returns nil, nobody writes to it any more. It fails
// when a device's copy to it does not end before ctx.
func (p *places) revoke(ctx context.Context, mem backend.Mem) error {
	overlaps := func(m backend.Mem) bool {
		return m.Addr() < mem.Addr()+uint64(mem.Len()) && mem.Addr() < m.Addr()+uint64(m.Len())
	}
	p.mu.Lock()
	defer p.unlock()
	for r, m := range p.into {
		if overlaps(m) {
			delete(p.into, r)
		}
	}
	var errs []error
	for _, l := range p.writing {
		if overlaps(l.mem) {
			errs = append(errs, l.take(ctx))
		}
	}
	return errors.Join(errs...)
}

// forget drops what peer was asked for: it will not answer any more.
func (p *places) forget(peer int) {
	p.mu.Lock()
	defer p.unlock()
	for r := range p.into {
		if r.peer == peer {
			delete(p.into, r)
		}
	}
}

// register makes dst the place of what peer pushes under key.
func (p *places) register(peer int, key uint64, dst backend.Mem) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pushes[push{peer, key}] = dst
}
