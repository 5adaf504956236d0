package zmq

// The lanes of those who send to this node.

import (
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
)

type lane = engine.Lane[*van.Message]

// lanes gives each sender its lane. Senders without an id share one.
type lanes struct {
	m    sync.Map // int to *sender
	hand *atomic.Int32
}

func (l *lanes) of(id int) *sender {
	if p, ok := l.m.Load(id); ok {
		return p.(*sender)
	}
	s := &sender{id: id}
	s.lane.ID, s.control.ID = id, id
	s.lane.Hand, s.control.Hand = l.hand, l.hand
	p, _ := l.m.LoadOrStore(id, s)
	return p.(*sender)
}

// sender is who sends to this node.
type sender struct {
	id      int
	lane    lane
	control lane         // of control messages, which do not wait for the handler of data
	waiting atomic.Int64 // bytes received and not delivered
	asked   atomic.Bool  // to wait
}

func (s *sender) of(msg *van.Message) *lane {
	if msg.IsControl() {
		return &s.control
	}
	return &s.lane
}
