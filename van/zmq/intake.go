package zmq

// The state that all receivers of a van share.

import (
	"strconv"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
	"github.com/stepaf/stepaf-go/van/env"
)

// intake is the receiving side of a van.
type intake struct {
	n      *shared
	engine *engine.Engine
	recv   van.Receiver // set by Start
	flow   flow
	early  early
	guard  *guard        // of the ROUTER's connections, or nil
	moved  atomic.Uint64 // bytes sent and received when busy was last called
}

// bulk is the number of bytes, sent or received since the last call of busy, above which spinning does
// not pay: the processors are needed to copy the data.
const bulk = 256 << 10

// busy reports whether more than bulk bytes were sent or received since its last call.
func (in *intake) busy() bool {
	n := in.n.stats.sentB.Load() + in.n.stats.recvB.Load()
	return in.n.cfg.BusyPoll != env.SpinForever && n-in.moved.Swap(n) > bulk
}

// malformed counts malformed messages. It logs the 1st, 2nd, 4th, ... of them, so that a flood of messages does not
// become a flood of log lines.
func (in *intake) malformed(err error, f *frames) {
	n := in.n.stats.malformed.Add(1)
	if n&(n-1) != 0 {
		return
	}
	from := "unknown"
	if f.len() > 0 {
		from = strconv.QuoteToASCII(string(f.bytes(0)))
	}
	in.n.log.Warn("dropped a malformed message", "err", err, "from", from, "frames", f.len(), "dropped so far", n)
}

// fenced counts and logs messages of replaced processes, like malformed.
func (in *intake) fenced(name peerName) {
	if n := in.n.stats.stale.Add(1); n&(n-1) == 0 {
		in.n.log.Warn("dropped a message of a process that was replaced", "from", name.String(), "as", van.NodeName(name.id), "dropped so far", n)
	}
}
