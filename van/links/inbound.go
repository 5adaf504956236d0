package links

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// Times and bounds of the links from peers.
const (
	// UnknownTime is how long a link of a process that this node does not know waits unread: the scheduler tells both ends of each
	// other, one before the other.
	UnknownTime = 10 * time.Second
	// HoldTime is how long the link of a replacement process then waits for Admit.
	HoldTime = time.Second
	// MaxHeld limits the links that are not read yet: those of one known process when another link of it arrives, and those of all
	// processes when a link of an unknown or replacement process arrives. If there are more, the oldest of them ends. Any process that
	// may connect can open one, unless the cluster has a secret.
	MaxHeld = 1024
	// MaxReplaced bounds the replaced processes that are remembered.
	MaxReplaced = 1024
)

// Inbound is the receiver's end of a link. A transport embeds it.
type Inbound struct {
	From    int // the node id in its hello
	Process Process
	Held    atomic.Bool // not read yet
	Marks   Marks       // not read before these have arrived
}

// Base returns the part of a transport's link that this package knows.
func (x *Inbound) Base() *Inbound { return x }

// inbounds are the links from peers.
type inbounds[D any, L Link, I In] struct {
	peers[D, L, I]
	ins      atomic.Pointer[[]I]
	crowded  logx.Sparse
	replaced []Process // whose place others have taken
}

// Ins returns the links from peers, in the order of their arrival.
func (t *inbounds[D, L, I]) Ins() []I { return *t.ins.Load() }

// IsOfLocked reports whether in comes from n's process.
func (t *inbounds[D, L, I]) IsOfLocked(in I, n *Node[D, L]) bool {
	return n != nil && n.process == in.Base().Process
}

// EnterLocked adds in. Reading begins at once, or when this node has admitted its process.
func (t *inbounds[D, L, I]) EnterLocked(in I) error {
	x := in.Base()
	switch {
	case t.closed.Load():
		x.Marks.end()
		return van.ErrClosed
	case slices.Contains(t.replaced, x.Process):
		x.Marks.end()
		return fmt.Errorf("%s: %w", van.NodeName(x.From), van.ErrReplaced)
	}
	x.Held.Store(true)
	ins := append(slices.Clone(t.Ins()), in)
	t.ins.Store(&ins)
	switch n := t.Of(x.From); {
	case n == nil && t.O.TakesUnknown:
		t.holdLocked(in, t.O.HoldTime)
	case !t.IsOfLocked(in, n):
		t.holdLocked(in, t.O.UnknownTime)
	case !n.Admitted:
		t.holdLocked(in, t.O.HoldTime)
	default:
		t.O.StartLocked(in)
		t.boundLocked(func(y *Inbound) bool { return y.Process == x.Process }) // its links may wait for marks, or for an earlier link
	}
	return nil
}

// RemoveLocked removes in, which is not read any more.
func (t *inbounds[D, L, I]) RemoveLocked(in I) {
	ins := slices.DeleteFunc(slices.Clone(t.Ins()), func(x I) bool { return x == in })
	t.ins.Store(&ins)
	in.Base().Marks.end()
}

// TakeIns removes all links from peers, and returns them: nothing reads or ends them any more.
func (t *inbounds[D, L, I]) TakeIns() []I {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	ins := t.Ins()
	t.ins.Store(&[]I{})
	for _, in := range ins {
		in.Base().Marks.end()
	}
	return ins
}

// EndLocked ends in. If fence is set, no message that has arrived over in is delivered any more.
func (t *inbounds[D, L, I]) EndLocked(in I, fence bool) {
	if t.O.EndLocked(in, fence) {
		t.RemoveLocked(in)
	}
}

// holdLocked reads nothing from in until its process is admitted, for limit at most.
func (t *inbounds[D, L, I]) holdLocked(in I, limit time.Duration) {
	t.boundLocked(func(*Inbound) bool { return true })
	time.AfterFunc(limit, func() { t.EndHold(in) })
}

// boundLocked ends the oldest waiting link that selects accepts, if more than MaxHeld such links wait.
func (t *inbounds[D, L, I]) boundLocked(selects func(*Inbound) bool) {
	held := slices.DeleteFunc(slices.Clone(t.Ins()), func(x I) bool { return !x.Base().Held.Load() || !selects(x.Base()) })
	if len(held) > MaxHeld {
		if n, show := t.crowded.Next(); show {
			t.O.Log.Warn(t.O.Link+" ends: too many wait", "peer", van.NodeName(held[0].Base().From), "at most", MaxHeld, "so far", n)
		}
		t.EndLocked(held[0], false)
	}
}

// EndHold ends the wait of in. If this node knows its process, admitted or not, reading begins; otherwise in ends.
func (t *inbounds[D, L, I]) EndHold(in I) {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	x := in.Base()
	if !x.Held.Load() || t.closed.Load() {
		return
	}
	n := t.Of(x.From)
	if t.IsOfLocked(in, n) || n == nil && t.O.TakesUnknown || failpoint.On("fencing") {
		t.O.StartLocked(in)
		return
	}
	t.O.Log.Info(t.O.Link+" ends: its process is not the one that is known under its id", "peer", van.NodeName(x.From))
	t.EndLocked(in, false)
}

// Admit begins to read the links of peer id.
func (t *inbounds[D, L, I]) Admit(id int) {
	if a, ok := van.As[van.Admitter](t.O.Inner); ok {
		a.Admit(id)
	}
	if n := t.Of(id); n != nil {
		t.admit(n)
	}
}

func (t *inbounds[D, L, I]) admit(n *Node[D, L]) {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	if id := n.ID(); t.Of(id) == n {
		n.Admitted = true
		t.admitLocked(id)
	}
}

// admitLocked begins to read the links of peer id, if it is admitted.
func (t *inbounds[D, L, I]) admitLocked(id int) {
	n := t.Of(id)
	if n == nil || !n.Admitted {
		return
	}
	for _, in := range slices.Backward(t.Ins()) { // StartLocked may end earlier ones, which then must not be read
		if in.Base().From == id && t.IsOfLocked(in, n) && in.Base().Held.Load() {
			t.O.StartLocked(in)
		}
	}
}

// AdmitNextLocked begins to read the links of in's process, if it is admitted.
func (t *inbounds[D, L, I]) AdmitNextLocked(in I) {
	if id := in.Base().From; t.IsOfLocked(in, t.Of(id)) {
		t.admitLocked(id)
	}
}

// fenceLocked ends the links of was, the process that another one has replaced as peer id, and those of earlier processes that are
// still read. was may be zero.
func (t *inbounds[D, L, I]) fenceLocked(id int, was, now Process) {
	if failpoint.On("fencing") {
		return
	}
	known := was != Process{}
	if known {
		if len(t.replaced) == MaxReplaced {
			t.replaced = slices.Delete(t.replaced, 0, 1)
		}
		t.replaced = append(t.replaced, was)
	}
	for _, in := range t.Ins() {
		if x := in.Base(); x.From == id && x.Process != now && (!x.Held.Load() || known && x.Process == was) {
			t.EndLocked(in, true)
		}
	}
}

// Marked consumes m, a message of the van inside, if it is a mark, and reports whether it is one.
func (t *inbounds[D, L, I]) Marked(m *van.Message) bool {
	mark, ok := ReadMark(t.O.Kind, m)
	if !ok {
		return false
	}
	t.Mu.Lock()
	defer t.Mu.Unlock()
	for _, in := range t.Ins() {
		if in.Base().From == m.Sender && in.Base().Marks.Arrived(mark, m) {
			if t.O.ArrivedLocked != nil {
				t.O.ArrivedLocked(in)
			}
			t.AdmitNextLocked(in)
			break
		}
	}
	return true
}

// AwaitLonger restarts the limit of a link that still waits for its marks.
func (t *inbounds[D, L, I]) AwaitLonger(in I) {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	if x := in.Base(); x.Marks.Missing() && slices.Contains(t.Ins(), in) {
		x.Marks.limit.Reset(MarkTime)
	}
}

// EndMarks ends in if it waits for marks: they are lost.
func (t *inbounds[D, L, I]) EndMarks(in I, level slog.Level) {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	if t.closed.Load() || !in.Base().Marks.Missing() || !slices.Contains(t.Ins(), in) {
		return
	}
	t.O.Log.Log(t.Ctx, level, t.O.Link+" ends: data that was sent before it has not arrived", "peer", van.NodeName(in.Base().From))
	t.EndLocked(in, false)
	t.AdmitNextLocked(in)
}

// Watch sets the node's watcher. It is also called for events of the van inside.
func (t *inbounds[D, L, I]) Watch(f func(id int, up bool, cause error)) {
	t.Losses.Watch(f)
	if w, ok := van.As[van.PeerWatcher](t.O.Inner); ok {
		w.WatchPeers(func(id int, up bool, cause error) { t.Inside(f, id, up, cause) })
	}
}

// Inside passes an event of the van inside to f. If KeepsLoss is set, it drops a return while the peer's link is broken, since a message
// would fail then.
func (t *inbounds[D, L, I]) Inside(f func(id int, up bool, cause error), id int, up bool, cause error) {
	if !up {
		t.lostInside(id, cause)
	}
	if n := t.Of(id); up && t.O.KeepsLoss && n != nil && t.Losses.Down(&n.Peer) {
		return
	}
	f(id, up, cause)
}

// lostInside ends the links to and from peer id that may wait for marks: the van inside has lost the peer, and perhaps the marks.
func (t *inbounds[D, L, I]) lostInside(id int, cause error) {
	if errors.Is(cause, syscall.ECONNREFUSED) {
		return // an attempt to connect failed: messages that wait for the connection are not lost
	}
	n := t.Of(id)
	if n != nil {
		t.Mu.Lock()
		n.insideLosses++
		t.Mu.Unlock()
	}
	for _, in := range t.Ins() {
		if in.Base().From == id {
			t.EndMarks(in, slog.LevelInfo)
		}
	}
	if n == nil {
		return
	}
	if l := n.Link(); l != *new(L) { // read once: it may become nil while the peer ends
		t.O.InsideLost(l, cause)
	}
}
