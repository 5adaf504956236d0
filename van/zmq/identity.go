package zmq

import (
	"strconv"

	"github.com/stepaf/stepaf-go/van"
)

// The routing id of libzmq names the connecting node. C++ nodes use "ps9". Two nodes of this library use
// "ps9.0badcafe.00c0ffee", with the incarnations of the connecting process and of the receiving process. The receiver's
// ROUTER hands a routing id over to the newest connection that has it. The incarnations prevent two kinds of takeover:
//
//   - A process that was replaced cannot take over the connection of its replacement process.
//   - A process P that node N has connected to cannot use N's routing id at a third node, whose incarnation P
//     does not know. The scheduler can therefore connect to an unauthenticated process, to refuse it or to answer it.
//
// The scheduler appends a serial number, so that each of its connections has its own routing id: "ps1.0badcafe.00c0ffee.00000007".
// It may have several connections to one process: until it knows which node the process is, it opens one for each question. If the
// connections shared a routing id, the process would read only the newest, even if the scheduler keeps another one.

// peerName is the sender of a message as its routing id names it.
type peerName struct {
	id          int    // van.Empty: a node that has no id yet
	incarnation uint32 // 0: the routing id has none
}

func (p peerName) String() string {
	if p.incarnation == 0 {
		return "ps" + strconv.Itoa(p.id)
	}
	return "ps" + strconv.Itoa(p.id) + "." + digits(p.incarnation)
}

// incarnationDigits is the length of an incarnation in a routing id.
const incarnationDigits = 8

// routingID returns the routing id of node p for connections to the process with the incarnation to. Without an
// incarnation of its own, p uses the form of the original.
func routingID(p peerName, to uint32) string {
	s := "ps" + strconv.Itoa(p.id)
	if p.incarnation == 0 {
		return s
	}
	return s + "." + digits(p.incarnation) + "." + digits(to)
}

// serialName appends a connection's serial number to name.
func serialName(name string, serial uint32) string { return name + "." + digits(serial) }

func digits(incarnation uint32) string {
	hex := strconv.FormatUint(uint64(incarnation), 16)
	return "00000000"[len(hex):] + hex
}

// nameOf parses a routing id that the process with the incarnation own has received. A routing id that routingID does not
// produce, and a node id that no scheduler assigns, stand for a node that has no id yet. ours is false if the name was made for
// another process, such as a former process at this node's address. Only control messages are accepted under such a name.
func nameOf(routing []byte, own uint32) (p peerName, ours bool) {
	p, to := readName(routing)
	return p, p.incarnation == 0 || to == own
}

// readName parses a routing id into the sender's name and the incarnation of the receiving process, 0 if it has none.
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

// incarnationIn parses the incarnation at the start of b.
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
