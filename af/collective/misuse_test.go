package collective

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

func floats(n int) af.Tensor {
	return must(af.NewTensor(lent.Bytes(make([]byte, 4*n)), af.Float32, int64(n)))
}

// TestNothingForARank: a rank that neither gives nor gets anything has only empty tensors, of
// which no type follows.
func TestNothingForARank(t *testing.T) {
	all, _ := comms(t, testcluster.Options{}, 3)
	onAll(t, 3, func(r int) error {
		in, out := []af.Tensor{{}, {}, {}}, []af.Tensor{{}, {}, {}}
		if r < 2 {
			in[1-r], out[1-r] = floats(5), floats(5)
		}
		return wait(all[r].AllToAll(out, in))
	})
}

// TestNothingAtAnOddAddress: where tensors without elements lie does not matter.
func TestNothingAtAnOddAddress(t *testing.T) {
	all, _ := comms(t, testcluster.Options{}, 2)
	onAll(t, 2, func(r int) error {
		nothing := must(af.FromBytes(make([]byte, 9)[1:1], af.Float32, 0))
		return wait(all[r].AllReduce(nothing, nothing, Sum))
	})
}

// TestSharedMemory: a call whose result would be written where others still read is refused.
func TestSharedMemory(t *testing.T) {
	all, _ := comms(t, testcluster.Options{}, 2)
	c := all[0]
	whole := floats(64)
	part := func(from, n int) af.Tensor {
		b := whole.Bytes()[4*from : 4*(from+n)]
		return must(af.FromBytes(b, af.Float32, int64(n)))
	}
	for name, call := range map[string]func() (Op, error){
		"AllToAll in place": func() (Op, error) {
			l := []af.Tensor{part(0, 8), part(8, 8)}
			return c.AllToAll(l, l)
		},
		"AllToAll, another's part": func() (Op, error) {
			return c.AllToAll([]af.Tensor{part(0, 8), part(8, 8)}, []af.Tensor{part(16, 8), part(4, 8)})
		},
		"AllGather, another's part": func() (Op, error) { return c.AllGather(part(0, 16), part(8, 8)) },
		"AllGather, shifted":        func() (Op, error) { return c.AllGather(part(0, 16), part(1, 8)) },
		"AllGatherV, parts of out": func() (Op, error) {
			return c.AllGatherV([]af.Tensor{part(0, 8), part(7, 8)}, part(20, 8))
		},
		"AllToAll, parts of out": func() (Op, error) {
			return c.AllToAll([]af.Tensor{part(8, 8), part(4, 5)}, []af.Tensor{part(16, 8), part(24, 5)})
		},
		"AllGatherV, another's part": func() (Op, error) {
			return c.AllGatherV([]af.Tensor{part(0, 8), part(8, 8)}, part(8, 8))
		},
		"Gather, another's part":      func() (Op, error) { return c.Gather(part(0, 16), part(8, 8), 0) },
		"Scatter, another's part":     func() (Op, error) { return c.Scatter(part(8, 8), part(0, 16), 0) },
		"ReduceScatter, another's":    func() (Op, error) { return c.ReduceScatter(part(8, 8), part(0, 16), Sum) },
		"AllReduce, shifted":          func() (Op, error) { return c.AllReduce(part(1, 8), part(0, 8), Sum) },
		"AllReduce in parts, shifted": func() (Op, error) { b := floats(1 << 16); return c.AllReduce(tail(b, 1), head(b, 1), Sum) },
	} {
		if _, err := call(); !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), "shares memory") {
			t.Errorf("%s: %v, want that memory is shared", name, err)
		}
	}
	onAll(t, 2, func(r int) error { // nothing has been sent, and own parts may be shared
		out := floats(16)
		b := out.Bytes()
		return wait(all[r].AllGather(out, must(af.FromBytes(b[32*r:32*r+32], af.Float32, 8))))
	})
}

func head(t af.Tensor, less int) af.Tensor {
	return must(af.FromBytes(t.Bytes()[:t.Len()-4*less], af.Float32, int64(t.Len()/4-less)))
}

func tail(t af.Tensor, from int) af.Tensor {
	return must(af.FromBytes(t.Bytes()[4*from:], af.Float32, int64(t.Len()/4-from)))
}

// TestMismatchWithOneThatHasEnded: a call that does not match is noticed, too, when the rank that it asks
// has its part of the others' already.
func TestMismatchWithOneThatHasEnded(t *testing.T) {
	all, _ := comms(t, testcluster.Options{}, 3)
	root := make(chan error, 1)
	go func() { root <- wait(all[2].Broadcast(zeros(8), 2)) }()
	if err := wait(all[1].Broadcast(zeros(8), 2)); err != nil {
		t.Fatal(err)
	}
	if err := wait(all[0].Broadcast(zeros(8), 1)); !errors.Is(err, ErrMismatch) || !strings.Contains(err.Error(), "with root 1") {
		t.Errorf("the rank with another root: %v, want ErrMismatch", err)
	}
	if err := <-root; !errors.Is(err, ErrMismatch) {
		t.Errorf("the root: %v, want ErrMismatch", err)
	}
	onAll(t, 3, func(r int) error {
		if err := all[r].Rebuild(t.Context()); err != nil {
			return err
		}
		return all[r].Barrier(t.Context())
	})
}

// TestAskedAgain: if a request is received again after its call has ended, as from a transport that has forgotten
// it, it is dropped, and nothing fails.
func TestAskedAgain(t *testing.T) {
	all, _ := comms(t, testcluster.Options{}, 2)
	c := all[0]
	for seq, early := range []bool{false, true} { // whether the request arrived before this rank had made the call
		var ops [2]Op
		for _, r := range [][]int{{0, 1}, {1, 0}}[seq] {
			var err error
			if ops[r], err = all[r].Broadcast(zeros(8), 0); err != nil {
				t.Fatal(err)
			}
			if early && r == 1 {
				vantest.Eventually(t, 20*time.Second, "the request is kept", func() bool {
					c.b.mu.Lock()
					defer c.b.mu.Unlock()
					return c.calls.asked[1][seq].kept
				})
			}
		}
		onAll(t, 2, func(r int) error { return ops[r].Wait(t.Context()) })
		m := &van.Message{}
		m.Reset()
		m.Sender, m.Request, m.Key, m.ValLen = c.b.ids[1], true, partKey(uint32(seq), 1), 8
		m.Body = call{kind: broadcast, dtype: af.Uint8, bytes: 8}.appendAsk(nil, c.b.epoch)
		if err := c.handle(m); !errors.Is(err, van.ErrMalformed) || !strings.Contains(err.Error(), "second request") {
			t.Errorf("call %d: %v, want that it is requested twice", seq, err)
		}
	}
	onAll(t, 2, func(r int) error { return all[r].Barrier(t.Context()) })
}

// TestAskFromBeforeRebuild: a late request from before Rebuild is refused: it does not take the sender's part of
// the call that has its number now.
func TestAskFromBeforeRebuild(t *testing.T) {
	all, _ := comms(t, testcluster.Options{}, 2)
	c := all[0]
	c.b.mu.Lock()
	before := c.b.epoch
	c.b.mu.Unlock()
	onAll(t, 2, func(r int) error { return all[r].Rebuild(t.Context()) })
	var ops [2]Op
	var err error
	if ops[0], err = c.Broadcast(must(af.FromSlice([]uint8{1, 2, 3})), 0); err != nil {
		t.Fatal(err)
	}
	m := &van.Message{}
	m.Reset()
	m.Sender, m.Request, m.Key, m.ValLen = c.b.ids[1], true, partKey(0, 1), 3
	m.Body = call{kind: broadcast, dtype: af.Uint8, bytes: 3}.appendAsk(nil, before)
	if err := c.handle(m); err != nil {
		t.Errorf("%v, want that it is answered with a refusal", err)
	}
	c.b.mu.Lock()
	state := ops[0].o.sends.to[1].state
	c.b.mu.Unlock()
	if state != awaited {
		t.Fatalf("rank 1 counts as one that has taken its part (%d)", state)
	}
	got := []uint8{0, 0, 0}
	if ops[1], err = all[1].Broadcast(must(af.FromSlice(got)), 0); err != nil {
		t.Fatal(err)
	}
	onAll(t, 2, func(r int) error { return ops[r].Wait(t.Context()) })
	if got[0] != 1 || got[1] != 2 || got[2] != 3 {
		t.Errorf("%v came", got)
	}
}

// TestNamesWhoIsLate: if a wait fails, the error names the rank that has not made the call.
func TestNamesWhoIsLate(t *testing.T) {
	for name, call := range map[string]func(*Comm) error{
		"Broadcast": func(c *Comm) error { return wait(c.Broadcast(zeros(8), 3)) },
		"AllReduce": func(c *Comm) error { b := floats(100_000); return wait(c.AllReduce(b, b, Sum)) },
	} {
		t.Run(name, func(t *testing.T) {
			cl := testcluster.Start(t, testcluster.Options{Workers: 4})
			all := make([]*Comm, 4)
			onAll(t, 4, func(r int) (err error) {
				all[r], err = New(t.Context(), cl.Workers[r], Options{Ranks: ranks(4), Timeout: 10 * time.Second})
				return err
			})
			late := all[0]
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second) // in which ranks 1 and 2 send messages
			defer cancel()
			ops := make(chan error, 2)
			for _, c := range all[1:3] { // they wait for as long as their communicators last
				go func() { ops <- call(c) }()
			}
			var err error
			switch name {
			case "Broadcast":
				op, e := late.Broadcast(zeros(8), 3)
				if e != nil {
					t.Fatal(e)
				}
				err = op.Wait(ctx)
			default:
				b := floats(100_000)
				op, e := late.AllReduce(b, b, Sum)
				if e != nil {
					t.Fatal(e)
				}
				err = op.Wait(ctx)
			}
			<-ops
			<-ops
			if !errors.Is(err, van.ErrTimeout) || !strings.Contains(err.Error(), "nothing has arrived from rank 3") ||
				strings.Contains(err.Error(), "from rank 1") || strings.Contains(err.Error(), "from rank 2") {
				t.Errorf("%v, want that nothing has arrived from rank 3", err)
			}
		})
	}
}

// TestMadeAgainWithResend: a communicator that is closed and made again in the same processes is
// not taken for the one before, though PS_RESEND remembers that one's messages.
func TestMadeAgainWithResend(t *testing.T) {
	cl := testcluster.Start(t, testcluster.Options{Workers: 2, Over: testcluster.TCP, Set: func(c *postoffice.Config) {
		c.Resend, c.ResendTimeout = true, 50*time.Millisecond
	}})
	for range 6 {
		onAll(t, 2, func(r int) error {
			c, err := New(t.Context(), cl.Workers[r], Options{Ranks: ranks(2), Timeout: 20 * time.Second})
			if err != nil {
				return err
			}
			defer c.Close()
			if err := c.Barrier(t.Context()); err != nil && !errors.Is(err, van.ErrClosed) {
				return err
			}
			return nil
		})
	}
}

// owner owns memory that it frees after its last user has released it, as Python does.
type owner struct {
	users atomic.Int64
	freed atomic.Bool
	late  atomic.Int64 // uses that began when it was freed
}

func (o *owner) Retain() {
	if o.freed.Load() {
		o.late.Add(1)
	}
	o.users.Add(1)
}

func (o *owner) Release() {
	if o.users.Add(-1) == 0 {
		o.freed.Store(true)
	}
}

// TestMemoryIsHeld: the caller may give its memory up when a call has begun: it is used until the
// call has ended, without a gap, and not behind it.
func TestMemoryIsHeld(t *testing.T) {
	type collective func(c *Comm, out, in af.Tensor) (Op, error)
	for name, x := range map[string]struct {
		out, in int // elements
		call    collective
	}{
		"AllGather":     {60_000, 20_000, func(c *Comm, out, in af.Tensor) (Op, error) { return c.AllGather(out, in) }},
		"ReduceScatter": {20_000, 60_000, func(c *Comm, out, in af.Tensor) (Op, error) { return c.ReduceScatter(out, in, Sum) }},
		"AllReduce":     {100, 100, func(c *Comm, out, in af.Tensor) (Op, error) { return c.AllReduce(out, in, Sum) }},
		"AllReduce in parts": {60_000, 60_000, func(c *Comm, out, in af.Tensor) (Op, error) {
			return c.AllReduce(out, in, Sum)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			all, _ := comms(t, testcluster.Options{Over: testcluster.TCP}, 3)
			onAll(t, 3, func(r int) error {
				for range 20 {
					var of [2]owner
					var held [2]af.Tensor
					for i, n := range [2]int{x.out, x.in} {
						b := make([]float32, n)
						held[i] = must(af.FromPointer(unsafe.Pointer(&b[0]), backend.Host, &of[i], af.Float32, int64(n)))
						held[i].Mem().Retain() // as a function does that reads an argument
					}
					op, err := x.call(all[r], held[0], held[1])
					for i := range held {
						held[i].Mem().Release()
					}
					if err == nil {
						err = op.Wait(t.Context())
					}
					if err != nil {
						return err
					}
					for i := range of {
						if n := of[i].late.Load(); n > 0 {
							return fmt.Errorf("tensor %d was used %d times after it had been given back", i, n)
						}
					}
				}
				return nil
			})
		})
	}
}

// TestFailsWhileReducing: Wait does not return while the result is still written to.
func TestFailsWhileReducing(t *testing.T) {
	const n = 20_000
	all, _ := comms(t, testcluster.Options{}, 2)
	reduces, goOn := make(chan struct{}), make(chan struct{})
	sum, err := folderFor(af.Float32, Sum)
	if err != nil {
		t.Fatal(err)
	}
	slow := func(dst, a, b backend.Mem) {
		close(reduces)
		<-goOn
		sum(dst, a, b)
	}
	var ops [2]Op
	onAll(t, 2, func(r int) (err error) {
		k := call{kind: allReduce, reduction: Sum, dtype: af.Float32, root: -1, bytes: 4 * n}
		ops[r], err = all[r].reduceInParts(k, [...]folder{slow, sum}[r], floats(n), floats(n))
		return err
	})
	waited := make(chan error, 1)
	go func() { waited <- ops[0].Wait(t.Context()) }()
	<-reduces
	boom := errors.New("boom")
	all[0].fail(boom)
	all[0].b.mu.Lock()
	if ops[0].o.waiter.told {
		t.Error("the call has ended while its result is written to")
	}
	all[0].b.mu.Unlock()
	close(goOn)
	if err := <-waited; !errors.Is(err, boom) {
		t.Error(err)
	}
	if err := ops[1].Wait(t.Context()); err == nil {
		t.Error("no error on rank 1")
	}
}

// TestHelloRefused: a hello that the transport refuses as malformed ends New at once, with its error.
func TestHelloRefused(t *testing.T) {
	hook := &hooks.Van{}
	cl := testcluster.Start(t, testcluster.Options{Workers: 2, Wrap: hook.Wrap("worker", 0)})
	hook.OnSend(func(*van.Message) hooks.Verdict {
		return hooks.Refuse(fmt.Errorf("the test's transport: %w", van.ErrMalformed))
	})
	_, err := New(t.Context(), cl.Workers[0], Options{Ranks: ranks(2), Timeout: 20 * time.Second})
	vantest.Fails(t, err, van.ErrMalformed, "the test's transport")
}

// TestAnswerRefused: a part that cannot be sent fails the call on all ranks, and is not held, also if nothing else can be
// sent.
func TestAnswerRefused(t *testing.T) {
	gather := func(c *Comm) (Op, error) { return c.AllGather(zeros(16000), zeros(8000)) }
	cast := func(c *Comm) (Op, error) { return c.Broadcast(zeros(8000), 0) }
	for i, call := range []func(*Comm) (Op, error){gather, gather, cast} {
		everything := i > 0
		hook := &hooks.Van{}
		all, _ := comms(t, testcluster.Options{Wrap: hook.Wrap("worker", 0)}, 2)
		hook.OnSend(func(m *van.Message) hooks.Verdict {
			if !everything && (m.Request || m.Frames == 0) {
				return hooks.Pass
			}
			return hooks.Refuse(fmt.Errorf("the test's transport: %w", van.ErrQueueFull))
		})
		onAll(t, 2, func(r int) error {
			if err := wait(call(all[r])); err == nil || !strings.Contains(err.Error(), "the test's transport") {
				t.Errorf("case %d, rank %d: error %v, want why rank 0 could not send", i, r, err)
			}
			return nil
		})
		hook.OnSend(nil)
		onAll(t, 2, func(r int) error { return all[r].Rebuild(t.Context()) })
	}
}

// slowToTell is a van that sends the reason of a communicator's failure late: when a hello has arrived, or a little later.
type slowToTell struct {
	van.Van
	on    *atomic.Bool
	hello chan struct{}
	begun *sync.Once
}

func (v slowToTell) Unwrap() van.Van { return v.Van }

func (v slowToTell) Send(m *van.Message) error {
	switch verb, err := verbOf(m.Body); {
	case err != nil || !v.on.Load():
	case verb == verbAsk:
		return nil // lost, or the other rank would find out by itself
	case verb == verbHello && m.Request:
		v.begun.Do(func() { close(v.hello) })
	case verb == verbAbort, verb == verbRefused:
		select {
		case <-v.hello:
		case <-time.After(100 * time.Millisecond): // in which it would have arrived
		}
	}
	return v.Van.Send(m)
}

// TestReasonBeforeRebuild: a rank that begins anew at once says first why the communicator has failed; to
// the others it would only begin anew otherwise.
func TestReasonBeforeRebuild(t *testing.T) {
	slow := slowToTell{on: &atomic.Bool{}, hello: make(chan struct{}), begun: &sync.Once{}}
	all, _ := comms(t, testcluster.Options{Wrap: func(role string, rank int, f van.Factory) van.Factory {
		if role != "worker" || rank != 0 {
			return f
		}
		return func(o van.Options) (van.Van, error) {
			v, err := f(o)
			s := slow
			s.Van = v
			return s, err
		}
	}}, 2)
	slow.on.Store(true)
	first, err := all[0].AllGather(zeros(2*8), zeros(8))
	if err != nil {
		t.Fatal(err)
	}
	errs := every(2, func(r int) error {
		if r == 0 { // it does not wait for its call: it would receive in place of the transport
			vantest.Eventually(t, 20*time.Second, "it has failed", func() bool {
				all[0].b.mu.Lock()
				defer all[0].b.mu.Unlock()
				return all[0].b.err != nil
			})
		} else if err := wait(all[1].AllGather(zeros(2*9), zeros(9))); !errors.Is(err, ErrMismatch) {
			t.Errorf("the other rank: got %v, want ErrMismatch", err)
		}
		return all[r].Rebuild(t.Context())
	})
	for r, err := range errs {
		if err != nil {
			t.Errorf("rank %d: %v", r, err)
		}
	}
	if err := first.Wait(t.Context()); !errors.Is(err, ErrMismatch) {
		t.Errorf("the first rank: got %v, want ErrMismatch", err)
	}
	slow.on.Store(false)
	onAll(t, 2, func(r int) error { return calls(all[r], memory{}, 10, 1) })
}

// TestClosedAtOnce: a rank that closes its end as soon as it has made it does not make New of another one fail, which
// has not got its answer yet, or gets none any more; calls fail then.
func TestClosedAtOnce(t *testing.T) {
	for name, late := range map[string]hooks.Verdict{"late answer": hooks.Keep, "no answer": hooks.Lose} {
		t.Run(name, func(t *testing.T) {
			hook := &hooks.Van{}
			cl := testcluster.Start(t, testcluster.Options{Workers: 2, Wrap: hook.Wrap("worker", 0)})
			answered, aborted := make(chan struct{}, 1), make(chan struct{}, 1)
			tell := func(c chan struct{}) {
				select {
				case c <- struct{}{}:
				default:
				}
			}
			hook.OnReceive(func(m *van.Message) hooks.Verdict {
				switch v, _ := verbOf(m.Body); {
				case !m.Request && v == verbHello:
					tell(answered)
					return late
				case m.Request && v == verbAbort:
					tell(aborted)
				}
				return hooks.Pass
			})
			made := make(chan error, 1)
			var c *Comm
			go func() {
				var err error
				c, err = New(t.Context(), cl.Workers[0], Options{Ranks: ranks(2), Timeout: 20 * time.Second})
				made <- err
			}()
			other, err := New(t.Context(), cl.Workers[1], Options{Ranks: ranks(2), Timeout: 20 * time.Second})
			if err != nil {
				t.Fatal(err)
			}
			<-answered
			closed := make(chan error, 1)
			go func() { closed <- other.Close() }()
			<-aborted
			hook.OnReceive(nil)
			hook.DeliverKept()
			if err := <-made; err != nil {
				t.Fatal("New:", err)
			}
			vantest.Fails(t, c.Barrier(t.Context()), van.ErrClosed, "worker 1")
			for _, err := range []error{c.Close(), <-closed} {
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestClosedInRebuild: if a rank closes its end in Rebuild, after the others have finished the round with it,
// their calls fail at once, although they receive no other message about it.
func TestClosedInRebuild(t *testing.T) {
	for name, early := range map[string]bool{"called before": true, "called after": false} {
		t.Run(name, func(t *testing.T) {
			hook := &hooks.Van{}
			all, _ := comms(t, testcluster.Options{Workers: 3, Wrap: hook.Wrap("worker", 1)}, 3)
			hook.OnReceive(func(m *van.Message) hooks.Verdict {
				if v, _ := verbOf(m.Body); !m.Request && v == verbHello && m.Sender == all[2].b.node.ID() {
					return hooks.Lose // so that only this rank does not finish
				}
				return hooks.Pass
			})
			rebuilt := make(chan error, 1)
			go func() { rebuilt <- all[1].Rebuild(t.Context()) }()
			others := []*Comm{all[0], all[2]}
			onAll(t, 2, func(i int) error { return others[i].Rebuild(t.Context()) })
			ops := make([]Op, 2)
			call := func() {
				onAll(t, 2, func(i int) (err error) {
					ops[i], err = others[i].AllGather(zeros(3*8), zeros(8))
					return err
				})
			}
			if early {
				call()
			}
			if err := all[1].Close(); err != nil {
				t.Error(err)
			}
			vantest.Fails(t, <-rebuilt, van.ErrClosed, "rebuild communicator")
			for i, c := range others {
				if !early {
					vantest.Eventually(t, 10*time.Second, "it has heard", func() bool {
						c.b.mu.Lock()
						defer c.b.mu.Unlock()
						return c.b.left != nil || c.b.err != nil
					})
					vantest.Fails(t, c.Barrier(t.Context()), van.ErrClosed, "worker 1")
					continue
				}
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				vantest.Fails(t, ops[i].Wait(ctx), van.ErrClosed, "worker 1")
				cancel()
			}
		})
	}
}

// TestErrorsNameTheCall: if a lost rank or a canceling rank ends a call, the error names the communicator, the
// call, and the rank by its number in that communicator.
func TestErrorsNameTheCall(t *testing.T) {
	cl := testcluster.Start(t, testcluster.Options{Workers: 3})
	all := make([]*Comm, 3)
	begin := func(who ...int) {
		onAll(t, len(who), func(i int) (err error) {
			all[who[i]], err = New(t.Context(), cl.Workers[who[i]], Options{ID: 7, Ranks: who, Timeout: 20 * time.Second})
			return err
		})
	}
	begin(1, 2)
	onAll(t, 2, func(i int) error { return all[1+i].Barrier(t.Context()) })
	op, err := all[1].AllGather(zeros(2*8), zeros(8))
	if err != nil {
		t.Fatal(err)
	}
	all[2].fail(all[2].b.about(0, van.ErrTimeout))
	vantest.Fails(t, op.Wait(t.Context()), van.ErrTimeout, "communicator 7", "rank 1 (worker 2")
	onAll(t, 2, func(i int) error { return all[1+i].Rebuild(t.Context()) })
	if op, err = all[1].AllGather(zeros(2*8), zeros(8)); err != nil {
		t.Fatal(err)
	}
	cl.Workers[2].Close()
	vantest.Fails(t, op.Wait(t.Context()), van.ErrPeerLost, "AllGather", "communicator 7, call 0", "rank 1 (worker 2")
	vantest.Fails(t, all[1].Barrier(t.Context()), van.ErrPeerLost, "communicator 7, call 0", "rank 1 (worker 2")
	for _, c := range all[1:] {
		_ = c.Close()
	}
}

// TestKeptOfAnEarlierEpoch: a request of a later epoch or of another process replaces the pending request for the
// same call. Only a repetition of the same request is refused.
func TestKeptOfAnEarlierEpoch(t *testing.T) {
	l := &callWindow{b: &base{}, asked: make([][maxInFlight]ask, 2)}
	for i, x := range []struct {
		epoch   uint64
		process uint32
		want    error
	}{{5, 1, nil}, {6, 1, nil}, {6, 1, van.ErrMalformed}, {6, 2, nil}, {6, 2, van.ErrMalformed}} {
		a := ask{request: request{rank: 1}, epoch: x.epoch, seq: 3}
		a.reply.ProcessEpoch = x.process
		l.b.mu.Lock()
		if err := l.keep(&a); !errors.Is(err, x.want) {
			t.Errorf("request %d: %v, want %v", i, err, x.want)
		}
		if got := l.asked[1][3]; !got.kept || got.epoch != x.epoch || got.reply.ProcessEpoch != x.process {
			t.Errorf("request %d: that of epoch %d and process %d is kept, want %d and %d", i, got.epoch, got.reply.ProcessEpoch, x.epoch, x.process)
		}
	}
}
