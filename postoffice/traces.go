package postoffice

import (
	"fmt"
	"sync"

	"github.com/stepaf/stepaf-go/van"
)

// traceDepth is the number of most recent timestamps whose traces are kept.
const traceDepth = 4096

// Traces keeps the traces of a customer's recent requests. It is safe for
// concurrent use; the zero value is ready.
type Traces struct {
	entries [traceDepth]traceEntry
}

type traceEntry struct {
	mu       sync.Mutex
	ts       int32 // timestamp + 1; 0 when empty
	req, res van.Trace
}

// Put keeps the traces of an answer, in place of those 4096 timestamps older.
func (r *Traces) Put(msg *van.Message) {
	e := &r.entries[uint32(msg.Timestamp)%traceDepth]
	e.mu.Lock()
	e.ts, e.req, e.res = msg.Timestamp+1, msg.RequestTrace, msg.ResponseTrace
	e.mu.Unlock()
}

// Fetch returns the stamps of the request with timestamp ts of n's and of its
// last answer. The error wraps ErrUnknownHandler.
func (r *Traces) Fetch(n *Node, ts int32) (request, response van.Trace, err error) {
	e := &r.entries[uint32(ts)%traceDepth]
	e.mu.Lock()
	defer e.mu.Unlock()
	if ts < 0 || e.ts != ts+1 {
		return van.Trace{}, van.Trace{}, &van.Error{Op: "fetch_trace", Node: n.Name(), Detail: fmt.Sprintf("handler %d", ts),
			Err: ErrUnknownHandler, Hint: fmt.Sprintf("traces of the last %d answered handlers are kept", traceDepth)}
	}
	return e.req, e.res, nil
}
