package links

import (
	"errors"
	"log/slog"
	"time"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

// Pauses before a link is tried again. They double.
const (
	firstPause = time.Second
	lastPause  = time.Minute
)

// Retry is what later tries log, and when they end.
type Retry struct {
	Path     string        // where the data goes with a link: "through shared memory"
	Inside   func() string // the usual path of the van inside
	Pause    time.Duration // firstPause, except in tests
	Hopeless func(error) bool
}

// First logs that the first attempt to make the link to peer id has failed with err. It returns the peer's next state.
func (r *Retry) First(log *slog.Logger, id int, err error, args ...any) State {
	args = append([]any{"peer", van.NodeName(id), "err", err}, args...)
	if r.Hopeless(err) {
		log.Warn("data goes over "+r.Inside()+", not "+r.Path+", for as long as both processes run", args...)
		return Unlinked
	}
	log.Warn("data goes over "+r.Inside()+", not "+r.Path, append(args, "next try in", r.Pause)...)
	return Fallback
}

// ErrMarksLost: marks of a link that was not installed yet may be lost.
var ErrMarksLost = errors.New("the connection that carried the data before has broken while the data was moved")

// Await returns peer id, zero if this node does not know it, after it is settled whether there is a link. It starts to make the link.
// When the table closes, Await returns a peer in the state Connecting.
func (t *Table[D, L, I]) Await(id int) *Node[D, L] {
	for {
		n := t.Of(id)
		if n == nil || n.Link() != *new(L) || n.State() > Connecting && t.Of(id) == n { // the map changes before the state of a peer that leaves it
			return n
		}
		t.begin(n)
		select {
		case <-n.settled:
		case <-t.Ctx.Done():
			return n
		}
	}
}

// begin starts to make the link to n, or to all peers.
func (t *Table[D, L, I]) begin(n *Node[D, L]) {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	if !t.O.Together {
		t.beginLocked(n)
		return
	}
	t.used = true
	for _, n := range t.All() {
		t.beginLocked(n)
	}
}

func (t *Table[D, L, I]) beginLocked(n *Node[D, L]) {
	if n.State() == Unused && t.currentLocked(n) {
		n.state.Store(int32(Connecting))
		t.WG.Go(func() { t.run(n) })
	}
}

// run makes the link to n, and goes from state to state until none follows, or n has left the table.
func (t *Table[D, L, I]) run(n *Node[D, L]) {
	defer func() {
		t.Mu.Lock()
		defer t.Mu.Unlock()
		if n.State() == Connecting && !t.closed.Load() {
			t.setLocked(n, Unlinked, errLeft)
		}
	}()
	t.Mu.Lock()
	before := t.draining[n.process]
	t.Mu.Unlock()
	if before != nil {
		<-before // messages sent before must arrive first
	}
	if err := t.Make(n, false, false); err != nil && t.Current(n) {
		t.Set(n, t.O.Failed(n, err), err)
	}
	for t.Current(n) {
		switch n.State() {
		case Linked:
			t.O.Keep(n)
		case Fallback:
			t.retry(n)
		default:
			return
		}
	}
}

// retry makes a link to n and moves the data there, or ends when that cannot succeed any more.
func (t *Table[D, L, I]) retry(n *Node[D, L]) {
	r, log := &t.O.Retry, t.O.Log
	var failed logx.Sparse
	for pause := r.Pause; ; pause = min(2*pause, lastPause) {
		select {
		case <-time.After(pause):
		case <-t.Ctx.Done():
			return
		}
		if !t.Current(n) {
			return
		}
		err := t.Make(n, false, true)
		name := n.Name()
		switch {
		case err == nil:
			log.Info("data goes "+r.Path+" from now on, no longer over "+r.Inside(), "peer", name)
			return
		case !t.Current(n):
			return
		case r.Hopeless(err):
			t.Set(n, Unlinked, err)
			log.Warn("data goes over "+r.Inside()+" for as long as both processes run", "peer", name, "err", err)
			return
		}
		t.Set(n, Fallback, err)
		if k, speak := failed.Next(); speak {
			log.Info("data still goes over "+r.Inside()+", not "+r.Path, "peer", name, "err", err, "next try in", min(2*pause, lastPause), "tries", k)
		}
	}
}

// Make makes a link to n. If again is set, an earlier link to n has broken. If afterMarks is set, earlier messages went over the van
// inside, and marks are sent there before the link is installed.
func (t *Table[D, L, I]) Make(n *Node[D, L], again, afterMarks bool) error {
	l, mark, err := t.O.Dial(n, again, afterMarks)
	if err != nil {
		return err
	}
	if !afterMarks {
		return t.Install(n, l)
	}
	t.Mu.Lock()
	losses := n.insideLosses
	t.Mu.Unlock()
	err = change(&n.sends, t.O.Inner, n.ID(), mark, func() error { return t.install(n, l, &losses) })
	if err != nil {
		l.Close()
	}
	return err
}

// Install installs a new link to n. If n has left the table, Install closes the link.
func (t *Table[D, L, I]) Install(n *Node[D, L], l L) error {
	err := t.install(n, l, nil)
	if err != nil {
		l.Close()
	}
	return err
}

func (t *Table[D, L, I]) install(n *Node[D, L], l L, losses *uint64) error {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	switch {
	case !t.currentLocked(n):
		return van.ErrClosed
	case losses != nil && *losses != n.insideLosses:
		return ErrMarksLost
	}
	if t.O.OpenLocked != nil {
		if err := t.O.OpenLocked(l, n.ID()); err != nil {
			return err
		}
	}
	n.link.Store(&l) // before the state: a Send that finds no link depends on it
	t.setLocked(n, Linked, nil)
	return nil
}

// SendInside sends msg over the van inside if data to n goes there, or n is nil. It reports false if there is a link, n has refused one, or
// the table closes.
func (t *Table[D, L, I]) SendInside(n *Node[D, L], msg *van.Message) (sent bool, err error) {
	if n == nil || n.State() == Unlinked {
		return true, t.O.Inner.Send(msg)
	}
	n.sends.RLock()
	defer n.sends.RUnlock()
	if s := n.State(); s != Fallback && s != Unlinked {
		return false, nil
	}
	return true, t.O.Inner.Send(msg)
}

// Broke records that n's link has ended because of cause.
func (t *Table[D, L, I]) Broke(n *Node[D, L], cause error) {
	t.Set(n, Broken, nil)
	t.Losses.Tell(&n.Peer, false, cause)
}

// PathTo returns the path of data to peer id, which this node knows. If now is not set, it first waits as Await does.
func (t *Table[D, L, I]) PathTo(id int, now bool) van.Path {
	n := t.Of(id)
	if !now {
		n = t.Await(id)
	}
	if n == nil {
		return van.PathTo(t.O.Inner, id, now)
	}
	over := func(l L) van.Path {
		return van.Path{Over: t.O.Over, Device: t.O.Device != nil && t.O.Device(l)}
	}
	if l := n.Link(); l != *new(L) {
		return over(l)
	}
	state, why := t.Status(n)
	switch l := n.Link(); {
	case l != *new(L): // it was made meanwhile
		return over(l)
	case state == Refused: // no data goes there at all
		return van.Path{}.Not(t.O.Over, why.Error())
	case now && state <= Connecting:
		return van.Undecided()
	}
	inside := van.PathTo(t.O.Inner, id, now) // only now: the van inside may begin to make a link of its own
	if now && why != nil {
		return inside.Not(t.O.Over, why.Error())
	}
	return inside
}
