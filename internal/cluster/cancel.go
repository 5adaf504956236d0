package cluster

// A cancellation of requests, and when a server forgets it.

import (
	"slices"
	"time"
)

// Canceled reports that a worker no longer waits for the answers to consecutive timestamps: it has canceled the
// request, or could not send all of it.
type Canceled struct {
	Sender   int   // node id of the worker's instance
	Customer int32 // its customer id
	First    int32 // timestamp
	Count    int32
}

// Has reports whether timestamp ts of that customer is among the canceled ones.
func (w *Canceled) Has(customer, ts int32) bool {
	return customer == w.Customer && ts >= w.First && ts-w.First < w.Count
}

// Limits of the time for which a cancellation is remembered, since messages of the request may still be in flight or
// wait for a slow handler, and of the number for each sender.
const (
	cancelMemory     = 5 * time.Minute
	maxCancellations = 1024
)

type cancellation struct {
	Canceled
	epoch uint32
	at    uint64
}

// expire removes old cancellations, and the oldest ones above the limit most. s.mu is held.
func (s *inboundSender) expire(now uint64, most int) {
	old := max(len(s.cancellations)-most, 0)
	for old < len(s.cancellations) && time.Duration(now-s.cancellations[old].at) > cancelMemory {
		old++
	}
	if old == 0 {
		return
	}
	if s.cancellations = slices.Delete(s.cancellations, 0, old); len(s.cancellations) == 0 {
		s.cancellations = nil
	}
	s.canceled.Store(int32(len(s.cancellations)))
}
