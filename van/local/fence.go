package local

import (
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// A node's messages are taken only as long as it is the one that this node knows under its id. Its
// process is known by the name in its token, which its hello carries. When Connect names
// another process for the id, the links of the one before end, nothing more of them is
// handed up or written to its destination, and none of its later hellos is accepted, should it have
// been stopped, say, and wake up.

// holdTime is the longest that messages of a peer wait until this node knows it: the
// scheduler tells both at the same time.
const holdTime = time.Second

// unknownTime is the longest that a link of a process waits for Connect to name it in
// place of the one that has its id. Then it ends: it is of no node of this cluster.
const unknownTime = 10 * time.Second

// maxReplaced bounds how many replaced processes are remembered.
const maxReplaced = 1024

// admitLate admits n if nobody has until now.
func (p *peers) admitLate(n *outPeer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.nodes[n.id] == n && !n.admitted {
		n.admitted = true
		p.admitLocked(n.id)
	}
}

// admit begins to take messages from peer id.
func (p *peers) admit(id int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := p.nodes[id]; n != nil {
		n.admitted = true
		p.admitLocked(id)
	}
}

// admitLocked begins to take messages from peer id, if it may. p.mu is held.
func (p *peers) admitLocked(id int) {
	if !p.nodes[id].admitted {
		return
	}
	for _, l := range *p.ins.Load() {
		if l.from.id == id && p.isOf(l) && l.held.Swap(false) {
			p.bell.wakeAll()
		}
	}
}

// isOf tells whether l comes from the node that Connect has named, and not from one
// that has had, or will have, its id. p.mu is held.
func (p *peers) isOf(l *inLink) bool {
	n := p.nodes[l.from.id]
	return n != nil && n.token.name == l.name
}

// fenceLocked ends what comes from the process that was peer id. p.mu is held.
func (p *peers) fenceLocked(id int, was *outPeer) {
	if failpoint.On("fencing") || was.token.name == [16]byte{} {
		return
	}
	if len(p.replaced) == maxReplaced {
		p.replaced = slices.Delete(p.replaced, 0, 1)
	}
	p.replaced = append(p.replaced, was.token.name)
	for _, l := range *p.ins.Load() {
		if l.from.id == id && l.name == was.token.name {
			p.fenceLinkLocked(l)
		}
	}
}

// fenceLinkLocked makes nothing of l be handed up or written any more. p.mu is held.
func (p *peers) fenceLinkLocked(l *inLink) {
	l.placing.Lock() // a copy at most is under way
	l.fenced.Store(true)
	l.placing.Unlock()
	_ = l.conn.Close()
	p.bell.wakeAll()
}

// hold takes nothing from l until it is admitted, for limit at most. p.mu is held.
func (p *peers) hold(l *inLink, limit time.Duration) {
	l.held.Store(true)
	time.AfterFunc(limit, func() { p.endHold(l) })
}

// endHold begins to take messages from l, or ends it if this node knows another process
// under its id.
func (p *peers) endHold(l *inLink) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !l.held.Load() || !p.bell.isOpen() {
		return
	}
	if p.nodes[l.from.id] != nil && !p.isOf(l) && !failpoint.On("fencing") {
		p.log.Info("a link through shared memory ends: its process is not the one that is known under its id", "peer", van.NodeName(l.from.id))
		p.fenceLinkLocked(l)
		return
	}
	l.held.Store(false)
	p.bell.wakeAll()
}
