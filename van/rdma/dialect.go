package rdma

import (
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
	"github.com/stepaf/stepaf-go/van/rendezvous"
)

// This file defines the operations in which the two dialects differ: the native one, between nodes of this library, and StepMesh's.

// outboundDialect is how messages are sent on a link. It stores what the peer has said about keys. The peer's lock is held.
type outboundDialect interface {
	// check refuses a message that the receiver would not understand or would abort on.
	check(o *outgoing) error
	// uncheck undoes the check of a message that is not sent, since another part of its batch was refused.
	uncheck(o *outgoing)
	// need decides where the values of o are written, stores that in o, and returns the slot that o needs.
	need(o *outgoing) rendezvous.Need
	// completeRequest completes the slot request for o.
	completeRequest(s *slotRequest, o *outgoing, need rendezvous.Need)
	// handleReply handles the reply to a slot request. If the reply refuses a message, it returns the message and the reason. ok is
	// false for an invalid reply.
	handleReply(snd *rendezvous.Sender[*outgoing], r *slotReply) (refused *outgoing, why error, ok bool)
	// noteBuffer handles the announcement of a receive buffer.
	noteBuffer(b remoteBuffer)
	// noteDecoded records how many messages of the link the peer has decoded.
	noteDecoded(n uint32)
	// noteSent records that o has been written.
	noteSent(o *outgoing)
	// layout returns the number of bytes that are written as o's meta. With a native node, they include placements, inline values and a
	// trailer.
	layout(o *outgoing) int
}

// inboundDialect is how slots are granted, and messages read, on a connection that a peer has opened. The feed is held.
type inboundDialect interface {
	// need checks a slot request and returns what it asks for. Data is 0 if this node receives no value there.
	need(s *slotRequest) (rendezvous.Need, error)
	// refuse tells the peer that there is no slot, if the protocol can say so.
	refuse(origin uint64, flags uint32, why error)
	// dataCost returns the number of bytes that would be registered for the value.
	dataCost(s *slotRequest, need rendezvous.Need) int
	// valueArea returns memory for the value, new or shared.
	valueArea(s *slotRequest, need rendezvous.Need) (*area, error)
	// handleSend handles a SEND other than a slot request. known is false for an invalid one.
	handleSend(c *verbs.Completion, t *trailer) (known bool)
	// splitMeta splits a message into its meta, and the placements and inline values after it.
	splitMeta(b []byte, t *trailer) (meta, behind []byte, err error)
	// frames locates the values of a message in slot l.
	frames(rx *received, l *receiveSlot, t *trailer, behind []byte) error
	// handleOverwrite is called when a message was written to a slot that holds another one.
	handleOverwrite(l *receiveSlot, key uint64) error
	// endsSlot reports whether the slot of m ends with m, although it is no one-shot slot.
	endsSlot(m *van.Message) bool
}
