package membership

// What all parts of a machine stand on, and how far the node is, from New to its end.

import "time"

type base struct {
	cfg   *Config
	life  *life
	table *table
	out   *sender
	alive *liveness
}

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
