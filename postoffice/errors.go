package postoffice

// The errors that programs test with errors.Is.

import (
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/van"
)

// Error names the failed node, its operation, the peer, the elapsed time, and a remedy. It wraps one of the
// sentinels below.
type Error = van.Error

// Errors of all packages of this library, for errors.Is.
var (
	// ErrClosed: the node, worker or server was closed before the call or during it.
	ErrClosed = van.ErrClosed
	// ErrPeerLost: the connection to the peer broke, or its heartbeats stopped.
	ErrPeerLost = van.ErrPeerLost
	// ErrReplaced: another process has taken the place of this one, and the peer accepts nothing from this one any more.
	ErrReplaced = van.ErrReplaced
	// ErrUnknownPeer: there is no connection to that node.
	ErrUnknownPeer = van.ErrUnknownPeer
	// ErrQueueFull: the messages that wait for the peer, or the requests in flight, have reached their limit.
	ErrQueueFull = van.ErrQueueFull
	// ErrFinished: the peer serves no more requests: its server was shut down, or its program waits in Node.Shutdown or in Python's stop().
	ErrFinished = van.ErrFinished
	// ErrTimeout: a wait reached its limit.
	ErrTimeout = van.ErrTimeout
	// ErrMalformed: a message breaks the protocol.
	ErrMalformed = van.ErrMalformed
	// ErrUnauthenticated: one end of a connection has not proved that it knows the secret that the other end requires.
	ErrUnauthenticated = van.ErrUnauthenticated
	// ErrRequestRefused: the peer's handler has refused the request. The text has its reason.
	ErrRequestRefused = van.ErrRequestRefused
	// ErrNoTransport: the chosen transport is not in this build. It matches ErrInvalid, too.
	ErrNoTransport = van.ErrNoTransport
	// ErrInvalid: an argument is out of range. Nothing was sent.
	ErrInvalid = van.ErrInvalid
	// ErrRefused: the scheduler has refused the node. Start returns it.
	ErrRefused = cluster.ErrRefused
	// ErrUnknownHandler: the call was never made, was waited for before, is waited for by another goroutine, or has finished too long ago: of
	// finished calls without a Wait, the latest 4096 are kept.
	ErrUnknownHandler = cluster.ErrUnknownHandler
	// ErrAnswered: a batch or request was answered or refused before.
	ErrAnswered = cluster.ErrAnswered
	// ErrPending: a wait for a limited slice of time has ended before the call did. Wait again.
	ErrPending = cluster.ErrPending
)
