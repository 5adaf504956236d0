package kv_test

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/datamsg"
	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

func TestRequestFields(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Group: 2, Rand: testcluster.Zero})
	type seen struct {
		rank       int
		cmd, ts    int32
		push       bool
		keys, vals int
		lens       []int32
		room       int
	}
	got := make(chan seen, 1)
	for _, n := range c.Servers {
		serve(t, n, func(r kv.Request[int64]) {
			got <- seen{r.Worker, r.Cmd, r.Timestamp, r.Push, len(r.Keys), len(r.Vals), slices.Clone(r.Lens), r.Expected()}
			res := kv.Pairs[int64]{}
			if !r.Push {
				res = kv.Pairs[int64]{Keys: r.Keys, Vals: make([]int64, 2*len(r.Keys))}
			}
			if err := r.Respond(res); err != nil {
				t.Error(err)
			}
		})
	}
	for i, n := range c.Workers {
		w := newWorker[int64](t, n)
		do(t, w)(w.Push([]kv.Key{3, 4}, make([]int64, 5), kv.Lens([]int32{2, 3}), kv.Cmd(-7)))
		if g, want := <-got, (seen{i / 2, -7, 0, true, 2, 5, []int32{2, 3}, 5}); fmt.Sprint(g) != fmt.Sprint(want) {
			t.Errorf("worker %d push: %+v, want %+v", i, g, want)
		}
		vals := make([]int64, 4)
		pull, err := w.Pull([]kv.Key{3, 4}, &vals, kv.Cmd(9))
		do(t, w)(pull, err)
		if g, want := <-got, (seen{i / 2, 9, 1, false, 2, 0, nil, 4}); fmt.Sprint(g) != fmt.Sprint(want) {
			t.Errorf("worker %d pull: %+v, want %+v", i, g, want)
		}
		x := pull.Traces()
		if req, res := x[0].Request, x[0].Response; len(x) != 1 || req.Start == 0 || req.PostSend < req.Start || res.Process < req.PostSend {
			t.Errorf("trace %+v", x)
		}
		fails(t, pull.Wait(t.Context()), postoffice.ErrUnknownHandler)
	}
	c.Finalize(t)
}

func TestResponseChecks(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		c := testcluster.Start(t, o)
		type P = kv.Pairs[int16]
		k := []kv.Key{1, 2}
		later := make(chan kv.Request[int16], 1)
		serve(t, c.Servers[0], func(r kv.Request[int16]) {
			if r.Push {
				for _, bad := range []P{{Keys: k, Vals: []int16{1, 2}}, {Keys: k}, {Vals: []int16{1}}, {Lens: []int32{1}}} {
					fails(t, r.Respond(bad), van.ErrInvalid, "answer to a push")
				}
				later <- r // answered by another goroutine after this returned
				return
			}
			for _, bad := range []P{{}, {Keys: k[:1], Vals: []int16{1}}, {Keys: k, Vals: []int16{1}}, {Keys: k, Vals: []int16{1, 2}, Lens: []int32{2}},
				{Keys: k, Vals: []int16{1, 2}, Lens: []int32{3, -1}}, {Keys: k, Vals: []int16{1, 2}, Lens: []int32{1, 2}}} {
				fails(t, r.Respond(bad), van.ErrInvalid, "worker 0", "handler")
			}
			if err := r.Respond(P{Keys: r.Keys, Vals: []int16{5, 6}}); err != nil {
				t.Error(err)
			}
			fails(t, r.Respond(P{Keys: k, Vals: []int16{1, 2}}), postoffice.ErrAnswered)
		})
		w := newWorker[int16](t, c.Workers[0])
		ts, err := w.Push(k, []int16{1, 2})
		if err != nil {
			t.Fatal(err)
		}
		r := <-later
		if err := r.Respond(P{}); err != nil {
			t.Error(err)
		}
		do(t, w)(ts, nil)
		for range 3 {
			var got []int16
			do(t, w)(w.Pull(k, &got))
			if !slices.Equal(got, []int16{5, 6}) {
				t.Errorf("got %v", got)
			}
		}
		fails(t, r.Respond(P{}), postoffice.ErrAnswered) // its state is used by later requests
		c.Finalize(t)
	})
}

// TestEcho answers pulls with slices of an earlier push that it has retained.
func TestEcho(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		c := testcluster.Start(t, o)
		var kept *kv.Request[uint64]
		serve(t, c.Servers[0], func(r kv.Request[uint64]) {
			if r.Push {
				if kept != nil {
					kept.Release()
				}
				r.Retain()
				kept = &r
				if err := r.Respond(kv.Pairs[uint64]{}); err != nil {
					t.Error(err)
				}
				return
			}
			// The values are those of kept, which stays until the next push; the keys are the request's own and invalid when
			// this returns.
			if err := r.Respond(kv.Pairs[uint64]{Keys: r.Keys, Vals: kept.Vals}); err != nil {
				t.Error(err)
			}
		})
		w := newWorker[uint64](t, c.Workers[0])
		keys, vals := make([]kv.Key, 5000), make([]uint64, 10000)
		for i := range keys {
			keys[i] = kv.Key(3 * i)
		}
		got := make([]uint64, len(vals))
		for round := range 30 {
			for i := range vals {
				vals[i] = uint64(i + round)
			}
			do(t, w)(w.Push(keys, vals, kv.NoCopy))
			do(t, w)(w.Pull(keys, &got, kv.NoCopy))
			if !slices.Equal(got, vals) {
				t.Fatalf("round %d: other values came back", round)
			}
		}
		c.Finalize(t)
	})
}

type counter struct{ n atomic.Int64 }

func (c *counter) Sent() { c.n.Add(1) }

func TestOnSent(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		c := testcluster.Start(t, o)
		var sent counter
		serve(t, c.Servers[0], func(r kv.Request[uint8]) {
			res := kv.Pairs[uint8]{}
			if !r.Push {
				res = kv.Pairs[uint8]{Keys: slices.Clone(r.Keys), Vals: make([]uint8, 100*len(r.Keys))}
				if r.Cmd == 1 {
					res.Keys = r.Keys
				}
			}
			if err := r.Respond(res, kv.OnSent(&sent)); err != nil {
				t.Error(err)
			}
			fails(t, r.Respond(res, kv.OnSent(&sent)), postoffice.ErrAnswered)
		})
		w := newWorker[uint8](t, c.Workers[0])
		for i := range 10 {
			do(t, w)(w.Push([]kv.Key{1}, []uint8{1}))
			var got []uint8
			do(t, w)(w.Pull([]kv.Key{1, 2}, &got, kv.Cmd(int32(i%2))))
		}
		eventually(t, "completion of each answer", func() bool { return sent.n.Load() == 20 })
		c.Finalize(t)
		if n := sent.n.Load(); n != 20 {
			t.Errorf("%d completions of 20 answers", n)
		}
	})
}

func TestRequestBeforeHandler(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		c := testcluster.Start(t, o)
		w := newWorker[float32](t, c.Workers[0])
		s, err := kv.NewServer[float32](c.Servers[0], kv.ServerOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var tss []kv.Call
		for i := range 50 {
			ts, err := w.Push([]kv.Key{7}, []float32{float32(i)})
			if err != nil {
				t.Fatal(err)
			}
			tss = append(tss, ts)
		}
		eventually(t, "arrival", func() bool {
			return o.Over == testcluster.InProc || testcluster.Stats(c.Servers[0]).ReceivedMessages > 50
		})
		var h kv.SummingHandler[float32]
		if err := s.Handle(h.Handle); err != nil {
			t.Fatal(err)
		}
		fails(t, s.Handle(h.Handle), van.ErrInvalid)
		for _, ts := range tss {
			do(t, w)(ts, nil)
		}
		var got []float32
		do(t, w)(w.Pull([]kv.Key{7}, &got))
		if got[0] != 49*50/2 {
			t.Errorf("sum %g, want %d", got[0], 49*50/2)
		}
		c.Finalize(t)
	})
}

// TestHandleAgain: a handler that could not begin to serve is none; the next one may.
func TestHandleAgain(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	other, err := (*cluster.Node)(c.Servers[0]).App().AddCustomer(0, 0, func(*van.Message) {})
	if err != nil {
		t.Fatal(err)
	}
	s, err := kv.NewServer[float32](c.Servers[0], kv.ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var h kv.SummingHandler[float32]
	if err := s.Handle(h.Handle); err == nil {
		t.Fatal("two serve the same requests")
	}
	other.Close()
	if err := s.Handle(h.Handle); err != nil {
		t.Fatal(err)
	}
	w := newWorker[float32](t, c.Workers[0])
	do(t, w)(w.Push([]kv.Key{7}, []float32{1}))
	c.Finalize(t)
}

// TestSlowHandler has a handler that is stuck with one worker's request; another
// worker and barriers go on.
func TestSlowHandler(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		o.Workers = 2
		c := testcluster.Start(t, o)
		release, stuck := make(chan struct{}), make(chan struct{}, 1)
		serve(t, c.Servers[0], func(r kv.Request[int8]) {
			if r.Worker == 0 {
				stuck <- struct{}{}
				<-release
			}
			if err := r.Respond(kv.Pairs[int8]{}); err != nil {
				t.Error(err)
			}
		})
		slow, fast := newWorker[int8](t, c.Workers[0]), newWorker[int8](t, c.Workers[1])
		ts, err := slow.Push([]kv.Key{1}, []int8{1})
		if err != nil {
			t.Fatal(err)
		}
		<-stuck
		for range 20 {
			do(t, fast)(fast.Push([]kv.Key{1}, []int8{1}))
		}
		close(release)
		do(t, slow)(ts, nil)
		c.Finalize(t)
	})
}

func TestRegisterRecvBuffer(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Workers: 2})
	place := make([]float32, 6)
	var in atomic.Int32
	s, err := kv.NewServer[float32](c.Servers[0], kv.ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.RegisterRecvBuffer(1, 10, place); err != nil {
		t.Fatal(err)
	}
	fails(t, s.RegisterRecvBuffer(1, 10, place), van.ErrInvalid, "key 10")
	fails(t, s.RegisterRecvBuffer(2, 10, place), van.ErrInvalid, "rank 2")
	if err := s.Handle(func(r kv.Request[float32]) {
		if &r.Vals[0] == &place[0] {
			in.Add(1)
		}
		if err := r.Respond(kv.Pairs[float32]{}); err != nil {
			t.Error(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	w0, w1 := newWorker[float32](t, c.Workers[0]), newWorker[float32](t, c.Workers[1])
	do(t, w0)(w0.Push([]kv.Key{10}, []float32{9}))
	do(t, w1)(w1.Push([]kv.Key{11}, []float32{9}))
	if in.Load() != 0 {
		t.Error("a push of another worker or key is in the buffer")
	}
	do(t, w1)(w1.Push([]kv.Key{10, 20}, []float32{1, 2, 3, 4}))
	if in.Load() != 1 || !slices.Equal(place, []float32{1, 2, 3, 4, 0, 0}) {
		t.Errorf("%d requests in the buffer, which holds %v", in.Load(), place)
	}
	c.Finalize(t)
}

// TestMalformedRequests sends what no worker would, and that the server then
// still serves.
func TestMalformedRequests(t *testing.T) {
	var l vantest.Log
	c := testcluster.Start(t, testcluster.Options{Workers: 2, Log: l.Logger()})
	hs := sums[float32](t, c)
	k := []kv.Key{1, 2}
	send := func(keys []kv.Key, vals, lens any, change func(*van.Message)) {
		t.Helper()
		m := &van.Message{}
		m.Reset()
		m.Receiver, m.Request, m.Push, m.Head, m.Timestamp, m.AppID, m.CustomerID = van.ServerID(0), true, true, 0, 100, 0, 0
		m.ValLen = 2
		datamsg.SetData(m, backend.Slice(keys), mem(vals), mem(lens), van.TypeFloat)
		if change != nil {
			change(m)
		}
		if err := (*cluster.Node)(c.Workers[0]).App().Send(m); err != nil {
			t.Error(err)
		}
	}
	f := []float32{1, 2}
	for _, x := range []struct {
		want string
		send func()
	}{
		{"0 data frames", func() { send(k, f, nil, func(m *van.Message) { m.Frames = 0 }) }},
		{"3 data types for 2", func() { send(k, f, nil, func(m *van.Message) { m.DataTypes = append(m.DataTypes, van.TypeInt32) }) }},
		{"0 key bytes", func() { send(nil, f, nil, nil) }},
		{"15 key bytes", func() { send(k, f, nil, func(m *van.Message) { m.Keys = m.Keys.Sub(0, 15) }) }},
		{"data type float64, want float32", func() { send(k, f, nil, func(m *van.Message) { m.DataTypes[1] = van.TypeDouble }) }},
		{"7 value bytes", func() { send(k, f, nil, func(m *van.Message) { m.Vals = m.Vals.Sub(0, 7) }) }},
		{"1 values for 2 keys", func() { send(k, f[:1], nil, nil) }},
		{"4 bytes of lengths", func() { send(k, f, []int32{2}, nil) }},
		{"lens[1] = -1 (key 2)", func() { send(k, f, []int32{3, -1}, nil) }},
		{"add up to 3", func() { send(k, f, []int32{1, 2}, nil) }},
		{"keys[1] = 1 after", func() { send([]kv.Key{1, 1}, f, nil, nil) }},
		{"0 values for 2 keys", func() { send(k, nil, nil, nil) }}, // refused by the handler
		{"3 values for key 1", func() { send(k, []float32{1, 2, 3, 4}, []int32{3, 1}, nil) }},
		{"lengths for 2 keys, want 4 each", func() {
			send(k, f, []int32{1}, func(m *van.Message) { m.Push = false })
		}},
	} {
		x.send()
		eventually(t, "log line with "+x.want, func() bool { return strings.Contains(l.String(), x.want) })
	}
	if !strings.Contains(l.String(), "worker 0 (id 9)") {
		t.Error("log does not name the worker")
	}
	w := newWorker[float32](t, c.Workers[0])
	do(t, w)(w.Push(k, f))
	var got []float32
	do(t, w)(w.Pull(k, &got))
	if !slices.Equal(got, f) || hs[0].Len() != 2 {
		t.Errorf("got %v of %d keys", got, hs[0].Len())
	}
	ts, err := w.Push(k, []float32{1, 2, 3, 4}) // another number of values
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "log line", func() bool { return strings.Contains(l.String(), "2 values for each key (1 to 2), the store has 1") })
	fails(t, ts.Wait(t.Context()), van.ErrInvalid, "request refused")
	w.Close()
	c.Finalize(t)
}

// TestCloseWorker: a request that is not answered fails with its worker's Close.
func TestCloseWorker(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	asked := make(chan struct{})
	serve(t, c.Servers[0], func(kv.Request[float32]) { close(asked) })
	w := newWorker[float32](t, c.Workers[0])
	call, err := w.Push([]kv.Key{1}, []float32{1})
	if err != nil {
		t.Fatal(err)
	}
	<-asked
	w.Close()
	fails(t, call.Wait(t.Context()), van.ErrClosed)
}

// TestWrongAnswers has a server that answers pulls with nonsense.
func TestWrongAnswers(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 2})
	type script = func(s *rawServer, m *van.Message)
	bad := make(chan script, 1)
	honest := func(s *rawServer, m *van.Message) {
		keys := make([]kv.Key, m.Keys.Len()/8)
		copy(backend.Slice(keys).Host(), m.Keys.Host())
		s.answer(t, m, keys, make([]float32, 2*len(keys)), nil, nil)
	}
	raw(t, c.Servers[0], honest)
	raw(t, c.Servers[1], func(s *rawServer, m *van.Message) { (<-bad)(s, m) })
	w := newWorker[float32](t, c.Workers[0])
	keys := []kv.Key{1, 2, maxKey - 1, maxKey} // two for each server
	k := keys[2:]
	f := func(n int) []float32 { return make([]float32, n) }
	for _, x := range []struct {
		keys   []kv.Key
		vals   any
		lens   any
		change func(m *van.Message)
		err    error
		want   string
	}{
		{nil, nil, nil, nil, van.ErrMalformed, "0 data frames"},
		{k[:1], f(2), nil, nil, van.ErrMalformed, "1 keys, want 2"},
		{[]kv.Key{3, maxKey}, f(4), nil, nil, van.ErrMalformed, "key 0 is 3, want 18446744073709551614"},
		{k, f(3), nil, nil, van.ErrMalformed, "3 values for 2 keys"},
		{k, f(2), nil, nil, van.ErrInvalid, "2 values received, the buffer holds 4"},
		{k, f(6), nil, nil, van.ErrInvalid, "6 values received, the buffer holds 4"},
		{k, make([]byte, 15), nil, nil, van.ErrMalformed, "15 value bytes"},
		{k, f(4), []int32{4}, nil, van.ErrMalformed, "4 bytes of lengths"},
		{k, f(4), []int32{5, -1}, nil, van.ErrMalformed, "lens[1] = -1 (key 18446744073709551615)"},
		{k, f(4), []int32{1, 2}, nil, van.ErrMalformed, "add up to 3"},
		{k, f(3), []int32{1, 2}, nil, van.ErrInvalid, "7 values received from all servers, want 8"},
		{k, f(5), []int32{3, 2}, nil, van.ErrInvalid, "9 values received from all servers, the buffer holds 8"},
		{k, f(4), nil, func(m *van.Message) { m.Push = true }, van.ErrMalformed, "push=true"},
		{k, f(4), nil, func(m *van.Message) { m.SimpleApp = true }, van.ErrMalformed, "simple=true"},
		{k, f(4), nil, func(m *van.Message) { m.DataTypes[1] = van.TypeInt32 }, van.ErrMalformed, "data type int32, want float32"},
	} {
		bad <- func(s *rawServer, m *van.Message) {
			// The honest answer first, so that this one completes the pull.
			s.answer(t, m, x.keys, x.vals, x.lens, x.change)
		}
		vals := f(8)
		ts, err := w.Pull(keys, &vals)
		if err == nil {
			err = ts.Wait(t.Context())
		}
		fails(t, err, x.err, x.want, "server ")
		if x.lens == nil && x.change == nil {
			fails(t, err, x.err, "server 1 (id 10)", "keys[2:4]")
		}
	}
	// An answer without lengths is good enough where they were asked for.
	bad <- honest
	var lens []int32
	var vals []float32
	do(t, w)(w.Pull(keys, &vals, kv.LensInto(&lens)))
	if !slices.Equal(lens, []int32{2, 2, 2, 2}) || len(vals) != 8 {
		t.Errorf("%d values, lengths %v", len(vals), lens)
	}
	c.Finalize(t)
}

// TestSummingRefuses: if a request is refused, the worker gets an error with the reason at once. Other requests,
// at the same time and later, are answered.
func TestSummingRefuses(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		o.Servers = 2
		c := testcluster.Start(t, o)
		hs := sums[int64](t, c)
		w := newWorker[int64](t, c.Workers[0])
		low, all := []kv.Key{1, 2}, []kv.Key{1, 2, maxKey}
		good, err := w.Push(low, []int64{1, 2})
		if err != nil {
			t.Fatal(err)
		}
		for _, tt := range []struct {
			keys []kv.Key
			vals []int64
			text string
		}{
			{low, nil, "push of 0 values for 2 keys"},
			{low, make([]int64, 4), "push of 2 values for each key (1 to 2), the store has 1"},
			{all, nil, "push of 0 values for"},
		} {
			call, err := w.Push(tt.keys, tt.vals, kv.Within(20*time.Second))
			if err == nil {
				err = call.Wait(t.Context())
			}
			fails(t, err, van.ErrInvalid, "push", "server ", "request refused", tt.text)
		}
		do(t, w)(good, nil)
		do(t, w)(w.Push(low, []int64{1, 2}))
		got := make([]int64, 2)
		do(t, w)(w.Pull(low, &got))
		if !slices.Equal(got, []int64{2, 4}) || hs[0].Len() != 2 || hs[1].Len() != 0 {
			t.Errorf("sums %v of %d and %d keys, want [2 4] of 2 and 0", got, hs[0].Len(), hs[1].Len())
		}
		c.Finalize(t)
	})
}

func TestKilledServer(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		o.Servers = 2
		c := testcluster.Start(t, o)
		asked := make(chan struct{}, 2)
		for _, n := range c.Servers {
			h := &kv.SummingHandler[float32]{}
			serve(t, n, func(r kv.Request[float32]) {
				if n.Rank() == 1 {
					asked <- struct{}{}
					return // never answers
				}
				h.Handle(r)
			})
		}
		w := newWorker[float32](t, c.Workers[0])
		vals := make([]float32, 2)
		keys := []kv.Key{1, maxKey}
		ts, err := w.Pull(keys, &vals, kv.NoCopy)
		if err != nil {
			t.Fatal(err)
		}
		<-asked
		start := time.Now()
		c.Servers[1].Close()
		fails(t, ts.Wait(t.Context()), van.ErrPeerLost, "server 1 (id 10)", "pull")
		if d := time.Since(start); d > 5*time.Second {
			t.Errorf("took %s", d)
		}
		// Keys of the other server are served on; those of the lost one fail.
		one := make([]float32, 1)
		do(t, w)(w.Pull(keys[:1], &one))
		ts, err = w.Push(keys, vals)
		if err == nil {
			err = ts.Wait(t.Context())
		}
		fails(t, err, van.ErrPeerLost, "server 1 (id 10)")
	})
}

// TestNoGrowth makes 100000 requests without waiting for them.
func TestNoGrowth(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	sums[float32](t, c)
	w := newWorker[float32](t, c.Workers[0])
	keys, vals := []kv.Key{1, 2, 3}, make([]float32, 3*64)
	total := 100_000
	if testing.Short() {
		total = 20_000
	}
	window := make(chan struct{}, 64)
	var failed atomic.Pointer[error]
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	var before uint64
	var first kv.Call
	for i := range total {
		if i == total/5 {
			before = heap()
		}
		window <- struct{}{}
		call, err := w.Push(keys, vals, kv.Done(func(err error) {
			if err != nil {
				failed.Store(&err)
			}
			<-window
		}))
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			first = call
		}
	}
	for range cap(window) {
		window <- struct{}{}
	}
	if e := failed.Load(); e != nil {
		t.Fatal(*e)
	}
	if after := heap(); after > before+(1<<20) {
		t.Errorf("heap grew from %d to %d bytes over %d requests", before, after, total*4/5)
	}
	// The last one takes the place of the oldest a moment after its function has run.
	eventually(t, "at most 4096 requests are remembered", func() bool { return testcluster.InFlight(c.Workers[0]) <= 4096 })
	err := first.Wait(t.Context())
	if !errors.Is(err, postoffice.ErrUnknownHandler) {
		t.Errorf("Wait for a forgotten request: %v", err)
	}
}
