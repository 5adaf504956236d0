package af

// Early is how many messages wait for those before them, by the server's count.
func (s *TensorServer) Early() int { return int(s.early.Load()) }

// OpenBatches are the batches that a worker has begun and not ended, and their bytes.
func OpenBatches(s *TensorServer, worker int) (n, bytes int) {
	x := s.sender(worker)
	x.mu.Lock()
	defer x.mu.Unlock()
	return len(x.open), x.openBytes
}

// Held are the messages that came before those that they follow, as counted for all
// workers, and their bytes of one worker.
func Held(s *TensorServer, worker int) (n, bytes int) {
	x := s.sender(worker)
	x.mu.Lock()
	defer x.mu.Unlock()
	return int(s.early.Load()), x.heldBytes
}
