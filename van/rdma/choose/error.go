package choose

import (
	"errors"
	"strconv"

	"github.com/stepaf/stepaf-go/van/env"
)

// Errors that callers tell apart with errors.Is.
var (
	// ErrNoDevice: there is no RDMA device, or none has the address.
	ErrNoDevice = errors.New("no RDMA device")
	// ErrPortDown: the port is not active.
	ErrPortDown = errors.New("RDMA port is not active")
	// ErrNoAddress: the port or interface has no IPv4 address.
	ErrNoAddress = errors.New("no IPv4 address")
	// ErrNoInterface: no interface has that name, or several begin with it.
	ErrNoInterface = errors.New("no such interface")
)

// Error says which setting cannot be satisfied, why, and which ports and interfaces exist.
type Error struct {
	Setting string // "DMLC_INTERFACE"; "" if nothing is set
	Value   string
	Problem string
	Have    string
	Err     error // one of the above
}

// Error returns everything on one line.
func (e *Error) Error() string {
	s := e.Problem
	if e.Setting != "" {
		s = e.Setting + "=" + strconv.Quote(e.Value) + ": " + s
	}
	if e.Have != "" {
		s += "; " + e.Have
	}
	return s
}

// Unwrap returns the sentinel, and van.ErrInvalid if a setting names a device or address that does not exist.
func (e *Error) Unwrap() []error {
	if e.Setting == "" {
		return []error{e.Err}
	}
	return []error{e.Err, env.ErrInvalid}
}
