package local

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/internal/memfd"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
	"github.com/stepaf/stepaf-go/van/links"
)

// acceptor answers the handshakes of peers that make a link to this node, and watches their links.
type acceptor struct {
	self     *endpoint
	peers    *peers
	in       *inCommon
	log      *slog.Logger
	listener *net.UnixListener
	refused  logx.Causes // log lines about refused peers

	// peers.Mu guards these.
	conns      map[*net.UnixConn]bool // of peers
	handshakes []*net.UnixConn        // the subset of conns whose handshake is not over, the oldest first
	crowded    logx.Sparse            // log lines about too many handshakes

	// For tests.
	streamOnly bool         // behave as if reading other processes were forbidden
	refuse     func() error // the error of accepting a connection
}

// run serves the socket until it is closed.
func (a *acceptor) run() {
	defer a.peers.WG.Done()
	var failed logx.Sparse
	pause := time.Duration(0)
	for {
		c, err := a.accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // for example, no descriptor is left; that may be temporary
			pause = min(max(2*pause, minPause), maxPause)
			if n, speak := failed.Next(); speak {
				a.log.Warn("no peer can be accepted through shared memory for now", "err", err, "next try in", pause, "so far", n)
			}
			select {
			case <-time.After(pause):
			case <-a.peers.Ctx.Done():
			}
			continue
		}
		pause = 0
		a.peers.Mu.Lock()
		if a.peers.Closed() {
			_ = c.Close()
		} else {
			a.conns[c] = true
			a.handshakeLocked(c)
			a.peers.WG.Go(func() { a.serve(c) })
		}
		a.peers.Mu.Unlock()
	}
}

// Pauses before accepting is retried, the same as in net/http.
const (
	minPause = 5 * time.Millisecond
	maxPause = time.Second
)

// maxHandshakes is the largest number of connections whose handshake is not over. A peer's
// handshake takes about a millisecond. Only a flood of newer connections can therefore end
// a peer's connection.
const maxHandshakes = 256

// handshakeLocked adds c to the handshakes, and ends the oldest one if there are more than
// maxHandshakes: any process of the user can open such connections. The caller holds peers.Mu.
func (a *acceptor) handshakeLocked(c *net.UnixConn) {
	a.handshakes = append(a.handshakes, c)
	if len(a.handshakes) <= maxHandshakes {
		return
	}
	_ = a.handshakes[0].Close()
	a.handshakes = slices.Delete(a.handshakes, 0, 1)
	if n, show := a.crowded.Next(); show {
		a.log.Warn("too many connections to the socket for shared memory have not said hello: the oldest is ended", "limit", maxHandshakes, "so far", n)
	}
}

func (a *acceptor) accept() (*net.UnixConn, error) {
	if a.refuse != nil {
		if err := a.refuse(); err != nil {
			return nil, err
		}
	}
	return a.listener.AcceptUnix()
}

// serve answers a peer's hello. It then watches the link until it ends.
func (a *acceptor) serve(c *net.UnixConn) {
	defer func() {
		_ = c.Close()
		a.peers.Mu.Lock()
		delete(a.conns, c)
		a.peers.Mu.Unlock()
	}()
	_ = c.SetDeadline(time.Now().Add(a.self.linkTime))
	r, err := a.admit(c)
	a.peers.Mu.Lock()
	a.handshakes = slices.DeleteFunc(a.handshakes, func(x *net.UnixConn) bool { return x == c })
	a.peers.Mu.Unlock()
	if err != nil {
		r = reply{verdict: verdictNo, why: auth.Explain(err)}
		if errors.Is(err, van.ErrReplaced) {
			r.verdict = verdictFenced
		}
		level := slog.LevelInfo
		if auth.IsUnproved(err) {
			level = slog.LevelWarn
		}
		a.refused.Log(a.log, logx.Kind(err)).Log(a.peers.Ctx, level, "a peer's link through shared memory was refused", "err", err)
	}
	l, b := r.link, r.encode()
	var fds []byte
	if err == nil {
		fds = unix.UnixRights(a.self.bell.fd)
	}
	_, _, sendErr := c.WriteMsgUnix(b, fds, nil)
	if err != nil {
		return
	}
	if sendErr == nil {
		_ = c.SetDeadline(time.Time{})
		if l.dev == nil || l.dev.imports == nil {
			awaitEnd(c)
		} else {
			var err error
			awaitEndOf(c, func() { err = l.dev.imports.watch() })
			if errors.Is(err, van.ErrMalformed) || errors.Is(err, unix.EMFILE) {
				l.fail(err)
			}
		}
	}
	a.peers.inLost(l)
}

// admit reads and checks a hello and makes the link.
func (a *acceptor) admit(c *net.UnixConn) (r reply, err error) {
	pid, err := sameUser(c)
	if err != nil {
		a.self.guard.Ended(err)
		return r, err
	}
	b, fds, err := a.provedHello(c, pid)
	defer closeAll(fds)
	if err != nil {
		a.self.guard.Ended(err)
		return r, err
	}
	le := binary.LittleEndian
	if len(b) != helloLen || string(b[:4]) != helloMagic || le.Uint32(b[4:]) != tokenVersion || len(fds) != 2 ||
		le.Uint32(b[32:]) != segmentLen || le.Uint32(b[36:]) != slotCount {
		return r, fmt.Errorf("%w: hello of %d bytes with %d files", errProtocol, len(b), len(fds))
	}
	id := int(int32(le.Uint32(b[8:])))
	if id <= 0 || id >= van.Empty {
		return r, fmt.Errorf("%w: node id %d", errProtocol, id)
	}
	if err := errors.Join(memfd.Check(fds[0], segmentLen), memfd.Check(fds[1], bellLen)); err != nil {
		return r, err
	}
	seg, err := mapSegment(fds[0])
	if err != nil {
		return r, err
	}
	bell, err := mapBell(fds[1])
	if err != nil {
		seg.unmap()
		return r, err
	}
	l := newInLink(a.in, a.peers.sender(id), c, pid, seg, bell)
	l.Process = links.Process(b[40:])
	if seg.behind().Load() != 0 {
		l.Marks.Await(links.Mark{Kind: markKind, Number: [8]byte(b[24:])}, func() { a.peers.marksLate(l) })
	}
	r = reply{link: l, verdict: verdictRead}
	if l.source, err = a.openSource(pid, le.Uint64(b[16:]), le.Uint64(b[24:])); err != nil {
		r.verdict, r.why = verdictStream, err.Error()
	}
	if has := le.Uint32(b[12:]); has&hasDevice != 0 {
		if l.dev, err = openPeerDevice(a.in, b[56:], l.Process[:]); err == nil {
			if d := a.self.device; has&hasSegments != 0 && d.mapsSegments() {
				l.dev.imports = newImports(d, c)
			}
		} else {
			r.noDevice = err.Error()
			a.log.Info("values on a peer's device come through host memory", "peer", van.NodeName(id), "why", err)
		}
	}
	if err := a.peers.addIn(l); err != nil {
		l.end()
		return r, err
	}
	return r, nil
}

// openSource opens process pid for reading its memory.
func (a *acceptor) openSource(pid int, addr, nonce uint64) (*remote, error) {
	if a.streamOnly {
		return nil, errors.New("reading the sender's memory is switched off")
	}
	r, err := openRemote(pid)
	if err != nil {
		return nil, err
	}
	if err := r.canRead(addr, nonce); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

// closeConns closes the connections of all peers, which ends their links.
func (a *acceptor) closeConns() {
	a.peers.Mu.Lock()
	defer a.peers.Mu.Unlock()
	for c := range a.conns {
		_ = c.Close()
	}
}
