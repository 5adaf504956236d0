package cluster

// The refusals of a server: a notice to a worker that its request will not be answered, with the reason.

import (
	"errors"
	"fmt"
	"strings"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// A server refuses a request in the body of a HEARTBEAT without node records, like the cancellations of a worker, and
// only to workers of this library.
const refusedPrefix = "stepaf/1 refused "

// maxRefused is the longest such body.
const maxRefused = 1024

// refusalKinds are the errors that a refusal may carry, and the words for them. A notice has the words of all errors
// that its reason matches, separated by commas. The word unanswered is alone.
var refusalKinds = [...]struct {
	word string
	err  error
}{{"unanswered", errUnanswered}, {"refused", van.ErrRequestRefused}, {"invalid", van.ErrInvalid}, {"full", van.ErrQueueFull}, {"finished", van.ErrFinished}}

// errUnanswered: a request was processed, but the transport has not taken its answer.
var errUnanswered = errors.New("the request was processed, but its answer was not sent")

// Unanswered wraps err, the transport's error for the answer to a batch or a push. The worker's error does not match the errors of
// requests that were not processed, since a worker may repeat those.
func Unanswered(err error) error { return fmt.Errorf("%w: %w", errUnanswered, err) }

// RefusalReason returns the reason to refuse a request that a server cannot process: why, if it matches van.ErrInvalid, ErrQueueFull or
// ErrFinished, and otherwise an error with the text of why that matches van.ErrInvalid.
func RefusalReason(why error) error {
	if errors.Is(why, van.ErrInvalid) || errors.Is(why, van.ErrQueueFull) || errors.Is(why, van.ErrFinished) {
		return why
	}
	return fmt.Errorf("%w: %s", van.ErrInvalid, strings.TrimPrefix(why.Error(), van.ErrMalformed.Error()+": "))
}

// Declined returns why as the reason of a handler that refuses a request. A reason that matches van.ErrFinished stays
// as it is: it is not the handler's.
func Declined(why error) error {
	if why == nil {
		return fmt.Errorf("%w: no reason (nil) to refuse a request", van.ErrInvalid)
	}
	if errors.Is(why, van.ErrFinished) {
		return why
	}
	return &declined{why}
}

// declined is the error of a handler that refuses a request. It has the handler's text, and matches van.ErrRequestRefused and the handler's
// own sentinels.
type declined struct{ why error }

func (d *declined) Error() string { return van.ErrRequestRefused.Error() + ": " + d.why.Error() }

func (d *declined) Unwrap() []error { return []error{van.ErrRequestRefused, d.why} }

// Refuse notifies node id that this node will not answer the request that timestamp ts belongs to: its call fails at
// once. epoch is that of the request's message. Only reasons of Unanswered, and reasons that match van.ErrRequestRefused,
// van.ErrInvalid, van.ErrQueueFull or van.ErrFinished, are sent. A lost process gets the last of them (maxNotices) when it is back; the replacement of the
// process that asked gets none. The protocol of a C++ process has no refusal: it waits for its limit, and the log reports that.
// Stats counts refusals for van.ErrInvalid and van.ErrQueueFull, with or without a notice.
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
	if p.epoch != epoch {
		return
	}
	var words []string
	text := why.Error()
	for _, r := range refusalKinds {
		if errors.Is(why, r.err) {
			words = append(words, r.word)
			text = strings.TrimPrefix(text, r.err.Error()+": ")
			if r.err == errUnanswered {
				break // the other errors are those of the answer
			}
		}
	}
	if len(words) == 0 {
		return
	}
	switch {
	case !p.known || p.lost != nil && p.incarnation == 0:
		return
	case p.incarnation == 0:
		s.self.rarely("refused: original").Warn("a request was refused; its worker is a C++ StepMesh process, which cannot be notified and waits for its limit",
			"worker", s.self.peerName(id), "handler", ts, "why", text)
		return
	}
	body := fmt.Appendf(nil, "%s%d %d %d %s %s", refusedPrefix, app, customer, ts, strings.Join(words, ","), logx.Printable(text))
	body = body[:min(len(body), maxRefused)]
	if p.lost != nil {
		s.add(id, peerNotice{refusal: body, handler: ts, incarnation: p.incarnation, at: clock.Now()})
		if s.processes.of(id).lost != nil {
			return // resend sends it when the peer is back
		}
	}
	s.sendRefusal(id, ts, body)
}
