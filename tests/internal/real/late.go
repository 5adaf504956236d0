package real

import (
	"context"
	"time"
)

// watchMachine notes how much later than asked for this process wakes up. On a machine with
// more to do than it can the nodes are late as well.
func (r *planRun) watchMachine(ctx context.Context) {
	const nap = 5 * time.Millisecond
	for begun := time.Now(); ctx.Err() == nil; begun = time.Now() {
		time.Sleep(nap)
		r.longest.Store(max(r.longest.Load(), int64(time.Since(begun)-nap)))
	}
}

// late is how much later than the plan says something may be: a heartbeat that is missed, the
// notice of it, and the call that ends with it pass through this many processes.
func (r *planRun) late() time.Duration {
	const hops = 4
	return r.margin + hops*time.Duration(r.longest.Load())
}
