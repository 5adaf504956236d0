package zmq

import (
	"slices"
	"sync"
)

// accounts are those of all connections that there have been. libzmq may let go of a
// message long after its connection was closed, so an account is used again once it is
// even, and freed with the van.
type accounts struct {
	mu     sync.Mutex
	all    []*account
	closed []*account
}

func (a *accounts) open() *account {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i, x := range a.closed {
		if x.unsent() == 0 {
			a.closed = slices.Delete(a.closed, i, i+1)
			return x
		}
	}
	x := newAccount()
	a.all = append(a.all, x)
	return x
}

func (a *accounts) close(x *account) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = append(a.closed, x)
}

// free frees all; libzmq must have let go.
func (a *accounts) free() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, x := range a.all {
		x.free()
	}
	a.all, a.closed = nil, nil
}
