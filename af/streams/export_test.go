package streams

import "runtime"

// Deaf makes e hear nothing of its peers until the returned function is called.
func (e *Ends) Deaf() (hear func()) {
	e.dir.mu.Lock()
	return e.dir.mu.Unlock
}

// Waiting waits until a server's Prepare calls wait for n exchanges.
func (e *Ends) Waiting(n int) {
	for {
		e.dir.mu.Lock()
		ok := len(e.dir.waiting) == n
		e.dir.mu.Unlock()
		if ok {
			return
		}
		runtime.Gosched()
	}
}
