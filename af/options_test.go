package af_test

import (
	"fmt"
	"testing"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// TestTo: a call to some servers reaches these and no others, and its pull list has their
// parts.
func TestTo(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		o.Servers = 3
		c := testcluster.Start(t, o)
		heard := make([]int, 3)
		for rank, n := range c.Servers {
			serve(t, n, func(b af.Batch) {
				heard[rank]++
				out := []af.KeyTensor{{Val: bytesOf(t, fmt.Appendf(nil, "%s%d", b.Pushes()[0].Val.Bytes(), rank))}}
				if err := b.Respond(out); err != nil {
					t.Error(err)
				}
			})
		}
		w := newWorker(t, c.Workers[0])
		push := []af.KeyTensor{{Key: 1, Val: bytesOf(t, []byte("x"))}}
		pulls := func(n int) (l []af.KeyTensor) {
			for range n {
				l = append(l, af.KeyTensor{Key: 2, Val: bytesOf(t, make([]byte, 2))})
			}
			return l
		}
		for _, x := range []struct {
			to   []af.CallOption
			want string
		}{{nil, "x0x1x2"}, {[]af.CallOption{af.To{1}}, "x1"}, {[]af.CallOption{af.To{0, 2}}, "x0x2"}, {[]af.CallOption{af.To{0, 1, 2}}, "x0x1x2"}} {
			pull := pulls(len(x.want) / 2)
			call, err := w.PushPull(push, testcluster.PerServer(pull, len(pull)), x.to...)
			if err == nil {
				err = call.Wait(t.Context())
			}
			got := ""
			for _, p := range pull {
				got += string(p.Val.Bytes())
			}
			if err != nil || got != x.want {
				t.Errorf("to %v: %q and %v, want %q", x.to, got, err, x.want)
			}
		}
		if want := [3]int{3, 3, 3}; [3]int(heard) != want {
			t.Errorf("the servers have had %v batches, want %v", heard, want)
		}
		for _, x := range []struct {
			to   af.CallOption
			n    int
			text string
		}{
			{af.To{3}, 1, "to servers [3], want ranks from 0 to 2"}, {af.To{-1}, 1, "[-1]"}, {af.To{1, 0}, 2, "[1 0]"}, {af.To{1, 1}, 2, "[1 1]"},
			{af.To{}, 0, "to no server"}, {af.To{0, 1}, 3, "3 lists of pull tensors for 2 servers"}, {nil, 3, "option 0 is nil"},
		} {
			_, err := w.PushPull(push, testcluster.PerServer(pulls(x.n), max(x.n, 1)), x.to)
			vantest.Fails(t, err, van.ErrInvalid, "worker 0 (id 9): push_pull", x.text)
		}
		if n := w.Customer().InFlight(); n != 0 {
			t.Errorf("%d calls in flight after calls that were refused", n)
		}
		c.Finalize(t)
	}, all...)
}

// TestOrder: tensors answer pulls in their order whatever their keys, or by key.
func TestOrder(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	batches := make(chan af.Batch, 1)
	serve(t, c.Servers[0], func(b af.Batch) { batches <- b })
	w := newWorker(t, c.Workers[0])
	outs := []af.KeyTensor{{Key: 6, Val: bytesOf(t, []byte("a"))}, {Key: 5, Val: bytesOf(t, []byte("b"))}}
	for _, x := range []struct {
		opts []af.RespondOption
		want string
	}{{nil, "ab"}, {[]af.RespondOption{af.ByKey}, "ba"}} {
		five, six := make([]byte, 1), make([]byte, 1)
		call, err := w.PushPull(nil, [][]af.KeyTensor{{{Key: 5, Val: bytesOf(t, five)}, {Key: 6, Val: bytesOf(t, six)}}})
		if err != nil {
			t.Fatal(err)
		}
		b := <-batches
		vantest.Fails(t, b.Respond(outs[:1]), van.ErrInvalid, "1 tensors for 2 pulls")
		vantest.Fails(t, b.Respond(outs[:1], af.ByKey), van.ErrInvalid, "no tensor with key 5")
		vantest.Fails(t, b.Respond(outs, nil), van.ErrInvalid, "option 0 is nil")
		if err := b.Respond(outs, x.opts...); err != nil {
			t.Fatal(err)
		}
		if err := call.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := string(five) + string(six); got != x.want {
			t.Errorf("with %v: %q, want %q", x.opts, got, x.want)
		}
	}
	c.Finalize(t)
}
