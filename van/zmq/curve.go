package zmq

// Proof and encryption of connections: CurveZMQ with keys that are derived from the cluster's secret.
//
//  1. The ROUTER is a CURVE server. Its key pair is derived from the secret, the same for
//     all nodes of a cluster.
//  2. A DEALER must know the ROUTER's public key to write a valid first command. The key
//     never travels, so only a process that knows the secret can write that command.
//  3. The ROUTER's answer can only be made with the private key, so that the DEALER knows
//     that its peer knows the secret, too.
//
// libzmq ends a connection whose handshake fails, before anything of it is decoded. Each
// connection has fresh session keys: a recorded handshake opens nothing.

import (
	"errors"
	"fmt"

	zmq4 "github.com/pebbe/zmq4"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/auth"
)

// curve holds the keys of CurveZMQ. A nil *curve uses none: connections are plain.
type curve struct{ serverPublic, serverPrivate, clientPublic, clientPrivate string }

// newCurve derives the keys, nil if the cluster does not require proofs.
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

// Events of a handshake that has failed.
const handshakeFailed = zmq4.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq4.EVENT_HANDSHAKE_FAILED_AUTH | zmq4.EVENT_HANDSHAKE_FAILED_NO_DETAIL

// mechanismMismatch is the value of EVENT_HANDSHAKE_FAILED_PROTOCOL when one end speaks CURVE and the other does not.
const mechanismMismatch = 0x11000002

// Why handshakes fail, for each end. They name nothing of the secret.
var (
	errNoSecretThere = fmt.Errorf("%w: it has no cluster secret, or STEPAF_AUTH is not require there", van.ErrUnauthenticated)
	errNoSecretHere  = fmt.Errorf("%w: it requires the cluster's secret, which this node does not have (STEPAF_SECRET_FILE)", van.ErrUnauthenticated)
	errNotRequired   = fmt.Errorf("%w: it requires the cluster's secret (STEPAF_AUTH=require), and STEPAF_AUTH is not require here", van.ErrUnauthenticated)
	errOtherSecret   = fmt.Errorf("%w: its secret (STEPAF_SECRET_FILE) or its STEPAF_CLUSTER_ID is another one", van.ErrUnauthenticated)
	errMaybeSecret   = fmt.Errorf("%w: it ended the handshake; its secret (STEPAF_SECRET_FILE) may be missing or another one, or its STEPAF_CLUSTER_ID another one", van.ErrUnauthenticated)
)

// handshakeError is that of the node's keys. A node that has a secret and does not require it (STEPAF_AUTH) says so.
func (n *shared) handshakeError(event zmq4.Event, value int, accepted bool) error {
	err := n.curve.handshakeError(event, value, accepted)
	if errors.Is(err, errNoSecretHere) && n.cfg.HasSecret() {
		return errNotRequired
	}
	return err
}

// handshakeError says why a handshake failed, by libzmq's event and its value. accepted tells on which side: the peer
// connected to this node. It returns nil if the event says nothing of a proof: the peer broke the connection.
func (c *curve) handshakeError(event zmq4.Event, value int, accepted bool) error {
	switch {
	case event == zmq4.EVENT_HANDSHAKE_FAILED_NO_DETAIL && (c == nil || accepted):
		return nil
	case event == zmq4.EVENT_HANDSHAKE_FAILED_NO_DETAIL: // the peer refuses this node's proof without a word
		return errMaybeSecret
	case event == zmq4.EVENT_HANDSHAKE_FAILED_PROTOCOL && value == mechanismMismatch && c == nil:
		return errNoSecretHere
	case event == zmq4.EVENT_HANDSHAKE_FAILED_PROTOCOL && value == mechanismMismatch:
		return errNoSecretThere
	case c == nil:
		return fmt.Errorf("%w: ZMTP error %#x in the handshake", van.ErrMalformed, value)
	}
	return errOtherSecret
}
