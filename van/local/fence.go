package local

import (
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// A node's messages are accepted only while it is the process that this node knows under its id. The name in its
// token, which its hello contains, identifies a process. When Connect names another process for the id,
// the links of the former process end. None of its data is handed up or written to a destination any
// more, and its later hellos are refused, for example if it was stopped and continues.

// holdTime is the longest time that messages of a peer wait until this node knows the peer. The
// scheduler informs both at the same time.
const holdTime = time.Second

// unknownTime is the longest time that a link waits for Connect to name its process as the replacement of the
// process that has the id. Then the link ends: its process is no node of this cluster.
const unknownTime = 10 * time.Second

// maxReplaced limits how many replaced processes are remembered.
const maxReplaced = 1024

// admitLate admits n if it is not admitted yet.
func (p *peers) admitLate(n *outPeer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if id := int(n.id.Load()); p.of(id) == n && !n.admitted {
		n.admitted = true
		p.admitLocked(id)
	}
}

// admit starts to accept messages from peer id.
func (p *peers) admit(id int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := p.of(id); n != nil {
		n.admitted = true
		p.admitLocked(id)
	}
}

// admitLocked starts to accept messages from peer id, if that is admitted. The caller holds p.mu.
func (p *peers) admitLocked(id int) {
	if !p.of(id).admitted {
		return
	}
	for _, l := range *p.ins.Load() {
		if l.from.id == id && p.isOf(l) && l.held.Swap(false) {
			p.bell.wakeAll()
		}
	}
}

// fenceLocked ends the links from the process that was peer id. The caller holds p.mu.
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

// fenceLinkLocked stops the use of l: none of its data is handed up or written any more. The caller holds p.mu.
func (p *peers) fenceLinkLocked(l *inLink) {
	l.placing.Lock() // waits for at most one copy
	l.fenced.Store(true)
	l.placing.Unlock()
	_ = l.conn.Close()
	p.bell.wakeAll()
}

// hold accepts no messages from l until it is admitted, or limit has passed. The caller holds p.mu.
func (p *peers) hold(l *inLink, limit time.Duration) {
	l.held.Store(true)
	time.AfterFunc(limit, func() { p.endHold(l) })
}

// endHold starts to accept messages from l. If this node knows another process under its id, endHold ends l.
func (p *peers) endHold(l *inLink) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !l.held.Load() || !p.bell.isOpen() {
		return
	}
	if p.of(l.from.id) != nil && !p.isOf(l) && !failpoint.On("fencing") {
		p.log.Info("a link through shared memory ends: its process is not the one that is known under its id", "peer", van.NodeName(l.from.id))
		p.fenceLinkLocked(l)
		return
	}
	l.held.Store(false)
	p.bell.wakeAll()
}
