package zmq

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/engine"
)

// flow keeps the bytes of received, undelivered messages within the budgets.
//
//   - A worker has one socket for each server. It stops reading that socket while too many of the
//     server's messages wait.
//   - A server reads all workers from one ROUTER, in the order of libzmq's queue. When the budget for all is
//     used up, it does not read the ROUTER.
type flow struct {
	n         *shared
	senders   lanes // of the ROUTER
	strangers int64 // STEPAF_STRANGER_BUDGET; 0: no limit

	dealers *engine.Budget
	router  *engine.Budget

	drained atomic.Bool  // the ROUTER had no message when it was last read
	strange atomic.Int64 // bytes received from unknown peers and not delivered

	holds, drops logx.Sparse
}

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
	control lane // of control messages, which do not wait for the handler of data
	blame   engine.SlowDetector
}

func (s *sender) of(msg *van.Message) *lane {
	if msg.IsControl() {
		return &s.control
	}
	return &s.lane
}

func (f *flow) init(n *shared) {
	cfg := n.cfg
	f.n = n
	f.strangers = int64(cfg.StrangerBudget)
	if failpoint.On("recv-budget") {
		return
	}
	f.dealers = engine.NewBudget(int64(cfg.RecvBudgetPeer), int64(cfg.RecvBudget))
	f.router = engine.NewBudget(0, int64(cfg.RecvBudget))
}

// paused counts that messages of s wait in l. It logs this only if they wait for the application, since parts of an unfinished long
// value also take many bytes.
func (f *flow) paused(s *sender, l *lane, bytes int64) {
	f.n.stats.paused.Add(1)
	s.blame.Watch(l.Paused, l.Slow, func() {
		if n, speak := f.holds.Next(); speak {
			f.n.log.Warn("a peer is not read until the application has taken some of its messages", "peer", van.NodeName(s.id), "bytes waiting", bytes,
				"limits", fmt.Sprintf("%d of one peer (STEPAF_RECV_BUDGET_PEER), %d of all (STEPAF_RECV_BUDGET)", f.n.cfg.RecvBudgetPeer, f.n.cfg.RecvBudget), "so far", n)
		}
	})
}

// arrived counts a received message. It reports false if the message is of an unknown peer and must be
// dropped, after van.Options.OnDropped.
func (f *flow) arrived(msg *van.Message) bool {
	n, stranger := weight(msg)
	if !stranger {
		return true
	}
	if all := f.strange.Add(n); all <= f.strangers || f.strangers <= 0 {
		return true
	}
	f.strange.Add(-n)
	f.n.stats.strangers.Add(1)
	if k, speak := f.drops.Next(); speak {
		f.n.log.Warn("dropped a message of an unknown process, which is not a member of the cluster", "as", van.NodeName(msg.Sender), "bytes", n,
			"limit", fmt.Sprintf("%d for all unknown processes (STEPAF_STRANGER_BUDGET)", f.strangers), "dropped so far", k)
	}
	if f.n.onDropped != nil && !msg.IsControl() {
		f.n.onDropped(msg, fmt.Sprintf("this message has %d bytes, and %d are queued already (STEPAF_STRANGER_BUDGET=%d)", n, f.strange.Load(), f.strangers))
	}
	return false
}

// left takes a message that was delivered or dropped out of the count.
func (f *flow) left(msg *van.Message) {
	if n, stranger := weight(msg); stranger {
		f.strange.Add(-n)
	}
}
