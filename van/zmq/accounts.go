package zmq

import (
	"slices"
	"sync"
)

// accounts owns the accounts of all open and closed connections. libzmq may release a message
// long after its connection was closed. An account is therefore reused only when its balance is
// zero, and its memory is freed with the van.
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

// free frees all accounts. libzmq must have released all messages.
func (a *accounts) free() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, x := range a.all {
		x.free()
	}
	a.all, a.closed = nil, nil
}
