package tcp

import (
	"context"
	"errors"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/failback"
)

// dialer makes the connections of a node to its peers.
type dialer struct {
	n       *common
	peers   *peers
	inner   van.Van
	later   failback.Retry
	watch   func(fd int, c *outConn) error // makes the source watch c
	unwatch func(fd int)

	dialTime time.Duration // the constant, except in tests
}

// await waits until it is settled whether there is a connection to n, and starts to make one. It returns nil if data goes
// over the van inside, or the van closes.
func (d *dialer) await(n *peer) *outConn {
	p := d.peers
	p.mu.Lock()
	if !n.begun && !p.closed && p.of(int(n.id.Load())) == n {
		n.begun = true
		p.wg.Go(func() { d.connect(n) })
	}
	begun := n.begun
	p.mu.Unlock()
	if !begun {
		return nil
	}
	select {
	case <-n.settled:
	case <-p.ctx.Done():
	}
	return n.conn.Load()
}

// connect makes the connection to n, and makes it again when it breaks. If the first attempt fails, data goes over the van inside until a
// later one succeeds.
func (d *dialer) connect(n *peer) {
	p := d.peers
	p.mu.Lock()
	before := p.draining[n.incarnation]
	p.mu.Unlock()
	if before != nil {
		<-before // messages sent before must arrive first
	}
	settle := sync.OnceFunc(func() { close(n.settled) })
	defer settle()
	c, err := d.dial(n, false, false)
	switch {
	case err == nil:
	case p.ctx.Err() != nil || !p.current(n):
		return
	case errors.Is(err, errTLS):
		p.failed(n, err)
		d.n.log.Error("a peer gets no data of this process", "peer", n.name(), "addr", n.addr, "err", err)
		return
	default:
		n.over.Store(true) // before the reason: see PathTo
		p.failed(n, err)
		if !d.later.First(int(n.id.Load()), err, "addr", n.addr) {
			return
		}
		settle()
		known := func() (int, bool) { return int(n.id.Load()), p.current(n) }
		if !d.later.Run(p.ctx, known, func(int) error {
			if c, err = d.dial(n, false, true); err != nil {
				p.failed(n, err)
			}
			return err
		}) {
			return
		}
	}
	settle()
	for c != nil {
		c = d.keep(n, c)
	}
}

// keep waits until c, the connection to n, breaks, and makes the next one. It returns nil if n gets no other one.
func (d *dialer) keep(n *peer, c *outConn) *outConn {
	p := d.peers
	_, limit := d.n.cfg.Heartbeats()
	c.watch(p.ctx, limit)
	if p.ctx.Err() != nil || !p.current(n) || n.conn.Load() != c {
		return nil
	}
	p.losses.Tell(n, false, c.why())
	afterMarks := c.mayWait()
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		select {
		case <-time.After(pause):
		case <-p.ctx.Done():
			return nil
		}
		next, err := d.dial(n, true, afterMarks)
		switch {
		case err == nil:
			p.losses.Tell(n, true, nil)
			return next
		case p.ctx.Err() != nil || !p.current(n):
			return nil
		case errors.Is(err, errRefused):
			p.failed(n, err)
			n.over.Store(false) // before conn: a Send that finds no connection must not use the van inside
			n.conn.CompareAndSwap(c, nil)
			d.n.log.Error("a peer takes no data of this process any more", "peer", n.name(), "addr", n.addr, "err", err)
			return nil
		}
	}
}

// Pauses before a broken connection is made again.
const (
	firstPause = time.Millisecond
	lastPause  = time.Second
)

// dialTime is how long one attempt to make a connection may take, without TLS.
const dialTime = 2 * time.Second

// dial makes a connection to n and installs it. If again is set, an earlier connection to n has broken. If afterMarks is set, earlier
// messages went over the van inside, and marks are sent there before the connection is installed.
func (d *dialer) dial(n *peer, again, afterMarks bool) (c *outConn, err error) {
	ctx, cancel := context.WithTimeout(d.peers.ctx, d.n.within(d.dialTime))
	defer cancel()
	to := callee{addr: n.addr, incarnation: n.incarnation, name: n.name(), again: again, afterMarks: afterMarks}
	nc, err := d.n.meet(ctx, &to)
	if err != nil {
		return nil, err
	}
	defer nc.Close()
	fd, err := socketOf(nc)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = unix.Close(fd)
		}
	}()
	if err := d.n.tune(fd); err != nil {
		d.n.log.Debug("options of a connection for data", "err", err)
	}
	p := d.peers
	p.mu.Lock()
	losses := n.insideLosses
	p.mu.Unlock()
	install := func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		id := int(n.id.Load())
		if p.closed || p.of(id) != n {
			return van.ErrClosed
		}
		if afterMarks && n.insideLosses != losses {
			return errMarksLost
		}
		c = newOutConn(d.n, id, fd, d.unwatch)
		c.tls = detach(nc, fd, true)
		c.afterMarks, c.made = afterMarks, time.Now()
		if err := d.watch(fd, c); err != nil {
			return err
		}
		if class := d.n.classOf(id); class != 0 {
			c.setClass(class)
		}
		n.conn.Store(c)
		return nil
	}
	if afterMarks {
		err = failback.Change(&n.inside, d.inner, int(n.id.Load()), markOf(to.number), install)
	} else {
		err = install()
	}
	if err != nil {
		return nil, err
	}
	return c, nil
}
