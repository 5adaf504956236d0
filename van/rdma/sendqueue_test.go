package rdma

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// stubDevice takes work requests and does nothing.
type stubDevice struct {
	verbs.Device
	posted []verbs.SendWR
	fail   error
	take   int // of a failing Post
}

func (d *stubDevice) Post(wrs []verbs.SendWR) (int, error) {
	if d.fail != nil {
		d.posted = append(d.posted, wrs[:d.take]...)
		return d.take, d.fail
	}
	d.posted = append(d.posted, wrs...)
	return len(wrs), nil
}

type stubQP struct {
	verbs.QP
	n      int
	inline int
}

func (q stubQP) Handle() verbs.Handle { return verbs.Handle(q.n + 1) }
func (q stubQP) MaxInline() int       { return q.inline }

type counter int

func (c *counter) Sent() { *c++ }

func newTestPipe(t *testing.T, depth, n int) (*sendQueue, *stubDevice) {
	t.Helper()
	real, _, _ := bare(t)
	dev := &stubDevice{Device: real}
	p, err := newSendQueue(dev, []verbs.QP{stubQP{n: 0, inline: 300}, stubQP{n: 1, inline: 200}}, 5, depth, n, stageEach)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.close(); err != nil {
			t.Error(err)
		}
	})
	return p, dev
}

// TestPipe uses a pipe at random and compares its accounts.
func TestPipe(t *testing.T) {
	const depth, n = 20, 6
	p, dev := newTestPipe(t, depth, n)
	rng := rand.New(rand.NewPCG(1, 1))
	open := map[uint32]int{} // completions to come
	var sent, begun counter
	for range 5000 {
		if rng.IntN(2) == 0 {
			id, r, stage, ok := p.begin()
			if !ok {
				continue
			}
			if len(stage) != stageEach || open[id] != 0 {
				t.Fatalf("record %d with %d bytes is begun, %d completions are to come", id, len(stage), open[id])
			}
			begun++
			r.done = &sent
			for q := range p.qps {
				for range rng.IntN(2) {
					p.add(id, q, verbs.SendWR{Op: verbs.OpWrite})
				}
				if q == 0 || rng.IntN(2) == 0 {
					p.add(id, q, verbs.SendWR{Op: verbs.OpWriteImm, Flags: verbs.Signaled})
					open[id]++
				}
			}
			if rng.IntN(3) == 0 {
				if err := p.post(); err != nil {
					t.Fatal(err)
				}
			}
			continue
		}
		if err := p.post(); err != nil {
			t.Fatal(err)
		}
		for id, left := range open {
			if left == 0 {
				continue
			}
			f, last := p.complete(id)
			if open[id]--; last != (open[id] == 0) {
				t.Fatalf("record %d: last %t with %d completions to come", id, last, open[id])
			}
			if last {
				f.end()
			}
			break
		}
		if _, ok := p.complete(uint32(n + rng.IntN(100))); ok {
			t.Fatal("a record that does not exist completes")
		}
	}
	if err := p.post(); err != nil {
		t.Fatal(err)
	}
	if err := p.post(); err != nil {
		t.Fatal(err)
	}
	for id, left := range open {
		for range left {
			if f, last := p.complete(id); last {
				f.end()
			}
		}
		if _, ok := p.complete(id); ok {
			t.Error("a record completes twice")
		}
	}
	if !p.idle() || sent != begun {
		t.Errorf("idle %t; Done %d times, %d were begun", p.idle(), sent, begun)
	}
	for q, room := range p.room {
		if room != depth {
			t.Errorf("room %d on queue pair %d, want %d", room, q, depth)
		}
	}
	for _, wr := range dev.posted {
		if q, id := recordOf(wr.ID); wr.QP != p.qps[q].Handle() || id >= n || wr.ID>>32 != 5 {
			t.Fatalf("work request %#x on queue pair %d", wr.ID, wr.QP)
		}
	}
}

func TestPipeInline(t *testing.T) {
	p, _ := newTestPipe(t, 20, 2)
	_, _, stage, _ := p.begin()
	if wr := p.staged(verbs.SendWR{}, stage[:200]); wr.Flags&verbs.Inline == 0 || wr.LocalAddr != backend.Bytes(stage).Addr() || wr.Len != 200 {
		t.Errorf("%+v, want 200 bytes inline", wr)
	}
	// No queue pair may be asked for more than it takes.
	if wr := p.staged(verbs.SendWR{}, stage[:201]); wr.Flags&verbs.Inline != 0 || wr.LKey != p.stage.mr.LKey() {
		t.Errorf("%+v, want 201 bytes with a key", wr)
	}
}

// TestPipeBroken lets a post fail: nothing begins any more, and each record ends once.
func TestPipeBroken(t *testing.T) {
	for _, s := range []struct {
		take int
		err  error
	}{{0, errTest}, {1, errTest}, {1, nil}} {
		p, dev := newTestPipe(t, 20, 4)
		var sent counter
		for range 2 {
			id, r, _, ok := p.begin()
			if !ok {
				t.Fatal("no record")
			}
			r.done = &sent
			p.add(id, 0, verbs.SendWR{Op: verbs.OpWriteImm, Flags: verbs.Signaled})
		}
		dev.take, dev.fail = s.take, s.err
		if s.err == nil {
			p.dev = shortDevice{dev}
		}
		if err := p.post(); err == nil || s.err != nil && !errors.Is(err, s.err) {
			t.Errorf("post: %v, want an error", err)
		}
		if _, _, _, ok := p.begin(); ok {
			t.Error("a broken pipe begins a record")
		}
		all := p.abandon()
		for i := range all {
			all[i].end()
		}
		for i := range p.abandon() {
			t.Errorf("record %d is abandoned twice", i)
		}
		if sent != 2 {
			t.Errorf("Done %d times, want 2", sent)
		}
	}
}

// shortDevice takes one work request and says nothing.
type shortDevice struct{ *stubDevice }

func (d shortDevice) Post([]verbs.SendWR) (int, error) { return 1, nil }
