package van

// The sentinel errors, and the error types that carry their circumstances.

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/van/env"
)

// Errors to test for with errors.Is. They are wrapped in *Error, which names the
// node, the operation, and the elapsed time.
var (
	// ErrClosed: the van, node, worker or server was closed before or during the call.
	ErrClosed = errors.New("closed")
	// ErrPeerLost: the connection to the peer broke, or its heartbeats stopped.
	ErrPeerLost = errors.New("peer lost")
	// ErrReplaced: the peer knows that another process has replaced this one, and accepts
	// no more messages of this process.
	ErrReplaced = errors.New("another process has taken the place of this one")
	// ErrUnknownPeer: there is no connection to that node.
	ErrUnknownPeer = errors.New("no such peer")
	// ErrQueueFull: the send queue of the peer is at its limit. The message was not sent.
	ErrQueueFull = errors.New("send queue full")
	// ErrFinished: the peer serves no more requests: its server was shut down, its application was closed, or its program waits in
	// Finalize or in Python's stop().
	ErrFinished = errors.New("finished")
	// ErrTimeout: a wait reached its limit.
	ErrTimeout = errors.New("timed out")
	// ErrMalformed: a frame from the network breaks the protocol.
	ErrMalformed = errors.New("malformed message")
	// ErrUnauthenticated: one end of a connection has not proved that it knows the secret which the other end requires.
	ErrUnauthenticated = errors.New("no valid proof of the cluster's secret")
	// ErrRequestRefused: the peer's handler has refused the request, or the peer has not made its application in time; the text
	// has the reason.
	ErrRequestRefused = errors.New("request refused")
	// ErrNoTransport: this build does not contain the chosen van. It matches ErrInvalid, too.
	ErrNoTransport error = invalid("unsupported van type")
	// ErrInvalid: an argument is out of range; nothing was sent.
	ErrInvalid = env.ErrInvalid
)

// invalid is a sentinel that matches ErrInvalid, too.
type invalid string

func (e invalid) Error() string { return string(e) }

func (e invalid) Unwrap() error { return ErrInvalid }

// TimedOut returns err. If err is a context's deadline, the result wraps ErrTimeout as well.
func TimedOut(err error) error {
	if errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, ErrTimeout) {
		return fmt.Errorf("%w (%w)", ErrTimeout, err)
	}
	return err
}

// Error describes a failed operation. The zero value of a field means that it does
// not apply, except where noted.
type Error struct {
	Op      string        // the operation: "push_pull", "barrier", "bind"
	Node    string        // the node that tried it: "worker 0 (id 9)"
	Peer    string        // its peer: "server 1 (id 10) at 10.0.0.7:4021"
	PeerID  int           // the peer's node id, if a request to this peer failed; 0 in other errors
	Detail  string        // the object: key, timestamp, field, value
	Elapsed time.Duration // the time until the failure
	Limit   time.Duration // the time limit of the operation
	Hint    string        // the remedy
	Err     error         // the cause, with one of the sentinels above at its root
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

// ConnectionError is why the connection to a process was lost. The id of the process may mean another process meanwhile.
type ConnectionError struct {
	Incarnation uint32 // of the process; 0: unknown
	Err         error
}

// Error returns the cause's text.
func (e *ConnectionError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *ConnectionError) Unwrap() error { return e.Err }

// FieldError names an invalid field of a received frame. It wraps ErrMalformed.
type FieldError struct {
	Field string // "body_size", "control.node[1].hostname"
	Value any
	Want  string
}

// Error names the field, its value, and the expected value.
func (e *FieldError) Error() string {
	return fmt.Sprintf("malformed message: %s = %v, want %s", e.Field, e.Value, e.Want)
}

// Unwrap returns ErrMalformed.
func (e *FieldError) Unwrap() error { return ErrMalformed }
