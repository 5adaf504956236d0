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

// flow keeps the bytes of received, undelivered messages within the budgets.
//
//   - A worker has one socket for each server. It stops reading that socket while too many of the
//     server's messages wait.
//   - A server reads all workers from one ROUTER, in the order of libzmq's queue. If too many messages of a
//     worker wait for the application, the server asks that worker to send no data. The
//     worker's control messages and other workers' messages continue to arrive.
//   - Workers of the original do not understand that request. The budget for all limits them: when it is
//     used up, the ROUTER is not read.
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
	waiting atomic.Int64 // bytes received from members and not delivered
	strange atomic.Int64 // bytes received from unknown peers and not delivered

	holds, drops logx.Sparse

	holdFor, askEvery time.Duration // the constants, except in tests

	mu     sync.Mutex
	asked  []*sender // the peers that are asked to wait
	ticker *time.Timer
	ended  bool
}

// holdShare: a peer is asked to wait when it has used 1/holdShare of its budget. The rest is for
// messages that are in flight.
const holdShare = 4

// crowdedHold is the number of bytes at which a peer is asked to wait when half of the budget for all is used up.
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

// sender is the state of one peer that sends to this node.
type sender struct {
	id      int
	lane    lane
	control lane         // of control messages, which do not wait for the handler of data
	waiting atomic.Int64 // bytes received and not delivered
	asked   atomic.Bool  // this node has asked the peer to wait
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

// limits returns the number of undelivered bytes above which a peer is asked to wait, and the number at
// which it may continue.
func (f *flow) limits() (ask, letGo int64) {
	ask = f.holdAt
	if f.recvAll > 0 && f.waiting.Load() > f.recvAll/2 {
		ask = min(ask, crowdedHold)
	}
	return ask, ask / 2
}

// The account that a message counts for.
const (
	ofStranger = iota
	ofServer   // received by a worker, over its own connection
	ofMember   // received over the ROUTER
)

// arrived counts a received message. It reports false if the message is of an unknown peer and must be
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
			f.n.log.Warn("dropped a message of an unknown process, which is not a member of the cluster", "as", van.NodeName(msg.Sender), "bytes", n,
				"limit", fmt.Sprintf("%d for all unknown processes (STEPAF_STRANGER_BUDGET)", f.strangers), "dropped so far", k)
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

// left takes a message that was delivered or dropped out of the count.
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

// A peer that is asked to wait does so for holdFor: it must not wait forever for a node that has
// ended. The request is repeated every askEvery.
const (
	holdFor  = 2 * time.Second
	askEvery = 500 * time.Millisecond
)

// Notices that pause and resume data between nodes of this library. They travel in the body of a HEARTBEAT.
// Vans do not hand them up.
var (
	noticeHold = []byte("stepaf/1 hold ") // followed by the duration in milliseconds
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

// askAgain repeats the request to the peers that must still wait.
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

// letGo tells s to continue if few enough of its bytes wait.
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

// tell sends s a notice: hold 0 means to continue. It reports false if the node does not understand notices.
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
