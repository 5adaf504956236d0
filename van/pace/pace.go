// Package pace holds data back to the rates that were set for peers and applications: a
// wrapper around a van. Without a rate a message costs one atomic load more. Control messages
// never wait.
//
// What may not leave yet waits in a queue of its peer, in the order of Send for each
// application, and a goroutine of that peer hands it on; nobody who sends or receives waits.
package pace

import (
	"context"
	"maps"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van"
)

// Rates are bytes in a second for what this node sends, to one peer each: 0 is no limit.
type Rates struct {
	Peers map[int]int64   // all data for a peer
	Apps  map[int32]int64 // data of an application for a peer, each peer by itself
}

// Options of New.
type Options struct {
	// Budget is how many bytes may wait for one peer, 0 any; from then on Send fails with
	// van.ErrQueueFull, but for what continues a request. So while fewer wait, a message of any
	// length may.
	Budget int64
	// OnFail is called with messages that could not be sent when their time had come. It must
	// not block, and may keep meta.
	OnFail func(peer int, meta *van.Meta, err error)
}

// Van is a van whose data messages keep to rates.
type Van struct {
	van.Van
	opts  Options
	table atomic.Pointer[table] // nil while there is no rate and nothing waits
	mu    sync.Mutex            // of changes of table
	wg    sync.WaitGroup        // goroutines of lines
	ended atomic.Bool           // by Close: no rate is taken any more, and no message that would wait
}

// table is immutable; a change stores a new one.
type table struct {
	rates Rates
	lines map[int]*line // of peers for which a rate has mattered
}

var (
	_ van.Van      = (*Van)(nil)
	_ van.Wrapper  = (*Van)(nil)
	_ van.Canceler = (*Van)(nil)
)

// New wraps inner. Use van.As to find the optional abilities of inner.
func New(inner van.Van, opts Options) *Van { return &Van{Van: inner, opts: opts} }

// Unwrap implements van.Wrapper.
func (v *Van) Unwrap() van.Van { return v.Van }

// current is the table, an empty one if there is none.
func (v *Van) current() table {
	if t := v.table.Load(); t != nil {
		return *t
	}
	return table{}
}

// SetRates replaces all rates, also for what waits already. rates is not copied.
func (v *Van) SetRates(rates Rates) {
	v.mu.Lock()
	defer v.mu.Unlock()
	old := v.current().rates
	if !v.ended.Load() && !(maps.Equal(rates.Peers, old.Peers) && maps.Equal(rates.Apps, old.Apps)) {
		v.setRates(rates)
	}
}

func (v *Van) setRates(rates Rates) {
	t := &table{rates, v.current().lines}
	v.table.Store(t)
	for peer, l := range t.lines {
		l.set(rates.Peers[peer], rates.Apps)
	}
	v.tidy()
}

// tidy takes the table away when nothing needs it any more. v.mu is held.
func (v *Van) tidy() {
	t := v.table.Load()
	if t == nil || len(t.rates.Peers)+len(t.rates.Apps) > 0 {
		return
	}
	for _, l := range t.lines {
		if !l.empty() {
			return
		}
	}
	v.table.Store(nil)
}

// Send implements van.Van. A message that has to wait is kept as any van keeps it: its frames
// are the caller's again when Done is called.
func (v *Van) Send(m *van.Message) error {
	t := v.table.Load()
	if t == nil || m.IsControl() {
		return v.Van.Send(m)
	}
	l := t.lines[m.Receiver]
	if l == nil {
		if t.rates.Peers[m.Receiver] == 0 && t.rates.Apps[m.AppID] == 0 {
			return v.Van.Send(m)
		}
		l = v.line(m.Receiver)
	}
	if kept, err := l.keep(m); kept {
		if f, ok := van.As[van.Flusher](v.Van); ok && !m.More {
			f.Flush(m.Receiver) // what came before it does not wait for it
		}
		return err
	}
	return v.Van.Send(m)
}

// line returns the line of peer, a new one if there is none.
func (v *Van) line(peer int) *line {
	v.mu.Lock()
	defer v.mu.Unlock()
	t := v.current()
	if l := t.lines[peer]; l != nil {
		return l
	}
	l := newLine(v, peer, func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		v.tidy()
	})
	l.set(t.rates.Peers[peer], t.rates.Apps)
	t.lines = maps.Clone(t.lines)
	if t.lines == nil {
		t.lines = map[int]*line{}
	}
	t.lines[peer] = l
	v.table.Store(&t)
	v.tidy() // if rates have been taken back meanwhile
	return l
}

// each calls f with all lines, or that of one peer.
func (v *Van) each(peer int, f func(*line)) {
	for id, l := range v.current().lines {
		if peer == van.Empty || id == peer {
			f(l)
		}
	}
}

// Cancel implements van.Canceler: what waits of these requests is not sent.
func (v *Van) Cancel(q van.Requests) {
	v.each(van.Empty, func(l *line) { l.drop(func(m *van.Meta) bool { return q.Has(m) }) })
	if r, ok := van.As[van.Canceler](v.Van); ok {
		r.Cancel(q)
	}
}

func all(*van.Meta) bool { return true }

// Connect implements van.Van. What waits is for the process that had the id before.
func (v *Van) Connect(ctx context.Context, id int, peer van.Node) error {
	v.each(id, func(l *line) { l.drop(all) })
	return v.Van.Connect(ctx, id, peer)
}

// Disconnect implements van.Van. What waits is dropped.
func (v *Van) Disconnect(id int) {
	v.each(id, func(l *line) { l.drop(all) })
	v.Van.Disconnect(id)
}

// Close implements van.Van. What waits is handed on at once.
func (v *Van) Close(ctx context.Context) error {
	v.mu.Lock()
	v.ended.Store(true)
	v.setRates(Rates{})
	v.mu.Unlock()
	gone := make(chan struct{})
	go func() { v.wg.Wait(); close(gone) }()
	select {
	case <-gone:
	case <-ctx.Done(): // the van inside has no room
		v.each(van.Empty, func(l *line) { l.drop(all) })
	}
	return v.Van.Close(ctx)
}
