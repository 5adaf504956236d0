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

// destinations are where received values are wanted: the memory that pull requests in
// flight have named, and the buffers registered for pushes. Peers share no lock: each has
// its own part, found without one.
type destinations struct {
	mu sync.Mutex // of changes of by
	by atomic.Pointer[map[int]*peerDestinations]
}

// peerDestinations are those of one peer.
type peerDestinations struct {
	mu      sync.Mutex
	into    map[pullID]backend.Mem
	pending atomic.Int32           // len(into), readable without mu
	writing []*destination         // being written to
	pushes  map[uint64]backend.Mem // by key
}

// unlock ends a change of into.
func (p *peerDestinations) unlock() {
	p.pending.Store(int32(len(p.into)))
	p.mu.Unlock()
}

// peer returns the part of a peer, or nil.
func (ps *destinations) peer(id int) *peerDestinations { return (*ps.by.Load())[id] }

// of returns the part of a peer. Parts stay: there are as many as peers have had ids.
func (ps *destinations) of(peer int) *peerDestinations {
	if p := ps.peer(peer); p != nil {
		return p
	}
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if p := ps.peer(peer); p != nil {
		return p
	}
	p := &peerDestinations{into: map[pullID]backend.Mem{}, pushes: map[uint64]backend.Mem{}}
	by := maps.Clone(*ps.by.Load())
	by[peer] = p
	ps.by.Store(&by)
	return p
}

// destination is the memory that the values of an answer are written to.
type destination struct {
	mem     backend.Mem       // empty: none
	of      *peerDestinations // of which peer
	mu      sync.Mutex        // held while bytes are written
	revoked bool              // under mu
	copied  backend.Event     // under mu: of the device's copy under way
}

// fill calls f, which begins a copy of the device, unless the destination was revoked. f
// returns what ends when the copy has; revoking waits for it, also when f has failed.
func (d *destination) fill(f func() (backend.Event, error)) (running backend.Event, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.revoked {
		return nil, errRevoked
	}
	d.copied, err = f()
	return d.copied, err
}

// filled says that the copy has ended.
func (d *destination) filled() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.copied = nil
}

// revoke ends all writing to the destination. It fails when the device's copy under
// way does not end before ctx.
func (d *destination) revoke(ctx context.Context) error {
	d.mu.Lock() // a copy of the host's at most is under way
	defer d.mu.Unlock()
	d.revoked = true
	if d.copied == nil {
		return nil
	}
	if err := d.copied.Sync(ctx); ctx.Err() != nil {
		return err
	}
	return nil // if it has failed, so has the device, which writes nothing then
}

// write calls f, which writes to the destination, unless it was revoked.
func (d *destination) write(f func() error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.revoked {
		return errRevoked
	}
	return f()
}

var errRevoked = errors.New("the memory for the answer was taken back")

// pullID names a pull in flight at one peer.
type pullID struct{ app, customer, time int32 }

func newDestinations() *destinations {
	ps := &destinations{}
	ps.by.Store(&map[int]*peerDestinations{})
	return ps
}

func pullOf(m *van.Meta) pullID { return pullID{m.AppID, m.CustomerID, m.Timestamp} }

// expect makes msg.Into the destination of the answer to a pull that is about to be sent.
// Small answers to the host come without it.
func (ps *destinations) expect(msg *van.Message) bool {
	if n := msg.Into.Len(); !msg.Request || msg.Push || n == 0 || msg.Into.OnHost() && n < streamFrom {
		return false
	}
	p := ps.of(msg.Receiver)
	p.mu.Lock()
	defer p.unlock()
	p.into[pullOf(&msg.Meta)] = msg.Into
	return true
}

// drop forgets what msg, which could not be sent, has named.
func (ps *destinations) drop(msg *van.Message) {
	p := ps.of(msg.Receiver)
	p.mu.Lock()
	defer p.unlock()
	delete(p.into, pullOf(&msg.Meta))
}

// find returns where n bytes of values of a received message are wanted, if that is on
// the device or on the host, as device says. For the answer to a pull that becomes d,
// which must be given to finish in the end.
func (ps *destinations) find(msg *van.Message, n int, d *destination, device bool) (dst backend.Mem, ok bool) {
	p := ps.peer(msg.Sender)
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
		r := pullOf(&msg.Meta)
		dst, ok = p.into[r]
		delete(p.into, r)
		if !ok || dst.Len() != n || dst.OnHost() == device {
			return backend.Mem{}, false
		}
		d.mem, d.of, d.revoked = dst, p, false
		p.writing = append(p.writing, d)
		return dst, true
	}
	return backend.Mem{}, false
}

// answered forgets the destination of an answer from peer that has come another way: with
// it the memory is the caller's again.
func (ps *destinations) answered(peer int, m *van.Meta) {
	p := ps.peer(peer)
	if p == nil || p.pending.Load() == 0 { // a pull is noted before it is sent
		return
	}
	p.mu.Lock()
	defer p.unlock()
	delete(p.into, pullOf(m))
}

// finish ends the use of a destination, if it is one.
func (ps *destinations) finish(d *destination) {
	if d.mem.Len() == 0 {
		return
	}
	p := d.of
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.Index(p.writing, d); i >= 0 {
		p.writing = slices.Delete(p.writing, i, i+1)
	}
	d.mem = backend.Mem{}
}

// revoke takes back memory: when it returns nil, nobody writes to it any more. It fails
// when a device's copy to it does not end before ctx.
func (ps *destinations) revoke(ctx context.Context, mem backend.Mem) error {
	var errs []error
	for _, p := range *ps.by.Load() {
		p.mu.Lock()
		for r, m := range p.into {
			if m.Overlaps(mem) {
				delete(p.into, r)
			}
		}
		for _, d := range p.writing {
			if d.mem.Overlaps(mem) {
				errs = append(errs, d.revoke(ctx))
			}
		}
		p.unlock()
	}
	return errors.Join(errs...)
}

// forget drops what peer was asked for: it will not answer any more.
func (ps *destinations) forget(peer int) {
	if p := ps.peer(peer); p != nil {
		p.mu.Lock()
		clear(p.into)
		p.unlock()
	}
}

// register makes dst the destination of what peer pushes under key.
func (ps *destinations) register(peer int, key uint64, dst backend.Mem) {
	p := ps.of(peer)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pushes[key] = dst
}
