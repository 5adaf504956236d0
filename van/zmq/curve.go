package zmq

// Authentication and encryption of connections: CurveZMQ with keys that are derived from the cluster's secret.
//
//  1. The ROUTER is a CURVE server. Its key pair is derived from the secret, the same for
//     all nodes of a cluster.
//  2. A DEALER must know the ROUTER's public key to write a valid first command. The key
//     never travels, so only a process that knows the secret can write that command.
//  3. The ROUTER's answer requires the private key. It shows the DEALER that the ROUTER's process
//     knows the secret, too.
//
// libzmq closes a connection whose handshake fails before this package decodes any of its bytes. Each
// connection has fresh session keys, so a replayed handshake is useless.

import (
	"errors"
	"fmt"

	zmq4 "github.com/pebbe/zmq4"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
)

// curve holds the keys of CurveZMQ. With a nil *curve, connections are plain.
type curve struct{ serverPublic, serverPrivate, clientPublic, clientPrivate string }

// newCurve derives the keys. It returns nil if the cluster does not require proofs.
func newCurve(keys *auth.Keys) (*curve, error) {
	if !keys.Required() {
		return nil, nil
	}
	if !zmq4.HasCurve() {
		major, minor, patch := zmq4.Version()
		return nil, fmt.Errorf("zmq: %w: libzmq %d.%d.%d was built without CURVE, which a cluster secret (STEPAF_SECRET_FILE) needs; "+
			"install a libzmq with libsodium, or set STEPAF_AUTH=off", van.ErrInvalid, major, minor, patch)
	}
	serverPublic, serverPrivate, err := keys.Curve("zmq server")
	if err != nil {
		return nil, err
	}
	clientPublic, clientPrivate, err := keys.Curve("zmq client")
	if err != nil {
		return nil, err
	}
	return &curve{string(serverPublic[:]), string(serverPrivate[:]), string(clientPublic[:]), string(clientPrivate[:])}, nil
}

// server makes z, the ROUTER, accept only peers that know the secret.
func (c *curve) server(z *zmq4.Socket) error {
	if c == nil {
		return nil
	}
	return errors.Join(z.SetCurveServer(1), z.SetCurveSecretkey(c.serverPrivate))
}

// client makes z, a DEALER, connect only to peers that know the secret.
func (c *curve) client(z *zmq4.Socket) error {
	if c == nil {
		return nil
	}
	return errors.Join(z.SetCurveServerkey(c.serverPublic), z.SetCurvePublickey(c.clientPublic), z.SetCurveSecretkey(c.clientPrivate))
}

// handshakeFailed are the events of a failed handshake.
const handshakeFailed = zmq4.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq4.EVENT_HANDSHAKE_FAILED_AUTH | zmq4.EVENT_HANDSHAKE_FAILED_NO_DETAIL

// mechanismMismatch is the value of EVENT_HANDSHAKE_FAILED_PROTOCOL if only one end uses CURVE.
const mechanismMismatch = 0x11000002

// The causes of failed handshakes, as each end sees them. They disclose nothing of the secret.
var (
	errNoSecretThere = fmt.Errorf("%w: it has no cluster secret, or STEPAF_AUTH is not require there", van.ErrUnauthenticated)
	errNoSecretHere  = fmt.Errorf("%w: it requires the cluster's secret, which this node does not have (STEPAF_SECRET_FILE)", van.ErrUnauthenticated)
	errNotRequired   = fmt.Errorf("%w: it requires the cluster's secret (STEPAF_AUTH=require), and STEPAF_AUTH is not require here", van.ErrUnauthenticated)
	errOtherSecret   = fmt.Errorf("%w: its secret (STEPAF_SECRET_FILE) or its STEPAF_CLUSTER_ID is another one", van.ErrUnauthenticated)
	errCutOff        = fmt.Errorf("%w: it ended the handshake before it proved the cluster's secret", van.ErrUnauthenticated)
	errNotZMTP       = fmt.Errorf("%w: it does not speak ZMTP 3", van.ErrUnauthenticated)
	errMaybeSecret   = fmt.Errorf("%w: it ended the handshake; its secret (STEPAF_SECRET_FILE) may be missing or another one, or its STEPAF_CLUSTER_ID another one", van.ErrUnauthenticated)
)

// handshakeError returns the cause of a failed handshake for libzmq's event and its value. accepted reports that the peer
// connected to this node. The result is nil if the peer of a plain connection broke it.
func (n *shared) handshakeError(event zmq4.Event, value int, accepted bool) error {
	switch plain := n.curve == nil; {
	case event == zmq4.EVENT_HANDSHAKE_FAILED_NO_DETAIL && plain:
		return nil
	case event == zmq4.EVENT_HANDSHAKE_FAILED_NO_DETAIL && accepted:
		return errCutOff
	case event == zmq4.EVENT_HANDSHAKE_FAILED_NO_DETAIL: // the peer rejects this node's proof without an error message
		return errMaybeSecret
	case event == zmq4.EVENT_HANDSHAKE_FAILED_PROTOCOL && value == mechanismMismatch && plain && n.cfg.HasSecret():
		return errNotRequired
	case event == zmq4.EVENT_HANDSHAKE_FAILED_PROTOCOL && value == mechanismMismatch && plain:
		return errNoSecretHere
	case event == zmq4.EVENT_HANDSHAKE_FAILED_PROTOCOL && value == mechanismMismatch:
		return errNoSecretThere
	case plain:
		return fmt.Errorf("%w: ZMTP error %#x in the handshake", van.ErrMalformed, value)
	}
	return errOtherSecret
}
