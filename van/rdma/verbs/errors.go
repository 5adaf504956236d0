package verbs

import "syscall"

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
	s := subject(e.Op, e.Device, e.What) + ": " + e.Errno.Error()
	if e.Hint != "" {
		s += " (" + e.Hint + ")"
	}
	return s
}

// subject says what failed, on which device, and with what, which both may be empty.
func subject(op, device, what string) string {
	if device != "" {
		op = device + ": " + op
	}
	if what != "" {
		op += " " + what
	}
	return "rdma: " + op
}

// Unwrap is the errno.
func (e *Error) Unwrap() error { return e.Errno }
