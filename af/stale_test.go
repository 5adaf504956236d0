package af_test

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
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

// replace starts another node as the replacement process of a lost worker, and returns when server knows it.
func replace(t testing.TB, c *testcluster.Cluster, rank int) *postoffice.Node {
	t.Helper()
	heard := peer(t, c.Servers[0], van.WorkerID(rank))
	c.Workers[rank].Close()
	expect(t, heard, false)
	testcluster.Lost(t, c.Scheduler, van.WorkerID(rank))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	n, err := c.Join(ctx, "worker", rank, nil)
	if err != nil {
		t.Fatal(err)
	}
	expect(t, heard, true)
	return n
}

// TestStaleAnswer: a server answers the batch of a worker that was killed and replaced meanwhile. The replacement
// process, which has made the same request, does not get that answer; the server's error names the worker.
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
		vantest.Fails(t, echo(old), van.ErrPeerLost, van.NodeName(van.WorkerID(0)), "the process that sent the request has been replaced")
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

// TestLateAnswer: a server's answer to a canceled call is not written to the pull tensor, which is the caller's
// again. This includes transports that write answers there themselves.
func TestLateAnswer(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		c := testcluster.Start(t, o)
		batches := make(chan af.Batch, 4)
		serve(t, c.Servers[0], func(b af.Batch) { batches <- b })
		w := newWorker(t, c.Workers[0])
		room := make([]byte, 1<<20)
		pull := []af.KeyTensor{{Key: 2, Val: bytesOf(t, room)}}
		h, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: bytesOf(t, []byte{1})}}, [][]af.KeyTensor{pull})
		if err != nil {
			t.Fatal(err)
		}
		b := take(t, batches)
		vantest.Fails(t, cluster.Call(h).Customer().Wait(t.Context(), h.Timestamp(), time.Millisecond), van.ErrTimeout)
		again := bytes.Repeat([]byte{1}, len(room))
		copy(room, again)
		before := testcluster.Stats(c.Workers[0]).ReceivedMessages
		if err := b.Respond([]af.KeyTensor{{Key: 2, Val: bytesOf(t, bytes.Repeat([]byte{2}, len(room)))}}); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the answer comes", func() bool { return testcluster.Stats(c.Workers[0]).ReceivedMessages > before })
		if !bytes.Equal(room, again) {
			t.Error("the late answer was written to what is the caller's again")
		}
	}, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}
