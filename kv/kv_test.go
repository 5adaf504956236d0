package kv_test

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/van"
)

// spread are keys for every server of up to 3, the smallest and the largest too.
const maxKey kv.Key = math.MaxUint64

var spread = []kv.Key{0, 1, 3, 1 << 62, 1<<63 - 1, 1 << 63, 1<<63 + 1, 0xaaaaaaaaaaaaaaaa, 0xaaaaaaaaaaaaaaab, maxKey - 1, maxKey}

func TestPushPull(t *testing.T) {
	for _, shape := range []testcluster.Options{{}, {Workers: 2, Servers: 3}, {Workers: 2, Servers: 2, Group: 2}} {
		t.Run(fmt.Sprintf("%dx%dx%d", max(shape.Workers, 1), max(shape.Servers, 1), max(shape.Group, 1)), func(t *testing.T) {
			vans(t, func(t *testing.T, o testcluster.Options) {
				o.Workers, o.Servers, o.Group = shape.Workers, shape.Servers, shape.Group
				c := testcluster.Start(t, o)
				hs := sums[float64](t, c)
				var wg sync.WaitGroup
				for i, n := range c.Workers {
					w := newWorker[float64](t, n)
					wg.Go(func() {
						for range 20 {
							vals := make([]float64, 2*len(spread))
							for j := range vals {
								vals[j] = float64(i+1) * float64(j)
							}
							ts, err := w.Push(spread, vals)
							clear(vals) // copied
							do(t, w)(ts, err)
						}
					})
				}
				wg.Wait()
				group := max(o.Group, 1)
				for i, n := range c.Workers {
					w := secondWorker[float64](t, n)
					instance := i % group
					factor := 0.0 // of the workers that push to the same servers
					for j := instance; j < len(c.Workers); j += group {
						factor += 20 * float64(j+1)
					}
					sized, grown := make([]float64, 2*len(spread)), []float64(nil)
					do(t, w)(w.Pull(spread, &sized))
					do(t, w)(w.Pull(spread, &grown, kv.NoCopy))
					for j := range sized {
						if want := factor * float64(j); sized[j] != want || grown[j] != want {
							t.Fatalf("worker %d value %d: %g and %g, want %g", i, j, sized[j], grown[j], want)
						}
					}
				}
				total := 0
				for _, h := range hs {
					total += h.Len()
				}
				if want := len(spread) * group; total != want {
					t.Errorf("servers have %d keys, want %d", total, want)
				}
				c.Finalize(t)
			})
		})
	}
}

// secondWorker makes a second customer on a node.
func secondWorker[V kv.Value](t testing.TB, n *postoffice.Node) *kv.Worker[V] {
	t.Helper()
	w, err := kv.NewWorker[V](n, kv.WorkerOptions{AppID: 0, CustomerID: 5})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// lists is a handler that keeps a list of values for every key.
type lists struct {
	mu sync.Mutex
	m  map[kv.Key][]int16
}

func (l *lists) handle(t testing.TB) kv.Handler[int16] {
	return func(r kv.Request[int16]) {
		l.mu.Lock()
		defer l.mu.Unlock()
		var res kv.Pairs[int16]
		if r.Push {
			next := 0
			for i, k := range r.Keys {
				n := len(r.Vals) / len(r.Keys)
				if r.Lens != nil {
					n = int(r.Lens[i])
				}
				l.m[k] = slices.Clone(r.Vals[next : next+n])
				next += n
			}
		} else {
			res.Keys = r.Keys
			for _, k := range r.Keys {
				res.Vals = append(res.Vals, l.m[k]...)
				res.Lens = append(res.Lens, int32(len(l.m[k])))
			}
		}
		if err := r.Respond(res); err != nil {
			t.Error(err)
		}
	}
}

func TestVariableLengths(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		o.Servers = 3
		c := testcluster.Start(t, o)
		for _, n := range c.Servers {
			l := &lists{m: map[kv.Key][]int16{}}
			serve(t, n, l.handle(t))
		}
		w := newWorker[int16](t, c.Workers[0])
		r := rand.New(rand.NewPCG(1, 3))
		for round := range 60 {
			lens := make([]int32, len(spread))
			var vals []int16
			for i := range lens {
				lens[i] = r.Int32N(6)
				for range lens[i] {
					vals = append(vals, int16(r.Uint32()))
				}
			}
			do(t, w)(w.Push(spread, vals, kv.Lens(lens)))

			var got []int16
			var gotLens []int32
			do(t, w)(w.Pull(spread, &got, kv.LensInto(&gotLens)))
			if !slices.Equal(got, vals) || !slices.Equal(gotLens, lens) {
				t.Fatalf("round %d: got %v %v, want %v %v", round, got, gotLens, vals, lens)
			}
			// With a longer buffer, which starts out cut evenly among the servers.
			room := make([]int16, 7*len(spread))
			do(t, w)(w.Pull(spread, &room, kv.LensInto(&gotLens)))
			if !slices.Equal(room[:len(vals)], vals) || len(room) != 7*len(spread) || !slices.Equal(gotLens, lens) {
				t.Fatalf("round %d: got %v, want %v first", round, room, vals)
			}
			// With a buffer of just the right length and no lengths.
			if len(vals) > 0 && len(vals)%len(spread) == 0 {
				exact := make([]int16, len(vals))
				do(t, w)(w.Pull(spread, &exact))
				if !slices.Equal(exact, vals) {
					t.Fatalf("round %d: got %v, want %v", round, exact, vals)
				}
			}
		}
		small := make([]int16, len(spread))
		var lens []int32
		do(t, w)(w.Push(spread, make([]int16, 3*len(spread))))
		ts, err := w.Pull(spread, &small, kv.LensInto(&lens))
		if err == nil {
			err = ts.Wait(t.Context())
		}
		fails(t, err, van.ErrInvalid, "33 values", "the buffer holds 11")
		c.Finalize(t)
	})
}

// TestArrange has sums of lengths that equal the room while the parts differ from
// an even division, in both directions.
func TestArrange(t *testing.T) {
	arranges(t, 3, []kv.Key{1, 2, 1 << 63, 1<<63 + 1, maxKey - 1, maxKey}, [][]int32{{2, 2, 2, 2, 2, 2}, {1, 1, 2, 2, 3, 3}, {3, 3, 2, 2, 1, 1}, {0, 0, 2, 2, 4, 4}, {3, 3, 0, 0, 3, 3}, {0, 1, 5, 0, 3, 3}, {6, 6, 0, 0, 0, 0}, {0, 0, 0, 0, 6, 6}, {1, 3, 5, 1, 1, 1}})
	// Two parts that move right, one into the place of the other.
	const quarter = maxKey / 4
	arranges(t, 4, []kv.Key{1, 2, quarter + 1, quarter + 2, 2*quarter + 1, 2*quarter + 2, 3*quarter + 1, 3*quarter + 2}, [][]int32{
		{3, 3, 2, 2, 2, 2, 1, 1}, {1, 1, 2, 2, 2, 2, 3, 3}, {4, 4, 2, 2, 1, 1, 1, 1}})
}

func arranges(t *testing.T, servers int, keys []kv.Key, all [][]int32) {
	t.Helper()
	c := testcluster.Start(t, testcluster.Options{Servers: servers})
	for _, lens := range all {
		for _, pullLens := range []bool{false, true} {
			var vals []int16
			for i, n := range lens {
				for j := range n {
					vals = append(vals, int16(100*i)+int16(j)+1)
				}
			}
			var servers []*kv.Server[int16]
			for _, n := range c.Servers {
				l := &lists{m: map[kv.Key][]int16{}}
				servers = append(servers, serve(t, n, l.handle(t)))
			}
			w := newWorker[int16](t, c.Workers[0])
			do(t, w)(w.Push(keys, vals, kv.Lens(lens), kv.NoCopy))
			got, gotLens := make([]int16, len(vals)), []int32(nil)
			opts := []kv.PullOption{kv.NoCopy}
			if pullLens {
				opts = append(opts, kv.LensInto(&gotLens))
			}
			do(t, w)(w.Pull(keys, &got, opts...))
			if !slices.Equal(got, vals) || pullLens && !slices.Equal(gotLens, lens) {
				t.Errorf("lengths %v: got %v %v, want %v", lens, got, gotLens, vals)
			}
			w.Close()
			for _, s := range servers {
				s.Close()
			}
		}
	}
}

func TestSlicer(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 3})
	hs := sums[int32](t, c)
	with := func(customer int, s kv.Slicer) *kv.Worker[int32] {
		w, err := kv.NewWorker[int32](c.Workers[0], kv.WorkerOptions{CustomerID: customer, Slicer: s})
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
	// The servers backwards, the middle one without keys.
	w := with(0, func(keys []kv.Key, _ []postoffice.KeyRange, out []kv.Slice) {
		out[2], out[0] = kv.Slice{Begin: 0, End: 2}, kv.Slice{Begin: 2, End: len(keys)}
	})
	keys, vals := []kv.Key{5, 6, 7, 8, 9}, []int32{1, 2, 3, 4, 5}
	do(t, w)(w.Push(keys, vals))
	if hs[0].Len() != 3 || hs[1].Len() != 0 || hs[2].Len() != 2 {
		t.Errorf("servers have %d, %d and %d keys, want 3, 0, 2", hs[0].Len(), hs[1].Len(), hs[2].Len())
	}
	var got []int32
	do(t, w)(w.Pull(keys, &got))
	if !slices.Equal(got, vals) {
		t.Errorf("got %v, want %v", got, vals)
	}
	for name, bad := range map[string]kv.Slicer{
		"gap":     func(keys []kv.Key, _ []postoffice.KeyRange, out []kv.Slice) { out[0] = kv.Slice{Begin: 1, End: 5} },
		"short":   func(keys []kv.Key, _ []postoffice.KeyRange, out []kv.Slice) { out[0] = kv.Slice{Begin: 0, End: 4} },
		"outside": func(keys []kv.Key, _ []postoffice.KeyRange, out []kv.Slice) { out[0] = kv.Slice{Begin: 0, End: 6} },
		"twice": func(keys []kv.Key, _ []postoffice.KeyRange, out []kv.Slice) {
			out[0], out[1] = kv.Slice{Begin: 0, End: 5}, kv.Slice{Begin: 4, End: 5}
		},
	} {
		w := with(1, bad)
		if _, err := w.Push(keys, vals); err == nil {
			t.Errorf("%s: no error", name)
		} else {
			fails(t, err, van.ErrInvalid)
		}
		w.Close()
	}
	w = with(1, nil)
	do(t, w)(w.Push(keys, vals))
	if hs[0].Len() != 5 {
		t.Errorf("without a slicer: %d keys on server 0, want 5", hs[0].Len())
	}
}

func TestInvalidArguments(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	served := false
	serve(t, c.Servers[0], func(r kv.Request[float32]) { served = true })
	w := newWorker[float32](t, c.Workers[0])
	f := func(n int) []float32 { return make([]float32, n) }
	huge := reserve(t, 1<<31)
	push := func(keys []kv.Key, vals []float32, opts ...kv.PushOption) error {
		_, err := w.Push(keys, vals, opts...)
		_, err2 := w.Push(keys, vals, append(opts, kv.NoCopy)...)
		if (err == nil) != (err2 == nil) {
			t.Errorf("with copies: %v, without: %v", err, err2)
		}
		return err
	}
	pull := func(keys []kv.Key, vals []float32, opts ...kv.PullOption) error {
		_, err := w.Pull(keys, &vals, opts...)
		return err
	}
	few, many := make([]int32, 1), make([]int32, 3)
	for _, x := range []struct {
		err   error
		names []string
	}{
		{push([]kv.Key{1, 7, 7}, f(3)), []string{"keys[2] = 7", "keys[1] = 7"}},
		{push([]kv.Key{1, 9, 7}, f(3)), []string{"keys[2] = 7", "keys[1] = 9"}},
		{pull([]kv.Key{2, 1}, nil), []string{"keys[1] = 1"}},
		{push([]kv.Key{1, 2}, f(3)), []string{"3 values for 2 keys"}},
		{push(nil, f(3)), []string{"3 values for 0 keys"}},
		{pull([]kv.Key{1, 2}, f(3)), []string{"3 values for 2 keys"}},
		{push([]kv.Key{1, 2}, f(3), kv.Lens([]int32{3})), []string{"1 lengths for 2 keys"}},
		{push([]kv.Key{1, 2}, f(3), kv.Lens([]int32{4, -1})), []string{"lens[1] = -1", "key 2"}},
		{push([]kv.Key{1, 2}, f(3), kv.Lens([]int32{1, 1})), []string{"add up to 2", "3 values"}},
		{push([]kv.Key{1, 2}, f(2), kv.Lens([]int32{math.MaxInt32, math.MaxInt32})), []string{"add up to 4294967294"}},
		{push([]kv.Key{1, 2}, f(3), kv.Lens([]int32{1, 1, 1})), []string{"3 lengths for 2 keys"}},
		{pull([]kv.Key{1, 2}, nil, kv.LensInto(&few)), []string{"1 entries for 2 keys"}},
		{pull([]kv.Key{1, 2}, nil, kv.LensInto(&many)), []string{"3 entries for 2 keys"}},
		{push([]kv.Key{1}, f(1), kv.Cmd(1), nil), []string{"option 1 is nil"}},
		{pull([]kv.Key{1}, nil, nil), []string{"option 0 is nil"}},
		{push([]kv.Key{1}, huge), []string{"keys[0:1]", "2147483656 bytes"}},
		{pull([]kv.Key{1}, huge), []string{"keys[0:1]", "2147483656 bytes"}},
	} {
		fails(t, x.err, van.ErrInvalid, x.names...)
	}
	if _, err := w.Pull([]kv.Key{1}, nil); err == nil {
		t.Error("pull into nil: no error")
	}
	if _, err := kv.NewWorker[int8](c.Servers[0], kv.WorkerOptions{}); err == nil {
		t.Error("worker on a server: no error")
	}
	if _, err := kv.NewServer[int8](c.Workers[0], kv.ServerOptions{}); err == nil {
		t.Error("server on a worker: no error")
	}
	if testcluster.InFlight(c.Workers[0]) != 0 {
		t.Errorf("%d requests in flight", testcluster.InFlight(c.Workers[0]))
	}
	c.Finalize(t)
	if served {
		t.Error("a refused request was sent")
	}
}

// reserve returns n bytes of addresses without memory.
func reserve(t *testing.T, n int) []float32 {
	b, err := syscall.Mmap(-1, 0, n, syscall.PROT_NONE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Munmap(b); err != nil {
			t.Error(err)
		}
	})
	return unsafe.Slice((*float32)(unsafe.Pointer(&b[0])), n/4)
}

func TestEmptyRequest(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 2})
	w := newWorker[int8](t, c.Workers[0])
	called := 0
	do(t, w)(w.Push(nil, nil, kv.Done(func(err error) { called++ })))
	var vals []int8
	do(t, w)(w.Pull(nil, &vals, kv.Done(func(err error) { called++ })))
	if called != 2 || len(vals) != 0 {
		t.Errorf("%d callbacks, %d values, want 2 and none", called, len(vals))
	}
}

func TestCallbacks(t *testing.T) {
	vans(t, func(t *testing.T, o testcluster.Options) {
		o.Servers = 2
		c := testcluster.Start(t, o)
		sums[uint32](t, c)
		w := newWorker[uint32](t, c.Workers[0])
		keys := []kv.Key{1, maxKey}
		const rounds = 200
		finished := make(chan []uint32, rounds)
		for range rounds {
			// The callback of the push pulls, the callback of that is the end.
			calls := 0
			ts, err := w.Push(keys, []uint32{1, 2}, kv.Done(func(err error) {
				if calls++; calls != 1 || err != nil {
					t.Errorf("push callback: %v, call %d", err, calls)
				}
				var got []uint32
				pulled := func(err error) {
					if err != nil {
						t.Errorf("pull callback: %v", err)
					}
					finished <- got
				}
				if _, err := w.Pull(keys, &got, kv.Done(pulled)); err != nil {
					t.Errorf("pull in a callback: %v", err)
				}
			}))
			do(t, w)(ts, err)
			if calls != 1 {
				t.Fatal("Wait returned before the callback")
			}
		}
		for i := range rounds {
			select {
			case got := <-finished:
				if len(got) != 2 || got[1] != 2*got[0] || got[0] > rounds {
					t.Errorf("pulled %v", got)
				}
			case <-time.After(10 * time.Second):
				t.Fatalf("callback %d did not come", i)
			}
		}
	})
}

func TestCallbackOnFailure(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	raw(t, c.Servers[0], func(*rawServer, *van.Message) {})
	w := newWorker[float32](t, c.Workers[0])
	var errs []error
	var vals []float32
	ts, err := w.Pull([]kv.Key{1}, &vals, kv.Done(func(err error) { errs = append(errs, err) }))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	err = ts.Wait(ctx)
	fails(t, err, van.ErrTimeout, "server 0", "pull")
	if len(errs) != 1 || errs[0] != err {
		t.Errorf("callback got %v, Wait %v", errs, err)
	}
	if err := ts.Wait(t.Context()); err == nil {
		t.Error("second Wait: no error")
	} else {
		fails(t, err, postoffice.ErrUnknownHandler)
	}
}

// TestTypes sends every value type, and named ones.
func TestTypes(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	t.Run("int8", func(t *testing.T) { roundTrip[int8](t, c, -3) })
	t.Run("int16", func(t *testing.T) { roundTrip[int16](t, c, -300) })
	t.Run("int32", func(t *testing.T) { roundTrip[int32](t, c, -70000) })
	t.Run("int64", func(t *testing.T) { roundTrip[int64](t, c, -1<<40) })
	t.Run("uint8", func(t *testing.T) { roundTrip[uint8](t, c, 200) })
	t.Run("uint16", func(t *testing.T) { roundTrip[uint16](t, c, 40000) })
	t.Run("uint32", func(t *testing.T) { roundTrip[uint32](t, c, 1<<31+1) })
	t.Run("uint64", func(t *testing.T) { roundTrip[uint64](t, c, 1<<63+1) })
	t.Run("float32", func(t *testing.T) { roundTrip[float32](t, c, 1.5) })
	t.Run("float64", func(t *testing.T) { roundTrip(t, c, math.Pi) })
	type named float32
	t.Run("named", func(t *testing.T) { roundTrip[named](t, c, -2.5) })
}

func roundTrip[V kv.Value](t *testing.T, c *testcluster.Cluster, v V) {
	var h kv.SummingHandler[V]
	s := serve(t, c.Servers[0], h.Handle)
	w := newWorker[V](t, c.Workers[0])
	do(t, w)(w.Push([]kv.Key{4, 5}, []V{v, 1}))
	got := make([]V, 2)
	do(t, w)(w.Pull([]kv.Key{4, 5}, &got))
	if got[0] != v || got[1] != 1 {
		t.Errorf("got %v, want %v and 1", got, v)
	}
	w.Close()
	s.Close()
}
