package fakeverbs

import (
	"net/netip"
	"slices"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// RecordKind is the kind of a Record.
type RecordKind int

// Kinds of Records.
const (
	RecordCM         RecordKind = iota + 1 // a call of the connection manager, or an event that was read
	RecordPost                             // a work request
	RecordCompletion                       // a completion that was polled
)

// Values of Record.Event: calls have their names in C. Events that were read have the name of their type instead (verbs.EventType.String).
const (
	EventCreateQP   = "create_qp"
	EventConnect    = "rdma_connect"
	EventAccept     = "rdma_accept"
	EventReject     = "rdma_reject"
	EventDisconnect = "rdma_disconnect"
)

// Record describes a call or an event.
type Record struct {
	Seq    int // from 0
	Kind   RecordKind
	Stack  *Stack         // the caller's
	Local  netip.AddrPort // of the ID
	Remote netip.AddrPort // the peer's address; for a connect request, its sender's
	Peer   *Stack         // at Remote; nil if not known
	QP     uint32         // number of the queue pair, 0 without one
	Active bool           // the ID is the connector

	Event   string // RecordCM
	Private []byte // RecordCM: as passed to the call, or padded as in the event

	Param      verbs.ConnParam // EventConnect, EventAccept, EventReject
	AckTimeout int             // EventConnect, EventAccept: of SetAckTimeout
	TOS        int             // EventConnect, EventAccept: of SetTOS
	Options    verbs.QPOptions // EventCreateQP
	Inline     int             // EventCreateQP: bytes granted

	WR    verbs.SendWR // RecordPost
	Chain int          // RecordPost: index in its chain
	Data  []byte       // RecordPost: the bytes; nil if the local key does not cover them

	Completion verbs.Completion // RecordCompletion
	Status     int              // of an event
}

// Trace calls f for all later calls and events, in order. f must not use the Net, and may only compare its Stacks. It may keep the slices. nil
// ends it.
func (n *Net) Trace(f func(Record)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.trace.f = f
}

// recorder passes Records to a function. Without one, its methods do nothing.
type recorder struct {
	f   func(Record)
	seq int
}

func (t *recorder) record(id *connID, r Record) {
	r.Seq = t.seq
	t.seq++
	r.Stack, r.Active = id.stack, id.active
	r.Local, r.Remote = id.local, id.remote
	if id.peer != nil {
		r.Peer = id.peer.stack
	}
	if id.qp != nil {
		r.QP = id.qp.num
	}
	t.f(r)
}

func (t *recorder) cm(id *connID, event string, p *verbs.ConnParam) {
	if t.f == nil {
		return
	}
	r := Record{Kind: RecordCM, Event: event}
	switch event {
	case EventCreateQP:
		r.Options, r.Inline = id.qp.opts, id.qp.inline
	case EventConnect, EventAccept, EventReject:
		r.Param, r.AckTimeout, r.TOS = *p, id.ack, id.tos
		r.Private = slices.Clone(p.Private)
		if h := id.net.hosts[id.remote.Addr()]; h != nil && id.peer == nil {
			if l := h.ports[id.remote.Port()]; l != nil { // the listener that will get the connect request
				r.Peer = l.stack
			}
		}
	}
	t.record(id, r)
}

func (t *recorder) event(q queued) {
	if t.f == nil {
		return
	}
	r := Record{Kind: RecordCM, Event: q.Type.String(), Private: slices.Clone(q.Private), Status: q.Status}
	id := q.id
	if q.New != nil {
		id = q.New.(*connID)
	}
	t.record(id, r)
}

func (t *recorder) post(q *qp, w *work, chain int) {
	if t.f == nil {
		return
	}
	r := Record{Kind: RecordPost, WR: w.SendWR, Chain: chain}
	if w.Flags&verbs.Inline != 0 {
		r.Data = slices.Clone(w.data)
	} else if m := q.dev.lkeys[w.LKey]; m != nil {
		if b, ok := m.bytes(w.LocalAddr, w.Len); ok {
			r.Data = slices.Clone(b)
		}
	}
	t.record(q.id, r)
}

func (t *recorder) completion(e *entryCQ) {
	if t.f != nil {
		t.record(e.qp.id, Record{Kind: RecordCompletion, Completion: e.Completion})
	}
}
