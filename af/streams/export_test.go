package streams

import "runtime"

// Deaf makes e hear nothing of its peers until the returned function is called.
func (e *Ends) Deaf() (hear func()) {
	e.mu.Lock()
	return e.mu.Unlock
}

// Waiting waits until a server's Prepare calls wait for n exchanges.
func (e *Ends) Waiting(n int) {
	for {
		e.mu.Lock()
		ok := len(e.waiting) == n
		e.mu.Unlock()
		if ok {
			return
		}
		runtime.Gosched()
	}
}
