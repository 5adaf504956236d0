package streams

// Streams of the library, in which exchanges receive beside the caller's work.

import (
	"sync"

	"github.com/stepaf/stepaf-go/van/backend"
)

// aheadStreams is the number of these streams. CUDA executes the streams of a process in 8 queues, unless CUDA_DEVICE_MAX_CONNECTIONS says
// otherwise, and a waiting stream occupies one of them. The other queues are for what the waiting streams need in order to continue.
const aheadStreams = 3

// aheadStream is one of them.
type aheadStream struct {
	stream uintptr
	before uintptr // the stream that waits for what was queued here
	taken  bool
}

// aheads are those of a node. All methods are safe for concurrent use.
type aheads struct {
	mu  sync.Mutex // guards taken and before
	all []*aheadStream
}

// open makes the streams.
func (p *aheads) open(d backend.StreamDevice) error {
	for range aheadStreams {
		s, err := d.NewStream()
		if err != nil {
			return err
		}
		p.all = append(p.all, &aheadStream{stream: s})
	}
	return nil
}

// take returns a stream whose work is done, or comes before what is queued on s from now on, so that a receive waits for no other one.
// It returns nil if there is none.
func (p *aheads) take(d backend.StreamDevice, s uintptr) *aheadStream {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range p.all {
		if a.taken {
			continue
		}
		idle := a.before == s
		if !idle {
			idle, _ = d.Idle(a.stream) // after an error the caller's next call returns it
		}
		if idle {
			a.taken = true
			return a
		}
	}
	return nil
}

// put gives a stream back; stream s waits for its work.
func (p *aheads) put(a *aheadStream, s uintptr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a.taken, a.before = false, s
}
