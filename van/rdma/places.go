package rdma

import (
	"errors"
	"fmt"
	"slices"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// question is one that waits for its answer.
type question struct {
	start
	since uint64
}

// Lanes of questions that wait: those of control messages do not wait for others.
const (
	urgentLane = iota
	lastingLane
)

func (s *start) lane() int {
	if s.dataNum == ourStart && s.data[1]&kindOneShot != 0 || s.dataNum == 0 {
		return urgentLane // the original's have no data
	}
	return lastingLane
}

// question answers a peer that asks for a place. The receiving role is held.
func (in *incoming) question(b []byte) {
	q := question{since: clock.Now()}
	if err := q.get(b); err != nil {
		in.v.malformed(in, err)
		return
	}
	later := &in.later[q.lane()]
	in.mu.Lock()
	wait := len(*later) > 0 // who has asked first must get a place first: the others wait for it
	in.mu.Unlock()
	if !wait {
		err := in.grant(&q)
		if err == nil {
			return
		}
		in.wants(err, q.since)
	}
	in.host.hungry.Store(true)
	in.mu.Lock()
	full := len(*later) >= maxIndex
	if !full && !in.closed {
		*later = append(*later, q)
	}
	in.mu.Unlock()
	if full {
		in.fail(fmt.Errorf("%w: %d questions for a place are open", van.ErrMalformed, maxIndex))
	}
}

// again answers the questions that had to wait.
func (in *incoming) again(now uint64) {
	for k := range in.later {
		in.mu.Lock()
		all := in.later[k]
		in.later[k] = nil
		in.mu.Unlock()
		var kept []question
		for i := range all {
			q := &all[i]
			err := in.grant(q)
			if err == nil {
				continue
			}
			if errors.Is(err, errBudget) && now-q.since > uint64(in.v.times.budget) {
				in.overBudget(q, err)
				continue
			}
			kept = append(kept, *q)
			in.wants(err, now)
			if !errors.Is(err, errBudget) { // else a smaller one behind it may be served
				kept = append(kept, all[i+1:]...)
				break
			}
		}
		if len(kept) > 0 {
			in.mu.Lock()
			if !in.closed {
				in.later[k] = append(kept, in.later[k]...)
				in.host.hungry.Store(true)
			}
			in.mu.Unlock()
		}
	}
}

// grant makes a place and tells the peer. With an error the question has to wait: the
// error is one of ErrNoLease, errBudget, errTotal and errStalled.
func (in *incoming) grant(q *question) error {
	v, s := in.v, &q.start
	need, kind, err := s.need(in.hello.ours)
	if err != nil {
		v.malformed(in, err)
		if in.hello.ours { // else it would wait for ever
			in.reply(&reply{origin: s.origin, flags: replyRefused}, nil)
		}
		return nil
	}
	if !need.OneShot && (in.stalled.Load() || in.foreign.Load()) {
		return errStalled
	}
	if in.enough(need, kind, s.key) {
		in.reply(&reply{origin: s.origin, flags: replyShared | replyNone}, nil)
		return nil
	}
	switch err := in.affords(s, need, kind); {
	case errors.Is(err, errNever):
		in.overBudget(q, err)
		return nil
	case err != nil:
		return err
	}
	l, r, err := in.lease(s, need, kind)
	if errors.Is(err, rendezvous.ErrNoLease) {
		return err
	}
	r.origin = s.origin
	if err != nil {
		v.log.Error("rdma: no place for a message of a peer", "peer", in.name(), "key", s.key, "bytes", need.Data, "err", err)
		if !in.hello.ours {
			return nil // its protocol has no word for it
		}
		r = reply{origin: s.origin, flags: replyRefused}
	}
	in.reply(&r, l)
	return nil
}

// reply answers a question. l is the place, or nil.
func (in *incoming) reply(r *reply, l *lease) {
	var b [replyLen]byte
	r.put(b[:])
	in.mu.Lock()
	defer in.mu.Unlock()
	if l != nil {
		in.keep(l)
	}
	in.send(immReply, b[:])
}

// enough tells whether a place of a key is not needed: the key has no buffer of its
// own, and the places of its size class are many. Else their number would follow that
// of the keys.
func (in *incoming) enough(need rendezvous.Need, kind uint64, key uint64) bool {
	if !in.hello.ours || kind&kindKeyed == 0 || need.Data == 0 {
		return false
	}
	if dst, ok := in.v.buffer(in.hello.node, key); ok && dst.Len() >= need.Exact {
		return false
	}
	class, size := rendezvous.Class(need.Data)
	in.mu.Lock()
	defer in.mu.Unlock()
	return len(in.leases[rendezvous.Route{Class: class}]) >= rendezvous.Eager(size)
}

// lease makes the memory that a peer has asked for.
func (in *incoming) lease(s *start, need rendezvous.Need, kind uint64) (*lease, reply, error) {
	v := in.v
	var r reply
	l := &lease{Owner: in, Route: need.Route, Data: need.Data, OneShot: need.OneShot}
	urgent := s.lane() == urgentLane
	if l.OneShot && int(in.oneShots.Load()) >= max(2, v.table.Room()/oneShotShare) {
		return nil, r, rendezvous.ErrNoLease // it does not use those that it has
	}
	// First the index: memory is dear to register in vain, and who waits asks often.
	if err := v.table.Add(l, urgent); err != nil {
		return nil, r, err
	}
	if l.OneShot {
		in.oneShots.Add(1)
	}
	if in.hello.ours && kind&kindKeyed == 0 {
		l.Route = rendezvous.Route{Host: need.Route.Host}
		l.Route.Class, _ = rendezvous.Class(need.Data)
	}
	meta, err := in.cells.get(need.Meta)
	if err == nil {
		l.Memory.meta, l.Memory.bytes = meta, metaBytes(need.Meta)
		in.charge(l.Memory.bytes)
		r.meta, r.metaKey = meta.addr, meta.rkey
		err = in.place(l, s, need, kind, &r)
	}
	if err != nil {
		if v.table.End(l) {
			in.free(l)
		}
		return nil, r, err
	}
	r.index = l.Index()
	return l, r, nil
}

// place finds memory for the value.
func (in *incoming) place(l *lease, s *start, need rendezvous.Need, kind uint64, r *reply) error {
	v, m := in.v, &l.Memory
	if need.Data == 0 || !in.hello.ours && v.self.Role != van.Server {
		return nil
	}
	if !in.hello.ours || kind&kindKeyed != 0 {
		if dst, ok := in.registered(s, need); ok {
			reg, err := in.host.regions.get(dst, verbs.LocalWrite|verbs.RemoteWrite)
			if err != nil {
				return fmt.Errorf("registered receive buffer: %w", err)
			}
			m.data, m.region = dst, reg
			l.Data = need.Exact
			r.data, r.dataKey = dst.Addr(), reg.mr.RKey()
			return nil
		}
	}
	if in.hello.ours {
		if kind&kindKeyed != 0 {
			r.flags |= replyShared
			l.Route = rendezvous.Route{}
			l.Route.Class, l.Data = rendezvous.Class(need.Data)
		}
		a, err := in.newArea(l.Data, need.Route.Host)
		if err != nil {
			return err
		}
		m.area, m.data = a, a.mem
	} else {
		a, err := in.keyArea(s.key, need.Data)
		if err != nil {
			return err
		}
		m.area, m.data = a, a.mem
	}
	r.data, r.dataKey = m.area.mem.Addr(), m.area.mr.RKey()
	return nil
}

// keyArea returns the memory for values of n bytes under key, with one more user.
func (in *incoming) keyArea(key uint64, n int) (*area, error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	a := in.areas[key]
	if a == nil || a.mem.Len() < n {
		if in.closed {
			return nil, van.ErrClosed
		}
		grown, err := in.newArea(n, false)
		if err != nil {
			return nil, err
		}
		in.areas[key] = grown
		if a != nil {
			a.put()
		}
		a = grown
	}
	a.refs.Add(1)
	return a, nil
}

// Retain implements backend.Holder: who answers with what was pushed registers it once
// more, and must not find other memory at its address later.
func (a *area) Retain() { a.refs.Add(1) }

// Release implements backend.Holder.
func (a *area) Release() { a.put() }

func (a *area) put() {
	if a.refs.Add(-1) == 0 {
		a.host.forgetArea(a)
		_ = a.close()
		if a.of != nil {
			a.of.charge(-a.mem.Len())
		}
	}
}

// keep records a lease, and ends the smaller ones of its key: who asks for a larger
// place will not use them again. in.mu is held.
func (in *incoming) keep(l *lease) {
	if in.closed {
		if in.v.table.End(l) {
			in.free(l)
		}
		return
	}
	all := in.leases[l.Route]
	if !l.OneShot && in.hello.ours && l.Route.Class == 0 {
		kept := all[:0]
		for _, x := range all {
			if x.OneShot || x.Data >= l.Data && len(x.Memory.meta.mem) >= len(l.Memory.meta.mem) {
				kept = append(kept, x)
				continue
			}
			in.end(x)
		}
		clear(all[len(kept):])
		all = kept
	}
	if !l.OneShot && in.hello.ours {
		in.leases[l.Route] = append(all, l)
	}
}

// end ends a place, and what is owed for it: its index may soon be another place's.
// in.mu is held.
func (in *incoming) end(l *lease) {
	in.credits = slices.DeleteFunc(in.credits, func(i uint16) bool { return uint32(i) == l.Index() })
	in.owed.Store(int32(len(in.credits)))
	if in.v.table.End(l) {
		in.free(l)
	}
}

// drop ends a place that the peer has given up. in.mu is held.
func (in *incoming) drop(l *lease) {
	in.leases[l.Route] = slices.DeleteFunc(in.leases[l.Route], func(x *lease) bool { return x == l })
	in.end(l)
}

// free gives back the memory of a lease that has ended and that nobody holds.
func (in *incoming) free(l *lease) {
	m := &l.Memory
	_ = in.cells.put(m.meta)
	in.charge(-m.bytes)
	if l.OneShot {
		in.oneShots.Add(-1)
	}
	if m.area != nil {
		m.area.put()
	}
	if m.region != nil {
		m.region.release()
	}
	l.Memory = memory{}
}
