package env

// The error of a setting.

import (
	"errors"
	"strconv"
	"strings"
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
	var b strings.Builder
	b.WriteString(e.Name)
	if e.Value == "" {
		b.WriteString(" is not set")
	} else {
		b.WriteString("=" + strconv.Quote(e.Value)) // on one line for any value
	}
	if e.Why != "" {
		b.WriteString(" (" + e.Why + ")")
	}
	b.WriteString(": want " + e.Want)
	return b.String()
}

// Unwrap makes errors.Is(err, van.ErrInvalid) true.
func (e *Error) Unwrap() error { return ErrInvalid }
