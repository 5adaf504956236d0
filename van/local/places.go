package local

import (
	"context"
	"encoding/binary"
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// places are where received values are wanted: the memory that pull requests in
// flight have named, and the buffers registered for pushes. Peers share no lock: each has
// its own part, found without one.
type places struct {
	mu sync.Mutex // of changes of by
	by atomic.Pointer[map[int]*peerPlaces]
}

// peerPlaces are those of one peer.
type peerPlaces struct {
	mu      sync.Mutex
	into    map[request]backend.Mem
	asked   atomic.Int32 // len(into), for who need not look
	writing []*landing
	pushes  map[uint64]backend.Mem // by key
}

// unlock ends a change of into.
func (p *peerPlaces) unlock() {
	p.asked.Store(int32(len(p.into)))
	p.mu.Unlock()
}

// find returns the part of a peer, or nil.
func (ps *places) find(peer int) *peerPlaces { return (*ps.by.Load())[peer] }

// of returns the part of a peer. Parts stay: there are as many as peers have had ids.
func (ps *places) of(peer int) *peerPlaces {
	if p := ps.find(peer); p != nil {
		return p
	}
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if p := ps.find(peer); p != nil {
		return p
	}
	p := &peerPlaces{into: map[request]backend.Mem{}, pushes: map[uint64]backend.Mem{}}
	by := maps.Clone(*ps.by.Load())
	by[peer] = p
	ps.by.Store(&by)
	return p
}

// landing is the memory in which an answer is landing.
type landing struct {
	mem     backend.Mem   // empty: none
	at      *peerPlaces   // whose it is
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

// request names a pull in flight at one peer.
type request struct{ app, customer, time int32 }

func newPlaces() *places {
	ps := &places{}
	ps.by.Store(&map[int]*peerPlaces{})
	return ps
}

func requestOf(m *van.Meta) request { return request{m.AppID, m.CustomerID, m.Timestamp} }

// expect makes msg.Into the place of the answer to a pull that is about to be sent.
// Small answers to the host come without it.
func (ps *places) expect(msg *van.Message) bool {
	if n := msg.Into.Len(); !msg.Request || msg.Push || n == 0 || msg.Into.OnHost() && n < streamFrom {
		return false
	}
	p := ps.of(msg.Receiver)
	p.mu.Lock()
	defer p.unlock()
	p.into[requestOf(&msg.Meta)] = msg.Into
	return true
}

// drop forgets what msg, which could not be sent, has named.
func (ps *places) drop(msg *van.Message) {
	p := ps.of(msg.Receiver)
	p.mu.Lock()
	defer p.unlock()
	delete(p.into, requestOf(&msg.Meta))
}

// want returns where n bytes of values of a received message are wanted, if that is on
// the device or on the host, as device says. The answer to a pull makes that l, which
// must be given to settle in the end.
func (ps *places) want(msg *van.Message, n int, l *landing, device bool) (dst backend.Mem, ok bool) {
	p := ps.find(msg.Sender)
	if p == nil {
		return backend.Mem{}, false
	}
	p.mu.Lock()
	defer p.unlock()
	switch {
	case msg.Request && msg.Push && msg.Keys.Len() == 8:
		dst = p.pushes[binary.LittleEndian.Uint64(msg.Keys.Host())]
		if dst.Len() < n || dst.OnHost() == device {
			return backend.Mem{}, false
		}
		return dst.Sub(0, n), true
	case !msg.Request && !msg.Push:
		r := requestOf(&msg.Meta)
		dst, ok = p.into[r]
		delete(p.into, r)
		if !ok || dst.Len() != n || dst.OnHost() == device {
			return backend.Mem{}, false
		}
		l.mem, l.at, l.revoked = dst, p, false
		p.writing = append(p.writing, l)
		return dst, true
	}
	return backend.Mem{}, false
}

// answered forgets the place of an answer from peer that has come another way: with it
// the memory is the caller's again.
func (ps *places) answered(peer int, m *van.Meta) {
	p := ps.find(peer)
	if p == nil || p.asked.Load() == 0 { // the question was noted before it was sent
		return
	}
	p.mu.Lock()
	defer p.unlock()
	delete(p.into, requestOf(m))
}

// settle ends the use of a landing, if it is one.
func (ps *places) settle(l *landing) {
	if l.mem.Len() == 0 {
		return
	}
	p := l.at
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.Index(p.writing, l); i >= 0 {
		p.writing = slices.Delete(p.writing, i, i+1)
	}
	l.mem = backend.Mem{}
}

// revoke takes back memory: when it returns nil, nobody writes to it any more. It fails
// when a device's copy to it does not end before ctx.
func (ps *places) revoke(ctx context.Context, mem backend.Mem) error {
	overlaps := func(m backend.Mem) bool {
		return m.Addr() < mem.Addr()+uint64(mem.Len()) && mem.Addr() < m.Addr()+uint64(m.Len())
	}
	var errs []error
	for _, p := range *ps.by.Load() {
		p.mu.Lock()
		for r, m := range p.into {
			if overlaps(m) {
				delete(p.into, r)
			}
		}
		for _, l := range p.writing {
			if overlaps(l.mem) {
				errs = append(errs, l.take(ctx))
			}
		}
		p.unlock()
	}
	return errors.Join(errs...)
}

// forget drops what peer was asked for: it will not answer any more.
func (ps *places) forget(peer int) {
	if p := ps.find(peer); p != nil {
		p.mu.Lock()
		clear(p.into)
		p.unlock()
	}
}

// register makes dst the place of what peer pushes under key.
func (ps *places) register(peer int, key uint64, dst backend.Mem) {
	p := ps.of(peer)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pushes[key] = dst
}
