package tests

// Each test here shows that a defect of the original library is not ours. The
// table in docs/design/promises.md names them.

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
	"github.com/stepaf/stepaf-go/af"
	core "github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// Requests leave nothing behind, neither in the Go heap nor in C's.
func TestMemoryStaysFlat(t *testing.T) {
	c := newNodes(t, 1, 1, 1).start()
	c.serveAll(c.echo)
	w := c.tensorWorker(0)
	x := make([]byte, 256<<10)
	rounds := func(n int) {
		for range n {
			if err := c.roundTrip(w, x); err != nil {
				t.Fatal(err)
			}
		}
	}
	rounds(200)
	heapBefore, rssBefore := heap(), nodetest.Resident(t, os.Getpid())
	rounds(1000) // 500 MiB in values: the original would keep all of it
	heapAfter, rssAfter := heap(), nodetest.Resident(t, os.Getpid())
	if heapAfter > heapBefore+4<<20 {
		t.Errorf("heap grew from %d to %d bytes in 1000 rounds", heapBefore, heapAfter)
	}
	if rssAfter > rssBefore+100<<20 {
		t.Errorf("resident memory grew from %d to %d bytes in 1000 rounds", rssBefore, rssAfter)
	}
	if n := testcluster.Stats(c.Workers[0]).LentValues + testcluster.Stats(c.Servers[0]).LentValues; n > 64 {
		t.Errorf("%d values are still held after all answers have come", n)
	}
}

// A handler may answer with tensors without any other reference: they live until
// they have been sent.
func TestSentTensorsLive(t *testing.T) {
	c := newNodes(t, 1, 1, 1).start()
	c.serveAll(func(b af.Batch) {
		out := bytes.Repeat([]byte{b.Pushes()[0].Val.Bytes()[0]}, b.Pulls()[0].Len)
		if err := b.Respond([]af.KeyTensor{{Key: 2, Val: tensor(t, out)}}, af.ByKey); err != nil {
			t.Error(err)
		}
		out = nil
		runtime.GC()
		_ = make([]byte, 1<<20) // reuses freed memory
	})
	w := c.tensorWorker(0)
	for i := range 100 {
		got := make([]byte, 1<<20)
		h, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: tensor(t, []byte{byte(i)})}}, [][]af.KeyTensor{{{Key: 2, Val: tensor(t, got)}}})
		if err != nil {
			t.Fatal(err)
		}
		runtime.GC()
		if err := h.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := bytes.Count(got, []byte{byte(i)}); n != len(got) {
			t.Fatalf("round %d: %d of %d bytes are wrong", i, len(got)-n, len(got))
		}
	}
}

// Waiting threads neither burn the processor nor keep senders from sending.
func TestIdleClusterSleeps(t *testing.T) {
	c := newNodes(t, 1, 1, 1).start()
	c.serveAll(c.echo)
	w := c.tensorWorker(0)
	p50 := time.Hour
	for i := 0; i < 3 && p50 > 30*time.Millisecond; i++ { // spinning receivers delay senders each time, a busy machine only sometimes
		var took []time.Duration
		for range 200 {
			start := time.Now()
			if err := c.roundTrip(w, make([]byte, 1<<10)); err != nil {
				t.Fatal(err)
			}
			took = append(took, time.Since(start))
		}
		slices.Sort(took)
		p50 = took[100]
	}
	if p50 > 30*time.Millisecond {
		t.Errorf("a round trip of 1 KiB takes %s, and more than 30ms before; the original's spinning receivers need 312ms", p50)
	}
	vantest.Idle(t, "a cluster", os.Getpid(), 900)
}

// Several servers answer several goroutines of a worker: nothing is lost.
func TestNothingIsLostBetweenReceivers(t *testing.T) {
	c := newNodes(t, 2, 3, 1).start()
	c.serveAll(c.echo)
	var wg sync.WaitGroup
	for i := range c.Workers {
		w := c.tensorWorker(i)
		for g := range 3 {
			wg.Go(func() {
				r := rand.New(rand.NewPCG(uint64(i), uint64(g)))
				for range 200 {
					x := make([]byte, 1+r.IntN(4000))
					x[0] = byte(r.Uint32())
					if err := c.roundTrip(w, x); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
	}
	wg.Wait()
}

// An unanswered request ends with an error that names the silent servers; the
// node works on.
func TestTimeoutIsAnError(t *testing.T) {
	c := newNodes(t, 1, 2, 1).start()
	var silent atomic.Bool
	silent.Store(true)
	nodetest.Server(t, c.Servers[0], c.echo)
	nodetest.Server(t, c.Servers[1], func(b af.Batch) {
		if silent.Load() {
			b.Release()
			return
		}
		c.echo(b)
	})
	w := c.tensorWorker(0)
	var h af.Call
	for limit := 200 * time.Millisecond; ; limit *= 4 { // until server 0 has answered within it
		var err error
		if h, _, err = c.request(w, []byte("x")); err != nil {
			t.Fatal(err)
		}
		err = core.Call(h).Customer().Wait(t.Context(), h.Timestamp(), limit)
		if !errors.Is(err, van.ErrTimeout) || !strings.Contains(err.Error(), "server 1 (id 10)") {
			t.Errorf("got %v, want a timeout that names server 1", err)
		}
		if err == nil || !strings.Contains(err.Error(), "server 0") {
			break
		}
		if limit > 10*time.Second {
			t.Fatalf("got %v: server 0 has answered", err)
		}
	}
	silent.Store(false)
	if err := c.roundTrip(w, []byte("y")); err != nil {
		t.Errorf("after the timeout: %v", err)
	}
	if err := h.Wait(t.Context()); !errors.Is(err, postoffice.ErrUnknownHandler) {
		t.Errorf("second wait: %v, want an unknown handler", err)
	}
}

// If a server dies before it answers a request, that request fails in time. Other
// nodes are not affected.
func TestLostServerFailsItsRequests(t *testing.T) {
	c := newNodes(t, 1, 2, 1).start()
	arrived := make(chan struct{})
	nodetest.Server(t, c.Servers[0], c.echo)
	nodetest.Server(t, c.Servers[1], func(b af.Batch) { close(arrived) })
	w := c.tensorWorker(0)
	h, _, err := c.request(w, []byte("x"))
	if err != nil {
		t.Fatal(err)
	}
	<-arrived
	c.Servers[1].Close()
	if err := core.Call(h).Customer().Wait(t.Context(), h.Timestamp(), 20*time.Second); !errors.Is(err, van.ErrPeerLost) || !strings.Contains(err.Error(), "server 1 (id 10)") {
		t.Errorf("got %v, want the loss of server 1", err)
	}
	if err := c.Workers[0].InstanceBarrier(t.Context(), 0, van.WorkerGroup); err != nil {
		t.Errorf("barrier of the workers: %v", err)
	}
}

// Garbage at every port, with and without the protocol of ZeroMQ around it, while
// the cluster works.
func TestStrayMessages(t *testing.T) {
	c := newNodes(t, 1, 1, 1).start()
	c.serveAll(c.echo)
	w := c.tensorWorker(0)
	zero := make([]byte, 352)
	negative := slices.Clone(zero)
	for i := range negative {
		negative[i] = 0xff
	}
	frames := [][][]byte{
		{[]byte("x")}, {{}}, {zero}, {negative}, {zero, zero, zero}, {[]byte("x"), []byte("y"), []byte("z"), {}, {}, {}},
		{bytes.Repeat([]byte{1}, 100_000)},
	}
	ctx, err := zmq4.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	defer ctx.Term()
	strays := 0
	for _, port := range c.ports() {
		conn := dial(t, port)
		conn.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
		for _, id := range []string{"stray", "ps9", "ps8", ""} {
			s, err := ctx.NewSocket(zmq4.DEALER)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			s.SetLinger(time.Second)
			if id != "" {
				s.SetIdentity(id + fmt.Sprint(port))
			}
			if err := s.Connect(fmt.Sprintf("tcp://127.0.0.1:%d", port)); err != nil {
				t.Fatal(err)
			}
			for _, f := range frames {
				if _, err := s.SendMessage(f); err != nil {
					t.Fatal(err)
				}
				strays++
			}
		}
	}
	for i := range 100 {
		if err := c.roundTrip(w, []byte(fmt.Sprint(i))); err != nil {
			t.Fatal(err)
		}
	}
	malformed := func() (n uint64) {
		for _, node := range c.Nodes() {
			n += testcluster.Stats(node).Malformed
		}
		return n
	}
	for deadline := time.Now().Add(10 * time.Second); malformed() == 0; runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("none of %d stray messages was noticed", strays)
		}
	}
	if err := c.Workers[0].InstanceBarrier(t.Context(), 0, van.WorkerGroup); err != nil {
		t.Error(err)
	}
	c.Finalize(t)
}

// ports are those of all nodes.
func (c *nodes) ports() []int {
	ports := []int{c.Port}
	for _, n := range append(slices.Clone(c.Servers), c.Workers...) {
		addr := (*core.Node)(c.Scheduler).App().PeerName(int(n.ID()))
		_, text, err := net.SplitHostPort(addr[strings.LastIndex(addr, " ")+1:])
		if err != nil {
			c.t.Fatalf("address of %s: %v", addr, err)
		}
		port, err := strconv.Atoi(text)
		if err != nil {
			c.t.Fatal(err)
		}
		ports = append(ports, port)
	}
	return ports
}

// Requests that come before the server's object, or before its handler, are kept.
func TestRequestBeforeHandler(t *testing.T) {
	for _, object := range []bool{false, true} {
		t.Run(fmt.Sprintf("object exists %t", object), func(t *testing.T) {
			c := newNodes(t, 1, 1, 1).start()
			var s *af.Server
			var err error
			if object {
				if s, err = af.NewServer(c.Servers[0], af.ServerOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			w := c.tensorWorker(0)
			var handlers []af.Call
			var answers [][]byte
			for i := range 10 {
				h, pulls, err := c.request(w, []byte{byte(i)})
				if err != nil {
					t.Fatal(err)
				}
				handlers, answers = append(handlers, h), append(answers, pulls[0])
			}
			c.log.Wait(t, "queueing requests until their application is made")
			if s == nil {
				if s, err = af.NewServer(c.Servers[0], af.ServerOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			if err := s.Handle(c.echo); err != nil {
				t.Fatal(err)
			}
			for i, h := range handlers {
				if err := h.Wait(t.Context()); err != nil {
					t.Fatal(err)
				}
				if answers[i][0] != byte(i) {
					t.Errorf("request %d was answered with %d", i, answers[i][0])
				}
			}
		})
	}
}

// Closing a worker sends no harmful message, and fails its requests in flight.
func TestWorkerClose(t *testing.T) {
	c := newNodes(t, 1, 1, 1).start()
	c.serveAll(func(b af.Batch) { b.Release() })
	w := c.tensorWorker(0)
	h, _, err := c.request(w, []byte("x"))
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	if err := h.Wait(t.Context()); !errors.Is(err, van.ErrClosed) {
		t.Errorf("got %v, want closed", err)
	}
	if _, _, err := c.request(w, []byte("y")); !errors.Is(err, van.ErrClosed) {
		t.Errorf("request of a closed worker: %v, want closed", err)
	}
	c.Finalize(t)
}

// DMLC_INTERFACE is enough to find an address.
func TestInterfaceAlone(t *testing.T) {
	for _, name := range []string{"lo", "auto"} {
		t.Run(name, func(t *testing.T) {
			c := newNodes(t, 1, 1, 1)
			c.set = func(cfg *postoffice.Config) {
				if cfg.Role != "scheduler" {
					cfg.NodeHost, cfg.Interface = "", name
				}
			}
			c.start()
			c.serveAll(c.echo)
			if err := c.roundTrip(c.tensorWorker(0), []byte("x")); err != nil {
				t.Error(err)
			}
			c.Finalize(t)
		})
	}
}

// Tensors beyond the limits of the wire format are refused.
func TestTensorLimits(t *testing.T) {
	tests := []struct {
		name  string
		dtype af.Dtype
		shape []int64
		want  string
	}{
		{"2 GiB", af.Uint8, []int64{1 << 31}, "exceeds"},
		{"2 GiB of rows", af.BFloat16, []int64{1 << 20, 1 << 10}, "exceeds"},
		{"overflow", af.Float64, []int64{1 << 62, 1 << 62}, "exceeds"},
		{"9 dimensions", af.Uint8, []int64{1, 1, 1, 1, 1, 1, 1, 1, 1}, "at most 8"},
		{"negative", af.Uint8, []int64{-1}, "negative"},
		{"unknown type", af.Dtype(99), []int64{1}, "dtype"},
		{"length", af.Uint8, []int64{2}, "1"},
	}
	for _, tt := range tests {
		if _, err := af.FromBytes([]byte{0}, tt.dtype, tt.shape...); !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want an error with %q", tt.name, err, tt.want)
		}
	}
	if x, err := af.FromBytes([]byte{7}, af.Uint8, 1, 1, 1, 1, 1, 1, 1, 1); err != nil || x.Len() != 1 {
		t.Errorf("8 dimensions: %v", err)
	}
}

// A scheduler that waits for a cluster uses little memory.
func TestSchedulerIsSmall(t *testing.T) {
	if vantest.Race {
		t.Skip("the race detector needs memory of its own")
	}
	c := newCluster(t, 1, 1, 1)
	c.setenv("PS_VERBOSE=1")
	p := c.launch("ut_scheduler", "scheduler", 0)
	p.waitFor("Bind to")
	if used := nodetest.Resident(t, p.cmd.Process.Pid); used > 60<<20 {
		t.Errorf("a waiting scheduler uses %d bytes", used)
	}
}
