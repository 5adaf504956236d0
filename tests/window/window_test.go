// Package window tests windows between real processes, one of which is killed.
package window

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/collective"
	"github.com/stepaf/stepaf-go/af/window"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
)

const size = 4 << 20

func TestMain(m *testing.M) { nodetest.Main(m, child) }

// child is rank 1, which fills the window of rank 0 with the number of the round, and goes on when that
// has been seen.
func child(c *nodetest.Child, _ string) error {
	c.Go(func(ctx context.Context) error {
		_, w, err := open(ctx, c.Node)
		if err != nil {
			return err
		}
		c.Say("begun")
		b := make([]byte, size)
		t, err := af.FromBytes(b, af.Uint8, size)
		if err != nil {
			return err
		}
		for round := byte(1); ; round++ {
			for i := range b {
				b[i] = round
			}
			err := w.PutSignal(ctx, 0, 0, t, 0)
			if err == nil {
				err = w.WaitSignal(ctx, 0, 0)
			}
			if err != nil {
				return err
			}
		}
	})
	return nil
}

func open(ctx context.Context, n *postoffice.Node) (*collective.Comm, *window.Window, error) {
	c, err := collective.New(ctx, n, collective.Options{Ranks: []int{0, 1}, Timeout: 60 * time.Second})
	if err != nil {
		return nil, nil, err
	}
	w, err := window.Open(ctx, c, window.Options{Size: size, Signals: 1})
	return c, w, err
}

// TestKilled kills a rank while it puts, at several moments: signalled puts are whole, waiting calls fail with the
// name of the lost rank, nothing is written once the window is closed, and a new window works with the replacement
// process.
func TestKilled(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		var p *nodetest.Process
		o.Workers, o.Elsewhere = 2, nodetest.Elsewhere(t, "worker", 1, "puts", &p)
		c := testcluster.Start(t, o)
		comm, w, err := open(t.Context(), c.Workers[0])
		if err != nil {
			t.Fatal(err)
		}
		for round := range 3 {
			p.Expect("begun")
			victim := p
			timer := time.AfterFunc(time.Duration(20*round*round)*time.Millisecond, func() { _ = victim.Signal(syscall.SIGKILL) })
			for seq := byte(1); ; seq++ {
				if err = w.WaitSignal(t.Context(), 1, 0); err != nil {
					break
				}
				if b := w.Bytes(); b[0] != seq || !bytes.Equal(b[1:], b[:size-1]) {
					t.Fatalf("round %d, put %d: the data is not whole", round, seq)
				}
				if err = w.Signal(t.Context(), 1, 0); err != nil {
					break
				}
			}
			timer.Stop()
			if !errors.Is(err, van.ErrPeerLost) || !strings.Contains(err.Error(), "worker 1 (id 11)") {
				t.Fatalf("round %d: %v, want ErrPeerLost of worker 1", round, err)
			}
			victim.Ended()
			if err := w.Close(); err != nil && !errors.Is(err, van.ErrPeerLost) { // a signal may be lost before the communicator knows of the loss
				t.Errorf("round %d: close: %v", round, err)
			}
			old := w
			before := bytes.Clone(old.Bytes())
			testcluster.Lost(t, c.Scheduler, van.WorkerID(1))
			p = nodetest.Spawn(t, c, "worker", 1, "puts")
			if err := comm.Rebuild(t.Context()); err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
			if w, err = window.Open(t.Context(), comm, window.Options{Size: size, Signals: 1}); err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
			if !bytes.Equal(old.Bytes(), before) {
				t.Errorf("round %d: the closed window's memory was written", round)
			}
		}
		p.Expect("begun")
		if err := w.WaitSignal(t.Context(), 1, 0); err != nil || w.Bytes()[size-1] != 1 {
			t.Errorf("the last process: %v", err)
		}
	}, testcluster.TCP, testcluster.SHM)
}
