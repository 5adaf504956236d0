package tests

// More of the original's defects: barriers, batches, loss and replacement.

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	core "github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// One pull at each of several servers is a whole batch.
func TestPullOnly(t *testing.T) {
	for _, pulls := range []int{1, 2} {
		for _, servers := range []int{1, 2, 3} {
			t.Run(fmt.Sprintf("%d pulls %d servers", pulls, servers), func(t *testing.T) {
				c := newNodes(t, 1, servers, 1)
				c.o.Over = testcluster.InProc
				c.start()
				c.serveAll(func(b af.Batch) {
					var out []af.KeyTensor
					for _, p := range b.Pulls() {
						out = append(out, af.KeyTensor{Key: p.Key, Val: tensor(t, []byte{byte(p.Key)})})
					}
					if err := b.Respond(out, af.ByKey); err != nil {
						t.Error(err)
					}
				})
				w := c.tensorWorker(0)
				var pull []af.KeyTensor
				for i := range pulls * servers {
					pull = append(pull, af.KeyTensor{Key: uint64(10 + i%pulls), Val: tensor(t, make([]byte, 1))})
				}
				h, err := w.PushPull(nil, testcluster.PerServer(pull, servers))
				if err != nil {
					t.Fatal(err)
				}
				if err := core.Call(h).Customer().Wait(t.Context(), h.Timestamp(), 10*time.Second); err != nil {
					t.Fatal(err)
				}
				for i := range pull {
					if got := pull[i].Val.Bytes()[0]; uint64(got) != pull[i].Key {
						t.Errorf("pull %d has %d, want %d", i, got, pull[i].Key)
					}
				}
			})
		}
	}
}

// An instance barrier over groups holds until the last instance has come.
func TestInstanceBarrierOfGroups(t *testing.T) {
	c := newNodes(t, 2, 1, 2)
	c.o.Over = testcluster.InProc
	c.start()
	var came atomic.Int32
	last := make(chan struct{})
	var wg sync.WaitGroup
	members := append(slices.Clone(c.Workers), c.Servers...)
	for i, n := range members {
		wg.Go(func() {
			if i == len(members)-1 {
				<-last
			}
			came.Add(1)
			if err := n.InstanceBarrier(t.Context(), 0, van.ServerGroup|van.WorkerGroup); err != nil {
				t.Error(err)
			}
			if got := int(came.Load()); got != len(members) {
				t.Errorf("%s was released when %d of %d had come", n.Name(), got, len(members))
			}
		})
	}
	vantest.Eventually(t, 20*time.Second, "all but the last have called the barrier", func() bool { return int(came.Load()) >= len(members)-1 })
	close(last)
	wg.Wait()
}

// The scheduler's death ends barriers and Finalize with an error, and leaves
// requests between workers and servers alone.
func TestSchedulerDies(t *testing.T) {
	c := newNodes(t, 1, 1, 1).start()
	c.serveAll(c.echo)
	w := c.tensorWorker(0)
	failed := make(chan error, 1)
	go func() { failed <- c.Workers[0].InstanceBarrier(t.Context(), 0, van.WorkerGroup|van.ServerGroup) }()
	c.Scheduler.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	select {
	case err := <-failed:
		if !errors.Is(err, van.ErrPeerLost) {
			t.Errorf("barrier: %v, want the loss of the scheduler", err)
		}
	case <-ctx.Done():
		t.Fatal("the barrier did not notice that the scheduler is gone")
	}
	if err := c.roundTrip(w, []byte("x")); err != nil {
		t.Errorf("request without scheduler: %v", err)
	}
	for _, n := range []*postoffice.Node{c.Workers[0], c.Servers[0]} {
		if err := n.Shutdown(ctx); !errors.Is(err, van.ErrPeerLost) {
			t.Errorf("%s: finalize: %v, want the loss of the scheduler", n.Name(), err)
		}
	}
}

// Starting and stopping works forty times in a row, and leaves nothing.
func TestFortyClusters(t *testing.T) {
	runtime.GC()
	before := runtime.NumGoroutine()
	for range 40 {
		c := newNodes(t, 2, 1, 1).start()
		c.serveAll(c.echo)
		if err := c.roundTrip(c.tensorWorker(0), []byte("x")); err != nil {
			t.Fatal(err)
		}
		c.Finalize(t)
		if t.Failed() {
			return
		}
	}
	for deadline := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > before; runtime.Gosched() {
		if time.Now().After(deadline) {
			buf := make([]byte, 1<<20)
			t.Fatalf("%d goroutines before, %d after:\n%s", before, runtime.NumGoroutine(), buf[:runtime.Stack(buf, true)])
		}
	}
}

// Resending with timeouts that are too short, and loss, ends in good order.
func TestResendShortTimeout(t *testing.T) {
	c := newNodes(t, 2, 2, 1)
	c.set = func(cfg *postoffice.Config) {
		cfg.Resend, cfg.ResendTimeout, cfg.DropMsg = true, 100*time.Millisecond, 10
	}
	c.start()
	c.serveAll(c.echo)
	var wg sync.WaitGroup
	for i := range c.Workers {
		w := c.tensorWorker(i)
		wg.Go(func() {
			for k := range 30 {
				if err := c.roundTrip(w, binary.LittleEndian.AppendUint32(nil, uint32(k))); err != nil {
					t.Error(err)
				}
			}
			if err := c.Workers[i].InstanceBarrier(t.Context(), 0, van.WorkerGroup); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	c.Finalize(t)
}

// A push outside a batch and a push that is too large for its registered buffer are dropped
// with a log line. The worker of the second push gets the error. Other requests are served.
func TestRequestsThatMakeNoSense(t *testing.T) {
	c := newNodes(t, 1, 1, 1).start()
	s, err := af.NewServer(c.Servers[0], af.ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	buffer := make([]byte, 8)
	if err := s.RegisterRecvTensor(tensor(t, buffer), []int{0}, []uint64{7}); err != nil {
		t.Fatal(err)
	}
	if err := s.Handle(c.echo); err != nil {
		t.Fatal(err)
	}
	w := c.tensorWorker(0)

	key := binary.LittleEndian.AppendUint64(nil, 1)
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Request, m.Push, m.AppID, m.CustomerID, m.Timestamp = int(c.Servers[0].ID()), true, true, 0, 0, 1000
	m.Head, m.Key, m.ValLen, m.IsTensor, m.Dim, m.Shape[0] = van.BatchMiddle, 1, 1, true, 1, 1
	m.DataTypes = []van.DataType{van.TypeUint64, van.TypeOther}
	m.Frames, m.Keys, m.Vals, m.DataSize = 2, backend.Bytes(key), backend.Bytes([]byte("x")), 9
	if err := (*core.Node)(c.Workers[0]).App().Send(m); err != nil {
		t.Fatal(err)
	}
	c.log.Wait(t, "continues none of the 0 open batches")

	push := func(n int, limit time.Duration) error {
		h, err := w.PushPull([]af.KeyTensor{{Key: 7, Val: tensor(t, bytes.Repeat([]byte{byte(n)}, n))}}, [][]af.KeyTensor{{{Key: 2, Val: tensor(t, make([]byte, n))}}})
		if err != nil {
			return err
		}
		return core.Call(h).Customer().Wait(t.Context(), h.Timestamp(), limit)
	}
	if err := push(9, 20*time.Second); !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), "pushed 9 bytes under key 7") {
		t.Errorf("push larger than its buffer: %v, want an error that says so", err)
	}
	c.log.Wait(t, "the registered receive buffer has 8")
	for _, n := range []int{8, 5} {
		if err := push(n, 20*time.Second); err != nil || buffer[n-1] != byte(n) {
			t.Errorf("push of %d bytes: %v, buffer %v", n, err, buffer)
		}
	}
}

// A slow handler keeps neither barriers nor other workers waiting.
func TestSlowHandler(t *testing.T) {
	c := newNodes(t, 2, 1, 1).start()
	release, entered := make(chan struct{}), make(chan struct{})
	c.serveAll(func(b af.Batch) {
		if b.Worker() == 0 {
			close(entered)
			<-release
		}
		c.echo(b)
	})
	slow, quick := c.tensorWorker(0), c.tensorWorker(1)
	h, _, err := c.request(slow, []byte("slow"))
	if err != nil {
		t.Fatal(err)
	}
	<-entered
	for range 20 {
		if err := c.roundTrip(quick, []byte("quick")); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	for _, n := range append(slices.Clone(c.Workers), c.Servers[0]) {
		wg.Go(func() {
			if err := n.InstanceBarrier(t.Context(), 0, van.ServerGroup|van.WorkerGroup); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	close(release)
	if err := h.Wait(t.Context()); err != nil {
		t.Error(err)
	}
}

// A pull request does not carry the pull tensor.
func TestPullRequestsAreSmall(t *testing.T) {
	c := newNodes(t, 1, 1, 1).start()
	out := make([]byte, 1<<20)
	c.serveAll(func(b af.Batch) {
		if err := b.Respond([]af.KeyTensor{{Key: 2, Val: tensor(t, out)}}, af.ByKey); err != nil {
			t.Error(err)
		}
	})
	w := c.tensorWorker(0)
	before := testcluster.Stats(c.Workers[0]).SentBytes
	h, err := w.PushPull(nil, [][]af.KeyTensor{{{Key: 2, Val: tensor(t, make([]byte, len(out)))}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if sent := testcluster.Stats(c.Workers[0]).SentBytes - before; sent > 4096 {
		t.Errorf("a pull of %d bytes sent %d", len(out), sent)
	}
}

// A node that does not fit is refused at once; the cluster works on.
func TestLateJoiner(t *testing.T) {
	c := newNodes(t, 1, 1, 1).start()
	c.serveAll(c.echo)
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
	defer cancel()
	n, err := c.Join(ctx, "worker", 0, nil)
	if err == nil {
		n.Close()
		t.Fatal("a second worker of a cluster with one was accepted")
	}
	if errors.Is(err, van.ErrTimeout) {
		t.Errorf("got %v, want the reason", err)
	}
	if err := c.roundTrip(c.tensorWorker(0), []byte("x")); err != nil {
		t.Error(err)
	}
	c.Finalize(t)
}

// A server that is replaced twice is one that works.
func TestRecoveryTwice(t *testing.T) {
	c := newNodes(t, 1, 1, 1)
	c.o.Over = testcluster.InProc
	c.start()
	w := c.tensorWorker(0)
	for range 2 {
		gone, back := make(chan struct{}, 4), make(chan struct{}, 4)
		stop := c.Workers[0].OnPeer(func(id postoffice.NodeID, up bool, _ error) {
			if up {
				back <- struct{}{}
			} else {
				gone <- struct{}{}
			}
		})
		c.Servers[0].Close()
		<-gone
		ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
		testcluster.Lost(t, c.Scheduler, van.ServerID(0))
		n, err := c.Join(ctx, "server", 0, nil)
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		c.Servers[0] = n
		if !n.IsRecovery() {
			t.Error("the new server does not know that it replaces one")
		}
		nodetest.Server(t, n, c.echo)
		<-back
		stop()
		if err := c.roundTrip(w, []byte("again")); err != nil {
			t.Fatal(err)
		}
	}
	c.Finalize(t)
}

// Several instances of a group live in one process, each for itself.
func TestInstancesInOneProcess(t *testing.T) {
	c := inProcess(t, 1, 1, 2)
	var exited [2]atomic.Int32
	for i, n := range c.Workers {
		(*core.Node)(n).App().OnExit(func() { exited[i].Add(1) })
		if err := c.roundTrip(c.tensorWorker(i), []byte{byte(i)}); err != nil {
			t.Errorf("instance %d: %v", i, err)
		}
		if n.Topology().Instance != i || n.Topology().NumServers != 1 {
			t.Errorf("instance %d calls itself %d, with %d servers", i, n.Topology().Instance, n.Topology().NumServers)
		}
	}
	c.Finalize(t)
	for i := range exited {
		if n := exited[i].Load(); n != 1 {
			t.Errorf("exit function of instance %d ran %d times", i, n)
		}
	}
}

// More workers than an int32 mask has bits.
func TestFortyWorkers(t *testing.T) {
	c := inProcess(t, 40, 1, 1)
	var wg sync.WaitGroup
	for i := range c.Workers {
		w := c.tensorWorker(i)
		wg.Go(func() {
			if err := c.roundTrip(w, []byte{byte(i)}); err != nil {
				t.Errorf("worker %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	c.Finalize(t)
}

// If DMLC_PORT is in use, a node takes another port and announces that one.
func TestPortTaken(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	taken := l.Addr().(*net.TCPAddr).Port
	c := newNodes(t, 1, 1, 1)
	c.set = func(cfg *postoffice.Config) {
		if cfg.Role == "server" {
			cfg.Port = taken
		}
	}
	c.start()
	c.serveAll(c.echo)
	c.log.Wait(t, "DMLC_PORT is in use: another port is used")
	if err := c.roundTrip(c.tensorWorker(0), []byte("x")); err != nil {
		t.Error(err)
	}
	c.Finalize(t)
}
