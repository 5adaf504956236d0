package local

// This file registers and removes links from peers, and reports a peer whose link broke.

import (
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
)

// addIn starts to receive from l. It refuses a link of a replaced process.
func (p *peers) addIn(l *inLink) error {
	p.mu.Lock()
	if p.closed || slices.Contains(p.replaced, l.name) {
		defer p.mu.Unlock()
		if p.closed {
			return van.ErrClosed
		}
		return fmt.Errorf("%s: %w", van.NodeName(l.from.id), van.ErrReplaced)
	}
	ins := append(slices.Clone(*p.ins.Load()), l)
	p.ins.Store(&ins)
	same, n := p.isOf(l), p.of(l.from.id)
	switch {
	case n != nil && !same:
		p.hold(l, p.unknownTime)
	case n == nil || !n.admitted:
		p.hold(l, p.holdTime)
	}
	p.bell.wakeAll()
	p.mu.Unlock()
	if same {
		p.tell(n, l.from.id, true, nil)
	}
	return nil
}

// inLost records that the connection of l has ended. The receiver removes l when its ring is
// empty.
func (p *peers) inLost(l *inLink) {
	l.lost.Store(true)
	p.bell.wakeAll()
}

// removeIn removes a link that has ended. The caller holds the feed.
func (p *peers) removeIn(l *inLink) {
	p.mu.Lock()
	ins := slices.DeleteFunc(slices.Clone(*p.ins.Load()), func(x *inLink) bool { return x == l })
	p.ins.Store(&ins)
	same, n := p.isOf(l), p.of(l.from.id)
	again := slices.ContainsFunc(ins, func(x *inLink) bool { return x.from == l.from && x.name == l.name && !x.lost.Load() })
	p.mu.Unlock()
	cause := errLinkBroke
	if err := l.failure.cause.Load(); err != nil {
		cause = *err
	}
	inOrder := l.seg.bye().Load() != 0 && !l.failed()
	l.end()
	if !inOrder && same {
		p.tell(n, l.from.id, false, cause)
		if again { // the peer returned before this link's ring was empty
			p.tell(n, l.from.id, true, nil)
		} else {
			p.awaitReturn(n, l)
		}
	}
}

// returnTime is how long a peer may take to replace a broken link.
const returnTime = linkTime

// awaitReturn reports the return of n if its process outlives l by returnTime. Without another link, such a process sends
// over the van inside.
func (p *peers) awaitReturn(n *outPeer, l *inLink) {
	fd, err := unix.PidfdOpen(l.pid, 0)
	if err != nil {
		return // it has ended
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		_ = unix.Close(fd)
		return
	}
	p.wg.Go(func() {
		defer unix.Close(fd)
		select {
		case <-time.After(p.returnTime):
		case <-p.ctx.Done():
			return
		}
		if !exited(uintptr(fd)) {
			p.tell(n, l.from.id, true, nil)
		}
	})
}
