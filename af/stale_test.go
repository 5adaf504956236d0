package af_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/testcluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/vantest"
)

// take waits for the next batch.
func take(t testing.TB, batches <-chan af.Batch) af.Batch {
	t.Helper()
	select {
	case b := <-batches:
		return b
	case <-time.After(20 * time.Second):
		t.Fatal("no batch comes")
		panic("unreachable")
	}
}

// replace starts another process, as it were, in the place of a lost worker, and returns
// when server has it.
func replace(t testing.TB, c *testcluster.Cluster, rank int) *postoffice.Node {
	t.Helper()
	heard, scheduler := peer(t, c.Servers[0], van.WorkerID(rank)), peer(t, c.Scheduler, van.WorkerID(rank))
	c.Workers[rank].Close()
	expect(t, heard, false)
	expect(t, scheduler, false) // else it refuses the other
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	n, err := c.Join(ctx, "worker", rank, nil)
	if err != nil {
		t.Fatal(err)
	}
	expect(t, heard, true)
	return n
}

// TestStaleAnswer: a server answers the batch of a worker that was killed and replaced
// meanwhile. The one in its place, which has asked for the same, does not get that
// answer; the server is told whose it was.
func TestStaleAnswer(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		c := testcluster.Start(t, o)
		batches := make(chan af.Batch, 4)
		serve(t, c.Servers[0], func(b af.Batch) { batches <- b })
		ask(t, newWorker(t, c.Workers[0]), 1, "OLD-DATA")
		old := take(t, batches)

		w := newWorker(t, replace(t, c, 0))
		h, pulls := ask(t, w, 1, "NEW-DATA")
		fresh := take(t, batches)
		vantest.Fails(t, echo(old), van.ErrPeerLost, van.NodeName(van.WorkerID(0)), "the one that asked")
		if err := echo(fresh); err != nil {
			t.Error(err)
		}
		if err := h.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := string(pulls[0].Val.Bytes()); got != "NEW-DATA" {
			t.Errorf("pulled %q, want its own data", got)
		}
	}, testcluster.InProc, testcluster.TCP, testcluster.Unix, testcluster.SHM)
}

// TestLateLoss: a server notices late that a worker was lost, when the one in its place has
// begun a batch. What the lost one had begun is given up, that batch is not.
func TestLateLoss(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Over: testcluster.InProc, Wrap: func(_ string, _ int, f van.Factory) van.Factory {
		return func(o van.Options) (van.Van, error) {
			v, err := f(o)
			return aloneTold{v}, err
		}
	}})
	id, scheduler := van.WorkerID(0), peer(t, c.Scheduler, van.WorkerID(0))
	lost, come := make(chan struct{}), make(chan struct{})
	unblock := sync.OnceFunc(func() { close(come) })
	defer unblock()
	t.Cleanup(c.Servers[0].OnPeer(func(i int, up bool, _ error) {
		if i == id && !up {
			close(lost)
			<-come
		}
	}))
	batches := make(chan af.Batch, 1)
	s := serve(t, c.Servers[0], func(b af.Batch) { batches <- b })
	begun := func(want int) func() bool {
		return func() bool { n, _ := af.OpenBatches(s, id); return n == want }
	}
	send := func(n *postoffice.Node, ts int32, flag van.BatchFlag) {
		t.Helper()
		if err := n.Send(rawPush(ts, flag, []byte("x"))); err != nil {
			t.Fatal(err)
		}
	}
	send(c.Workers[0], 1, van.BatchStart)
	eventually(t, "a batch of the worker", begun(1))
	c.Workers[0].Close()
	<-lost
	expect(t, scheduler, false)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	n, err := c.Join(ctx, "worker", 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	send(n, 7, van.BatchStart)
	eventually(t, "a batch of the one in its place", begun(2))
	unblock()
	eventually(t, "the end of the lost one's", begun(1))
	send(n, 8, van.BatchEnd)
	if b := take(t, batches); len(b.Pushes()) != 2 {
		t.Errorf("a batch of %d tensors, want 2", len(b.Pushes()))
	}
}

// aloneTold is a van that tells of losses on goroutines of their own: a node that takes long
// for it keeps no other one from hearing of it.
type aloneTold struct{ van.Van }

func (v aloneTold) Unwrap() van.Van { return v.Van }

func (v aloneTold) WatchPeers(f func(int, bool, error)) {
	v.Van.(van.PeerWatcher).WatchPeers(func(id int, up bool, cause error) { go f(id, up, cause) })
}
