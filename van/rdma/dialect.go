package rdma

import (
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file owns what the two dialects have to answer: native, between nodes of this
// library, and StepMesh's, towards the C++ library.

// outboundDialect is how messages are sent on a link. It keeps what the peer has said of
// keys. The peer's lock is held.
type outboundDialect interface {
	// check refuses what the receiver would not understand, or would abort over.
	check(o *outgoing) error
	// need says what o needs at its receiver.
	need(o *outgoing) rendezvous.Need
	// request completes the slot request for o.
	request(s *start, o *outgoing, need rendezvous.Need)
	// reply takes the reply to a slot request. It returns the message that is refused by it,
	// if any, and why. ok is false for a reply that cannot be.
	reply(snd *rendezvous.Sender[*outgoing], r *reply) (refused *outgoing, why error, ok bool)
	// answered takes the answer to a request. It tells whether slots may have become free.
	answered(snd *rendezvous.Sender[*outgoing], key uint64, push bool) bool
	// wanted tells whether o is still to be sent.
	wanted(o *outgoing) bool
	// layout is the length of what is written as o's meta, and whether the frames are in it.
	layout(o *outgoing) (n int, inMeta bool)
	// trailer is what follows the meta; ok is false when nothing does.
	trailer(o *outgoing, inMeta bool) (t trailer, ok bool)
}

// inboundDialect is how slots are granted, and messages read, on a connection that a
// peer has opened. The feed is held.
type inboundDialect interface {
	// need checks a slot request.
	need(s *start) (n rendezvous.Need, kind uint64, err error)
	// refuse says that there is no slot, if the protocol has a word for it.
	refuse(origin uint64, flags uint32, why error)
	// sharedSlotsSuffice tells whether the peer is to use the slots that there are.
	sharedSlotsSuffice(s *start, need rendezvous.Need, kind uint64) bool
	// route is what the slot is for.
	route(need rendezvous.Need, kind uint64) rendezvous.Route
	// usesBuffer tells whether a registered receive buffer may serve the request.
	usesBuffer(kind uint64) bool
	// wantsData tells whether the slot has memory for a value.
	wantsData(need rendezvous.Need) bool
	// dataCost is the number of bytes that would be registered for the value.
	dataCost(s *start, need rendezvous.Need, kind uint64) int
	// area allocates memory for the value, or finds what is shared.
	area(l *receiveSlot, s *start, need rendezvous.Need, kind uint64, r *reply) (*area, error)
	// record keeps the slot for as long as the peer has it. in.mu is held.
	record(l *receiveSlot)
	// outgrown ends the slots that the peer does not use any more once q has been answered.
	outgrown(q *start)
	// returnsCredits tells whether a slot is given back to the peer with a credit.
	returnsCredits() bool
	// control takes a SEND that is no slot request. known is false for one that cannot be.
	control(c *verbs.Completion, t *trailer) (known bool)
	// before finds where the message before the last one of b ends, which was written to a slot; 0: there is none.
	before(b []byte) (end int, err error)
	// split finds the meta, and what lies behind it, in one of those.
	split(b []byte, t *trailer) (meta, behind []byte, err error)
	// frames finds the frames of a message in slot l.
	frames(rx *received, l *receiveSlot, t *trailer, behind []byte) error
	// overwrite is called when a message has come to a slot in which one lies.
	overwrite(l *receiveSlot, key uint64) error
	// endsSlot tells whether the slot of m ends with it, though it is no one-shot.
	endsSlot(m *van.Message) bool
}
