package local

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/links"
)

// dialer makes links to peers, and replaces broken ones.
type dialer struct {
	self  *endpoint
	peers *peers
	out   *outCommon
	log   *slog.Logger
	over  func() string // the usual path of the van inside

	readersOnce sync.Once
	readers     func() (bool, error) // admitReaders, except in tests
}

// link makes a link to n. again means that an earlier link to n has broken, and behind that data to n was sent over the van inside before.
func (d *dialer) link(n *outPeer, again, behind bool) (l *outLink, _ links.Mark, err error) {
	d.readersOnce.Do(d.letRead)
	if again {
		l, err = d.dialAgain(n, behind)
	} else {
		l, err = d.dial(d.peers.Ctx, n, behind)
	}
	if err != nil {
		return nil, links.Mark{}, err
	}
	return l, links.Mark{Kind: markKind, Number: l.number}, nil
}

// failed logs that the first link to n cannot be made, and returns n's next state.
func (d *dialer) failed(n *outPeer, err error) links.State {
	return d.peers.O.Retry.First(d.log, n.ID(), err)
}

// hopeless reports whether a link that failed with err will never be made.
func hopeless(err error) bool {
	return errors.Is(err, errProtocol) || auth.IsUnproved(err) || errors.Is(err, van.ErrReplaced) || errors.Is(err, van.ErrClosed)
}

// letRead permits peers to read memory that this process has pinned for them. If Yama requires a permission, it
// extends to all processes of the user. It is therefore given only when the first peer shares memory.
func (d *dialer) letRead() {
	if admitted, err := d.readers(); err != nil {
		d.log.Warn("peers may have to copy large values twice", "err", err)
	} else if admitted {
		d.log.Info("processes of the same user may read this one's memory", "why", yamaScope+" is 1")
	}
}

// dial makes the link to n. behind means that earlier data to n was sent over the van inside.
func (d *dialer) dial(ctx context.Context, n *outPeer, behind bool) (*outLink, error) {
	ctx, cancel := context.WithTimeout(ctx, d.self.linkTime)
	defer cancel()
	guard := &d.self.guard
	l, err := d.handshake(ctx, n, behind, guard.Keys != nil)
	if guard.Keys == nil || !errors.Is(err, auth.ErrNoSecret) {
		return l, err
	}
	if err := guard.Unauthenticated(err, "peer", n.Name()); err != nil {
		return nil, err
	}
	return d.handshake(ctx, n, behind, false)
}

// handshake makes one attempt of dial. If proves is true, both ends must prove that they
// know the secret.
func (d *dialer) handshake(ctx context.Context, n *outPeer, behind, proves bool) (l *outLink, err error) {
	var nd net.Dialer
	c, err := nd.DialContext(ctx, "unixpacket", n.Data.address())
	if err != nil {
		if errors.Is(err, unix.ECONNREFUSED) {
			err = fmt.Errorf("%w: %w", errDead, err)
		}
		return nil, err
	}
	conn := c.(*net.UnixConn)
	pid := 0
	defer func() {
		if err != nil {
			_ = conn.Close()
			if pid > 0 && ended(pid) { // a child process has inherited the socket
				err = fmt.Errorf("%w: %w", errDead, err)
			}
		}
	}()
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline)
	}
	if pid, err = sameUser(conn); err != nil {
		return nil, err
	}
	var proofs *proofs
	if proves {
		if proofs, err = d.self.greet(conn, n.ID(), n.Data.name); err != nil {
			return nil, err
		}
	}
	file, err := newRingFile(d.out.memory)
	if err != nil {
		return nil, err
	}
	seg, err := mapSegment(file.fd)
	if err != nil {
		file.close()
		return nil, err
	}
	defer func() {
		if err != nil {
			file.close()
			seg.bye().Store(1) // if the peer reads the hello later, it does not report a loss
			seg.unmap()
		}
	}()
	if behind {
		seg.behind().Store(1)
	}
	nonce := new([8]byte) // the peer reads it
	var keep runtime.Pinner
	keep.Pin(nonce)
	defer keep.Unpin()
	if err := d.self.hello(conn, file.fd, nonce, proofs); err != nil {
		return nil, err
	}
	if l, err = d.finish(conn, n, seg, file); err == nil {
		l.number = *nonce
	}
	return l, err
}

// finish reads the peer's reply and makes the link.
func (d *dialer) finish(conn *net.UnixConn, peer *outPeer, seg *segment, file *ringFile) (*outLink, error) {
	text, fds, err := receive(conn, replyHead+2*maxWhy)
	defer closeAll(fds)
	if err != nil {
		return nil, err
	}
	if len(text) < replyHead || string(text[:4]) != replyMagic {
		return nil, fmt.Errorf("%w: reply of %d bytes", errProtocol, len(text))
	}
	own := d.self.device
	verdict, device, n := text[4], text[5]&hasDevice != 0 && own != nil, int(binary.LittleEndian.Uint16(text[6:]))
	n = min(n, len(text)-replyHead)
	why, noDevice := string(text[replyHead:replyHead+n]), string(text[replyHead+n:])
	if verdict == verdictFenced {
		return nil, fmt.Errorf("%w: %w", errRefused, van.ErrReplaced)
	}
	if verdict == verdictNo {
		return nil, fmt.Errorf("%w: %s", errRefused, why)
	}
	if verdict > verdictRead || len(fds) != 1 {
		return nil, fmt.Errorf("%w: verdict %d with %d files", errProtocol, verdict, len(fds))
	}
	if err := memfd.Check(fds[0], bellLen); err != nil {
		return nil, fmt.Errorf("bell: %w", err)
	}
	bell, err := mapBell(fds[0])
	if err != nil {
		return nil, err
	}
	if text[5]&knowsPads == 0 && !file.grow(segmentLen, peer.ID()) { // the peer expects the whole ring
		bell.unmap()
		return nil, fmt.Errorf("%w: the peer's version needs %d bytes", errNoBudget, segmentLen)
	}
	if seg.behind().Load() != 0 && text[5]&knowsMarks == 0 {
		bell.unmap()
		return nil, fmt.Errorf("%w: the peer's version knows no link that follows other data", errProtocol)
	}
	_ = conn.SetDeadline(time.Time{})
	how := "ring, and the sender's memory"
	if verdict != verdictRead {
		how = "ring only: " + why
	}
	args := []any{"peer", peer.Name(), "large values", how}
	switch {
	case device:
		args = append(args, "values on the device", "from device to device")
	case own != nil:
		args = append(args, "values on the device", "through host memory: "+noDevice)
	}
	d.log.Info("data goes through shared memory", args...)
	l := newOutLink(d.out, peer, conn, seg, file, bell, verdict == verdictRead, device)
	l.exported.pulls = d.peers.O.Inner.Type() != "ibverbs"
	l.exported.on = verdict == verdictRead && text[5]&mapsMemory != 0
	if device {
		l.offers.sharer = own.sharer
		l.segments = own.sharer != nil && text[5]&hasSegments != 0
	}
	return l, nil
}

// dialAgain is dial for a peer that may be ending. The socket of such a process accepts connections for
// a moment longer but does not answer. An accepted connection is therefore no sign of life.
func (d *dialer) dialAgain(n *outPeer, behind bool) (l *outLink, err error) {
	ctx, cancel := context.WithTimeout(d.peers.Ctx, d.self.linkTime)
	defer cancel()
	for pause := time.Millisecond; ; pause *= 2 {
		l, err = d.dial(ctx, n, behind)
		if err == nil || !hungUp(err) {
			return l, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// keep waits until the link to n has ended. If this node did not end it, keep reports the peer as lost and makes a new link. If it
// cannot, data to n goes over the van inside, or nowhere if another process has n's id.
func (d *dialer) keep(n *outPeer) {
	p, l := d.peers, n.Link()
	awaitEnd(l.conn)
	behind := awaitsMarks(l) // then the next link needs marks, too: the van inside may not have delivered the earlier data yet
	l.close(false)
	if !p.Current(n) {
		return
	}
	p.Broke(n, l.why()) // until the outcome is known, Send finds the ended link and returns ErrPeerLost
	var err error
	if n.Data.tries++; n.Data.tries <= maxTries {
		if err = p.Make(n, true, behind); err == nil {
			p.Losses.Tell(&n.Peer, true, nil)
			return
		}
	} else if again, e := d.dialAgain(n, false); e == nil {
		again.close(true) // the link only tested whether the peer is alive
	} else {
		err = e
	}
	if !p.Current(n) {
		return
	}
	if errors.Is(err, van.ErrReplaced) { // data must not go over the van inside either
		p.Set(n, links.Refused, van.ErrReplaced)
		d.log.Error("a peer does not hear this process any more", "peer", n.Name(), "why", err)
		return
	}
	// If the peer has ended, the van inside reports its return.
	gone, next := errors.Is(err, errDead), links.Unlinked
	args := []any{"peer", n.Name(), "links lost", n.Data.tries, "err", err}
	switch {
	case !gone && err != nil && !hopeless(err):
		next = links.Fallback
		d.log.Warn("data goes over "+d.over()+" from now on", append(args, "next try in", p.O.Retry.Pause)...)
	case !gone:
		d.log.Warn("data goes over "+d.over()+" from now on, for as long as both processes run", args...)
	}
	p.Set(n, next, cmp.Or(err, errLinkBroke))
	if !gone {
		p.Losses.Tell(&n.Peer, true, nil)
	}
}

// maxTries is how often a broken link to the same peer is replaced.
const maxTries = 3
