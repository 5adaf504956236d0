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
}

// carriedCredits are the credits that a message carries, until its meta has arrived.
type carriedCredits struct {
	of    *inbound // whose slots are returned
	slots [maxCredits]*receiveSlot
	n     int
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

func (c *carriedCredits) clear() {
	clear(c.slots[:c.n])
	c.of, c.n = nil, 0
}

// restoreCredits moves the credits of messages that the peer has not received back to the lists of owed credits.
func (l *link) restoreCredits() {
	for i := range l.carried {
		c := &l.carried[i]
		for _, s := range c.slots[:c.n] {
			c.of.returnCredit(s)
		}
		c.clear()
	}
}

// markUncertain records that the peer may or may not have received c.
func (l *link) markUncertain(c *carriedCredits) {
	if c.n == 0 {
		return
	}
	if !slices.Contains(l.uncertain, c.of) {
		l.uncertain = append(l.uncertain, c.of)
	}
	c.clear()
}

// carriesData reports whether data messages are in flight.
func (l *link) carriesData() (carries bool) {
	l.queue.Each(func(m *sentMessage) { carries = carries || m.data })
	return carries
}
