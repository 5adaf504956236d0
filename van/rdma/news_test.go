package rdma

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// A connection that breaks while the failure of one message is being told is not told to
// stand.
func TestFailureOfMessageAsConnectionBreaks(t *testing.T) {
	r := newRig(t)
	w, s := r.make(9), r.node(8)
	var armed atomic.Bool
	var once sync.Once
	again, left, ups := make(chan struct{}, 1), make(chan struct{}), atomic.Int32{}
	w.WatchPeers(func(id int, up bool, cause error) {
		now := armed.Load()
		w.told <- change{id, up, cause}
		switch {
		case !now:
		case up:
			ups.Add(1)
		default:
			first := false
			once.Do(func() { first = true })
			if !first {
				select {
				case again <- struct{}{}:
				default:
				}
				return
			}
			defer close(left)
			// The failure of the message. Now the connection breaks, and cannot be made again.
			r.net.RejectNext(1<<30, 8)
			p := (*w.peers.Load())[s.who.ID]
			p.mu.Lock()
			l := p.link
			p.mu.Unlock()
			l.fail(van.ErrPeerLost)
			r.until("the connection is gone", func() bool {
				p.mu.Lock()
				defer p.mu.Unlock()
				return p.link != l
			})
			select { // told by who has noticed it, if that does not wait for this
			case <-again:
			case <-time.After(100 * time.Millisecond):
			}
		}
	})
	w.listenOn(0)
	w.Start(func(m *van.Message) { w.in <- m.Retain() })
	r.link(w, s)
	w.must(push(s, 1, 1, value(5000, 1)))
	s.wantValue(1, value(5000, 1))
	armed.Store(true)
	w.stack.Limit(w.stack.Registered())
	w.must(push(s, 2, 2, value(100<<10, 2)))
	w.wantDown(s, "value of 102400 bytes")
	<-left
	for range 3 { // attempts, each later than the one before
		w.wantDown(s, "nobody listens")
	}
	if n := ups.Load(); n > 0 {
		t.Errorf("the peer was told to be up %d times, without a connection", n)
	}
	w.stack.Limit(1 << 40)
	r.net.RejectNext(0, 0)
	w.wantUp(s)
}
