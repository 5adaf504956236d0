package zmq

import (
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
)

// flow keeps the bytes that were received and wait within the budgets.
//
// A worker has a socket for each server, which it does not read while the
// server's messages wait. But a server reads all its workers from one ROUTER, of which
// libzmq hands up one worker's messages after the other's. So a server asks a worker of
// this library whose messages wait for the application to hold back its data; its control
// messages, and other workers' messages, come on. Workers of the original are not asked:
// they are bounded by the budget for all, at which the ROUTER is not read.
type flow struct {
	n         *shared
	out       *outgoing // for notices
	senders   lanes     // of the ROUTER
	recvAll   int64     // STEPAF_RECV_BUDGET; 0: no limit
	strangers int64     // STEPAF_STRANGER_BUDGET; 0: no limit
	holdAt    int64     // bytes of one peer at which it is asked to wait; 0: never

	dealers *engine.Budget
	router  *engine.Budget

	drained atomic.Bool  // the ROUTER had no message when it was last read
	waiting atomic.Int64 // bytes of members that are received and not delivered
	strange atomic.Int64 // the same of strangers

	holds, drops logx.Sparse

	holdFor, askEvery time.Duration // the constants, other than in tests

	mu     sync.Mutex
	asked  []*sender // who is asked to wait
	ticker *time.Timer
	ended  bool
}

// holdShare is the part of a peer's budget at which it is asked to wait. The rest is for
// what is on its way.
const holdShare = 4

// crowdedHold is used in its place when half of the budget for all is used up.
const crowdedHold = 1 << 20

type lane = engine.PeerQueue[*van.Message]

// lanes gives each sender its lane. Senders without an id share one.
type lanes struct {
	m    sync.Map // int to *sender
	hand *atomic.Int32
}

func (l *lanes) of(id int) *sender {
	if p, ok := l.m.Load(id); ok {
		return p.(*sender)
	}
	s := &sender{id: id}
	s.lane.ID, s.control.ID = id, id
	s.lane.Undelivered, s.control.Undelivered = l.hand, l.hand
	p, _ := l.m.LoadOrStore(id, s)
	return p.(*sender)
}

// sender is who sends to this node.
type sender struct {
	id      int
	lane    lane
	control lane         // of control messages, which do not wait for the handler of data
	waiting atomic.Int64 // bytes received and not delivered
	asked   atomic.Bool  // to wait
	blame   engine.SlowDetector
}

func (s *sender) of(msg *van.Message) *lane {
	if msg.IsControl() {
		return &s.control
	}
	return &s.lane
}

func (f *flow) init(n *shared, out *outgoing) {
	cfg := n.cfg
	f.n, f.out = n, out
	f.holdFor, f.askEvery = holdFor, askEvery
	f.strangers = int64(cfg.StrangerBudget)
	if failpoint.On("recv-budget") {
		return
	}
	f.recvAll = int64(cfg.RecvBudget)
	f.holdAt = int64(cfg.RecvBudgetPeer) / holdShare
	f.dealers = engine.NewBudget(int64(cfg.RecvBudgetPeer), f.recvAll)
	f.router = engine.NewBudget(0, f.recvAll)
}

// paused counts that messages of s wait in l. It logs this only if they wait for the application, since parts of an unfinished long
// value also take many bytes. how describes the reaction of this node. waits reports whether the messages still wait.
func (f *flow) paused(how string, s *sender, l *lane, waits func() bool, bytes int64) {
	f.n.stats.paused.Add(1)
	s.blame.Watch(waits, l.Slow, func() {
		if n, speak := f.holds.Next(); speak {
			f.n.log.Warn("a peer is "+how+" until the application has taken some of its messages", "peer", van.NodeName(s.id), "bytes waiting", bytes,
				"limits", fmt.Sprintf("%d of one peer (STEPAF_RECV_BUDGET_PEER), %d of all (STEPAF_RECV_BUDGET)", f.n.cfg.RecvBudgetPeer, f.n.cfg.RecvBudget), "so far", n)
		}
	})
}

// limits returns how many bytes of one peer may wait before it is asked to wait, and at
// how many it is let go on.
func (f *flow) limits() (ask, letGo int64) {
	ask = f.holdAt
	if f.recvAll > 0 && f.waiting.Load() > f.recvAll/2 {
		ask = min(ask, crowdedHold)
	}
	return ask, ask / 2
}

// Whose a message is, for what it counts.
const (
	ofStranger = iota
	ofServer   // received by a worker, over its own connection
	ofMember   // received over the ROUTER
)

// arrived counts a message that was received. It reports false when a stranger's is to be
// dropped.
func (f *flow) arrived(msg *van.Message) bool {
	n, kind := weight(msg)
	switch kind {
	case ofStranger:
		if all := f.strange.Add(n); all <= f.strangers || f.strangers <= 0 {
			return true
		}
		f.strange.Add(-n)
		f.n.stats.strangers.Add(1)
		if k, speak := f.drops.Next(); speak {
			f.n.log.Warn("dropped a message of a stranger, who is not a member of the cluster", "as", van.NodeName(msg.Sender), "bytes", n,
				"limit", fmt.Sprintf("%d for all strangers (STEPAF_STRANGER_BUDGET)", f.strangers), "dropped so far", k)
		}
		return false
	case ofMember:
		f.waiting.Add(n)
		s := f.senders.of(msg.Sender)
		if w := s.waiting.Add(n); f.holdAt > 0 && w > crowdedHold/2 && !s.asked.Load() {
			if ask, _ := f.limits(); w > ask {
				f.ask(s)
			}
		}
	}
	return true
}

// left counts a message that was delivered, or never will be.
func (f *flow) left(msg *van.Message) {
	switch n, kind := weight(msg); kind {
	case ofStranger:
		f.strange.Add(-n)
	case ofMember:
		f.waiting.Add(-n)
		s := f.senders.of(msg.Sender)
		if w := s.waiting.Add(-n); s.asked.Load() {
			if _, letGo := f.limits(); w <= letGo {
				f.letGo(s)
			}
		}
	}
}

// A peer that is asked to wait does so for holdFor, so that it does not wait for ever for
// a node that has gone; it is asked again every askEvery.
const (
	holdFor  = 2 * time.Second
	askEvery = 500 * time.Millisecond
)

// The notices between nodes of this library that make data wait and go on, in the body
// of a HEARTBEAT. Vans do not hand them up.
var (
	noticeHold = []byte("stepaf/1 hold ") // and for how many milliseconds
	noticeGo   = []byte("stepaf/1 go")
)

// ask asks s to wait.
func (f *flow) ask(s *sender) {
	f.mu.Lock()
	ask, _ := f.limits()
	w := s.waiting.Load()
	if f.ended || s.asked.Load() || w <= ask || !f.tell(s, f.holdFor) {
		f.mu.Unlock()
		return
	}
	s.asked.Store(true)
	f.asked = append(f.asked, s)
	if f.ticker == nil {
		f.ticker = time.AfterFunc(f.askEvery, f.askAgain)
	}
	f.mu.Unlock()
	f.paused("asked to wait", s, &s.lane, s.asked.Load, w)
	if _, letGo := f.limits(); s.waiting.Load() <= letGo {
		f.letGo(s) // all was delivered before it was marked
	}
}

// askAgain asks those who are to wait still, and lets go the others.
func (f *flow) askAgain() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.asked {
		f.tell(s, f.holdFor)
	}
	if f.ticker = nil; len(f.asked) > 0 && !f.ended {
		f.ticker = time.AfterFunc(f.askEvery, f.askAgain)
	}
}

// letGo lets s go on.
func (f *flow) letGo(s *sender) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, letGo := f.limits(); !s.asked.Load() || s.waiting.Load() > letGo {
		return
	}
	s.asked.Store(false)
	f.asked = slices.DeleteFunc(f.asked, func(x *sender) bool { return x == s })
	f.tell(s, 0)
}

// tell sends a notice. It reports false when the node does not understand it.
func (f *flow) tell(s *sender, hold time.Duration) bool {
	c := (*f.n.peers.Load())[s.id]
	if c == nil || c.incarnation == 0 {
		return false
	}
	var msg van.Message
	msg.Reset()
	msg.Receiver = s.id
	msg.Control.Cmd = van.Heartbeat
	msg.Body = noticeGo
	if hold > 0 {
		msg.Body = strconv.AppendInt(slices.Clone(noticeHold), hold.Milliseconds(), 10)
	}
	if err := f.out.send(&msg, c); err != nil {
		f.n.log.Debug("a notice was not sent", "err", err)
	}
	return true
}

func (f *flow) stop() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ended = true
	if f.ticker != nil {
		f.ticker.Stop()
	}
}
