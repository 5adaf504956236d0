package verbs

import (
	"strings"
	"syscall"
)

// Error is what the system said to an operation. errors.Is finds the errno in it.
type Error struct {
	Op     string // "bind", "create a queue pair"
	Device string // "" when no device is known
	What   string // what it was done to: an address, a size; may be empty
	Errno  syscall.Errno
	Hint   string // what to do; may be empty
}

// Error names all of it.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("rdma: ")
	if e.Device != "" {
		b.WriteString(e.Device + ": ")
	}
	b.WriteString(e.Op)
	if e.What != "" {
		b.WriteString(" " + e.What)
	}
	b.WriteString(": " + e.Errno.Error())
	if e.Hint != "" {
		b.WriteString(" (" + e.Hint + ")")
	}
	return b.String()
}

// Unwrap is the errno.
func (e *Error) Unwrap() error { return e.Errno }
