package postoffice

// Which process has a node id, as far as this node knows, and which received messages
// are that process's.

import (
	"fmt"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/van"
)

// process is what a node knows of the process that has a node id. It is immutable; a
// change stores a new one.
type process struct {
	epoch       uint32 // counts the processes that have had the id, from 1
	incarnation uint32 // see van.Identity; 0: not known, or a C++ StepMesh node
	known       bool   // its record has come
	behind      bool   // messages that came before its record are not all delivered yet
	lost        error  // why it, or the one before it, is considered dead
	lostEpoch   uint32 // of the one that is
}

// unknownProcess is that of an id of which nothing is known.
var unknownProcess = process{epoch: 1}

// processes is the table of processes by node id. It is read without a lock, for every
// message; changes are under Node.lostMu.
type processes struct {
	at atomic.Pointer[[]atomic.Pointer[process]]
}

func (t *processes) of(id int) *process {
	if at := t.at.Load(); at != nil && id >= 0 && id < len(*at) {
		if p := (*at)[id].Load(); p != nil {
			return p
		}
	}
	return &unknownProcess
}

// change replaces the entry of id. Ids that no member can have are ignored.
func (t *processes) change(id int, f func(*process)) {
	if id < 0 || id >= van.Empty {
		return
	}
	p := *t.of(id)
	f(&p)
	old := t.at.Load()
	if old == nil || id >= len(*old) {
		grown := make([]atomic.Pointer[process], max(id+1, 64))
		if old != nil {
			grown = make([]atomic.Pointer[process], max(id+1, 2*len(*old)))
			for i := range *old {
				grown[i].Store((*old)[i].Load())
			}
		}
		old = &grown
		t.at.Store(old)
	}
	(*old)[id].Store(&p)
}

// noteProcesses updates the table before the outputs are carried out, so that no message
// of a replaced process counts as its successor's.
func (n *Node) noteProcesses(outs []membership.Output) {
	if who := n.machine.Incarnation(van.SchedulerID); who != 0 && n.role != van.Scheduler && who != n.processes.of(van.SchedulerID).incarnation {
		n.note(van.SchedulerID, who, false)
	}
	for _, o := range outs {
		if o, ok := o.(membership.PeerReplaced); ok {
			n.noteProcess(o.ID, &o.Node, true)
		}
	}
	for _, o := range outs {
		switch o := o.(type) {
		case membership.Connect:
			if o.ID > 0 {
				n.noteProcess(o.ID, &o.Node, false)
			} else {
				if n.unnamed == nil {
					n.unnamed = map[int]van.Node{}
				}
				n.unnamed[o.ID] = o.Node
			}
		case membership.Rename:
			if record, ok := n.unnamed[o.Old]; ok {
				n.noteProcess(o.New, &record, false)
			}
			delete(n.unnamed, o.Old)
		case membership.Disconnect:
			delete(n.unnamed, o.ID)
		}
	}
}

// noteProcess notes the record of id.
func (n *Node) noteProcess(id int, record *van.Node, replaced bool) {
	if id == van.SchedulerID {
		return // its record is made from the environment; noteProcesses asks the machine for its incarnation
	}
	who, _ := record.Identity()
	n.note(id, who.Incarnation, replaced)
}

// note records which process has id; incarnation 0 is a C++ StepMesh node.
func (n *Node) note(id int, incarnation uint32, replaced bool) {
	n.lostMu.Lock()
	defer n.lostMu.Unlock()
	n.strangers.mu.Lock()
	defer n.strangers.mu.Unlock()
	n.processes.change(id, func(p *process) {
		if p.known && p.incarnation != incarnation || replaced && incarnation == 0 {
			p.epoch++
		}
		p.known, p.incarnation = true, incarnation
		p.behind = n.strangers.waits(id, incarnation)
	})
	if n.processes.of(id).lost == nil { // otherwise admit does it, when answers can be sent
		n.catchUpLocked(id)
	}
}

// admit delivers the messages that were held until node id could be answered.
func (n *Node) admit(id int) {
	n.lostMu.Lock()
	defer n.lostMu.Unlock()
	n.strangers.mu.Lock()
	defer n.strangers.mu.Unlock()
	n.catchUpLocked(id)
}

// catchUpLocked starts catchUp if messages are held. lostMu and strangers.mu are held.
func (n *Node) catchUpLocked(id int) {
	v := n.strangers.held[id]
	if !n.processes.of(id).behind || v != nil && v.running {
		return
	}
	if v == nil {
		v = &heldQueue{}
		n.strangers.held[id] = v
	}
	v.running = true
	go n.catchUp(id)
}

// stamp marks a message with this process and p, which it is meant for. Messages to C++
// StepMesh nodes are not marked.
func (n *Node) stamp(m *van.Meta, p *process) {
	if p.incarnation != 0 && !failpoint.On("incarnation") {
		m.SetIncarnations(n.incarnation, p.incarnation)
	}
}

// verdict is what to do with a received message.
type verdict int

const (
	accept   verdict = iota
	discard          // it is of another process than the table's, or meant for another one
	holdBack         // it is of a process that the table may have soon
)

// judge compares a data message's marks with the table. Most messages need only the
// first comparison. The machine does this for control messages.
func (n *Node) judge(msg *van.Message, p *process) verdict {
	from, to := msg.Incarnations()
	switch {
	case from == p.incarnation && to == n.incarnation && from != 0 && !p.behind:
		return accept
	case failpoint.On("incarnation"), p.known && p.incarnation == 0, from == 0 && !p.known:
		return accept // of a C++ StepMesh node, or of one that does not know this node yet
	case from == 0 || to != n.incarnation:
		return discard
	default:
		return holdBack
	}
}

// dropStale counts a message of another process than the table's.
func (n *Node) dropStale(msg *van.Message, p *process) {
	if count, show := n.stale.Next(); show {
		from, to := msg.Incarnations()
		n.log.Warn("dropped a message of a process that was replaced, or for one", "from", n.PeerName(msg.Sender), "message", msg.Meta.String(),
			"its incarnation", fmt.Sprintf("%08x", from), "want", fmt.Sprintf("%08x", p.incarnation),
			"meant for", fmt.Sprintf("%08x", to), "this is", fmt.Sprintf("%08x", n.incarnation), "dropped so far", count)
	}
}

// answerTo returns errStale for an answer to a process that has been replaced.
func (n *Node) answerTo(msg *van.Message, p *process) error {
	if msg.Epoch == 0 || msg.Epoch == p.epoch || msg.Request || failpoint.On("incarnation") {
		return nil
	}
	return errStale
}

// errStale: the process that sent the request has been replaced.
var errStale = fmt.Errorf("%w: another process has taken the place of the one that asked", van.ErrPeerLost)
