package af_test

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// TestBatchBeyondTheSendBudget: a batch is sent and answered whole when nothing else waits, however much more it has
// than STEPAF_SEND_BUDGET, in one tensor or in several.
func TestBatchBeyondTheSendBudget(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Set = func(c *postoffice.Config) { c.SendBudget = 1 << 20 }
		c := testcluster.Start(t, o)
		value := func(key uint64, size int) []byte {
			return bytes.Repeat([]byte{byte(key), byte(key >> 8), 3, 5}, size/4)
		}
		serve(t, c.Servers[0], func(b af.Batch) {
			for _, p := range b.Pushes() {
				if !bytes.Equal(p.Val.Bytes(), value(p.Key, p.Val.Len())) {
					t.Errorf("the values of key %d differ", p.Key)
				}
			}
			var out []af.KeyTensor
			for _, p := range b.Pulls() {
				out = append(out, af.KeyTensor{Key: p.Key, Val: bytesOf(t, value(p.Key, p.Len))})
			}
			if err := b.Respond(out); err != nil {
				t.Error(err)
			}
		})
		w := newWorker(t, c.Workers[0])
		for _, x := range []struct {
			name                string
			pushes, pulls, size int
		}{
			{"one push", 1, 0, 4 << 20}, {"one pull", 0, 1, 4 << 20}, {"one of each", 1, 1, 4 << 20},
			{"pushes", 3, 0, 3 << 20}, {"pulls", 0, 3, 3 << 20}, {"both", 3, 3, 3 << 20}, {"short ones", 200, 200, 20_000},
		} {
			t.Run(x.name, func(t *testing.T) {
				var push, pull []af.KeyTensor
				for key := range uint64(x.pushes) {
					push = append(push, af.KeyTensor{Key: key, Val: bytesOf(t, value(key, x.size))})
				}
				for key := range uint64(x.pulls) {
					pull = append(pull, af.KeyTensor{Key: key, Val: bytesOf(t, make([]byte, x.size))})
				}
				for range 3 {
					call, err := w.PushPull(push, [][]af.KeyTensor{pull})
					if err == nil {
						err = call.Wait(t.Context())
					}
					if err != nil {
						t.Fatal(err)
					}
					for _, p := range pull {
						if !bytes.Equal(p.Val.Bytes(), value(p.Key, x.size)) {
							t.Errorf("what was pulled under key %d differs", p.Key)
						}
						clear(p.Val.Bytes())
					}
				}
			})
		}
	}, testcluster.TCP, testcluster.Unix, testcluster.SHM)
}

// TestBatchBeyondTheReceiveBudget: a batch larger than a server's budget for one batch fails at once, and the
// error names its size and the variable that sets the budget. A batch just within the budget is served.
func TestBatchBeyondTheReceiveBudget(t *testing.T) {
	const most = 2 << 20 // bytes
	for _, x := range []struct {
		name      string
		peer, all int
	}{{"STEPAF_RECV_BUDGET", most / 2, most}, {"STEPAF_RECV_BUDGET_PEER", most, most / 2}} {
		t.Run(x.name, func(t *testing.T) {
			testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
				o.Set = func(c *postoffice.Config) { c.RecvBudgetPeer, c.RecvBudget = x.peer, x.all }
				c := testcluster.Start(t, o)
				s := serve(t, c.Servers[0], echoes(t))
				w := newWorker(t, c.Workers[0])
				push := func(sizes ...int) error {
					var l []af.KeyTensor
					for i, n := range sizes {
						l = append(l, af.KeyTensor{Key: uint64(i + 1), Val: bytesOf(t, make([]byte, n))})
					}
					call, err := w.PushPull(l, nil, af.Within(20*time.Second))
					if err != nil {
						t.Fatal(err)
					}
					return call.Wait(t.Context())
				}
				want := fmt.Sprintf(", want at most %d (%s)", most, x.name)
				vantest.Fails(t, push(most+1), van.ErrInvalid, "push_pull with server 0", fmt.Sprintf("a batch of %d bytes", most+1)+want)
				vantest.Fails(t, push(most/2, most/2+1), van.ErrInvalid, fmt.Sprintf("a batch of %d bytes", most+1)+want)
				vantest.Fails(t, push(most/2, most/2, 3), van.ErrInvalid, fmt.Sprintf("a batch of %d bytes", most+3)+want)
				if err := push(most/2, most/2); err != nil {
					t.Error(err)
				}
				eventually(t, "nothing is open", func() bool { n, bytes := af.OpenBatches(s, van.WorkerID(0)); return n == 0 && bytes == 0 })
				works(t, w, 1)
				testcluster.Counted(t, c.Servers[0], postoffice.Stats{InvalidRequests: 3})
			}, all...)
		})
	}
}

// TestBatchGivenUpForAnother: if a worker has begun too many batches at once, the server cancels one of them,
// which fails at once, and serves the batch that needed its memory.
func TestBatchGivenUpForAnother(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		hook := &hooks.Van{Expands: true}
		o.Wrap = hook.Wrap("worker", 0)
		o.Set = func(c *postoffice.Config) { c.RecvBudgetPeer = 1 << 20 }
		c := testcluster.Start(t, o)
		serve(t, c.Servers[0], echoes(t))
		w := newWorker(t, c.Workers[0])
		works(t, w, 1)
		half := bytesOf(t, make([]byte, 600<<10))
		push := func() af.Call {
			call, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: half}, {Key: 2, Val: half}}, nil, af.Within(20*time.Second))
			if err != nil {
				t.Fatal(err)
			}
			return call
		}
		hook.OnSend(func(m *van.Message) hooks.Verdict {
			if m.Head == van.BatchEnd {
				return hooks.Lose
			}
			return hooks.Pass
		})
		first := push()
		hook.OnSend(nil)
		if err := push().Wait(t.Context()); err != nil {
			t.Error(err)
		}
		vantest.Fails(t, first.Wait(t.Context()), van.ErrQueueFull, "push_pull with server 0", "bytes of batches that have not ended, want at most 1048576 (STEPAF_RECV_BUDGET_PEER)")
		testcluster.Counted(t, c.Servers[0], postoffice.Stats{RefusedRequests: 1})
	}, all...)
}

// TestRegisteredTooShort: a push that is longer than the memory that the server has registered for it fails at once, with
// both lengths.
func TestRegisteredTooShort(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		c := testcluster.Start(t, o)
		s := serve(t, c.Servers[0], echoes(t))
		if err := s.RegisterRecvTensor(bytesOf(t, make([]byte, 8)), []int{0}, []uint64{7}); err != nil {
			t.Fatal(err)
		}
		w := newWorker(t, c.Workers[0])
		push(t, w, 7, "8 bytes.")
		call, err := w.PushPull([]af.KeyTensor{{Key: 7, Val: bytesOf(t, []byte("9 bytes.."))}}, nil, af.Within(20*time.Second))
		if err != nil {
			t.Fatal(err)
		}
		vantest.Fails(t, call.Wait(t.Context()), van.ErrInvalid, "refused there", "pushed 9 bytes under key 7, the registered receive buffer has 8")
		push(t, w, 7, "8 again.")
	}, all...)
}
