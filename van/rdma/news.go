package rdma

import (
	"errors"
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/internal/clock"
	"github.com/stepaf/stepaf-go/van"
)

// half is what is left when a peer's connection to this node has ended.
type half struct {
	cause error
	since uint64
	told  bool // that the peer is lost
}

// tell reports a change of p's connection to the watcher.
func (v *rvan) tell(p *peer, up bool, cause error) {
	if v.watch != nil && !v.closed.Load() && (*v.peers.Load())[int(p.id.Load())] == p {
		v.watch(int(p.id.Load()), up, cause)
	}
}

// tellFailure makes the requests fail that wait for p, while its connection l stands. The
// end of l makes them fail, too.
func (v *rvan) tellFailure(p *peer, l *link, err error) {
	v.log.Error("rdma: a message could not be sent", "peer", p.name(), "err", err)
	p.news.Lock()
	defer p.news.Unlock()
	if !p.has(l) {
		return
	}
	v.tell(p, false, asLost(err))
	p.mu.Lock()
	stands := p.link == l && (p.half == nil || !p.half.told) // its end is told after this
	p.mu.Unlock()
	if stands {
		v.tell(p, true, nil)
	}
}

// asLost wraps err in van.ErrPeerLost, once.
func asLost(err error) error {
	if errors.Is(err, van.ErrPeerLost) {
		return err
	}
	return fmt.Errorf("%w: %w", van.ErrPeerLost, err)
}

// has tells whether l is p's connection.
func (p *peer) has(l *link) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.link == l
}

// halfTime is how long a peer may be without its own connection to this node. One that
// leaves is without it for as long as its last messages to others take.
const halfTime = maxLinger + time.Second

// current is p's connection, or nil. p may be nil.
func (p *peer) current() *link {
	if p == nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.link
}

// halve notes that the peer's own connection to this node has ended, while l was this
// node's to it: the answers on it are lost.
func (p *peer) halve(l *link, cause error) {
	p.mu.Lock()
	if p.link == l && p.half == nil {
		p.half = &half{cause: cause, since: clock.Now()}
	}
	p.mu.Unlock()
	p.v.tellHalf(p)
}

// tellHalf makes the requests fail whose answers are lost. It does so when the peer has
// connected again, as one that leaves does not, or after halfTime.
func (v *rvan) tellHalf(p *peer) {
	p.news.Lock()
	defer p.news.Unlock()
	p.mu.Lock()
	l, h := p.link, p.half
	if h == nil {
		p.mu.Unlock()
		return
	}
	back := p.back.Load()
	again := back != nil && !back.gone.Load() && (back.stands.Load() || !back.hello.ours)
	down := !h.told && (again || clock.Now()-h.since > uint64(halfTime))
	h.told = h.told || down
	if again {
		p.half = nil
	}
	p.mu.Unlock()
	if down {
		v.tell(p, false, fmt.Errorf("its connection to this node ended, answers on it are lost: %w", asLost(h.cause)))
	}
	if again && p.has(l) {
		v.tell(p, true, nil)
	}
}
