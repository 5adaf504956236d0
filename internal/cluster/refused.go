package cluster

// The refusals of servers on a worker.

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// refused handles msg if it is a refusal, and reports whether it is.
func (a *apps) refused(msg *van.Message) bool {
	if msg.Control.Cmd != van.Heartbeat || len(msg.Control.Nodes) > 0 || !bytes.HasPrefix(msg.Body, []byte(refusedPrefix)) {
		return false
	}
	p := a.processes.of(msg.Sender)
	if from, to := msg.Incarnations(); from == 0 || from != p.incarnation || to != a.processes.incarnation {
		a.processes.logDropped(msg, p)
		return true
	}
	meta, why := parseRefused(msg.Body[len(refusedPrefix):min(len(msg.Body), maxRefused)])
	if why == nil {
		a.self.droppedControl(msg.Sender, &van.FieldError{Field: "body", Value: fmt.Sprintf("%.60q", msg.Body), Want: "application, customer, timestamp, unanswered, refused, invalid, full or finished, and why"})
		return true
	}
	a.failRequest(&meta, msg.Sender, why)
	return true
}

// parseRefused parses the text of a refusal. why is nil if it is invalid.
func parseRefused(b []byte) (meta van.Meta, why error) {
	w := strings.SplitN(string(b), " ", 5)
	if len(w) < 5 {
		return meta, nil
	}
	for i, to := range []*int32{&meta.AppID, &meta.CustomerID, &meta.Timestamp} {
		n, err := strconv.ParseInt(w[i], 10, 32)
		if err != nil {
			return meta, nil
		}
		*to = int32(n)
	}
	no := &refusal{text: logx.Printable(w[4])}
	for word := range strings.SplitSeq(w[3], ",") {
		i := slices.IndexFunc(refusalKinds[:], func(r struct {
			word string
			err  error
		}) bool {
			return r.word == word
		})
		if i < 0 {
			return meta, nil
		}
		no.is = append(no.is, refusalKinds[i].err)
	}
	return meta, no
}

// refusal is the reason why a server refuses a request.
type refusal struct {
	is   []error
	text string
}

func (r *refusal) Error() string {
	if r.is[0] == van.ErrRequestRefused || r.is[0] == errUnanswered {
		return r.is[0].Error() + ": " + r.text
	}
	return r.is[0].Error() + ": refused there: " + r.text
}

func (r *refusal) Unwrap() []error { return r.is }
