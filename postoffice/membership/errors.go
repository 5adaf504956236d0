package membership

import (
	"errors"

	"github.com/stepaf/stepaf-go/van"
)

// ErrRefused is wrapped by the error of Failed when the scheduler has no place
// for this node.
var ErrRefused = errors.New("refused by the scheduler")

// lossError says why a node is held for dead. It is van.ErrPeerLost, and its
// cause if the transport named one.
type lossError struct {
	text  string
	cause error
}

func (e *lossError) Error() string { return e.text }

func (e *lossError) Unwrap() []error {
	if e.cause == nil {
		return []error{van.ErrPeerLost}
	}
	return []error{van.ErrPeerLost, e.cause}
}
