// Package vantest is the conformance suite of transports. It tests the requirements for every
// van.Van, wrapped ones included. A transport's test is one call:
//
//	func TestConformance(t *testing.T) {
//		vantest.Run(t, vantest.Suite{New: func(t testing.TB) van.Van { ... }})
//	}
//
// The tests keep to the connections that ps-lite makes, which not every transport
// can do without: nodes of different roles connect to each other, and a server
// sends data to a worker only after it has heard from it.
package vantest

import (
	"cmp"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// Limit is the time limit of each wait in a test.
const Limit = 30 * time.Second

// Suite describes the transport under test and its guarantees.
type Suite struct {
	// New makes a van that is not bound. All vans of a Suite can reach each other.
	New func(t testing.TB) van.Van

	// Host is the name at which nodes listen; "" is 127.0.0.1.
	Host string

	// BadHost is a name at which no node can listen; "" is 192.0.2.1, an address
	// that RFC 5737 keeps for documentation.
	BadHost string

	// Lossy is set for vans that lose messages and resend them: then only their guarantee
	// is tested, that messages arrive once, in any order.
	Lossy bool

	// MaxAllocs is how many allocations a round trip of two data messages may cost
	// in steady state, on both sides together. It is counted when it is not negative and not
	// built with -race.
	MaxAllocs float64
}

// Run runs the suite.
func Run(t *testing.T, s Suite) {
	s.Host = cmp.Or(s.Host, "127.0.0.1")
	s.BadHost = cmp.Or(s.BadHost, "192.0.2.1")
	for _, c := range []struct {
		name  string
		test  func(*world)
		lossy bool // also makes sense for lossy vans
	}{
		{"BindAnyPort", bindAnyPort, true},
		{"BindPortInUse", bindPortInUse, true},
		{"BindBadHost", bindBadHost, true},
		{"ConnectBeforeBind", connectBeforeBind, true},
		{"UnknownPeer", unknownPeer, true},
		{"Intact", intact, true},
		{"Large", large, false},
		{"MetaIntact", metaIntact, true},
		{"CopyBelow", copyBelow, true},
		{"Batches", batches, false},
		{"SenderID", senderID, false},
		{"PostSend", postSend, true},
		{"ManyToOne", manyToOne, true},
		{"OneToMany", oneToMany, true},
		{"Retain", retain, false},
		{"Done", done, true},
		{"Holders", holders, true},
		{"BlockedReceiver", blockedReceiver, false},
		{"BlockedPeer", blockedPeer, false},
		{"Rename", rename, true},
		{"Disconnect", disconnect, true},
		{"Farewell", farewell, false},
		{"Replace", replace, true},
		{"Restart", restart, false},
		{"PeerCloses", peerCloses, false},
		{"RenamedCloses", renamedCloses, false},
		{"CloseWhileBusy", closeWhileBusy, true},
		{"CloseDelivers", closeDelivers, true},
		{"CloseTwice", closeTwice, true},
		{"Allocations", allocations, false},
	} {
		if s.Lossy && !c.lossy || c.name == "Allocations" && (s.MaxAllocs < 0 || Race) {
			continue // nothing would be compared
		}
		t.Run(c.name, func(t *testing.T) {
			w := &world{T: t, suite: s}
			t.Cleanup(w.end)
			w.before = stacks()
			c.test(w)
		})
	}
}
