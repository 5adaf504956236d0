package streams

// Deaf makes e hear nothing of its peers until the returned function is called.
func (e *Ends) Deaf() (hear func()) {
	e.mu.Lock()
	return e.mu.Unlock
}
