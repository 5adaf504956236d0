package postoffice

// The counters of a node.

// Stats are counters of a node since it was made: the messages that it drops, refuses and holds back. A message that is
// counted as dropped or refused is in one of them only. Bytes are those that count against budgets: of values and bodies,
// and 512 for each message.
type Stats struct {
	StrangerMessages, StrangerBytes uint64 // of processes that are not known, dropped: STEPAF_STRANGER_BUDGET, or no member after 10 s
	EarlyRequests, EarlyBytes       uint64 // for applications that are not made, dropped: STEPAF_RECV_BUDGET_PEER, STEPAF_RECV_BUDGET, STEPAF_STRANGER_BUDGET, STEPAF_START_TIMEOUT
	RefusedRequests                 uint64 // refused by their application with ErrQueueFull, as batches that do not end: STEPAF_RECV_BUDGET_PEER
	InvalidRequests                 uint64 // refused by their application with ErrInvalid, as batches that are too long: STEPAF_RECV_BUDGET
	PausedReads                     uint64 // times that a peer was not read until its application had taken some: STEPAF_RECV_BUDGET_PEER
	FencedMessages                  uint64 // dropped: from or for a process that was replaced
}

// Stats returns the node's counters. Each is read by itself: other goroutines may count meanwhile.
func (n *Node) Stats() Stats { return Stats(n.core().Stats()) }
