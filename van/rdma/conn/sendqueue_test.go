package conn

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

const eachStage = 2048

// stubDevice accepts work requests and does nothing.
type stubDevice struct {
	verbs.Device
	posted []verbs.SendWR
	fail   error
	take   int // number accepted by a failing Post
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

// counter counts finished records.
type counter int

func end(f Finished[*counter]) {
	f.End()
	*f.Note++
}

func newTestSendQueue(t *testing.T, depth, n int) (*SendQueue[*counter], *stubDevice) {
	t.Helper()
	real, _, _ := bare(t)
	dev := &stubDevice{Device: real}
	p, err := NewSendQueue[*counter](dev, []verbs.QP{stubQP{n: 0, inline: 300}, stubQP{n: 1, inline: 200}}, 5, depth, n, eachStage)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p, dev
}

// TestSendQueue uses a send queue at random and checks its counts.
func TestSendQueue(t *testing.T) {
	const depth, n = 20, 6
	p, dev := newTestSendQueue(t, depth, n)
	rng := rand.New(rand.NewPCG(1, 1))
	open := map[uint32]int{} // expected completions
	var sent, begun counter
	for range 5000 {
		if rng.IntN(2) == 0 {
			id, r, stage, ok := p.Begin()
			if !ok {
				continue
			}
			if len(stage) != eachStage || open[id] != 0 {
				t.Fatalf("record %d with %d bytes is begun, %d completions are to come", id, len(stage), open[id])
			}
			begun++
			r.Note = &sent
			for q := range p.QueuePairs {
				for range rng.IntN(2) {
					p.Add(id, q, &verbs.SendWR{Op: verbs.OpWrite})
				}
				if q == 0 || rng.IntN(2) == 0 {
					p.Add(id, q, &verbs.SendWR{Op: verbs.OpWriteImm, Flags: verbs.Signaled})
					open[id]++
				}
			}
			if rng.IntN(3) == 0 {
				if err := p.Post(); err != nil {
					t.Fatal(err)
				}
			}
			continue
		}
		if err := p.Post(); err != nil {
			t.Fatal(err)
		}
		for id, left := range open {
			if left == 0 {
				continue
			}
			f, last := p.Complete(id)
			if open[id]--; last != (open[id] == 0) {
				t.Fatalf("record %d: last %t with %d completions to come", id, last, open[id])
			}
			if last {
				end(f)
			}
			break
		}
		if _, ok := p.Complete(uint32(n + rng.IntN(100))); ok {
			t.Fatal("a record that does not exist completes")
		}
	}
	if err := p.Post(); err != nil {
		t.Fatal(err)
	}
	if err := p.Post(); err != nil {
		t.Fatal(err)
	}
	for id, left := range open {
		for range left {
			if f, last := p.Complete(id); last {
				end(f)
			}
		}
		if _, ok := p.Complete(id); ok {
			t.Error("a record completes twice")
		}
	}
	if !p.Idle() || sent != begun {
		t.Errorf("idle %t; Done %d times, %d were begun", p.Idle(), sent, begun)
	}
	for q, room := range p.available {
		if room != depth {
			t.Errorf("room %d on queue pair %d, want %d", room, q, depth)
		}
	}
	for _, wr := range dev.posted {
		if q, id := RecordOf(wr.ID); wr.QP != p.QueuePairs[q].Handle() || id >= n || wr.ID>>32 != 5 {
			t.Fatalf("work request %#x on queue pair %d", wr.ID, wr.QP)
		}
	}
}

func TestSendQueueInline(t *testing.T) {
	p, _ := newTestSendQueue(t, 20, 2)
	_, _, stage, _ := p.Begin()
	if wr := p.Staged(&verbs.SendWR{}, stage[:200]); wr.Flags&verbs.Inline == 0 || wr.LocalAddr != backend.Bytes(stage).Addr() || wr.Len != 200 {
		t.Errorf("%+v, want 200 bytes inline", wr)
	}
	// Inline data must not exceed what all queue pairs accept.
	if wr := p.Staged(&verbs.SendWR{}, stage[:201]); wr.Flags&verbs.Inline != 0 || wr.LKey != p.stage.MR.LKey() {
		t.Errorf("%+v, want 201 bytes with a key", wr)
	}
}

// TestSendQueueBroken lets a post fail: no record begins any more, and each ends once.
func TestSendQueueBroken(t *testing.T) {
	for _, s := range []struct {
		take int
		err  error
	}{{0, errTest}, {1, errTest}, {1, nil}} {
		p, dev := newTestSendQueue(t, 20, 4)
		var sent counter
		for range 2 {
			id, r, _, ok := p.Begin()
			if !ok {
				t.Fatal("no record")
			}
			r.Note = &sent
			p.Add(id, 0, &verbs.SendWR{Op: verbs.OpWriteImm, Flags: verbs.Signaled})
		}
		dev.take, dev.fail = s.take, s.err
		if s.err == nil {
			p.Device = shortDevice{dev}
		}
		if err := p.Post(); err == nil || s.err != nil && !errors.Is(err, s.err) {
			t.Errorf("post: %v, want an error", err)
		}
		if _, _, _, ok := p.Begin(); ok {
			t.Error("a broken queue begins a record")
		}
		all := p.FinishAll()
		for i := range all {
			end(all[i])
		}
		for i := range p.FinishAll() {
			t.Errorf("record %d is finished twice", i)
		}
		if sent != 2 {
			t.Errorf("Done %d times, want 2", sent)
		}
	}
}

// shortDevice accepts one work request and returns no error.
type shortDevice struct{ *stubDevice }

func (d shortDevice) Post([]verbs.SendWR) (int, error) { return 1, nil }
