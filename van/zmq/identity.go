package zmq

import (
	"strconv"

	"github.com/stepaf/stepaf-go/van"
)

// How a node names itself on a connection, in libzmq's routing id: "ps9", as C++ nodes
// do, or between two nodes of this library "ps9.0badcafe", with the incarnation of the
// process. So a process that was replaced can never take over the connection of the one
// that has its place, which it could under the same name.

// peerName is who sent a message.
type peerName struct {
	id          int    // van.Empty: a node that has no id yet
	incarnation uint32 // 0: it did not say
}

// incarnationDigits is the length of an incarnation in a routing id.
const incarnationDigits = 8

// routingID is how a node with an id presents itself.
func routingID(p peerName) string {
	s := "ps" + strconv.Itoa(p.id)
	if p.incarnation == 0 {
		return s
	}
	hex := strconv.FormatUint(uint64(p.incarnation), 16)
	return s + "." + "00000000"[len(hex):] + hex
}

// nameOf reads a routing id. Whatever routingID does not make, and an id that no
// scheduler gives, is a node that has no id yet.
func nameOf(routing []byte) peerName {
	stranger := peerName{id: van.Empty}
	if len(routing) < 3 || routing[0] != 'p' || routing[1] != 's' || routing[2] == '0' {
		return stranger
	}
	p, i := peerName{}, 2
	for ; i < len(routing) && routing[i] != '.'; i++ {
		c := routing[i]
		if c < '0' || c > '9' || p.id > van.Empty {
			return stranger
		}
		p.id = p.id*10 + int(c-'0')
	}
	if p.id != van.SchedulerID && (p.id < van.ServerID(0) || p.id >= van.Empty) {
		return stranger
	}
	if i == len(routing) {
		return p
	}
	digits := routing[i+1:]
	if len(digits) != incarnationDigits {
		return stranger
	}
	for _, c := range digits {
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c >= 'a' && c <= 'f':
			c -= 'a' - 10
		default:
			return stranger
		}
		p.incarnation = p.incarnation<<4 | uint32(c)
	}
	if p.incarnation == 0 {
		return stranger
	}
	return p
}
