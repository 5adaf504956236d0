package window

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/af/collective"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/fakeverbs"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/env"
	"github.com/stepaf/stepaf-go/van/rdma"
)

// transports runs a test over all transports: sockets, shared memory, RDMA on devices in memory,
// and with messages that are lost and sent again.
func transports(t *testing.T, test func(t *testing.T, o testcluster.Options)) {
	testcluster.Over(t, test, testcluster.InProc, testcluster.TCP, testcluster.Unix, testcluster.SHM)
	t.Run("rdma", func(t *testing.T) { test(t, overRDMA(t)) })
	t.Run("resend", func(t *testing.T) {
		test(t, testcluster.Options{Over: testcluster.TCP, Set: func(c *postoffice.Config) {
			c.Resend, c.ResendTimeout, c.DropMsg = true, 100*time.Millisecond, 5
		}})
	})
}

// overRDMA is a cluster on devices in memory.
func overRDMA(t *testing.T) testcluster.Options {
	net := fakeverbs.NewNet()
	net.OnError(func(err error) { t.Errorf("the network: %v", err) })
	t.Cleanup(net.Close)
	addr := netip.MustParseAddr("127.0.0.1")
	return testcluster.Options{Over: testcluster.AsSet,
		Set: func(c *postoffice.Config) {
			c.VanType, c.EnableIPC = "ibverbs", 0
		},
		Wrap: func(string, int, van.Factory) van.Factory {
			return func(o van.Options) (van.Van, error) { return rdma.NewOn(net.Stack(addr), o), nil }
		}}
}

// rig is windows of all workers of a cluster.
type rig struct {
	*testing.T
	c       *testcluster.Cluster
	comms   []*collective.Comm
	windows []*Window
}

const testTime = 20 * time.Second

func newRig(t *testing.T, o testcluster.Options, n int, of Options) *rig {
	t.Helper()
	held.Watch(t)
	o.Workers = n
	r := &rig{T: t, c: testcluster.Start(t, o), comms: make([]*collective.Comm, n), windows: make([]*Window, n)}
	r.all(func(i int) error {
		var err error
		r.comms[i], err = collective.New(t.Context(), r.c.Workers[i], collective.Options{Ranks: ranks(n), Timeout: testTime})
		if of := of; err == nil {
			if i%2 == 1 && !of.Device && of.Size > 0 { // of the caller's memory
				of.Memory, of.Size = tensor(make([]byte, of.Size)), 0
			}
			r.windows[i], err = Open(t.Context(), r.comms[i], of)
		}
		if err == nil {
			r.windows[i].base.aliveEvery = time.Minute // so that a test which needs one fails where a wake-up is lost
		}
		return err
	})
	t.Cleanup(func() {
		for i := range n {
			_ = r.windows[i].Close()
			_ = r.comms[i].Close()
		}
		r.atRest()
	})
	return r
}

func ranks(n int) (l []int) {
	for i := range n {
		l = append(l, i)
	}
	return l
}

// all runs f for all ranks at once.
func (r *rig) all(f func(i int) error) {
	r.Helper()
	for i, err := range every(len(r.comms), f) {
		if err != nil {
			r.Errorf("rank %d: %v", i, err)
		}
	}
	if r.Failed() {
		r.FailNow()
	}
}

func every(n int, f func(i int) error) []error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	return errs
}

func filled(n int, seed uint64) af.Tensor { return tensor(content(n, seed)) }

// content is n bytes that depend on seed.
func content(n int, seed uint64) []byte {
	return vantest.Pattern(int(seed)*1_000_003+n, n)
}

func tensor(b []byte) af.Tensor {
	t, err := af.NewTensor(held.Bytes(b), af.Uint8, int64(len(b)))
	if err != nil {
		panic(err)
	}
	return t
}

// TestPuts: a rank that has waited for a signal sees all puts before that signal, for random places, sizes and
// mixes of Put, PutSignal and Signal, of all ranks to all.
func TestPuts(t *testing.T) {
	transports(t, func(t *testing.T, o testcluster.Options) {
		const n, room, rounds = 3, 300_000, 12
		r := newRig(t, o, n, Options{Size: n * room, Signals: 2})
		// steps are the puts of from to one rank in a round, in the part of the window that belongs to from.
		steps := func(from, to, round int, put func(offset int, data af.Tensor, last bool) error) error {
			g := rand.New(rand.NewPCG(uint64(from*100+to), uint64(round)))
			for k, all := 0, 1+g.IntN(5); k < all; k++ {
				size := []int{0, 1, 33, 34, 1000, 4096, 70_000, 200_001}[g.IntN(8)]
				offset := g.IntN(room - size + 1)
				if err := put(offset, filled(size, g.Uint64()), k == all-1); err != nil {
					return err
				}
			}
			return nil
		}
		r.all(func(self int) error {
			w, ctx := r.windows[self], t.Context()
			want := make([]byte, n*room)
			for round := range rounds {
				for to := range n {
					err := steps(self, to, round, func(offset int, data af.Tensor, last bool) error {
						offset += self * room
						switch {
						case !last:
							return w.Put(ctx, to, offset, data)
						case round%2 == 0:
							return w.PutSignal(ctx, to, offset, data, 0)
						}
						if err := w.Put(ctx, to, offset, data); err != nil {
							return err
						}
						return w.Signal(ctx, to, 0)
					})
					if err != nil {
						return err
					}
				}
				for from := range n {
					if err := w.WaitSignal(ctx, from, 0); err != nil {
						return err
					}
					_ = steps(from, self, round, func(offset int, data af.Tensor, _ bool) error {
						copy(want[from*room+offset:], data.Bytes())
						return nil
					})
					lo, hi := from*room, (from+1)*room
					if !bytes.Equal(w.Bytes()[lo:hi], want[lo:hi]) {
						return fmt.Errorf("round %d: wrong bytes of rank %d", round, from)
					}
					if err := w.Signal(ctx, from, 1); err != nil { // it may go on
						return err
					}
				}
				for to := range n {
					if err := w.WaitSignal(ctx, to, 1); err != nil {
						return err
					}
				}
			}
			return nil
		})
		for i, w := range r.windows {
			if k := w.Refused(); k != 0 {
				t.Errorf("rank %d has refused %d messages", i, k)
			}
		}
	})
}

// TestStream: a rank that never waits for its receiver: each signal counts once, data is whole
// when its signal is seen, and Flush returns when all is there and the source is free.
func TestStream(t *testing.T) {
	transports(t, func(t *testing.T, o testcluster.Options) {
		const places, size = 700, 4096
		r := newRig(t, o, 2, Options{Size: places * size, Signals: 1})
		r.all(func(self int) error {
			w, ctx, other := r.windows[self], t.Context(), 1-self
			source := make([]byte, size)
			sent := make(chan error, 1)
			go func() {
				for i := range places {
					part := source[:1+i*7%size]
					copy(part, content(len(part), uint64(i)))
					if err := w.PutSignal(ctx, other, i*size, tensor(part), 0); err != nil {
						sent <- err
						return
					}
					if i%50 == 0 || len(part) > 0 && i%3 == 0 {
						if err := w.Flush(ctx, other); err != nil {
							sent <- err
							return
						}
						clear(part) // it is not read any more
						continue
					}
					source = make([]byte, size)
				}
				sent <- w.Flush(ctx, other)
			}()
			for i := range places {
				if err := w.WaitSignal(ctx, other, 0); err != nil {
					return err
				}
				n := 1 + i*7%size
				want := filled(n, uint64(i))
				if !bytes.Equal(w.Bytes()[i*size:i*size+n], want.Bytes()) {
					return fmt.Errorf("place %d: wrong bytes", i)
				}
			}
			if err := <-sent; err != nil {
				return err
			}
			short, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
			defer cancel()
			if err := w.WaitSignal(short, other, 0); !errors.Is(err, van.ErrTimeout) || !strings.Contains(err.Error(), fmt.Sprintf("worker %d", other)) {
				return fmt.Errorf("one signal too many: %w, want ErrTimeout and who has not signalled", err)
			}
			return nil
		})
	})
}

// TestFlushed: puts without a signal have arrived when Flush has returned.
func TestFlushed(t *testing.T) {
	transports(t, func(t *testing.T, o testcluster.Options) {
		const size = 1 << 20
		r := newRig(t, o, 2, Options{Size: size, Signals: 0})
		data := filled(size, 1)
		for _, n := range []int{1, 100, 65_536, size} {
			if err := r.windows[0].Put(t.Context(), 1, size-n, tensor(data.Bytes()[:n])); err != nil {
				t.Fatal(err)
			}
			if err := r.windows[0].Flush(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
			r.windows[1].peers[0].in.mu.Lock() // the writer held this
			if !bytes.Equal(r.windows[1].Bytes()[size-n:], data.Bytes()[:n]) {
				t.Errorf("%d bytes: wrong", n)
			}
			r.windows[1].peers[0].in.mu.Unlock()
		}
	})
}

// TestFewLargePuts: the receiver acknowledges often enough for messages of any length. A rank that puts more than
// may be under way at once, in few messages and without a Flush, does not wait forever.
func TestFewLargePuts(t *testing.T) {
	const size = maxBytes / 4
	r := newRig(t, testcluster.Options{}, 2, Options{Size: size, Signals: 1})
	data := filled(size, 1)
	for i := range 3 * maxBytes / size {
		if err := r.windows[0].PutSignal(t.Context(), 1, 0, data, 0); err != nil {
			t.Fatalf("put %d: %v", i, err)
		}
	}
	for range 3 * maxBytes / size {
		if err := r.windows[1].WaitSignal(t.Context(), 0, 0); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(r.windows[1].Bytes(), data.Bytes()) {
		t.Error("wrong bytes")
	}
}

// TestSignalsAdd: many goroutines signal and wait; as many waits succeed as there were signals.
func TestSignalsAdd(t *testing.T) {
	r := newRig(t, testcluster.Options{}, 2, Options{Signals: 3})
	const each, routines = 100, 4
	errs := every(2*routines, func(i int) error {
		for range each {
			var err error
			if i%2 == 0 {
				err = r.windows[0].Signal(t.Context(), 1, 2)
			} else {
				err = r.windows[1].WaitSignal(t.Context(), 0, 2)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	if n := r.windows[1].peers[0].in.signals[2].Load(); n != 0 {
		t.Errorf("%d signals are left", n)
	}
}

// TestLost: the loss of a rank ends all waits with its name, signals that arrived before are there, and after
// Rebuild a new window works with the replacement.
func TestLost(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		r := newRig(t, o, 3, Options{Size: 100, Signals: 2})
		if err := r.windows[1].PutSignal(t.Context(), 0, 0, filled(100, 9), 1); err != nil {
			t.Fatal(err)
		}
		if err := r.windows[1].Flush(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
		waits := make(chan error, 2)
		for _, i := range []int{0, 2} {
			go func() { waits <- r.windows[i].WaitSignal(t.Context(), 1, 0) }()
		}
		r.c.Workers[1].Close()
		for range 2 {
			if err := <-waits; !errors.Is(err, van.ErrPeerLost) || !strings.Contains(err.Error(), "worker 1 (id 11)") {
				t.Errorf("got %v, want ErrPeerLost of worker 1", err)
			}
		}
		if err := r.windows[0].WaitSignal(t.Context(), 1, 1); err != nil {
			t.Errorf("a signal that came before: %v", err)
		}
		for op, err := range map[string]error{
			"Put":    r.windows[0].Put(t.Context(), 1, 0, filled(10, 1)),
			"Signal": r.windows[2].Signal(t.Context(), 0, 0),
			"Flush":  r.windows[0].put(t.Context(), "flush", 2, 0, af.Tensor{}, noSignal, nil),
		} {
			if !errors.Is(err, van.ErrPeerLost) {
				t.Errorf("%s after the loss: %v", op, err)
			}
		}
		for _, i := range []int{0, 2} {
			if err := r.windows[i].Close(); err != nil {
				t.Errorf("close after the loss: %v", err)
			}
		}
		_ = r.windows[1].Close()
		old := r.windows[0]
		testcluster.Lost(t, r.c.Scheduler, van.WorkerID(1))
		r.all(func(i int) error {
			var err error
			if i == 1 {
				var n *postoffice.Node
				if n, err = r.c.Join(t.Context(), "worker", 1, nil); err == nil {
					r.comms[1], err = collective.New(t.Context(), n, collective.Options{Ranks: ranks(3), Timeout: testTime})
				}
			} else {
				err = r.comms[i].Rebuild(t.Context())
			}
			if err == nil {
				r.windows[i], err = Open(t.Context(), r.comms[i], Options{Size: 100, Signals: 1})
			}
			if err != nil {
				return err
			}
			for to := range 3 {
				if err := r.windows[i].PutSignal(t.Context(), to, 10*i, filled(10, uint64(i)), 0); err != nil {
					return err
				}
			}
			for from := range 3 {
				if err := r.windows[i].WaitSignal(t.Context(), from, 0); err != nil {
					return err
				}
				if want := filled(10, uint64(from)); !bytes.Equal(r.windows[i].Bytes()[10*from:10*from+10], want.Bytes()) {
					return fmt.Errorf("wrong bytes of rank %d", from)
				}
			}
			return nil
		})
		if before := filled(100, 9); !bytes.Equal(old.Bytes(), before.Bytes()) {
			t.Error("the closed window's memory was written")
		}
	}, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}

// TestClose: the puts of a closing rank arrive, and calls towards it fail, and no others.
func TestClose(t *testing.T) {
	transports(t, func(t *testing.T, o testcluster.Options) {
		r := newRig(t, o, 3, Options{Size: 50_000, Signals: 1})
		data := filled(50_000, 3)
		waits := make(chan error, 1)
		go func() { waits <- r.windows[2].WaitSignal(t.Context(), 0, 0) }()
		if err := r.windows[0].PutSignal(t.Context(), 1, 0, data, 0); err != nil {
			t.Fatal(err)
		}
		if err := r.windows[0].Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-waits; !errors.Is(err, van.ErrClosed) || !strings.Contains(err.Error(), "rank 0 (worker 0") {
			t.Errorf("who waits for it: %v, want ErrClosed of rank 0", err)
		}
		if err := r.windows[1].WaitSignal(t.Context(), 0, 0); err != nil || !bytes.Equal(r.windows[1].Bytes(), data.Bytes()) {
			t.Errorf("what was put before: %v", err)
		}
		if err := r.windows[0].Put(t.Context(), 1, 0, data); !errors.Is(err, van.ErrClosed) {
			t.Errorf("on the closed window: %v", err)
		}
		if err := r.windows[2].PutSignal(t.Context(), 0, 0, data, 0); !errors.Is(err, van.ErrClosed) {
			t.Errorf("to the closed window: %v", err)
		}
		if err := r.windows[2].PutSignal(t.Context(), 1, 0, data, 0); err != nil {
			t.Errorf("among the others: %v", err)
		}
		if err := r.windows[1].WaitSignal(t.Context(), 2, 0); err != nil {
			t.Errorf("among the others: %v", err)
		}
		// The next window of the same ranks is another one.
		r.all(func(i int) error {
			if err := r.windows[i].Close(); err != nil {
				return err
			}
			var err error
			r.windows[i], err = Open(t.Context(), r.comms[i], Options{Size: 10, Signals: 1})
			if err != nil {
				return err
			}
			if err := r.windows[i].Signal(t.Context(), (i+1)%3, 0); err != nil {
				return err
			}
			return r.windows[i].WaitSignal(t.Context(), (i+2)%3, 0)
		})
	})
}

// TestOpen: windows that differ are an error on all ranks which names both, as are arguments that one rank
// refuses, and the communicator goes on.
func TestOpen(t *testing.T) {
	r := newRig(t, testcluster.Options{}, 3, Options{})
	for name, x := range map[string]struct {
		other Options
		want  error
		says  []string
	}{
		"size":    {Options{Size: 99, Signals: 2}, collective.ErrMismatch, []string{"99 bytes and 2 signals", "100 bytes and 2 signals"}},
		"signals": {Options{Memory: filled(100, 1), Signals: 1}, collective.ErrMismatch, []string{"100 bytes and 1 signals", "100 bytes and 2 signals"}},
		"refused": {Options{Size: -1}, collective.ErrMismatch, []string{"refused", "100 bytes"}},
	} {
		for i, err := range every(3, func(i int) error {
			o := Options{Size: 100, Signals: 2}
			if i == 1 {
				o = x.other
			}
			w, err := Open(t.Context(), r.comms[i], o)
			if err == nil {
				w.Close()
			}
			return err
		}) {
			if name == "refused" && i == 1 {
				if !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), "size -1") {
					t.Errorf("%s: rank 1: %v, want ErrInvalid", name, err)
				}
				continue
			}
			if !errors.Is(err, x.want) || !strings.Contains(err.Error(), x.says[0]) || !strings.Contains(err.Error(), x.says[1]) {
				t.Errorf("%s: rank %d: %v, want %v and %q", name, i, err, x.want, x.says)
			}
		}
	}
	r.all(func(i int) error { return r.comms[i].Barrier(t.Context()) })
	got := make([][][]byte, 3)
	r.all(func(i int) error {
		var err error
		got[i], err = r.comms[i].AllGatherBytes(t.Context(), content(i*10, uint64(i)))
		return err
	})
	for i := range got {
		for k, b := range got[i] {
			if want := filled(k*10, uint64(k)); !bytes.Equal(b, want.Bytes()) {
				t.Errorf("rank %d has got %x of rank %d", i, b, k)
			}
		}
	}
}

// TestArguments: invalid arguments are refused where they are passed, and nothing is sent.
func TestArguments(t *testing.T) {
	r := newRig(t, testcluster.Options{}, 2, Options{Size: 100, Signals: 2})
	w, ctx := r.windows[0], t.Context()
	for want, err := range map[string]error{
		"101 bytes at offset 0, beyond the 100": w.Put(ctx, 1, 0, filled(101, 1)),
		"1 bytes at offset 100":                 w.Put(ctx, 1, 100, filled(1, 1)),
		"10 bytes at offset -1":                 w.PutSignal(ctx, 1, -1, filled(10, 1), 0),
		"0 bytes at offset 101":                 w.Put(ctx, 1, 101, af.Tensor{}),
		"rank 2, want 0 to 1":                   w.Put(ctx, 2, 0, filled(1, 1)),
		"rank -1":                               w.Flush(ctx, -1),
		"signal 2, want one of 2":               w.PutSignal(ctx, 1, 0, filled(1, 1), 2),
		"signal -1":                             w.Signal(ctx, 1, -1),
		"signal 65535":                          w.Signal(ctx, 1, noSignal),
		"signal 7":                              w.WaitSignal(ctx, 1, 7),
		"rank 9":                                w.WaitSignal(ctx, 9, 0),
	} {
		if !errors.Is(err, van.ErrInvalid) || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "worker 0") {
			t.Errorf("got %v, want ErrInvalid, %q and the node", err, want)
		}
	}
	if err := w.Flush(ctx, 1); err != nil {
		t.Error(err)
	}
	if n := r.windows[1].Refused(); n != 0 || w.peers[1].out.next.Load() != 0 {
		t.Errorf("%d messages refused, %d sent", n, w.peers[1].out.next.Load())
	}
}

// TestOwnEnd: a wait ends when its own node does, whether it sleeps or spins.
func TestOwnEnd(t *testing.T) {
	for name, set := range map[string]func(*postoffice.Config){
		"sleeps": nil,
		"spins":  func(c *postoffice.Config) { c.BusyPoll = env.SpinForever },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, testcluster.Options{Set: set}, 2, Options{Signals: 1})
			w, begun := r.windows[0], time.Now()
			w.base.aliveEvery = aliveEvery // no other message names the waiting rank
			wait := make(chan error, 1)
			go func() { wait <- w.WaitSignal(t.Context(), 1, 0) }()
			if set == nil {
				vantest.Eventually(t, testTime, "the peer knows who waits", func() bool { return w.peers[1].sleepers.n.Load() > 0 })
			}
			r.c.Workers[0].Close()
			if err := <-wait; !errors.Is(err, van.ErrClosed) && !errors.Is(err, van.ErrPeerLost) {
				t.Errorf("got %v, want ErrClosed", err)
			}
			if d := time.Since(begun); d >= testTime {
				t.Errorf("it ended after %s, with its limit", d)
			}
		})
	}
}

// TestServers: the servers of a group, of which none receives in place of the transport.
func TestServers(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Group = 2
		c := testcluster.Start(t, o)
		for i, err := range every(2, func(i int) error {
			comm, err := collective.New(t.Context(), c.Servers[i], collective.Options{})
			if err != nil {
				return err
			}
			w, err := Open(t.Context(), comm, Options{Size: 50_000, Signals: 1})
			if err != nil {
				return err
			}
			for k := range 20 {
				data := filled(50_000, uint64(k))
				if err := w.PutSignal(t.Context(), 1-i, 0, data, 0); err != nil {
					return err
				}
				if err := w.WaitSignal(t.Context(), 1-i, 0); err != nil {
					return err
				}
				if !bytes.Equal(w.Bytes(), data.Bytes()) {
					return fmt.Errorf("put %d: wrong bytes", k)
				}
				if err := comm.Barrier(t.Context()); err != nil {
					return err
				}
			}
			if err := w.Close(); err != nil {
				return err
			}
			if err := comm.Barrier(t.Context()); err != nil {
				return err
			}
			return comm.Close()
		}) {
			if err != nil {
				t.Errorf("rank %d: %v", i, err)
			}
		}
	}, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}
