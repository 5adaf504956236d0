package tcp

import (
	"container/list"
	"context"
	"errors"
	"net"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/freeport"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
)

const (
	// handshakeTime is how long the dialer may take for the handshake, without TLS.
	handshakeTime = 5 * time.Second
	// maxHandshakes bounds the handshakes under way. If there are more, the oldest one ends: a member needs a millisecond.
	maxHandshakes = 512
)

// acceptor accepts connections.
type acceptor struct {
	n        *common
	peers    *peers
	listener net.Listener
	wg       sync.WaitGroup

	mu     sync.Mutex
	conns  list.List // of net.Conn: handshakes under way, the oldest first
	closed bool
}

// listen listens at host, at any port but the scheduler's.
func (a *acceptor) listen(host string, avoid int) (int, error) {
	return freeport.Except(avoid, func() (int, func(), error) {
		var lc net.ListenConfig
		lc.SetMultipathTCP(false) // connections have one path
		l, err := lc.Listen(context.Background(), "tcp", net.JoinHostPort(host, strconv.Itoa(0)))
		if err != nil {
			return 0, nil, err
		}
		a.listener = l
		return l.Addr().(*net.TCPAddr).Port, func() { _ = l.Close() }, nil
	})
}

func (a *acceptor) run() {
	defer a.wg.Done()
	for {
		c, err := a.listener.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil: // no descriptor is left, for example
			a.n.rarely(logx.Kind(err)).Error("a connection for data could not be accepted", "err", err)
			select {
			case <-time.After(100 * time.Millisecond):
			case <-a.peers.Ctx.Done():
				return
			}
			continue
		}
		e := a.enter(c)
		if e == nil {
			_ = c.Close()
			return
		}
		a.wg.Go(func() {
			a.serve(c)
			a.mu.Lock()
			defer a.mu.Unlock()
			a.conns.Remove(e)
		})
	}
}

// enter counts c among the handshakes under way; nil if the acceptor is closed.
func (a *acceptor) enter(c net.Conn) *list.Element {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil
	}
	if a.conns.Len() >= maxHandshakes {
		_ = a.conns.Remove(a.conns.Front()).(net.Conn).Close()
	}
	return a.conns.PushBack(c)
}

// serve makes the handshake on c, and keeps the connection if its dialer may send.
func (a *acceptor) serve(c net.Conn) {
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(a.n.within(handshakeTime)))
	conn, h, err := a.n.serveHandshake(c)
	if err != nil {
		if auth.IsUnproved(err) {
			err = van.ErrUnauthenticated
		}
		a.n.rarely("handshake: "+logx.PeerKind(err)).Warn("a connection for data is refused", "from", c.RemoteAddr(), "err", err)
		return
	}
	fd, err := socketOf(c)
	if err != nil {
		a.n.say(conn, verdictClosed)
		return
	}
	_ = a.n.tune(fd)
	if !waits(fd) {
		a.n.say(conn, verdictClosed)
		_ = unix.Close(fd)
		return
	}
	in := &inConn{n: a.n, fd: fd, tls: detach(conn, fd, false)}
	in.From, in.Process = h.id, processOf(h.own)
	verdict := a.peers.enter(in, &h)
	a.n.say(conn, verdict)
	if verdict != verdictYes {
		_ = unix.Close(fd)
	}
}

// waits reports whether the dialer still waits for the admission. If the dialer's time limit has passed, its process may have a newer
// connection, which the admission would end.
func waits(fd int) bool {
	var b [1]byte
	_, _, err := unix.Recvfrom(fd, b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
	return err == unix.EAGAIN
}

// close ends all handshakes.
func (a *acceptor) close() {
	if a.listener == nil {
		return
	}
	_ = a.listener.Close()
	a.mu.Lock()
	a.closed = true
	for e := a.conns.Front(); e != nil; e = e.Next() {
		_ = e.Value.(net.Conn).Close()
	}
	a.mu.Unlock()
	a.wg.Wait()
}

// socketOf returns a descriptor of its own for the socket of c.
func socketOf(c net.Conn) (fd int, err error) {
	if e := encryptedOf(c); e != nil {
		c = e.under.Conn
	}
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		return -1, err
	}
	e := raw.Control(func(s uintptr) { fd, err = unix.FcntlInt(s, unix.F_DUPFD_CLOEXEC, 0) })
	return fd, errors.Join(e, err)
}
