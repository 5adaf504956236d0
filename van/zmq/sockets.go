package zmq

// Options and errors of libzmq's sockets.

import (
	"errors"
	"fmt"
	"math"
	"net"
	"syscall"
	"time"

	zmq4 "github.com/pebbe/zmq4"

	"github.com/stepaf/stepaf-go/van"
)

func wrap(name string, value int, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("zmq: %s=%d: %w", name, value, err)
}

// routerQueue is how many messages of one peer libzmq receives ahead of this node. Further messages
// stay in the system's buffers and at their sender.
const routerQueue = 128

// maxFrame is the maximum length of a received frame: lengths are signed 32-bit numbers.
const maxFrame = math.MaxInt32

// tune sets the options of every socket. TCP keep-alives detect dead hosts, since the libzmq of the original does not
// know ZMTP heartbeats.
func tune(z *zmq4.Socket) error {
	return errors.Join(z.SetLinger(0), z.SetMaxmsgsize(maxFrame), z.SetTcpKeepalive(1), z.SetTcpKeepaliveIdle(10), z.SetTcpKeepaliveIntvl(3),
		z.SetTcpKeepaliveCnt(3))
}

// tuneNative sets the additional options of a connection to another node of this library, including
// heartbeats unless limit is 0.
func tuneNative(z *zmq4.Socket, every, limit time.Duration) error {
	// libzmq sends an empty message first, so that the peer can assign the connection to this node at once.
	errs := []error{z.SetProbeRouter(1)}
	if limit > 0 {
		// libzmq's own threads send and answer heartbeats, so a process that is busy or holds Python's lock does not look
		// dead. No TTL is set: the peer would close a connection that it does not read for a while. libzmq must not stop
		// reading the connection: it would miss the answers to its heartbeats, and version 4.3.4 aborts the process if the
		// peer disconnects meanwhile (its issue 4364). The receive queue is therefore unlimited: a server sends its worker
		// only requested data.
		errs = append(errs, z.SetRcvhwm(0), z.SetHeartbeatIvl(every), z.SetHeartbeatTimeout(limit), z.SetTcpMaxrt(limit))
	}
	return errors.Join(errs...)
}

// noIPv6 returns an error for an IPv6 address. libzmq cannot bind one, and does not connect to
// one and reports no error.
func noIPv6(host string) error {
	if ip := net.ParseIP(host); ip != nil && ip.To4() == nil {
		return fmt.Errorf("%w: %s is an IPv6 address, want an IPv4 address, which is all that zmq uses here", van.ErrInvalid, host)
	}
	return nil
}

// addressError converts libzmq's errno to the usual Go type.
func addressError(err error) error {
	var z zmq4.Errno
	if !errors.As(err, &z) {
		return err
	}
	switch e := syscall.Errno(z); e {
	case syscall.EADDRINUSE:
		return fmt.Errorf("%w: another process listens there", e)
	case syscall.EADDRNOTAVAIL, syscall.ENODEV:
		return fmt.Errorf("%w: not an address of this host", syscall.EADDRNOTAVAIL)
	default:
		return e
	}
}

// socketError explains err, the error of a new socket. EMFILE means that the process has no descriptor left, or that
// libzmq's own limit of sockets is reached; the latter is checked before a node starts.
func socketError(err error) error {
	if errors.Is(err, zmq4.Errno(syscall.EMFILE)) {
		return fmt.Errorf("a socket of libzmq: %w (unless there are as many as BYTEPS_ZMQ_MAX_SOCKET allows)", syscall.EMFILE)
	}
	return err
}
