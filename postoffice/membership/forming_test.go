package membership

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// TestNoProcessIsForgotten: messages to a process that waits to be admitted are lost, late or duplicated; processes,
// also the scheduler, are killed, stopped, cut off or restarted. In the end the process is a node, or has the reason
// why it is not, and no two processes are one node.
func TestNoProcessIsForgotten(t *testing.T) {
	for seed := range uint64(1000) {
		j := &forming{r: rand.New(rand.NewPCG(seed, 7)), w: newWorld(t)}
		j.w.log = func(format string, args ...any) {
			if s := fmt.Sprintf(format, args...); strings.Contains(s, "BUG") {
				t.Errorf("seed %d: %s", seed, s)
			}
		}
		j.ranked = j.r.IntN(2) == 0
		j.run()
		for _, what := range j.wrong() {
			t.Errorf("seed %d: %s", seed, what)
		}
	}
}

// forming is a small cluster that forms under faults.
type forming struct {
	r      *rand.Rand
	w      *world
	ranked bool
	more   int // processes that were added later
	lost   []lostConn
}

type lostConn struct {
	n  *testNode
	id int
}

func (j *forming) add(name string, role van.Role, addr string, rank int) {
	c := testConfig(role, 2, 1, addr, rank)
	if !j.ranked {
		c.Self.AuxID = -1
	}
	c.HeartbeatInterval, c.HeartbeatTimeout, c.NativeInterval, c.NativeTimeout = 2*time.Second, 10*time.Second, true, true
	c.ReplaceTimeout = time.Minute
	_, _ = j.w.add(name, c) // its Start may be refused at once; this test does not check that
}

func (j *forming) run() {
	j.add("sched", van.Scheduler, "", 0)
	j.add("s0", van.Server, "10.0.0.3:1", 0)
	j.add("w0", van.Worker, "10.0.0.1:1", 0)
	if j.r.IntN(2) == 0 {
		j.add("w1", van.Worker, "10.0.0.2:1", 1)
		if j.r.IntN(2) == 0 {
			j.w.deliver(1<<30, nil)
		}
	}
	for range 10 + j.r.IntN(40) {
		switch n := j.w.nodes[j.r.IntN(len(j.w.nodes))]; j.r.IntN(9) {
		case 0, 1, 2:
			j.w.deliver(1+j.r.IntN(10), nil)
		case 3, 4:
			j.w.pass(time.Duration(j.r.IntN(4000))*time.Millisecond, j.r.IntN(3) > 0)
		case 5:
			j.disturb()
		case 6:
			j.cut(n)
		case 7:
			j.heal()
			n.frozen = !n.dead && !n.frozen
		case 8:
			j.replace(n)
		}
	}
	for _, n := range j.w.nodes {
		n.frozen = false
	}
	j.heal()
	j.w.pass(150*time.Second, true)
}

// disturb loses, or delays, messages to a process on a connection of its own.
func (j *forming) disturb() {
	for i, p := range j.w.queue {
		body := string(p.meta.Body)
		if strings.HasPrefix(body, "stepaf/1 error") || strings.HasPrefix(body, "stepaf/1 registe") {
			j.w.queue = append(j.w.queue[:i:i], j.w.queue[i+1:]...)
			if j.r.IntN(2) == 0 && !strings.HasPrefix(body, "stepaf/1 error") {
				j.w.queue = append(j.w.queue, p)
			}
			return
		}
	}
}

// cut breaks a connection of n, or of the scheduler, and loses some of the messages on it.
func (j *forming) cut(n *testNode) {
	for _, id := range sortedIDs(n.conns) {
		if n.dead || id == n.id || id != van.SchedulerID && n.name != "sched" || j.r.IntN(2) == 0 {
			continue
		}
		var kept []packet
		for _, p := range j.w.queue {
			if p.name != n.name || p.to != n.conns[id].addr || j.r.IntN(2) == 0 {
				kept = append(kept, p)
			}
		}
		j.w.queue = kept
		j.lose(n, id)
		j.lost = append(j.lost, lostConn{n, id})
		return
	}
}

func (j *forming) lose(n *testNode, id int) {
	n.m.PeerLost(j.w.now, id, errors.New("reset"))
	j.w.take(n)
}

func (j *forming) heal() {
	for _, l := range j.lost {
		if !l.n.dead {
			l.n.m.PeerBack(j.w.now, l.id)
			j.w.take(l.n)
		}
	}
	j.lost = nil
}

// replace kills n, and starts a replacement process, or one process too many.
func (j *forming) replace(n *testNode) {
	if j.more >= 6 || n.dead {
		return
	}
	one := j.r.IntN(3)
	switch {
	case n.name == "sched" && one == 0:
		n.dead = true
		for _, p := range j.w.nodes {
			if p != n && !p.dead {
				j.lose(p, van.SchedulerID)
			}
		}
		j.add("sched", van.Scheduler, "", 0)
		for _, p := range j.w.nodes {
			if p.name != "sched" && !p.dead {
				p.m.PeerBack(j.w.now, van.SchedulerID)
				j.w.take(p)
			}
		}
	case n.name != "sched" && one > 0:
		n.dead, n.frozen = true, false
		for _, p := range j.w.nodes {
			for _, id := range sortedIDs(p.conns) {
				if !p.dead && p.conns[id].addr == n.addr && j.r.IntN(2) == 0 {
					j.lose(p, id)
				}
			}
		}
		addr := n.addr
		if j.r.IntN(2) == 0 {
			addr = fmt.Sprintf("10.0.1.%d:1", j.more)
		}
		j.add(fmt.Sprintf("%s.%d", n.name, j.more), n.m.cfg.Role, addr, n.m.cfg.Self.AuxID)
	case n.name != "sched":
		j.add(fmt.Sprintf("x%d", j.more), van.Worker, fmt.Sprintf("10.0.2.%d:1", j.more), j.r.IntN(2))
	}
	j.more++
}

// wrong lists the violations in the final state.
func (j *forming) wrong() (all []string) {
	sched, has := j.w.node("sched"), map[int]string{}
	for _, n := range j.w.nodes {
		switch id := n.m.ID(); {
		case n.dead || n == sched || n.m.life.phase == failed || j.w.at(n.addr) != n:
		case n.m.life.phase == joining && sched.m.life.phase == ready:
			all = append(all, n.name+" waits and will not hear of anything")
		case n.m.Ready() && has[id] != "":
			all = append(all, fmt.Sprintf("%s and %s are both %s", has[id], n.name, van.NodeName(id)))
		case n.m.Ready():
			has[id] = n.name
		}
	}
	return all
}

// TestQuestionsLeaveCapacity: processes that are refused receive their refusal, however often other processes ask
// questions, and although the timer is late.
func TestQuestionsLeaveCapacity(t *testing.T) {
	for _, question := range []string{"registered %d 10.9.9.9:%d", "ask %d 10.9.9.9:%d list"} {
		w := startWorld(t, 1, 1)
		sched, asked := w.node("sched"), 0
		ask := func() {
			asked++
			var meta van.Meta
			meta.Reset()
			meta.Control.Cmd, meta.Timestamp, meta.Body = van.Heartbeat, 0, fmt.Appendf(nil, "stepaf/1 "+question, 1<<20+asked, asked)
			if err := sched.m.Step(w.now, van.Empty, &meta); err != nil {
				t.Fatal(err)
			}
			w.take(sched)
		}
		for range 2 * maxRefusalsSent {
			ask()
		}
		var refused []*testNode
		for i := range 2 * maxRefusalsSent {
			n, _ := w.add(fmt.Sprint("x", i), testConfig(van.Worker, 1, 1, fmt.Sprintf("10.7.0.%d:9", i), -1))
			refused = append(refused, n)
		}
		w.deliver(1<<30, nil)
		for range 1000 {
			w.now += 5 * time.Millisecond
			ask()
			w.pass(0, true)
		}
		for _, n := range refused {
			if n.m.life.phase != failed {
				t.Errorf("%q: %s has not heard that it is refused", question, n.name)
			}
		}
	}
}

// TestQueuedRefusalIsDropped: a process whose refusal is still queued registers again, and is admitted: the refusal is
// dropped.
func TestQueuedRefusalIsDropped(t *testing.T) {
	w := startWorld(t, 1, 1)
	sched := w.node("sched")
	w.pass(time.Second, true)
	sched.m.alive.heard(w.now, van.WorkerID(0)) // so that x is not queued until the node is known to be alive
	for i := range maxRefusalsSent {
		sched.m.sched.refusals.refuse(w.now, &van.Node{Role: van.Worker, Hostname: "10.9.9.9", Port: 1 + i, AuxID: -1}, "test", "")
	}
	w.take(sched)
	x, err := w.add("x", testConfig(van.Worker, 1, 1, "10.0.0.7:9", -1))
	if err != nil {
		t.Fatal(err)
	}
	w.deliver(1<<30, nil)
	if n := len(sched.m.sched.refusals.queued); n != 1 {
		t.Fatalf("%d refusals wait, want 1", n)
	}
	w.node("w0").dead = true
	sched.m.PeerLost(w.now, van.WorkerID(0), errors.New("reset"))
	w.take(sched)
	x.m.PeerLost(w.now, van.SchedulerID, errors.New("reset"))
	x.m.PeerBack(w.now, van.SchedulerID)
	w.take(x)
	w.pass(3*time.Second, true)
	if !x.m.Ready() {
		t.Errorf("it has no place: %v", x.m.life.failure)
	}
}
