package fakeverbs

import (
	"net/netip"
	"slices"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// RecordKind is what a Record is of.
type RecordKind int

// Kinds of Records.
const (
	RecordCM         RecordKind = iota + 1 // a call of the connection manager, or an event that was read
	RecordPost                             // a work request
	RecordCompletion                       // a completion that was polled
)

// What RecordCM is of: calls by the names that they have in C. Events that were read have
// the type's name (verbs.EventType.String) instead.
const (
	EventCreateQP   = "create_qp"
	EventConnect    = "rdma_connect"
	EventAccept     = "rdma_accept"
	EventReject     = "rdma_reject"
	EventDisconnect = "rdma_disconnect"
)

// Record is something that was asked of the network or that it has told.
type Record struct {
	Seq    int // from 0
	Kind   RecordKind
	Stack  *Stack         // whose user has called
	Local  netip.AddrPort // of the ID
	Remote netip.AddrPort // what it is, or is to be, connected to; a connect request's sender
	Peer   *Stack         // at Remote; nil when not known
	QP     uint32         // number of the queue pair, 0 when there is none
	Active bool           // the ID is the connector

	Event   string // RecordCM
	Private []byte // RecordCM: as given to the call, as padded in the event

	Param      verbs.ConnParam // EventConnect, EventAccept, EventReject
	AckTimeout int             // EventConnect, EventAccept: of SetAckTimeout
	TOS        int             // EventConnect, EventAccept: of SetTOS
	Options    verbs.QPOptions // EventCreateQP
	Inline     int             // EventCreateQP: bytes granted

	WR    verbs.SendWR // RecordPost
	Chain int          // RecordPost: its place in its chain
	Data  []byte       // RecordPost: the bytes; nil when the local key does not cover them

	Completion verbs.Completion // RecordCompletion
	Status     int              // of an event
}

// Trace calls f for all that happens from now on, in its order. f must not use the Net,
// nor its Stacks but to compare them; it may keep the slices. nil ends it.
func (n *Net) Trace(f func(Record)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.trace.f = f
}

// recorder tells of what happens. All its methods do nothing without a function.
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
			if l := h.ports[id.remote.Port()]; l != nil { // it will get the connect request
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
