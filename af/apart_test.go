package af_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// TestSharedMemory: pull tensors that share memory with others of the call are refused, few or many; with
// push tensors only where several servers are asked.
func TestSharedMemory(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 2})
	for _, n := range c.Servers {
		serve(t, n, echoes(t))
	}
	w := newWorker(t, c.Workers[0])
	room := make([]byte, 4096)
	at := func(from, n int) af.Tensor { return bytesOf(t, room[from:from+n:from+n]) }
	const push, pull = "push", "pull"
	for _, more := range []int{0, 40} { // further tensors of either list, after the checked ones
		list := func(servers int, pushes, pulls [][2]int) (lists [2][]af.KeyTensor) {
			for i, x := range pushes {
				lists[0] = append(lists[0], af.KeyTensor{Key: uint64(100 + i), Val: at(x[0], x[1])})
			}
			for i := range more {
				lists[0] = append(lists[0], af.KeyTensor{Key: uint64(200 + i), Val: at(1000+4*i, 4)})
			}
			for s := range servers {
				for i := range len(pulls) / servers {
					x := pulls[s*len(pulls)/servers+i]
					lists[1] = append(lists[1], af.KeyTensor{Key: uint64(300 + i), Val: at(x[0], x[1])})
				}
				for i := range more {
					lists[1] = append(lists[1], af.KeyTensor{Key: uint64(400 + i), Val: at(2000+400*s+4*i, 4)})
				}
			}
			return lists
		}
		for _, x := range []struct {
			pushes, pulls [][2]int
			one, two      string // the kind of tensor that the error names with one and with two servers; "" if there is no error
		}{
			{[][2]int{{0, 8}}, [][2]int{{8, 8}, {16, 8}}, "", ""},
			{[][2]int{{0, 8}, {0, 8}, {4, 8}}, [][2]int{{12, 8}, {20, 8}}, "", ""},
			{[][2]int{{0, 8}}, [][2]int{{8, 8}, {8, 8}}, pull, pull},
			{nil, [][2]int{{7, 2}, {8, 8}}, pull, pull},
			{nil, [][2]int{{0, 99}, {8, 8}}, pull, pull},
			{[][2]int{{50, 8}, {0, 8}}, [][2]int{{20, 8}, {0, 8}}, "", push},
			{[][2]int{{50, 8}, {0, 40}}, [][2]int{{80, 8}, {39, 2}}, "", push},
			{[][2]int{{50, 8}, {10, 1}}, [][2]int{{80, 8}, {0, 40}}, "", push},
			{[][2]int{{4, 0}, {0, 8}}, [][2]int{{3, 0}, {3, 0}}, "", ""},
			{[][2]int{{0, 9}}, [][2]int{{9, 0}, {12, 0}}, "", ""},
		} {
			for servers, want := range []string{1: x.one, 2: x.two} {
				if servers == 0 {
					continue
				}
				l, to := list(servers, x.pushes, x.pulls), af.To{0, 1}[:servers]
				p, err := w.Prepare(l[0], testcluster.PerServer(l[1], servers), to)
				if err == nil {
					p.Close()
				}
				text, other := "pull tensor 1 (key 301) shares memory with ", "pull tensor 0 (key 300)"
				if servers == 2 {
					text, other = "pull tensor 0 (key 300) of server 1 (id 10) shares memory with ", "pull tensor 0 (key 300) of server 0 (id 8)"
				}
				if want == push {
					other = "push tensor 1 (key 101)"
				}
				text += other
				what := fmt.Sprintf("%d servers, %d more, %v and %v", servers, more, x.pushes, x.pulls)
				if want == "" {
					if err != nil {
						t.Errorf("%s: prepare: %v", what, err)
					}
					continue
				}
				vantest.Fails(t, err, van.ErrInvalid, "worker 0 (id 9): prepare", text)
				_, err = w.PushPull(l[0], testcluster.PerServer(l[1], servers), to)
				vantest.Fails(t, err, van.ErrInvalid, "worker 0 (id 9): push_pull", text)
				if t.Failed() {
					t.Fatal(what)
				}
			}
		}
		works(t, w, 2)
	}
	if n := w.Customer().InFlight(); n != 0 {
		t.Errorf("%d calls in flight after calls that were refused", n)
	}
	c.Finalize(t)
}

// TestSharedMemoryModel: with any lists, few and many, the answer is that of comparing each two bytes.
func TestSharedMemoryModel(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{Servers: 2})
	for _, n := range c.Servers {
		serve(t, n, func(b af.Batch) { t.Error("a batch has come") })
	}
	w := newWorker(t, c.Workers[0])
	refused := [2]int{}
	for seed := range uint64(3000) {
		rng := rand.New(rand.NewPCG(seed, 1))
		servers := 1 + rng.IntN(2)
		room := make([]byte, 1<<(3+rng.IntN(14)))
		list := func(n int) (l []af.KeyTensor) {
			for i := range n {
				from := rng.IntN(len(room))
				size := min(rng.IntN(4), len(room)-from)
				l = append(l, af.KeyTensor{Key: uint64(i), Val: bytesOf(t, room[from:from+size:from+size])})
			}
			return l
		}
		push, pull := list(rng.IntN(30)), list(servers*(1+rng.IntN(30)))
		owner, want := make([]int, len(room)), false
		mark := func(l []af.KeyTensor, who int, refuse bool) {
			for i := range l {
				m := l[i].Val.Mem()
				for k := range m.Len() {
					o := &owner[m.Addr()+uint64(k)-backend.Bytes(room).Addr()]
					want = want || refuse && *o != 0
					*o = who
				}
			}
		}
		if servers > 1 {
			mark(push, 1, false)
		}
		mark(pull, 2, true)
		x, err := w.Prepare(push, testcluster.PerServer(pull, servers), af.To{0, 1}[:servers])
		if err == nil {
			x.Close()
		} else {
			n := len(pull)
			if servers > 1 {
				n += len(push)
			}
			refused[min(1, n/33)]++
		}
		if (err != nil) != want {
			t.Fatalf("seed %d: %d pushes and %d pulls of %d servers: %v, want refused %t", seed, len(push), len(pull), servers, err, want)
		}
	}
	if min(refused[0], refused[1]) < 100 {
		t.Errorf("%d few and %d many tensors were refused, want more", refused[0], refused[1])
	}
	c.Finalize(t)
}

// TestInPlace: with one server a tensor may be both pushed and pulled into: the server answers after it has
// received the push.
func TestInPlace(t *testing.T) {
	everyVan(t, func(t *testing.T, o testcluster.Options) {
		c := testcluster.Start(t, o)
		serve(t, c.Servers[0], func(b af.Batch) {
			got := b.Pushes()[0].Val.Bytes()
			if !bytes.Equal(got, bytes.Repeat(got[:1], len(got))) { // the race detector makes a loop over bytes slow
				t.Errorf("a push of %d bytes, not all like the first one", len(got))
			}
			x := bytes.Repeat([]byte{got[0] + 1}, len(got))
			if err := b.Respond([]af.KeyTensor{{Val: bytesOf(t, x)}}); err != nil {
				t.Error(err)
			}
		})
		w := newWorker(t, c.Workers[0])
		for _, size := range []int{1, 1000, 100_000, 3 << 20} {
			x := make([]byte, size)
			l := []af.KeyTensor{{Key: uint64(size), Val: bytesOf(t, x)}}
			p, err := w.Prepare(l, [][]af.KeyTensor{l})
			if err != nil {
				t.Fatal(err)
			}
			for i := range min(20, 4+(10<<20)/size) { // few rounds of the largest
				start := func() (af.Call, error) { return w.PushPull(l, [][]af.KeyTensor{l}) }
				if i%2 == 1 {
					start = func() (af.Call, error) { return p.Start() }
				}
				call, err := start()
				if err == nil {
					err = call.Wait(t.Context())
				}
				if want := bytes.Repeat([]byte{byte(i + 1)}, size); err != nil || !bytes.Equal(x, want) {
					t.Fatalf("%d bytes, round %d: not each byte is one more than before: %v", size, i, err)
				}
			}
			p.Close()
		}
		c.Finalize(t)
	})
}
