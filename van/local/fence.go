package local

import (
	"errors"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/van"
)

// A node is heard only as long as it is the one that this node knows under its id. Its
// process is known by the name in its token, which its hello carries. When Connect names
// another process for the id, the links of the one before end, nothing more of them is
// handed up or put to its place, and none of its later hellos is accepted, should it have
// been stopped, say, and wake up.

// holdTime is the longest that messages of a peer wait until this node knows it: the
// scheduler tells both at the same time.
const holdTime = time.Second

// admitLate admits n if nobody has until now.
func (v *Van) admitLate(n *neighbour) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.nodes[n.id] == n && !n.admitted {
		n.admitted = true
		v.admitLocked(n.id)
	}
}

// unknownTime is the longest that a link of a process waits for Connect to name it in
// place of the one that has its id. Then it ends: it is of no node of this cluster.
const unknownTime = 10 * time.Second

var errReplaced = errors.New("another process has taken the place of this one")

// maxReplaced bounds how many replaced processes are remembered.
const maxReplaced = 1024

// fenceLocked ends what comes from the process that was peer id. v.mu is held.
func (v *Van) fenceLocked(id int, was *neighbour) {
	if failpoint.On("fencing") || was.token.name == [16]byte{} {
		return
	}
	if len(v.replaced) == maxReplaced {
		v.replaced = v.replaced[:copy(v.replaced, v.replaced[1:])]
	}
	v.replaced = append(v.replaced, was.token.name)
	for _, l := range *v.ins.Load() {
		if l.from.id == id && l.name == was.token.name {
			v.fenceLinkLocked(l)
		}
	}
}

// fenceLinkLocked makes nothing of l be handed up or written any more. v.mu is held.
func (v *Van) fenceLinkLocked(l *inLink) {
	l.placing.Lock() // a copy at most is under way
	l.fenced.Store(true)
	l.placing.Unlock()
	_ = l.conn.Close()
	if v.bell != nil {
		v.bell.wakeAll()
	}
}

// wasReplacedLocked tells whether the process with that name was replaced. v.mu is held.
func (v *Van) wasReplacedLocked(name [16]byte) bool {
	for _, r := range v.replaced {
		if r == name {
			return true
		}
	}
	return false
}

// unhold begins to take messages from l, or ends it if this node knows another process
// under its id.
func (v *Van) unhold(l *inLink) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !l.held.Load() || v.bell == nil {
		return
	}
	if v.nodes[l.from.id] != nil && !v.isOf(l) && !failpoint.On("fencing") {
		v.log.Info("a link through shared memory ends: its process is not the one that is known under its id", "peer", van.NodeName(l.from.id))
		v.fenceLinkLocked(l)
		return
	}
	l.held.Store(false)
	v.bell.wakeAll()
}
