package links

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// Table holds the peers of a node, and its links to and from them.
type Table[D any, L Link, I In] struct {
	inbounds[D, L, I]
	cancel   context.CancelFunc
	drain    context.Context // its end stops the sending of messages of peers that have left
	endDrain context.CancelFunc
	used     bool                      // the first Send was made, with Together
	leaving  map[L]struct{}            // links of peers that have left the table, until they are closed
	draining map[Process]chan struct{} // closed when all messages sent before have left
}

// Open makes t ready.
func (t *Table[D, L, I]) Open(o Options[D, L, I]) {
	o.UnknownTime, o.HoldTime, o.DrainTime, o.Retry.Pause = UnknownTime, HoldTime, DrainTime, firstPause
	t.O, t.leaving, t.draining = o, map[L]struct{}{}, map[Process]chan struct{}{}
	t.Losses.Gone, t.Losses.Current = o.Gone, func(n *Peer) bool {
		t.Mu.Lock()
		defer t.Mu.Unlock()
		now := t.Of(n.ID())
		return !t.closed.Load() && now != nil && &now.Peer == n
	}
	t.Ctx, t.cancel = context.WithCancel(context.Background())
	t.drain, t.endDrain = context.WithCancel(context.Background())
	t.all.Store(&map[int]*Node[D, L]{})
	t.outs.Store(&[]L{})
	t.ins.Store(&[]I{})
}

// Links returns all links over which this node sends, including those of peers that have left the table.
func (t *Table[D, L, I]) Links() []L {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	l := t.Outs()
	for x := range t.leaving {
		l = append(l[:len(l):len(l)], x)
	}
	return l
}

// DrainTime is how long messages that were sent before Disconnect may take to leave.
const DrainTime = 500 * time.Millisecond

// Connect makes n the peer that has its id.
func (t *Table[D, L, I]) Connect(n *Node[D, L]) {
	id := n.ID()
	t.Mu.Lock()
	was, old := t.Of(id), Process{}
	known := was != nil
	if known {
		old = was.process
	}
	same := known && old == n.process
	n.Admitted = !known || same && was.Admitted
	former := t.retireLocked(was, func(all map[int]*Node[D, L]) { all[id] = n })
	if !same {
		t.fenceLocked(id, old, n.process)
	}
	t.admitLocked(id)
	if !n.Admitted {
		time.AfterFunc(t.O.HoldTime, func() { t.admit(n) })
	}
	if known {
		t.Losses.Replaced(&was.Peer, &n.Peer)
	}
	if t.used {
		t.beginLocked(n)
	}
	t.Mu.Unlock()
	t.end(former)
}

// retireLocked makes the change f to the map of peers, with which n leaves the table, and returns n's link. The caller passes it to end
// later: Links has it until then. n may be nil.
func (t *Table[D, L, I]) retireLocked(n *Node[D, L], f func(map[int]*Node[D, L])) (l L) {
	if n != nil {
		if l = n.Link(); l != *new(L) {
			t.leaving[l] = struct{}{}
		}
	}
	all := maps.Clone(t.All())
	f(all)
	t.all.Store(&all)
	t.listLocked()
	if n != nil && n.State() == Unused {
		t.setLocked(n, Unlinked, errLeft) // Sends that wait for n find the next peer of its id
	}
	return l
}

// end closes a link that retireLocked has returned.
func (t *Table[D, L, I]) end(l L) {
	if l == *new(L) {
		return
	}
	l.Close()
	t.Mu.Lock()
	defer t.Mu.Unlock()
	delete(t.leaving, l)
}

// Disconnect removes peer id, also from the van inside. Messages that were sent before leave in the background, for DrainTime at most.
func (t *Table[D, L, I]) Disconnect(id int) {
	t.drop(id)
	t.O.Inner.Disconnect(id)
	t.O.Gone(id)
}

func (t *Table[D, L, I]) drop(id int) {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	n := t.Of(id)
	if n == nil || t.closed.Load() {
		return
	}
	l := t.retireLocked(n, func(all map[int]*Node[D, L]) { delete(all, id) })
	for _, in := range t.Ins() {
		if in.Base().Held.Load() && t.IsOfLocked(in, n) {
			t.holdLocked(in, t.O.UnknownTime) // an earlier link is still read
		}
	}
	if l == *new(L) {
		return
	}
	process := n.process
	before, left := t.draining[process], make(chan struct{})
	t.draining[process] = left
	t.WG.Go(func() {
		ctx, cancel := context.WithTimeout(t.drain, t.O.DrainTime)
		defer cancel()
		l.Linger(ctx)
		t.end(l)
		if before != nil {
			<-before
		}
		close(left)
		t.Mu.Lock()
		defer t.Mu.Unlock()
		if t.draining[process] == left {
			delete(t.draining, process)
		}
	})
}

// Rename gives peer old the id id, also in the van inside.
func (t *Table[D, L, I]) Rename(old, id int) error {
	if err := t.O.Inner.Rename(old, id); err != nil || old == id {
		return err
	}
	t.Mu.Lock()
	n := t.Of(old)
	if n == nil {
		t.Mu.Unlock()
		return nil
	}
	n.id.Store(int32(id))
	former := t.retireLocked(t.Of(id), func(all map[int]*Node[D, L]) { delete(all, old); all[id] = n })
	t.admitLocked(id)
	t.Mu.Unlock()
	t.end(former)
	return nil
}

// BeginClose refuses new links. It returns false if it was called before.
func (t *Table[D, L, I]) BeginClose() bool {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	return !t.closed.Swap(true)
}

// StopTime is how long Close waits for the receiver after the end of its context. The receiver ends at once unless a handler is running.
const StopTime = 200 * time.Millisecond

// Close ends all attempts to make a link, and closes the links to all peers. Until ctx ends, messages that were sent before may leave first;
// f, the receiver of the links from peers, continues meanwhile, since the peers may also wait until their messages are received. Close
// then stops f and calls ended. When all goroutines of t have ended and nothing receives any more, Close calls free. own is this node's id.
func (t *Table[D, L, I]) Close(ctx context.Context, own int, f Feed, ended, free func()) error {
	t.closeLinks(ctx)
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), StopTime)
	defer cancel()
	if ctx.Err() == nil {
		stop = ctx
	}
	err := f.Stop(stop)
	ended()
	t.WG.Wait()
	if err != nil { // the receiver's memory is not freed
		return &van.Error{Op: "close", Node: van.NodeName(own), Detail: "a receiver still runs", Err: err}
	}
	if f.Free(stop, free) != nil {
		t.O.Log.Warn("a Poll still receives: its memory is kept")
	}
	return nil
}

func (t *Table[D, L, I]) closeLinks(ctx context.Context) {
	t.Mu.Lock()
	var all sync.WaitGroup
	for id, n := range t.All() {
		if l := n.Link(); l != *new(L) {
			all.Go(func() {
				l.Linger(ctx)
				if lost := l.Close(); lost > 0 {
					t.O.Log.Warn("closed with messages that the peer has not taken", "peer", van.NodeName(id), "messages", lost)
				}
			})
		}
	}
	var draining []chan struct{}
	for _, left := range t.draining {
		draining = append(draining, left)
	}
	t.Mu.Unlock()
	t.cancel()
	for _, left := range draining {
		select {
		case <-left:
		case <-ctx.Done():
		}
	}
	t.endDrain()
	all.Wait()
}
