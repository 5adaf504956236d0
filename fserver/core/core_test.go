package core

import (
	"bytes"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/testcluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van/vantest"
)

// sessions opens one worker's and one server's session in this process.
func sessions(t *testing.T) (worker, server *Session) {
	t.Helper()
	return open2(t, testcluster.Start(t, testcluster.Options{Over: testcluster.SHM}))
}

// open2 opens the sessions of a cluster's worker and server.
func open2(t *testing.T, c *testcluster.Cluster) (worker, server *Session) {
	t.Helper()
	worker, server = &Session{node: c.Workers[0]}, &Session{node: c.Servers[0]}
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

// TestThreads: calls from many goroutines; some batches are of pushes alone, of
// which some are answered.
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
				h, err := worker.PushPull(af.DefaultStream, push, pull)
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

// TestUnansweredPushes: batches of pushes alone are answerable for a while, and
// nothing is kept of them but that.
func TestUnansweredPushes(t *testing.T) {
	q := newQueue(testcluster.Start(t, testcluster.Options{}).Servers[0])
	s := &Session{queue: q}
	for id := range uint64(keepAcked + 10) {
		q.next = id + 1
		q.noteAcked(id)
	}
	if len(q.acked) != keepAcked || q.oldest.Len() != keepAcked {
		t.Errorf("%d batches in a list of %d are kept, want %d", len(q.acked), q.oldest.Len(), keepAcked)
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

// TestUnknownHandlers: a batch that get_batch has not returned is unknown, one that was
// answered is not.
func TestUnknownHandlers(t *testing.T) {
	worker, server := sessions(t)
	x := tensor(t, make([]byte, 4))
	if _, err := worker.PushPull(af.DefaultStream, []af.KeyTensor{{Key: 1, Val: x}}, nil); err != nil {
		t.Fatal(err)
	}
	all := func() bool { return server.queue.ready(eachOne) }
	for end := time.Now().Add(20 * time.Second); !all(); server.node.App().Poll(all) {
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
