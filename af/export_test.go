package af

import (
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
)

// Early is how many messages wait for those before them, by the server's count.
func (s *Server) Early() int { return early(s) }

func early(s *Server) (n int) {
	for _, x := range s.senders {
		n += int(x.pendingCount.Load())
	}
	return n
}

// OpenBatches are the batches that a worker has begun and not ended, and their bytes.
func OpenBatches(s *Server, worker int) (n, bytes int) {
	x := s.sender(worker)
	x.mu.Lock()
	defer x.mu.Unlock()
	return len(x.open), x.openBytes
}

// Held are the messages that arrived before the beginnings of their batches, as counted for all workers, and their
// bytes of one worker.
func Held(s *Server, worker int) (n, bytes int) {
	x := s.sender(worker)
	x.mu.Lock()
	defer x.mu.Unlock()
	return early(s), x.pendingBytes
}

// Customer is the worker's end at its node.
func (w *Worker) Customer() *cluster.Customer { return w.calls.customer }

// RoundLimit is the limit of the rounds that streams start from now on.
func (x *Prepared) RoundLimit() time.Duration { return time.Duration(x.byStream.Load().limit.Load()) }

// Servers is the number of the worker's servers.
func (w *Worker) Servers() int { return len(w.calls.servers) }

// Late reports whether batches wait for the device.
func (s *Server) Late() bool { return s.late.Busy() }
