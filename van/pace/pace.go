// Package pace limits the data rates to peers and of applications. It is a wrapper around a
// van. Without a rate, a message costs one additional atomic load. Control messages are not
// limited.
//
// A message that may not leave yet is queued for its peer, in the order of Send for each
// application. A goroutine of that peer forwards it. Senders and receivers do not wait.
package pace

import (
	"context"
	"maps"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van"
)

// Rates are the limits of sent data in bytes per second; 0 is no limit.
type Rates struct {
	Peers map[int]int64   // all data for a peer
	Apps  map[int32]int64 // data of an application, for each peer separately
}

// Options of New.
type Options struct {
	// Budget is the number of queued bytes for one peer from which Send fails with
	// van.ErrQueueFull; 0 is no limit. Below it, Send accepts a message of any length.
	Budget int64
	// OnFail is called with queued messages that could not be sent when they were due. It must
	// not block, and may keep meta.
	OnFail func(peer int, meta *van.Meta, err error)
}

// Van is a van that limits the rates of data messages.
type Van struct {
	van.Van
	opts  Options
	table atomic.Pointer[table] // nil while there is no rate and no message is queued
	mu    sync.Mutex            // guards changes of table
	wg    sync.WaitGroup        // goroutines of peer queues
	ended atomic.Bool           // set by Close: no more rates, and no more messages that would be queued

	refused atomic.Uint64 // messages refused with ErrQueueFull
}

// table is immutable; a change stores a new one.
type table struct {
	rates  Rates
	queues map[int]*peerQueue // of peers for which a rate has mattered
}

var (
	_ van.Van      = (*Van)(nil)
	_ van.Wrapper  = (*Van)(nil)
	_ van.Canceler = (*Van)(nil)
	_ van.Meter    = (*Van)(nil)
)

// New wraps inner. Use van.As to find the optional abilities of inner.
func New(inner van.Van, opts Options) *Van { return &Van{Van: inner, opts: opts} }

// Unwrap implements van.Wrapper.
func (v *Van) Unwrap() van.Van { return v.Van }

// Stats implements van.Meter.
func (v *Van) Stats() (s van.Stats) {
	if m, ok := van.As[van.Meter](v.Van); ok {
		s = m.Stats()
	}
	s.RefusedSends += v.refused.Load()
	return s
}

// current returns the table, an empty one if there is none.
func (v *Van) current() table {
	if t := v.table.Load(); t != nil {
		return *t
	}
	return table{}
}

// SetRates replaces all rates, also for queued messages. rates is not copied.
func (v *Van) SetRates(rates Rates) {
	v.mu.Lock()
	defer v.mu.Unlock()
	old := v.current().rates
	if !v.ended.Load() && !(maps.Equal(rates.Peers, old.Peers) && maps.Equal(rates.Apps, old.Apps)) {
		v.setRates(rates)
	}
}

func (v *Van) setRates(rates Rates) {
	t := &table{rates, v.current().queues}
	v.table.Store(t)
	for peer, l := range t.queues {
		l.set(rates.Peers[peer], rates.Apps)
	}
	v.tidy()
}

// tidy removes the table when there are no rates and no queued messages. The caller holds v.mu.
func (v *Van) tidy() {
	t := v.table.Load()
	if t == nil || len(t.rates.Peers)+len(t.rates.Apps) > 0 {
		return
	}
	for _, l := range t.queues {
		if !l.empty() {
			return
		}
	}
	v.table.Store(nil)
}

// Send implements van.Van. A queued message is treated as in any van: its frames
// are the caller's again when Done is called.
func (v *Van) Send(m *van.Message) error {
	t := v.table.Load()
	if t == nil || m.IsControl() {
		return v.Van.Send(m)
	}
	l := t.queues[m.Receiver]
	if l == nil {
		if t.rates.Peers[m.Receiver] == 0 && t.rates.Apps[m.AppID] == 0 {
			return v.Van.Send(m)
		}
		l = v.queue(m.Receiver)
	}
	if kept, err := l.enqueue(m); kept {
		return err
	}
	return v.Van.Send(m)
}

// queue returns the queue of peer, a new one if there is none.
func (v *Van) queue(peer int) *peerQueue {
	v.mu.Lock()
	defer v.mu.Unlock()
	t := v.current()
	if l := t.queues[peer]; l != nil {
		return l
	}
	l := newPeerQueue(v, peer, func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		v.tidy()
	})
	l.set(t.rates.Peers[peer], t.rates.Apps)
	t.queues = maps.Clone(t.queues)
	if t.queues == nil {
		t.queues = map[int]*peerQueue{}
	}
	t.queues[peer] = l
	v.table.Store(&t)
	v.tidy() // in case the rates have been removed meanwhile
	return l
}

// each calls f with the queue of peer, or with all queues if peer is van.Empty.
func (v *Van) each(peer int, f func(*peerQueue)) {
	for id, l := range v.current().queues {
		if peer == van.Empty || id == peer {
			f(l)
		}
	}
}

// Cancel implements van.Canceler: queued messages of these requests are not sent.
func (v *Van) Cancel(q van.Requests) {
	v.each(van.Empty, func(l *peerQueue) { l.drop(func(m *van.Meta) bool { return q.Has(m) }) })
	if r, ok := van.As[van.Canceler](v.Van); ok {
		r.Cancel(q)
	}
}

func all(*van.Meta) bool { return true }

// Connect implements van.Van. It drops the queued messages, which are for the previous process with that id.
func (v *Van) Connect(ctx context.Context, id int, peer van.Node) error {
	v.each(id, func(l *peerQueue) { l.drop(all) })
	return v.Van.Connect(ctx, id, peer)
}

// Disconnect implements van.Van. It drops the queued messages.
func (v *Van) Disconnect(id int) {
	v.each(id, func(l *peerQueue) { l.drop(all) })
	v.Van.Disconnect(id)
}

// Close implements van.Van. It forwards the queued messages at once.
func (v *Van) Close(ctx context.Context) error {
	v.mu.Lock()
	v.ended.Store(true)
	v.setRates(Rates{})
	v.mu.Unlock()
	gone := make(chan struct{})
	go func() { v.wg.Wait(); close(gone) }()
	select {
	case <-gone:
	case <-ctx.Done(): // the inner van's queue is full, or its Send waits for a connection until its Close
		defer v.each(van.Empty, func(l *peerQueue) { l.drop(all) })
	}
	return v.Van.Close(ctx)
}
