package cluster

// This file owns the limits of requests that no Wait waits for. A customer has one timer for all of them.

import (
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
)

// minExpiry is the shortest time between two checks of a request that a Wait waits for.
const minExpiry = 10 * time.Millisecond

// timeOut ends r with van.ErrTimeout, unless r has been used again since it had the number gen, or a Wait waits for it.
func (r *Request) timeOut(gen uint64) {
	r.mu.Lock()
	if r.gen != gen || r.waiting {
		r.mu.Unlock()
		return
	}
	r.cancelLocked(van.ErrTimeout, r.limit)
}

// expire sets the limit of r, see Request.Expire. mu and r.mu are held.
func (q *requests) expire(r *Request, limit time.Duration) {
	if r.state != open || r.limit != 0 || q.closed {
		return
	}
	r.limit = limit
	q.endAt(r.start + uint64(limit))
}

// endAt makes endExpired run at the given time, or earlier. mu is held.
func (q *requests) endAt(at uint64) {
	if q.endsAt != 0 && q.endsAt <= at {
		return
	}
	q.endsAt = at
	left := time.Duration(max(int64(at-clock.Now()), 0))
	if q.expiry == nil {
		q.expiry = time.AfterFunc(left, q.endExpired)
	} else {
		q.expiry.Reset(left)
	}
}

// endExpired ends the requests whose limit has passed.
func (q *requests) endExpired() {
	type use struct {
		r   *Request
		gen uint64
	}
	var expired []use
	q.mu.Lock()
	now := clock.Now()
	q.endsAt = 0
	for r := range q.live {
		r.mu.Lock()
		if at := r.start + uint64(r.limit); r.limit > 0 && r.state == open {
			switch {
			case at > now:
				q.endAt(at)
			case r.waiting: // perhaps only for a while, see WaitSlice
				q.endAt(now + uint64(max(r.limit, minExpiry)))
			default:
				expired = append(expired, use{r, r.gen})
			}
		}
		r.mu.Unlock()
	}
	q.mu.Unlock()
	for _, x := range expired {
		x.r.timeOut(x.gen)
	}
}

// stopExpiry stops the timer of endExpired.
func (q *requests) stopExpiry() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.expiry != nil {
		q.expiry.Stop()
		q.endsAt = 0
	}
}
