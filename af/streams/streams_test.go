package streams_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/streams"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// end is a node with a device and its objects for exchanges.
type end struct {
	*postoffice.Node
	*streams.Ends
	dev *simgpu.Device
}

// ends are a cluster's.
type ends struct {
	*testcluster.Cluster
	workers, servers []*end
	device           map[string]*simgpu.Device // the latest of each node
	captured         bool                      // an exchange was captured, and its tensors stay retained
	silent           bool                      // a device did not answer, and an exchange has left its event
	made             []*end
}

func start(t *testing.T, o testcluster.Options) *ends {
	t.Helper()
	s := &ends{device: map[string]*simgpu.Device{}}
	var mu sync.Mutex
	var all []*simgpu.Device
	o.Backend = func(role string, rank int) backend.Backend {
		if role == "scheduler" {
			return nil
		}
		mu.Lock()
		defer mu.Unlock()
		d := simgpu.New(len(all))
		s.device[fmt.Sprint(role, rank)] = d
		all = append(all, d)
		return d
	}
	t.Cleanup(func() { // after the nodes are closed
		for _, e := range s.made {
			vantest.Eventually(t, 20*time.Second, e.Name()+" has nothing left of exchanges", func() bool { return e.Left() == "" })
		}
		for _, d := range all {
			if n, _ := d.Events(); n > 0 && !s.silent {
				t.Errorf("%d events are left", n)
			}
			if !s.captured {
				d.NothingLent(t)
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	s.Cluster = testcluster.Start(t, o)
	for i, n := range s.Workers {
		s.workers = append(s.workers, s.newEnd(t, n, s.device[fmt.Sprint("worker", i)]))
	}
	for i, n := range s.Servers {
		s.servers = append(s.servers, s.newEnd(t, n, s.device[fmt.Sprint("server", i)]))
	}
	return s
}

func (s *ends) newEnd(t *testing.T, n *postoffice.Node, d *simgpu.Device) *end {
	t.Helper()
	e, err := streams.New(n)
	if err != nil {
		t.Fatal(err)
	}
	s.made = append(s.made, &end{n, e, d})
	return s.made[len(s.made)-1]
}

// list makes tensors of b's, with keys from first on, those of all peers the same.
func (e *end) list(t *testing.T, first uint64, each int, b ...[]byte) (l []af.KeyTensor) {
	t.Helper()
	for i := range b {
		x, err := af.NewTensor(e.dev.Mem(b[i]), af.Uint8, int64(len(b[i])))
		if err != nil {
			t.Fatal(err)
		}
		l = append(l, af.KeyTensor{Key: first + uint64(i%each), Val: x})
	}
	return l
}

func buffers(count, n int) [][]byte {
	b := make([][]byte, count)
	for i := range b {
		b[i] = make([]byte, n)
	}
	return b
}

func fill(b []byte, v byte) {
	for i := range b {
		b[i] = v
	}
}

func limited(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// pair is an exchange on a worker and on all servers.
type pair struct {
	x          *streams.Exchange
	push, pull [][]byte
	ys         []*streams.Exchange
	got, out   [][][]byte
}

const pushKey, pullKey = 100, 200

// prepare makes an exchange of 2 pushes of n bytes, and an answer of m bytes of each server, for all nodes.
func (s *ends) prepare(t *testing.T, n, m int, opts ...streams.Option) []*pair {
	t.Helper()
	pairs := make([]*pair, len(s.workers))
	ys := make([]*streams.Exchange, len(s.servers))
	got, out := make([][][]byte, len(s.servers)), make([][][]byte, len(s.servers))
	var all sync.WaitGroup
	for i, w := range s.workers {
		p := &pair{push: buffers(2, n), pull: buffers(len(s.servers), m)}
		pairs[i] = p
		push, pull := w.list(t, pushKey, 2, p.push...), w.list(t, pullKey, 1, p.pull...)
		all.Go(func() {
			var err error
			if p.x, err = w.Prepare(t.Context(), nil, push, pull, opts...); err != nil {
				t.Error(err)
			}
		})
	}
	for i, y := range s.servers {
		got[i], out[i] = buffers(2*len(s.workers), n), buffers(len(s.workers), m)
		push, pull := y.list(t, pushKey, 2, got[i]...), y.list(t, pullKey, 1, out[i]...)
		all.Go(func() {
			var err error
			if ys[i], err = y.Prepare(t.Context(), nil, push, pull, opts...); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if t.Failed() {
		t.FailNow()
	}
	for _, p := range pairs {
		p.ys, p.got, p.out = ys, got, out
	}
	t.Cleanup(func() {
		for _, p := range pairs {
			_ = p.x.Close()
		}
		for _, y := range ys {
			_ = y.Close()
		}
	})
	return pairs
}

// answer is what server s gives worker w for its two pushes.
func answer(s, w int, a, b byte) byte { return a*3 + b*5 + byte(7*s+11*w) }

const stream = 5

// serve captures a round of each server, and replays it so many times.
func (s *ends) serve(t *testing.T, p *pair, replays int) {
	t.Helper()
	s.replay(t, p, replays, func(i int) {
		for w := range s.workers {
			fill(p.out[i][w], answer(i, w, p.got[i][2*w][0], p.got[i][2*w+1][0]))
		}
	})
}

// replay does the same in graphs; compute makes the answers of server i.
func (s *ends) replay(t *testing.T, p *pair, replays int, compute func(i int)) {
	t.Helper()
	s.captured = true
	for i, y := range s.servers {
		g := y.dev.Capture(stream)
		if err := p.ys[i].QueueReceive(stream); err != nil {
			t.Fatal(err)
		}
		y.dev.Queue(stream, func() { compute(i) })
		if err := p.ys[i].QueueSend(stream); err != nil {
			t.Fatal(err)
		}
		g.End()
		for range replays {
			g.Replay(stream)
		}
	}
}

// TestRounds: two workers and two servers, whose graphs are replayed, with changing contents; also of memory that
// cannot be shared as it lies.
func TestRounds(t *testing.T) {
	for _, private := range []bool{false, true} {
		t.Run(fmt.Sprintf("private=%t", private), func(t *testing.T) {
			s := start(t, testcluster.Options{Workers: 2, Servers: 2})
			if private {
				for _, d := range s.device {
					d.PrivateMem(true)
				}
			}
			pairs := s.prepare(t, 1000, 300)
			const rounds = 200
			s.serve(t, pairs[0], rounds)
			var all sync.WaitGroup
			for i, w := range s.workers {
				p := pairs[i]
				all.Go(func() {
					round, wrong := 0, 0
					g := w.dev.Capture(stream)
					w.dev.Queue(stream, func() {
						round++
						fill(p.push[0], byte(round+i))
						fill(p.push[1], byte(2*round))
					})
					if err := errors.Join(p.x.QueueSend(stream), p.x.QueueReceive(stream)); err != nil {
						t.Error(err)
					}
					w.dev.Queue(stream, func() {
						for k := range s.servers {
							want := answer(k, i, byte(round+i), byte(2*round))
							for _, v := range p.pull[k] {
								if v != want {
									wrong++
								}
							}
						}
					})
					g.End()
					for range rounds {
						g.Replay(stream)
					}
					w.dev.Settle(t, stream)
					if round != rounds || wrong > 0 {
						t.Errorf("worker %d: %d rounds, want %d; %d wrong bytes", i, round, rounds, wrong)
					}
					if err := p.x.Check(); err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
			for i, p := range pairs {
				if err := p.x.Close(); err != nil && i == 0 { // which is the end of the others'
					t.Error(err)
				}
				if err := p.x.Check(); !errors.Is(err, streams.ErrOver) || !errors.Is(err, van.ErrClosed) {
					t.Errorf("after Close: %v, want %v and %v", err, streams.ErrOver, van.ErrClosed)
				}
			}
		})
	}
}

// over waits until an exchange is over, and returns why.
func over(t *testing.T, x *streams.Exchange) error {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); runtime.Gosched() {
		if err := x.Check(); err != nil {
			return err
		}
	}
	t.Fatal("the exchange is not over")
	return nil
}

// gone reports whether err is a peer's end: it may have been announced before the peer was lost.
func gone(err error) bool { return errors.Is(err, van.ErrPeerLost) || errors.Is(err, van.ErrClosed) }

// TestServerLost: streams go on when a server is lost in the middle of rounds, on the worker and on the other
// server. The errors of both have the reason, and the other server's answer of that round is not used.
func TestServerLost(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 2})
	p := s.prepare(t, 100, 100)[0]
	s.serve(t, p, 0)
	s.Servers[1].Close()
	testcluster.Lost(t, s.Workers[0], s.Servers[1].ID())
	w := s.workers[0]
	if err := over(t, p.x); !gone(err) || !strings.Contains(err.Error(), "server 1") {
		t.Errorf("%v, want %v or %v, of server 1", err, van.ErrPeerLost, van.ErrClosed)
	}
	if err := over(t, p.ys[0]); !errors.Is(err, van.ErrClosed) || !strings.Contains(err.Error(), "worker 0") {
		t.Errorf("the other server: %v, want %v, of worker 0", err, van.ErrClosed)
	}
	if err := p.x.QueueSend(stream); !errors.Is(err, streams.ErrOver) {
		t.Errorf("a send after that: %v, want %v", err, streams.ErrOver)
	}
	w.dev.Settle(t, stream)
}

// TestNothingCountsAfterTheEnd: if a captured round is replayed after the end, the other side does not take its
// contents for an answer.
func TestNothingCountsAfterTheEnd(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 2, Servers: 1})
	pairs := s.prepare(t, 10, 10)
	y := s.servers[0]
	served := 0
	s.captured = true
	g := y.dev.Capture(stream)
	if err := pairs[0].ys[0].QueueReceive(stream); err != nil {
		t.Fatal(err)
	}
	y.dev.Queue(stream, func() { served++ })
	if err := pairs[0].ys[0].QueueSend(stream); err != nil {
		t.Fatal(err)
	}
	g.End()
	g.Replay(stream)

	// Worker 1 has sent and waits; worker 0, which has not, closes its end.
	w := s.workers[1]
	took := make(chan error, 1)
	if err := errors.Join(pairs[1].x.QueueSend(stream), pairs[1].x.QueueReceive(stream)); err != nil {
		t.Fatal(err)
	}
	w.dev.Queue(stream, func() { took <- pairs[1].x.Check() })
	if err := pairs[0].x.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-took; !errors.Is(err, streams.ErrOver) || !errors.Is(err, van.ErrClosed) { // the server has sent this reason
		t.Errorf("the stream of worker 1 went on, and Check said %v, want %v and %v", err, streams.ErrOver, van.ErrClosed)
	}
	y.dev.Settle(t, stream)
	if served != 1 {
		t.Errorf("the server's stream has not gone on")
	}
	if err := over(t, pairs[0].ys[0]); !errors.Is(err, van.ErrClosed) {
		t.Errorf("%v, want %v", err, van.ErrClosed)
	}
}

// TestReleaseStreamStartsLate: an exchange ends before the stream that releases others has executed its first work.
func TestReleaseStreamStartsLate(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	y := s.servers[0]
	resume := y.dev.HoldNewStreams()
	p := s.prepare(t, 10, 10)[0]
	if err := p.ys[0].QueueReceive(stream); err != nil {
		t.Fatal(err)
	}
	if err := p.x.Close(); err != nil { // the server's gate is closed
		t.Error(err)
	}
	resume()
	y.dev.Settle(t, stream)
	if err := over(t, p.ys[0]); !errors.Is(err, van.ErrClosed) {
		t.Errorf("%v, want %v", err, van.ErrClosed)
	}
}

// round makes a round of worker 0 and waits until its stream has gone on. It returns the longest time that the
// round may have been under way.
func (s *ends) round(t *testing.T, p *pair) (took time.Duration, err error) {
	t.Helper()
	begun := time.Now()
	if err := errors.Join(p.x.QueueSend(stream), p.x.QueueReceive(stream)); err != nil {
		return 0, err
	}
	s.workers[0].dev.Settle(t, stream)
	return time.Since(begun), nil
}

// again ends an exchange, so that all streams go on, and prepares another one with the same tensors.
func (s *ends) again(t *testing.T, p *pair, opts ...streams.Option) *pair {
	t.Helper()
	_ = p.x.Close()
	for i, y := range s.servers {
		_ = p.ys[i].Close()
		y.dev.Settle(t, stream)
	}
	return s.prepare(t, 10, 10, opts...)[0]
}

// unchanged makes answers that are what the memory has: a worker whose round was too long reads it meanwhile.
func unchanged(int) {}

// TestLate: a round without an answer ends at its limit. An answered round does not, however long the worker stays
// idle after it.
func TestLate(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	const limit, rounds = 300 * time.Millisecond, 3
	p := s.prepare(t, 10, 10, streams.Limit(limit))[0]
	w := s.workers[0]
	s.replay(t, p, rounds, unchanged)
	for answered, end := 0, time.Now().Add(20*time.Second); answered < rounds; answered++ {
		took, err := s.round(t, p)
		if err != nil {
			t.Fatal(err)
		}
		if took >= limit { // it may have been ended: the machine was late
			if time.Now().After(end) {
				t.Fatalf("a round is answered after %s, its limit is %s", took, limit)
			}
			p = s.again(t, p, streams.Limit(limit))
			s.replay(t, p, rounds, unchanged)
			answered = -1
			continue
		}
		select {
		case <-time.After(2 * limit): // it is about what happens in this time
		case <-t.Context().Done():
		}
		if err := p.x.Check(); err != nil {
			t.Fatalf("a round that was answered: %v", err)
		}
	}
	if err := errors.Join(p.x.QueueSend(stream), p.x.QueueReceive(stream)); err != nil {
		t.Fatal(err)
	}
	w.dev.Settle(t, stream)
	if err := p.x.Check(); !errors.Is(err, van.ErrTimeout) || !strings.Contains(err.Error(), "server 0") {
		t.Errorf("%v, want %v, with server 0", err, van.ErrTimeout)
	}
	s.servers[0].dev.Settle(t, stream)
}

// TestAnew: after a server was replaced the exchange is prepared again, by all.
func TestAnew(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 1})
	p := s.prepare(t, 10, 10)[0]
	s.Servers[0].Close()
	if err := over(t, p.x); !gone(err) {
		t.Fatalf("%v, want %v or %v", err, van.ErrPeerLost, van.ErrClosed)
	}
	_ = p.x.Close()
	n, err := s.Join(limited(t, 20*time.Second), "server", 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	s.servers[0] = s.newEnd(t, n, s.device["server0"])
	p = s.prepare(t, 10, 10)[0]
	s.serve(t, p, 1)
	fill(p.push[0], 1)
	fill(p.push[1], 2)
	if err := errors.Join(p.x.QueueSend(stream), p.x.QueueReceive(stream)); err != nil {
		t.Fatal(err)
	}
	s.workers[0].dev.Settle(t, stream)
	if err := p.x.Check(); err != nil || p.pull[0][9] != answer(0, 0, 1, 2) {
		t.Errorf("%v, got %d, want %d", err, p.pull[0][9], answer(0, 0, 1, 2))
	}
}

// TestMisuse: impossible preparations and operations are errors with a reason, on both sides if both know of them.
func TestMisuse(t *testing.T) {
	s := start(t, testcluster.Options{Workers: 1, Servers: 2})
	w, y := s.workers[0], s.servers[0]
	one := func(n int) []af.KeyTensor { return w.list(t, 1, 1, make([]byte, n)) }
	twice := slices.Repeat(one(4), 2)
	host, err := af.FromBytes(make([]byte, 4), af.Uint8, 4)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		what  string
		peers []int
		push  []af.KeyTensor
		pull  []af.KeyTensor
		want  string
	}{
		{"nothing", nil, nil, nil, "no push and no pull tensors"},
		{"host memory", nil, []af.KeyTensor{{Key: 1, Val: host}}, nil, "want memory of the node's device"},
		{"another device", nil, y.list(t, 1, 1, make([]byte, 4)), nil, "push tensor 0 (key 1)"},
		{"too few pulls", nil, nil, one(4), "0 push and 1 pull tensors for 2 peers"},
		{"one tensor twice", nil, nil, twice, "pull tensor 1 (key 1) shares memory with pull tensor 0 (key 1)"},
		{"in place, of two servers", nil, twice[:1], append(one(4), twice[0]), "pull tensor 1 (key 1) shares memory with push tensor 0 (key 1)"},
		{"no peers", []int{}, one(4), nil, "no peers"},
		{"a server twice", []int{0, 0}, one(4), nil, "peers [0 0]"},
		{"a server that is none", []int{2}, one(4), nil, "peers [2]"},
		{"too many", []int{0}, w.list(t, 1, 300, buffers(257, 1)...), nil, "want at most 256"},
	} {
		if _, err := w.Prepare(limited(t, 10*time.Second), c.peers, c.push, c.pull); !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %v with %q", c.what, err, van.ErrInvalid, c.want)
		}
	}
	if _, err := w.Prepare(limited(t, 100*time.Millisecond), nil, one(4), nil); !errors.Is(err, van.ErrTimeout) || !strings.Contains(err.Error(), "server 0") || !strings.Contains(err.Error(), "server 1") {
		t.Errorf("servers that do not prepare: %v, want %v with both", err, van.ErrTimeout)
	}
	into := slices.Repeat(y.list(t, 1, 1, make([]byte, 4)), 2)
	into[1].Key = 2
	if _, err := y.Prepare(limited(t, 10*time.Second), nil, into, nil); !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), "push tensor 1 (key 2) shares memory with push tensor 0 (key 1)") {
		t.Errorf("two tensors in one place: %v", err)
	}
	if _, err := y.Prepare(limited(t, 100*time.Millisecond), nil, y.list(t, 7, 1, make([]byte, 4)), nil); !errors.Is(err, van.ErrTimeout) || !strings.Contains(err.Error(), "worker 0") {
		t.Errorf("a worker that does not prepare: %v, want %v with worker 0", err, van.ErrTimeout)
	}

	// Lengths that differ.
	failed := make(chan error, 1)
	go func() {
		_, err := w.Prepare(t.Context(), []int{0}, one(4), nil)
		failed <- err
	}()
	if _, err := y.Prepare(t.Context(), nil, y.list(t, 1, 1, make([]byte, 5)), nil); !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), "has 4 bytes at worker 0") {
		t.Errorf("another length: %v", err)
	}
	if err := <-failed; !errors.Is(err, van.ErrClosed) || !strings.Contains(err.Error(), "has 4 bytes at worker 0") {
		t.Errorf("another length, at the worker: %v", err)
	}

	p := s.prepare(t, 4, 4)[0]
	if err := p.x.QueueReceive(stream); !errors.Is(err, af.ErrStarted) {
		t.Errorf("a worker that receives first: %v, want %v", err, af.ErrStarted)
	}
	if err := p.ys[0].QueueSend(stream); !errors.Is(err, af.ErrStarted) {
		t.Errorf("a server that sends first: %v, want %v", err, af.ErrStarted)
	}
	if err := p.x.QueueReceive(af.Complete); !errors.Is(err, van.ErrInvalid) {
		t.Errorf("no stream: %v, want %v", err, van.ErrInvalid)
	}
	w.Ends.Close()
	if err := p.x.Check(); !errors.Is(err, van.ErrClosed) {
		t.Errorf("after Close of all: %v, want %v", err, van.ErrClosed)
	}
	if _, err := w.Prepare(t.Context(), nil, one(4), nil); !errors.Is(err, van.ErrClosed) {
		t.Errorf("after Close of all, another: %v, want %v", err, van.ErrClosed)
	}
}

// TestHostBackend: a node without a GPU says what is missing.
func TestHostBackend(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Workers: 1, Servers: 1})
	e, err := streams.New(c.Workers[0])
	if err != nil {
		t.Fatal(err)
	}
	x, err := af.NewTensor(simgpu.New(0).Mem(make([]byte, 4)), af.Uint8, 4)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Prepare(t.Context(), nil, []af.KeyTensor{{Key: 1, Val: x}}, nil); !errors.Is(err, backend.ErrWrongDevice) {
		t.Errorf("%v, want %v", err, backend.ErrWrongDevice)
	}
	if _, err := streams.New(c.Scheduler); !errors.Is(err, van.ErrInvalid) {
		t.Errorf("on a scheduler: %v, want %v", err, van.ErrInvalid)
	}
}

// TestSideStreams: a server posts the receives of three exchanges in streams of their own. The worker then has one round
// under way at a time, in the same or in the opposite order. No receive that waits holds up a send or a receive of another
// exchange, although the copy engine of a device copies in the order in which copies were queued.
func TestSideStreams(t *testing.T) {
	for _, private := range []bool{false, true} {
		for _, order := range [][]int{{0, 1, 2}, {2, 1, 0}} {
			t.Run(fmt.Sprintf("private=%t,order=%v", private, order), func(t *testing.T) {
				s := start(t, testcluster.Options{Workers: 1, Servers: 1})
				for _, d := range s.device {
					d.OneCopyEngine()
					d.PrivateMem(private)
				}
				w, y := s.workers[0], s.servers[0]
				var all []*pair
				for range order {
					all = append(all, s.prepare(t, 64, 64)[0])
				}
				const main, side = 5, 10
				for i, p := range all {
					if err := p.ys[0].QueueReceive(af.Stream(side + i)); err != nil {
						t.Fatal(err)
					}
				}
				for _, i := range order {
					p := all[i]
					fill(p.push[0], byte(i+1))
					if err := p.x.QueueSend(main); err != nil {
						t.Fatal(err)
					}
					w.dev.Settle(t, main)
					if err := p.x.QueueReceive(af.Stream(side + i)); err != nil {
						t.Fatal(err)
					}
					y.dev.Settle(t, uintptr(side+i))
					fill(p.out[0][0], p.got[0][0][0]+100)
					if err := p.ys[0].QueueSend(main); err != nil {
						t.Fatal(err)
					}
					w.dev.Settle(t, uintptr(side+i))
					if p.pull[0][0] != byte(i+101) {
						t.Errorf("exchange %d: answer %d, want %d", i, p.pull[0][0], i+101)
					}
				}
			})
		}
	}
}
