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
	// completeRequest completes the slot request for o.
	completeRequest(s *slotRequest, o *outgoing, need rendezvous.Need)
	// handleReply takes the reply to a slot request. It returns the message that is refused by it,
	// if any, and why. ok is false for a reply that cannot be.
	handleReply(snd *rendezvous.Sender[*outgoing], r *slotReply) (refused *outgoing, why error, ok bool)
	// requestAnswered takes the answer to a request. It tells whether slots may have become free.
	requestAnswered(snd *rendezvous.Sender[*outgoing], key uint64, push bool) bool
	// mustSend tells whether o is still to be sent.
	mustSend(o *outgoing) bool
	// layout is the length of what is written as o's meta, and whether the frames are in it.
	layout(o *outgoing) (n int, inMeta bool)
	// trailer is what follows the meta; ok is false when nothing does.
	trailer(o *outgoing, inMeta bool) (t trailer, ok bool)
}

// inboundDialect is how slots are granted, and messages read, on a connection that a
// peer has opened. The feed is held.
type inboundDialect interface {
	// need checks a slot request.
	need(s *slotRequest) (n rendezvous.Need, kind uint64, err error)
	// refuse says that there is no slot, if the protocol has a word for it.
	refuse(origin uint64, flags uint32, why error)
	// sharedSlotsSuffice tells whether the peer is to use the slots that there are.
	sharedSlotsSuffice(s *slotRequest, need rendezvous.Need, kind uint64) bool
	// route is what the slot is for.
	route(need rendezvous.Need, kind uint64) rendezvous.Route
	// usesBuffer tells whether a registered receive buffer may serve the request.
	usesBuffer(kind uint64) bool
	// needsData tells whether the slot has memory for a value.
	needsData(need rendezvous.Need) bool
	// dataCost is the number of bytes that would be registered for the value.
	dataCost(s *slotRequest, need rendezvous.Need, kind uint64) int
	// valueArea allocates memory for the value, or finds what is shared.
	valueArea(l *receiveSlot, s *slotRequest, need rendezvous.Need, kind uint64, r *slotReply) (*area, error)
	// record keeps the slot for as long as the peer has it. in.mu is held.
	record(l *receiveSlot)
	// endOutgrown ends the slots that the peer does not use any more once q has been answered.
	endOutgrown(q *slotRequest)
	// returnsCredits tells whether a slot is given back to the peer with a credit.
	returnsCredits() bool
	// handleSend takes a SEND that is no slot request. known is false for one that cannot be.
	handleSend(c *verbs.Completion, t *trailer) (known bool)
	// previousEnd finds where the message before the last one of b ends, which was written to a slot; 0: there is none.
	previousEnd(b []byte) (end int, err error)
	// splitMeta finds the meta, and what lies behind it, in one of those.
	splitMeta(b []byte, t *trailer) (meta, behind []byte, err error)
	// frames finds the frames of a message in slot l.
	frames(rx *received, l *receiveSlot, t *trailer, behind []byte) error
	// handleOverwrite is called when a message has come to a slot in which one lies.
	handleOverwrite(l *receiveSlot, key uint64) error
	// endsSlot tells whether the slot of m ends with it, though it is no one-shot.
	endsSlot(m *van.Message) bool
}
