package core

// The Python exception of each error.

import (
	"context"
	"errors"

	"github.com/stepaf/stepaf-go/van"
)

// Class is a class of exceptions: fserver_lib.Error, a subclass of it, or fserver_lib.Finished.
type Class int

// The classes.
const (
	Runtime    Class = iota // Error itself
	Timeout                 // TimeoutError: a limit passed
	Connection              // ConnectionError: a peer or the scheduler is lost
	Value                   // ValueError: an argument or a variable is invalid
	Finished                // Finished: the loop of a server is over
)

// ClassOf is the class that an error becomes in Python.
func ClassOf(err error) Class {
	switch {
	case errors.Is(err, ErrLoopOver): // it may wrap the cause of a worker's loss
		return Finished
	case errors.Is(err, van.ErrTimeout), errors.Is(err, context.DeadlineExceeded):
		return Timeout
	case errors.Is(err, van.ErrPeerLost), errors.Is(err, van.ErrUnknownPeer):
		return Connection
	case errors.Is(err, van.ErrInvalid), errors.Is(err, ErrUnknownHandler):
		return Value
	}
	return Runtime
}
