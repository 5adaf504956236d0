package postoffice

// What a server tells a worker: which request it does not take, and why.

import (
	"errors"
	"fmt"
	"strings"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// A server says so in the body of a HEARTBEAT without node records, as a worker says what it
// has given up, and only to workers of this library.
const refusedPrefix = "stepaf/1 refused "

// maxRefused is how long such a body may be.
const maxRefused = 1024

// refusals are the errors that a worker's call may fail with, and the words for them.
var refusals = [...]struct {
	word string
	err  error
}{{"invalid", van.ErrInvalid}, {"full", van.ErrQueueFull}, {"finished", van.ErrFinished}}

// Refuse tells node id that this node will not answer the request that timestamp ts belongs to: its call fails at once.
// epoch is that of the request's message. Only the reasons van.ErrInvalid, van.ErrQueueFull and van.ErrFinished are told. A process of the
// original, one that was lost, and one in the place of the one that asked are told nothing. Stats has the number for
// each of the first two reasons, whoever was told.
func (a App) Refuse(id int, epoch uint32, app, customer, ts int32, why error) {
	switch {
	case errors.Is(why, van.ErrInvalid):
		a.counts.invalid.Add(1)
	case errors.Is(why, van.ErrQueueFull):
		a.counts.refused.Add(1)
	}
	a.notices.refuse(id, epoch, app, customer, ts, why)
}

func (s *notices) refuse(id int, epoch uint32, app, customer, ts int32, why error) {
	p := s.processes.of(id)
	if p.incarnation == 0 || p.lost != nil || p.epoch != epoch {
		return
	}
	for _, r := range refusals {
		if !errors.Is(why, r.err) {
			continue
		}
		body := fmt.Appendf(nil, "%s%d %d %d %s %s", refusedPrefix, app, customer, ts, r.word, logx.Printable(strings.TrimPrefix(why.Error(), r.err.Error()+": ")))
		if err := s.tell(id, body[:min(len(body), maxRefused)]); err != nil {
			s.self.log.Info("could not tell a worker that its request is refused", "worker", s.self.peerName(id), "handler", ts, "err", err)
		}
		return
	}
}
