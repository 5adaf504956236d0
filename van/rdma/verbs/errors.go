package verbs

import "syscall"

// Error is an error of the system. errors.Is finds the errno in it.
type Error struct {
	Op     string // "bind", "create a queue pair"
	Device string // "" if not known
	What   string // the object, for example an address or a size; may be empty
	Errno  syscall.Errno
	Hint   string // what to do about it; may be empty
}

// Error returns all fields in one line.
func (e *Error) Error() string {
	s := subject(e.Op, e.Device, e.What) + ": " + e.Errno.Error()
	if e.Hint != "" {
		s += " (" + e.Hint + ")"
	}
	return s
}

// subject names the failed operation, the device and the object. The last two may be empty.
func subject(op, device, what string) string {
	if device != "" {
		op = device + ": " + op
	}
	if what != "" {
		op += " " + what
	}
	return "rdma: " + op
}

// Unwrap returns the errno.
func (e *Error) Unwrap() error { return e.Errno }
