package zmq

import (
	"strconv"

	"github.com/stepaf/stepaf-go/van"
)

// How a node names itself on a connection, in libzmq's routing id: "ps9", as C++ nodes
// do, or between two nodes of this library "ps9.0badcafe.00c0ffee", with the incarnations of the
// process that connects and of the one that it connects to. The receiver's ROUTER hands a routing id over to
// the newest connection that has it. The incarnations prevent two kinds of takeover:
//
//   - A process that was replaced cannot take over the connection of its successor.
//   - A process that some node has connected to cannot use that node's name at a third one, whose incarnation it
//     does not know. The scheduler can therefore connect to a process that proves nothing, to refuse it or to answer it.
//
// The scheduler adds a serial number, so that each of its connections has a name of its own: "ps1.0badcafe.00c0ffee.00000007".
// It may have several connections to one process: while it learns which node that is, it connects for each question. If they had one
// name, the process would read only the newest, whichever of them the scheduler keeps.

// peerName is who sent a message.
type peerName struct {
	id          int    // van.Empty: a node that has no id yet
	incarnation uint32 // 0: it did not say
}

func (p peerName) String() string {
	if p.incarnation == 0 {
		return "ps" + strconv.Itoa(p.id)
	}
	return "ps" + strconv.Itoa(p.id) + "." + digits(p.incarnation)
}

// incarnationDigits is the length of an incarnation in a routing id.
const incarnationDigits = 8

// routingID is how a node with an id presents itself to the process with the incarnation to. A name without an
// incarnation is for nodes of the original.
func routingID(p peerName, to uint32) string {
	s := "ps" + strconv.Itoa(p.id)
	if p.incarnation == 0 {
		return s
	}
	return s + "." + digits(p.incarnation) + "." + digits(to)
}

// serialName is the name of one of several connections that have the name.
func serialName(name string, serial uint32) string { return name + "." + digits(serial) }

func digits(incarnation uint32) string {
	hex := strconv.FormatUint(uint64(incarnation), 16)
	return "00000000"[len(hex):] + hex
}

// nameOf reads a routing id that the process with the incarnation own has received. Whatever routingID does not
// make, and an id that no scheduler gives, is a node that has no id yet. ours is false for a name for another process, such as
// the one that had this node's address before. Nothing but control messages counts under such a name.
func nameOf(routing []byte, own uint32) (p peerName, ours bool) {
	p, to := readName(routing)
	return p, p.incarnation == 0 || to == own
}

// readName returns the name that a routing id has, and the incarnation of the process that it is for, if it has one.
func readName(routing []byte) (name peerName, to uint32) {
	stranger := peerName{id: van.Empty}
	if len(routing) < 3 || routing[0] != 'p' || routing[1] != 's' || routing[2] == '0' {
		return stranger, 0
	}
	p, i := peerName{}, 2
	for ; i < len(routing) && routing[i] != '.'; i++ {
		c := routing[i]
		if c < '0' || c > '9' || p.id > van.Empty {
			return stranger, 0
		}
		p.id = p.id*10 + int(c-'0')
	}
	if p.id != van.SchedulerID && (p.id < van.ServerID(0) || p.id >= van.Empty) {
		return stranger, 0
	}
	if i == len(routing) {
		return p, 0
	}
	const part = 1 + incarnationDigits
	if p.id == van.SchedulerID && len(routing) == i+3*part && routing[i+2*part] == '.' {
		if _, ok := incarnationIn(routing[i+2*part+1:]); !ok {
			return stranger, 0
		}
		routing = routing[:i+2*part]
	}
	if len(routing) != i+2*part || routing[i+part] != '.' {
		return stranger, 0
	}
	by, ok := incarnationIn(routing[i+1:])
	to, valid := incarnationIn(routing[i+2+incarnationDigits:])
	if !ok || !valid || by == 0 || to == 0 {
		return stranger, 0
	}
	p.incarnation = by
	return p, to
}

// incarnationIn reads the incarnation that b begins with.
func incarnationIn(b []byte) (v uint32, ok bool) {
	for _, c := range b[:incarnationDigits] {
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c >= 'a' && c <= 'f':
			c -= 'a' - 10
		default:
			return 0, false
		}
		v = v<<4 | uint32(c)
	}
	return v, true
}
