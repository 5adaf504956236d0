package bench

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stepaf/stepaf-go/af/collective"
	"github.com/stepaf/stepaf-go/tests/testcluster"
)

func TestCollectiveArguments(t *testing.T) {
	for args, want := range map[string]string{
		"--van tcp":                          "--van tcp: want local, zmq or ibverbs",
		"--op Reduce":                        "--op Reduce: want AllGather",
		"--size 8":                           "--size wants --op",
		"--op AllGather --size 6":            "--size 6: want whole float32",
		"--ranks 1":                          "--ranks 1: want 2 to 64",
		"--rounds 0":                         "--iters 0, --rounds 0: want",
		"--op AllGather --size 4 --iters -1": "--iters -1, --rounds",
	} {
		_, err := bench(t, append([]string{"collective"}, strings.Fields(args)...)...)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}

// TestExchange: each call is made and checked, and the check detects wrong results.
func TestExchange(t *testing.T) {
	const n = 3
	c := testcluster.Start(t, testcluster.Options{Workers: n})
	comms := make([]*collective.Comm, n)
	all := func(f func(r int) error) error {
		var wg sync.WaitGroup
		errs := make([]error, n)
		for r := range n {
			wg.Go(func() { errs[r] = f(r) })
		}
		wg.Wait()
		for _, err := range errs {
			if err != nil {
				return err
			}
		}
		return nil
	}
	if err := all(func(r int) (err error) {
		comms[r], err = collective.New(t.Context(), c.Workers[r], collective.Options{Ranks: []int{0, 1, 2}})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	for _, op := range exchangeOps {
		for _, size := range []int{4, 4000} {
			if op == barrier {
				size = 0
			}
			if err := all(func(r int) error {
				ns, err := exchange{op, size}.run(t.Context(), comms[r], 5)
				if err == nil && (len(ns) != 5 || slices.Min(ns) <= 0) {
					err = fmt.Errorf("%s: times %v", op, ns)
				}
				return err
			}); err != nil {
				t.Error(err)
			}
		}
	}
	// Rank 1 makes a call more than the others have in this round, so all later ones of theirs are shifted.
	err := all(func(r int) error {
		if r == 1 {
			_, err := exchange{allGather, 40}.run(t.Context(), comms[r], 1)
			if err != nil {
				return err
			}
			_, err = exchange{allGather, 40}.run(t.Context(), comms[r], 1)
			return err
		}
		_, err := exchange{allGather, 40}.run(t.Context(), comms[r], 2)
		return err
	})
	if err == nil || !strings.Contains(err.Error(), "want") {
		t.Errorf("a wrong value of rank 1: %v", err)
	}
}

// TestAsk: a call's time is that of the slowest rank. A call that gloo lacks differs from a rank that has ended.
func TestAsk(t *testing.T) {
	for _, x := range []struct{ zero, one, want string }{
		{`echo '{"ns":[5,2]}'`, `echo '{"ns":[3,4]}'`, "[5 4] <nil>"},
		{`echo '{"error":"no such call"}'`, `echo '{"error":"no such call"}'`, "[] AllGather - 4: no such call"},
		{`echo '{"ns":[5,2]}'`, `exit 0`, "[] AllGather - 4: worker 1: EOF"},
	} {
		g := &group{ctx: t.Context()}
		for i, script := range []string{x.zero, x.one} {
			if err := g.start(fmt.Sprint("worker ", i), []string{"sh", "-c", "read line; " + script + "; read line; " + script}, nil, nil); err != nil {
				t.Fatal(err)
			}
		}
		r := g.all.row("AllGather", "-", 4)
		err := inTurns([]int{2, 2}, nil, r)
		var ns []int64
		if err == nil {
			ns = r.slowest()
		}
		if got := fmt.Sprint(ns, " ", err); got != x.want {
			t.Errorf("%q, want %q", got, x.want)
		}
		_, _ = g.all.wait()
	}
}
