package core

// Which exception of Python an error becomes.

import (
	"context"
	"errors"

	"github.com/stepaf/stepaf-go/van"
)

// Class is a subclass of fserver_lib.Error.
type Class int

// The classes.
const (
	Runtime    Class = iota // Error itself
	Timeout                 // TimeoutError: a limit passed
	Connection              // ConnectionError: a peer or the scheduler is lost
	Value                   // ValueError: an argument or a variable makes no sense
)

// ClassOf is the class that an error becomes in Python.
func ClassOf(err error) Class {
	switch {
	case errors.Is(err, van.ErrTimeout), errors.Is(err, context.DeadlineExceeded):
		return Timeout
	case errors.Is(err, van.ErrPeerLost), errors.Is(err, van.ErrUnknownPeer):
		return Connection
	case errors.Is(err, van.ErrInvalid), errors.Is(err, ErrUnknownHandler):
		return Value
	}
	return Runtime
}
