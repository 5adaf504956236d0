package env

// The error of a setting.

import (
	"errors"
	"strconv"
)

// ErrInvalid is van.ErrInvalid, which every Error matches.
var ErrInvalid = errors.New("invalid argument")

// Error is one setting that cannot be used. Load and Validate join all that they
// find with errors.Join; errors.As finds the first.
type Error struct {
	Name  string // the variable, spelt as it was set, or "rank"
	Value string // its value; "" means that it is not set
	Why   string // other values that matter; may be empty
	Want  string // the allowed values
}

// Error gives one line: NAME="value" (why): want what.
func (e *Error) Error() string {
	text := e.Name + "=" + strconv.Quote(e.Value) // on one line for any value
	if e.Value == "" {
		text = e.Name + " is not set"
	}
	if e.Why != "" {
		text += " (" + e.Why + ")"
	}
	return text + ": want " + e.Want
}

// Unwrap makes errors.Is(err, van.ErrInvalid) true.
func (e *Error) Unwrap() error { return ErrInvalid }
