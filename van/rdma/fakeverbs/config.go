package fakeverbs

// What is configured, what can be made to fail, and the errors.

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// Config is how a Net behaves. See NewNet for the initial values.
type Config struct {
	// AddrAtOnce makes the resolution of an unknown address fail at once instead of
	// after the caller's time-out.
	AddrAtOnce bool
	// Unreachable is after what time a connect request or a disconnect that nobody
	// answers is given up: 100 ms.
	Unreachable time.Duration
	// Retry is after what time a message to a peer that does not acknowledge fails
	// with RetryExceeded: 20 ms. 0 is never.
	Retry time.Duration
	// SevenForever makes a retry count of 7 mean for ever, as Soft-RoCE does.
	SevenForever bool
	// RNR is after what time a message for which the peer has no receive request
	// fails with RNRExceeded, when the RNR retry count is below 7. 0 is never.
	RNR time.Duration
	// EventDelay delays each event of the connection manager. Their order stays.
	EventDelay time.Duration
	// Jitter delays what is posted by a random time up to it, so that queue pairs
	// overtake each other. Within one queue pair the order stays.
	Jitter time.Duration
	// Seed is that of the random numbers.
	Seed uint64
	// MaxInline is the most inline data that is granted, in bytes: 512.
	MaxInline int
	// MaxMsg is the longest message in bytes: 1 GiB.
	MaxMsg uint32
	// MaxWR is the most work requests in one queue: 16384.
	MaxWR int
	// CQE is how many completions a new completion queue holds: 64.
	CQE int
	// MaxCQE is how many one can hold: 32767.
	MaxCQE int
	// MaxMR is how many regions one device of a Stack can have: 65536.
	MaxMR int
	// CheckSource looks, when a completion is polled, whether the bytes that its work
	// request and the ones before it have sent are still as they were posted, and
	// registered. If not it is one of Errors. It is not for users who learn from the
	// peer's answer that their bytes have arrived.
	CheckSource bool
	// NoAckTimeout makes SetAckTimeout fail with ENOSYS.
	NoAckTimeout bool
	// NoTOS makes SetTOS fail with ENOSYS.
	NoTOS bool
}

func defaults() Config {
	return Config{Unreachable: 100 * time.Millisecond, Retry: 20 * time.Millisecond, MaxInline: 512, MaxMsg: 1 << 30,
		MaxWR: 16384, CQE: 64, MaxCQE: 32767, MaxMR: 65536}
}

// Reasons of a rejection, and the errno of a time-out as events have it.
const (
	statusTimeout    = 4
	statusNoListener = 8
	statusConsumer   = 28
	timedOut         = -110
)

// Error is what a call failed with. Err, which errors.Is finds, is an errno or one of
// the errors of package verbs.
type Error struct {
	Op     string // the call
	Detail string // the thing, its value, and what was expected
	Err    error
}

func (e *Error) Error() string {
	if e.Detail == "" {
		return fmt.Sprintf("fakeverbs: %s: %v", e.Op, e.Err)
	}
	return fmt.Sprintf("fakeverbs: %s: %s: %v", e.Op, e.Detail, e.Err)
}

// Unwrap returns Err.
func (e *Error) Unwrap() error { return e.Err }

func fault(op string, err error, format string, args ...any) error {
	return &Error{Op: op, Detail: fmt.Sprintf(format, args...), Err: err}
}

// OpKind is a call of package verbs.
type OpKind int

// The calls that can be made to fail.
const (
	OpDevices OpKind = iota + 1
	OpNewChannel
	OpNext
	OpNewID
	OpBind
	OpListen
	OpResolveAddr
	OpResolveRoute
	OpSetAckTimeout
	OpSetTOS
	OpCreateQP
	OpConnect
	OpAccept
	OpReject
	OpDisconnect
	OpInfo
	OpRegister
	OpPost
	OpPoll
	OpReserve
	OpDeregister
	OpDestroy
	opCount
)

var opNames = [...]string{OpDevices: "devices", OpNewChannel: "new channel", OpNext: "next", OpNewID: "new id", OpBind: "bind",
	OpListen: "listen", OpResolveAddr: "resolve address", OpResolveRoute: "resolve route", OpSetAckTimeout: "set ack timeout", OpSetTOS: "set type of service",
	OpCreateQP: "create queue pair", OpConnect: "connect", OpAccept: "accept", OpReject: "reject", OpDisconnect: "disconnect",
	OpInfo: "info", OpRegister: "register", OpPost: "post", OpPoll: "poll", OpReserve: "reserve",
	OpDeregister: "deregister", OpDestroy: "destroy"}

// String names the call.
func (k OpKind) String() string {
	if k > 0 && int(k) < len(opNames) {
		return opNames[k]
	}
	return fmt.Sprintf("call %d", int(k))
}

// Op is one call that is about to be made.
type Op struct {
	Kind  OpKind
	Stack *Stack
	N     int            // this is the Nth of its kind in its Stack, from 1
	Local netip.AddrPort // of the ID; only the address, of a device; else invalid
	Peer  netip.AddrPort // of the ID, once known
	Size  int            // OpRegister, OpDeregister: bytes; OpReserve: entries
	WR    *verbs.SendWR  // OpPost: called for each of the work requests
}

// EventError makes an OpResolveAddr, OpResolveRoute or OpConnect begin and then end with
// the event of its failure and this status. A connect ends with Rejected when it is
// positive, else with Unreachable.
type EventError int

func (e EventError) Error() string { return fmt.Sprintf("event with status %d", int(e)) }

// FailNth is a function for Fail: the kth call of that kind in a Stack fails with err.
func FailNth(kind OpKind, k int, err error) func(Op) error {
	return func(op Op) error {
		if op.Kind == kind && op.N == k {
			return err
		}
		return nil
	}
}

// WR is a work request that is about to be executed.
type WR struct {
	verbs.SendWR
	Stack *Stack // the poster
	Local netip.AddrPort
	Peer  netip.AddrPort
	Num   uint32 // of the queue pair
	N     int    // this is the Nth of its queue pair, from 1
}
