package membership

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/van"
)

// TestNoNodeLeavesEarly: the programs end with a barrier over all nodes and Finalize, as fserver's stop() does; the
// scheduler does the same, or only calls Finalize. Connections break, processes are killed and replaced, and the
// scheduler is restarted. Then no Finalize ends before all have called it, no call fails, and all end.
func TestNoNodeLeavesEarly(t *testing.T) {
	for seed := range uint64(1000) {
		e := newEnding(seed)
		e.run()
		for _, what := range e.wrong {
			t.Errorf("seed %d: %s", seed, what)
		}
	}
}

var endingSlots = []string{"sched", "s0", "w0", "w1"}

// ending is a small cluster whose programs end.
type ending struct {
	r     *rand.Rand
	w     *world
	plain bool // the scheduler calls Finalize only
	all   []*program
	now   map[string]*program // by slot
	faults,
	more int
	cut    string // the slot whose connection with the scheduler is broken
	absent string // the slot of a process that was killed
	// excused: a process died in Finalize, where it counts. Its replacement process is therefore not waited for.
	excused bool
	wrong   []string
}

// program is a process and its calls.
type program struct {
	*testNode
	slot  string
	calls []string
	waits int    // number of its pending barrier; 0: none
	last  string // its last call
	over  bool   // its Finalize is
}

func newEnding(seed uint64) *ending {
	e := &ending{r: rand.New(rand.NewPCG(seed, 11)), now: map[string]*program{}}
	e.w = &world{seen: e.saw, log: func(format string, args ...any) {
		if s := fmt.Sprintf(format, args...); strings.Contains(s, "BUG") {
			e.wrong = append(e.wrong, s)
		}
	}}
	e.plain, e.faults = e.r.IntN(2) == 0, 1+e.r.IntN(3)
	for _, s := range endingSlots {
		e.begin(s)
	}
	e.w.deliver(1<<30, nil)
	return e
}

func (e *ending) begin(slot string) {
	role, calls, rank := van.Worker, []string{"stop", "finalize"}, int(slot[1]-'0')
	switch {
	case slot == "sched":
		role, rank = van.Scheduler, 0
		if e.plain {
			calls = calls[1:]
		}
	case slot[0] == 's':
		role = van.Server
	}
	e.more++
	c := testConfig(role, 2, 1, fmt.Sprintf("10.0.0.1:%d", e.more), rank)
	c.HeartbeatInterval, c.HeartbeatTimeout, c.NativeInterval, c.NativeTimeout = 2*time.Second, 10*time.Second, true, true
	c.ReplaceTimeout = time.Minute
	p := &program{slot: slot, calls: calls}
	e.all, e.now[slot] = append(e.all, p), p
	n, err := e.w.add(fmt.Sprintf("%s.%d", slot, e.more), c)
	if err != nil {
		e.fault("%s: %v", slot, err)
		return
	}
	p.testNode = n
}

func (e *ending) fault(format string, args ...any) {
	if !e.excused && len(e.wrong) == 0 {
		e.wrong = append(e.wrong, fmt.Sprintf(format, args...))
	}
}

func (e *ending) saw(n *testNode, o Output) {
	i := slices.IndexFunc(e.all, func(p *program) bool { return p.testNode == n })
	if i < 0 {
		return
	}
	p := e.all[i]
	switch o := o.(type) {
	case BarrierFailed:
		e.fault("%s: %s failed: %v", n.name, p.last, o.Err)
	case BarrierDone:
		if o.Barrier != p.waits {
			return
		}
		p.waits = 0
		if p.over = p.last == "finalize"; !p.over {
			return
		}
		for _, q := range e.all {
			e.excused = e.excused || q.dead && q.last == "finalize" && !q.over
		}
		for _, s := range endingSlots {
			if q := e.now[s]; !q.dead && q.last != "finalize" {
				e.fault("%s's Finalize is over, and %s has not called it", n.name, q.name)
			}
		}
	}
}

// step lets a process make its next call.
func (e *ending) step(p *program) {
	if p.dead || p.waits != 0 || len(p.calls) == 0 || !p.m.Ready() {
		return
	}
	p.last, p.calls = p.calls[0], p.calls[1:]
	p.waits = p.m.pendingBarriers.last + 1
	call := p.m.Finalize
	if p.last == "stop" {
		call = p.m.StopBarrier
	}
	if _, err := call(e.w.now, 0); err != nil {
		e.fault("%s: %s: %v", p.name, p.last, err)
	}
	e.w.take(p.testNode)
}

// drop loses the messages in flight between two processes.
func (e *ending) drop(p, q *program) {
	e.w.queue = slices.DeleteFunc(e.w.queue, func(x packet) bool {
		return x.name == p.name && x.to == q.addr || x.name == q.name && x.to == p.addr
	})
}

// lose reports to p that its connection with q has ended.
func (e *ending) lose(p, q *program) {
	for _, id := range sortedIDs(p.conns) {
		if !p.dead && p.conns[id].addr == q.addr {
			p.m.PeerLost(e.w.now, id, errors.New("reset"))
			e.w.take(p.testNode)
		}
	}
}

// leave ends a process, in order or not.
func (e *ending) leave(p *program) {
	if p.over {
		p.m.Leaving(e.w.now)
	}
	p.dead = true
	for _, s := range endingSlots {
		if q := e.now[s]; q != p && q.testNode != nil {
			if !p.over {
				e.drop(p, q)
			}
			e.lose(q, p)
		}
	}
}

func (e *ending) heal() {
	if q := e.now[e.cut]; q != nil {
		sched := e.now["sched"]
		e.drop(sched, q)
		e.lose(sched, q)
		e.lose(q, sched)
		e.back(sched, q)
		e.back(q, sched)
	}
	e.cut = ""
}

// back reports to p that its connection with q is restored.
func (e *ending) back(p, q *program) {
	for _, id := range sortedIDs(p.conns) {
		if !p.dead && !q.dead && p.conns[id].addr == q.addr {
			p.m.PeerBack(e.w.now, id)
			e.w.take(p.testNode)
		}
	}
}

// replace starts a replacement process of a killed one.
func (e *ending) replace() {
	if e.absent == "" {
		return
	}
	slot := e.absent
	e.absent = ""
	e.begin(slot)
	if slot != "sched" {
		return
	}
	for i := 0; i < 60 && !e.now[slot].m.Ready(); i++ {
		e.w.pass(500*time.Millisecond, true)
	}
	for _, s := range endingSlots[1:] {
		e.back(e.now[s], e.now[slot])
	}
}

// disturb breaks a connection or kills a process, if all have started and none is over.
func (e *ending) disturb() {
	for _, s := range endingSlots {
		if p := e.now[s]; p.dead || p.over || !p.m.Ready() {
			return
		}
	}
	if e.faults == 0 || e.cut != "" || e.absent != "" {
		return
	}
	e.faults--
	sched, other := e.now["sched"], e.now[endingSlots[1+e.r.IntN(3)]]
	switch e.r.IntN(3) {
	case 0:
		e.drop(sched, other)
		if e.r.IntN(2) == 0 {
			e.lose(sched, other)
		}
		if e.r.IntN(2) == 0 {
			e.lose(other, sched)
		}
		e.cut = other.slot
	case 1:
		e.absent = other.slot
		e.leave(other)
	case 2:
		e.absent = "sched"
		e.leave(sched)
	}
}

// passes reports whether a message may arrive.
func (e *ending) passes(x *packet) bool {
	q, sched := e.now[e.cut], e.now["sched"]
	return q == nil || !(x.name == q.name && x.to == sched.addr || x.name == sched.name && x.to == q.addr)
}

// ended lets every process whose Finalize is over leave with this probability, and reports whether all have.
func (e *ending) ended(chance float64) bool {
	all := true
	for _, s := range endingSlots {
		p := e.now[s]
		all = all && p.over
		if p.over && !p.dead && e.r.Float64() < chance {
			e.leave(p)
		}
	}
	return all
}

func (e *ending) run() {
	for i := 0; i < 400 && !e.excused && len(e.wrong) == 0 && !e.ended(0.3); i++ {
		switch e.r.IntN(10) {
		case 0, 1, 2:
			e.w.deliver(1+e.r.IntN(4), e.passes)
		case 3, 4, 5:
			e.step(e.now[endingSlots[e.r.IntN(4)]])
		case 6:
			e.w.pass(time.Duration(e.r.IntN(1500))*time.Millisecond, false)
		case 7:
			e.heal()
		case 8:
			e.replace()
		case 9:
			e.disturb()
		}
	}
	e.heal()
	e.replace()
	for range 100 {
		if e.excused || len(e.wrong) > 0 || e.ended(1) {
			return
		}
		for _, s := range endingSlots {
			e.step(e.now[s])
		}
		e.w.pass(500*time.Millisecond, true)
	}
	for _, s := range endingSlots {
		if p := e.now[s]; !p.over {
			e.fault("%s does not end: it has called %q", p.name, p.last)
		}
	}
}
