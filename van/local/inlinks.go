package local

// This file registers and removes links from peers, and reports a peer whose link broke.

import (
	"log/slog"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// addIn starts to receive from l. It refuses a link of a replaced process.
func (p *peers) addIn(l *inLink) error {
	p.Mu.Lock()
	err := p.EnterLocked(l)
	n := p.Of(l.From)
	same := p.IsOfLocked(l, n)
	p.Mu.Unlock()
	p.bell.wakeAll()
	if err == nil && same {
		p.Losses.Tell(&n.Peer, true, nil)
	}
	return err
}

// start begins to consume the records of l. p.Mu is held.
func (p *peers) start(l *inLink) {
	l.Held.Store(false)
	p.bell.wakeAll()
}

// arrived tells the sender of l that all marks have arrived. p.Mu is held, since a link is unmapped only after it was removed.
func (p *peers) arrived(l *inLink) {
	l.seg.behind().Store(0)
	p.bell.wakeAll()
}

// marksLate is called if marks of l have not arrived within links.MarkTime. They may wait for a handler to which the van inside has passed
// an earlier message; while it runs, l waits on. Otherwise the marks are lost, and l ends.
func (p *peers) marksLate(l *inLink) {
	if n := p.Of(l.From); n != nil && n.Data.inside.Load() > 0 {
		p.AwaitLonger(l)
		return
	}
	p.EndMarks(l, slog.LevelWarn)
}

// fence stops the use of l: none of its data is handed up or written any more. The receiver removes l. p.Mu is held.
func (p *peers) fence(l *inLink, _ bool) (unread bool) {
	l.placing.Lock() // waits for at most one copy
	l.fenced.Store(true)
	l.placing.Unlock()
	l.Held.Store(false) // the bound of waiting links does not count it any more
	_ = l.conn.Close()
	p.bell.wakeAll()
	return false
}

// inLost records that the connection of l has ended. The receiver removes l when its ring is
// empty.
func (p *peers) inLost(l *inLink) {
	l.lost.Store(true)
	p.bell.wakeAll()
}

// removeIn removes a link that has ended. The caller holds the feed.
func (p *peers) removeIn(l *inLink) {
	p.Mu.Lock()
	p.RemoveLocked(l)
	n := p.Of(l.From)
	same := p.IsOfLocked(l, n)
	again := slices.ContainsFunc(p.Ins(), func(x *inLink) bool { return x.from == l.from && x.Process == l.Process && !x.lost.Load() })
	p.Mu.Unlock()
	cause := errLinkBroke
	if err := l.failure.cause.Load(); err != nil {
		cause = *err
	}
	inOrder := l.seg.bye().Load() != 0 && !l.failed()
	l.end()
	if !inOrder && same {
		p.Losses.Tell(&n.Peer, false, cause)
		if again { // the peer returned before this link's ring was empty
			p.Losses.Tell(&n.Peer, true, nil)
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
	if !p.Go(func() {
		defer unix.Close(fd)
		select {
		case <-time.After(p.returnTime):
		case <-p.Ctx.Done():
			return
		}
		if !exited(uintptr(fd)) {
			p.Losses.Tell(&n.Peer, true, nil)
		}
	}) {
		_ = unix.Close(fd)
	}
}
