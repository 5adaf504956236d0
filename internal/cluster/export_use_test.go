package cluster

import (
	"time"

	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/van"
)

// CarryOut performs an output of the machine.
func (n *Node) CarryOut(o membership.Output) { n.perform(o) }

// Completed is called after the end of a request, by the goroutine that has ended it.
func (c *Customer) Completed(r *Request, use uint64) { c.addFinished(r, use) }

// Use counts the uses of r.
func (r *Request) Use() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.gen
}

// Waiting reports whether a Wait waits for r.
func (r *Request) Waiting() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.waiting
}

// Kept reports whether r is among the finished requests that were not waited for.
func (r *Request) Kept() bool {
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	return r.ringIndex >= 0
}

// DuringWait makes a Wait for r call f while it checks whether r is finished.
func (r *Request) DuringWait(f func()) {
	r.isDone = func() bool { f(); return len(r.done) > 0 }
}

// NoteProcesses updates the table before the outputs of the machine are performed.
func (n *Node) NoteProcesses(outs ...membership.Output) {
	n.control.mu.Lock()
	defer n.control.mu.Unlock()
	n.control.members.updateProcesses(outs, n.control.machine.Incarnation(van.SchedulerID))
}

// MayJoin reports whether the cluster has a node with that id.
func (n *Node) MayJoin(id int) bool { return n.mayJoin(id) }

// Age moves the start of r back by d.
func (r *Request) Age(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.start -= uint64(d)
}

// Busy counts the calls that keep r from finishing.
func (r *Request) Busy() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.busy
}

// Process is the incarnation of node id that n has recorded.
func (n *Node) Process(id int) uint32 { return n.processes.of(id).incarnation }

// Notify calls the functions of OnPeer.
func (n *Node) Notify(id int, up bool, cause error) { n.watchers.notify(id, up, cause) }

// NoticesFor counts the notices that n may have to repeat to node id.
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
