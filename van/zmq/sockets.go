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

// routerQueue is how many messages of one peer libzmq receives ahead of this node. More
// stay in the system's buffers, and with their sender.
const routerQueue = 128

// maxFrame is the longest frame that is received: lengths are signed 32-bit numbers.
const maxFrame = math.MaxInt32

// tune sets what every socket has in common. Dead hosts are noticed by TCP
// keep-alives, since ZMTP heartbeats are unknown to the libzmq of the original.
func tune(z *zmq4.Socket) error {
	return errors.Join(z.SetLinger(0), z.SetMaxmsgsize(maxFrame), z.SetTcpKeepalive(1), z.SetTcpKeepaliveIdle(10), z.SetTcpKeepaliveIntvl(3),
		z.SetTcpKeepaliveCnt(3))
}

// tuneNative sets what a connection to another node of this library has besides: also
// heartbeats, unless limit is 0.
func tuneNative(z *zmq4.Socket, every, limit time.Duration) error {
	// An empty message, so that the peer knows at once whose connection it is.
	errs := []error{z.SetProbeRouter(1)}
	if limit > 0 {
		// libzmq's own threads ask and answer, so that neither a busy process nor
		// Python's lock looks like a dead one. No TTL: the peer would end a connection
		// that it does not read for a while. libzmq must not stop to read the connection: it
		// would not see the answers to its heartbeats, and version 4.3.4 ends the process if
		// the peer goes meanwhile (its issue 4364). So its queue has no end: a server sends
		// its worker no more than that has asked for.
		errs = append(errs, z.SetRcvhwm(0), z.SetHeartbeatIvl(every), z.SetHeartbeatTimeout(limit), z.SetTcpMaxrt(limit))
	}
	return errors.Join(errs...)
}

// noIPv6 refuses an address that libzmq would not use: it binds none as this host's, and
// connects to none without a word.
func noIPv6(host string) error {
	if ip := net.ParseIP(host); ip != nil && ip.To4() == nil {
		return fmt.Errorf("%w: %s is an IPv6 address, want an IPv4 address, which is all that zmq uses here", van.ErrInvalid, host)
	}
	return nil
}

// addressError gives libzmq's errno its usual Go type.
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

// socketError is err of a new socket of libzmq. "Too many" is a descriptor that it cannot have,
// or the limit of its own, which is looked at before a node starts.
func socketError(err error) error {
	if errors.Is(err, zmq4.Errno(syscall.EMFILE)) {
		return fmt.Errorf("a socket of libzmq: %w (unless there are as many as BYTEPS_ZMQ_MAX_SOCKET allows)", syscall.EMFILE)
	}
	return err
}
