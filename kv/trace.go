package kv

import (
	"sync"

	"github.com/stepaf/stepaf-go/van"
)

// traceDepth is the number of most recent timestamps whose traces are kept.
const traceDepth = 1024

// traceRing keeps the traces of recent timestamps.
type traceRing struct {
	entries [traceDepth]traceEntry
}

type traceEntry struct {
	mu       sync.Mutex
	ts       int32 // timestamp + 1; 0 when empty
	req, res van.Trace
}

func (r *traceRing) put(msg *van.Message) {
	e := &r.entries[uint32(msg.Timestamp)%traceDepth]
	e.mu.Lock()
	e.ts, e.req, e.res = msg.Timestamp+1, msg.RequestTrace, msg.ResponseTrace
	e.mu.Unlock()
}

func (r *traceRing) get(ts int32) (req, res van.Trace, ok bool) {
	e := &r.entries[uint32(ts)%traceDepth]
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.req, e.res, ts >= 0 && e.ts == ts+1
}
