package rdma

import (
	"errors"
	"fmt"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// This file owns the errors that several files use.

// asLost wraps err in van.ErrPeerLost, once.
func asLost(err error) error {
	if errors.Is(err, van.ErrPeerLost) {
		return err
	}
	return fmt.Errorf("%w: %w", van.ErrPeerLost, err)
}

func statusError(s verbs.Status, what string, q int) error {
	return fmt.Errorf("%w: %s %d: %s", van.ErrPeerLost, what, q, s)
}

// errUnacknowledged: the peer has not acknowledged a write. Its process has ended, or its host is too busy.
var errUnacknowledged = fmt.Errorf("%w", van.ErrPeerLost)

// peerRefused reports whether the peer has refused a work request. It has received neither that request nor any later one, and all
// earlier ones have completed.
func peerRefused(s verbs.Status) bool {
	return s == verbs.StatusRemoteInvalid || s == verbs.StatusRemoteAccess || s == verbs.StatusRemoteOp
}
