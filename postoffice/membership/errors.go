package membership

// The errors of a refused and of a lost node.

import (
	"errors"

	"github.com/stepaf/stepaf-go/van"
)

// ErrRefused is wrapped by the error of Failed when the scheduler refuses this node.
var ErrRefused = errors.New("refused by the scheduler")

// lossError says why a node is considered dead. It wraps van.ErrPeerLost and the
// transport's error, if there is one.
type lossError struct {
	text  string
	cause error
	cut   bool // a connection broke: the node need not be dead
}

func (e *lossError) Error() string { return e.text }

func (e *lossError) Unwrap() []error {
	if e.cause == nil {
		return []error{van.ErrPeerLost}
	}
	return []error{van.ErrPeerLost, e.cause}
}
