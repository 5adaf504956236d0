package zmq

// What the receivers of a van have in common.

import (
	"bytes"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
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
	guard  *guard        // of the ROUTER's connections; nil without one
	moved  atomic.Uint64 // bytes sent and received when busy was last called
}

// bulk is the number of bytes, sent or received since the last look, that take
// longer than it pays to look for what comes next: the processors have them to
// copy.
const bulk = 256 << 10

// busy tells whether much has been sent or received since it was last called.
func (in *intake) busy() bool {
	n := in.n.stats.sentB.Load() + in.n.stats.recvB.Load()
	return in.n.cfg.BusyPoll != env.SpinForever && n-in.moved.Swap(n) > bulk
}

// malformed counts and reports nonsense from the network: the 1st, 2nd, 4th, ...
// so that a flood of it does not become a flood of lines.
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

// malformedFrom is malformed for a message of a bundle, and what follows it there.
func (in *intake) malformedFrom(err error, name peerName) {
	if n := in.n.stats.malformed.Add(1); n&(n-1) == 0 {
		in.n.log.Warn("dropped a malformed message in a bundle", "err", err, "from", name.String(), "dropped so far", n)
	}
}

// fenced counts and reports messages of processes that have been replaced, like
// malformed.
func (in *intake) fenced(name peerName) {
	if n := in.n.stats.stale.Add(1); n&(n-1) == 0 {
		in.n.log.Warn("dropped a message of a process that was replaced", "from", name.String(), "as", van.NodeName(name.id), "dropped so far", n)
	}
}

// noticed takes a notice from c's peer. It reports false for what is none.
func (in *intake) noticed(c *conn, body []byte) bool {
	if bytes.Equal(body, noticeGo) {
		c.goOn()
		in.n.lent.rouse()
		return true
	}
	text, ok := bytes.CutPrefix(body, noticeHold)
	if !ok {
		return false
	}
	ms, err := strconv.ParseUint(string(text), 10, 32)
	if err != nil {
		return false
	}
	c.hold(clock.Now() + uint64(min(time.Duration(ms)*time.Millisecond, in.flow.holdFor)))
	in.n.lent.rouse()
	return true
}
