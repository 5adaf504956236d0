package collective

// Messages of lying, late and confused nodes have no effect except log lines and errors.

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/hooks"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

// said collects the answers of a node: the receivers' ids, verbs and reasons.
type said struct {
	mu sync.Mutex
	l  []string
}

func (s *said) take() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.l
	s.l = nil
	return l
}

func (s *said) note(m *van.Message) hooks.Verdict {
	if v, err := verbOf(m.Body); err == nil && !m.Request {
		text := fmt.Sprint(m.Receiver, " ", v)
		if v == verbRefused {
			_, why, _ := parseReason(m.Body)
			text += fmt.Sprint(" ", errors.Is(why, ErrMismatch), errors.Is(why, van.ErrClosed), errors.Is(why, ErrAborted))
		}
		s.mu.Lock()
		s.l = append(s.l, text)
		s.mu.Unlock()
	}
	return hooks.Pass
}

// TestStrangers: requests that make no sense, of ranks and of others, are dropped or refused, and change nothing.
func TestStrangers(t *testing.T) {
	lent.Watch(t)
	hook, answers := &hooks.Van{}, &said{}
	cl := testcluster.Start(t, testcluster.Options{Workers: 4, Wrap: hook.Wrap("worker", 0)})
	var all [2]*Comm
	onAll(t, 2, func(r int) (err error) {
		all[r], err = New(t.Context(), cl.Workers[2*r], Options{Ranks: []int{0, 2}, Timeout: 20 * time.Second})
		return err
	})
	t.Cleanup(func() {
		onAll(t, 2, func(r int) error { return all[r].Close() })
		for _, c := range all {
			atRest(t, c)
		}
	})
	c := all[0]
	self, rank, between, behind, server := c.b.ids[0], c.b.ids[1], van.WorkerID(1), van.WorkerID(3), van.ServerID(0)
	c.b.mu.Lock()
	epoch, round := c.b.epoch, c.bootstrap.round
	c.b.mu.Unlock()
	ask := call{kind: allGather, dtype: af.Uint8, root: -1, bytes: 8}.appendAsk(nil, epoch)
	hi := hello{epoch, 1 << 50, c.b.hash, 2}
	abort := appendReason(nil, verbAbort, round, errors.New("a lie"))
	hook.OnSend(answers.note)
	refusesStranger := " 4 true false false"
	for _, x := range []struct {
		what   string
		from   int
		body   []byte
		change func(m *van.Message)
		err    error
		says   string
	}{
		{"nothing", rank, nil, nil, van.ErrMalformed, ""},
		{"another version", rank, []byte{version + 1, byte(verbHello)}, nil, van.ErrMalformed, ""},
		{"no verb", rank, []byte{version, 0}, nil, van.ErrMalformed, ""},
		{"a refusal that answers nothing", rank, appendReason(nil, verbRefused, round, van.ErrClosed), nil, van.ErrMalformed, ""},
		{"the answer to an abort", rank, []byte{version, byte(verbDone)}, nil, van.ErrMalformed, ""},
		{"a verb that there is not", rank, []byte{version, byte(verbDone) + 1}, nil, van.ErrMalformed, ""},
		{"a push", rank, ask, func(m *van.Message) { m.Push = true }, van.ErrMalformed, ""},
		{"a push of another node", behind, ask, func(m *van.Message) { m.Push = true }, van.ErrMalformed, ""},
		{"this node itself", self, ask, nil, van.ErrMalformed, ""},
		{"half a request", rank, ask[:askLen-1], nil, van.ErrMalformed, ""},
		{"half a hello", rank, hi.append(nil)[:helloLen-1], nil, van.ErrMalformed, ""},
		{"half an abort", rank, abort[:5], nil, van.ErrMalformed, ""},
		{"in another rank's name", rank, ask, func(m *van.Message) { m.Key = partKey(0, 0) }, van.ErrMalformed, ""},
		{"fewer bytes than none", rank, ask, func(m *van.Message) { m.ValLen = -1 }, van.ErrMalformed, ""},
		{"a request of no rank, below", server, ask, nil, nil, fmt.Sprint(server, refusesStranger)},
		{"a request of no rank, between", between, ask, nil, nil, fmt.Sprint(between, refusesStranger)},
		{"a request of no rank, above", behind, ask, nil, nil, fmt.Sprint(behind, refusesStranger)},
		{"a hello of no rank", between, hi.append(nil), nil, nil, fmt.Sprint(between, refusesStranger)},
		{"an abort of no rank", between, abort, nil, nil, fmt.Sprint(between, " ", verbDone)},
		{"an abort of another round", rank, appendReason(nil, verbAbort, round+1, errors.New("late")), nil, nil, fmt.Sprint(rank, " ", verbDone)},
		{"a hello of a rank with others in its communicator", rank, hello{epoch, 1 << 50, c.b.hash + 1, 2}.append(nil), nil, nil, fmt.Sprint(rank, refusesStranger)},
		{"a hello of a rank with more of them", rank, hello{epoch, 1 << 50, c.b.hash, 3}.append(nil), nil, nil, fmt.Sprint(rank, refusesStranger)},
		{"a request of an epoch before", rank, call{kind: allGather, dtype: af.Uint8, root: -1, bytes: 8}.appendAsk(nil, epoch-1), nil, nil, fmt.Sprint(rank, " 4 false false true")},
		{"a request of an epoch to come", rank, call{kind: allGather, dtype: af.Uint8, root: -1, bytes: 8}.appendAsk(nil, epoch+1), nil, nil, fmt.Sprint(rank, " 4 false false true")},
	} {
		m := &van.Message{}
		m.Reset()
		m.Sender, m.Request, m.Key, m.ValLen, m.AppID = x.from, true, partKey(0, 1), 8, int32(appBase)
		m.Body = append(m.Body, x.body...)
		if x.change != nil {
			x.change(m)
		}
		if err := c.handle(m); !errors.Is(err, x.err) || x.err == nil && err != nil {
			t.Errorf("%s: %v, want %v", x.what, err, x.err)
		}
		if got := strings.Join(answers.take(), ", "); got != x.says {
			t.Errorf("%s: the answer is %q, want %q", x.what, got, x.says)
		}
		c.b.mu.Lock()
		if err := c.b.err; err != nil {
			t.Fatalf("%s: the communicator has failed: %v", x.what, err)
		}
		c.b.mu.Unlock()
		atRest(t, c)
	}
	hook.OnSend(nil)
	onAll(t, 2, func(r int) error { return calls(all[r], memory{}, 100, 1) })
}

// TestHelloWhileItRuns: a hello with a later round means that the rank has begun anew, though it has not reported
// a failure of the communicator: calls fail, and Rebuild joins its round. A repeated hello is answered, and
// nothing fails.
func TestHelloWhileItRuns(t *testing.T) {
	all, _ := comms(t, testcluster.Options{}, 2)
	c := all[0]
	say := func(h hello, epoch uint32) {
		m := &van.Message{}
		m.Reset()
		m.Sender, m.Request, m.ProcessEpoch, m.AppID = c.b.ids[1], true, epoch, int32(appBase)
		m.Body = h.append(m.Body)
		if err := c.handle(m); err != nil {
			t.Error(err)
		}
	}
	c.b.mu.Lock()
	p := &c.bootstrap.ranks[1]
	last, process := hello{p.proposed, p.answered, c.b.hash, 2}, p.epoch
	c.b.mu.Unlock()
	say(last, process)
	onAll(t, 2, func(r int) error { return all[r].Barrier(t.Context()) })
	op, err := c.AllGather(zeros(2), zeros(1))
	if err != nil {
		t.Fatal(err)
	}
	last.round++
	say(last, process)
	vantest.Fails(t, op.Wait(t.Context()), ErrAborted, "rank 1", "rebuilds the communicator")
	onAll(t, 2, func(r int) error {
		err := all[r].Rebuild(t.Context())
		if err == nil {
			err = all[r].Barrier(t.Context())
		}
		return err
	})
}

// TestRebuildBesideRebuild: of two Rebuilds at once one is refused, and the other goes on.
func TestRebuildBesideRebuild(t *testing.T) {
	all, _ := comms(t, testcluster.Options{}, 2)
	first := make(chan error, 1)
	go func() { first <- all[0].Rebuild(t.Context()) }()
	vantest.Eventually(t, 20*time.Second, "a Rebuild is under way", func() bool {
		all[0].b.mu.Lock()
		defer all[0].b.mu.Unlock()
		return all[0].b.joining
	})
	soon, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	vantest.Fails(t, all[0].Rebuild(soon), van.ErrInvalid, "another Rebuild is under way")
	if err := all[1].Rebuild(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-first; err != nil {
		t.Error(err)
	}
	onAll(t, 2, func(r int) error { return all[r].Barrier(t.Context()) })
}

// TestLimits: how long a wait may take, of a communicator's limit and of a context.
func TestLimits(t *testing.T) {
	cl := testcluster.Start(t, testcluster.Options{Workers: 1})
	deadline, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	for _, x := range []struct {
		of   time.Duration
		ctx  context.Context
		want time.Duration
	}{{0, t.Context(), postoffice.DefaultTimeout}, {5, t.Context(), 5}, {-1, t.Context(), 0}, {0, deadline, 0}, {5, deadline, 0}, {-1, deadline, 0}} {
		if got := (&base{node: (*cluster.Node)(cl.Workers[0]).App(), timeout: x.of}).limit(x.ctx); got != x.want {
			t.Errorf("with a limit of %d: %s, want %s", x.of, got, x.want)
		}
	}
}

// TestNamesWhoIsMissing: the error of New names the missing ranks, and no other rank.
func TestNamesWhoIsMissing(t *testing.T) {
	cl := testcluster.Start(t, testcluster.Options{Workers: 4})
	errs := every(2, func(r int) error {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second) // in which the two meet
		defer cancel()
		_, err := New(ctx, cl.Workers[r], Options{Ranks: ranks(4)})
		return err
	})
	for r, err := range errs {
		vantest.Fails(t, err, van.ErrTimeout, "rank 2", "rank 3")
		if strings.Contains(err.Error(), fmt.Sprintf("no answer from rank %d", 1-r)) || !strings.Contains(err.Error(), "no answer from rank 2") {
			t.Errorf("rank %d: %v, which names one that has come", r, err)
		}
	}
}

// TestReasonOfARoundThatFails: if a rank has finished the round, and requests a part of a rank whose round then
// fails, the refusal names the ranks that were missing.
func TestReasonOfARoundThatFails(t *testing.T) {
	hook := &hooks.Van{}
	cl := testcluster.Start(t, testcluster.Options{Workers: 3, Wrap: hook.Wrap("worker", 0)})
	var all [3]*Comm
	onAll(t, 3, func(r int) (err error) {
		all[r], err = New(t.Context(), cl.Workers[r], Options{Ranks: []int{0, 1, 2}, Timeout: 20 * time.Second})
		return err
	})
	t.Cleanup(func() { onAll(t, 3, func(r int) error { return all[r].Close() }) })
	c := all[0]
	reasons := make(chan string, 1)
	hook.OnSend(func(m *van.Message) hooks.Verdict {
		if v, err := verbOf(m.Body); err == nil && !m.Request && v == verbRefused {
			_, why, _ := parseReason(m.Body)
			reasons <- why.Error()
		}
		return hooks.Pass
	})
	failed := make(chan error, 1)
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	go func() { failed <- c.Rebuild(ctx) }()
	var epoch uint64
	vantest.Eventually(t, 20*time.Second, "the round begins", func() (begun bool) {
		c.b.mu.Lock()
		defer c.b.mu.Unlock()
		epoch, begun = c.b.epoch, c.b.joining
		return begun
	})
	m := &van.Message{}
	m.Reset()
	m.Sender, m.Request, m.Key, m.ValLen, m.AppID = c.b.ids[1], true, partKey(0, 1), 8, int32(appBase)
	m.Body = call{kind: allGather, dtype: af.Uint8, root: -1, bytes: 8}.appendAsk(m.Body, epoch+1)
	if err := c.handle(m); err != nil {
		t.Fatal(err)
	}
	cancel(van.ErrTimeout) // as its limit does, when it has been asked
	if err := <-failed; !errors.Is(err, van.ErrTimeout) {
		t.Fatalf("Rebuild of one of three ranks: %v", err)
	}
	want := "no answer from rank 1 (worker 1 (id 11)"
	if got := <-reasons; !strings.Contains(got, want) {
		t.Errorf("the rank that has asked hears %q, want %q in it", got, want)
	}
	hook.OnSend(nil)
	onAll(t, 3, func(r int) error { return all[r].Rebuild(context.Background()) })
	onAll(t, 3, func(r int) error { return calls(all[r], memory{}, 100, 1) })
}

// TestReasonOfAnotherCommunicator: a call that its program cancels because another communicator could not be created fails on all
// ranks, also if a rank had sent a hello that did not fit before the round that succeeded.
func TestReasonOfAnotherCommunicator(t *testing.T) {
	for _, misfit := range []bool{false, true} {
		all, _ := comms(t, testcluster.Options{}, 2)
		if misfit {
			all[0].b.mu.Lock()
			all[0].bootstrap.ranks[1].misfit = 7
			all[0].b.mu.Unlock()
			onAll(t, 2, func(i int) error { return all[i].Rebuild(t.Context()) })
		}
		op, err := all[0].AllGather(zeros(16), zeros(8))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(fmt.Errorf("the other communicator: %w", errMisfit))
		vantest.Fails(t, op.Wait(ctx), ErrMismatch, "the other communicator")
		b := &all[1].b
		vantest.Eventually(t, 10*time.Second, "rank 1 is notified", func() bool {
			b.mu.Lock()
			defer b.mu.Unlock()
			return b.err != nil
		})
		vantest.Fails(t, wait(all[1].AllGather(zeros(16), zeros(8))), ErrMismatch, "the other communicator")
	}
}

// TestClosedBeforeAnotherCalls: if a rank cannot make a call because another one has closed the communicator, the call fails on the
// ranks that have made it and need this rank, also if they have exchanged their parts with the closed one.
func TestClosedBeforeAnotherCalls(t *testing.T) {
	for _, early := range []bool{true, false} { // rank 2 requests its part of rank 0 before rank 1 closes
		hook := &hooks.Van{}
		all, _ := comms(t, testcluster.Options{Wrap: hook.Wrap("worker", 2)}, 3)
		first := all[0].b.ids[0]
		hook.OnSend(func(m *van.Message) hooks.Verdict {
			if v, _ := verbOf(m.Body); v == verbAsk && m.Receiver == first && !early {
				return hooks.Keep
			}
			return hooks.Pass
		})
		var ops [3]Op
		onAll(t, 2, func(i int) (err error) {
			ops[i+1], err = all[i+1].AllGather(zeros(24), zeros(8))
			return err
		})
		b := &all[2].b
		vantest.Eventually(t, 20*time.Second, "rank 2 does not need rank 1", func() bool {
			b.mu.Lock()
			defer b.mu.Unlock()
			return !ops[2].o.needs(1)
		})
		if err := all[1].Close(); err != nil {
			t.Error(err)
		}
		vantest.Eventually(t, 20*time.Second, "rank 0 is notified", func() bool {
			all[0].b.mu.Lock()
			defer all[0].b.mu.Unlock()
			return all[0].b.left != nil
		})
		hook.OnSend(nil)
		if err := hook.SendKept(); err != nil {
			t.Error(err)
		}
		vantest.Fails(t, wait(all[0].AllGather(zeros(24), zeros(8))), van.ErrClosed, "rank 1 (worker 1")
		vantest.Fails(t, ops[2].Wait(t.Context()), van.ErrClosed, "rank 1 (worker 1")
	}
}

// TestClosedBeforeAnotherReceives: if a rank cannot make a Broadcast or Scatter because another one has closed the communicator, the
// call fails on the root, which requests nothing.
func TestClosedBeforeAnotherReceives(t *testing.T) {
	for name, call := range map[string]func(c *Comm) (Op, error){
		"broadcast": func(c *Comm) (Op, error) { return c.Broadcast(zeros(8), 2) },
		"scatter":   func(c *Comm) (Op, error) { return c.Scatter(zeros(8), zeros(24), 2) },
	} {
		t.Run(name, func(t *testing.T) {
			all, _ := comms(t, testcluster.Options{}, 3)
			op, err := call(all[2])
			if err != nil {
				t.Fatal(err)
			}
			if err := wait(call(all[1])); err != nil {
				t.Fatal(err)
			}
			if err := all[1].Close(); err != nil {
				t.Error(err)
			}
			vantest.Eventually(t, 20*time.Second, "the others are notified", func() bool {
				for _, b := range []*base{&all[0].b, &all[2].b} {
					b.mu.Lock()
					left := b.left
					b.mu.Unlock()
					if left == nil {
						return false
					}
				}
				return true
			})
			vantest.Fails(t, wait(call(all[0])), van.ErrClosed, "rank 1 (worker 1")
			vantest.Fails(t, op.Wait(t.Context()), van.ErrClosed, "rank 0 (worker 0")
		})
	}
}
