package cluster

import (
	"time"

	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/van"
)

// CarryOut does what the machine says.
func (n *Node) CarryOut(o membership.Output) { n.perform(o) }

// Completed is called, by whoever ends a request, after it has let go of it.
func (c *Customer) Completed(r *Request, use uint64) { c.addFinished(r, use) }

// Use counts the uses of r.
func (r *Request) Use() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.gen
}

// Kept tells whether r is among the finished ones that nobody has waited for.
func (r *Request) Kept() bool {
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	return r.ringIndex >= 0
}

// NoteProcesses is what happens first with what the machine says.
func (n *Node) NoteProcesses(outs ...membership.Output) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.members.updateProcesses(outs, n.machine.Incarnation(van.SchedulerID))
}

// MayJoin tells whether the cluster has a place for id.
func (n *Node) MayJoin(id int) bool { return n.mayJoin(id) }

// Age makes r have begun earlier by d.
func (r *Request) Age(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.start -= uint64(d)
}

// Busy counts who keeps r from finishing.
func (r *Request) Busy() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.busy
}

// Process is the incarnation of node id that n has noted.
func (n *Node) Process(id int) uint32 { return n.processes.of(id).incarnation }

// Notify tells those who watch peers.
func (n *Node) Notify(id int, up bool, cause error) { n.notify(id, up, cause) }

// NoticesFor counts what n may have to say again to node id.
func (n *Node) NoticesFor(id int) (firsts []int32) {
	n.notices.mu.Lock()
	defer n.notices.mu.Unlock()
	for _, x := range n.notices.by[id] {
		firsts = append(firsts, x.canceled.First)
	}
	return firsts
}

// BeginAt makes ts the first timestamp of c.
func (c *Customer) BeginAt(ts int32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.base, c.next, c.wrapped = ts, ts, false
}
