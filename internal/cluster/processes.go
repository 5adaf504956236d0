package cluster

// The process that has each node id, as far as this node knows, and the check whether a received message is from it.

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// process describes the process that has a node id. It is immutable; a change stores a new one.
type process struct {
	epoch       uint32 // counts the processes that have had the id, from 1
	incarnation uint32 // see van.NodeExtension; 0: not known, or a C++ StepMesh node
	known       bool   // its record has arrived
	dialed      bool   // this node has connected to it
	connected   bool   // likewise, and it is not lost, so it can be answered
	hasPending  bool   // its messages are queued: it is not connected, or earlier ones are not all delivered yet
	lost        error  // why it, or the one before it, is considered dead
	lostEpoch   uint32 // epoch of the one that is considered dead
	lostAt      uint64 // clock.Now when the last loss had been stored
}

// original reports whether the process is one of C++ StepMesh.
func (p *process) original() bool { return p.known && p.incarnation == 0 }

// unknownProcess stands for an id that this node knows nothing about.
var unknownProcess = process{epoch: 1}

// processes is the table of processes by node id. It is read without a lock, for every message.
type processes struct {
	self        *nodeInfo
	incarnation uint32     // of this process
	mu          sync.Mutex // guards changes; taken before pendingMessages.mu
	at          atomic.Pointer[[]atomic.Pointer[process]]
	dropped     logx.Sparse // messages from or for other processes
}

func (t *processes) of(id int) *process {
	if at := t.at.Load(); at != nil && id >= 0 && id < len(*at) {
		if p := (*at)[id].Load(); p != nil {
			return p
		}
	}
	return &unknownProcess
}

// change replaces the entry of id. Ids that no member can have are ignored. mu is held.
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

// has reports whether the process of record still has id. Another process may have replaced it since. C++ StepMesh
// processes cannot be told apart.
func (t *processes) has(id int, record *van.Node) bool {
	who, ok := record.Extension()
	return !ok || who.Incarnation == t.of(id).incarnation
}

// isMember reports whether the record of a process with node id has arrived. This node does not count.
func (t *processes) isMember(id int) bool { return t.of(id).known && id != t.self.ID() }

// waits reports whether the process that had node id at that epoch may wait for an answer: it is not lost, and has not been replaced.
// A node waits for its own answers.
func (t *processes) waits(id int, epoch uint32) bool {
	p := t.of(id)
	return id == t.self.ID() || p.epoch == epoch && (p.lost == nil || p.lostEpoch != epoch)
}

// maySendRest reports whether the process that had node id at that epoch may send the rest of a request: it has not been replaced, and
// is not lost. A C++ StepMesh process that is lost may only be paused: nothing but its messages tells that it lives.
func (t *processes) maySendRest(id int, epoch uint32) bool {
	p := t.of(id)
	return t.waits(id, epoch) || p.epoch == epoch && p.original()
}

// lost returns the reason why node id is considered dead, or nil.
func (t *processes) lost(id int) error { return t.of(id).lost }

func (t *processes) setLost(id int, cause error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.change(id, func(p *process) { p.lost, p.lostEpoch = cause, p.epoch })
	if cause != nil {
		t.change(id, func(p *process) { p.lostAt = clock.Now() }) // the second step: Open of a request that starts after lostAt has seen the loss
	}
}

// tag puts the incarnations of this process and of p, its receiver, into a message. Messages to C++ StepMesh nodes
// have none.
func (t *processes) tag(m *van.Meta, p *process) {
	if p.incarnation != 0 && !failpoint.On("incarnation") {
		m.SetIncarnations(t.incarnation, p.incarnation)
	}
}

// disposition is the handling of a received message.
type disposition int

const (
	deliver  disposition = iota
	drop                 // it is from another process than the table's, or for another one
	postpone             // it is from a process that the table may soon have
)

// check compares a data message's incarnations with the table. Most messages need only the first comparison. The
// machine checks control messages.
func (t *processes) check(msg *van.Message, p *process) disposition {
	from, to := msg.Incarnations()
	switch {
	case from == p.incarnation && to == t.incarnation && from != 0 && !p.hasPending:
		return deliver
	case failpoint.On("incarnation"), failpoint.On("stale-answer") && !msg.Request, p.known && p.incarnation == 0 && (from == 0 || to != t.incarnation), from == 0 && !p.known:
		return deliver // of a C++ StepMesh node, which may have other data in place of the incarnations, or of a process that does not know this node yet
	case from == 0 || to != t.incarnation:
		return drop
	default:
		return postpone
	}
}

// logDropped counts a message of another process than the table's.
func (t *processes) logDropped(msg *van.Message, p *process) {
	if count, show := t.dropped.Next(); show {
		from, to := msg.Incarnations()
		t.self.log.Warn("dropped a message from or for a process that was replaced", "from", t.self.peerName(msg.Sender), "message", msg.Meta.String(),
			"its incarnation", fmt.Sprintf("%08x", from), "want", fmt.Sprintf("%08x", p.incarnation),
			"meant for", fmt.Sprintf("%08x", to), "this is", fmt.Sprintf("%08x", t.incarnation), "dropped so far", count)
	}
}

// checkAnswer returns errStale for an answer to a process that has been replaced.
func (t *processes) checkAnswer(msg *van.Message, p *process) error {
	if msg.ProcessEpoch == 0 || msg.ProcessEpoch == p.epoch || msg.Request || failpoint.On("incarnation") || failpoint.On("stale-answer") {
		return nil
	}
	return errStale
}

// errStale: the process that sent the request has been replaced.
var errStale = fmt.Errorf("%w: the process that sent the request has been replaced", van.ErrPeerLost)
