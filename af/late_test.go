package af_test

import (
	"bytes"
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// lateTransports are the transports of tests of applications that are made late.
var lateTransports = []struct {
	name string
	over testcluster.Transport
	data string // STEPAF_DATA
}{
	{"inproc", testcluster.InProc, env.DataTCP}, {"tcp", testcluster.TCP, env.DataTCP}, {"zmq", testcluster.TCP, env.DataZMQ},
	{"unix", testcluster.Unix, env.DataZMQ}, {"shm", testcluster.SHM, env.DataTCP},
}

// late is a cluster of one worker and one server. The server's budget for one peer is a MiB.
type late struct {
	*testcluster.Cluster
	t   *testing.T
	log *vantest.Log
}

func startLate(t *testing.T, over testcluster.Transport, data string) *late {
	c := &late{t: t, log: &vantest.Log{}}
	c.Cluster = testcluster.Start(t, testcluster.Options{Over: over, Log: c.log.Logger(), Set: func(cfg *postoffice.Config) {
		cfg.Backend, cfg.RecvBudgetPeer, cfg.StrangerBudget, cfg.Data = "CPU", 1<<20, 16<<20, data
	}})
	return c
}

// lateEcho answers each pull with the first push.
func lateEcho(t *testing.T) af.Handler {
	return func(b af.Batch) {
		var out []af.KeyTensor
		for _, p := range b.Pulls() {
			out = append(out, af.KeyTensor{Key: p.Key, Val: b.Pushes()[0].Val})
		}
		if err := b.Respond(out); err != nil {
			t.Error(err)
		}
	}
}

// pushing are calls in flight, and the bytes that their answers should have.
type pushing struct {
	calls  []af.Call
	pushed [][]byte
	pulled [][]byte
}

// push begins calls that push size bytes each.
func (c *late) push(w *af.Worker, calls, size int) (p pushing) {
	c.t.Helper()
	for i := range calls {
		x := bytes.Repeat([]byte{byte(i + 1)}, size)
		pull := make([]byte, size)
		call, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: bytesOf(c.t, x)}}, [][]af.KeyTensor{{{Key: 2, Val: bytesOf(c.t, pull)}}})
		if err != nil {
			c.t.Fatal(err)
		}
		p.calls, p.pushed, p.pulled = append(p.calls, call), append(p.pushed, x), append(p.pulled, pull)
	}
	return p
}

// split returns the first n calls, and the others.
func (p pushing) split(n int) (first, rest pushing) {
	return pushing{p.calls[:n], p.pushed[:n], p.pulled[:n]}, pushing{p.calls[n:], p.pushed[n:], p.pulled[n:]}
}

// wait waits for the answers and compares them.
func (p pushing) wait(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for i, call := range p.calls {
		if err := call.Wait(ctx); err != nil {
			t.Fatalf("call %d: %v", i, err)
		}
		if !bytes.Equal(p.pulled[i], p.pushed[i]) {
			t.Errorf("call %d was answered with other bytes", i)
		}
	}
}

// readsNoMore checks a server that has no application yet, and whose worker has calls in flight beyond the budget: the
// server keeps no more than the budget, and control messages arrive in both directions.
func (c *late) readsNoMore(s *postoffice.Node) {
	c.t.Helper()
	vantest.Eventually(c.t, time.Minute, "the worker is not read", func() bool {
		return strings.Contains(c.log.String(), "a peer is not read for now: its application does not exist yet")
	})
	if got := s.Stats(); got.QueuedBytes > 1<<20 || got.EarlyRequests != 0 || got.PausedReads == 0 {
		c.t.Errorf("%d bytes are queued, want 1 MiB at most; %d requests were dropped, want 0; reading paused %d times, want it to", got.QueuedBytes, got.EarlyRequests, got.PausedReads)
	}
	ctx, cancel := context.WithTimeout(c.t.Context(), time.Minute)
	defer cancel()
	ended := make(chan error, 3)
	for _, n := range []*postoffice.Node{c.Scheduler, s, c.Workers[0]} {
		go func() { ended <- n.InstanceBarrier(ctx, 0, postoffice.AllNodes) }()
	}
	for range 3 {
		if err := <-ended; err != nil {
			c.t.Fatal(err)
		}
	}
	if dead := testcluster.Dead(c.Workers[0]); len(dead) > 0 {
		c.t.Errorf("the worker considers %v lost", dead)
	}
}

// TestReplacementMakesItsApplicationLate: a worker sends more to the replacement of a killed server than the budget allows,
// before the replacement has made its application. The server does not read the rest, and all calls are answered.
func TestReplacementMakesItsApplicationLate(t *testing.T) {
	for _, x := range lateTransports {
		t.Run(x.name, func(t *testing.T) {
			c := startLate(t, x.over, x.data)
			serve(t, c.Servers[0], lateEcho(t))
			w := newWorker(t, c.Workers[0])
			c.push(w, 2, 1000).wait(t)
			back := make(chan struct{}, 4)
			defer c.Workers[0].OnPeer(func(_ postoffice.NodeID, up bool, _ error) {
				if up {
					back <- struct{}{}
				}
			})()
			c.Servers[0].Close()
			testcluster.Lost(t, c.Scheduler, van.ServerID(0))
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			joined := make(chan error, 1)
			var s *postoffice.Node
			go func() {
				var err error
				s, err = c.Join(ctx, "server", 0, nil)
				joined <- err
			}()
			select {
			case <-back:
			case <-ctx.Done():
				t.Fatal("the worker does not learn of the replacement")
			}
			flying := c.push(w, 8, 400<<10)
			if err := <-joined; err != nil {
				t.Fatal(err)
			}
			c.readsNoMore(s)
			serve(t, s, lateEcho(t))
			flying.wait(t)
		})
	}
}

// TestApplicationIsMadeLate is the same at a first start, with many small calls, too.
func TestApplicationIsMadeLate(t *testing.T) {
	for _, x := range lateTransports {
		t.Run(x.name, func(t *testing.T) {
			for _, size := range []int{400 << 10, 10} {
				c := startLate(t, x.over, x.data)
				calls := 8
				if size == 10 {
					calls = 4200 // more than a server queues for one peer
				}
				flying := c.push(newWorker(t, c.Workers[0]), calls, size)
				c.readsNoMore(c.Servers[0])
				// A node forgets a finished request after 4096 later ones.
				var answered atomic.Int32
				waited := make(chan struct{})
				echo := lateEcho(t)
				serve(t, c.Servers[0], func(b af.Batch) {
					if answered.Add(1) > 4000 {
						<-waited
					}
					echo(b)
				})
				first, rest := flying.split(min(200, calls))
				first.wait(t)
				close(waited)
				rest.wait(t)
				c.Finalize(t)
			}
		})
	}
}

// TestCanceledBeforeTheApplication: calls that end while their server has no application are forgotten there, also those that
// have not been read. Later calls take their place, and are answered.
func TestCanceledBeforeTheApplication(t *testing.T) {
	for _, x := range lateTransports {
		t.Run(x.name, func(t *testing.T) {
			c := startLate(t, x.over, x.data)
			w := newWorker(t, c.Workers[0])
			canceled := c.push(w, 8, 400<<10)
			c.readsNoMore(c.Servers[0])
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			for _, call := range canceled.calls {
				if err := call.Wait(ctx); err == nil {
					t.Fatal("a call without a server was answered")
				}
			}
			flying := c.push(w, 3, 100<<10)
			vantest.Eventually(t, time.Minute, "the later calls are queued, and no others", func() bool {
				got := c.Servers[0].Stats()
				return got.QueuedRequests == 3 && got.QueuedBytes < 400<<10
			})
			handled := make(chan struct{}, 16)
			serve(t, c.Servers[0], func(b af.Batch) {
				handled <- struct{}{}
				lateEcho(t)(b)
			})
			flying.wait(t)
			if len(handled) != 3 {
				t.Errorf("the server got %d batches, want 3", len(handled))
			}
		})
	}
}

// recordGate is a van of a server that holds back the records of nodes while it is closed.
type recordGate struct {
	van.Van
	mu     sync.Mutex
	closed bool
	held   []*van.Message
	recv   van.Receiver
}

func (g *recordGate) Unwrap() van.Van { return g.Van }

func (g *recordGate) Start(recv van.Receiver) {
	g.recv = recv
	g.Van.Start(func(m *van.Message) {
		g.mu.Lock()
		hold := g.closed && m.Control.Cmd == van.AddNode
		if hold {
			g.held = append(g.held, m.Retain())
		}
		g.mu.Unlock()
		if !hold {
			recv(m)
		}
	})
}

func (g *recordGate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
}

func (g *recordGate) open() {
	g.mu.Lock()
	held := g.held
	g.closed, g.held = false, nil
	g.mu.Unlock()
	for _, m := range held {
		g.recv(m)
		m.Release()
	}
}

// TestReplacementWorkerIsFaster: the replacement of a killed worker sends more than STEPAF_STRANGER_BUDGET before the server has its
// record. Each of its calls is answered or refused, with the budget in the error. Over TCP and shared memory the server does not read
// the worker until then, and refuses nothing.
func TestReplacementWorkerIsFaster(t *testing.T) {
	for _, x := range lateTransports {
		t.Run(x.name, func(t *testing.T) {
			gate := &recordGate{}
			c := testcluster.Start(t, testcluster.Options{Over: x.over, Set: func(cfg *postoffice.Config) {
				cfg.Backend, cfg.StrangerBudget, cfg.Data = "CPU", 1<<20, x.data
			}, Wrap: func(role string, _ int, f van.Factory) van.Factory {
				if role != "server" {
					return f
				}
				return func(o van.Options) (van.Van, error) {
					inner, err := f(o)
					gate.Van = inner
					return gate, err
				}
			}})
			l := &late{Cluster: c, t: t}
			s := c.Servers[0]
			serve(t, s, lateEcho(t))
			l.push(newWorker(t, c.Workers[0]), 2, 1000).wait(t)
			gate.close()
			c.Workers[0].Close()
			testcluster.Lost(t, c.Scheduler, van.WorkerID(0))
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			n, err := c.Join(ctx, "worker", 0, nil)
			if err != nil {
				t.Fatal(err)
			}
			w := newWorker(t, n)
			drops := x.over == testcluster.InProc || x.data == env.DataZMQ
			const size = 400 << 10
			var flying pushing
			for i := range 8 {
				before := s.Stats().Transport.ReceivedBytes
				p := l.push(w, 1, size)
				flying.calls, flying.pushed, flying.pulled = append(flying.calls, p.calls...), append(flying.pushed, p.pushed...), append(flying.pulled, p.pulled...)
				if drops { // one after the other: ZeroMQ's connection would be closed if it had more unread bytes than the budget
					vantest.Eventually(t, time.Minute, "the server receives the call, and drops it if it exceeds the budget", func() bool {
						got := s.Stats()
						return got.Transport.ReceivedBytes-before >= size && got.StrangerMessages+got.Transport.DroppedUnknown == uint64(max(i-1, 0))
					})
				}
			}
			gate.open()
			refused := 0
			for i, call := range flying.calls {
				switch err := call.Wait(ctx); {
				case err != nil:
					vantest.Fails(t, err, van.ErrQueueFull, "server 0 (id 8)", "did not know worker 0 (id 9) yet", "STEPAF_STRANGER_BUDGET=1048576")
					refused++
				case !bytes.Equal(flying.pulled[i], flying.pushed[i]):
					t.Errorf("call %d was answered with other bytes", i)
				}
			}
			if drops != (refused == 6) || !drops && refused > 0 {
				t.Errorf("%d calls were refused", refused)
			}
			l.push(w, 1, 1000).wait(t)
		})
	}
}
