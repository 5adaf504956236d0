package core

// The calls of programs with an event loop (asyncio, select, epoll), which must not wait.

import (
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/van"
)

// Poll reports whether the batch of a worker's handler is complete, as Session.Wait does but without a limit: it returns the result,
// or ErrPending. After a result, Session.Wait and Poll return the same again.
func Poll(s *Session, handler int64) error {
	if s.worker == nil {
		return wrongRole(s, "poll", "worker")
	}
	return s.Wait(handler, math.MaxInt64, 0)
}

// Descriptor returns the number of a descriptor that is readable
//   - on a server, while GetBatch (if any is set, GetAny) would return batches or an error at once;
//   - on a worker, while a request has ended that neither Wait nor Poll has reported;
//   - in both roles, when the node has left the cluster.
//
// The calls of that list make the descriptor unreadable; the program need not read it. The first call of Descriptor opens it. It
// stays open until the process ends.
func Descriptor(s *Session, any bool) (int, error) {
	switch {
	case s.queue != nil:
		return openBatches(s.queue, any)
	case s.worker == nil:
		return 0, wrongRole(s, "fileno", "worker or a server")
	case any:
		return 0, fmt.Errorf("fileno: %w: any=True on %s, want it on a server only", van.ErrInvalid, s.node.Name())
	}
	return s.shown.open((*cluster.Node)(s.node).App(), s.customer())
}

// openBatches returns the number of one of the descriptors of a server's program.
func openBatches(q *queue, any bool) (int, error) {
	q.mu.Lock()
	defer q.unlock(false)
	d := &q.shown.each
	if any {
		d = &q.shown.any
	}
	if *d == nil {
		opened, err := openDescriptor(q.node)
		if err != nil {
			return 0, err
		}
		*d = opened
	}
	if q.shown.timer == nil {
		q.shown.timer = time.AfterFunc(0, q.wakeAll)
		go func() {
			<-q.node.Ended()
			q.wakeAll()
		}()
	}
	return (*d).fd, nil
}

// requestDescriptor is the descriptor of a worker's program.
type requestDescriptor struct {
	mu sync.Mutex
	d  *descriptor // nil until the program asks for it
}

// open returns the number of the descriptor.
func (r *requestDescriptor) open(node cluster.App, requests *cluster.Customer) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.d == nil {
		d, err := openDescriptor(node)
		if err != nil {
			return 0, err
		}
		show := func(unreported int) { d.show(unreported > 0 || node.Alive() != nil) }
		requests.OnUnreported(show)
		go func() {
			<-node.Ended()
			requests.OnUnreported(show) // calls it
		}()
		r.d = d
	}
	return r.d.fd, nil
}
