package auth

import (
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/internal/logx"
)

// The causes for which a peer counts as unauthenticated.
var (
	// ErrNoSecret: the peer has sent no proof.
	ErrNoSecret = errors.New("the peer has no secret, or an older version")
	// ErrOtherSecret: the peer has sent a wrong proof.
	ErrOtherSecret = errors.New("the peer's STEPAF_SECRET or STEPAF_CLUSTER_ID differs")
	// ErrSecretThere: the peer asks for a proof, and this node has no keys.
	ErrSecretThere = errors.New("the peer has a secret, this node has none (STEPAF_SECRET_FILE, STEPAF_SECRET)")
)

// IsUnproved reports whether err wraps ErrNoSecret, ErrOtherSecret or ErrSecretThere.
func IsUnproved(err error) bool {
	return errors.Is(err, ErrNoSecret) || errors.Is(err, ErrOtherSecret) || errors.Is(err, ErrSecretThere)
}

// Explain returns the text of a refusal with err, for the refused peer.
// It does not depend on the secret.
func Explain(err error) string {
	switch {
	case errors.Is(err, ErrNoSecret):
		return "it requires a proof of the cluster's secret, and this node has no secret, or an older version"
	case errors.Is(err, ErrOtherSecret):
		return "its STEPAF_SECRET or STEPAF_CLUSTER_ID differs from this node's"
	case errors.Is(err, ErrSecretThere):
		return "it has no secret, or STEPAF_AUTH is off there, and this node has one"
	}
	return err.Error()
}

// Guard decides about the unauthenticated peers of one transport: it refuses or admits them, and
// counts them. It is safe for concurrent use.
type Guard struct {
	Keys *Keys
	Log  *slog.Logger

	n    atomic.Uint64
	said logx.Causes
}

// Unauthenticated decides about a peer that is unauthenticated because of why. With STEPAF_AUTH=require
// it returns the error to refuse the peer with, and the caller logs the refusal. Otherwise
// it logs the admission and returns nil. Each cause is logged for the 1st, 2nd, 4th, ...
// peer.
func (g *Guard) Unauthenticated(why error, peer ...any) error {
	g.n.Add(1)
	if g.Keys.Required() {
		return fmt.Errorf("%w; STEPAF_AUTH is require here", why)
	}
	g.said.Log(g.Log, logx.Kind(why)).Warn("a peer without proof of the cluster's secret is admitted: STEPAF_AUTH is warn", append(peer, "why", why)...)
	return nil
}

// Refuse counts a peer that is refused in any mode, because it sent a message that no peer
// with the secret sends.
func (g *Guard) Refuse() { g.n.Add(1) }

// Ended counts a peer whose handshake has ended with err before it has proved itself, if a proof is required. It does not count
// the results of Unauthenticated again.
func (g *Guard) Ended(err error) {
	if g.Keys.Required() && !IsUnproved(err) {
		g.n.Add(1)
	}
}

// Count is the number of unauthenticated peers: van.Stats.Unauthenticated.
func (g *Guard) Count() uint64 { return g.n.Load() }
