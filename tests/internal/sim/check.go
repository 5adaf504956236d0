package sim

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/tests/internal/sim/plan"
	"github.com/stepaf/stepaf-go/tests/internal/value"
)

// checker judges the events of a run.
type checker struct {
	n *Net

	mu      sync.Mutex
	bad     []Violation
	handled map[handledKey]bool   // batches that a server's application has had
	seen    map[seenKey]int       // pushes
	calls   map[callID]*call      // that have begun
	votes   map[plan.Node][]*vote // barriers
}

// Violation is something that must not happen.
type Violation struct {
	At   time.Duration // since the beginning
	Kind string        // "wrong data", "late", ...
	Text string
}

func (v Violation) String() string {
	return fmt.Sprintf("at %.6fs: %s: %s", v.At.Seconds(), v.Kind, v.Text)
}

type handledKey struct {
	id           callID
	server, sgen int
}

type seenKey struct {
	id     callID
	server int
	tensor int
}

// call is one push_pull.
type call struct {
	id     callID
	start  time.Duration
	end    time.Duration // 0 while it is in flight
	err    error
	gaveUp bool // it ended because its time was over
}

// vote is one call of a barrier.
type vote struct {
	p          *proc
	start, end time.Duration
	ended      bool
	counts     time.Duration // until when its request may still count
	held       bool          // the process was stopped when it ended: the cancel message leaves when it is woken
}

func newChecker(n *Net) *checker {
	return &checker{n: n, handled: map[handledKey]bool{}, seen: map[seenKey]int{}, calls: map[callID]*call{}, votes: map[plan.Node][]*vote{}}
}

// maxViolations are noted: the first ones tell most.
const maxViolations = 20

// fail notes a violation.
func (k *checker) fail(kind, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	at := k.n.now()
	k.n.note("CHECK", "VIOLATION "+kind+": "+text)
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.bad) < maxViolations {
		k.bad = append(k.bad, Violation{at, kind, text})
	}
}

func (k *checker) violations() []Violation {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.bad
}

// slack is how much later than its limit something may end.
const slack = time.Second

// within notes a violation if the function that it returns is not called in time. The
// time in which the process is stopped does not count.
func (k *checker) within(p *proc, limit time.Duration, what string) (done func()) {
	var mu sync.Mutex
	var t *time.Timer
	over := false
	var look func()
	look = func() {
		mu.Lock()
		defer mu.Unlock()
		if over {
			return
		}
		if left := p.excused(); left > 0 {
			t = time.AfterFunc(left, look)
			return
		}
		k.fail("never ends", "%s: %s has not ended, limit %s", p.name, what, limit)
	}
	mu.Lock()
	defer mu.Unlock()
	t = time.AfterFunc(max(limit, 0)+slack, look)
	return func() {
		mu.Lock()
		defer mu.Unlock()
		over = true
		t.Stop()
	}
}

// begin notes the beginning of a call, before anything of it is sent.
func (k *checker) begin(id callID) *call {
	c := &call{id: id, start: k.n.now()}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.calls[id] = c
	return c
}

// end notes its end.
func (k *checker) end(c *call, err error, gaveUp bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	c.end, c.err, c.gaveUp = k.n.now(), err, gaveUp
}

func (k *checker) find(id callID) (call, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	c, ok := k.calls[id]
	if !ok {
		return call{}, false
	}
	return *c, true
}

// push judges one push tensor that an application has got.
func (k *checker) push(at *proc, worker, tensor int, b []byte) (label, bool) {
	l, err := read(b, value.Pushed)
	if err != nil {
		k.fail("wrong data", "%s got a push of worker %d, tensor %d: %v", at.name, worker, tensor, err)
		return l, false
	}
	if l.id.worker != worker || l.index != tensor {
		k.fail("wrong data", "%s got tensor %d of worker %d: it is tensor %d of %s", at.name, tensor, worker, l.index, l.id)
		return l, false
	}
	if _, ok := k.find(l.id); !ok {
		k.fail("wrong data", "%s got a push of %s, which has not been made", at.name, l.id)
		return l, false
	}
	key := seenKey{l.id, at.who.Rank(), tensor}
	k.mu.Lock()
	k.seen[key]++
	n := k.seen[key]
	k.mu.Unlock()
	if n > 1 && !at.c.nameless(l.id) {
		k.fail("seen twice", "%s got push tensor %d of %s for the %d. time", at.name, tensor, l.id, n)
	}
	return l, true
}

// handle notes that a batch was handed to the application of a server.
func (k *checker) handle(id callID, at *proc) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.handled[handledKey{id, at.who.Rank(), at.gen}] = true
}

// answer judges one pull tensor of a call that has succeeded.
func (k *checker) answer(id callID, server, index int, b []byte) {
	l, err := read(b, value.Answered)
	if err != nil {
		k.fail("wrong data", "%s succeeded; the tensor %d of server %d: %v", id, index, server, err)
		return
	}
	if l.id != id || l.server != server || l.index != index {
		k.fail("wrong data", "%s succeeded with tensor %d of server %d, which is tensor %d of %s for %s", id, index, server,
			l.index, procName(plan.NodeOf("server", l.server), l.sgen), l.id)
		return
	}
	k.mu.Lock()
	ok := k.handled[handledKey{id, l.server, l.sgen}]
	k.mu.Unlock()
	if !ok {
		k.fail("wrong data", "%s was answered by %s, which has not had the batch", id, procName(plan.NodeOf("server", l.server), l.sgen))
	}
}

// vote notes the call of a barrier.
func (k *checker) vote(p *proc) *vote {
	v := &vote{p: p, start: k.n.now()}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.votes[p.who] = append(k.votes[p.who], v)
	return v
}

// voted judges a barrier that has returned: all of the group have called it. group has the
// processes that each node may be.
func (k *checker) voted(v *vote, err error, group [][]*proc) {
	now := k.n.now()
	held, _ := v.p.c.stands(v.p)
	woken := map[*proc]time.Duration{}
	for _, holders := range group {
		for _, p := range holders {
			_, woken[p] = p.c.stands(p)
		}
	}
	k.mu.Lock()
	v.end, v.ended, v.held = now, true, held && err != nil
	switch {
	case err == nil:
		for _, x := range k.votes[v.p.who] {
			if x.p != v.p || !x.ended {
				continue
			}
			if x.counts == math.MaxInt64 { // the barrier that has passed is this one's; that of v is still to come
				v.counts = math.MaxInt64
				x.counts = 0
				break
			}
			x.counts, x.held = 0, false // the barrier that has passed has used it up
		}
	case v.p.c.plan.Cluster.IsForeign(v.p.who):
		v.counts = math.MaxInt64 // the original cannot take it back
	case v.p.c.plan.Transport.Resend:
		v.counts = now + 2*slack // the cancel message may be lost, and is repeated after a second
	}
	var missing *proc
	if len(group) == 1 && group[0][0].who == v.p.who {
		group = nil // no other process is asked, also if v.p does not know yet that it was replaced
	}
	for _, holders := range group {
		p := holders[0]
		ok := false
		for _, x := range k.votes[p.who] {
			holds := x.held && (woken[x.p] < x.end || now <= woken[x.p]+2*slack)
			ok = ok || slices.Contains(holders, x.p) && x.start <= now && (!x.ended || x.end >= v.start || x.counts >= now || holds)
		}
		if !ok && missing == nil {
			missing = p
		}
	}
	k.mu.Unlock()
	if err == nil && missing != nil {
		k.fail("wrong barrier", "%s: the barrier that it called at %.6fs is over, and %s has not called it", v.p.name, v.start.Seconds(), missing.name)
	}
}
