package cluster

// The stamps of recently answered requests.

import (
	"sync"

	"github.com/stepaf/stepaf-go/van"
)

// Trace holds the stamps of a request and of its answer. A worker's are on this host's
// clock, a server's on the server's.
type Trace struct{ Request, Response van.Trace }

// traceDepth is the number of most recent timestamps whose traces are kept.
const traceDepth = 4096

// traces has the stamps of a customer's recent answers.
type traces struct {
	entries [traceDepth]traceEntry
}

type traceEntry struct {
	mu sync.Mutex
	ts int32 // timestamp + 1; 0 when empty
	Trace
}

// put stores the stamps of an answer to timestamp ts. They replace those of the timestamp 4096 before.
func (r *traces) put(ts int32, msg *van.Message) {
	e := &r.entries[uint32(ts)%traceDepth]
	e.mu.Lock()
	e.ts, e.Request, e.Response = ts+1, msg.RequestTrace, msg.ResponseTrace
	e.mu.Unlock()
}

// KeepTraces makes the customer keep the stamps of its requests and their answers. Call
// it before Open.
func (c *Customer) KeepTraces() { c.traces = &traces{} }

// Trace returns the stamps of timestamp ts and of its last answer. ok is false when there are none: no answer has
// arrived, or 4096 later timestamps have been answered.
func (c *Customer) Trace(ts int32) (t Trace, ok bool) {
	if ts < 0 || c.traces == nil {
		return Trace{}, false
	}
	e := &c.traces.entries[uint32(ts)%traceDepth]
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ts != ts+1 {
		return Trace{}, false
	}
	return e.Trace, true
}
