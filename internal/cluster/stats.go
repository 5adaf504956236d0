package cluster

// Counters of the messages that a node drops, refuses or queues.

import (
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van"
)

// Counters count messages since the node was made. A dropped or refused message is counted once. Bytes are those that count
// against budgets: of values and bodies, and 512 for each message.
type Counters struct {
	StrangerMessages, StrangerBytes uint64 // of unknown processes, dropped: STEPAF_STRANGER_BUDGET, or not a member after 10 s
	EarlyRequests, EarlyBytes       uint64 // for applications that do not exist yet, dropped: STEPAF_RECV_BUDGET, STEPAF_STRANGER_BUDGET, STEPAF_START_TIMEOUT
	RefusedRequests                 uint64 // refused by their application with van.ErrQueueFull, such as incomplete batches: STEPAF_RECV_BUDGET_PEER
	InvalidRequests                 uint64 // refused by their application with van.ErrInvalid, such as batches that are too long: STEPAF_RECV_BUDGET
	PausedReads                     uint64 // times that a peer was not read until its application had taken some messages: STEPAF_RECV_BUDGET_PEER
	FencedMessages                  uint64 // dropped: from or for a process that was replaced
	LateAnswers                     uint64 // dropped: to requests that had ended, second ones, or malformed ones
}

// countersOf returns the counters of the node.
func countersOf(n *Node) Counters {
	c := &n.counts
	return Counters{
		StrangerMessages: c.strangers.n.Load(), StrangerBytes: c.strangers.bytes.Load(),
		EarlyRequests: c.early.n.Load(), EarlyBytes: c.early.bytes.Load(),
		RefusedRequests: c.refused.Load(), InvalidRequests: c.invalid.Load(),
		PausedReads: c.paused.Load(), FencedMessages: n.processes.dropped.Count(), LateAnswers: c.late.Load(),
	}
}

// counts has the counters of Stats.
type counts struct {
	strangers, early               tally
	refused, invalid, paused, late atomic.Uint64
}

// tally counts messages and their bytes.
type tally struct{ n, bytes atomic.Uint64 }

func (t *tally) add(m *van.Message) {
	t.n.Add(1)
	t.bytes.Add(uint64(weight(m)))
}
