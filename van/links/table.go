package links

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// Link is the sender's end of a link.
type Link interface {
	comparable
	Close() (lost int)          // it returns the number of messages that were not sent
	Linger(ctx context.Context) // waits until all messages are sent
}

// In is the receiver's end of a link: a pointer to a struct that embeds Inbound.
type In interface {
	comparable
	Base() *Inbound
}

// Feed is the receiver of the links from peers, an engine.Feed.
type Feed interface {
	Stop(ctx context.Context) error
	Free(ctx context.Context, free func()) error
}

// Options are what differs between transports. Functions whose name ends in Locked are called with Table.Mu held.
type Options[D any, L Link, I In] struct {
	Log         *slog.Logger
	Inner       van.Van
	Retry       Retry
	Over        string        // van.Path.Over of peers with a link
	Link        string        // names a link in log lines: "a connection for data"
	Kind        string        // of marks
	UnknownTime time.Duration // Open sets the times to the constants
	HoldTime    time.Duration
	DrainTime   time.Duration

	Together     bool // the first Send makes the links to all peers: their handshakes then overlap
	TakesUnknown bool // links of processes whose id no peer has are read after HoldTime
	KeepsLoss    bool // the return of a peer whose link is broken is not reported before the next link

	Dial       func(n *Node[D, L], again, afterMarks bool) (L, Mark, error)
	OpenLocked func(l L, id int) error              // before l is installed; may be nil
	Failed     func(n *Node[D, L], err error) State // the first link cannot be made: logs that, and returns the next state
	Keep       func(n *Node[D, L])                  // waits until n's link has ended, and makes the next one or sets another state
	Gone       func(id int)                         // a peer is lost
	Device     func(L) bool                         // values on a device go over a link; may be nil
	InsideLost func(L, error)                       // ends a link that the receiver may not have begun to read because marks have not arrived

	StartLocked   func(I) // begins to read a link, or leaves it held
	ArrivedLocked func(I) // all marks of a link have arrived; may be nil
	// EndLocked ends a link, and reports whether nothing reads it, so that it is removed at once. If fence is set, no message that has
	// arrived over the link is delivered any more.
	EndLocked func(in I, fence bool) (unread bool)
}

// peers are the peers of a node.
type peers[D any, L Link, I In] struct {
	O      Options[D, L, I]
	Losses Losses
	Ctx    context.Context // ends when the table is closed
	WG     sync.WaitGroup  // the table's goroutines

	all  atomic.Pointer[map[int]*Node[D, L]] // by node id
	outs atomic.Pointer[[]L]                 // the links to these peers

	Mu     sync.Mutex // guards changes of the fields above, and all fields below, also those of inbounds and Table
	closed atomic.Bool
}

// Of returns peer id, nil if this node does not know it.
func (t *peers[D, L, I]) Of(id int) *Node[D, L] { return (*t.all.Load())[id] }

// All returns the peers by id.
func (t *peers[D, L, I]) All() map[int]*Node[D, L] { return *t.all.Load() }

// Outs returns the links to the peers.
func (t *peers[D, L, I]) Outs() []L { return *t.outs.Load() }

// Closed reports whether BeginClose was called. It does not change while Mu is held.
func (t *peers[D, L, I]) Closed() bool { return t.closed.Load() }

// Go runs f on a goroutine of the table. If the table is closed, it returns false instead.
func (t *peers[D, L, I]) Go(f func()) bool {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	if !t.closed.Load() {
		t.WG.Go(f)
	}
	return !t.closed.Load()
}

// Current reports whether n still is the peer that has its id.
func (t *peers[D, L, I]) Current(n *Node[D, L]) bool {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	return t.currentLocked(n)
}

func (t *peers[D, L, I]) currentLocked(n *Node[D, L]) bool {
	return !t.closed.Load() && t.Of(n.ID()) == n
}

// Status returns n's state, and why it has no link.
func (t *peers[D, L, I]) Status(n *Node[D, L]) (State, error) {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	return n.State(), n.why
}

// errLeft is why a peer that has left the table has no link.
var errLeft = errors.New("another process has its node id")

// Set sets n's state. If n has no link because of why, that is kept.
func (t *peers[D, L, I]) Set(n *Node[D, L], s State, why error) {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	t.setLocked(n, s, why)
}

func (t *peers[D, L, I]) setLocked(n *Node[D, L], s State, why error) {
	if why != nil {
		n.why = why
	}
	if was := State(n.state.Swap(int32(s))); was <= Connecting && s > Connecting {
		defer close(n.settled)
	}
	if s > Broken { // after the state: a Send that finds no link depends on it
		n.link.Store(nil)
	}
	t.listLocked()
}

func (t *peers[D, L, I]) listLocked() {
	outs := []L{}
	for _, n := range t.All() {
		if l := n.Link(); l != *new(L) {
			outs = append(outs, l)
		}
	}
	t.outs.Store(&outs)
}
