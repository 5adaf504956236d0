package rdma

import (
	"slices"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
)

// This file owns what a link stores of messages in flight, and the credits that these carry.

// sentMessage is stored for a message until its last completion.
type sentMessage struct {
	done    van.Completion
	control *outgoing // a numbered control message, until it has arrived
	seq     uint64    // order of numbered control messages
	data    bool      // not a control message
	// Only for a request whose value the device reads from the caller's memory: flags are those in the trailer, which the device reads
	// after the value.
	id    requestID
	flags []byte
	// The credits that the message carries. They are for slots of connection creditsOf.
	creditsOf *inbound
	credits   [maxCredits]*receiveSlot
	returned  int
}

// finished is a message whose last completion has been handled.
type finished = conn.Finished[sentMessage]

// finishSent releases what a finished message has used. Call it without a lock.
func finishSent(f *finished) {
	f.End()
	if f.Note.done != nil {
		f.Note.done.Sent()
	}
}

// clearCredits removes the credits from the record of the message.
func (m *sentMessage) clearCredits() {
	clear(m.credits[:m.returned])
	m.creditsOf, m.returned = nil, 0
}

// restoreCredits moves the credits of messages that the peer has not received back to the lists of owed credits.
func (l *link) restoreCredits() {
	l.queue.Each(func(m *sentMessage) {
		for _, s := range m.credits[:m.returned] {
			m.creditsOf.returnCredit(s)
		}
		m.clearCredits()
	})
}

// markUncertain records that the peer may or may not have received m with its credits.
func (l *link) markUncertain(m *sentMessage) {
	if m.returned == 0 {
		return
	}
	if !slices.Contains(l.uncertain, m.creditsOf) {
		l.uncertain = append(l.uncertain, m.creditsOf)
	}
	m.clearCredits()
}

// carriesData reports whether data messages are in flight.
func (l *link) carriesData() (carries bool) {
	l.queue.Each(func(m *sentMessage) { carries = carries || m.data })
	return carries
}
