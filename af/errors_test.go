package af_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// echo answers each pull with the first push.
func echo(b af.Batch) error {
	out := make([]af.KeyTensor, len(b.Pulls()))
	for i, p := range b.Pulls() {
		out[i] = af.KeyTensor{Key: p.Key, Val: b.Pushes()[0].Val}
	}
	return b.Respond(out, af.ByKey)
}

func echoes(t testing.TB) af.Handler {
	return func(b af.Batch) {
		if err := echo(b); err != nil {
			t.Error(err)
		}
	}
}

// ask pushes text under key 1, and pulls as much from each server under key 2.
func ask(t testing.TB, w *af.Worker, servers int, text string) (call af.Call, pulls []af.KeyTensor) {
	t.Helper()
	for range servers {
		pulls = append(pulls, af.KeyTensor{Key: 2, Val: bytesOf(t, make([]byte, len(text)))})
	}
	h, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: bytesOf(t, []byte(text))}}, testcluster.PerServer(pulls, servers))
	if err != nil {
		t.Fatal(err)
	}
	return h, pulls
}

// works checks that servers which echo do so.
func works(t testing.TB, w *af.Worker, servers int) {
	t.Helper()
	for i := range 3 {
		text := fmt.Sprintf("round %d", i)
		h, pulls := ask(t, w, servers, text)
		if err := h.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		for s := range pulls {
			if got := string(pulls[s].Val.Bytes()); got != text {
				t.Fatalf("server %d answered %q, want %q", s, got, text)
			}
		}
	}
}

// TestBadRequests: invalid requests are refused before anything is sent.
func TestBadRequests(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 2})
	for _, n := range c.Servers {
		serve(t, n, echoes(t))
	}
	w := newWorker(t, c.Workers[0])
	x := bytesOf(t, make([]byte, 1))
	list := func(keys ...uint64) (l []af.KeyTensor) {
		for _, k := range keys {
			l = append(l, af.KeyTensor{Key: k, Val: x})
		}
		return l
	}
	var many []uint64
	for i := range uint64(40) {
		many = append(many, i)
	}
	for _, tt := range []struct {
		push []af.KeyTensor
		pull [][]af.KeyTensor
		text string
	}{
		{nil, nil, "no push and no pull tensors, want at least one"},
		{nil, [][]af.KeyTensor{{}, {}}, "no push and no pull tensors, want at least one"},
		{nil, [][]af.KeyTensor{list(1, 2)}, "1 lists of pull tensors for 2 servers, want a list for each"},
		{nil, [][]af.KeyTensor{list(1), list(2), list(3)}, "3 lists of pull tensors for 2 servers, want a list for each"},
		{nil, [][]af.KeyTensor{list(1, 2), list(1)}, "2 pull tensors of server 0 and 1 of server 1, want the same number of each"},
		{list(3), [][]af.KeyTensor{{}, list(1)}, "0 pull tensors of server 0 and 1 of server 1"},
		{list(1, 2, 1), nil, "push tensors 0 and 2 both have key 1, want different keys in a batch"},
		{list(append(many, 7)...), nil, "push tensors 7 and 40 both have key 7"},
		{nil, [][]af.KeyTensor{list(1, 1), list(1, 2)}, "pull tensors 0 and 1 both have key 1, want different keys in a batch for server 0"},
		{nil, [][]af.KeyTensor{list(1, 2), list(5, 5)}, "key 5, want different keys in a batch for server 1"},
		{make([]af.KeyTensor, van.MaxParts+1), nil, "16385 tensors in one batch, want at most 16384"},
	} {
		_, err := w.PushPull(tt.push, tt.pull)
		vantest.Fails(t, err, van.ErrInvalid, "worker 0 (id 9): push_pull", tt.text)
		works(t, w, 2)
	}
	// The same key for each server, and for a push and a pull, is as it should be.
	h, err := w.PushPull(list(1), [][]af.KeyTensor{{{Key: 1, Val: bytesOf(t, make([]byte, 1))}}, {{Key: 1, Val: bytesOf(t, make([]byte, 1))}}})
	if err == nil {
		err = h.Wait(t.Context())
	}
	if err != nil {
		t.Error(err)
	}
	c.Finalize(t)
}

// TestBadTensors: a tensor is what its shape says, or is none.
func TestBadTensors(t *testing.T) {
	b := make([]byte, 8)
	ones := func(n int) []int64 { return slices.Repeat([]int64{1}, n) }
	if x, err := af.FromBytes(b[:1], af.Uint8, ones(8)...); err != nil || len(x.Dims()) != 8 {
		t.Errorf("8 dimensions: %v %v", x.Dims(), err)
	}
	for _, tt := range []struct {
		b     []byte
		d     af.Dtype
		shape []int64
		text  string
	}{
		{b[:1], af.Uint8, ones(9), "tensor with 9 dimensions, want at most 8"},
		{b[:1], af.Uint8, ones(100), "tensor with 100 dimensions, want at most 8"},
		{b, af.Uint8, []int64{-1, -8}, "dimension 0 of shape [-1 -8] is negative"},
		{b, af.Float32, []int64{3}, "shape [3] of float32 is 12 bytes, but the memory has 8"},
		{b, af.Uint8, nil, "shape [] of uint8 is 1 bytes, but the memory has 8"},
		{b, af.Uint8, []int64{1 << 62, 4}, "exceeds the maximum of 2147483647 bytes"},
		{b, af.Uint8, []int64{1 << 31}, "exceeds the maximum of 2147483647 bytes"},
		{b, af.Dtype(47), []int64{8}, "dtype code 47, want 0 to 46"},
		{b, af.Dtype(-1), []int64{8}, "dtype code -1"},
	} {
		_, err := af.FromBytes(tt.b, tt.d, tt.shape...)
		vantest.Fails(t, err, van.ErrInvalid, tt.text)
	}
	_, err := af.FromPointer(nil, backend.Host, nil, af.Float32, 2, 2)
	vantest.Fails(t, err, van.ErrInvalid, "tensor of 16 bytes at address 0")
	x, err := af.FromBytes(b, af.Float32, 2)
	if err != nil {
		t.Fatal(err)
	}
	_, err = af.Slice[int32](x)
	vantest.Fails(t, err, van.ErrInvalid, "tensor of float32 taken as int32")
}

// TestBadResponses: an answer that does not fit is refused with nothing sent, and
// a right one may follow; after that there is none.
func TestBadResponses(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	kt := func(key uint64, n int) af.KeyTensor { return af.KeyTensor{Key: key, Val: bytesOf(t, make([]byte, n))} }
	var late *af.Batch // one whose state serves another one by now
	serve(t, c.Servers[0], func(b af.Batch) {
		if late != nil {
			late.Release() // one too many
			vantest.Fails(t, late.Respond(nil), postoffice.ErrAnswered, "server 0 (id 8): respond", "respond once to each batch")
		}
		for _, x := range []struct {
			out  []af.KeyTensor
			text string
		}{
			{nil, "no tensor with key 2 among the 0 given"},
			{[]af.KeyTensor{kt(3, 4)}, "no tensor with key 2 among the 1 given"},
			{[]af.KeyTensor{kt(2, 3)}, "tensor uint8[3] on cpu for key 2 has 3 bytes, the worker's pull tensor uint8[4] has 4"},
			{[]af.KeyTensor{kt(2, 5)}, "tensor uint8[5] on cpu for key 2 has 5 bytes, the worker's pull tensor uint8[4] has 4"},
			{[]af.KeyTensor{kt(2, 0)}, "has 0 bytes, the worker's pull tensor uint8[4] has 4"},
			{[]af.KeyTensor{{Key: 2}}, "tensor uint8[0] on cpu for key 2 has 0 bytes"},
			{[]af.KeyTensor{kt(2, 4), kt(3, 4)}, "2 tensors for 1 pulls"},
		} {
			vantest.Fails(t, b.Respond(x.out, af.ByKey), van.ErrInvalid, "server 0 (id 8): respond with worker 0 (id 9) at 127.0.0.1:", x.text)
		}
		if err := echo(b); err != nil {
			t.Error(err)
		}
		vantest.Fails(t, b.Respond(nil), postoffice.ErrAnswered, "server 0 (id 8): respond", "respond once to each batch")
		late = &b
	})
	w := newWorker(t, c.Workers[0])
	for range 5 {
		h, pulls := ask(t, w, 1, "four")
		if err := h.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := string(pulls[0].Val.Bytes()); got != "four" {
			t.Errorf("the answer is %q, want %q", got, "four")
		}
	}
	c.Finalize(t)
}

// TestAnsweredTwice: a handle on a batch that was answered is good for nothing,
// also while its memory serves the batches of others.
func TestAnsweredTwice(t *testing.T) {
	everyVan(t, func(t *testing.T, o testcluster.Options) {
		o.Workers = 2
		c := testcluster.Start(t, o)
		var mu sync.Mutex
		var old []af.Batch
		serve(t, c.Servers[0], func(b af.Batch) {
			if err := echo(b); err != nil {
				t.Error(err)
			}
			mu.Lock()
			old = append(old[max(len(old)-20, 0):], b)
			stale := slices.Clone(old)
			mu.Unlock()
			for _, x := range stale {
				if err := x.Respond([]af.KeyTensor{{Key: 2, Val: bytesOf(t, []byte("junk!!!"))}}, af.ByKey); !errors.Is(err, postoffice.ErrAnswered) {
					t.Errorf("response to a batch that was answered: %v", err)
				}
			}
		})
		var wg sync.WaitGroup
		for _, n := range c.Workers {
			w := newWorker(t, n)
			wg.Go(func() {
				for range 20 {
					works(t, w, 1)
				}
			})
		}
		wg.Wait()
		c.Finalize(t)
	})
}

// TestUnknownHandlers: a handler can be waited for once, by one.
func TestUnknownHandlers(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Rand: testcluster.Zero})
	hold := make(chan af.Batch, 8)
	var held atomic.Bool
	serve(t, c.Servers[0], func(b af.Batch) {
		if held.Load() {
			hold <- b
			return
		}
		echoes(t)(b)
	})
	w := newWorker(t, c.Workers[0])
	wait := func(ts int32) error { return w.Customer().Wait(t.Context(), ts, 10*time.Second) }
	who := "worker 0 (id 9): wait: handler "
	vantest.Fails(t, wait(0), postoffice.ErrUnknownHandler, who+"0")
	works(t, w, 1) // handlers 0, 2, 4
	vantest.Fails(t, wait(4), postoffice.ErrUnknownHandler, who+"4", "it has been waited for already", "wait once for each handler")
	vantest.Fails(t, wait(6), postoffice.ErrUnknownHandler, who+"6", "handlers from 0 to 5 have been issued")
	vantest.Fails(t, wait(1<<30), postoffice.ErrUnknownHandler, "handlers from 0 to 5 have been issued")
	vantest.Fails(t, wait(-1), postoffice.ErrUnknownHandler, who+"-1")

	held.Store(true)
	call, _ := ask(t, w, 1, "x")
	h := call.Timestamp()
	b := <-hold
	vantest.Fails(t, wait(h+1), postoffice.ErrUnknownHandler, fmt.Sprintf("it is inside the batch of handler %d", h))
	if n := w.Customer().Timestamps(h); n != 2 || len(call.Traces()) != 2 {
		t.Errorf("the call has %d timestamps, and %d traces, want 2", n, len(call.Traces()))
	}
	for _, other := range []int32{h + 1, 0, 1000, -1} {
		if n := w.Customer().Timestamps(other); n != 0 {
			t.Errorf("there is no call that begins at %d, but it has %d timestamps", other, n)
		}
	}
	for _, other := range []int32{h + 1, -1, 1000, 1 << 30} {
		if x, ok := w.Customer().Trace(other); ok {
			t.Errorf("timestamp %d, which was not answered, has the trace %+v", other, x)
		}
	}
	if ts := call.Traces(); len(ts) != 2 || ts[1] != (postoffice.Trace{}) {
		t.Errorf("traces %+v, want two without an answer to the pull", ts)
	}

	// Of many that wait for one handler, one gets it.
	results := make(chan error, 8)
	for range cap(results) {
		go func() { results <- wait(h) }()
	}
	for range cap(results) - 1 {
		vantest.Fails(t, <-results, postoffice.ErrUnknownHandler, "another goroutine waits for it already")
	}
	if err := echo(b); err != nil {
		t.Error(err)
	}
	if err := <-results; err != nil {
		t.Error(err)
	}
	if x := call.Traces()[1]; x.Request.Start == 0 || x.Response.Process == 0 {
		t.Errorf("the trace of the pull is %+v", x)
	}
	vantest.Fails(t, call.Wait(t.Context()), postoffice.ErrUnknownHandler, "it has been waited for already")
	vantest.Fails(t, af.Call{}.Wait(t.Context()), postoffice.ErrUnknownHandler, "never made")

	// Those in flight when the worker closes fail, and so do calls from then on.
	call, _ = ask(t, w, 1, "x")
	<-hold
	w.Close()
	vantest.Fails(t, call.Wait(t.Context()), van.ErrClosed, "worker 0 (id 9)")
	_, err := w.PushPull([]af.KeyTensor{{}}, nil)
	vantest.Fails(t, err, van.ErrClosed, "worker 0 (id 9): push_pull")
	held.Store(false)
	works(t, newWorker(t, c.Workers[0]), 1)
	c.Finalize(t)
}

// TestWrongRoles: workers and servers belong on nodes of their roles, once.
func TestWrongRoles(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	_, err := af.NewWorker(c.Servers[0], af.WorkerOptions{})
	vantest.Fails(t, err, van.ErrInvalid, "tensor worker on server 0 (id 8), want a node with role worker")
	_, err = af.NewServer(c.Workers[0], af.ServerOptions{})
	vantest.Fails(t, err, van.ErrInvalid, "tensor server on worker 0 (id 9), want a node with role server")
	s := serve(t, c.Servers[0], echoes(t))
	vantest.Fails(t, s.Handle(echoes(t)), van.ErrInvalid, "this server has one")
	again, err := af.NewServer(c.Servers[0], af.ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	vantest.Fails(t, again.Handle(echoes(t)), van.ErrInvalid, "server 0 (id 8)", "application 0, customer 0 exists")
	w := newWorker(t, c.Workers[0])
	_, err = af.NewWorker(c.Workers[0], af.WorkerOptions{})
	vantest.Fails(t, err, van.ErrInvalid, "worker 0 (id 9)", "application 0, customer 0 exists")
	other, err := af.NewWorker(c.Workers[0], af.WorkerOptions{CustomerID: 1})
	if err != nil {
		t.Fatal(err)
	}
	works(t, w, 1)
	works(t, other, 1)

	x := bytesOf(t, make([]byte, 10))
	for _, tt := range []struct {
		ranks []int
		keys  []uint64
		text  string
	}{
		{nil, nil, "0 worker ranks, 0 keys"},
		{[]int{0}, []uint64{1, 2}, "1 worker ranks, 2 keys, 10 bytes: want as many ranks as keys"},
		{[]int{0, 0, 0}, []uint64{1, 2, 3}, "3 keys, 10 bytes"},
		{[]int{7}, []uint64{1}, "7"},
		{[]int{-1}, []uint64{1}, "-1"},
	} {
		vantest.Fails(t, s.RegisterRecvTensor(x, tt.ranks, tt.keys), van.ErrInvalid, "register receive tensor", tt.text)
	}
	works(t, w, 1)
	c.Finalize(t)
}

// TestNodeLeaves: requests of a node that has left fail, before and after.
func TestNodeLeaves(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	arrived := make(chan struct{})
	serve(t, c.Servers[0], func(af.Batch) { close(arrived) })
	w := newWorker(t, c.Workers[0])
	h, _ := ask(t, w, 1, "x")
	<-arrived
	waiting := make(chan error)
	go func() { waiting <- cluster.Call(h).Customer().Wait(t.Context(), h.Timestamp(), time.Minute) }()
	c.Workers[0].Close()
	vantest.Fails(t, <-waiting, van.ErrClosed, "worker 0 (id 9)")
	_, err := w.PushPull([]af.KeyTensor{{}}, nil)
	vantest.Fails(t, err, van.ErrClosed, "worker 0 (id 9): push_pull")
}
