package tcp

import (
	"context"
	"errors"
	"time"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/links"
)

// dialer makes the connections of a node to its peers.
type dialer struct {
	n       *common
	peers   *peers
	unwatch func(fd int) // makes the source leave a connection alone

	dialTime time.Duration // the constant, except in tests
}

// hopeless reports whether a connection that failed with err will never be made.
func hopeless(err error) bool {
	return errors.Is(err, errRefused) || auth.IsUnproved(err) || errors.Is(err, van.ErrClosed)
}

// failed logs that the first connection to n cannot be made, and returns n's next state.
func (d *dialer) failed(n *peer, err error) links.State {
	if errors.Is(err, errTLS) {
		d.n.log.Error("a peer gets no data of this process", "peer", n.Name(), "addr", n.Data, "err", err)
		return links.Refused
	}
	return d.peers.O.Retry.First(d.n.log, n.ID(), err, "addr", n.Data)
}

// keep waits until the connection to n breaks, and makes the next one. If n takes none, n's state is Refused.
func (d *dialer) keep(n *peer) {
	p, c := d.peers, n.Link()
	_, limit := d.n.cfg.Heartbeats()
	c.watch(context.Background(), limit) // until the connection is closed, also while Close waits for its messages
	if !p.Current(n) {
		return
	}
	p.Broke(n, c.why())
	afterMarks := c.mayWait()
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		select {
		case <-time.After(pause):
		case <-p.Ctx.Done():
			return
		}
		err := p.Make(n, true, afterMarks)
		switch {
		case err == nil:
			p.Losses.Tell(&n.Peer, true, nil)
			return
		case !p.Current(n):
			return
		case errors.Is(err, errRefused):
			p.Set(n, links.Refused, err)
			d.n.log.Error("a peer takes no data of this process any more", "peer", n.Name(), "addr", n.Data, "err", err)
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

// dial makes a connection to n. If again is set, an earlier connection to n has broken. If afterMarks is set, earlier messages went over
// the van inside.
func (d *dialer) dial(n *peer, again, afterMarks bool) (*outConn, links.Mark, error) {
	ctx, cancel := context.WithTimeout(d.peers.Ctx, d.n.within(d.dialTime))
	defer cancel()
	to := callee{addr: n.Data, incarnation: n.Incarnation(), name: n.Name(), again: again, afterMarks: afterMarks}
	nc, err := d.n.meet(ctx, &to)
	if err != nil {
		return nil, links.Mark{}, err
	}
	defer nc.Close()
	fd, err := socketOf(nc)
	if err != nil {
		return nil, links.Mark{}, err
	}
	if err := d.n.tune(fd); err != nil {
		d.n.log.Debug("options of a connection for data", "err", err)
	}
	c := newOutConn(d.n, &n.Peer, fd, d.unwatch)
	c.tls = detach(nc, fd, true)
	c.afterMarks, c.made = afterMarks, time.Now()
	return c, markOf(to.number), nil
}
