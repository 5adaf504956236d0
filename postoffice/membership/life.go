package membership

// How far this node is, from New to its end. All parts look at it.

import "time"

type phase int

const (
	created phase = iota
	joining       // Start was called; nodes are missing
	ready
	failed
)

type life struct {
	phase   phase
	started time.Duration
	failure error // what ended the machine

	// leaving: the final barrier is over, or Leaving was called, so peers may leave.
	leaving   bool
	rejoining bool // the scheduler is a new process, which does not know the cluster yet
	recovered bool // on the scheduler: it has resumed an earlier one's cluster
}
