package rdma

import (
	"errors"
	"fmt"

	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

// This file owns the errors that several files speak of.

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

// errUnacknowledged: nobody has acknowledged what was written: the peer has gone, or its
// host is too busy.
var errUnacknowledged = fmt.Errorf("%w", van.ErrPeerLost)

// peerRefused tells whether the peer has said no: it has not received this work request, nor
// those behind it. Those before it have completed.
func peerRefused(s verbs.Status) bool {
	return s == verbs.StatusRemoteInvalid || s == verbs.StatusRemoteAccess || s == verbs.StatusRemoteOp
}
