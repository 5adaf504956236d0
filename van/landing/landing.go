// Package landing holds where a node wants received values: the memory that its pull
// requests have named, and the buffers that it has registered for pushes. A transport
// that receives a value asks a Table where to write it.
package landing

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

// ErrInvalidated is returned for memory that its owner has taken back with Invalidate.
var ErrInvalidated = errors.New("the memory for the answer was taken back")

// Table has the memory where the values of each peer are wanted. Peers share no lock:
// each has a part of its own, which is found without one. A Table is safe for concurrent use.
type Table struct {
	hostFrom int
	resend   bool

	mu sync.Mutex // guards changes of by
	by atomic.Pointer[map[int]*peerPlaces]
}

// peerPlaces is the part of a Table for one peer.
type peerPlaces struct {
	mu      sync.Mutex
	into    map[pullID]backend.Mem
	pending atomic.Int32           // len(into), readable without mu
	writing []*Place               // places that are being written to
	pushes  map[uint64]backend.Mem // by key
}

// pullID names a pull in flight at one peer.
type pullID struct{ app, customer, time int32 }

func pullOf(m *van.Meta, ts int32) pullID { return pullID{m.AppID, m.CustomerID, ts} }

// New makes a Table. Answers of fewer than hostFrom bytes to host memory have no place of
// their own: the receiver copies them. With resend (PS_RESEND) no answer has a place: a request
// that is sent again would name the memory of a call that has ended.
func New(hostFrom int, resend bool) *Table {
	t := &Table{hostFrom: hostFrom, resend: resend}
	t.by.Store(&map[int]*peerPlaces{})
	return t
}

// unlock ends a change of into.
func (p *peerPlaces) unlock() {
	p.pending.Store(int32(len(p.into)))
	p.mu.Unlock()
}

// peer returns the part of a peer, or nil.
func (t *Table) peer(id int) *peerPlaces { return (*t.by.Load())[id] }

// of returns the part of a peer. A part is never removed, so a Table has as many as peers have had ids.
func (t *Table) of(peer int) *peerPlaces {
	if p := t.peer(peer); p != nil {
		return p
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.peer(peer); p != nil {
		return p
	}
	p := &peerPlaces{into: map[pullID]backend.Mem{}, pushes: map[uint64]backend.Mem{}}
	by := maps.Clone(*t.by.Load())
	by[peer] = p
	t.by.Store(&by)
	return p
}

// Expect is called before msg is sent. If msg is a pull, Into becomes the place of the answer, in a batch that of each pull. Expect reports
// whether an answer has a place.
func (t *Table) Expect(msg *van.Message) (needs bool) {
	if t.resend || !msg.Request || len(msg.Parts) == 0 && (msg.Push || !t.lands(msg.Into)) {
		return false
	}
	p := t.of(msg.Receiver)
	p.mu.Lock()
	defer p.unlock()
	if len(msg.Parts) == 0 {
		p.into[pullOf(&msg.Meta, msg.Timestamp)] = msg.Into
		return true
	}
	for i := range msg.Parts {
		if x := &msg.Parts[i]; !x.Push && t.lands(x.Into) {
			p.into[pullOf(&msg.Meta, x.Timestamp)] = x.Into
			needs = true
		}
	}
	return needs
}

// lands reports whether an answer to mem has a place.
func (t *Table) lands(mem backend.Mem) bool {
	n := mem.Len()
	return n > 0 && (!mem.OnHost() || n >= t.hostFrom)
}

// Drop takes back Expect for msg, which could not be sent.
func (t *Table) Drop(msg *van.Message) {
	p := t.of(msg.Receiver)
	p.mu.Lock()
	defer p.unlock()
	p.remove(&msg.Meta, len(msg.Parts))
}

// remove removes the places of a message with n parts; n is 0 if it is no batch.
func (p *peerPlaces) remove(m *van.Meta, n int) {
	for i := range max(n, 1) {
		delete(p.into, pullOf(m, m.Timestamp+int32(i)))
	}
}

// Find returns where n bytes of values of a received message are wanted, if that is on the device or on the host, as device says.
// In a batch, they are the value of part i. If msg answers a pull, that memory becomes d, and the caller calls Finish for d in the end.
func (t *Table) Find(msg *van.Message, i, n int, d *Place, device bool) (dst backend.Mem, ok bool) {
	p := t.peer(msg.Sender)
	if p == nil {
		return backend.Mem{}, false
	}
	push, ts, key, keyed := msg.Push, msg.Timestamp, uint64(0), false
	if len(msg.Parts) > 0 {
		push, ts, key, keyed = msg.Parts[i].Push, msg.Parts[i].Timestamp, msg.Parts[i].Key, true
	} else if msg.Keys.Len() == 8 {
		key, keyed = binary.LittleEndian.Uint64(msg.Keys.Host()), true
	}
	p.mu.Lock()
	defer p.unlock()
	switch {
	case msg.Request && push && keyed:
		dst = p.pushes[key]
		if dst.Len() < n || dst.OnHost() == device {
			return backend.Mem{}, false
		}
		return dst.Sub(0, n), true
	case !msg.Request && !push:
		r := pullOf(&msg.Meta, ts)
		dst, ok = p.into[r]
		delete(p.into, r)
		if !ok || dst.Len() != n || dst.OnHost() == device {
			return backend.Mem{}, false
		}
		d.mem, d.of, d.invalid = dst, p, false
		p.writing = append(p.writing, d)
		return dst, true
	}
	return backend.Mem{}, false
}

// Answered removes the places of an answer that was received without them. The memory is the caller's again.
func (t *Table) Answered(m *van.Message) {
	p := t.peer(m.Sender)
	if p == nil || p.pending.Load() == 0 { // a pull is noted before it is sent
		return
	}
	p.mu.Lock()
	defer p.unlock()
	p.remove(&m.Meta, len(m.Parts))
}

// Finish ends the use of a place, if d is one. It returns ErrInvalidated if the memory was taken back meanwhile.
func (t *Table) Finish(d *Place) error {
	p := d.of
	if p == nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.Index(p.writing, d); i >= 0 {
		p.writing = slices.Delete(p.writing, i, i+1)
	}
	d.mem, d.of = backend.Mem{}, nil
	if d.invalid {
		d.invalid = false
		return ErrInvalidated
	}
	return nil
}

// Invalidate takes back memory: when it returns nil, nothing is written there any more. It fails
// when a device's copy to it does not end before ctx.
func (t *Table) Invalidate(ctx context.Context, mem backend.Mem) error {
	var errs []error
	for _, p := range *t.by.Load() {
		p.mu.Lock()
		for r, m := range p.into {
			if m.Overlaps(mem) {
				delete(p.into, r)
			}
		}
		for _, d := range p.writing {
			if d.mem.Overlaps(mem) {
				errs = append(errs, d.invalidate(ctx))
			}
		}
		p.unlock()
	}
	return errors.Join(errs...)
}

// Forget drops the places of all answers of a peer, which will not send them any more.
func (t *Table) Forget(peer int) {
	if p := t.peer(peer); p != nil {
		p.mu.Lock()
		clear(p.into)
		p.unlock()
	}
}

// Register makes dst the destination of the values that peer pushes under key.
func (t *Table) Register(peer int, key uint64, dst backend.Mem) {
	p := t.of(peer)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pushes[key] = dst
}

// Expected is the number of answers that have a place.
func (t *Table) Expected() (n int) {
	for _, p := range *t.by.Load() {
		n += int(p.pending.Load())
	}
	return n
}

// Place is the memory that the values of one answer are written to. The zero Place has no memory.
type Place struct {
	mem     backend.Mem
	of      *peerPlaces   // nil: no memory
	mu      sync.Mutex    // held while bytes are written
	invalid bool          // under mu
	copied  backend.Event // under mu: the end of a device's copy under way
}

// Used reports whether d has memory.
func (d *Place) Used() bool { return d.of != nil }

// Fill calls f, which starts a copy of the device, unless the place was invalidated. f returns the event of the copy's end, also when it
// fails. Invalidate waits for that event.
func (d *Place) Fill(f func() (backend.Event, error)) (running backend.Event, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.invalid {
		return nil, ErrInvalidated
	}
	d.copied, err = f()
	return d.copied, err
}

// Filled records that the copy has ended.
func (d *Place) Filled() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.copied = nil
}

// Write calls f, which writes to the place, unless the place was invalidated.
func (d *Place) Write(f func() error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.invalid {
		return ErrInvalidated
	}
	return f()
}

// invalidate ends all writing to the place. It fails when the device's copy under way does not end before ctx.
func (d *Place) invalidate(ctx context.Context) error {
	d.mu.Lock() // at most one copy by the host is under way
	defer d.mu.Unlock()
	d.invalid = true
	if d.copied == nil {
		return nil
	}
	if err := d.copied.Sync(ctx); ctx.Err() != nil {
		return err
	}
	return nil // a device that has failed writes nothing more
}
