package tcp

import (
	"context"
	"errors"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van"
)

// dialer makes the connections of a node to its peers.
type dialer struct {
	n       *common
	peers   *peers
	events  *events
	over    string                         // name of the van inside
	watch   func(fd int, c *outConn) error // makes the source watch c
	unwatch func(fd int)
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

// connect makes the connection to n, and makes it again when it breaks.
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
	_, limit := d.n.cfg.Heartbeats()
	for first, pause := true, firstPause; ; {
		c, err := d.dial(n, !first)
		switch {
		case err == nil:
			pause = firstPause
			if !first {
				d.events.tell(n, true, nil)
			}
			settle()
			c.watch(p.ctx, limit)
			if p.ctx.Err() != nil || !d.peers.current(n) || n.conn.Load() != c {
				return
			}
			d.events.tell(n, false, c.why())
		case p.ctx.Err() != nil || !d.peers.current(n):
			return
		case first && errors.Is(err, errTLS):
			n.refused = err
			d.n.log.Error("a peer gets no data of this process", "peer", n.name(), "addr", n.addr, "err", err)
			return
		case first:
			n.over.Store(true)
			d.n.log.Warn("data goes over "+d.over+", not over tcp, for as long as both processes run", "peer", n.name(), "addr", n.addr, "err", err)
			return
		case errors.Is(err, errRefused):
			d.n.log.Error("a peer takes no data of this process any more", "peer", n.name(), "addr", n.addr, "err", err)
			return
		}
		first = false
		select {
		case <-time.After(pause):
			pause = min(2*pause, lastPause)
		case <-p.ctx.Done():
			return
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

// dial makes a connection to n and installs it. again means that an earlier connection to n broke.
func (d *dialer) dial(n *peer, again bool) (*outConn, error) {
	ctx, cancel := context.WithTimeout(d.peers.ctx, d.n.within(dialTime))
	defer cancel()
	nc, err := d.n.meet(ctx, &callee{n.addr, n.incarnation, n.name(), again})
	if err != nil {
		return nil, err
	}
	defer nc.Close()
	fd, err := socketOf(nc)
	if err != nil {
		return nil, err
	}
	if err := d.n.tune(fd); err != nil {
		d.n.log.Debug("options of a connection for data", "err", err)
	}
	p := d.peers
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.of(int(n.id.Load())) != n {
		_ = unix.Close(fd)
		return nil, van.ErrClosed
	}
	c := newOutConn(d.n, int(n.id.Load()), fd, d.unwatch)
	c.tls = detach(nc, fd, true)
	if err := d.watch(fd, c); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	if class := d.n.classOf(int(n.id.Load())); class != 0 {
		c.setClass(class)
	}
	n.conn.Store(c)
	return c, nil
}
