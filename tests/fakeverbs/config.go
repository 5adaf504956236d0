package fakeverbs

// This file owns the configuration, the calls that can be made to fail, and the errors.

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// Config is the behavior of a Net. The comments state the defaults.
type Config struct {
	// AddrAtOnce makes the resolution of an unknown address fail at once instead of after the caller's time-out.
	AddrAtOnce bool
	// Unreachable is the time after which an unanswered connect request or disconnect fails: 100 ms.
	Unreachable time.Duration
	// Retry is the time after which a message to a peer that does not acknowledge fails with RetryExceeded: 20 ms. 0 means never.
	Retry time.Duration
	// SevenForever makes a retry count of 7 mean forever, as in Soft-RoCE.
	SevenForever bool
	// RNR is the time after which a message fails with RNRExceeded because the peer has no receive request, if the RNR retry count is
	// below 7. 0 means never.
	RNR time.Duration
	// EventDelay delays each event of the connection manager. It does not change their order.
	EventDelay time.Duration
	// Jitter is the upper limit of a random delay of posted requests. Queue pairs then overtake each other; the order within a queue
	// pair does not change.
	Jitter time.Duration
	// Seed seeds the random numbers.
	Seed uint64
	// MaxInline is the largest inline data in bytes that is granted: 512.
	MaxInline int
	// MaxMsg is the longest message in bytes: 1 GiB.
	MaxMsg uint32
	// MaxWR is the largest depth of a queue: 16384.
	MaxWR int
	// CQE is the capacity of a new completion queue: 64.
	CQE int
	// MaxCQE is the largest capacity of a completion queue: 32767.
	MaxCQE int
	// MaxMR is the largest number of regions on one device of a Stack: 65536.
	MaxMR int
	// CheckSource checks, when a completion is polled, that the bytes sent by its work request and by earlier ones are unchanged and
	// still registered. Otherwise it adds to Errors. Do not set it for users that learn from the peer's answer that their bytes have
	// arrived.
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

// Reasons of a rejection, and the errno of a time-out, as in events.
const (
	statusTimeout    = 4
	statusNoListener = 8
	statusConsumer   = 28
	timedOut         = -110
)

// Error is the error of a call. Err, which errors.Is finds, is an errno or one of the errors of package verbs.
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

// OpKind is a kind of call to package verbs.
type OpKind int

// Calls that can be made to fail.
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

// String returns the name of the call.
func (k OpKind) String() string {
	if k > 0 && int(k) < len(opNames) {
		return opNames[k]
	}
	return fmt.Sprintf("call %d", int(k))
}

// Op is a call before it is carried out.
type Op struct {
	Kind  OpKind
	Stack *Stack
	N     int            // the number of calls of this kind in this Stack, from 1
	Local netip.AddrPort // of the ID; for a call of a device, only its address; else invalid
	Peer  netip.AddrPort // of the ID, once known
	Size  int            // OpRegister, OpDeregister: bytes; OpReserve: entries
	WR    *verbs.SendWR  // OpPost is reported once for each work request
}

// EventError, returned for an OpResolveAddr, OpResolveRoute or OpConnect, lets the operation begin and then fail with an event of this status.
// A connect ends with Rejected if the status is positive, else with Unreachable.
type EventError int

func (e EventError) Error() string { return fmt.Sprintf("event with status %d", int(e)) }

// FailNth returns a function for Fail: the kth call of that kind in a Stack fails with err.
func FailNth(kind OpKind, k int, err error) func(Op) error {
	return func(op Op) error {
		if op.Kind == kind && op.N == k {
			return err
		}
		return nil
	}
}

// WR is a work request before it is executed.
type WR struct {
	verbs.SendWR
	Stack *Stack // the stack that posted it
	Local netip.AddrPort
	Peer  netip.AddrPort
	Num   uint32 // of the queue pair
	N     int    // the number of executed requests of this queue pair, from 1
}
