package cluster

// The notices of a worker to the servers about canceled requests, so that they drop them; how a node sends
// notices to another one, and sends them again after a loss.

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// A worker sends a Canceled in the body of a HEARTBEAT without node records, like the scheduler's notices, and only
// to servers of this library. It may overtake the request, or arrive long after the answer was sent.
const cancelPrefix = "stepaf/1 given-up "

// maxNotices bounds the number of notices that a node remembers for each peer.
const maxNotices = 256

// peerNotice is a notice for one peer: a Canceled, or a refusal that waits until the peer is back.
type peerNotice struct {
	app         int
	canceled    Canceled
	refusal     []byte // body of a refusal, nil for a Canceled
	handler     int32  // timestamp of the refused request
	incarnation uint32 // of the peer's process
	at          uint64
}

// notices has the notices by peer, oldest first.
type notices struct {
	self      *nodeInfo
	processes *processes
	van       van.Van
	mu        sync.Mutex
	by        map[int][]peerNotice
	sent      atomic.Int32 // number of sent notices, including refusals; the timestamp of the last one
}

// cancel notifies node id that these answers are no longer awaited.
func (s *notices) cancel(id, app int, w Canceled) {
	p := s.processes.of(id)
	if p.incarnation == 0 || failpoint.On("abandon") {
		return
	}
	s.add(id, peerNotice{app: app, canceled: w, incarnation: p.incarnation, at: clock.Now()})
	if s.processes.of(id).lost == nil { // otherwise resend sends it when the peer is back
		s.send(id, app, w)
	}
}

func (s *notices) send(id, app int, w Canceled) {
	err := s.sendNotice(id, fmt.Appendf(nil, "%s%d %d %d %d", cancelPrefix, app, w.Customer, w.First, w.Count))
	if err != nil {
		s.self.log.Info("could not notify a server that a request was canceled", "server", s.self.peerName(id), "handler", w.First, "err", err)
	}
}

func (s *notices) sendRefusal(id int, ts int32, body []byte) {
	if err := s.sendNotice(id, body); err != nil {
		s.self.rarely("not refused: "+logx.Kind(err)).Info("could not notify a worker that its request is refused", "worker", s.self.peerName(id), "handler", ts, "err", err)
	}
}

// sendNotice sends node id a notice.
func (s *notices) sendNotice(id int, body []byte) error {
	msg := &van.Message{}
	msg.Reset()
	msg.Sender, msg.Receiver = s.self.ID(), id
	// PS_RESEND would take the timestamps of one customer for earlier ones of another.
	msg.Control.Cmd, msg.Timestamp = van.Heartbeat, s.sent.Add(1)&math.MaxInt32
	msg.Body = body
	s.processes.tag(&msg.Meta, s.processes.of(id))
	s.self.logMessage("send", id, &msg.Meta)
	return s.van.Send(msg)
}

// resend sends recent notices to node id, which was lost and is back. Notices of the meantime were not sent, and
// earlier ones may have been lost with the connection. The peer may not have noticed the break, and still have the
// requests. Duplicates do no harm.
func (s *notices) resend(id int) {
	incarnation := s.processes.of(id).incarnation
	for _, x := range s.recent(id) {
		switch {
		case x.incarnation != incarnation:
		case x.refusal != nil:
			s.sendRefusal(id, x.handler, x.refusal)
		default:
			s.send(id, x.app, x.canceled)
		}
	}
}

func (s *notices) add(id int, x peerNotice) {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.by[id]
	if len(list) >= maxNotices {
		list = list[:copy(list, list[1:])]
	}
	s.by[id] = append(list, x)
}

// recent returns the notices that are not older than cancelMemory, and forgets the others.
func (s *notices) recent(id int) []peerNotice {
	s.mu.Lock()
	defer s.mu.Unlock()
	list, now := s.by[id], clock.Now()
	for len(list) > 0 && time.Duration(now-list[0].at) > cancelMemory {
		list = list[1:]
	}
	if len(list) == 0 {
		delete(s.by, id)
		return nil
	}
	s.by[id] = list
	return append([]peerNotice(nil), list...)
}
