package cluster

// What a node counts of the messages that it does not take, or not at once.

import (
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van"
)

// Stats are counters of a node since it was made: what the layers above its transports, which have van.Stats,
// drop, refuse and hold back. What is counted as dropped or refused is in one of them only. Bytes are those that count against
// budgets: of values and bodies, and 512 for each message.
type Stats struct {
	StrangerMessages, StrangerBytes uint64 // of processes that are not known, dropped: STEPAF_STRANGER_BUDGET, or no member after 10 s
	EarlyRequests, EarlyBytes       uint64 // for applications that are not made, dropped: STEPAF_RECV_BUDGET_PEER, STEPAF_RECV_BUDGET, STEPAF_STRANGER_BUDGET, STEPAF_START_TIMEOUT
	RefusedRequests                 uint64 // refused by their application with van.ErrQueueFull, as batches that do not end: STEPAF_RECV_BUDGET_PEER
	InvalidRequests                 uint64 // refused by their application with van.ErrInvalid, as batches that are too long: STEPAF_RECV_BUDGET
	PausedReads                     uint64 // times that a peer was not read until its application had taken some: STEPAF_RECV_BUDGET_PEER
	FencedMessages                  uint64 // dropped: of a process that was replaced, or for one
}

// Stats returns the node's counters, each as it is at that moment: others may count meanwhile.
func (n *Node) Stats() Stats {
	c := &n.counts
	return Stats{
		StrangerMessages: c.strangers.n.Load(), StrangerBytes: c.strangers.bytes.Load(),
		EarlyRequests: c.early.n.Load(), EarlyBytes: c.early.bytes.Load(),
		RefusedRequests: c.refused.Load(), InvalidRequests: c.invalid.Load(),
		PausedReads: c.paused.Load(), FencedMessages: n.processes.dropped.Count(),
	}
}

// counts is what Stats is made of.
type counts struct {
	strangers, early         tally
	refused, invalid, paused atomic.Uint64
}

// tally counts messages and their bytes.
type tally struct{ n, bytes atomic.Uint64 }

func (t *tally) add(m *van.Message) {
	t.n.Add(1)
	t.bytes.Add(uint64(weight(m)))
}
