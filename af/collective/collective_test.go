package collective

import (
	"bytes"
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
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
)

// comms makes a communicator of all workers of a cluster.
func comms(t *testing.T, o testcluster.Options, n int) ([]*Comm, *testcluster.Cluster) {
	t.Helper()
	lent.Watch(t)
	o.Workers = n
	c := testcluster.Start(t, o)
	all := make([]*Comm, n)
	onAll(t, n, func(r int) error {
		var err error
		all[r], err = New(t.Context(), c.Workers[r], Options{Ranks: ranks(n), Timeout: 20 * time.Second})
		if err == nil {
			all[r].b.polls = n != 5 // also where there are fewer processors
			all[r].b.early = n%2 == 1
		}
		return err
	})
	t.Cleanup(func() {
		onAll(t, n, func(r int) error { return all[r].Close() })
		for _, c := range all {
			atRest(t, c)
		}
	})
	return all, c
}

func ranks(n int) []int {
	l := make([]int, n)
	for i := range l {
		l[i] = i
	}
	return l
}

// onAll runs f for all ranks at once.
func onAll(t *testing.T, n int, f func(r int) error) {
	t.Helper()
	errs := every(n, f)
	for r, err := range errs {
		if err != nil {
			t.Errorf("rank %d: %v", r, err)
		}
	}
	if t.Failed() {
		t.FailNow()
	}
}

func every(n int, f func(r int) error) []error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() { errs[r] = f(r) })
	}
	wg.Wait()
	return errs
}

// filled is a byte tensor whose contents depend on seed.
func filled(n int, seed uint64) af.Tensor {
	b := vantest.Pattern(int(seed)*1_000_003+n, n)
	return must(af.NewTensor(lent.Bytes(b), af.Uint8, int64(n)))
}

func must(t af.Tensor, err error) af.Tensor {
	if err != nil {
		panic(err)
	}
	return t
}

func zeros(n int) af.Tensor {
	return must(af.NewTensor(lent.Bytes(make([]byte, n)), af.Uint8, int64(n)))
}

func wait(op Op, err error) error {
	if err != nil {
		return err
	}
	return op.Wait(context.Background())
}

// TestCalls compares the result of every call with the expected one, on several transports, numbers of ranks and
// sizes.
func TestCalls(t *testing.T) {
	for _, n := range []int{1, 2, 3, 5} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			over := []testcluster.Transport{testcluster.InProc}
			if n == 3 {
				over = append(over, testcluster.TCP, testcluster.SHM)
			}
			testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
				all, _ := comms(t, o, n)
				for round, size := range []int{1, 1000, 0, 70_001, 3} {
					onAll(t, n, func(r int) error {
						if err := calls(all[r], memory{}, size, uint64(round)); err != nil {
							return err
						}
						return reductions(all[r], size)
					})
				}
			}, over...)
		})
	}
}

// calls makes every call but reductions once, with tensors in m, and checks its result.
func calls(c *Comm, m memory, size int, seed uint64) error {
	n, self := c.Size(), c.Rank()
	in := func(r int) af.Tensor { return filled(size, seed*100+uint64(r)) }
	joined := func() []byte {
		var b []byte
		for r := range n {
			t := in(r)
			b = append(b, t.Bytes()...)
		}
		return b
	}
	zeros, on := m.zeros, m.on()
	check := func(name string, got af.Tensor, want []byte) error {
		if !bytes.Equal(simgpu.Raw(got.Mem()), want) {
			return fmt.Errorf("%s of %d bytes: wrong values", name, size)
		}
		return nil
	}

	out := zeros(n * size)
	if err := wait(c.AllGather(out, m.in(in(self)), on...)); err != nil {
		return err
	}
	if err := check("AllGather", out, joined()); err != nil {
		return err
	}

	// Rank r gives size+r bytes, and to rank s it gives those of seed r*10+s.
	ragged := func(r, s int) af.Tensor { return filled(size+r, seed+uint64(r*10+s)) }
	outs, ins := make([]af.Tensor, n), make([]af.Tensor, n)
	for r := range n {
		outs[r], ins[r] = zeros(size+r), m.in(ragged(self, r))
	}
	if err := wait(c.AllGatherV(outs, m.in(ragged(self, 0)), on...)); err != nil {
		return err
	}
	for r := range n {
		want := ragged(r, 0)
		if err := check("AllGatherV", outs[r], want.Bytes()); err != nil {
			return err
		}
		clear(simgpu.Raw(outs[r].Mem()))
	}
	if err := wait(c.AllToAll(outs, ins, on...)); err != nil {
		return err
	}
	for r := range n {
		want := ragged(r, self)
		if err := check("AllToAll", outs[r], want.Bytes()); err != nil {
			return err
		}
	}

	for root := range n {
		b, want := zeros(size), filled(size, seed+77)
		if self == root {
			b = m.in(want)
		}
		if err := wait(c.Broadcast(b, root, on...)); err != nil {
			return err
		}
		if err := check("Broadcast", b, want.Bytes()); err != nil {
			return err
		}
		var g af.Tensor
		if self == root {
			g = zeros(n * size)
		}
		if err := wait(c.Gather(g, m.in(in(self)), root, on...)); err != nil {
			return err
		}
		if self == root {
			if err := check("Gather", g, joined()); err != nil {
				return err
			}
		}
		part := zeros(size)
		if err := wait(c.Scatter(part, g, root, on...)); err != nil {
			return err
		}
		own := in(self)
		if err := check("Scatter", part, own.Bytes()); err != nil {
			return err
		}
	}
	return c.Barrier(context.Background())
}

// memory is where the tensors of calls are: on a device, or, without one, on the host.
type memory struct{ dev *simgpu.Device }

// onStream is the stream that makes tensors on devices.
const onStream af.Stream = 5

func (m memory) on() []af.StreamOption {
	if m.dev == nil {
		return nil
	}
	return []af.StreamOption{onStream}
}

func (m memory) zeros(n int) af.Tensor {
	if m.dev == nil {
		return zeros(n)
	}
	return must(af.NewTensor(m.dev.Mem(make([]byte, n)), af.Uint8, int64(n)))
}

// in returns t in m's memory. On a device, a stream makes it after a delay.
func (m memory) in(t af.Tensor) af.Tensor {
	if m.dev == nil {
		return t
	}
	x := m.zeros(t.Len())
	m.dev.Queue(uintptr(onStream), func() {
		for range 100 {
			runtime.Gosched()
		}
		copy(simgpu.Raw(x.Mem()), t.Bytes())
	})
	return x
}

// reductions checks ReduceScatter and AllReduce, in place as well, where every rank r gives i+r at
// index i.
func reductions(c *Comm, count int) error {
	n, self := c.Size(), c.Rank()
	give := func(m int) []int32 {
		l := make([]int32, m)
		for i := range l {
			l[i] = int32(i + self)
		}
		return l
	}
	want := func(i int) int32 { return int32(n*i + n*(n-1)/2) }
	sums := give(count)
	in := must(af.FromSlice(sums))
	if err := wait(c.AllReduce(in, in, Sum)); err != nil {
		return err
	}
	for i, v := range sums {
		if v != want(i) {
			return fmt.Errorf("AllReduce of %d: [%d] = %d, want %d", count, i, v, want(i))
		}
	}
	largest := make([]int32, count)
	if err := wait(c.AllReduce(must(af.FromSlice(largest)), must(af.FromSlice(give(count))), Max)); err != nil {
		return err
	}
	for i, v := range largest {
		if v != int32(i+n-1) {
			return fmt.Errorf("AllReduce by max of %d: [%d] = %d, want %d", count, i, v, i+n-1)
		}
	}
	part := make([]int32, count)
	if err := wait(c.ReduceScatter(must(af.FromSlice(part)), must(af.FromSlice(give(n*count))), Sum)); err != nil {
		return err
	}
	for i, v := range part {
		if v != want(self*count+i) {
			return fmt.Errorf("ReduceScatter of %d: [%d] = %d, want %d", count, i, v, want(self*count+i))
		}
	}
	return nil
}

// TestInFlight has many calls in flight, more than one rank may have, and waits in another order.
func TestInFlight(t *testing.T) {
	all, _ := comms(t, testcluster.Options{}, 3)
	const calls = maxInFlight
	onAll(t, 3, func(r int) error {
		ops, outs := make([]Op, calls), make([]af.Tensor, calls)
		for i := range ops {
			outs[i] = zeros(3 * 100)
			var err error
			if ops[i], err = all[r].AllGather(outs[i], filled(100, uint64(i*10+r))); err != nil {
				return err
			}
		}
		for i := calls - 1; i >= 0; i-- {
			if err := ops[i].Wait(t.Context()); err != nil {
				return err
			}
			for s := range 3 {
				want := filled(100, uint64(i*10+s))
				if got := outs[i].Bytes()[s*100 : s*100+100]; !bytes.Equal(got, want.Bytes()) {
					return fmt.Errorf("call %d: wrong values of rank %d", i, s)
				}
			}
		}
		return nil
	})
}

// TestTooManyInFlight: a call too many is refused, and the communicator goes on.
func TestTooManyInFlight(t *testing.T) {
	all, _ := comms(t, testcluster.Options{}, 2)
	var ops []Op
	for i := range maxInFlight {
		if i == maxInFlight-1 { // one more call fits, and a large AllReduce is two
			if _, err := all[0].AllReduce(zeros(reduceWhole), zeros(reduceWhole), Sum); !errors.Is(err, van.ErrQueueFull) {
				t.Errorf("a large AllReduce: got %v, want ErrQueueFull", err)
			}
		}
		op, err := all[0].Broadcast(zeros(10), 1)
		if err != nil {
			t.Fatal(err)
		}
		ops = append(ops, op)
	}
	if _, err := all[0].Broadcast(zeros(10), 1); !errors.Is(err, van.ErrQueueFull) {
		t.Fatalf("got %v, want ErrQueueFull", err)
	}
	for range maxInFlight {
		if err := wait(all[1].Broadcast(filled(10, 1), 1)); err != nil {
			t.Fatal(err)
		}
	}
	for _, op := range ops {
		if err := op.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	onAll(t, 2, func(r int) error { return all[r].Barrier(t.Context()) })
}

// TestLostWhileMeeting: if a rank is lost during a round, after its hello, the round fails, not the first call
// after it.
func TestLostWhileMeeting(t *testing.T) {
	all, _ := comms(t, testcluster.Options{}, 2)
	c := all[0]
	c.fail(errRebuild)
	own, _, err := c.bootstrap.beginRound("rebuild communicator", func(error) {})
	if err != nil {
		t.Fatal(err)
	}
	c.peerChanged(c.b.ids[1], false, errors.New("its connection broke"))
	other := hello{own.epoch, c.bootstrap.ranks[1].answered, own.ranks, own.n}
	if _, err := c.joined(t.Context(), []hello{own, other}, make([]error, 2)); !errors.Is(err, van.ErrPeerLost) || !strings.Contains(err.Error(), "rank 1") {
		t.Errorf("the round: got %v, want ErrPeerLost of rank 1", err)
	}
	if _, err := c.Broadcast(zeros(10), 1); !errors.Is(err, van.ErrPeerLost) {
		t.Errorf("a call after it: got %v, want ErrPeerLost", err)
	}
}

// TestBegunAnewAtTheEnd: a rank that begins a new round at the end of this rank's, when all have been asked, is met in it: its hello
// is answered, so this rank's must follow, or it would wait for that.
func TestBegunAnewAtTheEnd(t *testing.T) {
	all, _ := comms(t, testcluster.Options{}, 2)
	c, ctx := all[0], t.Context()
	c.fail(errRebuild)
	own, _, err := c.bootstrap.beginRound("rebuild communicator", func(error) {})
	if err != nil {
		t.Fatal(err)
	}
	other := hello{own.epoch, c.bootstrap.ranks[1].answered, own.ranks, own.n}
	rebuilt := make(chan error, 1)
	go func() { rebuilt <- all[1].Rebuild(ctx) }()
	vantest.Eventually(t, 20*time.Second, "its hello has come", func() bool {
		c.b.mu.Lock()
		defer c.b.mu.Unlock()
		return c.bootstrap.ranks[1].answered != other.round
	})
	answers, errs := []hello{own, other}, make([]error, 2)
	again, err := c.joined(ctx, answers, errs)
	if err != nil || !slices.Equal(again, []int{1}) {
		t.Errorf("the round has ended, with error %v, and ranks %v to be met again, want it to go on, and rank 1", err, again)
	}
	if answers[1], err = c.bootstrap.handshake(ctx, 1, own); err != nil {
		t.Fatal(err)
	}
	if again, err = c.joined(ctx, answers, errs); err != nil || len(again) > 0 {
		t.Errorf("then: got error %v and ranks %v, want neither", err, again)
	}
	if err := <-rebuilt; err != nil {
		t.Error(err)
	}
	onAll(t, 2, func(r int) error { return calls(all[r], memory{}, 10, 1) })
}

// TestMismatch: calls that differ fail on all ranks, with both calls in the error; after Rebuild the
// communicator works.
func TestMismatch(t *testing.T) {
	for name, bad := range map[string]func(*Comm) (Op, error){
		"operation": func(c *Comm) (Op, error) { return c.Broadcast(zeros(8), 0) },
		"size":      func(c *Comm) (Op, error) { return c.AllGather(zeros(3*9), zeros(9)) },
		"type": func(c *Comm) (Op, error) {
			return c.AllGather(must(af.FromSlice(make([]int8, 24))), must(af.FromSlice(make([]int8, 8))))
		},
	} {
		t.Run(name, func(t *testing.T) {
			all, _ := comms(t, testcluster.Options{}, 3)
			errs := every(3, func(r int) error {
				if r == 1 {
					return wait(bad(all[r]))
				}
				return wait(all[r].AllGather(zeros(3*8), zeros(8)))
			})
			for r, err := range errs {
				if !errors.Is(err, ErrMismatch) || !strings.Contains(err.Error(), "AllGather of 8 bytes of uint8") {
					t.Errorf("rank %d: %v, want ErrMismatch and the calls of both", r, err)
				}
			}
			onAll(t, 3, func(r int) error { return all[r].Rebuild(t.Context()) })
			onAll(t, 3, func(r int) error { return calls(all[r], memory{}, 10, 1) })
		})
	}
}

// TestLost: the loss of a rank fails what is in flight and later calls on all others, and they go on
// with its replacement.
func TestLost(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		all, c := comms(t, o, 3)
		ops, sums := make([]Op, 3), make([]Op, 3)
		for _, r := range []int{0, 2} {
			var err error
			if ops[r], err = all[r].AllGather(zeros(3*8), zeros(8)); err != nil {
				t.Fatal(err)
			}
			if sums[r], err = all[r].AllReduce(zeros(2*reduceWhole), zeros(2*reduceWhole), Sum); err != nil {
				t.Fatal(err)
			}
		}
		c.Workers[1].Close()
		for _, r := range []int{0, 2} {
			if err := ops[r].Wait(t.Context()); !errors.Is(err, van.ErrPeerLost) || !strings.Contains(err.Error(), "worker 1 (id 11)") {
				t.Errorf("rank %d: %v, want ErrPeerLost of worker 1", r, err)
			}
			if err := sums[r].Wait(t.Context()); !errors.Is(err, van.ErrPeerLost) {
				t.Errorf("rank %d: AllReduce: %v, want ErrPeerLost", r, err)
			}
			if _, err := all[r].Broadcast(zeros(1), r); !errors.Is(err, van.ErrPeerLost) || !strings.Contains(err.Error(), "Rebuild") {
				t.Errorf("rank %d: a later call: %v, want ErrPeerLost and what to do", r, err)
			}
		}
		testcluster.Lost(t, c.Scheduler, van.WorkerID(1))
		onAll(t, 3, func(r int) error {
			if r != 1 {
				return all[r].Rebuild(t.Context())
			}
			n, err := c.Join(t.Context(), "worker", 1, nil)
			if err == nil {
				all[1], err = New(t.Context(), n, Options{Ranks: ranks(3), Timeout: 20 * time.Second})
			}
			return err
		})
		for round := range 3 {
			onAll(t, 3, func(r int) error { return calls(all[r], memory{}, []int{1000, 50_000}[round%2], uint64(round)) })
		}
	}, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}

// TestTimeout: if a rank does not make the call, the errors of the waiting ranks name it, and all ranks fail.
func TestTimeout(t *testing.T) {
	all, _ := comms(t, testcluster.Options{}, 3)
	errs := every(2, func(r int) error {
		op, err := all[r].AllGather(zeros(3*8), zeros(8))
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		return op.Wait(ctx)
	})
	for r, err := range errs {
		if !errors.Is(err, van.ErrTimeout) || !strings.Contains(err.Error(), "rank 2 (worker 2") {
			t.Errorf("rank %d: %v, want ErrTimeout and rank 2", r, err)
		}
	}
	if err := wait(all[2].AllGather(zeros(3*8), zeros(8))); !errors.Is(err, van.ErrTimeout) {
		t.Fatalf("the late rank: %v, want ErrTimeout of another one", err)
	}
	onAll(t, 3, func(r int) error { return all[r].Rebuild(t.Context()) })
	onAll(t, 3, func(r int) error { return calls(all[r], memory{}, 100, 5) })
}

// TestSpinning: waits that spin forever end with their node, also if the node has sent no requests.
func TestSpinning(t *testing.T) {
	o := testcluster.Options{Over: testcluster.SHM, Set: func(c *postoffice.Config) { c.BusyPoll = env.SpinForever }}
	all, c := comms(t, o, 2)
	onAll(t, 2, func(r int) error { return calls(all[r], memory{}, 100, 1) })
	op, err := all[0].Broadcast(zeros(8), 0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second) // Wait has no limit of its own then
	defer cancel()
	waited := make(chan error, 1)
	go func() { waited <- op.Wait(ctx) }()
	c.Workers[0].Close()
	if err := <-waited; err == nil || ctx.Err() != nil {
		t.Errorf("got %v, after the node has ended", err)
	}
}

// TestNew: wrong arguments, ranks that differ, and missing ranks.
func TestNew(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Workers: 3})
	for name, o := range map[string]Options{
		"want it among":   {Ranks: []int{1, 2}},
		"among them":      {Ranks: []int{1}},
		"want 0 to 2":     {Ranks: []int{0, 3}},
		"ascending":       {Ranks: []int{1, 0}},
		"each once":       {Ranks: []int{0, 0, 1}},
		"ID 4096, want 0": {ID: 4096},
	} {
		if name == "want it among" {
			name = "want this node's, 0"
		}
		if _, err := New(t.Context(), c.Workers[0], o); !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), name) {
			t.Errorf("%+v: %v, want ErrInvalid and %q", o, err, name)
		}
	}
	if _, err := New(t.Context(), c.Scheduler, Options{}); !errors.Is(err, van.ErrInvalid) {
		t.Errorf("on a scheduler: %v", err)
	}
	errs := every(2, func(r int) error {
		_, err := New(t.Context(), c.Workers[r], Options{Ranks: [][]int{{0, 1}, {0, 1, 2}}[r], Timeout: 10 * time.Second})
		return err
	})
	for r, err := range errs {
		if !errors.Is(err, ErrMismatch) {
			t.Errorf("different ranks: rank %d: %v, want ErrMismatch", r, err)
		}
	}
	quickest := time.Hour // a pause of the machine affects only one of the attempts
	for i := 0; i < 4 && quickest >= tellLimit; i++ {
		begun := time.Now()
		_, err := New(t.Context(), c.Workers[0], Options{Ranks: ranks(3), Timeout: 200 * time.Millisecond})
		if !errors.Is(err, van.ErrTimeout) || !strings.Contains(err.Error(), "rank 2 (worker 2") {
			t.Errorf("ranks that do not come: %v, want ErrTimeout and their names", err)
		}
		quickest = min(quickest, time.Since(begun))
	}
	if quickest >= tellLimit {
		t.Errorf("New has returned after %s, its limit was 200ms", quickest)
	}
	alone, err := New(t.Context(), c.Servers[0], Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := calls(alone, memory{}, 100, 1); err != nil {
		t.Error(err)
	}
	if err := alone.Close(); err != nil {
		t.Error(err)
	}
	if _, err := alone.AllGather(zeros(1), zeros(1)); !errors.Is(err, van.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	if err := alone.Rebuild(t.Context()); !errors.Is(err, van.ErrClosed) {
		t.Errorf("Rebuild after Close: %v", err)
	}
}

// TestClose: when a rank closes its end, the calls of another rank fail that still want a part of it, or still have one for it.
func TestClose(t *testing.T) {
	for name, call := range map[string]func(c *Comm) (Op, error){
		"both":             func(c *Comm) (Op, error) { return c.AllGather(zeros(2*8), zeros(8)) },
		"its part":         func(c *Comm) (Op, error) { return c.Broadcast(zeros(8), 1) },
		"a part for it":    func(c *Comm) (Op, error) { return c.Broadcast(zeros(8), 0) },
		"one of its parts": func(c *Comm) (Op, error) { return c.Scatter(zeros(8), zeros(2*8), 0) },
	} {
		t.Run(name, func(t *testing.T) {
			all, _ := comms(t, testcluster.Options{}, 2)
			op, err := call(all[0])
			if err != nil {
				t.Fatal(err)
			}
			if err := all[1].Close(); err != nil {
				t.Fatal(err)
			}
			if err := op.Wait(t.Context()); !errors.Is(err, van.ErrClosed) || !strings.Contains(err.Error(), "worker 1 (id 11)") {
				t.Errorf("got %v, want ErrClosed of worker 1", err)
			}
			if err := op.Wait(t.Context()); !errors.Is(err, postoffice.ErrUnknownHandler) {
				t.Errorf("second Wait: %v", err)
			}
		})
	}
}

// TestCloseWhileOthersRead: each call of Close reports that other ranks still read memory of this rank, until none does.
func TestCloseWhileOthersRead(t *testing.T) {
	all, _ := comms(t, testcluster.Options{}, 2)
	b, l := &all[0].b, &all[0].calls
	b.mu.Lock()
	l.sending++ // as if the transport still used a part
	b.mu.Unlock()
	for range 2 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		vantest.Fails(t, all[0].Shutdown(ctx), van.ErrTimeout, "close communicator", "worker 0", "others are still reading memory of this rank")
		cancel()
	}
	b.mu.Lock()
	l.quiet = nil // of the calls that have ended
	b.mu.Unlock()
	closed := make(chan error, 1)
	go func() { closed <- all[0].Close() }()
	vantest.Eventually(t, 20*time.Second, "Close waits", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return l.quiet != nil
	})
	b.mu.Lock()
	l.sendDone()
	b.mu.Unlock()
	select {
	case err := <-closed:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Error("nobody reads memory of this rank, and Close waits")
	}
}

// TestBarrierThenClose: a rank that closes after the last call does not disturb ranks that are still in that call.
func TestBarrierThenClose(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		const n = 4
		o.Workers = n
		c := testcluster.Start(t, o)
		for range 10 {
			onAll(t, n, func(r int) error {
				comm, err := New(t.Context(), c.Workers[r], Options{Ranks: ranks(n), Timeout: 20 * time.Second})
				if err != nil {
					return err
				}
				if err := comm.Barrier(t.Context()); err != nil {
					return err
				}
				return comm.Close()
			})
		}
	}, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}

// TestGroupsOfServers: the instances of a group of servers, by default.
func TestGroupsOfServers(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Servers, o.Group = 2, 2
		c := testcluster.Start(t, o)
		onAll(t, 4, func(i int) error {
			comm, err := New(t.Context(), c.Servers[i], Options{})
			if err != nil {
				return err
			}
			if comm.Rank() != i%2 || comm.Size() != 2 {
				return fmt.Errorf("rank %d of %d, want %d of 2", comm.Rank(), comm.Size(), i%2)
			}
			if err := calls(comm, memory{}, 1000, 3); err != nil {
				return err
			}
			if err := comm.Barrier(t.Context()); err != nil {
				return err
			}
			return comm.Close()
		})
	}, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}

// TestWaitSlice: a wait in slices returns while the call goes on, gives its result once, and ends with its
// context.
func TestWaitSlice(t *testing.T) {
	all, _ := comms(t, testcluster.Options{}, 2)
	out := zeros(20)
	op, err := all[0].AllGather(out, filled(10, 1))
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := op.WaitSlice(t.Context(), time.Millisecond); err != postoffice.ErrPending {
			t.Fatalf("got %v, want ErrPending", err)
		}
	}
	if err := wait(all[1].AllGather(zeros(20), filled(10, 2))); err != nil {
		t.Fatal(err)
	}
	for err = postoffice.ErrPending; err == postoffice.ErrPending; {
		err = op.WaitSlice(t.Context(), time.Second)
	}
	a, b := filled(10, 1), filled(10, 2)
	if err != nil || !bytes.Equal(out.Bytes(), append(a.Bytes(), b.Bytes()...)) {
		t.Fatalf("%v, values %v", err, out.Bytes())
	}
	if err := op.WaitSlice(t.Context(), time.Second); !errors.Is(err, postoffice.ErrUnknownHandler) {
		t.Errorf("waited for twice: %v", err)
	}

	if op, err = all[0].AllGather(zeros(20), filled(10, 1)); err != nil {
		t.Fatal(err)
	}
	one := make(chan error, 1)
	go func() { one <- op.Wait(t.Context()) }()
	vantest.Eventually(t, 20*time.Second, "somebody waits", func() bool {
		all[0].b.mu.Lock()
		defer all[0].b.mu.Unlock()
		return op.o.waiter.waits
	})
	if err := op.WaitSlice(t.Context(), time.Second); !errors.Is(err, cluster.ErrOtherWaits) {
		t.Errorf("beside another one that waits: %v", err)
	}
	if err := errors.Join(wait(all[1].AllGather(zeros(20), filled(10, 2))), <-one); err != nil {
		t.Error(err)
	}

	if op, err = all[0].AllGather(zeros(20), filled(10, 1)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	if err := op.WaitSlice(ctx, time.Millisecond); err != postoffice.ErrPending {
		t.Fatalf("got %v, want ErrPending", err)
	}
	cancel(van.ErrTimeout)
	vantest.Fails(t, op.WaitSlice(ctx, time.Minute), van.ErrTimeout, "AllGather", "nothing has arrived from rank 1")
}
