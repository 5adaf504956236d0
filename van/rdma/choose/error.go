package choose

import (
	"errors"
	"strconv"

	"github.com/stepaf/stepaf-go/van/env"
)

// Errors that callers tell apart with errors.Is.
var (
	// ErrNoDevice: there is no RDMA device, or none with that address.
	ErrNoDevice = errors.New("no RDMA device")
	// ErrPortDown: the port is not active.
	ErrPortDown = errors.New("RDMA port is not active")
	// ErrNoAddress: there is no IPv4 address.
	ErrNoAddress = errors.New("no IPv4 address")
	// ErrNoInterface: no interface has that name, or several begin so.
	ErrNoInterface = errors.New("no such interface")
)

// Error says which setting asked for what, why that cannot be had, and what there
// is.
type Error struct {
	Setting string // "DMLC_INTERFACE"; "" when nothing is set
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
