package fakeverbs

// The calls, and the work requests, that can be made to fail.

import (
	"fmt"
	"net/netip"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

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
