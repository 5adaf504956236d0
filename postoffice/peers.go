package postoffice

import (
	"fmt"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/van"
)

// process is what a node knows of the process behind a node id. It is never changed: a
// new one takes its place.
type process struct {
	epoch       uint32 // counts the processes that have had the id, from 1
	incarnation uint32 // see van.Identity; 0: not known, or one of the original
	known       bool   // its record has come
	behind      bool   // messages that came before its record are being delivered
	lost        error  // why it is considered dead
}

// nobody stands for an id of which nothing is known.
var nobody = process{epoch: 1}

// processes is the table of processes by node id. Looking costs no lock, so that every
// message can be checked against it; changes are under Node.lostMu.
type processes struct {
	at atomic.Pointer[[]atomic.Pointer[process]]
}

func (t *processes) of(id int) *process {
	if at := t.at.Load(); at != nil && id >= 0 && id < len(*at) {
		if p := (*at)[id].Load(); p != nil {
			return p
		}
	}
	return &nobody
}

// change replaces what is known of id. Ids that no member can have are not remembered.
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

// noteProcesses brings the table up to date with what the machine says, at once, so that
// nothing of a process that was replaced is taken for its successor's.
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
				if n.nameless == nil {
					n.nameless = map[int]van.Node{}
				}
				n.nameless[o.ID] = o.Node
			}
		case membership.Rename:
			if record, ok := n.nameless[o.Old]; ok {
				n.noteProcess(o.New, &record, false)
			}
			delete(n.nameless, o.Old)
		case membership.Disconnect:
			delete(n.nameless, o.ID)
		}
	}
}

// noteProcess notes the record of id.
func (n *Node) noteProcess(id int, record *van.Node, replaced bool) {
	if id == van.SchedulerID {
		return // where it is comes from the environment; the machine learns which process it is
	}
	who, _ := record.Identity()
	n.note(id, who.Incarnation, replaced)
}

// note notes which process has id; 0 is one of the original.
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
	if n.processes.of(id).lost == nil { // else nothing can be answered before it is connected
		n.catchUpLocked(id)
	}
}

// admit delivers what has waited until node id could be answered.
func (n *Node) admit(id int) {
	n.lostMu.Lock()
	defer n.lostMu.Unlock()
	n.strangers.mu.Lock()
	defer n.strangers.mu.Unlock()
	n.catchUpLocked(id)
}

// catchUpLocked starts catchUp if there is something to do. lostMu and strangers.mu are held.
func (n *Node) catchUpLocked(id int) {
	v := n.strangers.held[id]
	if !n.processes.of(id).behind || v != nil && v.running {
		return
	}
	if v != nil {
		v.running = true
	}
	go n.catchUp(id)
}

// stamp marks a message to node id with this process and the one that it is meant for.
// Nodes of the original get none: their messages stay as they are.
func (n *Node) stamp(m *van.Meta, p *process) {
	if p.incarnation != 0 && !failpoint.On("incarnation") {
		m.SetIncarnations(n.incarnation, p.incarnation)
	}
}

// verdict is what becomes of a received message.
type verdict int

const (
	accept  verdict = iota
	discard         // of another process than the table's, or meant for another one
	detain          // of a process that the table may have soon
)

// judge compares a data message's marks with the table. Most messages need only the
// first comparison. The machine judges control messages.
func (n *Node) judge(msg *van.Message, p *process) verdict {
	from, to := msg.Incarnations()
	switch {
	case from == p.incarnation && to == n.incarnation && from != 0 && !p.behind:
		return accept
	case failpoint.On("incarnation"), p.known && p.incarnation == 0, from == 0 && !p.known:
		return accept // of a node of the original, or of one that cannot know this node yet
	case from == 0 || to != n.incarnation:
		return discard
	default:
		return detain
	}
}

// dropStale counts a message of another process than the table's.
func (n *Node) dropStale(msg *van.Message, p *process) {
	if count, speak := n.stale.Next(); speak {
		from, to := msg.Incarnations()
		n.log.Warn("dropped a message of a process that was replaced, or for one", "from", n.PeerName(msg.Sender), "message", msg.Meta.String(),
			"its incarnation", fmt.Sprintf("%08x", from), "want", fmt.Sprintf("%08x", p.incarnation),
			"meant for", fmt.Sprintf("%08x", to), "this is", fmt.Sprintf("%08x", n.incarnation), "dropped so far", count)
	}
}

// Epoch counts the processes that have had node id, as far as this node knows. An answer
// to a request of an earlier one is refused.
func (n *Node) Epoch(id int) uint32 { return n.processes.of(id).epoch }

// answerTo is the error of an answer to a process that is not there any more.
func (n *Node) answerTo(msg *van.Message, p *process) error {
	if msg.Epoch == 0 || msg.Epoch == p.epoch || msg.Request || failpoint.On("incarnation") {
		return nil
	}
	return errStale
}

// errStale: the process that asked was replaced by another.
var errStale = fmt.Errorf("%w: another process has taken the place of the one that asked", van.ErrPeerLost)
