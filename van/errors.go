package van

// The errors that callers tell apart, and the types that carry their circumstances.

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/van/env"
)

// Errors that callers tell apart with errors.Is. They come wrapped in *Error,
// which says who, what, and how long.
var (
	// ErrClosed: the van, node, worker or server was closed before or meanwhile.
	ErrClosed = errors.New("closed")
	// ErrPeerLost: the connection to the peer broke, or its heartbeats stopped.
	ErrPeerLost = errors.New("peer lost")
	// ErrReplaced: another process has taken the place of this one, says the peer: it takes
	// nothing of it any more.
	ErrReplaced = errors.New("another process has taken the place of this one")
	// ErrUnknownPeer: there is no connection to that node.
	ErrUnknownPeer = errors.New("no such peer")
	// ErrQueueFull: so much waits for the peer that nothing else is taken for it now.
	ErrQueueFull = errors.New("send queue full")
	// ErrFinished: the peer's program is at its end: it waits in Finalize, or in Python's stop(), and does nothing else.
	ErrFinished = errors.New("finished")
	// ErrTimeout: a wait reached its limit.
	ErrTimeout = errors.New("timed out")
	// ErrMalformed: a frame from the network breaks the protocol.
	ErrMalformed = errors.New("malformed message")
	// ErrUnauthenticated: one end of a connection has not proved that it knows the secret that the other end requires.
	ErrUnauthenticated = errors.New("no valid proof of the cluster's secret")
	// ErrRequestRefused: the peer's handler has refused the request; the text has its reason.
	ErrRequestRefused = errors.New("request refused")
	// ErrNoTransport: the chosen van is not in this build. It matches ErrInvalid, too.
	ErrNoTransport error = invalid("unsupported van type")
	// ErrInvalid: an argument is out of range; nothing was sent.
	ErrInvalid = env.ErrInvalid
)

// invalid is a sentinel that matches ErrInvalid, too.
type invalid string

func (e invalid) Error() string { return string(e) }

func (e invalid) Unwrap() error { return ErrInvalid }

// TimedOut is err, and ErrTimeout as well if it is a context's deadline.
func TimedOut(err error) error {
	if errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, ErrTimeout) {
		return fmt.Errorf("%w (%w)", ErrTimeout, err)
	}
	return err
}

// Error says who failed at what. The zero value of a field means that it does
// not apply, except where noted.
type Error struct {
	Op      string        // what was tried: "push_pull", "barrier", "bind"
	Node    string        // who tried: "worker 0 (id 9)"
	Peer    string        // with whom: "server 1 (id 10) at 10.0.0.7:4021"
	PeerID  int           // that peer's node id, of a request that failed with one; 0 in other errors
	Detail  string        // key, timestamp, field, value: whatever names the thing
	Elapsed time.Duration // how long it took
	Limit   time.Duration // how long it might have taken
	Hint    string        // what to do about it
	Err     error         // the cause; one of the sentinels above at its root
}

// Error returns everything on one line.
func (e *Error) Error() string {
	var b strings.Builder
	if e.Node != "" {
		b.WriteString(e.Node + ": ")
	}
	b.WriteString(e.Op)
	if e.Peer != "" {
		b.WriteString(" with " + e.Peer)
	}
	if e.Detail != "" {
		b.WriteString(": " + e.Detail)
	}
	if e.Err != nil {
		b.WriteString(": " + e.Err.Error())
	}
	if e.Elapsed > 0 {
		fmt.Fprintf(&b, " after %s", e.Elapsed.Round(time.Millisecond))
	}
	if e.Limit > 0 {
		fmt.Fprintf(&b, " (limit %s)", e.Limit)
	}
	if e.Hint != "" {
		b.WriteString("; " + e.Hint)
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// FieldError says which field of a received frame is wrong. It wraps
// ErrMalformed.
type FieldError struct {
	Field string // "body_size", "control.node[1].hostname"
	Value any
	Want  string
}

// Error names the field, its value, and what was expected.
func (e *FieldError) Error() string {
	return fmt.Sprintf("malformed message: %s = %v, want %s", e.Field, e.Value, e.Want)
}

// Unwrap returns ErrMalformed.
func (e *FieldError) Unwrap() error { return ErrMalformed }
