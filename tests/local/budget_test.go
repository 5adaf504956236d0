package local

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// serveSlowly makes a server that answers the first batch of worker 0 only when worker 1
// has pushed under the key goOn. It says when it does not read a peer any more.
func serveSlowly(c *nodetest.Child) error {
	c.Go(func(ctx context.Context) error {
		for tick := time.Tick(time.Millisecond); testcluster.Stats(c.Node).PausedReads == 0; {
			select {
			case <-tick:
			case <-ctx.Done():
				return nil
			}
		}
		c.Say("paused")
		return nil
	})
	release := make(chan struct{})
	first := true
	return nodetest.Serve(c.Node, func(b af.Batch) {
		switch {
		case b.Pushes()[0].Key == goOn:
			close(release)
		case b.Worker() == 0 && first:
			first = false
			<-release // worker 1's handler is called meanwhile
		}
		if err := nodetest.Echo(b); err != nil {
			c.Fail(err)
		}
	})
}

const goOn = 99

// TestReceiveBudget: a server whose handler is stuck queues no more of its worker's
// pushes than its budget allows. It serves another worker meanwhile, and in the end
// everything.
func TestReceiveBudget(t *testing.T) {
	const pushes, each, budget = 1500, 1 << 20, 256 << 20
	var p *nodetest.Process
	var log nodetest.Text
	c := testcluster.Start(t, testcluster.Options{Over: testcluster.SHM, Workers: 2, Log: log.Logger(slog.LevelWarn),
		Set:       func(c *postoffice.Config) { c.SendBudget = 4 << 30 },
		Elsewhere: nodetest.Elsewhere(t, "server", 0, slow, &p)})
	p.Ready()
	w, other := nodetest.Worker(t, c.Workers[0]), nodetest.Worker(t, c.Workers[1])
	if err := roundTrip(other, 1, each); err != nil {
		t.Fatal(err)
	}
	before := nodetest.Resident(t, p.PID())
	x := make([]byte, each)
	fill(x, 1)
	val, err := af.FromSlice(x)
	if err != nil {
		t.Fatal(err)
	}
	push := []af.KeyTensor{{Key: 1, Val: val}}
	handles := make([]af.Call, pushes)
	for i := range handles {
		if handles[i], err = w.PushPull(push, nil); err != nil {
			t.Fatalf("push %d: %v", i, err)
		}
	}
	most := 0
	look := func() {
		if err := roundTrip(other, 2, each); err != nil {
			t.Fatal(err)
		}
		most = max(most, nodetest.Resident(t, p.PID())-before)
	}
	p.Expect("paused")
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); { // in which it could go on
		look()
	}
	if most > budget+64<<20 {
		t.Errorf("the server has grown by %d MiB, want %d and a few more", most>>20, budget>>20)
	}
	h, err := other.PushPull([]af.KeyTensor{{Key: goOn, Val: val}}, nil)
	if err == nil {
		err = h.Wait(context.Background())
	}
	if err != nil {
		t.Fatal(err)
	}
	all := nodetest.Within(t, 2*time.Minute) // 1.5 GiB of a machine that does other things
	for i, h := range handles {
		if err := h.Wait(all); err != nil {
			t.Fatalf("push %d: %v", i, err)
		}
	}
	p.End()
}

// TestSendBudget: pushes to a server that has been stopped fail, with an error that names
// it, before the worker has grown by much more than its budget.
func TestSendBudget(t *testing.T) {
	const budget = 64 << 20
	c, p, w := pair(t, testcluster.Options{Set: func(c *postoffice.Config) {
		c.SendBudget = budget
		c.HeartbeatTimeout = 5 * time.Minute // a server that is stopped for 12 s is dead otherwise
	}}, nil)
	if err := roundTrip(w, 1, 1000); err != nil {
		t.Fatal(err)
	}
	if err := p.Stop(); err != nil {
		t.Fatal(err)
	}
	val, err := af.FromSlice(make([]byte, 2000))
	if err != nil {
		t.Fatal(err)
	}
	push := []af.KeyTensor{{Key: 1, Val: val}}
	before := nodetest.Resident(t, os.Getpid())
	sent, last, refused := 0, af.Call{}, af.Call{}
	for after := 0; sent < 400_000 && after < 50_000; sent++ {
		if refused != (af.Call{}) {
			after++
		}
		h, err := w.PushPull(push, nil)
		if err != nil {
			t.Fatal(err)
		}
		if refused == (af.Call{}) && testcluster.Stats(c.Workers[0]).RefusedSends > 0 {
			refused = h
			if err := refused.Wait(context.Background()); !errors.Is(err, van.ErrQueueFull) || !strings.Contains(err.Error(), "server 0") {
				t.Errorf("%v, want %v that names the server", err, van.ErrQueueFull)
			}
		} else if _, _, _, err := cluster.Call(h).Customer().Batch(h.Timestamp()); err == nil {
			last = h // it was taken
		}
	}
	if refused == (af.Call{}) {
		t.Fatalf("%d pushes were taken", sent)
	}
	nodetest.Settle()
	if grown := nodetest.Resident(t, os.Getpid()) - before; grown > budget+128<<20 && !vantest.Race {
		t.Errorf("the worker has grown by %d MiB, want %d and a few more", grown>>20, budget>>20)
	}
	if err := p.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	// Accepted pushes are answered first, which takes time on a busy machine.
	nodetest.GoesOn(t, 20*time.Second, "what was taken is answered", func() uint64 { return testcluster.Stats(c.Workers[0]).ReceivedMessages }, func() bool {
		_, answered, known, _ := cluster.Call(last).Customer().Batch(last.Timestamp())
		return answered || !known // finished, and released since no call waits for it
	})
	if err := roundTrip(w, 2, 1000); err != nil {
		t.Fatal(err)
	}
}
