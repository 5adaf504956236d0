package af_test

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/simgpu"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// round starts x and waits for it.
func round(t testing.TB, x *af.Prepared, opts ...af.StartOption) error {
	t.Helper()
	call, err := x.Start(opts...)
	if err != nil {
		return err
	}
	return call.Wait(t.Context())
}

// prepare is Worker.Prepare with a flat list of pull tensors. The exchange is closed when the test ends.
func prepare(t testing.TB, w *af.Worker, push, pull []af.KeyTensor, opts ...af.CallOption) *af.Prepared {
	t.Helper()
	servers := w.Servers()
	for _, o := range opts {
		if to, is := o.(af.To); is {
			servers = len(to)
		}
	}
	x, err := w.Prepare(push, testcluster.PerServer(pull, servers), opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = x.Close() })
	return x
}

// masked answers each pull with the push of its place, of which each byte is changed by
// mask.
func masked(t testing.TB, mask byte) af.Handler {
	return func(b af.Batch) {
		var out []af.KeyTensor
		for i := range b.Pulls() {
			p := b.Pushes()[i]
			v := bytes.Clone(p.Val.Bytes())
			for i := range v {
				v[i] ^= mask
			}
			x, err := af.FromBytes(v, p.Val.Dtype(), p.Val.Dims()...)
			if err != nil {
				t.Error(err)
			}
			out = append(out, af.KeyTensor{Key: p.Key, Val: x})
		}
		if err := b.Respond(out); err != nil {
			t.Error(err)
		}
	}
}

// TestExchange: every type, together with its scales, arrives bit for bit in each round of an exchange, whose
// contents and rows change. Rows that are not requested stay unchanged.
func TestExchange(t *testing.T) {
	const rows, columns, servers = 5, 3, 2
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Workers, o.Servers = 2, servers
		c := testcluster.Start(t, o)
		for s, n := range c.Servers {
			serve(t, n, masked(t, byte(s+1)))
		}
		var all sync.WaitGroup
		for rank, n := range c.Workers {
			w := newWorker(t, n)
			all.Go(func() {
				for d := af.Dtype(0); d.Valid(); d++ {
					exchangeRounds(t, w, d, byte(rank), rows, columns, servers)
				}
			})
		}
		all.Wait()
		c.Finalize(t)
	}, testcluster.InProc, testcluster.TCP, testcluster.Unix, testcluster.SHM)
}

func exchangeRounds(t *testing.T, w *af.Worker, d af.Dtype, seed byte, rows, columns, servers int) {
	make2 := func(d af.Dtype, columns int) (af.Tensor, []byte) {
		b := make([]byte, rows*columns*d.Size())
		x, err := af.FromBytes(b, d, int64(rows), int64(columns))
		if err != nil {
			t.Error(err)
		}
		return x, b
	}
	x, values := make2(d, columns)
	y, scales := make2(af.Float8E8M0FNU, 1)
	sent := [][]byte{values, scales}
	push := []af.KeyTensor{{Key: uint64(d), Val: x}, {Key: 1 << 40, Val: y}}
	var pull []af.KeyTensor
	var got [][]byte
	for range servers {
		x, values := make2(d, columns)
		y, scales := make2(af.Float8E8M0FNU, 1)
		pull = append(pull, af.KeyTensor{Key: 7, Val: x}, af.KeyTensor{Key: 8, Val: y})
		got = append(got, values, scales)
	}
	e := prepare(t, w, push, pull)
	push[0], pull[0] = af.KeyTensor{}, af.KeyTensor{} // the lists are copied
	defer e.Close()
	for i, n := range []int{rows, 1, 0, 4, -1, rows, -1} {
		for k := range sent {
			for j := range sent[k] {
				sent[k][j] = byte(j)*31 + byte(k+i) + seed*101
			}
		}
		for _, b := range got {
			fill(b, 0xee)
		}
		opts, whole := []af.StartOption{af.Rows(n)}, n
		if n < 0 {
			opts, whole = nil, rows
		}
		if err := round(t, e, opts...); err != nil {
			t.Errorf("%s, round %d: %v", d, i, err)
			return
		}
		for s := range servers {
			for k := range sent {
				cut := len(sent[k]) / rows * whole
				want := bytes.Repeat([]byte{0xee}, len(sent[k]))
				for j := range cut {
					want[j] = sent[k][j] ^ byte(s+1)
				}
				if !bytes.Equal(got[2*s+k], want) {
					t.Errorf("%s, round %d of %d rows, server %d, tensor %d: got % x, want % x", d, i, whole, s, k, got[2*s+k], want)
				}
			}
		}
	}
}

// TestExchangeRefused: Prepare refuses tensors that cannot be exchanged, and Start refuses rounds that cannot be
// started; the next round works.
func TestExchangeRefused(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 2})
	for s, n := range c.Servers {
		serve(t, n, masked(t, byte(s)))
	}
	w := newWorker(t, c.Workers[0])
	list := func(key uint64, shapes ...[]int64) (l []af.KeyTensor) {
		for i, s := range shapes {
			n := int64(1)
			for _, d := range s {
				n *= d
			}
			x, err := af.FromBytes(make([]byte, n), af.Uint8, s...)
			if err != nil {
				t.Fatal(err)
			}
			l = append(l, af.KeyTensor{Key: key + uint64(i), Val: x})
		}
		return l
	}
	one, two := list(1, []int64{4, 2}), list(1, []int64{4, 2}, []int64{4, 2})
	for _, x := range []struct {
		push, pull []af.KeyTensor
		to         af.CallOption
		text       string
	}{
		{nil, nil, af.Complete, "no push and no pull tensors"}, {one, one, af.Complete, "1 lists of pull tensors for 2 servers"},
		{append(one[:1:1], one...), nil, af.Complete, "both have key 1"}, {one, one, nil, "option 0 is nil"},
		{one, one, af.To{2}, "there is no server 2"}, {one, one, af.To{-1}, "there is no server -1"}, {one, two, af.To{1, 1}, "server 1 is there twice"},
		{one, nil, af.To{}, "to no server"}, {one, two, af.To{1, 0}, "not ascending"},
	} {
		_, err := w.Prepare(x.push, testcluster.PerServer(x.pull, max(len(x.pull), 1)), x.to)
		vantest.Fails(t, err, van.ErrInvalid, "worker 0 (id 9): prepare", x.text)
	}
	plain := prepare(t, w, one, two)
	small := prepare(t, w, list(5, []int64{4, 2}, []int64{3, 0}), list(5, []int64{9}, []int64{9}, []int64{9}, []int64{9}), af.Complete)
	scalar := prepare(t, w, list(5, []int64{4}, nil), nil)
	for _, x := range []struct {
		e    *af.Prepared
		opt  af.StartOption
		text string
	}{
		{plain, af.Rows(5), "5 rows of push tensor 0 (key 1), which is uint8[4 2] on cpu: it has 4"}, {plain, af.Rows(-1), "-1 rows, want 0 to 4"},
		{small, af.Rows(4), "4 rows of push tensor 1 (key 6), which is uint8[3 0] on cpu: it has 3"},
		{scalar, af.Rows(0), "push tensor 1 (key 6), which is uint8[] on cpu: it has no dimensions"}, {scalar, af.Rows(1), "it has no dimensions"}, {plain, nil, "option 0 is nil"},
	} {
		_, err := x.e.Start(x.opt)
		vantest.Fails(t, err, van.ErrInvalid, "worker 0 (id 9): start exchange", x.text)
	}
	if n := w.Customer().InFlight(); n != 0 {
		t.Errorf("%d calls in flight after those that were refused", n)
	}
	if err := round(t, plain); err != nil {
		t.Error(err)
	}
	call, err := plain.Start()
	if err != nil {
		t.Fatal(err)
	}
	_, err = plain.Start()
	vantest.Fails(t, err, af.ErrStarted, "start exchange", "1 push and 2 pull tensors", "wait for its last call first")
	if err := call.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	if err := round(t, plain); err != nil {
		t.Errorf("after a second start that was refused: %v", err)
	}
	plain.Close()
	plain.Close()
	for _, opts := range [][]af.StartOption{nil, {af.Rows(4)}} {
		_, err = plain.Start(opts...)
		vantest.Fails(t, err, van.ErrClosed, "start exchange")
	}
	w.Close()
	if _, err = small.Start(); err == nil {
		t.Error("an exchange of a closed worker starts")
	}
	_, err = small.Start() // and is not taken for started
	vantest.Fails(t, err, van.ErrClosed)
}

// TestExchangeTo: an exchange with some of the servers reaches these and no others.
func TestExchangeTo(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 3, Over: testcluster.SHM})
	var heard [3]atomic.Int32
	for s, n := range c.Servers {
		serve(t, n, func(b af.Batch) {
			heard[s].Add(1)
			masked(t, byte(s+1))(b)
		})
	}
	w := newWorker(t, c.Workers[0])
	y := [2][]byte{make([]byte, 4), make([]byte, 4)}
	to := af.To{0, 2}
	x := prepare(t, w, []af.KeyTensor{{Key: 1, Val: bytesOf(t, []byte{4, 8, 12, 16})}},
		[]af.KeyTensor{{Key: 1, Val: bytesOf(t, y[0])}, {Key: 1, Val: bytesOf(t, y[1])}}, to)
	to[0] = 1 // it is copied
	for range 10 {
		if err := round(t, x); err != nil {
			t.Fatal(err)
		}
		if want := [2][]byte{{5, 9, 13, 17}, {7, 11, 15, 19}}; !bytes.Equal(y[0], want[0]) || !bytes.Equal(y[1], want[1]) {
			t.Fatalf("got %v, want %v", y, want)
		}
	}
	if got := [3]int32{heard[0].Load(), heard[1].Load(), heard[2].Load()}; got != [3]int32{10, 0, 10} {
		t.Errorf("the servers have had %v batches", got)
	}
	c.Finalize(t)
}

// TestExchangeReplaced: a lost server fails the rounds that need it, including one in flight, and no other. After
// a replacement process has joined, the same exchange goes on with it.
func TestExchangeReplaced(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Servers = 2
		c := testcluster.Start(t, o)
		came := make(chan af.Batch, 1)
		serve(t, c.Servers[0], masked(t, 1))
		serve(t, c.Servers[1], func(b af.Batch) { came <- b.Retain() })
		w := newWorker(t, c.Workers[0])
		y := [3][]byte{make([]byte, 1), make([]byte, 1), make([]byte, 1)}
		push := []af.KeyTensor{{Key: 1, Val: bytesOf(t, []byte{64})}}
		x := prepare(t, w, push, []af.KeyTensor{{Key: 1, Val: bytesOf(t, y[0])}, {Key: 1, Val: bytesOf(t, y[1])}})
		first := prepare(t, w, push, []af.KeyTensor{{Key: 1, Val: bytesOf(t, y[2])}}, af.To{0})
		second := peer(t, c.Workers[0], van.ServerID(1))
		call, err := x.Start()
		if err != nil {
			t.Fatal(err)
		}
		b := <-came
		c.Servers[1].Close()
		vantest.Fails(t, call.Wait(t.Context()), van.ErrPeerLost, "server 1")
		b.Release()
		expect(t, second, false)
		for range 3 {
			vantest.Fails(t, round(t, x), van.ErrPeerLost, "server 1")
			if err := round(t, first); err != nil || y[2][0] != 65 {
				t.Errorf("the other server: %v, %v", y[2], err)
			}
		}
		testcluster.Lost(t, c.Scheduler, van.ServerID(1))
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		n, err := c.Join(ctx, "server", 1, nil)
		if err != nil {
			t.Fatal(err)
		}
		serve(t, n, masked(t, 2))
		expect(t, second, true)
		for range 3 {
			fill(y[0], 0)
			fill(y[1], 0)
			if err := round(t, x); err != nil || y[0][0] != 65 || y[1][0] != 66 {
				t.Errorf("after the replacement: %v, %v", y, err)
			}
		}
	}, testcluster.InProc, testcluster.TCP, testcluster.SHM)
}

// TestExchangeTimeout: after a canceled round the next one can start, and the late answer does not disturb it.
func TestExchangeTimeout(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Over: testcluster.TCP})
	came := make(chan af.Batch, 1)
	serve(t, c.Servers[0], func(b af.Batch) { came <- b.Retain() })
	w := newWorker(t, c.Workers[0])
	y := make([]byte, 2)
	x := prepare(t, w, nil, []af.KeyTensor{{Key: 1, Val: bytesOf(t, y)}}, af.Within(50*time.Millisecond))
	call, err := x.Start()
	if err != nil {
		t.Fatal(err)
	}
	late := <-came // before the call is canceled: otherwise the cancellation may arrive first, and the handler never gets the batch
	vantest.Fails(t, call.Wait(t.Context()), van.ErrTimeout, "server 0", "limit 50ms")
	if call, err = x.Start(); err != nil {
		t.Fatal(err)
	}
	b := <-came
	for _, one := range []struct {
		b af.Batch
		v string
	}{{late, "??"}, {b, "ok"}} {
		if err := one.b.Respond([]af.KeyTensor{{Val: bytesOf(t, []byte(one.v))}}); err != nil {
			t.Error(err)
		}
		one.b.Release()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := call.Wait(ctx); err != nil || string(y) != "ok" {
		t.Errorf("%q, %v", y, err)
	}
}

// TestExchangeSendRefused: a round whose messages the transport refuses fails, and the next
// one is sent.
func TestExchangeSendRefused(t *testing.T) {
	hook := &hooks.Van{}
	c := testcluster.Start(t, testcluster.Options{Wrap: hook.Wrap("worker", 0)})
	serve(t, c.Servers[0], masked(t, 1))
	w := newWorker(t, c.Workers[0])
	y := make([]byte, 1)
	x := prepare(t, w, []af.KeyTensor{{Key: 1, Val: bytesOf(t, []byte{2})}}, []af.KeyTensor{{Key: 1, Val: bytesOf(t, y)}})
	for range 3 {
		hook.OnSend(func(m *van.Message) hooks.Verdict { return hooks.Refuse(van.ErrQueueFull) })
		call, err := x.Start()
		hook.OnSend(nil)
		if err != nil {
			t.Fatal(err)
		}
		vantest.Fails(t, call.Wait(t.Context()), van.ErrQueueFull)
		if err := round(t, x); err != nil || y[0] != 3 {
			t.Errorf("the next round: %v, %v", y, err)
		}
	}
}

// TestExchangesAtOnce: of several goroutines that start the same exchange one succeeds, and several exchanges are
// in flight at the same time.
func TestExchangesAtOnce(t *testing.T) {
	const exchanges, goroutines, rounds = 3, 4, 200
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		c := testcluster.Start(t, o)
		serve(t, c.Servers[0], masked(t, 0x55))
		w := newWorker(t, c.Workers[0])
		var all sync.WaitGroup
		for e := range exchanges {
			in, out := bytes.Repeat([]byte{byte(e)}, 64), make([]byte, 64)
			x := prepare(t, w, []af.KeyTensor{{Key: uint64(e), Val: bytesOf(t, in)}}, []af.KeyTensor{{Key: uint64(e), Val: bytesOf(t, out)}})
			var done atomic.Int32
			var own sync.WaitGroup
			for range goroutines {
				own.Go(func() {
					for done.Load() < rounds {
						call, err := x.Start()
						if err != nil {
							vantest.Fails(t, err, af.ErrStarted)
							runtime.Gosched()
							continue
						}
						if err := call.Wait(t.Context()); err != nil {
							t.Error(err)
							return
						}
						done.Add(1)
					}
				})
			}
			all.Go(func() {
				own.Wait()
				if want := bytes.Repeat([]byte{byte(e) ^ 0x55}, 64); !bytes.Equal(out, want) {
					t.Errorf("exchange %d: got % x", e, out)
				}
			})
		}
		all.Wait()
		if n := w.Customer().InFlight(); n != 0 {
			t.Errorf("%d calls in flight at the end", n)
		}
		c.Finalize(t)
	}, testcluster.InProc, testcluster.SHM)
}

// TestExchangeOnDevice: each round waits for its own stream or for that of Prepare. A round that is canceled while
// it waits does not hinder the next ones, nor is it sent later.
func TestExchangeOnDevice(t *testing.T) {
	d := startDevices(t, testcluster.InProc)
	var heard atomic.Int32
	if err := d.s.Handle(func(b af.Batch) {
		heard.Add(1)
		out := make([]byte, 64)
		fill(out, simgpu.Raw(b.Pushes()[0].Val.Mem())[0]+1)
		if err := b.Respond([]af.KeyTensor{{Val: deviceTensor(t, d.sdev, out)}}); err != nil {
			t.Error(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	var o owner
	in, out := make([]byte, 64), make([]byte, 64)
	x := prepare(t, d.w, []af.KeyTensor{{Key: 1, Val: owned(t, d.wdev, in, &o)}}, []af.KeyTensor{{Key: 1, Val: owned(t, d.wdev, out, &o)}}, af.Stream(5))
	check := func(v byte, opts ...af.StartOption) {
		t.Helper()
		if err := round(t, x, opts...); err != nil || !bytes.Equal(out, bytes.Repeat([]byte{v}, 64)) {
			t.Fatalf("got %d and %v, want %d", out[0], err, v)
		}
	}
	for r := range byte(20) {
		d.wdev.Queue(5, func() { fill(in, 2*r) })
		check(2*r + 1)
		d.wdev.Queue(6, func() { fill(in, 2*r+1) })
		check(2*r+2, af.Stream(6))
	}
	gate := make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(open)
	d.wdev.Queue(3, func() { <-gate })
	first, err := d.w.PushPull([]af.KeyTensor{{Key: 9, Val: deviceTensor(t, d.wdev, make([]byte, 64))}},
		[][]af.KeyTensor{{{Key: 9, Val: hostTensor(t, make([]byte, 64))}}}, af.Stream(3))
	if err != nil {
		t.Fatal(err)
	}
	before := heard.Load()
	for i := range 3 { // behind the first, which goes on waiting
		call, err := x.Start(af.Stream(7))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		if err := call.Wait(ctx); err == nil {
			t.Errorf("round %d has not waited for what was before it", i)
		}
		cancel()
	}
	fill(in, 70)
	call, err := x.Start()
	if err != nil {
		t.Fatal(err)
	}
	if n := o.n.Load(); n != 4 {
		t.Errorf("%d holds with a round in flight, want 4", n)
	}
	x.Close() // while it is in flight
	if n := o.n.Load(); n != 2 {
		t.Errorf("%d holds by the round, want 2", n)
	}
	open()
	if err := call.Wait(t.Context()); err != nil || out[63] != 71 {
		t.Errorf("got %d and %v, want 71", out[63], err)
	}
	if err := first.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	if n := heard.Load() - before; n != 2 {
		t.Errorf("%d batches came, want 2: those given up are not sent", n)
	}
	if n := o.n.Load(); n != 0 {
		t.Errorf("%d holds at the end", n)
	}
	boom := errors.New("the device is gone")
	y := prepare(t, d.w, []af.KeyTensor{{Key: 1, Val: owned(t, d.wdev, in, &o)}}, nil)
	d.wdev.Fail(boom)
	for range 2 {
		_, err = y.Start()
		vantest.Fails(t, err, boom)
	}
	d.wdev.Fail(nil)
	y.Close()
	if n := o.n.Load(); n != 0 {
		t.Errorf("%d holds at the end", n)
	}
}
