package core

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
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
)

// sessions opens one worker's and one server's session in this process.
func sessions(t *testing.T) (worker, server *Session) {
	t.Helper()
	return open2(t, testcluster.Start(t, testcluster.Options{Over: testcluster.SHM}))
}

// open2 opens the sessions of a cluster's worker and server.
func open2(t *testing.T, c *testcluster.Cluster) (worker, server *Session) {
	t.Helper()
	worker, server = newSession(c.Workers[0]), newSession(c.Servers[0])
	var all sync.WaitGroup
	for _, s := range []*Session{worker, server} {
		all.Go(func() {
			if err := s.open(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	return worker, server
}

func tensor(t *testing.T, b []byte) af.Tensor {
	t.Helper()
	x, err := af.FromBytes(b, 0, int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func (s *Session) waitFor(h int32) error {
	for {
		if err := s.Wait(int64(h), 20*time.Second, 10*time.Millisecond); !errors.Is(err, ErrPending) {
			return err
		}
	}
}

// TestThreads makes calls from many goroutines. Some batches have pushes only; the server answers some of these.
func TestThreads(t *testing.T) {
	const goroutines, each = 6, 100
	worker, server := sessions(t)
	var workers, servers sync.WaitGroup
	stop := make(chan struct{})
	for range 3 {
		servers.Go(func() {
			for {
				items, err := server.GetBatch(nil, 5*time.Millisecond)
				select {
				case <-stop:
					return
				default:
				}
				if errors.Is(err, ErrPending) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				for _, it := range items {
					var answer []af.KeyTensor
					for range it.Pulls() {
						answer = append(answer, it.Pushes()[0])
					}
					if len(answer) > 0 || it.ID%2 == 0 {
						if err := server.Respond(af.DefaultStream, it.ID, answer); err != nil {
							t.Error(err)
						}
						if err := server.Respond(af.DefaultStream, it.ID, answer); !errors.Is(err, ErrMisuse) {
							t.Errorf("second answer: %v, want %v", err, ErrMisuse)
						}
					}
					it.Release()
				}
			}
		})
	}
	for g := range goroutines {
		workers.Go(func() {
			for i := range each {
				in, out := bytes.Repeat([]byte{byte(g), byte(i)}, 64), make([]byte, 128)
				push := []af.KeyTensor{{Key: uint64(g), Val: tensor(t, in)}, {Key: uint64(g + 100), Val: tensor(t, in)}}
				var pull []af.KeyTensor
				if i%2 == 0 {
					pull = []af.KeyTensor{{Key: uint64(g), Val: tensor(t, out)}}
				}
				h, err := worker.PushPull(af.DefaultStream, nil, push, pull)
				if err == nil {
					err = worker.waitFor(h)
				}
				if err != nil {
					t.Error(err)
					return
				}
				if pull != nil && !bytes.Equal(in, out) {
					t.Errorf("goroutine %d, batch %d: got % x, want % x", g, i, out[:4], in[:4])
				}
			}
		})
	}
	workers.Wait()
	close(stop)
	servers.Wait()
}

// TestUnansweredPushes: batches of pushes only can be answered for a while; the queue keeps only their ids.
func TestUnansweredPushes(t *testing.T) {
	q := newQueue(testcluster.Start(t, testcluster.Options{}).Servers[0])
	s := &Session{queue: q}
	for id := range uint64(keepAcked + 10) {
		q.next = id + 1
		q.acked.add(id, struct{}{}, keepAcked)
	}
	if len(q.acked.of) != keepAcked || q.acked.order.Len() != keepAcked {
		t.Errorf("%d batches in a list of %d are kept, want %d", len(q.acked.of), q.acked.order.Len(), keepAcked)
	}
	if err := s.Respond(af.DefaultStream, 9, nil); !errors.Is(err, ErrMisuse) {
		t.Errorf("answer to a batch long past: %v, want %v", err, ErrMisuse)
	}
	if err := s.Respond(af.DefaultStream, 10, make([]af.KeyTensor, 1)); err == nil {
		t.Error("a tensor for a batch without pulls was taken")
	}
	if err := s.Respond(af.DefaultStream, 10, nil); err != nil {
		t.Error(err)
	}
	if err := s.Respond(af.DefaultStream, 10, nil); !errors.Is(err, ErrMisuse) {
		t.Errorf("second answer: %v, want %v", err, ErrMisuse)
	}
}

// TestSinglePush: the worker of a single push waits until the program has answered it, not only until it was delivered.
func TestSinglePush(t *testing.T) {
	worker, server := sessions(t)
	h, err := worker.PushPull(af.DefaultStream, nil, []af.KeyTensor{{Key: 1, Val: tensor(t, []byte{1})}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	items, err := server.GetBatch(nil, 20*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer items[0].Release()
	if err := worker.Wait(int64(h), 20*time.Second, time.Millisecond); items[0].Answered() || !errors.Is(err, ErrPending) {
		t.Errorf("before the program has answered: answered %t, the worker's wait says %v, want %v", items[0].Answered(), err, ErrPending)
	}
	if err := server.Respond(af.DefaultStream, items[0].ID, nil); err != nil {
		t.Error(err)
	}
	if err := worker.waitFor(h); err != nil {
		t.Error(err)
	}
}

// TestUnknownHandlers: a batch that get_batch has not returned is unknown; a batch that was answered is not.
func TestUnknownHandlers(t *testing.T) {
	worker, server := sessions(t)
	x := tensor(t, make([]byte, 4))
	if _, err := worker.PushPull(af.DefaultStream, nil, []af.KeyTensor{{Key: 1, Val: x}}, nil); err != nil {
		t.Fatal(err)
	}
	all := func() bool { return server.queue.ready(eachOne) }
	for end := time.Now().Add(20 * time.Second); !all(); (*cluster.Node)(server.node).App().Poll(all) {
		if time.Now().After(end) {
			t.Fatal("the batch does not come")
		}
	}
	refused := func(id uint64, text string) {
		t.Helper()
		for _, err := range []error{server.Respond(af.DefaultStream, id, nil), server.CanRespond([]uint64{id}, 0)} {
			vantest.Fails(t, err, postoffice.ErrUnknownHandler, text)
		}
	}
	refused(0, "get_batch has not returned handler 0 yet")
	refused(1, "handler 1, get_batch has returned handlers below 1")
	items, err := server.GetBatch(nil, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	items[0].Release()
	refused(1, "handler 1")
	if err := server.Respond(af.DefaultStream, 0, nil); err != nil {
		t.Fatal(err)
	}
	if err := server.Respond(af.DefaultStream, 0, nil); !errors.Is(err, ErrMisuse) || errors.Is(err, postoffice.ErrUnknownHandler) {
		t.Errorf("second answer: %v, want %v alone", err, ErrMisuse)
	}
}

// TestWaitAgain: a second or late wait for a failed call returns the error again. A wait for an answered call returns
// at once.
func TestWaitAgain(t *testing.T) {
	worker, server := sessions(t)
	x := tensor(t, make([]byte, 4))
	push := func(keys ...uint64) int64 { // several pushes are acknowledged when they arrive, a single push when the application answers it
		t.Helper()
		var l []af.KeyTensor
		for _, key := range keys {
			l = append(l, af.KeyTensor{Key: key, Val: x})
		}
		h, err := worker.PushPull(af.DefaultStream, nil, l, nil)
		if err != nil {
			t.Fatal(err)
		}
		return int64(h)
	}
	wait := func(h int64) error { return worker.Wait(h, time.Minute, time.Minute) }
	answered := push(1, 2)
	for range 2 {
		if err := wait(answered); err != nil {
			t.Fatal(err)
		}
	}
	failed := push(1)
	for range 2 {
		vantest.Fails(t, worker.Wait(failed, time.Millisecond, time.Minute), van.ErrTimeout, "no answer")
	}
	late := make([]int64, 6000) // more than the number of unwaited calls that are kept
	for i := range late {
		late[i] = push(1)
	}
	server.Close()
	for _, h := range late {
		if err := wait(h); !errors.Is(err, van.ErrPeerLost) {
			t.Fatalf("handler %d of %d to %d: %v, want %v", h, late[0], late[len(late)-1], err, van.ErrPeerLost)
		}
	}
	for range 2 {
		vantest.Fails(t, wait(failed), van.ErrTimeout, "no answer")
		if err := wait(answered + 1); err != nil {
			t.Error(err)
		}
	}
}

// TestWaitOneLimit: the limit of one timestamp of a batch counts from the push_pull, and is not exceeded.
func TestWaitOneLimit(t *testing.T) {
	worker, _ := sessions(t)
	x := tensor(t, make([]byte, 4))
	h, err := worker.PushPull(af.DefaultStream, nil, []af.KeyTensor{{Key: 1, Val: x}}, []af.KeyTensor{{Key: 2, Val: x}}) // without an answer
	if err != nil {
		t.Fatal(err)
	}
	one := int64(h) + 1
	for worker.customer().Elapsed(h) < 50*time.Millisecond {
		if err := worker.Wait(one, time.Hour, time.Millisecond); err != ErrPending {
			t.Fatalf("before the limit: %v, want %v", err, ErrPending)
		}
	}
	limit := worker.customer().Elapsed(h)
	err = worker.Wait(one, limit, 0)
	var e *van.Error
	if !errors.Is(err, van.ErrTimeout) || !errors.As(err, &e) || e.Limit != limit || e.Elapsed < limit {
		t.Errorf("at the limit of %v: %v", limit, err)
	}
}

// TestRoles: a call of the other role is refused, and the error names the right role.
func TestRoles(t *testing.T) {
	worker, server := sessions(t)
	_, push := server.PushPull(af.DefaultStream, nil, nil, nil)
	_, pushTo := server.PushPull(af.DefaultStream, []int{0}, nil, nil)
	_, all := server.AllHandlers(1)
	_, trace := server.FetchTrace(1)
	for i, err := range []error{push, pushTo, all, trace, server.Wait(1, time.Second, time.Second)} {
		if !errors.Is(err, ErrMisuse) || !strings.Contains(err.Error(), "only a worker") {
			t.Errorf("a worker's call %d: %v", i, err)
		}
	}
	_, batch := worker.GetBatch(nil, time.Second)
	_, some := worker.GetAny(nil, 1, time.Second)
	_, answer := worker.Answer(af.DefaultStream, 1, nil, nil)
	for i, err := range []error{batch, some, answer, worker.BatchTimeout(time.Second), worker.CanRespond(nil, 0),
		worker.Respond(af.DefaultStream, 1, nil), worker.RegisterRecvBuffer(af.Tensor{}, nil, nil)} {
		if !errors.Is(err, ErrMisuse) || !strings.Contains(err.Error(), "only a server") {
			t.Errorf("a server's call %d: %v", i, err)
		}
	}
	for _, s := range []*Session{worker, server} {
		for _, both := range []bool{false, true} { // neither, or the others alone
			vantest.Fails(t, s.Barrier(t.Context(), both && s == worker, both && s == server, true), van.ErrInvalid, "leave out the caller")
		}
	}
	for _, instances := range []bool{false, true} {
		if err := worker.Barrier(t.Context(), false, true, instances); err != nil {
			t.Errorf("a barrier of the worker alone: %v", err)
		}
		if err := server.Barrier(t.Context(), true, false, instances); err != nil {
			t.Errorf("a barrier of the server alone: %v", err)
		}
		met := make(chan error, 1)
		go func() { met <- server.Barrier(t.Context(), true, true, instances) }()
		if err := errors.Join(worker.Barrier(t.Context(), true, true, instances), <-met); err != nil {
			t.Errorf("a barrier of both: %v", err)
		}
	}
}

// TestHandlersOfABatch: the results of calls with each handler of a push_pull, before and after its answer.
func TestHandlersOfABatch(t *testing.T) {
	worker, server := sessions(t)
	worker.customer().KeepTraces()
	x, y := tensor(t, make([]byte, 4)), tensor(t, make([]byte, 4))
	h, err := worker.PushPull(af.DefaultStream, nil, []af.KeyTensor{{Key: 1, Val: x}, {Key: 2, Val: x}}, []af.KeyTensor{{Key: 3, Val: y}})
	if err != nil {
		t.Fatal(err)
	}
	n, err := worker.AllHandlers(int64(h))
	if err != nil || n < 2 {
		t.Fatalf("%d handlers, %v; want several", n, err)
	}
	last := int64(h) + int64(n) - 1
	for _, other := range []int64{last, last + 1, int64(h) + 1<<32, -1} {
		if n, err := worker.AllHandlers(other); n != 1 || err != nil {
			t.Errorf("%d handlers of %d, %v; want 1", n, other, err)
		}
	}
	for _, unknown := range []int64{last + 1, int64(h) + 1<<32, last + 1<<32, -1} {
		vantest.Fails(t, worker.Wait(unknown, time.Hour, time.Hour), ErrUnknownHandler, "was not returned by push_pull")
		_, err := worker.FetchTrace(unknown)
		vantest.Fails(t, err, ErrUnknownHandler, "was not returned by push_pull")
	}
	for _, one := range []int64{int64(h), last} {
		if err := worker.Wait(one, time.Hour, time.Millisecond); err != ErrPending {
			t.Errorf("the wait for %d: %v, want %v", one, err, ErrPending)
		}
	}
	if stamps, err := worker.FetchTrace(last); err != nil || stamps != [8]uint64{} {
		t.Errorf("the trace of %d before its answer: %v, %v", last, stamps, err)
	}
	vantest.Fails(t, worker.Wait(last, time.Nanosecond, time.Hour), van.ErrTimeout, fmt.Sprintf("handler %d of batch %d", last, h))
	items := server.row(t)
	if err := server.Respond(af.DefaultStream, items[0].ID, []af.KeyTensor{{Key: 3, Val: x}}); err != nil {
		t.Fatal(err)
	}
	items[0].Release()
	for _, one := range []int64{last, int64(h), last, int64(h)} { // the wait for the whole batch ends it
		if err := later(t, func(slice time.Duration) error { return worker.Wait(one, time.Minute, slice) }); err != nil {
			t.Errorf("the wait for %d: %v", one, err)
		}
		stamps, err := worker.FetchTrace(one)
		if err != nil || stamps[0] == 0 {
			t.Errorf("the trace of %d: %v, %v", one, stamps, err)
		}
		if !slices.IsSorted(stamps[:4]) || !slices.IsSorted(stamps[4:]) {
			t.Errorf("the trace of %d is out of order: %v", one, stamps)
		}
	}
	if n, err := worker.AllHandlers(int64(h)); n != 1 || err != nil {
		t.Errorf("%d handlers of what has ended, %v; want 1", n, err)
	}
}

// sentTimes counts the tensors that were sent.
type sentTimes atomic.Int32

func (n *sentTimes) Sent() { (*atomic.Int32)(n).Add(1) }

// TestRefusedAnswers: an answer that does not fit leaves the batch unanswered, and no tensor of it is sent. The tensors
// of an answer to a canceled request are released.
func TestRefusedAnswers(t *testing.T) {
	worker, server := sessions(t)
	x := tensor(t, make([]byte, 8))
	fit := []af.KeyTensor{{Key: 2, Val: x}}
	r := worker.ask(t, 7, 8)
	it := server.row(t)[0]
	var sent sentTimes
	for i, wrong := range [][]af.KeyTensor{nil, {fit[0], fit[0]}, {{Key: 2, Val: tensor(t, make([]byte, 9))}}} {
		told, err := server.Answer(af.DefaultStream, it.ID, wrong, &sent)
		if told || !errors.Is(err, van.ErrInvalid) {
			t.Errorf("answer %d: %t, %v; want that it is refused", i, told, err)
		}
	}
	id := it.ID
	for _, c := range []struct {
		ids     []uint64
		tensors int
		fits    bool
	}{{[]uint64{id}, 1, true}, {[]uint64{id}, 0, false}, {[]uint64{id}, 2, false}, {[]uint64{id, id}, 1, false}, {[]uint64{id, id + 1}, 1, false}, {nil, 3, true}} {
		if err := server.CanRespond(c.ids, c.tensors); err == nil != c.fits {
			t.Errorf("%d tensors for %v: %v", c.tensors, c.ids, err)
		}
	}
	if n := (*atomic.Int32)(&sent).Load(); n != 0 {
		t.Errorf("%d tensors of refused answers have left", n)
	}
	if told, err := server.Answer(af.DefaultStream, id, fit, &sent); !told || err != nil {
		t.Errorf("the answer: %t, %v", told, err)
	}
	it.Release()
	r.pulls(t, 0)
	await(t, "tensor that has left", func() bool { return (*atomic.Int32)(&sent).Load() == 1 })

	// A batch of pushes only, which get_batch has answered.
	if _, err := worker.PushPull(af.DefaultStream, nil, []af.KeyTensor{{Key: 1, Val: x}, {Key: 3, Val: x}}, nil); err != nil {
		t.Fatal(err)
	}
	it = server.row(t)[0]
	if err := server.CanRespond([]uint64{it.ID}, 0); err != nil {
		t.Error(err)
	}
	vantest.Fails(t, server.CanRespond([]uint64{it.ID}, 1), van.ErrInvalid)
	vantest.Fails(t, server.CanRespond([]uint64{it.ID, it.ID}, 0), van.ErrInvalid, "is there twice")
	it.Release()

	r = worker.ask(t, 7, 8)
	it = server.row(t)[0]
	vantest.Fails(t, worker.Wait(int64(r.h), time.Nanosecond, time.Hour), van.ErrTimeout)
	await(t, "withdrawal", func() bool { return !it.Wanted() })
	if told, err := server.Answer(af.DefaultStream, it.ID, fit, &sent); !told || err != nil {
		t.Errorf("an answer for nobody: %t, %v", told, err)
	}
	if n := (*atomic.Int32)(&sent).Load(); n != 2 {
		t.Errorf("%d tensors have left, want 2", n)
	}
	if told, err := server.Answer(af.DefaultStream, it.ID, nil, nil); told || !errors.Is(err, ErrMisuse) {
		t.Errorf("a second answer for nobody: %t, %v", told, err)
	}
	it.Release()
}

// Respond is Answer for tests that do not wait until the tensors are sent.
func (s *Session) Respond(stream af.Stream, id uint64, tensors []af.KeyTensor) error {
	_, err := s.Answer(stream, id, tensors, nil)
	return err
}
