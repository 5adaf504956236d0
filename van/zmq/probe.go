package zmq

// Probes of the addresses of peers, and replies to processes that this node cannot connect to.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"syscall"
	"time"

	zmq4 "github.com/pebbe/zmq4"

	"github.com/stepaf/stepaf-go/van"
)

// A listening libzmq starts each connection with a signature of 10 bytes, without waiting for the other side.
const (
	signature     = 10
	signatureTime = time.Second // a missing signature is no evidence: the process may be stopped or busy
)

// Probe implements van.Prober.
func (v *zvan) Probe(ctx context.Context, peer van.Node) error {
	if v.curve != nil && hasSecret(ctx, v.zctx, &v.shared, &peer) {
		return nil
	}
	network, addr := "tcp4", net.JoinHostPort(peer.Hostname, strconv.Itoa(peer.Port))
	if v.cfg.Local {
		network, addr = "unix", localPath(peer.Port)
	}
	c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	if err != nil {
		return dialError(err)
	}
	defer c.Close()
	if err := c.SetReadDeadline(time.Now().Add(signatureTime)); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = c.SetReadDeadline(time.Unix(1, 0)) })()
	var b [signature]byte
	switch n, err := io.ReadFull(c, b[:]); {
	case errors.Is(err, os.ErrDeadlineExceeded) && n == 0:
		return fmt.Errorf("%w: what listens there sends no greeting of ZMQ within %s", van.ErrTimeout, signatureTime)
	case errors.Is(err, syscall.ECONNRESET):
		return syscall.ECONNRESET
	case err != nil || b[0] != 0xff || b[signature-1]&1 == 0:
		return fmt.Errorf("%w greeting: what listens there is no node over ZMQ", van.ErrMalformed)
	}
	return nil
}

// proofTime is how long the handshake of hasSecret may take.
const proofTime = 500 * time.Millisecond

// hasSecret reports whether a process with the cluster's secret listens at the peer's address. It completes the handshake, since the peer
// counts an incomplete one as an attempt without the secret.
func hasSecret(ctx context.Context, zctx *zmq4.Context, n *shared, peer *van.Node) bool {
	z, err := zctx.NewSocket(zmq4.DEALER)
	if err != nil {
		return false
	}
	defer func() { _ = z.Close() }()
	if errors.Join(tune(z), z.SetReconnectIvl(-1), n.curve.client(z)) != nil {
		return false
	}
	mon, err := n.newMonitor(zctx, z, connEvents)
	if err != nil {
		return false
	}
	defer mon.close()
	if z.Connect(n.endpoint(peer)) != nil {
		return false
	}
	made := make(chan bool, 1)
	go mon.follow(func(event zmq4.Event, _ int) {
		if event != zmq4.EVENT_CONNECTED {
			select {
			case made <- event == zmq4.EVENT_HANDSHAKE_SUCCEEDED:
			default: // an event after the first one, or the end of the monitor
			}
		}
	})
	select {
	case ok := <-made:
		return ok
	case <-time.After(n.proofs.limit):
	case <-ctx.Done():
	}
	return false
}

// dialError returns the errno in err, the error of a failed attempt to connect. Without an errno it returns err.
func dialError(err error) error {
	if e, ok := errors.AsType[syscall.Errno](err); ok {
		return e
	}
	if e, ok := errors.AsType[net.Error](err); ok && e.Timeout() {
		return syscall.ETIMEDOUT
	}
	return err
}

// newcomerID is the routing id of a process that has no id yet, toward a scheduler of this library.
func newcomerID(incarnation uint32) string { return "new." + digits(incarnation) }

// Reply implements van.Prober.
func (v *zvan) Reply(incarnation uint32, msg *van.Message) error {
	meta := make([]byte, msg.EncodedLen())
	err := msg.EncodeTo(meta)
	if err == nil {
		err = v.router.send(&route{dest: newcomerID(incarnation), self: v.nameTo(incarnation), acct: newAccount()}, meta, msg)
	}
	if err != nil {
		return v.sendError(msg, nil, err)
	}
	v.stats.sent(len(meta))
	return nil
}
