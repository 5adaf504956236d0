package cluster

// The stages of a node's life, and whether it can be used.

import (
	"slices"
	"sync"
	"sync/atomic"
)

// lifetime is the stage that a node has reached, from its start to its end. Changes are made with control.mu held.
type lifetime struct {
	ready     chan struct{} // closed when all nodes are known
	failed    chan struct{} // closed when the node cannot be used any more; err is the reason
	err       error
	onExit    []*func()
	stop      chan struct{} // ends runTimer
	leaving   atomic.Bool
	left      chan struct{} // closed when the node has left; finalErr is set then
	finalErr  error
	closing   chan struct{} // closed by Close, to end a Shutdown that waits
	closeOnce sync.Once     // closes closing
}

func newLifetime() lifetime {
	return lifetime{ready: make(chan struct{}), failed: make(chan struct{}), stop: make(chan struct{}),
		closing: make(chan struct{}), left: make(chan struct{})}
}

// Alive returns nil, or the reason why the node cannot be used: it has left, or failed.
func (n *lifetime) Alive() error {
	select {
	case <-n.failed:
		return n.err
	default:
		return nil
	}
}

// isClosing reports whether Close has been called. The node can be used a little longer.
func (n *lifetime) isClosing() bool {
	select {
	case <-n.closing:
		return true
	default:
		return false
	}
}

// end makes the node unusable, with err as the reason. It returns false if the node was unusable before. control.mu
// is held.
func (n *lifetime) end(err error) bool {
	if n.Alive() != nil {
		return false
	}
	n.err = err
	close(n.failed)
	return true
}

// leaveOnce calls leave the first time; other calls wait for its end. They wait for a
// channel, not for the mutex of a sync.Once, which would stop the virtual time of tests.
func (n *lifetime) leaveOnce(leave func() error) {
	if n.leaving.Swap(true) {
		<-n.left
		return
	}
	defer close(n.left)
	n.finalErr = leave()
}

// nextExit removes and returns the last function of App.OnExit, nil if there is none: functions may be added and removed
// meanwhile. mu is control.mu.
func (n *lifetime) nextExit(mu sync.Locker) *func() {
	mu.Lock()
	defer mu.Unlock()
	last := len(n.onExit) - 1
	if last < 0 {
		return nil
	}
	exit := n.onExit[last]
	n.onExit = slices.Delete(n.onExit, last, last+1)
	return exit
}

// addFunc appends f to list, which mu guards, and returns a function that removes f. A reader may use the list after it has
// released mu.
func addFunc[F any](mu sync.Locker, list *[]*F, f F) (remove func()) {
	mu.Lock()
	defer mu.Unlock()
	at := &f
	*list = append(slices.Clip(*list), at)
	return func() {
		mu.Lock()
		defer mu.Unlock()
		*list = slices.DeleteFunc(slices.Clone(*list), func(x *F) bool { return x == at })
	}
}
