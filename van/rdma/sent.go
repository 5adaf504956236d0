package rdma

import (
	"slices"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/conn"
)

// This file owns what a link notes of the messages that are under way on it, and with them
// the credits that they carry.

// sentMessage is what is noted of a message until its last completion.
type sentMessage struct {
	done    van.Completion
	control *outgoing // a control message that has a number, until it has arrived
	seq     uint64    // the order of those
	data    bool      // it is no control message
	// Of a request whose value the device reads where the caller has it: flags is where those
	// of the trailer lie, which the device reads after the value.
	id    requestID
	flags []byte
	// The credits that the message carries, of connection creditsOf.
	creditsOf *inbound
	credits   [maxCredits]*receiveSlot
	returned  int
}

// finished is a message that is under way no more.
type finished = conn.Finished[sentMessage]

// finishSent gives back what a finished message has used. It is called without a lock.
func finishSent(f *finished) {
	f.End()
	if f.Note.done != nil {
		f.Note.done.Sent()
	}
}

// clearCredits forgets the credits that the message carries.
func (m *sentMessage) clearCredits() {
	clear(m.credits[:m.returned])
	m.creditsOf, m.returned = nil, 0
}

// restoreCredits owes again what messages carry that the peer has not received.
func (l *link) restoreCredits() {
	l.queue.Each(func(m *sentMessage) {
		for _, s := range m.credits[:m.returned] {
			m.creditsOf.returnCredit(s)
		}
		m.clearCredits()
	})
}

// markUncertain notes that the peer may have received m or not, and with it the credits that
// it carries.
func (l *link) markUncertain(m *sentMessage) {
	if m.returned == 0 {
		return
	}
	if !slices.Contains(l.uncertain, m.creditsOf) {
		l.uncertain = append(l.uncertain, m.creditsOf)
	}
	m.clearCredits()
}

// carriesData tells whether data is under way.
func (l *link) carriesData() (carries bool) {
	l.queue.Each(func(m *sentMessage) { carries = carries || m.data })
	return carries
}
